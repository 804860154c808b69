"""Measures launch configurations within a time: compiled in several processes, then timed in this one."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
from fastbert_kernels import launch
from fastbert_kernels.launch import architecture, read_tuned_rows
from fastbert_kernels.tune import TuningCase, all_tuning_cases, check_candidates, tune, write_table

from benchmarks.gpu.timing import GpuClock
from benchmarks.task import in_words

# compiling takes longer than measuring, and is done in parallel first
COMPILING_SHARE = 0.5


def cases_in_order(device: torch.device, operations: set[str]) -> list[TuningCase]:
    """Of the operations whose tests passed; what training uses most first: bf16, long sequences, dropout."""
    cases = all_tuning_cases(architecture(torch.empty(0, device=device)))
    mine = [case for case in cases if case.op.split("_")[0] in operations]
    return sorted(
        mine, key=lambda case: ("bf16" not in case.key, "tile_rows 64" in case.key, "dropout" not in case.key)
    )


def tune_within(
    device: torch.device, operations: set[str], seconds: float, common: dict[str, Any], file: Path
) -> list[str]:
    """Writes the rows of the cases that `file` lacks and that there was time for; the names of the others.

    What the table has stays.
    """
    end = time.monotonic() + seconds
    there = {(row["op"], row["key"]) for row in read_tuned_rows(file)}
    every_case = cases_in_order(device, operations)
    missing = [i for i, case in enumerate(every_case) if (case.op, case.key) not in there]
    cases = [every_case[i] for i in missing]
    compile_in_parallel(device, operations, missing, COMPILING_SHARE * seconds)
    clock = GpuClock(device, ahead=True)
    rows, left_out = measured(cases, device, clock.once, end)
    write_rows(file, torch.cuda.get_device_name(device), rows, common)
    # this process looks the new table up
    launch._tuned_choices.cache_clear()
    return left_out


def measured(
    cases: list[TuningCase], device: torch.device, time_ms: Any, end: float
) -> tuple[list[dict[str, Any]], list[str]]:
    rows, left_out = [], []
    for case in cases:
        name = f"{case.op} {case.key}"
        if time.monotonic() > end:
            left_out.append(name)
            continue
        row = tune(case, device, time_ms)
        rows.append(row)
        print(f"{name}: {row['choice']} of {len(row['median_ms'])}", flush=True)
        for candidate, reason in row.get("refused", {}).items():
            print(f"    refused: {candidate}: {reason}", flush=True)
    return rows, left_out


def write_rows(file: Path, gpu: str, rows: list[dict[str, Any]], common: dict[str, Any]) -> None:
    """Into the table, beside the rows of other keys."""
    versions = {name: common[name] for name in ("torch", "triton", "commit")}
    table = {(row["op"], row["key"]): row for row in read_tuned_rows(file)}
    table |= {(row["op"], row["key"]): row | versions for row in rows}
    if rows:
        write_table(file, gpu, [table[key] for key in sorted(table)])


def compile_in_parallel(
    device: torch.device, operations: set[str], cases: list[int], seconds: float, processes: int | None = None
) -> None:
    """Fills the kernel cache: each process runs every candidate of its cases once.

    `cases` are places in `cases_in_order`. What there was no time for, or went wrong, is compiled where it
    is measured.
    """
    processes = processes or max(1, min(8, (os.cpu_count() or 2) // 2))
    end = time.monotonic() + seconds
    compiled, problems = 0, set()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        jobs = [pool.apply_async(_compile, (str(device), operations, i)) for i in cases]
        for job in jobs:
            job.wait(max(0.0, end - time.monotonic()))
            if job.ready():
                try:
                    job.get()
                    compiled += 1
                except Exception as error:
                    problems.add(in_words(error))
    print(
        f"compiled {compiled} of {len(cases)} cases in {processes} processes", *sorted(problems), sep="\n    "
    )


def _compile(device_name: str, operations: set[str], number: int) -> None:
    device = torch.device(device_name)
    case = cases_in_order(device, operations)[number]
    check_candidates(case, case.prepare(device))
