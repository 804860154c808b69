"""Question answering: the span of a document that answers a question, or that there is none (SQuAD 1.1, 2.0).

A document longer than the model is read in overlapping windows, and a window without the answer is trained to
point at [CLS]. Answers are cut out of the document by characters, so that accents, case and spaces stay as
they are in the file. Recipe: BERT (Devlin et al. 2019), sections 4.2 and 4.3, and its published run_squad.py.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.data.tokenizer import special_ids
from fastbert.errors import UserError
from fastbert.heads import BertForQuestionAnswering
from fastbert.pretrained import PretrainedModel
from fastbert.tasks import pictures
from fastbert.tasks.models import head_labels, load_head, source_folder
from fastbert.tasks.settings import shown
from fastbert.tasks.squad_metric import best_thresholds, squad_scores
from fastbert.tasks.task import Batch, Feature, Say, forward, token_rows


@dataclass
class SquadOptions:
    doc_stride: int = 128
    """Tokens from the start of one window of a long document to the start of the next."""
    max_question_length: int = 64
    """Tokens of a question; what is longer is cut."""
    max_answer_length: int = 30
    """Tokens of the longest answer that is considered."""
    n_best: int = 20
    """Answers of a question that are kept."""
    null_threshold: Annotated[
        float | None, shown("the best for F1 on the evaluation file, kept with the model", "FLOAT")
    ] = None
    """Leave a question unanswered if "no answer" scores this much above the best answer. Where the evaluation
    file has an answer to every question, none is left unanswered by default."""


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None  # (text, first character); () = no answer, None = unlabelled
    file: str = field(default="", compare=False)


@dataclass
class Window(Feature):
    """[CLS] question [SEP] a window of the document [SEP]; target: tokens (first, last) of the answer."""

    prefix: int = 0  # tokens before the window
    first: int = 0  # the window's first piece of the document
    offsets: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """[pieces of the document, 2]: characters (first, behind the last) of each; shared by its windows"""
    is_best_window: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """[pieces of the window]: no other window has more context around the piece"""


@dataclass(frozen=True)
class Candidate:
    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Answer:
    candidates: tuple[Candidate, ...]  # different texts, the best first; never empty
    null: Candidate  # text "": the scores of [CLS] in the window where they are lowest

    @property
    def null_odds(self) -> float:
        """How much higher "no answer" scores than the best answer."""
        return self.null.score - self.candidates[0].score


class SquadTask:
    name: ClassVar[str] = "squad"
    options_class: ClassVar[type] = SquadOptions
    main_metric = "f1"
    default_max_length: ClassVar[int] = 384
    keeps_examples_together: ClassVar[bool] = False

    def __init__(self, options: SquadOptions, say: Say) -> None:
        for name in ("doc_stride", "max_question_length", "max_answer_length", "n_best"):
            if getattr(options, name) < 1:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(options, name)} is out of range; give at least 1")
        self.options = options
        self.say = say
        self.threshold = options.null_threshold
        self._config: BertConfig | None = None  # of the model, which keeps a threshold that was chosen
        self._chosen_on: Sequence[Question] | None = None

    # data

    def read(self, path: Path, *, labels_required: bool) -> Iterator[Question]:
        """The questions of a SQuAD file as published, or of rows with id, question, context and answers."""
        is_empty = True
        for where, context, row in _rows(path):
            is_empty = False
            yield _question(str(path), where, context, row, labels_required)
        if is_empty:
            raise UserError(f"{path} holds no question")

    def prepare(self, train: list[Question], evaluation: list[Question]) -> None:
        """Check that training answers are where the file says, and that no scored file has an id twice."""
        for (file, name), times in Counter((example.file, example.id) for example in evaluation).items():
            if times > 1:
                raise UserError(
                    f"{file or 'the evaluation file'} has {times} questions with the id {name!r}; scores and "
                    "predictions go by id, so give each question its own"
                )
        for example in train:
            for text, start in example.answers or ():
                found = example.context[start : start + len(text)] if start >= 0 else ""
                if not text or found != text:
                    raise UserError(
                        f"question {example.id!r}: the answer {text!r} is not at character {start} of its "
                        f"context, where {found!r} stands; mend answer_start or remove the question"
                    )

    # model

    def build_model(self, source: str) -> PretrainedModel:
        folder = source_folder(source, self.say)
        is_new = head_labels(folder, BertForQuestionAnswering) is None
        labels = ["start", "end"] if is_new else None
        model = load_head(BertForQuestionAnswering, folder, self.say, labels=labels, new_head=is_new)
        self._config = model.config
        self._config.null_threshold = self.threshold
        return model

    def load_model(self, folder: str) -> PretrainedModel:
        path = source_folder(folder, self.say)
        if head_labels(path, BertForQuestionAnswering) is None:
            raise UserError(f"{folder} has no question answering head; fine-tune it first")
        model = load_head(BertForQuestionAnswering, path, self.say)
        if self.threshold is None:
            self.threshold = getattr(model.config, "null_threshold", None)
        return model

    # features

    def features(self, examples: Sequence[Question], tokenizer: Tokenizer, max_length: int) -> list[Feature]:
        """The windows of each question. UserError if a question leaves no room for the document."""
        special = special_ids(tokenizer)
        contexts = list(dict.fromkeys(example.context for example in examples))
        encoded = tokenizer.encode_batch(contexts, add_special_tokens=False)
        documents = {
            context: (encoding.ids, np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2))
            for context, encoding in zip(contexts, encoded)
        }
        questions = tokenizer.encode_batch([e.question for e in examples], add_special_tokens=False)
        features: list[Feature] = []
        for index, (example, encoding) in enumerate(zip(examples, questions)):
            question = [special.cls, *encoding.ids[: self.options.max_question_length], special.sep]
            room = max_length - len(question) - 1
            if room < 1:
                raise UserError(
                    f"--max-length {max_length} leaves no room for a document behind question "
                    f"{example.id!r} of {len(question) - 2} tokens; raise it or lower --max-question-length"
                )
            ids, offsets = documents[example.context]
            answer = answer_pieces(offsets, *example.answers[0]) if example.answers else None
            windows = windows_of(len(ids), room, self.options.doc_stride)
            for (first, count), is_best in zip(windows, best_windows(windows)):
                features.append(
                    Window(
                        input_ids=[*question, *ids[first : first + count], special.sep],
                        token_type_ids=[0] * len(question) + [1] * (count + 1),
                        target=_target(example, answer, first, count, len(question)),
                        example=index,
                        prefix=len(question),
                        first=first,
                        offsets=offsets,
                        is_best_window=is_best,
                    )
                )
        return features

    # training and prediction

    def count(self, features: Sequence[Feature]) -> float:
        return float(len(features))

    def loss(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> Tensor:
        """Cross-entropy over the tokens of each window: the mean of first and last token, summed."""
        rows = _logits(model, batch).split([len(feature.input_ids) for feature in features])
        logits = pad_sequence(list(rows), batch_first=True, padding_value=torch.finfo(torch.float32).min)
        targets = torch.tensor([feature.target for feature in features], device=logits.device)
        start, end = (ops.cross_entropy_parts(logits[..., i], targets[:, i])[0] for i in range(2))
        return (start + end) / 2

    def outputs(self, model: PretrainedModel, batch: Batch, features: Sequence[Feature]) -> list[np.ndarray]:
        """For each window fp32 logits [tokens, 2] of first and last token."""
        rows = _logits(model, batch).detach().cpu().split([len(feature.input_ids) for feature in features])
        return [row.numpy() for row in rows]

    def predictions(
        self, examples: Sequence[Question], features: Sequence[Feature], outputs: Sequence[np.ndarray]
    ) -> list[Answer]:
        """The best answers of each question over all windows of its document."""
        spans: list[list[tuple[float, float, int, int]]] = [[] for _ in examples]
        nulls: list[Candidate | None] = [None for _ in examples]
        for feature, logits in zip(features, outputs):
            assert isinstance(feature, Window)
            spans[feature.example] += best_spans(
                feature, logits, self.options.n_best, self.options.max_answer_length
            )
            null = Candidate("", float(logits[0, 0]), float(logits[0, 1]))
            lowest = nulls[feature.example]
            if lowest is None or null.score < lowest.score:
                nulls[feature.example] = null
        answers = []
        for example, found, lowest in zip(examples, spans, nulls):
            assert lowest is not None
            best: dict[str, Candidate] = {}
            for start_logit, end_logit, start, stop in sorted(found, key=lambda s: -(s[0] + s[1])):
                text = cut(example.context, start, stop)
                if text and text not in best and len(best) < self.options.n_best:
                    best[text] = Candidate(text, start_logit, end_logit)
            answers.append(Answer(tuple(best.values()) or (lowest,), lowest))  # a document may be empty
        return answers

    def answer_text(self, answer: Answer) -> str:
        """The answer that is given, "" for none."""
        is_unanswered = self.threshold is not None and answer.null_odds > self.threshold
        return "" if is_unanswered else answer.candidates[0].text

    # scores and files

    def score(self, examples: Sequence[Question], predictions: Sequence[Answer]) -> dict[str, float]:
        """SQuAD's metrics in percent, and the best thresholds where some questions have no answer.

        Unless it was given, the threshold is the best one for F1 on the examples that are scored first (the
        evaluation file), at each evaluation of them anew: their own score is the best that a threshold can
        give. Other files are scored with it.
        """
        golds = {e.id: [text for text, _ in e.answers or ()] for e in examples}
        thresholds: dict[str, float] = {}
        if not all(golds.values()):
            thresholds = best_thresholds(
                golds,
                {e.id: answer.candidates[0].text for e, answer in zip(examples, predictions)},
                {e.id: answer.null_odds for e, answer in zip(examples, predictions)},
            )
        if self._chosen_on is None:
            self._chosen_on = examples
        if self.options.null_threshold is None and self._chosen_on is examples:
            self.threshold = thresholds.get("best_f1_thresh")
            if self._config is not None:
                self._config.null_threshold = self.threshold
        texts = {e.id: self.answer_text(answer) for e, answer in zip(examples, predictions)}
        return squad_scores(golds, texts) | thresholds

    def row(self, example: Question, prediction: Answer) -> dict[str, Any]:
        return {
            "id": example.id,
            "question": example.question,
            "answer": self.answer_text(prediction),
            "null_odds": prediction.null_odds,
        }

    def write_predictions(
        self, folder: Path, examples: Sequence[Question], predictions: Sequence[Answer]
    ) -> Path:
        """predictions.json (id -> answer), nbest_predictions.json and null_odds.json, as run_squad.py."""
        names = [example.id for example in examples]
        files: dict[str, list[Any]] = {
            "predictions.json": [self.answer_text(answer) for answer in predictions],
            "nbest_predictions.json": [self._nbest(answer) for answer in predictions],
            "null_odds.json": [answer.null_odds for answer in predictions],
        }
        for name, values in files.items():
            text = json.dumps(dict(zip(names, values)), ensure_ascii=False, indent=2)
            (folder / name).write_text(f"{text}\n", encoding="utf-8")
        return folder / "predictions.json"

    def _nbest(self, answer: Answer) -> list[dict[str, Any]]:
        """The candidates, with "no answer" among them where it may be given, and their softmax."""
        candidates = list(answer.candidates)
        if self.threshold is not None and answer.candidates != (answer.null,):
            candidates = sorted([*candidates, answer.null], key=lambda candidate: -candidate.score)
        scores = np.array([candidate.score for candidate in candidates])
        weights = np.exp(scores - scores.max())
        return [
            {"text": c.text, "probability": p, "start_logit": c.start_logit, "end_logit": c.end_logit}
            for c, p in zip(candidates, (weights / weights.sum()).tolist())
        ]

    def draw(self, folder: Path, examples: Sequence[Question], predictions: Sequence[Answer]) -> list[Path]:
        """no_answer_pr_curve.png: how well the odds tell questions without an answer, if there are some."""
        truth = np.array([not example.answers for example in examples])
        if truth.all() or not truth.any():
            return []
        odds = np.array([answer.null_odds for answer in predictions])
        return [pictures.pr_curve(folder / "no_answer_pr_curve.png", truth, odds, "no answer")]


# ---- reading


def _rows(path: Path) -> Iterator[tuple[str, str | None, Any]]:
    """(where it stands, the paragraph's context, the question's object) for every question of a file."""
    for place, article in enumerate(_articles(path)):
        if not isinstance(article, dict):
            raise UserError(f"{path}: entry {place} is no JSON object but {str(article)[:40]!r}")
        if "paragraphs" not in article:
            yield f"entry {place}", None, article
            continue
        for number, paragraph in enumerate(_list(article, "paragraphs", path, f"article {place}")):
            where = f"article {place}, paragraph {number}"
            for index, row in enumerate(_list(paragraph, "qas", path, where)):
                yield f"{where}, question {index}", paragraph.get("context"), row


def _articles(path: Path) -> Iterable[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as UTF-8 text ({error})") from error
    if not text.strip():
        raise UserError(f"{path} is empty")
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error})") from error
    if isinstance(content, dict):
        return _list(content, "data", path, "the file")
    return content if isinstance(content, list) else [content]


def _list(owner: Any, key: str, path: Path, where: str) -> list[Any]:
    value = owner.get(key) if isinstance(owner, dict) else None
    if not isinstance(value, list):
        held = ", ".join(map(str, owner)) if isinstance(owner, dict) else type(owner).__name__
        raise UserError(f"{path}: {where} has no list {key!r} as a SQuAD file has, but {held or 'nothing'}")
    return value


def _question(file: str, place: str, context: str | None, row: Any, labels_required: bool) -> Question:
    where = f"{file}: {place}"
    if not isinstance(row, dict):
        raise UserError(f"{where} is no JSON object but {str(row)[:40]!r}")
    context = row.get("context") if context is None else context
    name = str(row.get("id", ""))
    for key, value in (("id", name), ("question", row.get("question")), ("context", context)):
        if not isinstance(value, str) or (key == "id" and not value):
            raise UserError(f"{where} has no text {key!r}; it holds {', '.join(map(str, row)) or 'nothing'}")
    answers: tuple[tuple[str, int], ...] | None = None
    if row.get("is_impossible"):
        answers = ()
    elif "answers" in row:
        answers = _answers(f"{where} ({name})", row["answers"])
    elif labels_required:
        raise UserError(f"{where} ({name}) has no 'answers'; give them, or [] where there is none")
    return Question(name, row["question"], str(context), answers, file)


def _answers(where: str, value: Any) -> tuple[tuple[str, int], ...]:
    """A list of {text, answer_start}, or a dict of the two lists."""
    try:
        if isinstance(value, dict):
            pairs = list(zip(value["text"], value["answer_start"], strict=True))
        else:
            pairs = [(answer["text"], answer["answer_start"]) for answer in value]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: answers {str(value)[:60]} do not have text and answer_start each"
        ) from error
    for text, start in pairs:
        if not isinstance(text, str) or not isinstance(start, int):
            raise UserError(f"{where}: the answer {text!r} at {start!r} is not a text at a character number")
    return tuple(pairs)


# ---- windows


def windows_of(num_pieces: int, room: int, stride: int) -> list[tuple[int, int]]:
    """(first piece, pieces) of the windows of at most `room` pieces that cover a document, at least one."""
    windows, first = [], 0
    while True:
        count = min(room, num_pieces - first)
        windows.append((first, count))
        if first + count >= num_pieces:
            return windows
        first += min(count, stride)


def best_windows(windows: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """For each window bool [pieces]: whether a piece has the most context here of all windows.

    Context is that of the poorer side; the longer window, then the earlier one wins, as in run_squad.py.
    """
    num_pieces = windows[-1][0] + windows[-1][1]
    best, owner = np.full(num_pieces, -1.0), np.zeros(num_pieces, dtype=np.int64)
    for index, (first, count) in enumerate(windows):
        places = np.arange(count)
        context = np.minimum(places, count - 1 - places) + 0.01 * count
        is_better = context > best[first : first + count]
        best[first : first + count][is_better] = context[is_better]
        owner[first : first + count][is_better] = index
    return [owner[first : first + count] == index for index, (first, count) in enumerate(windows)]


def answer_pieces(offsets: np.ndarray, text: str, start: int) -> tuple[int, int] | None:
    """The first and the last piece that share a character with the answer; None if no piece does."""
    touches = (offsets[:, 1] > start) & (offsets[:, 0] < start + len(text)) & (offsets[:, 1] > offsets[:, 0])
    places = touches.nonzero()[0]
    return (int(places[0]), int(places[-1])) if places.size else None


def _target(
    example: Question, answer: tuple[int, int] | None, first: int, count: int, prefix: int
) -> tuple[int, int] | None:
    if example.answers is None:
        return None
    if answer is None or answer[0] < first or answer[1] >= first + count:
        return (0, 0)
    return (prefix + answer[0] - first, prefix + answer[1] - first)


# ---- answers


def _logits(model: PretrainedModel, batch: Batch) -> Tensor:
    """fp32 [T, 2]: scores of first and last token of an answer."""
    output = forward(model, batch)
    return token_rows(torch.stack([output.start_logits, output.end_logits], dim=-1), batch).float()


def best_spans(
    window: Window, logits: np.ndarray, n_best: int, max_pieces: int
) -> list[tuple[float, float, int, int]]:
    """(start logit, end logit, first character, character behind the last) of a window's best spans.

    Both ends lie in the window's document, of at most `max_pieces` pieces, and the first piece has its most
    context here. All such spans are compared; run_squad.py compares those of the 20 best starts and ends.
    """
    count = window.is_best_window.size
    if not count:
        return []
    start = logits[window.prefix : window.prefix + count, 0]
    end = logits[window.prefix : window.prefix + count, 1]
    beyond = np.full(max_pieces - 1, -np.inf, dtype=end.dtype)
    ends = np.lib.stride_tricks.sliding_window_view(np.concatenate([end, beyond]), max_pieces)
    scores = np.where(window.is_best_window[:, None], start[:, None] + ends, -np.inf).ravel()
    keep = min(n_best, scores.size)
    chosen = np.argpartition(-scores, keep - 1)[:keep]
    spans = []
    for place in sorted(chosen[np.isfinite(scores[chosen])].tolist(), key=lambda i: -scores[i]):
        first, length = divmod(place, max_pieces)
        last = first + length
        start_char = int(window.offsets[window.first + first, 0])
        stop_char = int(window.offsets[window.first + last, 1])
        spans.append((float(start[first]), float(end[last]), start_char, stop_char))
    return spans


def cut(context: str, start: int, stop: int) -> str:
    """The characters from start to stop, with the accents of the last: a normaliser may have dropped them."""
    while stop < len(context) and unicodedata.category(context[stop])[0] == "M":
        stop += 1
    return context[start:stop].strip()
