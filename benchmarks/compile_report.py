"""Compiles every Triton kernel, with every configuration, for every GPU architecture, without a GPU.

    python -m benchmarks.compile_report [--only TEXT] [--target NAME ...] [--no-cache] [--write]

A row a kernel, configuration, dtype and architecture: registers, spills, stack, shared memory, matrix
instructions, load widths, compile time. The exit status is 1 if a case does not compile, spills on sm_80 or
sm_90, does not fit the shared memory, misses its matrix instructions, or if a kernel is in no case;
compile_exceptions.toml lists what is right all the same, with reasons. Rows are kept in a cache, keyed by the
kernel's source, its configuration and Triton's version, and compiled in as many processes as there are cores.

--write replaces the table in kernels/README.md and kernels/compile_report.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from fastbert_kernels.launch import ARCHITECTURES, MAX_SHARED_BYTES, CompileCase
from triton import knobs

from benchmarks.compile_cases import (
    Row,
    case_digest,
    cases_of,
    compile_numbered,
    digest,
    empty_row,
    from_cache,
    kernel_modules,
    kernels_of,
    to_cache,
    write_whole,
)

ROOT = Path(__file__).parents[1]
EXCEPTIONS = Path(__file__).with_name("compile_exceptions.toml")
README = ROOT / "kernels" / "README.md"
REPORT = ROOT / "kernels" / "compile_report.json"
BEGIN, END = "<!-- compile report: begin -->", "<!-- compile report: end -->"
# where a spill fails the run; elsewhere it is shown
NO_SPILLS_ON = ("sm_80", "sm_90")
MAX_TENSOR_COLUMNS = 512
HALF_DTYPES = ("fp16", "bf16")
SPILLS, NO_MATRIX, NO_COMPILE, TOO_LARGE = (
    "spills", "no matrix instructions", "does not compile", "does not fit"
)  # fmt: skip
EXCUSABLE = (SPILLS, NO_MATRIX, NO_COMPILE)
COLUMNS = (
    "kernel", "architecture", "cases", "registers", "spilled", "stack", "shared KiB", "matrix instructions",
    "global loads, bits", "compile s",
)  # fmt: skip


@dataclass(frozen=True)
class NumberedCase:
    """A case, and where a worker process finds it again: a kernel cannot be sent to one."""

    module: str
    target: str
    number: int
    case: CompileCase


@dataclass(frozen=True)
class Failure:
    row: Row
    failure: str
    message: str


@dataclass(frozen=True)
class ReportException:
    kernel: str
    label: str
    dtype: str
    target: str
    failure: str
    triton: tuple[str, ...]
    reason: str
    at_most: int = 0

    def excuses(self, failure: Failure) -> bool:
        row = failure.row
        same = all(
            fnmatch.fnmatchcase(getattr(row, name), getattr(self, name))
            for name in ("kernel", "label", "dtype", "target")
        )
        within = failure.failure != SPILLS or row.spill_bytes <= self.at_most
        return same and within and failure.failure == self.failure and triton.__version__ in self.triton


# ---- compiling --------------------------------------------------------------------------------------------


def all_cases() -> list[NumberedCase]:
    return [
        NumberedCase(module.__name__, target, number, case)
        for module in kernel_modules()
        for target in ARCHITECTURES
        for number, case in enumerate(cases_of(module, target))
    ]


def kernels_in_no_case(cases: list[NumberedCase]) -> list[str]:
    """Kernels that no architecture's cases compile."""
    # one module of an operation may name the cases of another's kernels
    covered = {(numbered.case.kernel.__module__, numbered.case.kernel.__name__) for numbered in cases}
    kernels = {(module.__name__, name) for module in kernel_modules() for name in kernels_of(module)}
    return [f"{module}.{name}" for module, name in sorted(kernels - covered)]


def compiled(cases: list[NumberedCase], *, use_cache: bool) -> Iterator[Row]:
    """The rows of the cases as they become ready, cached ones first."""
    waiting = []
    for numbered in cases:
        row = from_cache(numbered.case, numbered.target) if use_cache else None
        if row is None:
            waiting.append(numbered)
        else:
            yield row
    for numbered, row in compiled_in_processes(waiting):
        if use_cache and not row.error:
            to_cache(numbered.case, row)
        yield row


