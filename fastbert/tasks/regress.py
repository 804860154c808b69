"""Sentences and pairs -> a number."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from fastbert.errors import UserError
from fastbert.heads import BertForSequenceClassification
from fastbert.pretrained import PretrainedModel
from fastbert.tasks import metrics
from fastbert.tasks.models import head_labels, load_head, source_folder
from fastbert.tasks.task import Batch, Feature, Say, forward
from fastbert.tasks.text import Encoder, TextExample, TextOptions, layout_of, read_texts, text_features


@dataclass
class RegressOptions(TextOptions):
    metric: Literal["pearson", "spearman", "mse"] = "pearson"
    """The score that chooses the best model (of mse the least)."""


class RegressTask:
    name: ClassVar[str] = "regress"
    options_class: ClassVar[type] = RegressOptions
    default_max_length: ClassVar[int] = 512
    keeps_examples_together: ClassVar[bool] = False

    def __init__(self, options: RegressOptions, say: Say) -> None:
        self.options, self.say = options, say
        self.encode = Encoder(say)
        # the best score is the highest, so of mse its negative is scored, too
        self.main_metric = "neg_mse" if options.metric == "mse" else options.metric
        layout = layout_of(options)
        if layout and not layout.is_regression:
            raise UserError(f"{options.glue or options.layout} has labels, not scores: use the task classify")

    def read(self, path: Path, *, labels_required: bool) -> Iterator[TextExample]:
        examples = read_texts(path, self.options, labels_required=labels_required, say=self.say)
        return map(_with_number, examples)

    def prepare(self, train: list[TextExample], evaluation: list[TextExample]) -> None:
        metrics.require("scipy")

    def build_model(self, source: str) -> PretrainedModel:
        folder = source_folder(source, self.say)
        old = head_labels(folder, BertForSequenceClassification)
        if old is not None and len(old) != 1 and not self.options.new_head:
            raise UserError(
                f"the head of {folder} has {len(old)} labels, and a regression has one number; give "
                "--new-head to start a new one"
            )
        return load_head(
            BertForSequenceClassification,
            folder,
            self.say,
            labels=["score"],
            problem_type="regression",
            new_head=self.options.new_head and old is not None,
        )

    def load_model(self, folder: str) -> PretrainedModel:
        path = source_folder(folder, self.say)
        old = head_labels(path, BertForSequenceClassification)
        if old is None or len(old) != 1:
            raise UserError(f"{folder} has no regression head; fine-tune it first")
        return load_head(BertForSequenceClassification, path, self.say)

    def features(
        self, examples: Sequence[TextExample], tokenizer: Tokenizer, max_length: int
    ) -> list[Feature]:
        return text_features(examples, [e.label for e in examples], self.encode, tokenizer, max_length)

    def count(self, features: Sequence[Feature]) -> float:
        return float(len(features))

    def loss(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> Tensor:
        logits = forward(model, batch).logits.float().squeeze(1)
        targets = torch.tensor([f.target for f in features], device=logits.device, dtype=torch.float32)
        return F.mse_loss(logits, targets, reduction="sum")

    def outputs(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> list[np.ndarray]:
        return list(forward(model, batch).logits.float().cpu().numpy())

    def predictions(
        self, examples: Sequence[TextExample], features: Sequence[Feature], outputs: Sequence[np.ndarray]
    ) -> list[float]:
        return [float(output[0]) for output in outputs]

    def score(self, examples: Sequence[TextExample], predictions: Sequence[float]) -> dict[str, float]:
        scores = metrics.regression_scores([e.label for e in examples], predictions)
        if self.main_metric == "neg_mse":
            scores["neg_mse"] = -scores["mse"]
        return scores

    def row(self, example: TextExample, prediction: float) -> dict[str, Any]:
        return {"row": example.row, "score": float(f"{prediction:.6g}")}

    def write_predictions(
        self, folder: Path, examples: Sequence[TextExample], predictions: Sequence[float]
    ) -> Path:
        path = folder / "predictions.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for example, prediction in zip(examples, predictions):
                file.write(json.dumps(self.row(example, prediction) | {"expected": example.label}) + "\n")
        return path

    def draw(self, folder: Path, examples: Sequence[TextExample], predictions: Sequence[float]) -> list[Path]:
        return []


def _with_number(example: TextExample) -> TextExample:
    if example.label is None:
        return example
    try:
        number = float(example.label)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"{example.where} has the target {example.label!r}, which is no finite number: mend or remove it"
        )
    example.label = number
    return example
