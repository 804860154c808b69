"""Tokenized documents on disk, memory-mapped by every process: of a run's cache, or a prepared data set.

    DIR/
      manifest.json           counts, options and the checksums of the files below
      shards.arrow            a row a shard: path, size, SHA-256, documents, tokens
      document_lengths.npy    tokens of each document, uint32
      unigram_counts.npy      how often each id occurs, int64
      tokenizer/              as transformers reads it
      shards/*.arrow          Arrow IPC streams, as `datasets` reads them: a row a document, those
                              held out from training at the end

To open it takes the same few files however many shards there are; a shard is opened, and its size and
checksum compared, when a document of it is first read. `fastbert.data.shards` writes it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import warnings
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from fastbert.data import remote
from fastbert.errors import UserError
from fastbert.paths import stays_inside

STORE_VERSION = 2  # part of a cache's key: raise it whenever the same text and tokenizer give another store

MANIFEST = "manifest.json"
INDEX = "shards.arrow"
LENGTHS = "document_lengths.npy"
COUNTS = "unigram_counts.npy"
TOKENIZER = "tokenizer"
SHARDS = "shards"

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("word_start", pa.list_(pa.uint8())),
        ("sentence_lengths", pa.list_(pa.int32())),
    ]
)
INDEX_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("sha256", pa.string()),
        ("documents", pa.int64()),
        ("tokens", pa.int64()),
        ("held_out_documents", pa.int64()),  # of the documents, the last ones
        ("held_out_tokens", pa.int64()),  # of the tokens
    ]
)
_OPEN_SHARDS = 128  # mapped at once: a process may map some 65,000 regions
# documents that are read until the pages of all shards are given back to the system, which keeps them while
# it has memory to spare. A document takes 64 KiB of the process: Linux maps 16 pages around one that is read
_RELEASE_EVERY = 2000

OnBadShard = Literal["error", "skip"]


class BadShard(UserError):
    """A shard that is missing or not what the manifest says."""


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


@dataclass(frozen=True)
class Shard:
    """The documents of one mapped file."""

    chunks: list[_Chunk]
    first_documents: list[int]  # the number, in the shard, of each chunk's first document
    mapped: mmap.mmap

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Raises OSError or pyarrow's errors for what is no whole stream."""
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with pa.ipc.open_stream(pa.py_buffer(mapped)) as stream:
            chunks = [_Chunk.of(batch) for batch in stream]
        sizes = [len(chunk.token_offsets) - 1 for chunk in chunks]
        return cls(chunks, [0, *np.cumsum(sizes[:-1]).tolist()], mapped)

    def release(self) -> None:
        """Take no part in this process's memory until a document is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)

    def lengths(self) -> np.ndarray:
        """Tokens of each document, int32."""
        return np.concatenate([np.diff(chunk.token_offsets) for chunk in self.chunks])

    def document(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        number = bisect_right(self.first_documents, row) - 1
        chunk = self.chunks[number]
        row -= self.first_documents[number]
        begin, end = chunk.token_offsets[row], chunk.token_offsets[row + 1]
        sentences = chunk.sentence_lengths[chunk.sentence_offsets[row] : chunk.sentence_offsets[row + 1]]
        return chunk.input_ids[begin:end], chunk.word_start[begin:end], sentences


_NO_DOCUMENT = (np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.int32))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DocumentStore:
    """The tokenized documents of a folder.

    Pickles as its path and opens its files on first use in each process; the pages of the files are shared.

    Args:
        path: the folder.
        origin: an address; shards that are not in the folder yet are fetched from there.
        on_bad_shard: whether a damaged or missing shard ends the run, or is left out with a warning: its
            documents are then empty.
    """

    def __init__(self, path: Path, origin: str | None = None, on_bad_shard: OnBadShard = "error") -> None:
        self.path = Path(path)
        self.origin = origin
        self.on_bad_shard = on_bad_shard
        self._open_shards: OrderedDict[int, Shard] = OrderedDict()
        self._left_out: set[int] = set()
        self._verified: set[int] = set()
        self._documents_read = 0  # since pages were given back

    @classmethod
    def open(
        cls,
        location: Path | str,
        *,
        cache_dir: Path | None = None,
        on_bad_shard: OnBadShard = "error",
    ) -> DocumentStore:
        """Open a folder, or an address that fsspec knows, whose files are then kept in `cache_dir`.

        Checks the version, and every file but the shards against the manifest. UserError if it is no store.
        """
        if remote.is_url(str(location)):
            assert cache_dir is not None
            path = remote.fetch_index(str(location), cache_dir, MANIFEST)
            store = cls(path, str(location), on_bad_shard)
        else:
            store = cls(Path(location), None, on_bad_shard)
        store._check()
        return store

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "origin": self.origin, "on_bad_shard": self.on_bad_shard}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _check(self) -> None:
        if not (self.path / MANIFEST).is_file():
            raise UserError(
                f"{self.path} holds no prepared data set (it has no {MANIFEST}): name a folder that "
                "python -m fastbert.prepare has finished"
            )
        if self.manifest.get("version") != STORE_VERSION:
            raise UserError(
                f"{self.path} is a store of version {self.manifest.get('version')}, this is {STORE_VERSION}: "
                "delete it and make it again"
            )
        for name, expected in self.manifest["files"].items():
            file = self.path / self._inside(name)
            size = file.stat().st_size if file.is_file() else None
            # the lengths of a large corpus take seconds to read, and are compared shard by shard
            if size != expected["size"] or (name != LENGTHS and sha256_of(file) != expected["sha256"]):
                what = "is missing" if size is None else "is not what its manifest says"
                raise UserError(f"{file} {what}: the data set is damaged; copy or make it again")

    def _inside(self, relative: str) -> str:
        if not stays_inside(relative):
            raise UserError(
                f"the data set {self.path} names a file outside its folder ({relative}): do not use it"
            )
        return relative

    @cached_property
    def manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            assert isinstance(manifest, dict) and isinstance(manifest["files"], dict)
        except (OSError, ValueError, AssertionError, KeyError) as error:
            raise UserError(
                f"{self.path} holds no readable store ({error}): delete it and make it again"
            ) from error
        return manifest

    @cached_property
    def key(self) -> str:
        """A digest of the contents: the manifest has the checksum of everything else."""
        return sha256_of(self.path / MANIFEST)[:24]

    # shards

    @cached_property
    def index(self) -> pa.Table:
        """A row a shard, as INDEX_SCHEMA says."""
        try:
            with pa.ipc.open_stream(pa.memory_map(str(self.path / INDEX))) as stream:
                return stream.read_all().combine_chunks()
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.path / INDEX} is damaged ({error}): copy or make it again") from error

    def column(self, name: str) -> np.ndarray:
        """A number a shard, int64 [shards]."""
        return self.index[name].to_numpy()

    @cached_property
    def shard_starts(self) -> np.ndarray:
        """The first document of each shard and, last, the number of documents: int64 [shards + 1]."""
        return np.concatenate([[0], np.cumsum(self.column("documents"))])

    @cached_property
    def _first_documents(self) -> list[int]:
        return self.shard_starts[:-1].tolist()

    @property
    def num_shards(self) -> int:
        return self.index.num_rows

    def shard(self, number: int) -> Shard | None:
        """A shard's documents, checked when it is first opened; None if it is bad and left out."""
        if number in self._left_out:
            return None
        if number in self._open_shards:
            self._open_shards.move_to_end(number)
            return self._open_shards[number]
        try:
            shard = self._open_shard(number)
        except BadShard as error:
            if self.on_bad_shard == "error":
                raise
            self._left_out.add(number)
            warnings.warn(f"left out: {error}", stacklevel=2)
            return None
        self._open_shards[number] = shard
        if len(self._open_shards) > _OPEN_SHARDS:
            self._open_shards.popitem(last=False)
        return shard

    def _open_shard(self, number: int) -> Shard:
        row = self.index.slice(number, 1).to_pylist()[0]
        path = self.path / self._inside(row["path"])

        def bad(what: str) -> BadShard:
            return BadShard(
                f"the shard {row['path']} of {self.origin or self.path} {what}: copy it again, or train "
                "without it by --on-bad-shard skip"
            )

        if self.origin is not None and not path.is_file():
            try:
                remote.fetch(self.origin, row["path"], self.path)
            except FileNotFoundError as error:
                raise bad("is missing") from error
        try:
            size = path.stat().st_size
            if size != row["size"]:
                raise bad(f"has {size} bytes, not {row['size']}")
            if number not in self._verified:
                if sha256_of(path) != row["sha256"]:
                    if self.origin is not None:
                        path.unlink()  # the copy here: the next start fetches another
                    raise bad("was altered (its checksum is another)")
                self._verified.add(number)
            shard = Shard.open(path)
        except FileNotFoundError as error:
            raise bad("is missing") from error
        except (OSError, pa.ArrowException) as error:
            raise bad(f"cannot be read ({error})") from error
        lengths = self.lengths(int(self.shard_starts[number]), int(self.shard_starts[number + 1]))
        if not np.array_equal(shard.lengths(), lengths):
            raise bad(f"does not hold the documents that {LENGTHS} counts")
        return shard

    # documents

    def __len__(self) -> int:
        return self.manifest["num_documents"]

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document `index` -> input_ids int32 [n], word_start uint8 [n], sentence_lengths int32 [s].

        Read-only views. word_start is 1 where a word begins; sentence lengths are positive and add up to n.
        Raises BadShard for a document of a damaged or missing shard, or gives an empty one for it.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of a store of {len(self)} documents")
        number = bisect_right(self._first_documents, index) - 1
        shard = self.shard(number)
        self._documents_read += 1
        if self._documents_read >= _RELEASE_EVERY:
            self._documents_read = 0
            for opened in self._open_shards.values():
                opened.release()
        return _NO_DOCUMENT if shard is None else shard.document(index - self._first_documents[number])

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.load(self.path / LENGTHS, mmap_mode="r")

    def lengths(self, begin: int, end: int) -> np.ndarray:
        """Tokens of the documents from begin to end, int64."""
        return self._lengths[begin:end].astype(np.int64)

    @property
    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return self.lengths(0, len(self))

    @cached_property
    def unigram_counts(self) -> np.ndarray:
        """How often each id occurs, int64 [vocab_size]."""
        return np.load(self.path / COUNTS)

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the tokens in nats: the loss of a model that knows frequencies and no context."""
        probabilities = self.unigram_counts[self.unigram_counts > 0] / self.num_tokens
        return float(-(probabilities * np.log(probabilities)).sum())

    @property
    def name(self) -> str:
        """A short slug for a folder name."""
        return self.manifest["name"]

    @property
    def num_tokens(self) -> int:
        return self.manifest["num_tokens"]

    @property
    def num_sentences(self) -> int:
        return self.manifest["num_sentences"]

    @property
    def num_held_out(self) -> int:
        """Documents that are held out from training."""
        return self.manifest["num_held_out"]

    @property
    def unk_share(self) -> float:
        """Share of the tokens that are [UNK]."""
        return self.manifest["num_unk"] / self.num_tokens

    @property
    def vocab_size(self) -> int:
        """The rows an embedding table needs for these ids."""
        return self.manifest["vocab_size"]

    @property
    def description(self) -> str:
        """One line on the text behind the store."""
        return self.manifest["corpus"]

    @property
    def tokenizer_folder(self) -> Path:
        return self.path / TOKENIZER
