"""A question and any number of endings -> the index of the right one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from fastbert.batch import PaddedBatch
from fastbert.errors import UserError
from fastbert.heads import BertForMultipleChoice
from fastbert.pretrained import PretrainedModel
from fastbert.tasks.models import head_labels, load_head, source_folder
from fastbert.tasks.settings import shown
from fastbert.tasks.tables import Choice, Format, Table, open_table
from fastbert.tasks.task import Batch, Feature, Say, forward
from fastbert.tasks.text import Encoder

_CONTEXT_NAMES = ("sent1", "startphrase", "context", "goal", "premise", "question", "ctx", "ctx_a", "text")
_SECOND_NAMES = ("sent2", "question", "ctx_b")  # SWAG's begins the ending, the others stand before it
_LABEL_NAMES = ("label", "labels", "gold", "answer", "answerkey", "correct")
_ENDING = re.compile(r"(ending|choice|answer|option|sol|hypothesis|alternative)[_ ]?([0-9]+|[a-e])", re.I)
MIN_ENDINGS = 2


@dataclass
class ChoiceOptions:
    context: Annotated[str | None, shown("guessed, and said", "COLUMN")] = None
    """Column of what comes before the endings, by name or number."""
    second: Annotated[str | None, shown("guessed, and said", "COLUMN")] = None
    """Column of a second part, put before each ending; "none" = there is none."""
    endings: Annotated[
        tuple[str, ...], shown("those called ending0, answer0, sol1, …", "COLUMN COLUMN [COLUMN ...]")
    ] = ()
    """Columns of the endings."""
    label: Annotated[str | None, shown("guessed, and said", "COLUMN")] = None
    """Column of the right ending: its number, its column's name or its letter."""
    format: Format = "auto"
    """Of the files; auto = by suffix."""
    header: Choice = "auto"
    """Whether the first row of CSV and TSV names the columns."""
    quotes: Choice = "auto"
    """Whether quotes enclose fields; auto = in CSV, not in TSV."""
    new_head: bool = False
    """Start a new head where the model has one already."""


@dataclass
class ChoiceExample:
    context: str
    endings: list[str]
    label: int | None  # index of the right ending
    row: int
    path: Path

    @property
    def where(self) -> str:
        return f"{self.path} row {self.row}"


