"""SQuAD's exact match and F1, and the threshold above which a question counts as unanswerable.

The rules of the published evaluation script of SQuAD 2.0, which on questions that all have answers gives the
numbers of the 1.1 script. Words are what whitespace separates, in every language: a Korean word with another
particle is another word, so F1 on Korean is lower than a character-level score of the same answers.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)

Golds = Mapping[str, Sequence[str]]  # question id -> its right answers; none if it has no answer


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    text = "".join(char for char in text.lower() if char not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, gold: str) -> float:
    """1.0 if both are the same after `normalize_answer`, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def token_f1(prediction: str, gold: str) -> float:
    """F1 of the words that prediction and gold share; where one has no words, whether the other has none."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not predicted or not wanted:
        return float(predicted == wanted)
    num_same = sum((Counter(predicted) & Counter(wanted)).values())
    if num_same == 0:
        return 0.0
    precision, recall = num_same / len(predicted), num_same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def question_scores(prediction: str, golds: Sequence[str]) -> tuple[float, float]:
    """(exact match, F1) of a prediction: the best over the right answers, in 0..1.

    Answers that are nothing but articles and punctuation do not count; without any the right answer is "".
    """
    wanted = [gold for gold in golds if normalize_answer(gold)] or [""]
    return (
        max(exact_match(prediction, gold) for gold in wanted),
        max(token_f1(prediction, gold) for gold in wanted),
    )


def squad_scores(golds: Golds, predictions: Mapping[str, str]) -> dict[str, float]:
    """Means in percent: exact, f1, total; if some questions have no answer, also HasAns_* and NoAns_*.

    Every question of `golds` needs a prediction (KeyError else); "" says that there is no answer.
    """
    scores = {name: question_scores(predictions[name], answers) for name, answers in golds.items()}
    result = _means(list(scores.values()))
    answerable = [score for name, score in scores.items() if golds[name]]
    if len(answerable) < len(scores):
        unanswerable = [score for name, score in scores.items() if not golds[name]]
        for prefix, part in (("HasAns", answerable), ("NoAns", unanswerable)):
            if part:
                result |= {f"{prefix}_{name}": value for name, value in _means(part).items()}
    return result


def _means(scores: Sequence[tuple[float, float]]) -> dict[str, float]:
    total = len(scores)
    exact, f1 = (100.0 * math.fsum(score[i] for score in scores) / max(1, total) for i in range(2))
    return {"exact": exact, "f1": f1, "total": float(total)}


def best_thresholds(
    golds: Golds, predictions: Mapping[str, str], null_odds: Mapping[str, float]
) -> dict[str, float]:
    """best_exact, best_exact_thresh, best_f1 and best_f1_thresh: the best that a threshold can give.

    `predictions` are the best answers that are not empty, `null_odds` how much more likely "no answer" is. A
    question is left unanswered if its odds are above the threshold. As in the published script, except that
    questions with equal odds are decided together, as they are by the threshold, and that the threshold is
    below all odds (there: 0.0) where it is best to answer nothing.
    """
    best: dict[str, float] = {}
    for index, kind in enumerate(("exact", "f1")):
        scores = {name: question_scores(predictions[name], golds[name])[index] for name in golds}
        score, threshold = _best_threshold(golds, predictions, scores, null_odds)
        best |= {f"best_{kind}": 100.0 * score / max(1, len(golds)), f"best_{kind}_thresh": threshold}
    return best


def _best_threshold(
    golds: Golds,
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    null_odds: Mapping[str, float],
) -> tuple[float, float]:
    """(sum of scores, threshold) of the threshold with the largest sum."""
    order = sorted(golds, key=lambda name: null_odds[name])
    total = best = float(sum(not answers for answers in golds.values()))  # nothing answered
    threshold = min(0.0, math.nextafter(null_odds[order[0]], -math.inf)) if order else 0.0
    for place, name in enumerate(order):
        if golds[name]:
            total += scores[name]
        elif predictions[name]:
            total -= 1.0
        is_last_of_its_odds = place + 1 == len(order) or null_odds[order[place + 1]] > null_odds[name]
        if is_last_of_its_odds and total > best:
            best, threshold = total, null_odds[name]
    return best, threshold
