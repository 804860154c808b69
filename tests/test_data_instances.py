"""Sentence pairs: where their spans come from, how long they are, how often the second one is random."""

from __future__ import annotations

import numpy as np
import pytest

from fastbert.data.instances import InstancePlan, plan_instances, sentence_ends, truncate_pair
from tests.documents import ListStore, numbered_store, random_store


def plan(store: ListStore, *, seq_len: int = 64, nsp: bool = True, seed: int = 0) -> InstancePlan:
    everything = np.arange(len(store))
    return plan_instances(
        store, everything, seq_len=seq_len, nsp=nsp, others=everything, rng=np.random.default_rng(seed)
    )


def test_sentence_ends_cut_only_sentences_above_the_room() -> None:
    assert sentence_ends(np.array([3, 10, 4]), 10) == [3, 13, 17]
    # 11 > 10: pieces of 5, 5 and 1; nothing is lost
    assert sentence_ends(np.array([3, 11, 4]), 10) == [3, 8, 13, 14, 18]
    assert sentence_ends(np.zeros(0, dtype=np.int32), 10) == []


def test_truncation_follows_the_published_example() -> None:
    # a = "abcdefgh", b = "12345678", room 9 -> 5 and 4 tokens: the longer loses, B where they are equal
    _, new_a, _, new_b = truncate_pair(np.array([8]), np.array([8]), 9, np.random.default_rng(0))
    assert (new_a.item(), new_b.item()) == (5, 4)


def test_truncation_equals_dropping_one_token_at_a_time() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(1, 80, 2000), rng.integers(1, 80, 2000)
    front_a, new_a, front_b, new_b = truncate_pair(a, b, 61, rng)
    for i in range(2000):
        x, y = int(a[i]), int(b[i])
        while x + y > 61:
            if x > y:
                x -= 1
            else:
                y -= 1
        assert (new_a[i], new_b[i]) == (x, y)
    assert ((front_a >= 0) & (front_a <= a - new_a)).all()
    assert ((front_b >= 0) & (front_b <= b - new_b)).all()
    # front or back with equal probability: 4 sigma of a binomial
    dropped = (a - new_a).sum() + (b - new_b).sum()
    front = front_a.sum() + front_b.sum()
    assert front / dropped == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(dropped))


def test_true_pairs_continue_and_random_ones_come_from_another_document() -> None:
    store = random_store(300, max_sentences=10, max_tokens=20)
    p = plan(store, seq_len=512)  # few are truncated at this length
    true = p.is_random == 0
    np.testing.assert_array_equal(p.doc_a[true], p.doc_b[true])
    untruncated = true & (p.lengths < 512)
    np.testing.assert_array_equal((p.start_a + p.len_a)[untruncated], p.start_b[untruncated])
    assert (p.doc_a[~true] != p.doc_b[~true]).all()
    lengths = store.document_lengths
    assert (p.start_a + p.len_a <= lengths[p.doc_a]).all()
    assert (p.start_b + p.len_b <= lengths[p.doc_b]).all()
    assert (p.len_a >= 1).all()
    assert (p.len_b >= 1).all()


# sentences of 1-30 tokens; long ones, where a chunk is mostly one sentence; one-sentence documents
@pytest.mark.parametrize(
    "store",
    [
        random_store(3000),
        random_store(2000, max_tokens=200),
        random_store(6000, max_sentences=1, min_tokens=2),
    ],
    ids=["short sentences", "long sentences", "one sentence"],
)
def test_half_of_the_pairs_are_random(store: ListStore) -> None:
    p = plan(store, seq_len=128)
    assert len(p) > 3000
    assert p.is_random.mean() == pytest.approx(0.5, abs=0.02)


def test_no_pair_exceeds_the_length_and_most_reach_it() -> None:
    p = plan(random_store(500, max_sentences=60), seq_len=64)
    assert p.lengths.max() == 64
    assert (p.lengths == 64).mean() > 0.6
    # a tenth of the documents is cut to random shorter targets
    assert 0.03 < (p.lengths < 40).mean() < 0.3


def test_every_sentence_is_used_and_unused_ones_start_the_next_chunk() -> None:
    store = numbered_store(40, sentences=9, tokens=5)
    p = plan(store, seq_len=512)
    for doc in range(40):
        covered = np.zeros(45, dtype=int)
        for i in np.flatnonzero(p.doc_a == doc):
            covered[p.start_a[i] : p.start_a[i] + p.len_a[i]] += 1
            if not p.is_random[i]:
                covered[p.start_b[i] : p.start_b[i] + p.len_b[i]] += 1
        np.testing.assert_array_equal(covered, 1)


def test_without_nsp_chunks_tile_the_documents() -> None:
    store = numbered_store(20, sentences=8, tokens=6)
    p = plan(store, seq_len=512, nsp=False)
    assert (p.len_b == 0).all()
    assert p.len_a.sum() == store.document_lengths.sum()
    np.testing.assert_array_equal(p.lengths, p.len_a + 2)


def test_a_sentence_longer_than_a_sequence_loses_nothing() -> None:
    store = ListStore([[list(range(10, 510))], [[5, 6, 7]]])
    p = plan(store, seq_len=40, nsp=False, seed=1)
    first = p.doc_a == 0
    assert p.len_a[first].sum() >= 450  # what truncation to the room drops, at most
    assert p.lengths.max() <= 40


def test_one_token_documents_are_always_random_pairs() -> None:
    p = plan(ListStore([[[10]], [[11]], [[12]]]))
    assert p.is_random.tolist() == [1, 1, 1]
    assert (p.doc_a != p.doc_b).all()


def test_the_same_seed_gives_the_same_plan() -> None:
    store = random_store(100)
    one, two, other = plan(store, seed=5), plan(store, seed=5), plan(store, seed=6)
    np.testing.assert_array_equal(one.start_b, two.start_b)
    assert len(one) != len(other) or (one.start_b != other.start_b).any()