class ChoiceTask:
    name: ClassVar[str] = "choice"
    options_class: ClassVar[type] = ChoiceOptions
    default_max_length: ClassVar[int] = 512
    keeps_examples_together: ClassVar[bool] = True  # the softmax runs over an example's endings
    main_metric = "accuracy"

    def __init__(self, options: ChoiceOptions, say: Say) -> None:
        self.options, self.say = options, say
        self.encode = Encoder(say)

    # ---- data

    def read(self, path: Path, *, labels_required: bool) -> Iterator[ChoiceExample]:
        o = self.options
        known = [name for name in (o.context, o.second, o.label, *o.endings) if name]
        table = open_table(
            path,
            format=o.format,
            header=o.header,
            quotes=o.quotes,
            known_columns=(*known, *_CONTEXT_NAMES, "ending0", "answer0"),
        )
        if "question" in table.columns and isinstance(_first(table, "question"), dict):
            self.say(f"{path}: {table.format}, questions with their choices")
            return self._questions(table, labels_required)
        return self._rows(table, labels_required)

    def _questions(self, table: Table, labels_required: bool) -> Iterator[ChoiceExample]:
        """CommonsenseQA's objects: a stem, labelled choices, and the label of the right one."""
        question_at = table.columns.index("question")
        key_at = table.columns.index("answerKey") if "answerKey" in table.columns else None
        for row in table.rows():
            where = f"{table.path} row {row.number}"
            try:
                question = row.values[question_at]
                stem = str(question["stem"])
                names = [str(choice["label"]) for choice in question["choices"]]
                endings = [str(choice["text"]) for choice in question["choices"]]
            except (KeyError, TypeError) as error:
                raise UserError(
                    f"{where} is no question with a stem and choices of label and text ({error!r} is wrong "
                    "or missing): mend or remove it"
                ) from error
            key = None if key_at is None else row.values[key_at]
            if labels_required and key is None:
                raise UserError(f"{where} has no answerKey: mend or remove the row")
            label = _label_index(str(key), names, len(endings), 0, where) if labels_required else None
            yield _checked(ChoiceExample(stem, endings, label, row.number, table.path))

    def _rows(self, table: Table, labels_required: bool) -> Iterator[ChoiceExample]:
        o = self.options
        endings = [table.index(name, "--endings") for name in o.endings] or _ending_columns(table)
        if len(endings) < MIN_ENDINGS:
            raise UserError(
                f"cannot tell which columns of {table.path} are the endings: name at least two of "
                f"{', '.join(map(repr, table.columns))} with --endings"
            )
        rest = [i for i in range(len(table.columns)) if i not in endings]
        label = table.index(o.label, "--label") if o.label else _named(table, _LABEL_NAMES, rest)
        context = table.index(o.context, "--context") if o.context else _named(table, _CONTEXT_NAMES, rest)
        if context is None:
            raise UserError(
                f"cannot tell what comes before the endings in {table.path}: name one of "
                f"{', '.join(map(repr, table.columns))} with --context"
            )
        rest = [i for i in rest if i not in (context, label)]
        if o.second is not None:
            second = None if o.second == "none" else table.index(o.second, "--second")
        else:
            # of SWAG's columns startphrase is sent1 and sent2 together
            is_whole = table.columns[context].lower() == "startphrase"
            second = None if is_whole else _named(table, _SECOND_NAMES, rest)
        if labels_required and label is None:
            raise UserError(
                f"{table.path} has no column of the right ending, but "
                f"{', '.join(map(repr, table.columns))}; name it with --label"
            )
        self.say(_described(table, context, second, endings, label if labels_required else None))
        return self._examples(table, context, second, endings, label if labels_required else None)

    def _examples(
        self, table: Table, context: int, second: int | None, endings: list[int], label: int | None
    ) -> Iterator[ChoiceExample]:
        names = [table.columns[index] for index in endings]
        first = _first_number(table, names, label)
        for row in table.rows():
            texts = [_text(row.values[index]) for index in endings]
            while texts and not texts[-1]:  # rows of fewer endings leave the last cells empty
                texts.pop()
            where = f"{table.path} row {row.number}"
            right = None
            if label is not None:
                right = _label_index(_text(row.values[label]), names, len(texts), first, where)
            if second is not None:
                texts = [f"{_text(row.values[second])} {text}" for text in texts]
            yield _checked(ChoiceExample(_text(row.values[context]), texts, right, row.number, table.path))

    def prepare(self, train: list[ChoiceExample], evaluation: list[ChoiceExample]) -> None:
        counts = sorted({len(example.endings) for example in train + evaluation})
        self.say(f"endings an example: {', '.join(map(str, counts))}")

    # ---- model

    def build_model(self, source: str) -> PretrainedModel:
        folder = source_folder(source, self.say)
        has_head = head_labels(folder, BertForMultipleChoice) is not None
        return load_head(BertForMultipleChoice, folder, self.say, new_head=self.options.new_head and has_head)

    def load_model(self, folder: str) -> PretrainedModel:
        path = source_folder(folder, self.say)
        if head_labels(path, BertForMultipleChoice) is None:
            raise UserError(f"{folder} has no multiple-choice head; fine-tune it first")
        return load_head(BertForMultipleChoice, path, self.say)

    def features(
        self, examples: Sequence[ChoiceExample], tokenizer: Tokenizer, max_length: int
    ) -> list[Feature]:
        """One feature an ending: [CLS] context [SEP] ending [SEP], the longer one cut first."""
        inputs = [(e.context, ending) for e in examples for ending in e.endings]
        encodings = iter(self.encode(inputs, tokenizer, max_length))
        features = []
        for index, example in enumerate(examples):
            for _ in example.endings:
                encoding = next(encodings)
                features.append(Feature(encoding.ids, encoding.type_ids, example.label, index))
        return features

    def count(self, features: Sequence[Feature]) -> float:
        return float(len(_sizes(features)))

    def loss(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> Tensor:
        sizes = _sizes(features)
        firsts = np.cumsum([0, *sizes])[:-1]
        scores = _scores(model, batch)
        # [examples, most endings]: endings that an example does not have take no part
        rows = torch.nn.utils.rnn.pad_sequence(
            list(scores.split(sizes)), batch_first=True, padding_value=-torch.inf
        )
        targets = torch.tensor([features[first].target for first in firsts], device=scores.device)
        return F.cross_entropy(rows, targets, reduction="sum")

    def outputs(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> list[np.ndarray]:
        return list(_scores(model, batch).cpu().numpy())

    # ---- predictions

    def predictions(
        self, examples: Sequence[ChoiceExample], features: Sequence[Feature], outputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """The probabilities of each example's endings."""
        found, at = [], 0
        for size in _sizes(features):
            scores = torch.tensor(np.array(outputs[at : at + size]))
            found.append(scores.softmax(dim=0).numpy())
            at += size
        return found

    def score(self, examples: Sequence[ChoiceExample], predictions: Sequence[np.ndarray]) -> dict[str, float]:
        hits = [int(p.argmax()) == e.label for e, p in zip(examples, predictions)]
        return {"accuracy": float(np.mean(hits))}

    def row(self, example: ChoiceExample, prediction: np.ndarray) -> dict[str, Any]:
        best = int(prediction.argmax())
        return {
            "row": example.row,
            "choice": best,
            "ending": example.endings[best],
            "probabilities": [float(f"{p:.6g}") for p in prediction],
        }

    def write_predictions(
        self, folder: Path, examples: Sequence[ChoiceExample], predictions: Sequence[np.ndarray]
    ) -> Path:
        path = folder / "predictions.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for example, prediction in zip(examples, predictions):
                row = self.row(example, prediction) | {"expected": example.label}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return path

    def draw(
        self, folder: Path, examples: Sequence[ChoiceExample], predictions: Sequence[np.ndarray]
    ) -> list[Path]:
        return []


def _scores(model: PretrainedModel, batch: Batch) -> Tensor:
    """[sequences] fp32, one for each ending."""
    if isinstance(batch, PaddedBatch):  # the head wants an axis of choices: one choice a row
        inputs = (batch.input_ids, batch.attention_mask, batch.token_type_ids)
        output = model(*(x[:, None] for x in inputs))
    else:
        output = forward(model, batch)
    return output.logits.float().squeeze(1)


def _sizes(features: Sequence[Feature]) -> list[int]:
    """Endings of each example."""
    sizes: list[int] = []
    for index, feature in enumerate(features):
        if index and feature.example == features[index - 1].example:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes


def _checked(example: ChoiceExample) -> ChoiceExample:
    if len(example.endings) < MIN_ENDINGS:
        raise UserError(
            f"{example.where} has {len(example.endings)} endings, and it needs at least two: mend it"
        )
    return example


def _first_number(table: Table, names: list[str], label: int | None) -> int:
    """What number the first ending has: 1 if its column has that one and no label is 0, else 0."""
    match = _ENDING.fullmatch(names[0])
    if label is None or match is None or match.group(2) != "1":
        return 0
    return 0 if any(_text(row.values[label]) == "0" for row in table.sample) else 1


def _label_index(key: str, names: list[str], count: int, first: int, where: str) -> int:
    """The ending that a label names: by its column or letter, or by its number from `first` on."""
    lowered = [name.lower() for name in names]
    letters = [match.group(2) if (match := _ENDING.fullmatch(name)) else "" for name in lowered]
    index = -1
    if key.lower() in lowered:
        index = lowered.index(key.lower())
    elif key.isdecimal():
        index = int(key) - first
    elif key.lower() in letters:
        index = letters.index(key.lower())
    if not 0 <= index < count:
        raise UserError(f"{where} has the label {key!r}, which is none of its {count} endings: mend it")
    return index


def _ending_columns(table: Table) -> list[int]:
    """Columns of one name with 0, 1, 2, … or 1, 2, … or a, b, … behind it; the longest such series."""
    series: dict[str, list[int]] = {}
    for index, column in enumerate(table.columns):
        match = _ENDING.fullmatch(column)
        if match:
            series.setdefault(match.group(1).lower(), []).append(index)
    return max(series.values(), key=len, default=[])


def _named(table: Table, names: Sequence[str], candidates: Sequence[int]) -> int | None:
    lowered = {table.columns[i].lower(): i for i in reversed(candidates)}
    return next((lowered[name] for name in names if name in lowered), None)


def _first(table: Table, column: str) -> Any:
    return table.sample[0].values[table.columns.index(column)]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _described(table: Table, context: int, second: int | None, endings: list[int], label: int | None) -> str:
    names = [repr(table.columns[index]) for index in endings]
    text = f"{table.path}: {table.format}, {table.columns[context]!r}"
    text += "" if second is None else f" + {table.columns[second]!r}"
    text += f" before {', '.join(names)}"
    return text if label is None else f"{text}, label {table.columns[label]!r}"
