"""One command for a machine with a GPU: is everything right there, and how fast?

    PYTHONPATH=.:kernels python -m benchmarks.gpu_check [--output DIR] [--minutes 7] [--parts …] [--dry-run]

In the order of what matters most, each part with its share of the minutes and in a process of its own:

    correctness   a training step in bf16, and the tests of every kernel, on the card
    kernels       each operation whose tests did not fail, against its floor, its target and its peers
    pretraining   tokens/s and MFU of BERT-Large and Base at 128, 512 and Wikipedia's length mix
    inference     batches of 1 to 256 texts of mixed lengths
    training      pre-training on the documentation that Python carries; the loss curve is kept
    tuning        launch configurations that fastbert_kernels/tuned/<gpu>.json has no row for yet

Rows are appended to `<output>/gpu-<name>.jsonl` one by one: a part that fails or is ended loses what it had
not finished, and no other. Time that a part leaves goes to the next ones; what the time does not suffice for
is named. The exit status is 0 only if every test passed, every part ran and every row could be measured.

--dry-run does all of it at tiny sizes in Triton's interpreter, on a CPU: nothing is timed or written.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import environment, targets

if TYPE_CHECKING:
    from benchmarks.gpu.setting import Operation, Setting
    from benchmarks.task import Case, Timer

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
FAILURES = "gpu-check-failures.txt"
# part -> seconds of the default seven minutes
PARTS = {
    "correctness": 110,
    "kernels": 60,
    "pretraining": 80,
    "inference": 25,
    "training": 120,
    "tuning": 25,
}
GRACE_S = 10  # after its time a part may finish the row that it is at
DRY_TRAINING_S = 3.0


class Deadline:
    """The minutes that were given, and what they did not suffice for."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    def left_s(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def has_time(self, name: str) -> bool:
        """Whether something new may begin; if not, its name is remembered."""
        if self.left_s() == 0.0:
            self.left_out.append(name)
            return False
        return True


