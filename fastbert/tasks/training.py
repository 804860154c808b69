"""Fine-tuning itself: packed steps, evaluations, the best model kept, resume.

A step is so many examples, as in the paper. Their sequences lie end to end in one packed batch, or in several
where they exceed the token budget; losses are sums, divided once by the count of the whole step, so neither
the packing nor the budget changes what is learned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastbert import ops
from fastbert.batch import IGNORE_INDEX, PackedBatch
from fastbert.errors import UserError
from fastbert.optim import AdamW, learning_rate, parameter_groups
from fastbert.pretrained import PretrainedModel
from fastbert.tasks.settings import Training
from fastbert.tasks.task import Batch, Feature, Task
from fastbert.train import checkpoint as ckpt
from fastbert.train import optimizer_state
from fastbert.train.distributed import Ranks
from fastbert.train.step import PRECISIONS

CPU_TOKENS, GPU_TOKENS = 4096, 32768  # of a packed batch


# ---- batches


def collate(features: Sequence[Feature]) -> PackedBatch:
    """The sequences end to end, without filler."""
    lengths = [len(feature.input_ids) for feature in features]
    ids = np.fromiter((i for f in features for i in f.input_ids), np.int64, sum(lengths))
    types = np.fromiter((i for f in features for i in f.token_type_ids), np.int64, sum(lengths))
    positions = np.concatenate([np.arange(length) for length in lengths])
    return PackedBatch(
        input_ids=torch.from_numpy(ids),
        token_type_ids=torch.from_numpy(types),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        masked_positions=torch.zeros(0, dtype=torch.int64),
        masked_labels=torch.zeros(0, dtype=torch.int64),
        next_sentence_labels=torch.full((len(features),), IGNORE_INDEX),
        num_tokens=len(ids),
    )


def units_of(features: Sequence[Feature], together: bool) -> list[list[int]]:
    """What a batch size counts and no batch divides: each feature, or with `together` those of an example."""
    if not together:
        return [[index] for index in range(len(features))]
    units: list[list[int]] = []
    for index, feature in enumerate(features):
        if index and feature.example == features[index - 1].example:
            units[-1].append(index)
        else:
            units.append([index])
    return units


def by_length(units: Iterable[Sequence[int]], features: Sequence[Feature]) -> list[Sequence[int]]:
    """The units, shortest first."""
    return sorted(units, key=lambda unit: max(len(features[index].input_ids) for index in unit))


def split_by_tokens(
    units: Iterable[Sequence[int]], features: Sequence[Feature], budget: int, padded: bool
) -> list[list[int]]:
    """Whole units into batches of at most `budget` tokens (pads count in rows), at least one unit each."""
    batches: list[list[int]] = []
    tokens = rows = longest = 0
    for unit in units:
        lengths = [len(features[index].input_ids) for index in unit]
        tokens, rows, longest = tokens + sum(lengths), rows + len(unit), max(longest, *lengths)
        if not batches or (rows * longest if padded else tokens) > budget:
            batches.append([])
            tokens, rows, longest = sum(lengths), len(unit), max(lengths)
        batches[-1] += unit
    return batches


class Stepper:
    """A model, its optimizer, and what one step or one evaluation does with them."""

    def __init__(
        self, task: Task, model: PretrainedModel, training: Training, device: torch.device, total_steps: int
    ) -> None:
        self.task, self.model, self.training, self.device = task, model, training, device
        self.total_steps = total_steps
        self.budget = training.tokens_per_batch or (CPU_TOKENS if device.type == "cpu" else GPU_TOKENS)
        self.precision = training.precision or ("fp32" if device.type == "cpu" else "bf16")
        if training.padded:
            model.set_attn_implementation("eager")  # every position is computed
        freeze(model, training)
        self.optimizer = AdamW(
            layered_groups(model, training.weight_decay, training.layer_decay),
            lr=training.lr,
            weight_decay=training.weight_decay,
            max_grad_norm=training.clip,
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self.step = 0

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=PRECISIONS[self.precision])

    def _batch(self, features: Sequence[Feature]) -> Batch:
        batch: Batch = collate(features)
        if self.training.padded:
            batch = collate(features).padded()
        return batch.to(self.device, non_blocking=True)

    def learning_rate(self) -> float:
        t = self.training
        return learning_rate("linear", self.step, peak=t.lr, total=self.total_steps, warmup=t.warmup)

    def train_step(self, features: Sequence[Feature], units: Sequence[Sequence[int]]) -> Tensor:
        """One update over these units of the features; returns the mean loss, on the device."""
        self.model.train()
        body: Any = self.model.base_model
        lr = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_share"]
        # sequences of one length lie side by side: attention takes them together
        units = by_length(units, features)
        count = self.task.count([features[index] for unit in units for index in unit])
        total = torch.zeros((), device=self.device)
        for indices in split_by_tokens(units, features, self.budget, self.training.padded):
            chosen = [features[index] for index in indices]
            with self._autocast():
                loss = self.task.loss(self.model, self._batch(chosen), chosen) / max(count, 1e-12)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.step(self.optimizer)  # which unscales, clips, and skips a bad step itself
        self.scaler.update()
        ops.recycle_gradient(body.embeddings.word_embeddings.weight)  # the largest of all
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    @torch.no_grad()
    def outputs(self, features: Sequence[Feature]) -> list[np.ndarray]:
        """The task's outputs of all features, in their order; computed shortest first, without dropout."""
        found: list[Any] = [None] * len(features)
        for indices in self._evaluation_batches(features):
            chosen = [features[index] for index in indices]
            with self._autocast():
                outputs = self.task.outputs(self.model, self._batch(chosen), chosen)
            for index, output in zip(indices, outputs):
                found[index] = output
        return found

    @torch.no_grad()
    def loss(self, features: Sequence[Feature]) -> float:
        """The mean loss of all features, which have targets; without dropout."""
        total = torch.zeros((), device=self.device)
        for indices in self._evaluation_batches(features):
            chosen = [features[index] for index in indices]
            with self._autocast():
                total += self.task.loss(self.model, self._batch(chosen), chosen)
        return float(total) / max(self.task.count(features), 1e-12)

    def _evaluation_batches(self, features: Sequence[Feature]) -> list[list[int]]:
        self.model.eval()
        units = by_length(units_of(features, self.task.keeps_examples_together), features)
        return split_by_tokens(units, features, self.budget, self.training.padded)


