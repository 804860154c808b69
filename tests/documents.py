"""A store that lives in memory, for tests of what is built from one."""

from __future__ import annotations

import numpy as np


class ListStore:
    """Documents given as lists of sentences of token ids; picklable, so worker processes can have it."""

    def __init__(self, documents: list[list[list[int]]], continuation: set[int] | None = None) -> None:
        self._documents = []
        for sentences in documents:
            ids = np.array([token for sentence in sentences for token in sentence], dtype=np.int32)
            word_start = np.array([token not in (continuation or set()) for token in ids], dtype=np.uint8)
            lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int32)
            self._documents.append((ids, word_start, lengths))

    def __len__(self) -> int:
        return len(self._documents)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._documents[index]

    @property
    def document_lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids, _, _ in self._documents], dtype=np.int64)


def random_store(
    num_documents: int,
    *,
    vocab_size: int = 1000,
    max_sentences: int = 12,
    max_tokens: int = 30,
    min_tokens: int = 1,
    seed: int = 0,
) -> ListStore:
    """Documents of 1 to max_sentences sentences of min to max_tokens tokens, ids 10 to vocab_size - 1."""
    rng = np.random.default_rng(seed)
    documents = [
        [
            rng.integers(10, vocab_size, size=rng.integers(min_tokens, max_tokens + 1)).tolist()
            for _ in range(rng.integers(1, max_sentences + 1))
        ]
        for _ in range(num_documents)
    ]
    return ListStore(documents)


def numbered_store(num_documents: int, sentences: int, tokens: int, first_id: int = 10) -> ListStore:
    """Every token of the corpus has an id of its own, counting up: an id tells its document and its place."""
    next_id = first_id
    documents = []
    for _ in range(num_documents):
        document = []
        for _ in range(sentences):
            document.append(list(range(next_id, next_id + tokens)))
            next_id += tokens
        documents.append(document)
    return ListStore(documents)
