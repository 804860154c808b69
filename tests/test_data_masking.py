"""Masked-LM targets: counts by the rules, shares by statistics, words whole (cases H-06 and H-07)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastbert.data.masking import choose_targets, num_to_predict, replace_targets

VECTORS = json.loads((Path(__file__).parent / "vectors" / "pretraining_vectors.json").read_text())


@pytest.mark.parametrize(("case", "wanted"), VECTORS["num_to_predict"].items())
def test_number_of_predictions_equals_the_vectors(case: str, wanted: int) -> None:
    length, limit = (int(part.split("=")[1]) for part in case.split(","))
    assert num_to_predict(np.array([length]), 0.15, limit).tolist() == [wanted]


def test_no_limit_follows_the_probability() -> None:
    assert num_to_predict(np.array([5, 512, 10, 30]), 0.15, None).tolist() == [1, 77, 2, 4]  # half to even
    assert num_to_predict(np.array([100]), 0.4, None).tolist() == [40]


def sequences(num: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, candidate) of `num` sequences whose first and last token are special."""
    sequence = np.repeat(np.arange(num), length)
    position = np.tile(np.arange(length), num)
    return sequence, (position > 0) & (position < length - 1)


def test_targets_are_distinct_candidates_and_as_many_as_wanted() -> None:
    sequence, candidate = sequences(200, 40)
    wanted = np.random.default_rng(1).integers(1, 12, size=200)
    targets = choose_targets(sequence, candidate, wanted, np.random.default_rng(2))
    assert (np.diff(targets) > 0).all()
    assert candidate[targets].all()
    np.testing.assert_array_equal(np.bincount(sequence[targets], minlength=200), wanted)


def test_every_candidate_is_equally_likely() -> None:
    sequence, candidate = sequences(20_000, 12)
    targets = choose_targets(sequence, candidate, np.full(20_000, 3), np.random.default_rng(0))
    counts = np.bincount(targets % 12, minlength=12)
    assert counts[0] == counts[11] == 0
    # each of 10 places is taken by 3/10 of the sequences: 6,000 +- 4 sigma (sigma = sqrt(20000 * 0.3 * 0.7))
    np.testing.assert_allclose(counts[1:11], 6000, atol=4 * 65)


def test_fewer_candidates_than_wanted() -> None:
    sequence = np.array([0, 0, 0, 0, 1, 1, 1])
    candidate = np.array([False, True, False, False, False, True, True])
    targets = choose_targets(sequence, candidate, np.array([3, 1]), np.random.default_rng(0))
    assert targets[0] == 1
    assert len(targets) == 2
    assert targets[1] in (5, 6)


def test_a_sequence_without_candidates_and_no_tokens_at_all() -> None:
    targets = choose_targets(
        np.array([0, 0, 1]), np.array([False, False, True]), np.array([1, 1]), np.random.default_rng(0)
    )
    assert targets.tolist() == [2]
    empty = np.zeros(0, dtype=np.int64)
    for words in (None, empty.astype(bool)):
        assert (
            choose_targets(empty, empty.astype(bool), empty, np.random.default_rng(0), words).tolist() == []
        )


# [CLS] electro ##ence ##pha ##log ##raphy is unbelievable [SEP]: words of 5, 1 and 1 pieces
WORD_START = np.array([0, 1, 0, 0, 0, 0, 1, 1, 0], dtype=bool)
CANDIDATE = np.array([0, 1, 1, 1, 1, 1, 1, 1, 0], dtype=bool)


@pytest.mark.parametrize(("budget", "sizes"), [(3, {2}), (8, {7}), (6, {2, 6}), (5, {2, 5})])
def test_words_are_asked_entirely_or_not_at_all(budget: int, sizes: set[int]) -> None:
    # a word that would exceed the budget is passed over: with 3 the word of five is never chosen; with 5 it
    # is chosen alone when it comes first, else both short words are
    seen = set()
    for seed in range(1000):
        targets = choose_targets(
            np.zeros(9, dtype=int), CANDIDATE, np.array([budget]), np.random.default_rng(seed), WORD_START
        )
        long_word = [t for t in targets if t in range(1, 6)]
        assert len(long_word) in (0, 5)
        assert len(targets) <= budget
        seen.add(len(targets))
    assert seen == sizes


def test_a_word_does_not_reach_across_a_special_token_or_sequence() -> None:
    # two segments; the second begins inside a word (front truncation), its first token starts a group
    sequence = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1])
    candidate = np.array([0, 1, 0, 1, 1, 0, 0, 1, 0], dtype=bool)
    word_start = np.array([0, 1, 0, 0, 0, 0, 0, 0, 0], dtype=bool)
    chosen = set()
    for seed in range(200):
        targets = choose_targets(
            sequence, candidate, np.array([1, 1]), np.random.default_rng(seed), word_start
        )
        chosen.add(tuple(targets))
    assert chosen == {(1, 7)}  # the pair 3, 4 is one group of two and exceeds the budget of one


def test_whole_words_reach_the_share_on_long_text() -> None:
    rng = np.random.default_rng(5)
    num, length = 400, 512
    sequence, candidate = sequences(num, length)
    word_start = rng.random(num * length) < 0.7
    wanted = num_to_predict(np.full(num, length), 0.15, None)
    targets = choose_targets(sequence, candidate, wanted, rng, word_start)
    assert len(targets) / (num * length) == pytest.approx(0.15, abs=0.01)
    asked = np.zeros(num * length, dtype=bool)
    asked[targets] = True
    inside = candidate & ~word_start
    inside[1:] &= candidate[:-1]
    inside[0] = False
    at = np.flatnonzero(inside)
    np.testing.assert_array_equal(asked[at], asked[at - 1])  # a continuation shares its word's fate


def test_replacements_are_80_10_10() -> None:
    rng = np.random.default_rng(0)
    n = 20_000
    ids = np.full(n, 7)
    ordinary = np.arange(1000, 30_522)
    seen = replace_targets(ids, np.arange(n), 4, ordinary, rng)
    # 4 sigma of n = 20,000: sqrt(.8 * .2 / n) * 4 = 1.1 %, sqrt(.1 * .9 / n) * 4 = 0.9 %
    assert (seen == 4).mean() == pytest.approx(0.8, abs=0.0114)
    assert (seen == 7).mean() == pytest.approx(0.1, abs=0.0085)
    drawn = seen[(seen != 4) & (seen != 7)]
    assert len(drawn) / n == pytest.approx(0.1, abs=0.0085)
    assert drawn.min() >= 1000  # specials are never drawn
    assert drawn.max() < 30_522
    assert len(np.unique(drawn)) > 1800  # and the draws are spread over the vocabulary
