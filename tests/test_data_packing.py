"""Longest-pack-first histogram packing against the published vectors and by hand."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fastbert.data.packing import pack_histogram, pack_sequences, packing_efficiency

VECTORS = Path(__file__).parent / "vectors"
CASES = json.loads((VECTORS / "pretraining_vectors.json").read_text())["lpfhp"]


def wikipedia_histogram() -> np.ndarray:
    return np.array(json.loads((VECTORS / "wikipedia512_lengths.json").read_text())["counts"])


def as_multiset(groups: list) -> Counter:
    packs: Counter = Counter()
    for count, lengths in groups:
        packs[tuple(sorted(lengths))] += count
    return packs


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"L{c['max_len']}-K{c['max_seqs']}-{sum(c['hist'])}")
def test_packs_equal_the_vectors(case: dict) -> None:
    limit = None if case["max_seqs"] == "max" else case["max_seqs"]
    groups = pack_histogram(np.array(case["hist"]), case["max_len"], limit)
    assert as_multiset(groups) == as_multiset(case["packs"])
    assert packing_efficiency(groups, case["max_len"]) == pytest.approx(case["efficiency"], abs=1e-12)


# the published check on Wikipedia: packs and efficiency by the number of sequences a pack may hold
@pytest.mark.parametrize(
    ("limit", "packs", "efficiency"),
    [(12, 8_149_619, 0.998129), (3, 9_090_154, 0.894855), (None, 8_138_483, 0.999494)],
)
def test_wikipedia_fill(limit: int | None, packs: int, efficiency: float) -> None:
    groups = pack_histogram(wikipedia_histogram(), 512, limit)
    assert sum(count for count, _ in groups) == packs
    assert packing_efficiency(groups, 512) == pytest.approx(efficiency, abs=1e-6)


def test_every_length_is_packed_as_often_as_it_occurs() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        capacity = int(rng.integers(5, 60))
        histogram = rng.integers(0, 9, size=capacity)
        limit = None if rng.random() < 0.5 else int(rng.integers(1, 6))
        groups = pack_histogram(histogram, capacity, limit)
        seen = np.zeros(capacity, dtype=int)
        for count, lengths in groups:
            assert sum(lengths) <= capacity
            assert limit is None or len(lengths) <= limit
            np.add.at(seen, np.array(lengths) - 1, count)
        np.testing.assert_array_equal(seen, histogram)


def test_a_length_above_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens does not fit a pack of 8"):
        pack_histogram(np.array([0] * 8 + [1]), 8)


def test_sequences_are_drawn_per_length_at_random() -> None:
    lengths = np.array([3, 5, 3, 8, 2, 3, 1, 5])
    orders = set()
    for seed in range(20):
        order, starts = pack_sequences(lengths, 8, None, np.random.default_rng(seed))
        assert sorted(order) == list(range(8))
        assert starts[0] == 0
        assert starts[-1] == 8
        packs = [sorted(lengths[order[a:b]].tolist()) for a, b in itertools.pairwise(starts)]
        # by hand: 8 | 5 5 open with room 3 each | 3 3 fill them | 3 2 1 share one with room 2 left
        assert sorted(packs) == [[1, 2, 3], [3, 5], [3, 5], [8]]
        orders.add(tuple(order))
    assert len(orders) > 10


def test_no_sequences_give_no_packs() -> None:
    order, starts = pack_sequences(np.zeros(0, dtype=np.int64), 8, None, np.random.default_rng(0))
    assert len(order) == 0
    assert starts.tolist() == [0]
