"""A row's task: sides that do the same work, each checked before it may be timed, and the row made of times.

Nothing here needs a GPU, Triton or pytest: `gpu_check` and the suite of pytest-benchmark share it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

OURS = "fastbert"

Call = Callable[[], Any]
# what is wrong with a result, in words; "" if nothing is
Check = Callable[[Any], str]
# name of a side -> milliseconds of each round
Times = dict[str, list[float]]
Timer = Callable[[Mapping[str, Call]], Times]


def is_the_basis(result: Any) -> str:
    """The check of the side that the others are compared with, and of a side that only measures a machine."""
    return ""


def near(expected: Any, tolerance: float, results: Callable[[Any], Any] = lambda result: result) -> Check:
    """Numbers, tensors or tuples of them: the norm of the difference, relative to that of `expected`.

    `results` brings what a side returns into the form of `expected`.
    """
    wanted = _tensors(expected)

    def check(result: Any) -> str:
        given = _tensors(results(result))
        if len(given) != len(wanted):
            return f"wrong result: {len(given)} outputs, not {len(wanted)}"
        for number, (ours, right) in enumerate(zip(given, wanted)):
            if ours.shape != right.shape:
                return f"wrong result: output {number} is {list(ours.shape)}, not {list(right.shape)}"
            scale = right.double().norm().item() or 1.0
            error = (ours.to(right.device).double() - right.double()).norm().item() / scale
            if not error <= tolerance:  # true for NaN
                return f"wrong result: output {number} is {error:.3g} away, {tolerance} allowed"
        return ""

    return check


def _tensors(result: Any) -> list[Tensor]:
    items = result if isinstance(result, (tuple, list)) else (result,)
    return [torch.as_tensor(item).detach() for item in items if item is not None]


@dataclass(frozen=True)
class Roof:
    """What the machine does at best, measured by itself: a large product, and a large copy."""

    tflops: float
    gb_per_s: float  # read and written

    def floor_ms(self, flop: float, num_bytes: float) -> float:
        return 1e3 * max(flop / (1e12 * self.tflops), num_bytes / (1e9 * self.gb_per_s))

    def bound(self, flop: float, num_bytes: float) -> str:
        is_compute = flop / (1e12 * self.tflops) > num_bytes / (1e9 * self.gb_per_s)
        return "product" if is_compute else "copy"


@dataclass
class Task:
    """Sides that do the same work: those whose names begin with OURS, and what they are compared with.

    `amount` is the work of a call in `unit`s: "tflop" or "gb" give rates a second of work done, "token" of
    tokens. Rates of `floor` and `target` are in the same unit a second. `flop` and `bytes` are what the work
    needs at least, where they are counted: with a `roof` they give the floor.
    """

    amount: float
    unit: str
    clock: str = "gpu"  # "gpu", "step" or "host": see `benchmarks.gpu.timing.clocks`
    floor: float | None = None
    target: float | None = None
    sides: dict[str, Call] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    flop: float = 0.0
    bytes: float = 0.0
    roof: Roof | None = None
    is_model: bool = False  # `flop` are a model's: the row has MFU

    def admit(
        self,
        name: str,
        make: Callable[[], Call],
        check: Check,
        make_checked: Callable[[], Call] | None = None,
    ) -> None:
        """Adds the side that `make` makes, unless it does not run or gives another result: the row says so.

        `check` gets what a call of `make_checked`'s (by default of `make`'s) returns.
        """
        try:
            call = (make_checked or make)()
            reason = check(call())
            if reason:
                self.refused[name] = reason
                return
            if make_checked is not None:
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


@dataclass(frozen=True)
class Case:
    """A row's name, and how to make its task when its turn has come."""

    name: str
    prepare: Callable[[], Task]


# ---- rows -------------------------------------------------------------------------------------------------

RATES = {
    "tflop": "tflops",
    "gb": "gb_per_s",
    "token": "tokens_per_s",
    "call": "calls_per_s",
    "text": "texts_per_s",
    "example": "examples_per_s",
    "parameter": "parameters_per_s",
}


def row_of(name: str, task: Task, times: Times) -> dict[str, Any]:
    """Medians with 20 % and 80 % quantiles, rates, and the shares of floor, target and best other side.

    Without times (a dry run) the row names the sides only.
    """
    row: dict[str, Any] = {"name": name, "clock": task.clock}
    if times:
        medians = {side: statistics.median(values) for side, values in times.items()}
        row |= figures(task, times, min(task.ours(), key=lambda side: medians[side]))
    else:
        row["sides"] = list(task.sides)
    if task.refused:
        row["refused"] = task.refused
    return row | task.notes


def figures(task: Task, times: Times, ours: str) -> dict[str, Any]:
    """The measured part of a row; `ours` is the side whose shares and factors it tells."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    quantiles = {name: statistics.quantiles(values, n=5) for name, values in times.items()}
    rates = {name: task.amount / (ms / 1e3) for name, ms in medians.items()}
    others = {
        name: ms
        for name, ms in medians.items()
        if name != ours and not (name.startswith(OURS) and ours.startswith(OURS))
    }
    row: dict[str, Any] = {
        "ours": ours,
        "rounds": min(len(values) for values in times.values()),
        "ms": _rounded(medians),
        "p20_ms": _rounded({name: q[0] for name, q in quantiles.items()}),
        "p80_ms": _rounded({name: q[3] for name, q in quantiles.items()}),
        RATES[task.unit]: _rounded(rates),
    }
    if task.floor is not None:
        row |= {"floor": round(task.floor, 1), "share_of_floor": round(rates[ours] / task.floor, 3)}
    if task.target is not None:
        row |= {"target": task.target, "share_of_target": round(rates[ours] / task.target, 3)}
    if task.flop:
        row["flop"] = task.flop
    if task.bytes:
        row["bytes"] = task.bytes
    if task.roof is not None:
        row |= _shares(task, task.roof, medians)
    if others:
        row["times_faster_than"] = {name: round(ms / medians[ours], 3) for name, ms in others.items()}
    return row


def _shares(task: Task, roof: Roof, medians: dict[str, float]) -> dict[str, Any]:
    """Of the machine's measured rates: a model's MFU, or an operation's share of the floor."""
    row: dict[str, Any] = {
        "roof": {"tflops": float(f"{roof.tflops:.4g}"), "gb_per_s": float(f"{roof.gb_per_s:.4g}")}
    }
    if task.is_model:
        row["mfu"] = {
            name: round(task.flop / (ms / 1e3) / (1e12 * roof.tflops), 3) for name, ms in medians.items()
        }
    elif task.flop or task.bytes:
        floor_ms = roof.floor_ms(task.flop, task.bytes)
        row |= {
            "floor_ms": float(f"{floor_ms:.4g}"),
            "bound": roof.bound(task.flop, task.bytes),
            "share_of_roof": {name: round(floor_ms / ms, 3) for name, ms in medians.items()},
        }
    return row


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
