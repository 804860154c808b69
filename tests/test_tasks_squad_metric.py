"""SQuAD's metric against values worked out by hand from the published rules."""

from __future__ import annotations

import math

import pytest

from fastbert.tasks.squad_metric import (
    best_thresholds,
    exact_match,
    normalize_answer,
    question_scores,
    squad_scores,
    token_f1,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat,\tsat.", "cat sat"),
        ("a an the", ""),
        ("An apple a day", "apple day"),
        ("theatre", "theatre"),  # an article is a word of its own
        ("the-end", "theend"),  # punctuation goes first, so nothing is left to be an article
        ("$1,000.50", "100050"),
        ("U.S.A.", "usa"),
        ("'quoted'", "quoted"),
        ("“curly”", "“curly”"),  # ASCII punctuation only, as published
        ("Beyoncé", "beyoncé"),
        (" ", ""),
        ("서울의 한강", "서울의 한강"),
        ("東京、日本", "東京、日本"),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "f1"),
    [
        ("The cat", "cat!", 1.0, 1.0),
        ("the black cat", "cat", 0.0, 2 / 3),  # 1 of 2 words, 1 of 1
        ("cat cat", "cat", 0.0, 2 / 3),  # a word counts as often as it stands in both
        ("dog", "cat", 0.0, 0.0),
        ("", "cat", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("cat", "", 0.0, 0.0),
        ("the", "", 1.0, 1.0),  # nothing is left of it
        ("in the north of France", "north France", 0.0, 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("대한민국의 수도", "대한민국 수도", 0.0, 0.5),  # the particle makes another word of it
        ("서울", "서울.", 1.0, 1.0),
        ("東京", "東京都", 0.0, 0.0),
    ],
)
def test_pairs(prediction: str, gold: str, exact: float, f1: float) -> None:
    assert exact_match(prediction, gold) == exact
    assert token_f1(prediction, gold) == pytest.approx(f1, abs=1e-12)


def test_the_best_of_several_answers_counts() -> None:
    assert question_scores("10 million", ["ten million", "10 million people"]) == (0.0, pytest.approx(0.8))
    assert question_scores("Paris", ["Lyon", "the Paris", "Nice"]) == (1.0, 1.0)
    # exact match and F1 may come from different answers; an answer of only an article does not count
    assert question_scores("the", ["the", "the end"]) == (0.0, 0.0)
    assert question_scores("", []) == (1.0, 1.0)
    assert question_scores("anything", []) == (0.0, 0.0)


def test_scores_of_a_file() -> None:
    golds = {"a": ["cat"], "b": ["black dog", "dog"], "c": [], "d": []}
    predictions = {"a": "The cat.", "b": "white dog", "c": "", "d": "mouse"}
    f1_of_b = 2 / 3  # against "dog": 1 of 2, 1 of 1; against "black dog": 1 of 2, 1 of 2
    expected = {
        "exact": 50.0,
        "f1": 100 * (1 + f1_of_b + 1) / 4,
        "total": 4,
        "HasAns_exact": 50.0,
        "HasAns_f1": 100 * (1 + f1_of_b) / 2,
        "HasAns_total": 2,
        "NoAns_exact": 50.0,
        "NoAns_f1": 50.0,
        "NoAns_total": 2,
    }
    assert squad_scores(golds, predictions) == pytest.approx(expected)
    answerable = {name: golds[name] for name in ("a", "b")}
    only = squad_scores(answerable, predictions)
    assert only == pytest.approx({"exact": 50.0, "f1": 100 * (1 + f1_of_b) / 2, "total": 2})
    with pytest.raises(KeyError):
        squad_scores(golds, {"a": "cat"})


def test_the_best_threshold_by_hand() -> None:
    golds = {"a": ["cat"], "b": [], "c": ["dog"], "d": [], "e": ["white fox"]}
    predictions = {"a": "cat", "b": "cow", "c": "frog", "d": "hen", "e": "fox"}
    null_odds = {"a": -5.0, "e": -2.0, "b": 1.0, "c": 2.0, "d": 3.0}
    # nothing answered: 2 right; up to a: 3; up to e: exact 3, F1 3 + 2/3; b would cost one, c gains nothing
    assert best_thresholds(golds, predictions, null_odds) == pytest.approx(
        {
            "best_exact": 60.0,
            "best_exact_thresh": -5.0,
            "best_f1": 100 * (3 + 2 / 3) / 5,
            "best_f1_thresh": -2.0,
        }
    )


@pytest.mark.parametrize(
    ("null_odds", "best", "threshold"),
    [
        ({"a": 1.0, "b": 1.0}, 50.0, 0.0),  # equal odds: both questions or none; none is as good
        ({"a": 1.0, "b": 2.0}, 100.0, 1.0),
        ({"a": 2.0, "b": 1.0}, 50.0, 0.0),
        ({"a": -1.0, "b": -3.0}, 50.0, math.nextafter(-3.0, -math.inf)),  # below all: nothing is answered
    ],
)
def test_threshold_gives_the_score_it_promises(
    null_odds: dict[str, float], best: float, threshold: float
) -> None:
    golds: dict[str, list[str]] = {"a": ["cat"], "b": []}
    predictions = {"a": "cat", "b": "cow"}
    found = best_thresholds(golds, predictions, null_odds)
    assert (found["best_f1"], found["best_f1_thresh"]) == (best, threshold)
    given = {name: "" if null_odds[name] > threshold else text for name, text in predictions.items()}
    assert squad_scores(golds, given)["f1"] == best
