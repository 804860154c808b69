"""Documents to sequence pairs for masked-LM and next-sentence prediction (BERT, section 3.1, appendix A.2).

A plan names spans of documents and holds no tokens; the loader gathers the tokens of a whole window of
instances at once. Python loops run over chunks of text, never over tokens.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastbert.errors import UserError

SHORT_SEQ_PROB = 0.1  # share of the documents, per pass, cut to a random shorter length
MIN_SEQ_LEN = 8
_MAX_DRAWS = 10_000


class Documents(Protocol):
    """What instances need of a store."""

    def __len__(self) -> int: ...

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class InstancePlan:
    """N instances, already truncated: `[CLS] A [SEP] B [SEP]`, or `[CLS] A [SEP]` where len_b is 0."""

    doc_a: np.ndarray  # [N] int64, document index
    start_a: np.ndarray  # [N] int64, first token
    len_a: np.ndarray  # [N] int64
    doc_b: np.ndarray
    start_b: np.ndarray
    len_b: np.ndarray
    is_random: np.ndarray  # [N] int64, 1 = B is from another document

    def __len__(self) -> int:
        return len(self.doc_a)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, special tokens included: [N]."""
        return self.len_a + self.len_b + np.where(self.len_b > 0, 3, 2)


def sentence_ends(sentence_lengths: np.ndarray, room: int) -> list[int]:
    """Token offset at which each sentence of a document ends.

    A sentence longer than `room` is cut into pieces of half of it, so that none of its text is lost.
    """
    if sentence_lengths.max(initial=0) > room:
        piece = max(1, room // 2)
        pieces = np.where(sentence_lengths > room, -(-sentence_lengths // piece), 1)
        cut = np.repeat(np.where(sentence_lengths > room, piece, sentence_lengths), pieces)
        last = np.cumsum(pieces) - 1
        cut[last] = sentence_lengths - np.where(pieces > 1, (pieces - 1) * piece, 0)
        sentence_lengths = cut
    return np.cumsum(sentence_lengths).tolist()


def truncate_pair(
    len_a: np.ndarray, len_b: np.ndarray, room: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(front_a, new_len_a, front_b, new_len_b): tokens dropped at the front, and tokens left.

    The original drops one token at a time from the longer of the two (B where they are equal), from the front
    or the back with equal probability; this is the same distribution in closed form.
    """
    half = room // 2
    over = len_a + len_b > room
    new_a = np.where(over, np.minimum(len_a, np.maximum(room - half, room - len_b)), len_a)
    new_b = np.where(over, room - new_a, len_b)
    return rng.binomial(len_a - new_a, 0.5), new_a, rng.binomial(len_b - new_b, 0.5), new_b


def plan_instances(
    store: Documents,
    documents: Sequence[int] | np.ndarray,
    *,
    seq_len: int,
    nsp: bool,
    others: np.ndarray,
    rng: np.random.Generator,
) -> InstancePlan:
    """One pass over `documents`.

    Args:
        store: where the documents are.
        documents: indices, in the order in which they are read.
        seq_len: longest sequence, special tokens included.
        nsp: make pairs; half of them with a B from a different document of `others`.
        others: [M] document indices from which random B spans come; at least two different ones with `nsp`.
        rng: all randomness.
    """
    room = seq_len - (3 if nsp else 2)
    uniform = random.Random(int(rng.integers(2**63))).random
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    for doc in documents:
        doc = int(doc)
        ends = sentence_ends(store.document(doc)[2], room)
        target = room
        if uniform() < SHORT_SEQ_PROB:
            target = 2 + int(uniform() * (room - 1))
        first, offset = 0, 0
        while first < len(ends):
            last = min(bisect_left(ends, offset + target, first), len(ends) - 1)
            num_sentences, chunk = last - first + 1, ends[last] - offset
            if not nsp:
                rows.append((doc, offset, chunk, doc, offset, 0, 0))
                first, offset = last + 1, ends[last]
                continue
            # a chunk of one token has no continuation to show
            is_random = uniform() < 0.5 or chunk < 2
            if num_sentences > 1:
                a_last = first + int(uniform() * (num_sentences - 1))
                len_a = ends[a_last] - offset
            else:
                # one sentence: a random next takes it whole, a true next is its own second half, so that
                # both labels are equally frequent whatever the sentence lengths
                a_last = last
                len_a = chunk if is_random else 1 + int(uniform() * (chunk - 1))
            if is_random:
                other, other_ends = _other_document(store, doc, others, room, uniform)
                start_b, len_b = _random_span(other_ends, target - len_a, uniform)
                rows.append((doc, offset, len_a, other, start_b, len_b, 1))
                first, offset = a_last + 1, ends[a_last]  # the unused sentences start the next chunk
            else:
                rows.append((doc, offset, len_a, doc, offset + len_a, chunk - len_a, 0))
                first, offset = last + 1, ends[last]

    table = np.array(rows, dtype=np.int64).reshape(-1, 7)
    doc_a, start_a, len_a_, doc_b, start_b_, len_b_, label = table.T
    front_a, new_a, front_b, new_b = truncate_pair(len_a_, len_b_, room, rng)
    return InstancePlan(doc_a, start_a + front_a, new_a, doc_b, start_b_ + front_b, new_b, label)


def _other_document(
    store: Documents, doc: int, others: np.ndarray, room: int, uniform: Callable[[], float]
) -> tuple[int, list[int]]:
    """(a document that is not `doc`, uniform over the rest, and the ends of its sentences)."""
    for _ in range(_MAX_DRAWS):
        other = int(others[int(uniform() * len(others))])
        # a document of a shard that was left out has no sentences
        if other != doc and (ends := sentence_ends(store.document(other)[2], room)):
            return other, ends
    raise UserError(f"{_MAX_DRAWS} random documents were empty: most shards of the data set are damaged")


def _random_span(ends: list[int], wanted: int, uniform: Callable[[], float]) -> tuple[int, int]:
    """(first token, tokens) of sentences from a random one on, at least one and until `wanted` tokens."""
    first = int(uniform() * len(ends))
    start = ends[first - 1] if first else 0
    last = min(bisect_left(ends, start + wanted, first), len(ends) - 1)
    return start, ends[last] - start
