"""Tagging: a label for each word, learned and predicted at the word's first piece.

Reads CoNLL columns (a word a line, blank lines between sentences), and JSONL or parquet with lists of words
and tags; tags that are numbers take the names that a parquet file of Hugging Face's datasets has for them.
Tags may be entities in BIO, IOB1 (read as BIO), BIOES or BILOU (read as BIOES), which are scored as entities,
or any other labels, which are scored word by word. Recipe: BERT (Devlin et al. 2019), section 5.3.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from fastbert import ops
from fastbert.data.files import opened
from fastbert.data.tokenizer import special_ids
from fastbert.errors import UserError
from fastbert.heads import BertForTokenClassification
from fastbert.pretrained import PretrainedModel
from fastbert.tasks import metrics, pictures
from fastbert.tasks.models import are_generic, head_labels, load_head, source_folder
from fastbert.tasks.tables import open_table
from fastbert.tasks.task import Batch, Feature, Say, forward, token_rows

_ENTITY = re.compile(r"[BIESLU]-.+")
_BIOES = {"L": "E", "U": "S"}  # BILOU's letters
_LIST_WORDS = ("tokens", "words")
_LIST_TAGS = ("tags", "ner_tags", "ner", "labels")


@dataclass
class TagOptions:
    word_column: int = 0
    """Column of the word in a CoNLL file, counted from 0; negative numbers count from the end."""
    tag_column: int = -1
    """Column of the tag."""
    new_head: bool = False
    """Start a new head where the model has one already."""


@dataclass(frozen=True)
class Sentence:
    words: tuple[str, ...]
    tags: tuple[str, ...] | None  # None = unlabelled
    rows: tuple[str, ...]  # a line of a CoNLL file for each word
    source: str
    lines: Sequence[int]  # for each word its line in the file, counted from 1


@dataclass
class Words(Feature):
    """[CLS] the pieces of some words [SEP]; target: for each word the id of its tag."""

    first_pieces: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[words]: the token at which each is read"""
    hidden: Tensor | None = field(default=None, repr=False, compare=False)
    """[words, width]: what a body that is not trained makes of them, once it was asked (features.py)"""


