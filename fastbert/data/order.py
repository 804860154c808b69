"""Which documents stand in which window of an epoch.

A small store is shuffled as a whole. A large one is shuffled in two steps, shards and then the documents of
BLOCK_SHARDS of them together: so a process needs only a few shards at a time, whether they come from a disk
or over a network, and knows a window's documents without the lengths of all others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from fastbert.data.store import DocumentStore

BLOCK_SHARDS = 32  # shuffled together: about a gigabyte of text
EVALUATION_SHARDS = 16  # of a large store, from which held-out documents come
HELD_OUT_SHARE = 0.05
_SAMPLE = 1000  # documents that tell the mean length of a sequence


class HasLengths(Protocol):
    @property
    def document_lengths(self) -> np.ndarray: ...


@dataclass(frozen=True)
class ShardedDocuments:
    """Documents of a store of many shards: from starts[s] to ends[s] of each shard s that has some."""

    starts: np.ndarray  # [shards] int64
    ends: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return int((self.ends - self.starts).sum())


class DocumentOrder(Protocol):
    num_tokens: int

    def sample(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(some documents, those from which their random next sentences come)."""

    def window(self, epoch: int, window: int, num_windows: int) -> tuple[np.ndarray, np.ndarray]:
        """(the documents of a window, those from which their random next sentences come)."""


def document_order(store: HasLengths, documents: np.ndarray | ShardedDocuments, seed: int) -> DocumentOrder:
    if isinstance(documents, ShardedDocuments):
        from fastbert.data.store import DocumentStore  # with pyarrow, which a loader of other stores lacks

        assert isinstance(store, DocumentStore)
        return BlockOrder(store, documents, seed)
    return WholeOrder(store, documents, seed)


class WholeOrder:
    """A permutation of all documents, another one each epoch, cut into runs of equal token count."""

    def __init__(self, store: HasLengths, documents: np.ndarray, seed: int) -> None:
        self._store, self._documents, self._seed = store, documents, seed
        self.num_tokens = int(store.document_lengths[documents].sum())
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def sample(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        size = min(_SAMPLE, len(self._documents))
        return rng.choice(self._documents, size=size, replace=False), self._documents

    def window(self, epoch: int, window: int, num_windows: int) -> tuple[np.ndarray, np.ndarray]:
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.random.default_rng([self._seed, 1, epoch]).permutation(self._documents)
            ends = np.cumsum(self._store.document_lengths[order])
            cuts = np.searchsorted(ends, np.arange(1, num_windows) * (ends[-1] / num_windows))
            self._epoch = (epoch, order, np.concatenate([[0], cuts, [len(order)]]))
        _, order, bounds = self._epoch
        return order[bounds[window] : bounds[window + 1]], self._documents


class BlockOrder:
    """A permutation of the shards, in blocks of which the documents are permuted together."""

    def __init__(self, store: DocumentStore, documents: ShardedDocuments, seed: int) -> None:
        self._store, self._documents, self._seed = store, documents, seed
        self.num_tokens = int(documents.tokens.sum())
        num_shards = len(documents.starts)
        num_blocks = max(1, -(-num_shards // BLOCK_SHARDS))
        # blocks of equal size: a short one at the end might hold a single document
        self._bounds = np.arange(num_blocks + 1) * num_shards // num_blocks
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None
        self._blocks: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def sample(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """From the first block of the first epoch, which is read first anyway."""
        documents, _ = self._block(0, 0)
        return documents[:_SAMPLE], documents

    def _shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(the shards in order, the tokens up to the end of each block)."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.random.default_rng([self._seed, 1, epoch]).permutation(len(self._documents.starts))
            ends = np.cumsum(self._documents.tokens[order])[self._bounds[1:] - 1]
            self._epoch = (epoch, order, ends)
            self._blocks.clear()
        return self._epoch[1], self._epoch[2]

    def _block(self, epoch: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(the documents of a block in order, the tokens up to the end of each)."""
        shards, block_ends = self._shards(epoch)
        if (epoch, block) not in self._blocks:
            d, store = self._documents, self._store
            chosen = shards[self._bounds[block] : self._bounds[block + 1]]
            documents = np.concatenate([np.arange(d.starts[s], d.ends[s]) for s in chosen])
            lengths = np.concatenate([store.lengths(d.starts[s], d.ends[s]) for s in chosen])
            order = np.random.default_rng([self._seed, 4, epoch, block]).permutation(len(documents))
            before = block_ends[block - 1] if block else 0
            self._blocks[epoch, block] = (documents[order], before + np.cumsum(lengths[order]))
            if len(self._blocks) > 3:
                self._blocks.popitem(last=False)
        return self._blocks[epoch, block]

    def window(self, epoch: int, window: int, num_windows: int) -> tuple[np.ndarray, np.ndarray]:
        _, block_ends = self._shards(epoch)
        last_block = len(block_ends) - 1
        low, high = (self.num_tokens * at / num_windows for at in (window, window + 1))
        is_last = window == num_windows - 1
        first = min(int(np.searchsorted(block_ends, low)), last_block)
        last = last_block if is_last else min(int(np.searchsorted(block_ends, high)), last_block)
        inside, others = [], []
        for block in range(first, last + 1):
            documents, ends = self._block(epoch, block)
            begin = int(np.searchsorted(ends, low)) if window else 0
            end = len(ends) if is_last else int(np.searchsorted(ends, high))
            inside.append(documents[begin:end])
            others.append(documents)
        return np.concatenate(inside), np.concatenate(others)


def training_documents(store: DocumentStore, seed: int) -> tuple[np.ndarray | ShardedDocuments, np.ndarray]:
    """(training, held-out) documents of a store.

    What was held out when the store was prepared stays held out: all of it, or that of some shards of a large
    store, evenly spaced. Where nothing was, `split_documents` draws, or the end of these shards is taken.
    """
    is_large = store.num_shards > BLOCK_SHARDS
    if not is_large and not store.num_held_out:
        return split_documents(len(store), seed)
    starts, ends = store.shard_starts[:-1], store.shard_starts[1:]
    borders = ends - store.column("held_out_documents")
    tokens = store.column("tokens") - store.column("held_out_tokens")
    chosen = np.arange(0, store.num_shards, store.num_shards // EVALUATION_SHARDS if is_large else 1)
    if not store.num_held_out:
        borders[chosen] = ends[chosen] - np.ceil(HELD_OUT_SHARE * (ends - starts)[chosen]).astype(np.int64)
        tokens[chosen] -= [int(store.lengths(borders[s], ends[s]).sum()) for s in chosen]
    held_out = np.concatenate([np.arange(borders[s], ends[s]) for s in chosen])
    if not is_large:
        return np.concatenate([np.arange(s, b) for s, b in zip(starts, borders)]), held_out
    filled = np.flatnonzero(borders > starts)
    return ShardedDocuments(starts[filled], borders[filled], tokens[filled]), held_out


def split_documents(num_documents: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) document indices. Fewer than 10 documents are all for training."""
    held_out = max(2, round(num_documents * HELD_OUT_SHARE)) if num_documents >= 10 else 0
    order = np.random.default_rng([seed, 3]).permutation(num_documents)
    return np.sort(order[held_out:]), np.sort(order[:held_out])
