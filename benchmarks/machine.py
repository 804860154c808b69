"""What the machine itself does at best: the floor of every row and the divisor of MFU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.task import Roof

ROUNDS = 7


def dtype_of(device: torch.device) -> torch.dtype:
    """What models run in on the device: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measured_roof(device: torch.device) -> Roof:
    """The best of some rounds of a large product in `dtype_of(device)` and of a copy beyond any cache."""
    on_gpu = device.type == "cuda"
    size, copied = (8192, 2**30) if on_gpu else (2048, 2**28)
    a, b = (torch.randn(size, size, device=device).to(dtype_of(device)) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    product_s = _best(lambda: torch.mm(a, b, out=out), device)
    copy_s = _best(lambda: target.copy_(source), device)
    return Roof(tflops=2 * size**3 / 1e12 / product_s, gb_per_s=2 * source.nbytes / 1e9 / copy_s)


def _best(call: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(2 + ROUNDS):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[2:])
