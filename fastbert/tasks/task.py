"""What a fine-tuning task is: how its file is read, what the model learns from it, and how it is scored.

A task turns a file into examples, examples into features (token ids with a target), and the model's outputs
back into predictions. Everything else (batches, the loop, files, the commands) is the same for all tasks and
lives in training.py and run.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from fastbert.batch import PackedBatch, PaddedBatch
from fastbert.pretrained import PretrainedModel

Batch = PackedBatch | PaddedBatch
Say = Callable[[str], None]  # one line for the person at the terminal


@dataclass
class Feature:
    """One sequence for the model, special tokens included."""

    input_ids: list[int]
    token_type_ids: list[int]
    target: Any = None  # what the task's loss reads; None where the file has no labels
    example: int = 0  # index of its example in the list that `features` was given


class Task(Protocol):
    """A task of one file format and one head. Constructed as `TaskClass(options, say)`.

    Files are read and checked before the model is built: every problem of the data is a UserError that names
    file, row, value and remedy. The order of calls in a fine-tuning run is read, prepare, build_model,
    features, then loss / outputs / predictions / score; in a prediction it is load_model, read, features,
    outputs, predictions.
    """

    name: ClassVar[str]
    options_class: ClassVar[type]  # dataclass: the task's own command-line options, each with a docstring
    main_metric: str  # the score that chooses the best model; higher is better
    default_max_length: ClassVar[int]  # tokens a feature has at most, if --max-length does not say
    keeps_examples_together: ClassVar[bool]  # a loss reads all features of an example (endings of a choice)
    options: Any  # an options_class; written beside the model and given back to `__init__` for predictions

    def __init__(self, options: Any, say: Say) -> None: ...

    def read(self, path: Path, *, labels_required: bool) -> Iterator[Any]:
        """The examples of a file, streamed; without `labels_required` a file may lack labels."""
        ...

    def prepare(self, train: list[Any], evaluation: list[Any]) -> None:
        """Decide label names and problem type; check what needs both files."""
        ...

    def build_model(self, source: str) -> PretrainedModel:
        """The pre-trained body of a folder or hub id under this task's head, label names in its config."""
        ...

    def load_model(self, folder: str) -> PretrainedModel:
        """A fine-tuned model as saved; label names and problem type are taken from its config."""
        ...

    def features(self, examples: Sequence[Any], tokenizer: Tokenizer, max_length: int) -> list[Feature]:
        """The features of the examples, in their order; each example has at least one."""
        ...

    def count(self, features: Sequence[Feature]) -> float:
        """What a sum of losses over these features is divided by (targets, tokens, class weights)."""
        ...

    def loss(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> Tensor:
        """Sum of the losses of a batch of these features: an fp32 scalar with a graph, not divided."""
        ...

    def outputs(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> list[np.ndarray]:
        """For each feature what `predictions` needs of the model, fp32 on the CPU."""
        ...

    def predictions(
        self, examples: Sequence[Any], features: Sequence[Feature], outputs: Sequence[np.ndarray]
    ) -> list[Any]:
        """One prediction an example."""
        ...

    def score(self, examples: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
        """The task's metrics, `main_metric` among them."""
        ...

    def row(self, example: Any, prediction: Any) -> dict[str, Any]:
        """One line of a predictions file: JSON values by column name."""
        ...

    def write_predictions(self, folder: Path, examples: Sequence[Any], predictions: Sequence[Any]) -> Path:
        """The task's own predictions file in a folder; returns its path."""
        ...

    def draw(self, folder: Path, examples: Sequence[Any], predictions: Sequence[Any]) -> list[Path]:
        """Pictures of the evaluation, if the task has some; returns their paths."""
        ...


def forward(model: PretrainedModel, batch: Batch) -> Any:
    """The model's output of a batch; token outputs are [T, ...] or [B, S, ...], see `token_rows`."""
    if isinstance(batch, PackedBatch):
        return model(batch)
    return model(batch.input_ids, batch.attention_mask, batch.token_type_ids)


def token_rows(values: Tensor, batch: Batch) -> Tensor:
    """Token outputs -> [T, ...]: the tokens of all features end to end, without padding.

    Feature i's tokens are the next `len(features[i].input_ids)` rows.
    """
    if isinstance(batch, PackedBatch):
        return values
    return values[batch.attention_mask]