# ---- parameters


def _depths(model: PretrainedModel) -> dict[int, int]:
    """id(parameter) -> layers above it: 0 for head and pooler, most for the embeddings."""
    body: Any = model.base_model
    layers = list(body.encoder.layer)
    depths = {id(p): 0 for p in model.parameters()}
    for number, layer in enumerate(layers):
        depths |= {id(p): len(layers) - number for p in layer.parameters()}
    return depths | {id(p): len(layers) + 1 for p in body.embeddings.parameters()}


def layered_groups(model: PretrainedModel, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """optim.parameter_groups of what is trained, each split by depth: `lr_share` = layer_decay ** depth.

    With a layer_decay of 1 there are the two groups. UserError if nothing is left to train.
    """
    depths = _depths(model)
    groups: list[dict[str, Any]] = []
    for group in parameter_groups(model, weight_decay):
        shares: dict[float, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.requires_grad:
                shares.setdefault(layer_decay ** depths[id(parameter)], []).append(parameter)
        groups += [{**group, "params": params, "lr_share": share} for share, params in shares.items()]
    if not groups:
        raise UserError("nothing is left to train: freeze less")
    return groups


def freeze(model: PretrainedModel, training: Training) -> None:
    """Take what `--freeze` and `--freeze-layers` name out of the training."""
    body: Any = model.base_model
    layers = body.encoder.layer
    if training.freeze_layers > len(layers):
        raise UserError(
            f"--freeze-layers {training.freeze_layers} is out of range; the model has {len(layers)} layers"
        )
    if training.freeze == "body":
        body.requires_grad_(False)
        return
    if training.freeze == "embeddings" or training.freeze_layers:
        body.embeddings.requires_grad_(False)
    for layer in layers[: training.freeze_layers]:
        layer.requires_grad_(False)


# ---- the loop


@dataclass
class Progress:
    """Where a run stands; JSON."""

    step: int = 0
    best_score: float | None = None
    best_step: int = 0
    without_gain: int = 0  # evaluations since the best one
    is_over: bool = False  # early stopping has ended it

    def update(self, score: float) -> bool:
        """Count an evaluation; whether it is the best one so far."""
        if self.best_score is not None and not score > self.best_score:
            self.without_gain += 1
            return False
        self.best_score, self.best_step, self.without_gain = score, self.step, 0
        return True


@dataclass
class Loop:
    """Trains until the last step, early stopping, or `stop`."""

    stepper: Stepper
    features: list[Feature]
    evaluate: Callable[[], dict[str, float]]
    save_model: Callable[[Path], None]
    report: Any
    run_dir: Path
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.units = units_of(self.features, self.stepper.task.keeps_examples_together)

    def run(self, stop: Callable[[], bool]) -> None:
        stepper, training, progress = self.stepper, self.stepper.training, self.progress
        steps_an_epoch = -(-len(self.units) // training.batch_size)
        eval_every = training.eval_every or steps_an_epoch
        losses: list[Tensor] = []
        order: list[int] = []
        while stepper.step < stepper.total_steps and not progress.is_over and not stop():
            epoch, at = divmod(stepper.step, steps_an_epoch)
            if at == 0 or not order:
                order = epoch_order(len(self.units), training.seed, epoch)
            chosen = order[at * training.batch_size : (at + 1) * training.batch_size]
            lr = stepper.learning_rate()
            losses.append(stepper.train_step(self.features, [self.units[index] for index in chosen]))
            progress.step = stepper.step
            is_last = stepper.step == stepper.total_steps
            if stepper.step % training.log_every == 0 or is_last:
                self._log(losses, lr)
                losses = []
            else:
                self.report.advance(stepper.step)
            if stepper.step % eval_every == 0 or is_last:
                self._evaluate()
                self._save()
        if stepper.step % eval_every and not progress.is_over and stepper.step < stepper.total_steps:
            self._save()

    def _log(self, losses: list[Tensor], lr: float) -> None:
        loss = float(torch.stack(losses).mean())  # waits for the device
        if loss != loss and not self.stepper.scaler.is_enabled():
            raise UserError(
                f"the loss is not a number at step {self.stepper.step}: give a lower --lr than "
                f"{self.stepper.training.lr:g}"
            )
        norm = float(self.stepper.optimizer.grad_norm)
        self.report.log({"step": self.stepper.step, "loss": loss, "lr": lr, "grad_norm": norm})

    def _evaluate(self) -> None:
        scores = self.evaluate()
        self.report.log({"step": self.stepper.step, **{f"eval_{k}": v for k, v in scores.items()}})
        if self.progress.update(scores[self.stepper.task.main_metric]):
            self.save_model(self.run_dir)
        patience = self.stepper.training.patience
        self.progress.is_over = patience is not None and self.progress.without_gain >= patience

    def _save(self) -> None:
        """A checkpoint to continue from; the best model itself lies in the run folder."""
        ckpt.save_checkpoint(
            self.run_dir,
            self.stepper.step,
            save_model=self.save_model,
            save_optimizer=self._save_optimizer,
            rng_states=[ckpt.rng_state(self.stepper.device)],
            trainer_state={"progress": vars(self.progress), "scaler": self.stepper.scaler.state_dict()},
            keep_last=1,
        )

    def _save_optimizer(self, folder: Path) -> None:
        stepper, ranks = self.stepper, Ranks()
        optimizer_state.write(
            folder, optimizer_state.host_copy(stepper.model, stepper.optimizer, ranks), ranks
        )

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of this run: weights, moments, place in the data, random state."""
        rng, state = ckpt.load_state(path)
        model = self.stepper.model
        folder = path / ckpt.STATE_DIR / ckpt.OPTIMIZER
        optimizer_state.load(folder, model, self.stepper.optimizer, Ranks())
        weights = type(model).from_pretrained(path, dtype=torch.float32)
        model.load_state_dict(weights.state_dict())
        if self.stepper.scaler.is_enabled():
            self.stepper.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"])
        self.stepper.step = self.progress.step
        ckpt.restore_rng(rng[0], self.stepper.device)


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """A random order of the units, the same for the same seed and epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
