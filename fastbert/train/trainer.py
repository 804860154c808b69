"""One optimizer step and one evaluation: no files, no printing.

Losses are sums with counts. A step divides once, by the counts of all its micro-batches, so accumulation,
packing and padding give the numbers that one big batch would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fastbert import ops
from fastbert.batch import IGNORE_INDEX, PackedBatch, PaddedBatch
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining, LossParts
from fastbert.optim import AdamW, Lamb

Batch = PackedBatch | PaddedBatch
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of the products
RATES = 1024  # steps after which the device is asked how many of them were updates
MICRO_BATCHES = 2**20  # more than any step has: tells the batches of all steps apart
MIN_LOSS_SCALE = 1.0  # halving forever would end in a scale of zero, and in divisions by it


@dataclass
class Totals:
    """Running sums of losses and counts, kept on the device until somebody asks."""

    mlm_sum: float | Tensor = 0.0
    mlm_count: int | Tensor = 0
    mlm_correct: int | Tensor = 0
    nsp_sum: float | Tensor = 0.0
    nsp_count: int | Tensor = 0
    nsp_correct: int | Tensor = 0

    def add(self, parts: LossParts) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(parts, field.name).detach())

    def metrics(self) -> dict[str, float]:
        """Means (nats a token, nats a pair, shares). Reads the device."""
        mlm_count, nsp_count = max(1, int(self.mlm_count)), max(1, int(self.nsp_count))
        mlm_loss, nsp_loss = float(self.mlm_sum) / mlm_count, float(self.nsp_sum) / nsp_count
        return {
            "loss": mlm_loss + nsp_loss,
            "mlm_loss": mlm_loss,
            "mlm_accuracy": int(self.mlm_correct) / mlm_count,
            "nsp_loss": nsp_loss,
            "nsp_accuracy": int(self.nsp_correct) / nsp_count,
        }


def check_batch(batch: Batch, config: BertConfig) -> None:
    """IndexError that names an id and its limit, if the batch is on the CPU and an id is outside its table.

    Some 0.1 ms for 32,768 tokens; on a GPU, looking would wait for it.
    """
    labels = batch.masked_labels
    limits = [
        ("input_ids", batch.input_ids, "vocab_size"),
        ("token_type_ids", batch.token_type_ids, "type_vocab_size"),
        ("masked_labels", labels.masked_fill(labels == IGNORE_INDEX, 0), "vocab_size"),
    ]
    if isinstance(batch, PackedBatch):  # rows of a PaddedBatch count their positions from 0
        limits.append(("position_ids", batch.position_ids, "max_position_embeddings"))
    for name, ids, limit_name in limits:
        ops.check_ids(name, ids, limit_name, getattr(config, limit_name))


class Trainer:
    """Runs optimizer steps of a BertForPreTraining.

    Args:
        model: on its device already.
        optimizer: clips by global norm itself and leaves everything unchanged at a non-finite gradient.
        learning_rate: updates done -> learning rate of the next one.
        precision: "fp32", or "bf16" / "fp16" = autocast over fp32 weights, fp16 with loss scaling.
        masking: (batch on the device, number) -> masked batch, for training batches that come without masks;
            the number is that of the step and the micro-batch, so a resume masks as the whole run.
    """

    def __init__(
        self,
        model: BertForPreTraining,
        optimizer: Lamb | AdamW,
        learning_rate: Callable[[int], float],
        precision: str = "fp32",
        masking: Callable[[Batch, int], Batch] | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
        self.model, self.optimizer, self.learning_rate = model, optimizer, learning_rate
        self.precision = precision
        self.masking = masking
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.step = 0  # steps taken, skipped ones included
        self._one = torch.ones((), device=self.device)
        # the updates when the device was last asked, and of the steps since then: their number, that of the
        # updates among them, and the learning rates if all of them are updates
        self._known_updates = 0
        self._new_steps = 0
        self._new_updates = torch.zeros((), dtype=torch.int64, device=self.device)
        self._rates = torch.zeros(RATES, dtype=torch.float64, device=self.device)

    @property
    def updates(self) -> int:
        """Steps that changed the weights: what schedules count. Waits for the device."""
        self._ask_for_updates()
        return self._known_updates

    def _ask_for_updates(self) -> None:
        if self._new_steps:
            self._known_updates += int(self._new_updates)
            ops.raise_reported_ids()  # the device is done with all steps
            self._new_updates.zero_()
            self._new_steps = 0

    def _next_learning_rate(self) -> Tensor:
        """The learning rate of the next update, 0-dim: the device knows which update that is."""
        if self._new_steps == RATES:
            self._ask_for_updates()
        self._rates[self._new_steps] = self.learning_rate(self._known_updates + self._new_steps)
        return self._rates.take(self._new_updates)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=PRECISIONS[self.precision])

    def train_step(self, batches: Sequence[Batch], totals: Totals) -> None:
        """Forward, backward and one update over all micro-batches; adds their losses to `totals`.

        Where the optimizer runs through its kernels, the host does not wait for the device.
        A step with a non-finite gradient changes neither weights nor moments nor schedule; under fp16 it
        halves the loss scale. IndexError, before anything is computed, for an id outside the model's tables.
        """
        for batch in batches:
            check_batch(batch, self.model.config)
        self.model.train()
        lr = self._next_learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        on_device = [batch.to(self.device, non_blocking=True) for batch in batches]
        if self.masking is not None:
            first = self.step * MICRO_BATCHES
            on_device = [self.masking(batch, first + index) for index, batch in enumerate(on_device)]
        mlm_count = sum((batch.masked_labels != IGNORE_INDEX).sum() for batch in on_device)
        nsp_count = sum((batch.next_sentence_labels != IGNORE_INDEX).sum() for batch in on_device)
        assert isinstance(mlm_count, Tensor) and isinstance(nsp_count, Tensor), "a step needs a batch"
        for batch in on_device:
            with self._autocast():
                parts = self.model.loss_parts(batch)
            loss = parts.mlm_sum / mlm_count.clamp(min=1) + parts.nsp_sum / nsp_count.clamp(min=1)
            self.scaler.scale(loss).backward()
            totals.add(parts)
        self.scaler.step(self.optimizer)  # the optimizer unscales, clips, and skips a bad step itself
        self.scaler.update()
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.scale(self._one).clamp(min=MIN_LOSS_SCALE))
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._new_steps += 1
        self._new_updates += self.optimizer.grad_norm.isfinite()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Losses and accuracies over `batches`, without dropout."""
        training = self.model.training
        self.model.eval()
        totals = Totals()
        for batch in batches:
            check_batch(batch, self.model.config)
            with self._autocast():
                totals.add(self.model.loss_parts(batch.to(self.device)))
        self.model.train(training)
        return totals.metrics()

    def state_dict(self) -> dict[str, Any]:
        """JSON: step, updates, loss scale. Weights and moments are saved apart."""
        return {"step": self.step, "updates": self.updates, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self._known_updates = int(state["step"]), int(state["updates"])
        self._new_steps = 0
        self._new_updates.zero_()
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
