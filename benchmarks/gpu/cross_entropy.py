"""Rows of the loss over masked words: without whole logits, against torch's product and cross_entropy."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.setting import DTYPE, Setting
from benchmarks.task import OURS, Call, Case, Task, near
from fastbert import ops
from fastbert.ops import backend

# of bf16 results by two ways of rounding, relative to the norm
TOLERANCE = 0.02
MASKED = 0.15  # of the tokens
MIB = 2**20


def cross_entropy_cases(setting: Setting) -> Iterator[Case]:
    """The masked words of two batches, BERT's widths; the last one also as under autocast."""
    for fields in setting.sizes.models:
        width, vocab = fields["hidden_size"], fields["vocab_size"]
        for tokens in (setting.sizes.tokens // 4, setting.sizes.tokens):
            for dtype in (DTYPE, torch.float32) if fields is setting.sizes.models[-1] else (DTYPE,):
                for training in (False, True):
                    rows = max(2, round(MASKED * tokens))
                    what = "forward and backward" if training else "forward"
                    name = f"linear_cross_entropy[{rows} x {width}, {vocab} words, {what}"
                    name += "]" if dtype == DTYPE else ", fp32 parameters]"
                    prepare = functools.partial(_loss, rows, vocab, width, dtype, training, setting)
                    yield Case(name, prepare)


def _loss(rows: int, vocab: int, width: int, dtype: torch.dtype, training: bool, setting: Setting) -> Task:
    """The floor is that of the three products of a linear layer; we make a fourth: the logits again."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device)

    hidden = random(rows, width).to(DTYPE).requires_grad_()
    weight = (random(vocab, width) / width**0.5).to(dtype).requires_grad_()
    bias = random(vocab).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (rows,), device=setting.device)
    leaves = (hidden, weight, bias)

    def side(loss_sum: Call) -> Call:
        def call() -> tuple[Tensor, ...]:
            with torch.set_grad_enabled(training), torch.autocast(setting.device.type, DTYPE):
                loss: Tensor = loss_sum() / rows
            return (loss.detach(), *torch.autograd.grad(loss, leaves)) if training else (loss,)

        return call

    def ours(choice: str) -> Call:
        def loss_sum() -> Tensor:
            with backend.use(choice):
                return ops.linear_cross_entropy(hidden, weight, bias, labels)[0]

        return side(loss_sum)

    def torchs() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="sum")

    flops = (6 if training else 2) * rows * vocab * width
    task = Task(flops / 1e12, "tflop", floor=setting.peak_tflops)
    sides = {OURS: ours("auto"), "torch": side(torchs), "the eager path": ours("eager")}
    expected = sides["torch"]()
    for name, call in sides.items():
        task.admit(name, lambda call=call: call, near(expected, TOLERANCE))
    task.notes = {"logits_mib": round(rows * vocab * DTYPE.itemsize / MIB, 1)}
    if setting.device.type == "cuda":
        task.notes["temporary_mib"] = {
            name: round(temporary_bytes(call, setting.device) / MIB, 1) for name, call in task.sides.items()
        }
    return task


def temporary_bytes(call: Call, device: torch.device) -> int:
    """The most that a call holds on the GPU beside what was there before and what it returns."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    returned = sum(x.nbytes for x in call())
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - returned
