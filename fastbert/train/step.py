"""The device's part of a training step: one function over tensors that keep their places.

From masking to the zeroed gradients nothing here waits for the device, and no number of the host changes from
step to step: the learning rate is looked up in a table, and what is counted is counted on the device. So a
CUDA graph may capture a step (`fastbert.train.capture`) and replay it for other batches of the same shapes.
On a CPU the eager optimizer, and what leaves out unused rows, read the device, which costs nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fastbert.batch import IGNORE_INDEX, PackedBatch, PaddedBatch
from fastbert.modeling import BertForPreTraining, LossParts
from fastbert.optim import AdamW, Lamb
from fastbert.train.distributed import Ranks, data_parallel, without_reduction
from fastbert.train.gradients import FlatGradients, collect_in_fp32, gradient_dtype

Batch = PackedBatch | PaddedBatch
Masking = Callable[[Batch, Tensor], Batch]
# the dtype of the products; bf16 is that of the weights, too, the other two are autocast over fp32 weights
PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16-autocast": torch.bfloat16,
    "fp16": torch.float16,
}
AUTOCAST = ("bf16-autocast", "fp16")
MICRO_BATCHES = 2**20  # more than any step has: tells the batches of all steps apart
_LOW = (torch.bfloat16, torch.float16)
MIN_LOSS_SCALE = 1.0  # halving forever would end in a scale of zero, and in divisions by it
LOSSES = tuple(field.name for field in fields(LossParts))


def losses_of(parts: LossParts) -> Tensor:
    """The numbers of LossParts, fp64 [6] in the order of LOSSES, without a graph."""
    return torch.stack([getattr(parts, name).detach().double() for name in LOSSES])


class TrainingStep:
    """Forward, backward and update of a BertForPreTraining, and what they keep on the device.

    Args:
        model, optimizer, precision, masking: as `Trainer` takes them.
        num_rates: length of the table of learning rates.
        ranks: the processes that train together. Their micro-batches count in rounds of one each.
        flat_gradients: whether the gradients lie in one buffer, which keeps its place.
    """

    def __init__(
        self,
        model: BertForPreTraining,
        optimizer: Lamb | AdamW,
        precision: str,
        masking: Masking | None,
        num_rates: int,
        ranks: Ranks,
        flat_gradients: bool = False,
    ) -> None:
        self.model, self.optimizer, self.precision, self.masking = model, optimizer, precision, masking
        self.ranks, self._loss_parts = ranks, data_parallel(model, ranks)
        self.device = device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self._one = torch.ones((), device=device)
        # rates[i] is the rate of the update after i others since the table was filled; `updates` counts those
        self.rates = torch.zeros(num_rates, dtype=torch.float64, device=device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.lr = torch.zeros((), dtype=torch.float64, device=device)  # of the last step
        self.number = torch.zeros(1, dtype=torch.int64, device=device)  # of the next step's first micro-batch
        self.losses = torch.zeros(len(LOSSES), dtype=torch.float64, device=device)  # of the last step
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=device)  # of the last step
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients = FlatGradients(self.params) if flat_gradients else None

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision not in AUTOCAST:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=PRECISIONS[self.precision])

    def prepare(self, num_batches: int) -> bool:
        """Before a step over so many micro-batches; whether gradients have another place from now on."""
        if num_batches == 1 or all(gradient_dtype(p) not in _LOW for p in self.params if p.requires_grad):
            return False
        collect_in_fp32(self.params)
        if self.gradients is not None:
            self.gradients = FlatGradients(self.params)
        return True

    def __call__(self, batches: Sequence[Batch], *, rehearsal: bool = False) -> None:
        """One update over micro-batches that are on the device; sets `losses`, `lr` and the optimizer's norm.

        A non-finite gradient changes neither weights nor moments nor `updates`; under fp16 it halves the loss
        scale. A `rehearsal` makes it non-finite.
        """
        self.lr.copy_(self.rates.take(self.updates))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        if self.masking is not None:
            first, stride = self.number + self.ranks.rank, self.ranks.world_size
            batches = [self.masking(batch, first + index * stride) for index, batch in enumerate(batches)]
        if self.gradients is not None:
            self.gradients.attach()
        losses = self._backward(batches)
        if rehearsal:
            next(p.grad for p in self.params if p.grad is not None).fill_(torch.nan)
        if self.gradients is None:
            self._update()
            self.optimizer.zero_grad(set_to_none=True)
        else:
            with self.gradients.of_the_step():
                self._update()
            self.gradients.zero()
        self.losses.copy_(losses)
        self.grad_norm.copy_(self.optimizer.grad_norm)
        self.optimizer.grad_norm = self.grad_norm  # where a replay writes it, too
        self.number += MICRO_BATCHES
        self.updates += self.grad_norm.isfinite()

    def rehearse(self, batch: Batch) -> None:
        """Do all that a step does, and leave weights, moments, counts and loss scale as they are.

        What a step needs is there afterwards: moments, compiled kernels. Random numbers are drawn. Waits for
        the device.
        """
        kept = (self.number, self.losses, self.lr, self.grad_norm)
        before, scaler = [tensor.clone() for tensor in kept], self.scaler.state_dict()
        self([batch], rehearsal=True)
        for tensor, value in zip(kept, before):
            tensor.copy_(value)
        if scaler:
            self.scaler.load_state_dict(scaler)

    def _backward(self, batches: Sequence[Batch]) -> Tensor:
        """Gradients of the mean losses of all micro-batches of all ranks; returns the sum of this one's
        `losses_of`."""
        mlm_count = sum((batch.masked_labels != IGNORE_INDEX).sum() for batch in batches)
        nsp_count = sum((batch.next_sentence_labels != IGNORE_INDEX).sum() for batch in batches)
        assert isinstance(mlm_count, Tensor) and isinstance(nsp_count, Tensor), "a step needs a batch"
        mlm_count, nsp_count = self.ranks.sum_(torch.stack((mlm_count, nsp_count))).clamp_(min=1)
        losses = torch.zeros_like(self.losses)
        for index, batch in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else without_reduction(self._loss_parts):
                with self.autocast():
                    parts = self._loss_parts(batch)
                loss = parts.mlm_sum / mlm_count + parts.nsp_sum / nsp_count
                self.scaler.scale(loss).backward()
            losses += losses_of(parts)
        return losses

    def _update(self) -> None:
        self.scaler.step(self.optimizer)  # the optimizer unscales, clips, and skips a bad step itself
        self.scaler.update()
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.scale(self._one).clamp(min=MIN_LOSS_SCALE))
