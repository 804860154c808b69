"""One optimizer step and one evaluation: no files, no printing.

Losses are sums with counts. A step divides once, by the counts of all its micro-batches on all ranks, so
accumulation, packing, padding and several ranks give the numbers that one big batch would.
`fastbert.train.step` is what the device does; here is what the host does around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastbert import ops
from fastbert.batch import IGNORE_INDEX, PackedBatch
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining
from fastbert.optim import AdamW, Lamb
from fastbert.train.distributed import Ranks, is_sharded
from fastbert.train.graphed import GraphedStep
from fastbert.train.masters import full_weights, load_full_weights, lower_weights
from fastbert.train.step import LOSSES, MICRO_BATCHES, PRECISIONS, Batch, Masking, TrainingStep, losses_of

RATES = 1024  # learning rates that are worked out ahead


class Totals:
    """Running sums of losses and counts, kept on the device until somebody asks."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, losses: Tensor) -> None:
        """Add the numbers of `step.losses_of`."""
        self._sums = losses.clone() if self._sums is None else self._sums.add_(losses)

    def sums(self) -> dict[str, float]:
        """By the names of LOSSES. Reads the device."""
        return dict.fromkeys(LOSSES, 0.0) if self._sums is None else dict(zip(LOSSES, self._sums.tolist()))

    def metrics(self, ranks: Ranks | None = None) -> dict[str, float]:
        """Means over all ranks (nats a token, nats a pair, shares). Reads the device."""
        sums = self.sums()
        if ranks is not None:
            sums = dict(zip(sums, ranks.sum_on_host(list(sums.values()))))
        mlm_count, nsp_count = max(1.0, sums["mlm_count"]), max(1.0, sums["nsp_count"])
        mlm_loss, nsp_loss = sums["mlm_sum"] / mlm_count, sums["nsp_sum"] / nsp_count
        return {
            "loss": mlm_loss + nsp_loss,
            "mlm_loss": mlm_loss,
            "mlm_accuracy": sums["mlm_correct"] / mlm_count,
            "nsp_loss": nsp_loss,
            "nsp_accuracy": sums["nsp_correct"] / nsp_count,
        }