def measure(
    operations: list[Operation],
    setting: Setting,
    clocks: dict[str, Timer],
    deadline: Deadline,
    common: dict[str, Any],
    file: Path | None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows, what went wrong); each row is appended to `file` as soon as it is there."""
    from benchmarks.gpu.operations import COPY, MATMUL
    from benchmarks.task import table

    rows, failures = [], []
    for operation in operations:
        for case in operation.cases(setting):
            if not deadline.has_time(case.name):
                continue
            row, problems = measure_case(case, clocks)
            free_memory()
            failures += [f"{case.name}: {problem}" for problem in problems]
            if row is None:
                continue
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
            for name, reason in row.get("refused", {}).items():
                print(f"    left out: {name} {reason}", flush=True)
            if case.name == MATMUL and setting.peak_tflops is None and "tflops" in row:
                setting = dataclasses.replace(setting, peak_tflops=max(row["tflops"].values()))
            if case.name == COPY and setting.peak_gb is None and "gb_per_s" in row:
                setting = dataclasses.replace(setting, peak_gb=max(row["gb_per_s"].values()))
            append(row | common, file)
    return rows, failures


def measure_case(case: Case, clocks: dict[str, Timer]) -> tuple[dict[str, Any] | None, list[str]]:
    """(the row, what is wrong with our own sides); no row if there is nothing to time."""
    from benchmarks.task import in_words, row_of

    torch.manual_seed(0)
    try:
        task = case.prepare()
        problems = task.failures()
        row = row_of(case.name, task, clocks[task.clock](task.sides)) if task.sides else None
    except Exception as error:  # one row's trouble is not the next one's
        row, problems = None, [in_words(error)]
    return row, problems


def free_memory() -> None:
    """What a row held, its autograd graphs among it, is not there for the next one to be without."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check(
    operations: tuple[Operation, ...], dry_run: bool, deadline: Deadline, report: Path
) -> list[Operation]:
    """Runs the tests of all operations, and returns the operations that passed theirs."""
    from benchmarks.gpu.checks import in_a_dry_run, run_tests, verdict

    wanted = tuple(map(in_a_dry_run, operations)) if dry_run else operations
    processes = 1 if dry_run else max(1, min(8, (os.cpu_count() or 2) // 2))
    print(f"tests, in {processes} processes ...", flush=True)
    begin = time.monotonic()
    outcomes = run_tests(wanted, processes, deadline.left_s(), report)
    problems = [verdict(operation, outcomes) for operation in wanted]
    for operation, said in zip(operations, problems):
        for problem in said:
            print(f"{operation.name}: {problem}", flush=True)
    counts = [sum(o.outcome == kind for o in outcomes.values()) for kind in ("passed", "skipped")]
    print(
        f"tests: {counts[0]} passed, {counts[1]} skipped, {len(outcomes) - sum(counts)} did not pass, "
        f"in {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    if report.exists():
        print(f"    tracebacks: {report}", flush=True)
    for reason in sorted({o.reason for o in outcomes.values() if o.outcome == "skipped"}):
        print(f"    skipped: {reason}", flush=True)
    return [operation for operation, said in zip(operations, problems) if not said]


@dataclass
class Report:
    """What the parts have found so far; each part is told that of the parts before."""

    passed: list[str] = field(default_factory=list)  # operations that may be timed
    not_timed: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Report:
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else cls()

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    def peaks(self, setting: Setting) -> Setting:
        """With the rates of the machine that a part has measured, where none are known."""
        for row in self.rows:
            if row["name"] == "matmul" and "tflops" in row and setting.peak_tflops is None:
                setting = dataclasses.replace(setting, peak_tflops=max(row["tflops"].values()))
            if row["name"] == "copy" and "gb_per_s" in row and setting.peak_gb is None:
                setting = dataclasses.replace(setting, peak_gb=max(row["gb_per_s"].values()))
        return setting


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.dry_run:
        # read where Triton is imported: nothing has imported it yet
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print("gpu_check times kernels on a GPU, but torch sees none: --dry-run needs none", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    if options.part is not None:
        run_part(options.part, options, options.report)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        run_parts(options, file, in_this_process if options.dry_run else in_a_process)
        report = Report.read(file)
    return conclusion(report)


def run_parts(
    options: argparse.Namespace, file: Path, run: Callable[[str, argparse.Namespace, Path, float], str]
) -> None:
    """Every part that was asked for until its share of the time is over; the next have what it leaves."""
    wanted = {name: share for name, share in PARTS.items() if name in options.parts}
    begin, given = time.monotonic(), 0.0
    for name, share in wanted.items():
        given += share / sum(wanted.values())
        seconds = begin + 60 * options.minutes * given - time.monotonic()
        print(f"\n==== {name}, {max(0.0, seconds):.0f} s", flush=True)
        problem = run(name, options, file, seconds) if seconds > 0 else "there was no time for it"
        if problem:
            report = Report.read(file)
            report.failures.append(f"part {name}: {problem}")
            report.write(file)
            print(f"part {name}: {problem}", flush=True)


def in_this_process(name: str, options: argparse.Namespace, file: Path, seconds: float) -> str:
    """What went wrong with the part as a whole, or ""."""
    from benchmarks.task import in_words

    try:
        run_part(name, argparse.Namespace(**{**vars(options), "minutes": seconds / 60}), file)
    except Exception as error:
        return in_words(error)
    return ""


def in_a_process(name: str, options: argparse.Namespace, file: Path, seconds: float) -> str:
    """The same in a process of its own, which may crash, hang, or lose its GPU to a bad access."""
    process = subprocess.Popen(child_command(name, options, file, seconds), cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        return f"ended {GRACE_S} s after its time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
        process.wait()
    return "" if status == 0 else f"exit status {status}"


def child_command(name: str, options: argparse.Namespace, file: Path, seconds: float) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name, "--report", str(file)]
    command += ["--minutes", str(seconds / 60), "--output", str(options.output), "--parts", *options.parts]
    return command + (["--commit", options.commit] if options.commit else [])


def run_part(name: str, options: argparse.Namespace, file: Path) -> None:
    """A part with what the parts before have found; `file` has the report, and gets it with this part's."""
    from benchmarks.gpu.operations import OPERATIONS
    from benchmarks.gpu.pretraining import inference_cases, pretraining_cases, step_problems, train_for
    from benchmarks.gpu.setting import Operation
    from fastbert.ops import backend

    deadline = Deadline(options.minutes)
    report = Report.read(file)
    setting, clocks, common, rows_file = dry_machine() if options.dry_run else machine(options)
    setting = report.peaks(setting)
    # without that part nobody says that an operation is wrong; its rows compare results all the same
    timed = [op for op in OPERATIONS if op.name in report.passed or "correctness" not in options.parts]

    def measured(cases: list[Case]) -> None:
        operation = Operation(name, (), lambda setting: iter(cases))
        # a whole step in the interpreter takes a minute, and the kernels have a part of their own
        with backend.use("eager" if options.dry_run else "auto"):
            keep(*measure([operation], setting, clocks, deadline, common, rows_file))

    def keep(rows: list[dict[str, Any]], failures: list[str]) -> None:
        report.rows += rows
        report.failures += failures

    try:
        if name == "correctness":
            print(", ".join(f"{key} {value}" for key, value in common.items()), flush=True)
            report.failures += step_problems(setting)
            passed = check(OPERATIONS, options.dry_run, deadline, options.output / FAILURES)
            report.passed = [operation.name for operation in passed]
            report.not_timed = [op.name for op in OPERATIONS if op.name not in report.passed]
        elif name == "kernels":
            keep(*measure(timed, setting, clocks, deadline, common, rows_file))
        elif name == "pretraining":
            measured(list(pretraining_cases(setting)))
        elif name == "inference":
            measured(list(inference_cases(setting)))
        elif name == "training":
            with backend.use("eager" if options.dry_run else "auto"):
                row = train_for(DRY_TRAINING_S if options.dry_run else deadline.left_s(), setting)
            report.rows.append(row)
            append(row | common, rows_file)
        elif not options.dry_run:
            tune(setting, timed, deadline, common, options.output)
    finally:
        report.left_out += deadline.left_out
        report.write(file)


def append(row: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")


def conclusion(report: Report) -> int:
    """Prints the table and what is missing; the exit status."""
    from benchmarks.task import table

    print("\n" + table([row for row in report.rows if "loss_curve" not in row]))
    for row in report.rows:
        if "loss_curve" in row:
            first, last = row["loss_curve"][0], row["loss_curve"][-1]
            losses = f"{first['mlm_loss']:.2f} -> {last['mlm_loss']:.2f}"
            print(
                f"{row['name']}: held-out MLM loss {losses} in {last['step']} steps, "
                f"{last['tokens']:,} tokens (unigram entropy {row['unigram_entropy']:.2f})"
            )
    print(verdicts(report.rows))
    for title, names in (
        ("not timed, because a test did not pass", report.not_timed),
        ("failed", report.failures),
        ("left out for want of time", report.left_out),
    ):
        for name in names:
            print(f"{title}: {name}")
    return 1 if report.not_timed or report.failures else 0


def verdicts(rows: list[dict[str, Any]]) -> str:
    """What was wanted of whole models beside what was reached, a line each; only for rows that are there."""
    limits = {"pretraining": targets.PRETRAINING_FACTORS, "inference": targets.INFERENCE_FACTORS}
    lines = []
    for row in rows:
        factors = row.get("times_faster_than", {})
        theirs = {side: factor for side, factor in factors.items() if side.startswith("transformers")}
        kind = row["name"].split("[")[0]
        wanted = limits.get(kind)
        if not theirs or wanted is None:
            continue
        for what, limit, reached in (
            ("transformers sdpa, padded", wanted[0], theirs.get("transformers")),
            ("its best", wanted[1], min(theirs.values()) if len(theirs) > 1 else None),
        ):
            if reached is not None:
                verdict = "met" if reached >= limit else "missed"
                lines.append(f"{row['name']}: {reached:.2f}x {what}, wanted {limit:g}x: {verdict}")
    return "\n".join(lines)


Machine = tuple["Setting", dict[str, "Timer"], dict[str, Any], Path | None]


def machine(options: argparse.Namespace) -> Machine:
    """(what rows depend on, clocks, what every row says, where rows go)."""
    from benchmarks.gpu.setting import REAL, Setting
    from benchmarks.gpu.timing import clocks

    device = torch.device("cuda", torch.cuda.current_device())
    common = environment.of_gpu(device, options.commit or environment.commit())
    is_h200 = "H200" in common["machine"]
    setting = Setting(
        device,
        REAL,
        targets.H200_TFLOPS if is_h200 else None,
        targets.H200_GB if is_h200 else None,
        has_targets=is_h200,
    )
    return setting, clocks(device), common, options.output / f"{common['host_kind']}.jsonl"


def dry_machine() -> Machine:
    from benchmarks.gpu.setting import TINY, Setting
    from benchmarks.gpu.timing import dry_clocks

    return Setting(torch.device("cpu"), TINY), dry_clocks(), environment.of_cpu(), None


def tune(
    setting: Setting, passed: list[Operation], deadline: Deadline, common: dict[str, Any], output: Path
) -> None:
    """Measures launch configurations that the table of this GPU lacks, until the time is over."""
    from fastbert_kernels.launch import tuned_file

    from benchmarks.gpu.tuning import tune_within

    file = tuned_file(torch.cuda.get_device_name(setting.device))
    names = {operation.name for operation in passed}
    left_out = tune_within(setting.device, names, deadline.left_s(), common, file)
    deadline.left_out += [f"tuning of {name}" for name in left_out]
    if file.exists() and output != RESULTS:
        shutil.copy(file, output)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where the rows go")
    parser.add_argument("--minutes", type=float, default=7.0, help="of all parts together (7)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these, in their order"
    )
    parser.add_argument("--commit", help="what the rows call the code, where git cannot say")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes in the interpreter, no times")
    # how a part is started in a process of its own
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
