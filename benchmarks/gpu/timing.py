"""The clocks of `gpu_check`: the GPU's, a step's, the host's; and equality of results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from fastbert_kernels.tune import difference
from torch import Tensor

from benchmarks.task import Call, Check, Timer, Times

ROUNDS = 20
STEP_ROUNDS = 8  # of what takes as long as a training step
# the first rounds wake the GPU's clocks
WARM_UP_ROUNDS = 3
# larger than any L2 cache
FLUSH_BYTES = 256 * 2**20
# about a third of a millisecond, for what needs one or two launches
LAUNCH_FLUSHES = 4
# so long a call has no need of a host that is ahead
MOST_FLUSHES = 64
CALLS = 50  # of the host's clock: one call is within its noise


def equals(
    expected: tuple[Tensor, ...], results: Callable[[Any], tuple[Tensor, ...]] = lambda out: (out,)
) -> Check:
    """Equal but for rounding; `results` brings what a side returns into the form of `expected`."""
    return lambda output: difference(results(output), expected)


# ---- clocks -----------------------------------------------------------------------------------------------


class GpuClock:
    """Milliseconds on the GPU's own clock, with a cold L2 cache, sides in turns.

    With `ahead` the GPU is kept busy until the host has launched the call, so that the time is that of the
    kernels. Without it, it is that of a training step: whoever is slower decides.
    """

    def __init__(self, device: torch.device, ahead: bool, rounds: int = ROUNDS) -> None:
        self.ahead, self.rounds = ahead, rounds
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self, sides: Mapping[str, Call]) -> Times:
        flushes = {name: self._flushes(call) if self.ahead else 1 for name, call in sides.items()}
        times: Times = {name: [] for name in sides}
        for _ in range(WARM_UP_ROUNDS + self.rounds):
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
        "step": GpuClock(device, ahead=False, rounds=STEP_ROUNDS),
        "host": host_clock,
    }


def dry_clocks() -> dict[str, Timer]:
    return dict.fromkeys(("gpu", "step", "host"), no_clock)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