def compiled_in_processes(cases: list[NumberedCase]) -> Iterator[tuple[NumberedCase, Row]]:
    """A compiler that aborts takes the pool with it: what is left is then compiled in a process each."""
    if not cases:
        return
    left = []
    with process_pool(min(len(os.sched_getaffinity(0)), len(cases))) as pool:
        futures = {pool.submit(compile_numbered, c.module, c.target, c.number): c for c in cases}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                left.append(futures[future])
    for numbered in left:
        with process_pool(1) as pool:
            try:
                row = pool.submit(
                    compile_numbered, numbered.module, numbered.target, numbered.number
                ).result()
            except BrokenProcessPool:
                row = dataclasses.replace(
                    empty_row(numbered.case, numbered.target), error="the compiler ended its process"
                )
        yield numbered, row


def process_pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


# ---- judging ----------------------------------------------------------------------------------------------


def failures_of(row: Row) -> list[Failure]:
    """What of a row would fail the run if no exception excused it."""
    if row.error:
        return [Failure(row, NO_COMPILE, row.error)]
    failures = []
    if row.spill_bytes and row.target in NO_SPILLS_ON:
        failures.append(Failure(row, SPILLS, f"spills {row.spill_bytes} bytes a thread"))
    limit = MAX_SHARED_BYTES[row.target]
    if row.shared_bytes > limit:
        failures.append(
            Failure(row, TOO_LARGE, f"needs {row.shared_bytes} bytes of shared memory, the limit is {limit}")
        )
    if row.tensor_columns > MAX_TENSOR_COLUMNS:
        columns = f"needs {row.tensor_columns} columns of tensor memory, the limit is {MAX_TENSOR_COLUMNS}"
        failures.append(Failure(row, TOO_LARGE, columns))
    # an IEEE fp32 product has none by right
    if row.uses_dot and row.dtype in HALF_DTYPES:
        if row.target == "sm_90" and not any(name.endswith("GMMA") for name in row.matrix):
            failures.append(Failure(row, NO_MATRIX, f"no HGMMA on sm_90, but {list(row.matrix) or 'none'}"))
        elif not row.matrix:
            failures.append(Failure(row, NO_MATRIX, "a matrix product without matrix instructions"))
    return failures


def read_exceptions(file: Path) -> list[ReportException]:
    """ValueError for an exception that is not whole, or that excuses what cannot be launched."""
    exceptions = []
    for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("exception", []):
        try:
            exception = ReportException(**entry | {"triton": tuple(entry.get("triton", ()))})
        except TypeError as error:
            raise ValueError(f"{file.name}: {entry}: {error}") from None
        if exception.failure not in EXCUSABLE:
            raise ValueError(
                f"{file.name}: failure {exception.failure!r} is not one of {', '.join(EXCUSABLE)}"
            )
        if not exception.reason.strip() or not exception.triton:
            raise ValueError(f"{file.name}: {entry} needs a reason and the Triton versions that it holds for")
        exceptions.append(exception)
    return exceptions


def judged(rows: list[Row], exceptions: list[ReportException]) -> tuple[list[Failure], list[ReportException]]:
    """The failures that nothing excuses, and the exceptions that excuse nothing."""
    failures = [failure for row in rows for failure in failures_of(row)]
    open_failures = [f for f in failures if not any(e.excuses(f) for e in exceptions)]
    for_this_triton = [e for e in exceptions if triton.__version__ in e.triton]
    unused = [e for e in for_this_triton if not any(e.excuses(f) for f in failures)]
    return open_failures, unused


# ---- showing ----------------------------------------------------------------------------------------------


def one_line(row: Row) -> str:
    if row.error:
        return f"{row.name}: {row.error.splitlines()[0]}"
    counts = ", ".join(f"{name} x {count}" for name, count in {**row.matrix, **row.memory}.items())
    return (
        f"{row.name}: {row.registers} registers, {row.spill_bytes} spilled, {row.shared_bytes} shared, "
        f"{counts}; {row.compile_s} s"
    )


