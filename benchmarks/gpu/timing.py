"""One row of `gpu_check`: the sides of a task, checked against each other, timed in turns, and summed up."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fastbert_kernels.tune import difference
from torch import Tensor

ROUNDS = 20
# the first rounds wake the GPU's clocks
WARM_UP_ROUNDS = 3
# larger than any L2 cache
FLUSH_BYTES = 256 * 2**20
# about a third of a millisecond, for what needs one or two launches
LAUNCH_FLUSHES = 4
# so long a call has no need of a host that is ahead
MOST_FLUSHES = 64
CALLS = 50  # of the host's clock: one call is within its noise

OURS = "fastbert"

Call = Callable[[], Any]
# what is wrong with a result, in words; "" if nothing is
Check = Callable[[Any], str]
# name of a side -> milliseconds of each round
Times = dict[str, list[float]]
Timer = Callable[[Mapping[str, Call]], Times]


@dataclass
class Task:
    """Sides that do the same work: those whose names begin with OURS, and what they are compared with.

    `amount` is the work of a call in `unit`s: "tflop" or "gb" give rates a second of work done, "token" of
    tokens. Rates of `floor` and `target` are in the same unit a second.
    """

    amount: float
    unit: str
    clock: str = "gpu"  # "gpu", "step" or "host": see `clocks`
    floor: float | None = None
    target: float | None = None
    sides: dict[str, Call] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def admit(
        self,
        name: str,
        make: Callable[[], Call],
        check: Check | None = None,
        make_checked: Callable[[], Call] | None = None,
    ) -> None:
        """Adds the side that `make` makes, unless it does not run or gives another result: the row says so.

        `check` gets what a call of `make_checked`'s (by default of `make`'s) returns.
        """
        try:
            if check is not None:
                reason = check((make_checked or make)()())
                if reason:
                    self.refused[name] = reason
                    return
            call = make()
            call()
        except Exception as error:  # out of memory, a backend without this form, a package that is not there
            self.refused[name] = f"does not run: {in_words(error)}"
            return
        self.sides[name] = call

    def failures(self) -> list[str]:
        """What is wrong with our own sides."""
        said = [f"{name} {why}" for name, why in self.refused.items() if name.startswith(OURS)]
        return said or ([] if self.sides else ["no side ran"])

    def ours(self) -> list[str]:
        """Of the sides: fastbert's, or the first one of a row that only measures the machine."""
        return [name for name in self.sides if name.startswith(OURS)] or list(self.sides)[:1]


def in_words(error: Exception) -> str:
    """One line; some of torch's messages list every backend that there is."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def equals(
    expected: tuple[Tensor, ...], results: Callable[[Any], tuple[Tensor, ...]] = lambda out: (out,)
) -> Check:
    """Equal but for rounding; `results` brings what a side returns into the form of `expected`."""
    return lambda output: difference(results(output), expected)


@dataclass(frozen=True)
class Case:
    """A row's name, and how to make its task when its turn has come."""

    name: str
    prepare: Callable[[], Task]


# ---- clocks -----------------------------------------------------------------------------------------------


