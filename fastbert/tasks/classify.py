"""Sentences and pairs -> one label, or any number of labels each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from fastbert.errors import UserError
from fastbert.heads import BertForSequenceClassification
from fastbert.pretrained import PretrainedModel
from fastbert.tasks import metrics, pictures
from fastbert.tasks.models import are_generic, head_labels, load_head, source_folder
from fastbert.tasks.settings import shown
from fastbert.tasks.tables import is_number
from fastbert.tasks.task import Batch, Feature, Say, forward
from fastbert.tasks.text import Encoder, TextExample, TextOptions, layout_of, read_texts, text_features

MULTI, SINGLE = "multi_label_classification", "single_label_classification"


@dataclass
class ClassifyOptions(TextOptions):
    label: Annotated[tuple[str, ...], shown("guessed, and said", "COLUMN [COLUMN ...]")] = ()
    """Column of the label, by name or number; several = a column of 0 and 1 for each."""
    separator: Annotated[str | None, shown("none", "STR")] = None
    """What stands between the labels of a cell that may hold several, or none."""
    threshold: float = 0.5
    """Probability from which a label is given where several may hold."""
    metric: Annotated[
        Literal["accuracy", "f1", "f1_macro", "f1_micro", "matthews"] | None,
        shown(
            "accuracy; f1_micro for several labels; GLUE's own", "{accuracy,f1,f1_macro,f1_micro,matthews}"
        ),
    ] = None
    """The score that chooses the best model."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced = each label weighs the same in the loss, however rare."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all labels."""


@dataclass
class LabelPrediction:
    probabilities: np.ndarray  # [labels] fp32
    chosen: list[int]  # indices, one unless several labels may hold


class ClassifyTask:
    name: ClassVar[str] = "classify"
    options_class: ClassVar[type] = ClassifyOptions
    default_max_length: ClassVar[int] = 512
    keeps_examples_together: ClassVar[bool] = False

    def __init__(self, options: ClassifyOptions, say: Say) -> None:
        self.options, self.say = options, say
        self.encode = Encoder(say)
        self.layout = layout_of(options)
        self.labels: list[str] = []
        self.is_multi = len(options.label) > 1 or options.separator is not None
        self.weights: Tensor | None = None  # [labels]
        self._check_options()
        self.main_metric = self._main_metric()

    def _check_options(self) -> None:
        o = self.options
        if self.layout and self.layout.is_regression:
            raise UserError(f"{o.glue or o.layout} has scores, not labels: use the task regress")
        if not 0 <= o.label_smoothing < 1:
            raise UserError(f"--label-smoothing {o.label_smoothing} is out of range; give 0 to below 1")
        if not 0 < o.threshold < 1:
            raise UserError(f"--threshold {o.threshold} is out of range; give a value between 0 and 1")

    def _main_metric(self) -> str:
        if self.layout and self.options.metric is None:
            return self.layout.metrics[0]
        return self.options.metric or ("f1_micro" if self.is_multi else "accuracy")

    # ---- data

    def read(self, path: Path, *, labels_required: bool) -> Iterator[TextExample]:
        examples = read_texts(
            path,
            self.options,
            labels_required=labels_required,
            say=self.say,
            may_be_empty=self.options.separator is not None,
        )
        return map(self._with_label_names, examples)

    def _with_label_names(self, example: TextExample) -> TextExample:
        """Its label as a name, or a list of names."""
        label, o = example.label, self.options
        if label is None:
            return example
        if len(o.label) > 1:
            wrong = [v for v in label if str(v) not in ("0", "1", "0.0", "1.0", "False", "True")]
            if wrong:
                raise UserError(
                    f"{example.where}: {wrong[0]!r} is neither 0 nor 1, as several --label columns hold"
                )
            example.label = [name for name, v in zip(o.label, label) if str(v) in ("1", "1.0", "True")]
        elif isinstance(label, list | np.ndarray):
            self._become_multi()
            example.label = [str(name) for name in label]
        elif o.separator is not None:
            example.label = [part.strip() for part in str(label).split(o.separator) if part.strip()]
        else:
            example.label = self._name_of(label, example)
        return example

    def _name_of(self, label: Any, example: TextExample) -> str:
        name = str(label)
        if isinstance(label, float) and label.is_integer():
            name = str(int(label))
        if not self.layout or name in self.layout.labels.values():
            return name
        if name not in self.layout.labels:
            known = ", ".join(map(repr, self.layout.labels))
            raise UserError(f"{example.where} has the label {name!r}; the labels of this data are {known}")
        return self.layout.labels[name]

    def _become_multi(self) -> None:
        if not self.is_multi:
            self.is_multi = True
            self.main_metric = self._main_metric()

    def prepare(self, train: list[TextExample], evaluation: list[TextExample]) -> None:
        metrics.require("sklearn")
        if self.layout:
            self.labels = list(self.layout.labels.values())
        elif len(self.options.label) > 1:
            self.labels = list(self.options.label)
        else:
            self.labels = _sorted_labels({name for example in train for name in _names(example)})
        if len(self.labels) < (1 if self.is_multi else 2):
            raise UserError(
                f"{train[0].path} has the one label {', '.join(map(repr, self.labels)) or 'none'}; a "
                "classifier needs at least two (numbers to predict are the task regress)"
            )
        if not self.is_multi and len(self.labels) > max(50, len(train) // 2):
            raise UserError(
                f"{train[0].path} has {len(self.labels)} different labels in {len(train)} rows, for example "
                f"{self.labels[0]!r}: name the column of the labels with --label"
            )
        self._check_known(evaluation, "the training file")
        self._check_metric()
        if self.is_multi and (self.options.class_weights != "none" or self.options.label_smoothing):
            raise UserError(
                "--class-weights and --label-smoothing are for one label a text; leave them out where "
                "several hold"
            )
        if self.options.class_weights == "balanced":
            counts = np.bincount([self.labels.index(e.label) for e in train], minlength=len(self.labels))
            absent = [label for label, count in zip(self.labels, counts) if not count]
            if absent:
                raise UserError(f"--class-weights balanced: no training row has the label {absent[0]!r}")
            self.weights = torch.tensor(len(train) / (len(self.labels) * counts), dtype=torch.float32)

    def _check_known(self, examples: list[TextExample], where: str) -> None:
        known = set(self.labels)
        for example in examples:
            unknown = [name for name in _names(example) if name not in known]
            if unknown:
                raise UserError(
                    f"{example.where} has the label {unknown[0]!r}, which {where} does not have "
                    f"({', '.join(map(repr, self.labels[:20]))}): mend the row, or add rows of that "
                    "label there"
                )

    def _check_metric(self) -> None:
        known = metrics.MULTI_LABEL if self.is_multi else metrics.CLASSIFICATION
        if self.main_metric not in known:
            raise UserError(f"--metric {self.main_metric} does not fit; here are {', '.join(known)}")
        if self.main_metric == "f1" and len(self.labels) != 2:
            raise UserError(f"--metric f1 is for two labels, and there are {len(self.labels)}: use f1_macro")

    # ---- model

    def build_model(self, source: str) -> PretrainedModel:
        folder = source_folder(source, self.say)
        old = head_labels(folder, BertForSequenceClassification)
        if old is not None and not self.options.new_head:
            self._adopt(old, folder)
        self.say(f"labels: {', '.join(self.labels[:20])}{', …' if len(self.labels) > 20 else ''}")
        return load_head(
            BertForSequenceClassification,
            folder,
            self.say,
            labels=self.labels,
            problem_type=MULTI if self.is_multi else SINGLE,
            new_head=self.options.new_head and old is not None,
        )

    def _adopt(self, old: list[str], folder: Path) -> None:
        """Take the order of the labels of a head that exists; UserError where it does not fit the data."""
        if are_generic(old) and len(old) == len(self.labels):
            return
        if set(self.labels) <= set(old) and len(old) > 1:
            if self.weights is not None and old != self.labels:
                by_name = dict(zip(self.labels, self.weights.tolist()))
                self.weights = torch.tensor([by_name.get(label, 1.0) for label in old])
            self.labels = old
            return
        raise UserError(
            f"the head of {folder} has {len(old)} labels ({', '.join(old[:10])}), and the data has "
            f"{len(self.labels)} ({', '.join(self.labels[:10])}); give --new-head to start a new one"
        )

    def load_model(self, folder: str) -> PretrainedModel:
        path = source_folder(folder, self.say)
        old = head_labels(path, BertForSequenceClassification)
        if old is None:
            raise UserError(f"{folder} has no classification head; fine-tune it first")
        model = load_head(BertForSequenceClassification, path, self.say)
        self.labels = old
        if model.config.problem_type == MULTI:
            self._become_multi()
        return model

    def features(
        self, examples: Sequence[TextExample], tokenizer: Tokenizer, max_length: int
    ) -> list[Feature]:
        index = {label: i for i, label in enumerate(self.labels)}

        def target(example: TextExample) -> Any:
            if example.label is None:
                return None
            if not self.is_multi:
                return index.get(example.label)
            return [float(label in example.label) for label in self.labels]

        return text_features(examples, [target(e) for e in examples], self.encode, tokenizer, max_length)

    def count(self, features: Sequence[Feature]) -> float:
        if self.is_multi:
            return float(len(features) * len(self.labels))
        if self.weights is not None:
            return float(self.weights[[f.target for f in features]].sum())
        return float(len(features))

    def loss(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> Tensor:
        logits = forward(model, batch).logits.float()
        targets = torch.tensor([f.target for f in features], device=logits.device)
        if self.is_multi:
            return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        weights = None if self.weights is None else self.weights.to(logits.device)
        smoothing = self.options.label_smoothing
        return F.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=smoothing)

    def outputs(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> list[np.ndarray]:
        return list(forward(model, batch).logits.float().cpu().numpy())

    # ---- predictions

    def predictions(
        self, examples: Sequence[TextExample], features: Sequence[Feature], outputs: Sequence[np.ndarray]
    ) -> list[LabelPrediction]:
        found = []
        for logits in torch.tensor(np.stack(outputs)) if outputs else ():
            if self.is_multi:
                probabilities = torch.sigmoid(logits)
                chosen = (probabilities >= self.options.threshold).nonzero().flatten().tolist()
            else:
                probabilities, chosen = torch.softmax(logits, dim=-1), [int(logits.argmax())]
            found.append(LabelPrediction(probabilities.numpy(), chosen))
        return found

    def score(
        self, examples: Sequence[TextExample], predictions: Sequence[LabelPrediction]
    ) -> dict[str, float]:
        if self.is_multi:
            truth = np.array([[label in e.label for label in self.labels] for e in examples], dtype=int)
            indices = range(len(self.labels))
            guess = np.array([[i in p.chosen for i in indices] for p in predictions], dtype=int)
            return metrics.multi_label_scores(truth, guess)
        labels = [self.labels.index(e.label) for e in examples]
        scores = metrics.classification_scores(labels, [p.chosen[0] for p in predictions], len(self.labels))
        if self.layout and self.options.metric is None:
            return {name: scores[name] for name in self.layout.metrics}
        return scores

    def row(self, example: TextExample, prediction: LabelPrediction) -> dict[str, Any]:
        names = [self.labels[i] for i in prediction.chosen]
        row: dict[str, Any] = {"row": example.row, "label": names if self.is_multi else names[0]}
        digits = [float(f"{p:.6g}") for p in prediction.probabilities]
        return row | {"probabilities": dict(zip(self.labels, digits))}

    def write_predictions(
        self, folder: Path, examples: Sequence[TextExample], predictions: Sequence[LabelPrediction]
    ) -> Path:
        path = folder / "predictions.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for example, prediction in zip(examples, predictions):
                row = self.row(example, prediction) | {"expected": example.label}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return path

    def draw(
        self, folder: Path, examples: Sequence[TextExample], predictions: Sequence[LabelPrediction]
    ) -> list[Path]:
        """confusion_matrix.png, and pr_curve.png of two labels; nothing where several labels may hold."""
        if self.is_multi:
            return []
        truth = np.array([self.labels.index(e.label) for e in examples])
        guess = np.array([p.chosen[0] for p in predictions])
        drawn = [pictures.confusion_matrix(folder / "confusion_matrix.png", truth, guess, self.labels)]
        if len(self.labels) == 2 and 0 < truth.sum() < len(truth):
            scores = np.array([p.probabilities[1] for p in predictions])
            drawn.append(pictures.pr_curve(folder / "pr_curve.png", truth, scores, self.labels[1]))
        return drawn


def _names(example: TextExample) -> list[str]:
    return example.label if isinstance(example.label, list) else [example.label]


def _sorted_labels(names: set[str]) -> list[str]:
    """By value where all are numbers, else by name."""
    if all(map(is_number, names)):
        return sorted(names, key=lambda name: (float(name), name))
    return sorted(names)
