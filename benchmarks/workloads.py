"""What the benchmarks run on: the built-in corpus at 128 tokens, and Wikipedia's length mix at 512."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from fastbert.batch import IGNORE_INDEX, PackedBatch, PaddedBatch
from fastbert.data.cache import build_store
from fastbert.data.corpus import open_corpus
from fastbert.data.instances import InstancePlan
from fastbert.data.loader import BATCHES_PER_WINDOW, LoaderSettings, Vocabulary, WindowBuilder, batches_of
from fastbert.data.store import DocumentStore
from fastbert.data.tokenizer import ordinary_ids, special_ids, train_tokenizer

VOCAB_SIZE = 8192
_LENGTHS = Path(__file__).parents[1] / "tests" / "vectors" / "wikipedia512_lengths.json"


def wikipedia_512_histogram() -> np.ndarray:
    """[512] how many sequences of each length, 1 to 512, tokenized Wikipedia has (arXiv 2107.02027)."""
    return np.array(json.loads(_LENGTHS.read_text())["counts"], dtype=np.int64)


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

    def _plan(self, documents: np.ndarray, rng: np.random.Generator) -> InstancePlan:
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
    corpus = open_corpus(None)
    tokenizer = train_tokenizer(
        (sentence for document in corpus.documents() for sentence in document), vocab_size=VOCAB_SIZE
    )
    ids = special_ids(tokenizer)
    vocabulary = Vocabulary(ids.cls, ids.sep, ids.mask, ids.unk, ordinary_ids(tokenizer))
    return build_store(corpus, tokenizer, folder), vocabulary


def windows_of(store: DocumentStore, vocabulary: Vocabulary, **settings: int) -> WindowBuilder:
    return WindowBuilder(store, np.arange(len(store)), vocabulary, LoaderSettings(seed=0, **settings))


def typical_batch(builder: WindowBuilder) -> PackedBatch:
    """The batch of a window with the median number of sequences, and so with typical padding if padded."""
    batches = sorted(batches_of(builder[0], builder.settings.seq_len), key=PackedBatch.num_sequences)
    return batches[len(batches) // 2]


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
