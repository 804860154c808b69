"""Times every candidate of every tunable operation on this machine's GPU and writes the table that ships.

    python -m fastbert_kernels.tune [--output FILE] [--only OP]

Run by a person, never by a model: launchers look the result up (`launch.choose`). Each candidate's result is
compared with the first candidate's before anything is timed; then the candidates are timed in turns, and the
smallest median wins. The table is written when all is measured, beside its place and renamed: an interrupted
run leaves the old one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import fastbert_kernels
from fastbert_kernels.launch import architecture, read_tuned_rows, tuned_file

ROUNDS = 20
# the first rounds wake the GPU's clocks
WARM_UP_ROUNDS = 3
# larger than any L2 cache; also long enough for the host to be ahead of the GPU when the timed call begins
FLUSH_BYTES = 256 * 2**20
# of the largest value: candidates add in another order and round once, or use TF32
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-8}

Outputs = tuple[Tensor, ...]
Launch = Callable[[Any], Outputs]
Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class TuningCase:
    """One (op, key) of the table, and how to run it.

    A module with tunable kernels has a function `tuning_cases(arch: str) -> list[TuningCase]`. Candidates
    are configurations, or names of other implementations ("cublaslt"); `str(candidate)` is what the
    table calls one. `prepare` makes inputs on a device and returns `launch(candidate)`, which computes from
    those inputs into outputs of its own and returns the outputs: called again it gives the same again.
    """

    op: str
    key: str  # dtype and shape, as the launcher passes them to `choose`
    candidates: tuple[Any, ...]
    prepare: Callable[[torch.device], Launch]
    flops: float = 0.0  # of one call, for the rate in the row
    bytes: float = 0.0


def all_tuning_cases(arch: str) -> list[TuningCase]:
    """Of every module of fastbert_kernels that has some."""
    names = sorted(module.name for module in pkgutil.iter_modules(fastbert_kernels.__path__))
    modules = [importlib.import_module(f"fastbert_kernels.{name}") for name in names]
    return [case for m in modules if hasattr(m, "tuning_cases") for case in m.tuning_cases(arch)]


def tune(case: TuningCase, device: torch.device, time_ms: Timer) -> dict[str, Any]:
    """The table's row of a case: the choice, the median of each candidate, and why others were refused."""
    launch = case.prepare(device)
    refused = check_candidates(case, launch)
    calls = {str(c): (lambda c=c: launch(c)) for c in case.candidates if str(c) not in refused}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        for name, call in calls.items():
            times[name].append(time_ms(call))
    medians = {name: statistics.median(values[WARM_UP_ROUNDS:]) for name, values in times.items()}
    choice = min(medians, key=lambda name: medians[name])
    row: dict[str, Any] = {"op": case.op, "key": case.key, "choice": choice}
    if case.flops:
        row["tflops"] = round(case.flops / medians[choice] / 1e9, 1)
    if case.bytes:
        row["gbps"] = round(case.bytes / medians[choice] / 1e6)
    row["median_ms"] = {name: round(ms, 5) for name, ms in medians.items()}
    return row | ({"refused": refused} if refused else {})


def check_candidates(case: TuningCase, launch: Launch) -> dict[str, str]:
    """Runs each candidate once: the names of those that do not run or differ from the first, and why.

    Outputs are filled with NaN in between, so that a candidate that writes nothing does not pass with the
    values of the one before.
    """
    first, *others = case.candidates
    outputs = launch(first)
    if not isinstance(outputs, tuple) or not all(isinstance(t, Tensor) for t in outputs):
        raise TypeError(f"launch of {case.op} {case.key} must return a tuple of its outputs, not {outputs!r}")
    expected = tuple(output.clone() for output in outputs)
    refused = {}
    for candidate in others:
        for output in outputs:
            output.fill_(float("nan") if output.is_floating_point() else -1)
        try:
            outputs = launch(candidate)
            reason = difference(outputs, expected)
        except Exception as error:  # too much shared memory on this GPU, or a compiler's own error
            reason = f"does not run: {type(error).__name__}: {error}".splitlines()[0]
        if reason:
            refused[str(candidate)] = reason
    return refused


def difference(outputs: Outputs, expected: Outputs) -> str:
    """What is wrong with a candidate's outputs, in words; "" if nothing is."""
    for number, (ours, right) in enumerate(zip(outputs, expected, strict=True)):
        if ours.shape != right.shape or ours.dtype != right.dtype:
            return (
                f"output {number} is {list(ours.shape)} {ours.dtype}, not {list(right.shape)} {right.dtype}"
            )
        error = (ours.double() - right.double()).abs().max().item() if right.numel() else 0.0
        limit = TOLERANCE.get(right.dtype, 0.0) * (
            right.double().abs().max().item() if right.numel() else 0.0
        )
        if not error <= limit:  # true for NaN
            return f"wrong result: output {number} is {error:.3g} away from the first's, {limit:.3g} allowed"
    return ""


def gpu_timer(device: torch.device) -> Timer:
    """Milliseconds of one call on the GPU, with a cold L2 cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def time_ms(call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        elapsed_ms: float = start.elapsed_time(end)
        return elapsed_ms

    return time_ms


def commit() -> str:
    """Of the checkout that this package runs from, with a + for changes; "unknown" if it is not in one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
        changes = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def write_table(file: Path, gpu: str, rows: list[dict[str, Any]]) -> None:
    """JSON with a row a line, written beside and renamed."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = f'{{\n "gpu": {json.dumps(gpu)},\n "rows": [\n{lines}\n ]\n}}\n'
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as beside:
        beside.write(text)
    os.chmod(beside.name, 0o644)
    os.replace(beside.name, file)


def tune_all(
    cases: list[TuningCase], device: torch.device, gpu: str, time_ms: Timer, file: Path
) -> list[dict[str, Any]]:
    """Measures the cases and puts their rows into `file`, where rows of other operations stay."""
    versions = {"torch": torch.__version__, "triton": triton.__version__, "commit": commit()}
    rows = []
    for case in cases:
        row = tune(case, device, time_ms)
        rows.append(row | versions)
        print(f"{case.op} {case.key}: {row['choice']}", flush=True)
        for name, ms in row["median_ms"].items():
            print(f"    {ms:9.4f} ms  {name}")
        for name, reason in row.get("refused", {}).items():
            print(f"    refused      {name}: {reason}", flush=True)
    measured = {case.op for case in cases}
    kept = [row for row in read_tuned_rows(file) if row["op"] not in measured]
    write_table(file, gpu, sorted(kept + rows, key=lambda row: (row["op"], row["key"])))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="instead of tuned/<gpu>.json of the package"
    )
    parser.add_argument("--only", metavar="OP", help="only this operation; rows of others stay as they are")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("tuning measures on a GPU, but torch sees none on this machine")

    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    cases = all_tuning_cases(architecture(torch.empty(0, device=device)))
    operations = sorted({case.op for case in cases})
    if options.only is not None and options.only not in operations:
        parser.error(f"--only {options.only}: not one of {', '.join(operations) or 'no tunable operation'}")
    cases = [case for case in cases if options.only in (None, case.op)]
    file = options.output or tuned_file(gpu)
    tune_all(cases, device, gpu, gpu_timer(device), file)
    print(f"wrote {len(cases)} rows to {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
