"""Masked-LM targets: which tokens are asked, and what the model sees in their place (BERT, section 3.1).

Everything is vectorised over the tokens of many sequences laid end to end. Three things differ from the
original generator and are meant: a random replacement is never a special or unused token, [UNK] is never
asked, and masks are drawn anew each time (the generator fixed them once).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

MASK_SHARE = 0.8  # of the chosen tokens become [MASK] ...
KEEP_SHARE = 0.5  # ... and half of the rest keep their place: 80 / 10 / 10


def num_to_predict(lengths: np.ndarray, mask_prob: float, max_predictions: int | None) -> np.ndarray:
    """Targets of sequences of `lengths` [N] tokens, special tokens counted: int64 [N], at least one each."""
    wanted = np.maximum(1, np.rint(lengths * mask_prob)).astype(np.int64)
    return wanted if max_predictions is None else np.minimum(wanted, max_predictions)


def choose_targets(
    sequence: np.ndarray,
    candidate: np.ndarray,
    wanted: np.ndarray,
    rng: np.random.Generator,
    word_start: np.ndarray | None = None,
) -> np.ndarray:
    """Positions to predict, ascending: int64 [P].

    Args:
        sequence: [T] which sequence a token belongs to, ascending from 0.
        candidate: [T] bool, tokens that may be asked.
        wanted: [N] targets per sequence; fewer are chosen where there are fewer candidates.
        word_start: [T] bool; given, words are asked entirely or not at all, and a word that would exceed
            `wanted` is passed over. True at the first token of every segment.
    """
    positions = np.flatnonzero(candidate)
    if word_start is None:
        first, sizes = positions, np.ones(len(positions), dtype=np.int64)
    else:
        # a word also ends where a token that is no candidate stands
        begins = word_start[positions].astype(bool)
        begins[1:] |= np.diff(positions) != 1
        begins[:1] = True
        starts = np.flatnonzero(begins)
        first = positions[starts]
        sizes = np.diff(starts, append=len(positions))
    owner = sequence[first]

    shuffled = np.argsort(owner + rng.random(len(first)))  # random order inside each sequence
    owner, sizes = owner[shuffled], sizes[shuffled]
    offsets = np.searchsorted(owner, np.arange(len(wanted) + 1))
    rank = np.arange(len(owner)) - offsets[owner]
    if word_start is None:
        return np.sort(first[shuffled[rank < wanted[owner]]])

    # word by word for all sequences at once: column r holds each sequence's r-th word
    taken = np.zeros(len(wanted), dtype=np.int64)
    chosen = np.zeros(len(owner), dtype=bool)
    by_rank = np.argsort(rank, kind="stable")
    columns = np.searchsorted(rank[by_rank], np.arange(int(rank.max(initial=-1)) + 2))
    for begin, end in pairwise(columns):
        words = by_rank[begin:end]
        owners = owner[words]
        fits = taken[owners] + sizes[words] <= wanted[owners]
        taken[owners] += sizes[words] * fits
        chosen[words] = fits
    first, sizes = first[shuffled[chosen]], sizes[chosen]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(np.repeat(first, sizes) + within)


def replace_targets(
    input_ids: np.ndarray,
    positions: np.ndarray,
    mask_id: int,
    ordinary_ids: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """What stands at `positions` [P] of `input_ids` [T] for the model to see: [P].

    80 % [MASK]; of the rest half keep their token and half get one drawn from `ordinary_ids`. Drawn for each
    token, also inside a word, as in the original.
    """
    original = input_ids[positions]
    drawn = ordinary_ids[rng.integers(len(ordinary_ids), size=len(positions))]
    masked = rng.random(len(positions)) < MASK_SHARE
    kept = rng.random(len(positions)) < KEEP_SHARE
    return np.where(masked, mask_id, np.where(kept, original, drawn))
