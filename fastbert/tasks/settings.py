"""The options of a fine-tuning run that are the same for every task."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fastbert.errors import UserError


def shown(default: str, metavar: str) -> Any:
    """How `--help` shows an option whose default depends on other things."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {default})", metavar=metavar)


@dataclass
class Files:
    model: str
    """Model or run folder, or hub id, to start from."""
    train: Path
    """File of training examples."""
    output: Path
    """Folder for the model, its scores, predictions and card; an interrupted run in it is continued."""
    eval: Annotated[Path | None, shown("a tenth of the training examples, held out", "PATH")] = None
    """File of examples that choose the best model."""
    test: Annotated[tuple[Path, ...], shown("none", "PATH [PATH ...]")] = ()
    """More files to score with the best model at the end."""
    overwrite: bool = False
    """Delete what an earlier run left in the output folder."""


@dataclass
class Training:
    epochs: int = 3
    """Passes over the training examples."""
    batch_size: int = 32
    """Examples a step."""
    lr: float = 5e-5
    """Peak learning rate; the paper tries 2e-5, 3e-5 and 5e-5, and small models like the last; a new head
    on a body that is not trained (the task features) learns at 1e-3."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises; then it falls to 0 in a straight line."""
    weight_decay: float = 0.01
    """Decay of all weights but biases and LayerNorm."""
    clip: float = 1.0
    """Limit of the gradient norm; 0 = none."""
    max_length: Annotated[int | None, shown("the task's, and the model's at most", "INT")] = None
    """Tokens of a sequence at most, special tokens included."""
    max_train_examples: Annotated[int | None, shown("all", "INT")] = None
    """Train on a random sample of so many examples."""
    layer_decay: float = 1.0
    """Each layer learns at this share of the rate of the one above it."""
    freeze: Literal["none", "embeddings", "body"] = "none"
    """What is not trained: the embeddings, or all but the new head."""
    freeze_layers: int = 0
    """Do not train the embeddings and so many of the lowest layers."""
    eval_every: Annotated[int | None, shown("once an epoch", "INT")] = None
    """Steps between evaluations."""
    patience: Annotated[int | None, shown("never", "INT")] = None
    """Stop after so many evaluations without a better score."""
    padded: bool = False
    """Pad the sequences of a batch to the longest, for comparison."""
    tokens_per_batch: Annotated[int, shown("4096 on a CPU, 32768 on a GPU", "INT")] = 0
    """Tokens that are computed at once; a step of more is split, which changes nothing but rounding."""
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, shown("fp32 on a CPU, bf16 on a GPU", "{fp32,bf16,fp16}")
    ] = None
    """Arithmetic of the matrix products; weights and moments are fp32."""
    device: Annotated[str | None, shown("cuda where there is one, else cpu", "STR")] = None
    """Where to train."""
    seed: int = 42
    """Of the head's weights, the order of examples, and dropout."""
    log_every: int = 10
    """Steps between metric rows."""


def training_defaults(task: type) -> Training:
    """The options of a task's runs where nothing is said: a head may learn at another rate than a body."""
    return Training(lr=getattr(task, "default_lr", Training.lr))


def check(t: Training) -> None:
    """Raise UserError for values that cannot work, before anything is read or written."""
    in_range = [
        ("--epochs", t.epochs, t.epochs >= 1, "at least 1"),
        ("--batch-size", t.batch_size, t.batch_size >= 1, "at least 1"),
        ("--lr", t.lr, 0 < t.lr < math.inf, "above 0"),
        ("--warmup", t.warmup, 0 <= t.warmup < 1, "at least 0 and below 1"),
        ("--weight-decay", t.weight_decay, 0 <= t.weight_decay < math.inf, "at least 0"),
        ("--clip", t.clip, 0 <= t.clip < math.inf, "at least 0"),
        ("--layer-decay", t.layer_decay, 0 < t.layer_decay <= 1, "above 0 and at most 1"),
        ("--freeze-layers", t.freeze_layers, t.freeze_layers >= 0, "at least 0"),
        ("--log-every", t.log_every, t.log_every >= 1, "at least 1"),
        ("--tokens-per-batch", t.tokens_per_batch, t.tokens_per_batch >= 0, "at least 1"),
        ("--seed", t.seed, 0 <= t.seed < 2**63, "from 0 to 2**63 - 1"),
    ]
    for name in ("max_length", "max_train_examples", "eval_every", "patience"):
        value, least = getattr(t, name), 3 if name == "max_length" else 1
        if value is not None:
            in_range.append((f"--{name.replace('_', '-')}", value, value >= least, f"at least {least}"))
    for name, value, fine, limit in in_range:
        if not fine:
            raise UserError(f"{name} {value} is out of range; give a value {limit}")