class TagTask:
    name: ClassVar[str] = "tag"
    options_class: ClassVar[type] = TagOptions
    default_max_length: ClassVar[int] = 128
    keeps_examples_together: ClassVar[bool] = False
    model_class: ClassVar[type[PretrainedModel]] = BertForTokenClassification

    def __init__(self, options: TagOptions, say: Say) -> None:
        self.options = options
        self.say = say
        self.labels: list[str] = []

    @property
    def are_entities(self) -> bool:
        return any(_ENTITY.fullmatch(label) for label in self.labels)

    @property
    def main_metric(self) -> str:
        return "f1" if self.are_entities else "accuracy"

    # data

    def read(self, path: Path, *, labels_required: bool) -> Iterator[Sentence]:
        """The sentences of a file: .jsonl, .json: an object a line; .parquet: rows; others: CoNLL columns."""
        has_lists = path.suffix in (".jsonl", ".json", ".parquet")
        read = self._read_lists if has_lists else self._read_conll
        is_empty = True
        for sentence in read(path, labels_required):
            is_empty = False
            yield sentence
        if is_empty:
            raise UserError(f"{path} holds no sentence")

    def _read_conll(self, path: Path, labels_required: bool) -> Iterator[Sentence]:
        rows: list[str] = []
        number = 0
        for number, line in _lines(path):
            if not rows and _is_comment(line):
                continue
            if line.strip() and not line.startswith("-DOCSTART-"):
                rows.append(line)
            elif rows:
                yield self._sentence(rows, str(path), range(number - len(rows), number), labels_required)
                rows = []
        if rows:
            yield self._sentence(rows, str(path), range(number - len(rows) + 1, number + 1), labels_required)

    def _sentence(self, rows: list[str], source: str, lines: range, labels_required: bool) -> Sentence:
        fields = [columns(row) for row in rows]
        widths = {len(row) for row in fields}
        is_labelled = min(widths) > 1
        for line, row, width in zip(lines, rows, map(len, fields)):
            where = f"{source}, line {line}: {row!r} has {width} column{'s' * (width > 1)}"
            if width == 1 and (labels_required or max(widths) > 1):
                raise UserError(f"{where}; each line needs a word and its tag, separated by a tab or spaces")
            wanted = (self.options.word_column, *([self.options.tag_column] if is_labelled else []))
            for column in wanted:
                if not -width <= column < width:
                    raise UserError(f"{where}, and column {column} is asked for")
        words = tuple(row[self.options.word_column] for row in fields)
        tags = None
        if is_labelled:
            tags = _usual_tags([row[self.options.tag_column] for row in fields])
        return Sentence(words, tags, tuple(rows), source, lines)

    def _read_lists(self, path: Path, labels_required: bool) -> Iterator[Sentence]:
        is_parquet = path.suffix == ".parquet"
        names = class_names(path) if is_parquet else {}
        said = False
        for number, row in _parquet_rows(path) if is_parquet else _json_rows(path):
            where = f"{path}, {'row' if is_parquet else 'line'} {number}"
            words = _list_of(where, row, _LIST_WORDS, str)
            if words is None:
                raise UserError(f"{where} has no list of words: name it 'tokens' (it holds {_names(row)})")
            tags = _list_of(where, row, _LIST_TAGS, str, int)
            if tags is None and labels_required:
                raise UserError(f"{where} has no list of tags: name it 'tags' (it holds {_names(row)})")
            if tags is not None and len(tags) != len(words):
                raise UserError(f"{where} has {len(words)} words and {len(tags)} tags; give each word one")
            if tags and isinstance(tags[0], int):
                key = next(key for key in _LIST_TAGS if key in row)
                if key not in names and not said:
                    self.say(
                        f"the {key} of {path} are numbers without names: they are the labels, as they are"
                    )
                    said = True
                tags = _named(where, tags, names.get(key))
            rows = words if tags is None else [f"{word}\t{tag}" for word, tag in zip(words, tags)]
            usual = None if tags is None else _usual_tags(tags)
            yield Sentence(tuple(words), usual, tuple(rows), str(path), [number] * len(words))

    def prepare(self, train: list[Sentence], evaluation: list[Sentence]) -> None:
        """The labels: of entities every letter of the scheme for every type of the training file."""
        if not any(sentence.words for sentence in train):
            raise UserError("the training file has no words")
        seen = {tag for sentence in train for tag in sentence.tags or ()}
        entities = {tag for tag in seen if _ENTITY.fullmatch(tag)}
        if entities:
            self._refuse(train, entities | {"O"}, f"is no entity tag as {min(entities)!r} is")
            letters = "BIES" if any(tag[0] in "ES" for tag in entities) else "BI"
            kinds = sorted({tag[2:] for tag in entities})
            self.labels = ["O", *(f"{letter}-{kind}" for kind in kinds for letter in letters)]
            metrics.require("seqeval")
        else:
            self.labels = sorted(seen, key=lambda tag: (int(tag) if tag.isdecimal() else -1, tag))
        some = ", ".join(self.labels[:20]) + (" ..." if len(self.labels) > 20 else "")
        self._refuse(evaluation, set(self.labels), f"does not occur in the training file, which has {some}")

    def _refuse(self, sentences: list[Sentence], known: set[str], problem: str) -> None:
        for sentence in sentences:
            for word, tag, line in zip(sentence.words, sentence.tags or (), sentence.lines):
                if tag not in known:
                    raise UserError(f"{sentence.source}, line {line}: the tag {tag!r} of {word!r} {problem}")

    # model

    def build_model(self, source: str) -> PretrainedModel:
        folder = source_folder(source, self.say)
        old = head_labels(folder, self.model_class)
        is_new = old is None or self.options.new_head
        if old is not None and not is_new:
            self._adopt(old, folder)
        self.say(f"labels: {', '.join(self.labels[:20])}{', …' if len(self.labels) > 20 else ''}")
        return self._load(folder, labels=self.labels, new_head=is_new)

    def _adopt(self, old: list[str], folder: Path) -> None:
        """Take the order of the labels of a head that exists; UserError where it does not fit the data."""
        if set(self.labels) <= set(old):
            self.labels = old
        elif not (are_generic(old) and len(old) == len(self.labels)):
            raise UserError(
                f"the head of {folder} has {len(old)} labels ({', '.join(old[:10])}), and the data has "
                f"{len(self.labels)} ({', '.join(self.labels[:10])}); give --new-head to start a new one"
            )

    def load_model(self, folder: str) -> PretrainedModel:
        path = source_folder(folder, self.say)
        labels = head_labels(path, self.model_class)
        if labels is None:
            raise UserError(f"{folder} has no {self.model_class.__name__} head; fine-tune it first")
        self.labels = labels
        return self._load(path)

    def _load(self, folder: Path, **settings: Any) -> PretrainedModel:
        return load_head(self.model_class, folder, self.say, **settings)

    # features

    def features(self, examples: Sequence[Sentence], tokenizer: Tokenizer, max_length: int) -> list[Feature]:
        """The sentences, those that are too long in parts of about the same length.

        A word of which the tokenizer keeps nothing stands as [UNK]; one that is longer than the limit is cut.
        """
        if max_length < 3:
            raise UserError(f"--max-length {max_length} leaves no room for a word; give at least 3")
        special = special_ids(tokenizer)
        ids = {label: index for index, label in enumerate(self.labels)}
        features: list[Feature] = []
        for index, sentence in enumerate(examples):
            pieces = [ids[: max_length - 2] for ids in word_pieces(sentence.words, tokenizer, special.unk)]
            targets = None if sentence.tags is None else [ids.get(tag) for tag in sentence.tags]
            for start, stop in parts_of([len(word) for word in pieces], max_length - 2):
                lengths = np.array([1, *(len(word) for word in pieces[start:stop])], dtype=np.int64)
                body = [piece for word in pieces[start:stop] for piece in word]
                features.append(
                    Words(
                        input_ids=[special.cls, *body, special.sep],
                        token_type_ids=[0] * (len(body) + 2),
                        target=None if targets is None or None in targets else targets[start:stop],
                        example=index,
                        first_pieces=lengths[:-1].cumsum(),
                    )
                )
        return features

    # training and prediction

    def count(self, features: Sequence[Feature]) -> float:
        return float(sum(len(feature.target) for feature in features))

    def loss(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> Tensor:
        logits = self.word_logits(model, batch, features)
        targets = [target for feature in features for target in feature.target]
        return ops.cross_entropy_parts(logits, torch.tensor(targets, device=logits.device).long())[0]

    def outputs(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> list[np.ndarray]:
        """For each feature fp32 logits [words, labels]."""
        rows = self.word_logits(model, batch, features).detach().float().cpu()
        return [part.numpy() for part in rows.split([_num_words(feature) for feature in features])]

    def word_logits(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> Tensor:
        """[words of all features, labels]: the head's scores at each word's first piece."""
        logits = token_rows(forward(model, batch).logits, batch)
        return logits.index_select(0, word_places(features).to(logits.device))

    def predictions(
        self, examples: Sequence[Sentence], features: Sequence[Feature], outputs: Sequence[np.ndarray]
    ) -> list[list[str]]:
        """For each sentence a tag a word; the parts of a long one follow each other."""
        tags: list[list[str]] = [[] for _ in examples]
        for feature, logits in zip(features, outputs):
            tags[feature.example] += [self.labels[label] for label in logits.argmax(axis=-1)]
        return tags

    # scores and files

    def score(self, examples: Sequence[Sentence], predictions: Sequence[list[str]]) -> dict[str, float]:
        """accuracy of words; of entities precision, recall, f1 (micro) and f1_TYPE as seqeval counts them."""
        golds = [list(example.tags or ()) for example in examples]
        pairs = [pair for gold, found in zip(golds, predictions) for pair in zip(gold, found)]
        accuracy = sum(gold == found for gold, found in pairs) / max(1, len(pairs))
        return {"accuracy": accuracy} | (entity_scores(golds, predictions) if self.are_entities else {})

    def row(self, example: Sentence, prediction: list[str]) -> dict[str, Any]:
        return {"tokens": list(example.words), "tags": prediction}

    def write_predictions(
        self, folder: Path, examples: Sequence[Sentence], predictions: Sequence[list[str]]
    ) -> Path:
        """predictions.conll: the columns of the file and the predicted tag as one more."""
        path = folder / "predictions.conll"
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for example, tags in zip(examples, predictions):
                for row, tag in zip(example.rows, tags):
                    separator = " " if " " in row and "\t" not in row else "\t"
                    file.write(f"{row}{separator}{tag}\n")
                file.write("\n")
        return path

    def draw(
        self, folder: Path, examples: Sequence[Sentence], predictions: Sequence[list[str]]
    ) -> list[Path]:
        """confusion_matrix.png of words: their tags, or of entities the types without BIO letters."""
        kind_of = {tag: tag[2:] if self.are_entities and tag != "O" else tag for tag in self.labels}
        kinds = list(dict.fromkeys(kind_of.values()))
        ids = {tag: kinds.index(kind) for tag, kind in kind_of.items()}
        truth = np.array([ids[tag] for example in examples for tag in example.tags or ()], dtype=np.int64)
        guess = np.array([ids[tag] for tags in predictions for tag in tags], dtype=np.int64)
        return [pictures.confusion_matrix(folder / "confusion_matrix.png", truth, guess, kinds)]


# ---- reading


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line): only line feeds end a line, for a word may be any other separator."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as UTF-8 text ({error})") from error


def columns(row: str) -> list[str]:
    """A line's columns: what tabs separate, or if there is none, spaces."""
    if "\t" in row:
        return row.rstrip("\t ").split("\t")
    return [column for column in row.split(" ") if column]


def _is_comment(line: str) -> bool:
    """A line of KLUE's before each sentence: "## its name", a tab, and the sentence."""
    return line.startswith("## ") and "\t" in line


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            problem = f"{path}, line {number} is not a JSON object ({error}); give one a line"
            raise UserError(problem) from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    table = open_table(path, format="parquet")
    for row in table.rows():
        yield row.number, dict(zip(table.columns, row.values))


def class_names(path: Path) -> dict[str, list[str]]:
    """Column -> the names of its numbers, where the datasets library wrote them into a parquet file."""
    import pyarrow.parquet

    opened(path).close()
    try:
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    except (pyarrow.ArrowException, OSError, ValueError):
        return {}  # who reads the rows says what is wrong with the file
    found = {column: _class_label(feature) for column, feature in features.items()}
    return {column: names for column, names in found.items() if names is not None}


def _class_label(feature: Any) -> list[str] | None:
    """The names in a feature, which may be a list of what has them, in each of datasets' spellings."""
    if isinstance(feature, list):
        feature = feature[0] if feature else None
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "ClassLabel":
        return feature.get("names")
    return _class_label(feature.get("feature"))


def _named(where: str, tags: Sequence[int], names: Sequence[str] | None) -> list[str]:
    if names is None:
        return [str(tag) for tag in tags]
    wrong = next((tag for tag in tags if not 0 <= tag < len(names)), None)
    if wrong is not None:
        raise UserError(f"{where}: the tag {wrong} has no name; the file has {len(names)}, from 0")
    return [names[tag] for tag in tags]


def _list_of(where: str, row: Any, keys: Sequence[str], *kinds: type) -> list[Any] | None:
    """The list under the first of these keys that is there, of elements that are all of one of the kinds."""
    key = next((key for key in keys if isinstance(row, dict) and row.get(key) is not None), None)
    if key is None:
        return None
    value = row[key]
    if not isinstance(value, list) or not any(all(type(entry) is kind for entry in value) for kind in kinds):
        wanted = " or of whole numbers" if int in kinds else ""
        raise UserError(f"{where}: {key!r} is {str(value)[:40]}; give a list of texts{wanted}")
    return value


def _names(row: Any) -> str:
    return ", ".join(map(repr, row)) if isinstance(row, dict) and row else "no names"


def _usual_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """IOB1 -> BIO, BILOU -> BIOES; BIO, BIOES and tags that are no entities stay as they are.

    An I- that begins an entity becomes B-. A sentence of BIOES has no such one, unless it is wrong.
    """
    tags = [_BIOES[tag[0]] + tag[1:] if tag[:1] in _BIOES and _ENTITY.fullmatch(tag) else tag for tag in tags]
    if any(tag[:2] in ("E-", "S-") for tag in tags):
        return tuple(tags)
    before = ["O", *tags]
    return tuple(
        f"B-{tag[2:]}" if tag.startswith("I-") and previous[1:] != tag[1:] else tag
        for previous, tag in zip(before, tags)
    )


# ---- words and pieces


def word_pieces(words: Sequence[str], tokenizer: Tokenizer, unknown: int) -> list[list[int]]:
    """The ids of each word's pieces, at least one."""
    encoding = tokenizer.encode(list(words), is_pretokenized=True, add_special_tokens=False)
    pieces: list[list[int]] = [[] for _ in words]
    for piece, word in zip(encoding.ids, encoding.word_ids):
        if word is not None:  # only special tokens have none, and there are none
            pieces[word].append(piece)
    return [word or [unknown] for word in pieces]


def parts_of(lengths: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Words of these lengths -> the ranges (start, stop) of their parts of at most `limit` pieces."""
    total = sum(lengths)
    aim = math.ceil(total / max(1, math.ceil(total / limit)))
    parts, start, size = [], 0, 0
    for index, length in enumerate(lengths):
        if size and (size >= aim or size + length > limit):
            parts.append((start, index))
            start, size = index, 0
        size += length
    return [*parts, (start, len(lengths))]


def _num_words(feature: Feature) -> int:
    assert isinstance(feature, Words)
    return len(feature.first_pieces)


def word_places(features: Sequence[Feature]) -> Tensor:
    """int64 [words of all features]: the rows of their first pieces among the tokens of all features."""
    places, start = [np.zeros(0, dtype=np.int64)], 0
    for feature in features:
        assert isinstance(feature, Words)
        places.append(feature.first_pieces + start)
        start += len(feature.input_ids)
    return torch.from_numpy(np.concatenate(places))


# ---- scores


def entity_scores(golds: Sequence[list[str]], predictions: Sequence[list[str]]) -> dict[str, float]:
    """precision, recall and f1 over all entities and f1_TYPE of each type, as conlleval and seqeval count."""
    seqeval: Any = importlib.import_module("seqeval.metrics")
    if all(tag == "O" for tags in (*golds, *predictions) for tag in tags):  # seqeval takes a mean of nothing
        return {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    report = seqeval.classification_report(list(golds), list(predictions), output_dict=True, zero_division=0)
    total = report.pop("micro avg")
    scores = {"precision": total["precision"], "recall": total["recall"], "f1": total["f1-score"]}
    for kind in sorted(report.keys() - {"macro avg", "weighted avg"}):
        scores[f"f1_{kind}"] = report[kind]["f1-score"]
    return {name: float(value) for name, value in scores.items()}