def table(rows: list[Row]) -> str:
    """Markdown, a line for each kernel and architecture: the worst of its cases."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.target), []).append(row)
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for (kernel, target), group in groups.items():
        cells = [
            f"`{kernel}`",
            target,
            len(group),
            max(row.registers for row in group),
            max(row.spill_bytes for row in group),
            max(row.stack_bytes for row in group),
            f"{max(row.shared_bytes for row in group) / 1024:.1f} of {MAX_SHARED_BYTES[target] // 1024}",
            matrix_cell(group),
            loads_cell(group),
            f"{max(row.compile_s for row in group):.1f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def matrix_cell(rows: list[Row]) -> str:
    """In how many cases each kind of instruction stands: "HGMMA in 12, none in 4"."""
    kinds = [" + ".join(row.matrix) or "none" for row in rows if row.uses_dot]
    return ", ".join(f"{kind} in {kinds.count(kind)}" for kind in sorted(set(kinds))) or "-"


def loads_cell(rows: list[Row]) -> str:
    """The widths of loads from global memory that occur; TMA moves whole tiles."""
    names = {name for row in rows for name in row.memory}
    loads = ("LDG.", "LDGSTS.", "global_load.", "buffer_load.")
    widths = sorted({int(n.split(".")[1]) for n in names if n.startswith(loads)}, reverse=True)
    return ", ".join([*(["TMA"] if "UTMALDG" in names else []), *map(str, widths)]) or "-"


def json_text(rows: list[Row], digests: dict[str, str]) -> str:
    """JSON with a row a line, so that a change of one row is a change of one line."""
    head = {"triton": triton.__version__, "torch": torch.__version__.split("+")[0], "digests": digests}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join("  " + json.dumps(dataclasses.asdict(row)) for row in rows)
    return "\n".join(["{", *lines, ' "rows": [', body, " ]", "}", ""])


def module_digests(cases: list[NumberedCase]) -> dict[str, str]:
    """Of all cases of a module: another one means that the committed rows are not of this source."""
    digests: dict[str, list[str]] = {}
    for numbered in cases:
        digests.setdefault(numbered.module.split(".")[-1], []).append(
            case_digest(numbered.case, numbered.target)
        )
    return {module: digest(values) for module, values in digests.items()}


def between_markers(text: str) -> str:
    """The table in a README's text. ValueError if the markers are not there once each, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{README.name} must have {BEGIN} and, after it, {END}, once each")
    return text.split(BEGIN)[1].split(END)[0].strip()


def with_table(text: str, new_table: str) -> str:
    between_markers(text)
    return f"{text.split(BEGIN)[0]}{BEGIN}\n\n{new_table}\n\n{END}{text.split(END)[1]}"


# ---- the command ------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose name has TEXT in it")
    parser.add_argument("--target", choices=ARCHITECTURES, nargs="+", help="only on these")
    parser.add_argument("--no-cache", action="store_true", help="compile everything, and keep nothing")
    parser.add_argument("--write", action="store_true", help="replace the table in the README and the JSON")
    options = parser.parse_args(arguments)
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")
    whole = not (options.only or options.target)
    if options.write and not whole:
        parser.error("--write needs every row: leave out --only and --target")

    started = time.perf_counter()
    exceptions = read_exceptions(EXCEPTIONS)
    every_case = all_cases()
    cases = [
        numbered
        for numbered in every_case
        if options.only in numbered.case.kernel.__name__
        and numbered.target in (options.target or ARCHITECTURES)
    ]
    rows = []
    for row in compiled(cases, use_cache=not options.no_cache):
        rows.append(row)
        print(f"[{len(rows)}/{len(cases)}] {one_line(row)}", flush=True)
    order = {empty_row(numbered.case, numbered.target).name: at for at, numbered in enumerate(cases)}
    rows.sort(key=lambda row: order[row.name])

    print(f"\n{table(rows)}\n")
    problems, unused = judged(rows, exceptions)
    messages = [f"{failure.row.name}: {failure.message}" for failure in problems]
    if whole:
        messages += [
            f"{name} is in no case of its module's compile_cases()" for name in kernels_in_no_case(cases)
        ]
        messages += [f"{EXCEPTIONS.name}: this excuses nothing any more, delete it: {e}" for e in unused]
    if not rows:
        messages.append("no case at all")
    for message in messages:
        print(message, file=sys.stderr)
    elapsed_s = time.perf_counter() - started
    print(f"{len(rows)} rows, {len(messages)} problems, {elapsed_s:.0f} s; triton {triton.__version__}")
    if options.write and not messages:
        write_whole(REPORT, json_text(rows, module_digests(cases)))
        write_whole(README, with_table(README.read_text(encoding="utf-8"), table(rows)))
        print(f"wrote {REPORT.relative_to(ROOT)} and the table in {README.relative_to(ROOT)}")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
