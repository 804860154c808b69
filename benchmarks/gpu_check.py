"""One command for a machine with a GPU: are the kernels right there, and how fast?

    PYTHONPATH=.:kernels python -m benchmarks.gpu_check [--output DIR] [--minutes 8] [--tune] [--dry-run]

First the tests of every kernel run on the card, in several processes. Then the rows of each operation whose
tests have all passed are timed against their floor, their target and their peers, and appended to
`<output>/gpu-<name>.jsonl` one by one. With --tune, launch configurations are measured before that and
written into `fastbert_kernels/tuned/<gpu>.json`, and into the output folder. What the minutes do not suffice
for is left out by name. The exit status is 0 only if every test passed and every row could be measured.

--dry-run does all of it at tiny sizes in Triton's interpreter, on a CPU: nothing is timed or written.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import environment

if TYPE_CHECKING:
    from benchmarks.gpu.setting import Operation, Setting
    from benchmarks.gpu.timing import Case, Timer

RESULTS = Path(__file__).parent / "results"
# TFLOP/s of a large bf16 product on the GPU that the targets are for; on others it is measured
H200_TFLOPS = 790.0
H200_GB = 4300.0  # a second, read and written, of a large copy on it
FAILURES = "gpu-check-failures.txt"
# of the time that is left after the tests
TUNING_SHARE = 0.6


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
    from benchmarks.gpu.timing import table

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
            if file is not None:
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(row | common) + "\n")
    return rows, failures


def measure_case(case: Case, clocks: dict[str, Timer]) -> tuple[dict[str, Any] | None, list[str]]:
    """(the row, what is wrong with our own sides); no row if there is nothing to time."""
    from benchmarks.gpu.timing import in_words, row_of

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


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.dry_run:
        # read where Triton is imported: nothing has imported it yet
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print("gpu_check times kernels on a GPU, but torch sees none: --dry-run needs none", file=sys.stderr)
        return 2
    from benchmarks.gpu.operations import OPERATIONS
    from benchmarks.gpu.timing import table

    deadline = Deadline(options.minutes)
    options.output.mkdir(parents=True, exist_ok=True)
    setting, clocks, common, file = dry_machine() if options.dry_run else machine(options)
    print(", ".join(f"{name} {value}" for name, value in common.items()), flush=True)

    passed = check(OPERATIONS, options.dry_run, deadline, options.output / FAILURES)
    if options.tune and not options.dry_run:
        tune(setting, passed, deadline, common, options.output)
    rows, failures = measure(passed, setting, clocks, deadline, common, file)

    print("\n" + table(rows))
    if file is not None:
        print(f"wrote {len(rows)} rows to {file}")
    not_timed = [operation.name for operation in OPERATIONS if operation not in passed]
    for title, names in (
        ("not timed, because a test did not pass", not_timed),
        ("failed", failures),
        ("left out for want of time", deadline.left_out),
    ):
        for name in names:
            print(f"{title}: {name}")
    return 1 if not_timed or failures else 0


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
        H200_TFLOPS if is_h200 else None,
        H200_GB if is_h200 else None,
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
    """Measures launch configurations for a share of the time, and lets this process use them."""
    from fastbert_kernels.launch import tuned_file

    from benchmarks.gpu.tuning import tune_within

    file = tuned_file(torch.cuda.get_device_name(setting.device))
    seconds = TUNING_SHARE * deadline.left_s()
    names = {operation.name for operation in passed}
    left_out = tune_within(setting.device, names, seconds, common, file)
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
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing new after so many (8)")
    parser.add_argument("--tune", action="store_true", help="measure launch configurations first")
    parser.add_argument("--commit", help="what the rows call the code, where git cannot say")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes in the interpreter, no times")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