def _rounds(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    iterator = iter(batches)
    while round_ := list(islice(iterator, size)):
        yield round_


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
        precision: "fp32"; "bf16" = bf16 weights, rounded from fp32 ones that the optimizer keeps: the model
            is changed, and one that is sharded was told so before; "bf16-autocast" or "fp16" = autocast over
            fp32 weights, fp16 with loss scaling.
        masking: (batch on the device, number [1] there) -> masked batch, for training batches that come
            without masks; the number is that of the step and the micro-batch, so a resume masks as the whole
            run.
        cuda_graph: replay each step as one CUDA graph; where that cannot be, say why, once. Default: on CUDA.
        ranks: the processes that train the model together, each with as many micro-batches a step; default:
            this one.
    """

    def __init__(
        self,
        model: BertForPreTraining,
        optimizer: Lamb | AdamW,
        learning_rate: Callable[[int], float],
        precision: str = "fp32",
        masking: Masking | None = None,
        cuda_graph: bool | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
        self.model, self.optimizer, self._learning_rate = model, optimizer, learning_rate
        self.ranks = ranks or Ranks()
        self.device = next(model.parameters()).device
        self.sharded = is_sharded(model)
        if precision == "bf16" and not self.sharded:
            lower_weights(model, optimizer, PRECISIONS[precision])
        on_cuda = self.device.type == "cuda"
        cuda_graph = on_cuda if cuda_graph is None else cuda_graph
        # one buffer spares a GPU launches; a CPU would only write the gradients once more
        flat_gradients = (on_cuda or cuda_graph) and self.ranks.alone  # several ranks have DDP's buckets
        self.device_step = TrainingStep(
            model, optimizer, precision, masking, RATES, self.ranks, flat_gradients
        )
        self.graphed_step = GraphedStep(self.device_step) if cuda_graph else None
        self.step = 0  # steps taken, skipped ones included
        # the updates when the device was last asked, and the steps since then
        self._known_updates = 0
        self._new_steps = 0
        # the table of learning rates begins with that of the update after so many; None = to be filled
        self._table_start: int | None = None

    @property
    def learning_rate(self) -> Callable[[int], float]:
        """Updates done -> learning rate of the next one. Setting it waits for the device."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Callable[[int], float]) -> None:
        self._ask_for_updates()
        self._learning_rate, self._table_start = learning_rate, None

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss, under fp16."""
        return self.device_step.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler) -> None:
        self.device_step.scaler = scaler
        self._forget_graph()

    @property
    def updates(self) -> int:
        """Steps that changed the weights: what schedules count. Waits for the device."""
        self._ask_for_updates()
        return self._known_updates

    def _ask_for_updates(self) -> None:
        if self._new_steps:
            assert self._table_start is not None
            self._known_updates = self._table_start + int(self.device_step.updates)
            ops.raise_reported_ids()  # the device is done with all steps
            self._new_steps = 0
            if self._known_updates - self._table_start > RATES // 2:
                self._table_start = None  # filled while the updates are known, so that nobody need ask again

    def _prepare_learning_rates(self) -> None:
        """See to it that the table has the rate of the next update, whichever that is."""
        if self._table_start is not None:
            if self._known_updates + self._new_steps - self._table_start < RATES:
                return
            self._ask_for_updates()
        first = self._table_start = self._known_updates
        rates = torch.tensor(
            [self.learning_rate(first + later) for later in range(RATES)], dtype=torch.float64
        )
        if self.device.type == "cuda":
            rates = rates.pin_memory()  # or the host would wait for the copy
        self.device_step.rates.copy_(rates, non_blocking=True)
        self.device_step.updates.zero_()

    def train_step(self, batches: Sequence[Batch], totals: Totals) -> None:
        """Forward, backward and one update over all micro-batches; adds their losses to `totals`.

        Where the optimizer runs through its kernels, the host does not wait for the device.
        A step with a non-finite gradient changes neither weights nor moments nor schedule; under fp16 it
        halves the loss scale. IndexError, before anything is computed, for an id outside the model's tables.
        """
        for batch in batches:
            check_batch(batch, self.model.config)
        self.model.train()
        self._prepare_learning_rates()
        if self.graphed_step is not None:
            self.graphed_step(batches)
        else:
            self.device_step.prepare(len(batches))
            self.device_step([batch.to(self.device, non_blocking=True) for batch in batches])
        totals.add(self.device_step.losses)
        self.step += 1
        self._new_steps += 1

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Losses and accuracies over `batches`, of which each rank takes its share, without dropout."""
        training = self.model.training
        self.model.eval()
        totals = Totals()
        for round_ in _rounds(batches, self.ranks.world_size):
            is_mine = self.ranks.rank < len(round_)
            if not is_mine and not self.sharded:
                break
            # all ranks put a sharded model together as often: one that is out of batches repeats another's
            batch = round_[self.ranks.rank if is_mine else 0]
            check_batch(batch, self.model.config)
            with self.device_step.autocast():
                losses = losses_of(self.model.loss_parts(batch.to(self.device)))
            if is_mine:
                totals.add(losses)
        self.model.train(training)
        return totals.metrics(self.ranks)

    def weights(self) -> dict[str, Tensor]:
        """The model's state dict in fp32, as it is exported and saved; {} where another rank has it.

        Of a sharded model on the host, and on rank 0 only; all ranks have to call this.
        """
        return full_weights(self.model, self.optimizer, keep=not self.sharded or self.ranks.is_main)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Go on from `weights()`; load the optimizer's state before."""
        load_full_weights(self.model, self.optimizer, weights)
        self._forget_graph()

    def _forget_graph(self) -> None:
        if self.graphed_step is not None:
            self.graphed_step.forget()

    def state_dict(self) -> dict[str, Any]:
        """JSON: step, updates, loss scale. Weights and moments are saved apart."""
        return {"step": self.step, "updates": self.updates, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self._known_updates = int(state["step"]), int(state["updates"])
        self._new_steps = 0
        self._table_start = None
        self.device_step.number.fill_(self.step * MICRO_BATCHES)
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
