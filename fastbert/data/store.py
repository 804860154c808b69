"""Tokenized documents on disk: made once for a corpus and a tokenizer, memory-mapped by every process.

A store is a folder with `documents.arrow` (an Arrow IPC stream, which Hugging Face `datasets` reads too), the
token counts and a manifest. It is written under another name, in record batches as they are made, and renamed
when it is whole: memory does not grow with the corpus, and a killed process leaves nothing like a store.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from fastbert.data.corpus import Corpus
from fastbert.data.tokenizer import special_ids, tokenizer_fingerprint, vocabulary_size
from fastbert.errors import UserError

STORE_VERSION = 1  # part of the key: raise it whenever the same text and tokenizer give another store

_DOCUMENTS = "documents.arrow"
_COUNTS = "unigram_counts.npy"
_MANIFEST = "manifest.json"
_BATCH_CHARS = (
    1 << 19
)  # of text in a record batch: about a megabyte of ids, and tens of megabytes while encoding
_ABANDONED_SECONDS = 3600  # a build writes every second: one this old was killed

_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("word_start", pa.list_(pa.uint8())),
        ("sentence_lengths", pa.list_(pa.int32())),
    ]
)


@dataclass(frozen=True)
class _Encoded:
    """Some whole documents: flat arrays, and where each document ends in them."""

    input_ids: np.ndarray  # [tokens] int32
    word_start: np.ndarray  # [tokens] uint8
    sentence_lengths: np.ndarray  # [sentences] int32
    token_offsets: np.ndarray  # [documents + 1] int32
    sentence_offsets: np.ndarray  # [documents + 1] int32

    def record_batch(self) -> pa.RecordBatch:
        columns = (
            (self.token_offsets, self.input_ids),
            (self.token_offsets, self.word_start),
            (self.sentence_offsets, self.sentence_lengths),
        )
        arrays = [pa.ListArray.from_arrays(offsets, values) for offsets, values in columns]
        return pa.record_batch(arrays, schema=_SCHEMA)


def build_store(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache_dir: Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> DocumentStore:
    """The store of a corpus and a tokenizer in `cache_dir`, built if it is not there yet.

    Sentences and documents that tokenize to nothing are dropped. `on_progress` is told the documents and
    tokens so far, after each batch. Raises UserError for what the corpus cannot read, for a corpus without a
    single token, and for a folder that is full or cannot be written.
    """
    fingerprints = {"corpus": corpus.fingerprint(), "tokenizer": tokenizer_fingerprint(tokenizer)}
    key = hashlib.sha256(f"{STORE_VERSION} {fingerprints}".encode()).hexdigest()[:24]
    final = Path(cache_dir) / key
    if final.is_dir():
        return DocumentStore.open(final)
    building: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final)
        building = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=final.parent))
        description = {"corpus": corpus.description, "name": corpus.name, "fingerprints": fingerprints}
        _write_store(building, corpus, tokenizer, description, on_progress)
        _publish(building, final)
    except OSError as error:
        raise _storage_error(error, final.parent) from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
    return DocumentStore.open(final)


def _storage_error(error: OSError, folder: Path) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"no space left for the tokenized corpus in {folder}: free some or choose another folder"
        )
    return UserError(f"cannot write the tokenized corpus to {folder} ({error}): choose another folder")


def _remove_abandoned(final: Path) -> None:
    """Delete what builds of the same store left behind when they were killed."""
    for folder in final.parent.glob(f".{final.name}-*"):
        newest = max((entry.stat().st_mtime for entry in folder.iterdir()), default=folder.stat().st_mtime)
        if time.time() - newest > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _publish(building: Path, final: Path) -> None:
    for file in building.iterdir():
        with file.open("rb+") as written:
            os.fsync(written.fileno())
    os.chmod(building, 0o755)  # mkdtemp makes private folders, but a cache may be shared
    try:
        building.rename(final)
    except OSError:
        # another process was quicker with the same store: its content is the same
        if not final.is_dir():
            raise


def _write_store(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    description: dict[str, Any],
    on_progress: Callable[[int, int], None] | None,
) -> None:
    vocab_size = vocabulary_size(tokenizer)
    counts = np.zeros(vocab_size, dtype=np.int64)
    num_documents = num_sentences = 0
    with (
        pa.OSFile(str(folder / _DOCUMENTS), "wb") as file,
        pa.ipc.new_stream(file, _SCHEMA) as stream,
    ):
        for encoded in _encode(corpus, tokenizer):
            stream.write_batch(encoded.record_batch())
            counts += np.bincount(encoded.input_ids, minlength=vocab_size)
            num_documents += len(encoded.token_offsets) - 1
            num_sentences += len(encoded.sentence_lengths)
            if on_progress is not None:
                on_progress(num_documents, int(counts.sum()))
    if not num_documents:
        raise UserError(
            f"the corpus {corpus.name} holds no token the tokenizer knows how to make: check its text"
        )
    np.save(folder / _COUNTS, counts)
    manifest = _Manifest(
        version=STORE_VERSION,
        num_documents=num_documents,
        num_sentences=num_sentences,
        num_tokens=int(counts.sum()),
        num_unk=int(counts[special_ids(tokenizer).unk]),
        vocab_size=vocab_size,
        **description,
    )
    (folder / _MANIFEST).write_text(
        json.dumps(asdict(manifest), indent=2, ensure_ascii=False), encoding="utf-8"
    )


def _encode(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[_Encoded]:
    """Documents -> batches of about _BATCH_CHARS characters, whole documents each."""
    documents: list[list[str]] = []
    num_chars = 0
    for document in corpus.documents():
        documents.append(document)
        num_chars += sum(map(len, document))
        if num_chars >= _BATCH_CHARS:
            yield from _encode_batch(documents, tokenizer)
            documents, num_chars = [], 0
    yield from _encode_batch(documents, tokenizer)


def _encode_batch(documents: list[list[str]], tokenizer: Tokenizer) -> Iterator[_Encoded]:
    """One batch, or none when nothing in it tokenizes to anything."""
    sentences = list(chain.from_iterable(documents))
    # not encode_batch_fast: it leaves out the word numbers
    encodings = tokenizer.encode_batch(sentences, add_special_tokens=False)
    lengths = np.fromiter((len(encoding) for encoding in encodings), np.int32, len(encodings))
    num_tokens = int(lengths.sum())
    ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), np.int32, num_tokens)
    words = np.fromiter(chain.from_iterable(e.word_ids for e in encodings), np.int32, num_tokens)

    # a word starts where the word number changes, and at the first token of each sentence
    word_start = np.ones(num_tokens, dtype=np.uint8)
    word_start[1:] = words[1:] != words[:-1]
    filled = lengths > 0
    ends = np.cumsum(lengths[filled], dtype=np.int64)
    word_start[ends[:-1]] = 1

    num_sentences = np.array([len(document) for document in documents], dtype=np.int64)
    owner = np.repeat(np.arange(len(documents)), num_sentences)[filled]
    sentences_kept = np.bincount(owner, minlength=len(documents))
    sentences_kept = sentences_kept[sentences_kept > 0]
    if not len(sentences_kept):
        return
    sentence_offsets = np.concatenate(([0], np.cumsum(sentences_kept)))
    yield _Encoded(
        input_ids=ids,
        word_start=word_start,
        sentence_lengths=lengths[filled],
        token_offsets=np.concatenate(([0], ends))[sentence_offsets].astype(np.int32),
        sentence_offsets=sentence_offsets.astype(np.int32),
    )


@dataclass(frozen=True)
class _Manifest:
    version: int
    num_documents: int
    num_sentences: int
    num_tokens: int
    num_unk: int
    vocab_size: int
    corpus: str
    name: str
    fingerprints: dict[str, str]


@dataclass(frozen=True)
class _Chunk:
    """One record batch as NumPy views of the mapped file."""

    input_ids: np.ndarray
    word_start: np.ndarray
    sentence_lengths: np.ndarray
    token_offsets: np.ndarray
    sentence_offsets: np.ndarray

    @staticmethod
    def of(batch: pa.RecordBatch) -> _Chunk:
        ids, words, sentences = batch.columns
        return _Chunk(
            input_ids=ids.values.to_numpy(),
            word_start=words.values.to_numpy(),
            sentence_lengths=sentences.values.to_numpy(),
            token_offsets=ids.offsets.to_numpy(),
            sentence_offsets=sentences.offsets.to_numpy(),
        )


class DocumentStore:
    """The tokenized documents in a folder written by `build_store`.

    Pickles as its path and opens its files on first use in each process; the pages of the file are shared.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @classmethod
    def open(cls, path: Path) -> DocumentStore:
        """Check that the folder holds a store of this version; UserError if it does not."""
        store = cls(path)
        if store._manifest.version != STORE_VERSION:
            raise UserError(
                f"{path} is a store of version {store._manifest.version}, this is {STORE_VERSION}: delete it"
            )
        return store

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    @cached_property
    def _manifest(self) -> _Manifest:
        try:
            return _Manifest(**json.loads((self.path / _MANIFEST).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.path} holds no readable store ({error}): delete it to build it again"
            ) from error

    @cached_property
    def _chunks(self) -> list[_Chunk]:
        try:
            with pa.ipc.open_stream(pa.memory_map(str(self.path / _DOCUMENTS))) as stream:
                chunks = [_Chunk.of(batch) for batch in stream]
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.path} is damaged ({error}): delete it to build it again") from error
        num_documents = sum(len(chunk.token_offsets) - 1 for chunk in chunks)
        if num_documents != len(self):
            raise UserError(
                f"{self.path} is damaged ({num_documents} of {len(self)} documents): delete it to rebuild"
            )
        return chunks

    @cached_property
    def _first_documents(self) -> list[int]:
        """The number of the first document of each chunk."""
        sizes = [len(chunk.token_offsets) - 1 for chunk in self._chunks]
        return [0, *np.cumsum(sizes[:-1]).tolist()]

    def __len__(self) -> int:
        return self._manifest.num_documents

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document `index` -> input_ids int32 [n], word_start uint8 [n], sentence_lengths int32 [s].

        Read-only views. word_start is 1 where a word begins; sentence lengths are positive and add up to n.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of a store of {len(self)} documents")
        number = bisect_right(self._first_documents, index) - 1
        chunk = self._chunks[number]
        row = index - self._first_documents[number]
        begin, end = chunk.token_offsets[row], chunk.token_offsets[row + 1]
        sentences = chunk.sentence_lengths[chunk.sentence_offsets[row] : chunk.sentence_offsets[row + 1]]
        return chunk.input_ids[begin:end], chunk.word_start[begin:end], sentences

    @cached_property
    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.concatenate([np.diff(chunk.token_offsets) for chunk in self._chunks]).astype(np.int64)

    @cached_property
    def unigram_counts(self) -> np.ndarray:
        """How often each id occurs, int64 [vocab_size]."""
        return np.load(self.path / _COUNTS)

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the tokens in nats: the loss of a model that knows frequencies and no context."""
        probabilities = self.unigram_counts[self.unigram_counts > 0] / self.num_tokens
        return float(-(probabilities * np.log(probabilities)).sum())

    @property
    def num_tokens(self) -> int:
        return self._manifest.num_tokens

    @property
    def num_sentences(self) -> int:
        return self._manifest.num_sentences

    @property
    def unk_share(self) -> float:
        """Share of the tokens that are [UNK]."""
        return self._manifest.num_unk / self._manifest.num_tokens

    @property
    def vocab_size(self) -> int:
        """The rows an embedding table needs for these ids."""
        return self._manifest.vocab_size

    @property
    def description(self) -> str:
        """One line on the text behind the store."""
        return self._manifest.corpus
