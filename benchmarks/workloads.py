"""What the benchmarks run on: the built-in corpus at 128 tokens, and Wikipedia's length mix at 512."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastbert.batch import IGNORE_INDEX, PackedBatch, PaddedBatch
from fastbert.data.corpus import open_corpus
from fastbert.data.instances import InstancePlan
from fastbert.data.loader import BATCHES_PER_WINDOW, LoaderSettings, Vocabulary, WindowBuilder, batches_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fastbert.data.store import DocumentStore

VOCAB_SIZE = 8192
_LENGTHS = Path(__file__).parents[1] / "tests" / "vectors" / "wikipedia512_lengths.json"


def wikipedia_512_histogram() -> np.ndarray:
    """[512] how many sequences of each length, 1 to 512, tokenized Wikipedia has (arXiv 2107.02027)."""
    return np.array(json.loads(_LENGTHS.read_text())["counts"], dtype=np.int64)


def mixed_lengths(total: int, longest: int) -> list[int]:
    """Sequence lengths of tokenized Wikipedia cut at 512, scaled to `longest`; the last one fills `total`."""
    histogram = wikipedia_512_histogram()
    share = histogram / histogram.sum()
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = 1 + int(rng.choice(len(share), p=share))
        lengths.append(min(left, -(-drawn * longest // len(share))))
    return lengths


class RandomStore:
    """Documents of random tokens, for when only lengths matter."""

    def __init__(self, num_documents: int = 64, tokens_each: int = 8192) -> None:
        rng = np.random.default_rng(0)
        self._ids = rng.integers(5, VOCAB_SIZE, (num_documents, tokens_each), dtype=np.int32)
        self._word_start = np.ones(tokens_each, dtype=np.uint8)
        self._sentence_lengths = np.array([tokens_each], dtype=np.int32)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def document_lengths(self) -> np.ndarray:
        return np.full(len(self._ids), self._ids.shape[1], dtype=np.int64)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._ids[index], self._word_start, self._sentence_lengths


class WikipediaWindows(WindowBuilder):
    """The loader's windows, with sequence lengths drawn from Wikipedia's histogram."""

    def _plan(self, documents: np.ndarray, others: np.ndarray, rng: np.random.Generator) -> InstancePlan:
        histogram = wikipedia_512_histogram()
        share = histogram / histogram.sum()
        mean = float(share @ np.arange(1, 513))
        num_sequences = round(BATCHES_PER_WINDOW * self.settings.tokens_per_batch / mean)
        lengths = 1 + rng.choice(len(share), size=num_sequences, p=share)
        len_a = (lengths - 3) // 2
        doc_a, doc_b = (rng.integers(len(self.store), size=num_sequences) for _ in range(2))
        nothing = np.zeros(num_sequences, dtype=np.int64)
        return InstancePlan(
            doc_a, nothing, len_a, doc_b, nothing, lengths - 3 - len_a, rng.integers(2, size=num_sequences)
        )


def wikipedia_512(tokens_per_batch: int) -> WindowBuilder:
    vocabulary = Vocabulary(cls=2, sep=3, mask=4, unk=1, ordinary=np.arange(5, VOCAB_SIZE))
    settings = LoaderSettings(seq_len=512, tokens_per_batch=tokens_per_batch, seed=0)
    store = RandomStore()
    return WikipediaWindows(store, np.arange(len(store)), vocabulary, settings)


def python_docs(folder: Path) -> tuple[DocumentStore, Vocabulary]:
    """The corpus that the command trains on without `--corpus`, tokenized."""
    # a machine that has no pyarrow still has the other workloads
    from fastbert.data.cache import build_store

    corpus = open_corpus(None)
    tokenizer = _tokenizer_of(corpus.documents())
    return build_store(corpus, tokenizer, folder), vocabulary_of(tokenizer)


def python_docs_in_memory(documents: int | None = None) -> tuple[MemoryStore, Tokenizer]:
    """The same (or its first `documents`) without a file and without pyarrow."""
    texts = list(islice(open_corpus(None).documents(), documents))
    tokenizer = _tokenizer_of(texts)
    return MemoryStore(texts, tokenizer), tokenizer


def _tokenizer_of(documents: Iterable[list[str]]) -> Tokenizer:
    from fastbert.data.tokenizer import train_tokenizer

    return train_tokenizer(
        (sentence for document in documents for sentence in document), vocab_size=VOCAB_SIZE
    )


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    from fastbert.data.tokenizer import ordinary_ids, special_ids

    ids = special_ids(tokenizer)
    return Vocabulary(ids.cls, ids.sep, ids.mask, ids.unk, ordinary_ids(tokenizer))


class MemoryStore:
    """What the loader needs of a store, tokenized into memory: for a small corpus."""

    def __init__(self, documents: Sequence[list[str]], tokenizer: Tokenizer) -> None:
        self._documents = []
        for sentences in documents:
            encoded = [e.ids for e in tokenizer.encode_batch(sentences, add_special_tokens=False) if e.ids]
            if not encoded:
                continue
            ids = np.concatenate([np.array(sentence, dtype=np.int32) for sentence in encoded])
            lengths = np.array([len(sentence) for sentence in encoded], dtype=np.int32)
            self._documents.append((ids, np.ones(len(ids), dtype=np.uint8), lengths))

    def __len__(self) -> int:
        return len(self._documents)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._documents[index]

    @property
    def document_lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids, _, _ in self._documents], dtype=np.int64)

    @property
    def unigram_entropy(self) -> float:
        """Nats a token."""
        counts = np.bincount(np.concatenate([ids for ids, _, _ in self._documents]))
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


def windows_of(store: DocumentStore, vocabulary: Vocabulary, **settings: int) -> WindowBuilder:
    return WindowBuilder(store, np.arange(len(store)), vocabulary, LoaderSettings(seed=0, **settings))


def typical_batch(builder: WindowBuilder) -> PackedBatch:
    """The batch of a window with the median number of sequences, and so with typical padding if padded."""
    batches = sorted(batches_of(builder[0], builder.settings.seq_len), key=PackedBatch.num_sequences)
    return batches[len(batches) // 2]


def packed_batch(lengths: Sequence[int], vocab_size: int, masked: float = 0.15) -> PackedBatch:
    """Random ids in sequences of these lengths, longest first, with a share of them asked for."""
    seqlens = torch.tensor(sorted(lengths, reverse=True))
    ends, total = seqlens.cumsum(0), int(seqlens.sum())
    num_masked = round(masked * total)
    return PackedBatch(
        input_ids=torch.randint(5, vocab_size, (total,)),
        token_type_ids=torch.zeros(total, dtype=torch.long),
        position_ids=torch.arange(total) - (ends - seqlens).repeat_interleave(seqlens),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), ends]).int(),
        max_seqlen=int(seqlens[0]),
        masked_positions=torch.randperm(total)[:num_masked].sort().values,
        masked_labels=torch.randint(5, vocab_size, (num_masked,)),
        next_sentence_labels=torch.randint(2, (len(seqlens),)),
        num_tokens=total,
    )


def padded_arguments(batch: PaddedBatch) -> dict[str, torch.Tensor]:
    """Keyword arguments as the reference and transformers take them."""
    labels = torch.full_like(batch.input_ids, IGNORE_INDEX)
    labels.view(-1)[batch.masked_positions] = batch.masked_labels
    return {
        "input_ids": batch.input_ids,
        "token_type_ids": batch.token_type_ids,
        "attention_mask": batch.attention_mask,
        "labels": labels,
        "next_sentence_label": batch.next_sentence_labels,
    }
