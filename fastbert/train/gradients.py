"""Gradients that lie in one block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 128  # bytes: a line of a GPU's cache, and more than the widest load


class FlatGradients:
    """A buffer for each dtype and device, of which the gradients of the parameters are parts.

    Zeroing is then one fill, and a norm or an all-reduce takes one block: `buffers`. Parts follow each other
    in the order of the parameters and begin at multiples of 128 bytes; what is between them stays 0. Frozen
    parameters have no part, a parameter that is listed twice has one.

    A gradient is in its parameter's `grad_dtype`. Between steps the parameters have no gradient:

        gradients.attach()
        loss.backward()                     # adds up in the buffers
        with gradients.of_the_step():       # a parameter that got no gradient has none
            optimizer.step()
        gradients.zero()
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = [p for p in dict.fromkeys(params) if p.requires_grad]
        kinds = [(gradient_dtype(p), p.device) for p in self._params]
        starts, ends = [], dict.fromkeys(kinds, 0)
        for p, kind in zip(self._params, kinds):
            starts.append(ends[kind])
            line = ALIGNMENT // kind[0].itemsize
            ends[kind] += -(-p.numel() // line) * line
        buffers = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in ends.items()}
        self.buffers = list(buffers.values())
        # `.data`: each part counts its own changes, which tells whether a backward pass has reached it
        self._parts = [
            buffers[kind].data[start : start + p.numel()].view(p.shape).data
            for p, kind, start in zip(self._params, kinds, starts)
        ]
        self._versions = [0] * len(self._parts)

    def attach(self) -> None:
        """Let backward passes add to the buffers."""
        for p, part in zip(self._params, self._parts):
            p.grad = part
        self._versions = [part._version for part in self._parts]

    @contextmanager
    def of_the_step(self) -> Iterator[None]:
        """Inside, parameters that no backward pass has reached since `attach` have no gradient."""
        for p, part, version in zip(self._params, self._parts, self._versions):
            if part._version == version:
                p.grad = None
        yield
        for p in self._params:
            p.grad = None

    @torch.no_grad()
    def zero(self) -> None:
        """For the next step."""
        for buffer in self.buffers:
            buffer.zero_()


def gradient_dtype(param: Any) -> torch.dtype:
    """The dtype in which torch collects the gradient of a parameter."""
    dtype: torch.dtype = getattr(param, "grad_dtype", None) or param.dtype
    return dtype


def collect_in_fp32(params: Iterable[Any]) -> None:
    """Let gradients of bf16 and fp16 parameters add up in fp32: a large sum would lose small summands."""
    for p in params:
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
            p.grad_dtype = torch.float32
