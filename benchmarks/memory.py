"""What a call holds and moves: counted tensor by tensor on a CPU, asked of the allocator on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.task import Call
from tests.peak_bytes import PeakBytes

MIB = 2**20


class Traffic(PeakBytes):
    """Also `moved`: bytes that operations read and write, each tensor once an operation, views not at all.

    What an operator reads again or keeps within itself is not seen, nor is a call that torch.compile made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:
            self.moved += sum(
                t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)
            )
        return out


def of_calls(sides: dict[str, Call], device: torch.device) -> dict[str, Any]:
    """For a row: `peak_mib` beside what was there before, how it was found, and on a CPU `moved_mib`."""
    if device.type == "cuda":
        peaks = {name: round(peak_on_gpu(call, device) / MIB, 1) for name, call in sides.items()}
        return {"peak_mib": peaks, "peak_of": "torch.cuda.max_memory_allocated"}
    row: dict[str, Any] = {"peak_mib": {}, "moved_mib": {}, "peak_of": "tensors alive at once"}
    for name, call in sides.items():
        if "compiled" in name:
            continue
        with Traffic() as traffic:
            call()
        row["peak_mib"][name] = round(traffic.bytes / MIB, 1)
        row["moved_mib"][name] = round(traffic.moved / MIB, 1)
    return row


def peak_on_gpu(call: Call, device: torch.device) -> int:
    """The most that a call holds on the GPU, its results included, beside what was there before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