class GpuClock:
    """Milliseconds on the GPU's own clock, with a cold L2 cache, sides in turns.

    With `ahead` the GPU is kept busy until the host has launched the call, so that the time is that of the
    kernels. Without it, it is that of a training step: whoever is slower decides.
    """

    def __init__(self, device: torch.device, ahead: bool) -> None:
        self.ahead = ahead
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self, sides: Mapping[str, Call]) -> Times:
        flushes = {name: self._flushes(call) if self.ahead else 1 for name, call in sides.items()}
        times: Times = {name: [] for name in sides}
        for _ in range(WARM_UP_ROUNDS + ROUNDS):
            for name, call in sides.items():
                times[name].append(self._time(call, flushes[name]))
        return {name: values[WARM_UP_ROUNDS:] for name, values in times.items()}

    def once(self, call: Call) -> float:
        """One call; the host is ahead of kernels that are launched as quickly as ours."""
        return self._time(call, LAUNCH_FLUSHES)

    def _time(self, call: Call, flushes: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            self.flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _flushes(self, call: Call) -> int:
        """How many flushes take longer than the host needs to launch the call."""
        flush_s = min(self._time(self.flush.zero_, 1) for _ in range(3)) / 1e3
        host_s = []
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            host_s.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        return min(1 + math.ceil(1.5 * min(host_s) / flush_s), MOST_FLUSHES)


def host_clock(sides: Mapping[str, Call]) -> Times:
    """Milliseconds that the host spends on a call, mean of CALLS of them; the GPU's work must be less."""
    times: Times = {name: [] for name in sides}
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        for name, call in sides.items():
            _synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            _synchronize()
            times[name].append((time.perf_counter() - begin) * 1e3 / CALLS)
    return {name: values[WARM_UP_ROUNDS:] for name, values in times.items()}


def no_clock(sides: Mapping[str, Call]) -> Times:
    """Runs each side, and takes no time."""
    for call in sides.values():
        call()
    return {}


def clocks(device: torch.device) -> dict[str, Timer]:
    """ "gpu": kernels alone; "step": as they come, host included; "host": what a call costs the host."""
    return {
        "gpu": GpuClock(device, ahead=True),
        "step": GpuClock(device, ahead=False),
        "host": host_clock,
    }


def dry_clocks() -> dict[str, Timer]:
    return dict.fromkeys(("gpu", "step", "host"), no_clock)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- rows -------------------------------------------------------------------------------------------------

RATES = {"tflop": "tflops", "gb": "gb_per_s", "token": "tokens_per_s", "call": "calls_per_s"}


def row_of(name: str, task: Task, times: Times) -> dict[str, Any]:
    """Medians with 20 % and 80 % quantiles, rates, and the shares of floor, target and best other side.

    Without times (a dry run) the row names the sides only.
    """
    row: dict[str, Any] = {"name": name, "clock": task.clock}
    if times:
        row |= _figures(task, times)
    else:
        row["sides"] = list(task.sides)
    if task.refused:
        row["refused"] = task.refused
    return row | task.notes


def _figures(task: Task, times: Times) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    quantiles = {name: statistics.quantiles(values, n=5) for name, values in times.items()}
    rates = {name: task.amount / (ms / 1e3) for name, ms in medians.items()}
    ours = min(task.ours(), key=lambda name: medians[name])
    others = {name: ms for name, ms in medians.items() if name not in task.ours()}
    figures: dict[str, Any] = {
        "ours": ours,
        "rounds": min(len(values) for values in times.values()),
        "ms": _rounded(medians),
        "p20_ms": _rounded({name: q[0] for name, q in quantiles.items()}),
        "p80_ms": _rounded({name: q[3] for name, q in quantiles.items()}),
        RATES[task.unit]: _rounded(rates),
    }
    if task.floor is not None:
        figures |= {"floor": round(task.floor, 1), "share_of_floor": round(rates[ours] / task.floor, 3)}
    if task.target is not None:
        figures |= {"target": task.target, "share_of_target": round(rates[ours] / task.target, 3)}
    if others:
        figures["times_faster_than"] = {name: round(ms / medians[ours], 3) for name, ms in others.items()}
    return figures


def _rounded(values: dict[str, float]) -> dict[str, float]:
    """To four significant digits."""
    return {name: float(f"{value:.4g}") for name, value in values.items()}


# ---- the table --------------------------------------------------------------------------------------------

HEADINGS = ("row", "ms", "rate", "of floor", "target", "against the best other side")


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Rows for a person: of the fastest of our sides, against the fastest of the others."""
    lines = [HEADINGS, *(_line(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines
    )


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    if "ms" not in row:
        return (row["name"], "-", "-", "-", "-", f"{len(row['sides'])} sides ran")
    ours = row["ours"]
    rate = next(f"{row[key][ours]:,.4g} {_SYMBOLS[key]}" for key in RATES.values() if key in row)
    floor = f"{row['share_of_floor']:.0%}" if "floor" in row else "-"
    target = "-"
    if "target" in row:
        verdict = "met" if row["share_of_target"] >= 1 else "missed"
        target = f"{row['target']:,g}: {verdict} ({row['share_of_target']:.0%})"
    best = "-"
    if "times_faster_than" in row:
        name, ratio = min(row["times_faster_than"].items(), key=lambda item: item[1])
        best = f"{ratio:.2f}x {name}"
    return (row["name"], f"{row['ms'][ours]:.4g}", rate, floor, target, best)


_SYMBOLS = {"tflops": "TFLOP/s", "gb_per_s": "GB/s", "tokens_per_s": "tokens/s", "calls_per_s": "calls/s"}
