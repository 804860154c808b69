"""Documents -> the shards and the index of a store (`fastbert.data.store` reads them).

A part of a corpus becomes one shard, or several where it could not be cut. What is in a shard depends on the
part, the tokenizer and the options alone, never on who writes it. Files get their names when they are whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from fastbert.data.corpus import Part
from fastbert.data.filters import Filters
from fastbert.data.store import (
    COUNTS,
    INDEX,
    INDEX_SCHEMA,
    LENGTHS,
    MANIFEST,
    SCHEMA,
    SHARDS,
    STORE_VERSION,
    TOKENIZER,
    Shard,
    sha256_of,
)
from fastbert.data.tokenizer import save_tokenizer, special_ids, vocabulary_size
from fastbert.errors import UserError

SHARD_BYTES = 32_000_000  # of text in a shard, about
# of text in a record batch: about a megabyte of ids, and tens of megabytes while encoding
_BATCH_CHARS = 1 << 19
_LENGTHS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class WriteOptions:
    """What decides, with the part and the tokenizer, which bytes a shard holds."""

    shard_bytes: int = SHARD_BYTES
    filters: Filters = field(default_factory=Filters)
    held_out: float = 0.0  # share of the documents, drawn by a hash of their text
    seed: int = 0

    def holds_out(self, sentences: Sequence[str]) -> bool:
        """The same answer wherever the text stands: no text is on both sides of the split."""
        if not self.held_out:
            return False
        digest = hashlib.blake2b(f"held out {self.seed}\n".encode(), digest_size=8)
        digest.update("\n".join(sentences).encode())
        return int.from_bytes(digest.digest(), "little") < self.held_out * 2**64


@dataclass(frozen=True, slots=True)  # there may be a million
class ShardRecord:
    """What is known of a finished shard, without its contents."""

    part: int
    ordinal: int  # among the part's shards
    read: int  # documents of the part that were read up to here
    last: bool  # of the part
    path: str  # "" where no document was left
    size: int = 0
    sha256: str = ""
    documents: int = 0
    tokens: int = 0
    held_out_documents: int = 0
    held_out_tokens: int = 0
    sentences: int = 0
    text_bytes: int = 0  # of what was read
    dropped: dict[str, int] = field(default_factory=dict)  # documents, by reason

    @property
    def order(self) -> tuple[int, int]:
        return self.part, self.ordinal


# writing shards


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
        return pa.record_batch(arrays, schema=SCHEMA)


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


class _ShardWriter:
    """One shard under another name; `close` gives it its own. Documents to hold out wait for the end."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path, self.tokenizer = path, tokenizer
        self.partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self.counts = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
        self.documents = self.tokens = self.held_out_documents = self.held_out_tokens = self.sentences = 0
        self._waiting: list[list[str]] = []
        self._chars = 0
        self._held_out: list[list[str]] = []
        self._file: Any = None

    def add(self, document: list[str], held_out: bool) -> None:
        if held_out:
            self._held_out.append(document)
            return
        self._waiting.append(document)
        self._chars += sum(map(len, document))
        if self._chars >= _BATCH_CHARS:
            self._flush()

    def _flush(self) -> None:
        self._write(self._waiting, held_out=False)
        self._waiting, self._chars = [], 0

    def _write(self, documents: list[list[str]], held_out: bool) -> None:
        for encoded in _encode_batch(documents, self.tokenizer):
            if self._file is None:
                self._file = pa.OSFile(str(self.partial), "wb")
                self._stream = pa.ipc.new_stream(self._file, SCHEMA)
            self._stream.write_batch(encoded.record_batch())
            self.counts += np.bincount(encoded.input_ids, minlength=len(self.counts))
            documents_now, tokens_now = len(encoded.token_offsets) - 1, len(encoded.input_ids)
            self.documents += documents_now
            self.tokens += tokens_now
            self.sentences += len(encoded.sentence_lengths)
            if held_out:
                self.held_out_documents += documents_now
                self.held_out_tokens += tokens_now

    def close(self) -> tuple[int, str]:
        """(bytes, SHA-256) of the finished file; (0, "") if there was nothing to write."""
        self._flush()
        for begin in range(0, len(self._held_out), 64):
            self._write(self._held_out[begin : begin + 64], held_out=True)
        if self._file is None:
            return 0, ""
        self._stream.close()
        self._file.close()
        _sync(self.partial)
        size, digest = self.partial.stat().st_size, sha256_of(self.partial)
        os.replace(self.partial, self.path)
        return size, digest

    def abandon(self) -> None:
        if self._file is not None and not self._file.closed:
            self._file.close()
        self.partial.unlink(missing_ok=True)


def write_part(
    part: Part,
    folder: Path,
    tokenizer: Tokenizer,
    options: WriteOptions,
    *,
    read: int = 0,
    ordinal: int = 0,
    keep: np.ndarray | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Iterator[tuple[ShardRecord, np.ndarray]]:
    """Write the shards of a part into `folder/shards`; yields each one's record and its unigram counts.

    Sentences and documents that tokenize to nothing are dropped.

    Args:
        read, ordinal: where to go on: documents that are read already, shards that are finished.
        keep: of each document of the part, whether it is kept (duplicates are not); None keeps all.
        on_progress: told the text bytes, documents and tokens of the part so far.

    Raises UserError for what the corpus cannot read, and for a folder that is full or cannot be written.
    """
    documents = islice(enumerate(part.documents()), read, None)
    following = next(documents, None)
    num_bytes = done_documents = done_tokens = 0
    while True:
        name = f"{SHARDS}/{part.number:06d}-{ordinal:03d}.arrow"
        writer = _ShardWriter(folder / name, tokenizer)
        dropped: Counter[str] = Counter()
        shard_bytes = 0
        try:
            while following is not None and shard_bytes < 2 * options.shard_bytes:
                number, sentences = following
                shard_bytes += sum(len(sentence.encode()) + 1 for sentence in sentences)
                if keep is not None and not keep[number]:
                    dropped["duplicate"] += 1
                elif (reason := options.filters.reason(sentences)) is not None:
                    dropped[reason] += 1
                else:
                    batches = writer.documents
                    writer.add(sentences, options.holds_out(sentences))
                    if on_progress is not None and writer.documents != batches:
                        on_progress(
                            num_bytes + shard_bytes,
                            done_documents + writer.documents,
                            done_tokens + writer.tokens,
                        )
                read = number + 1
                following = next(documents, None)
            size, digest = writer.close()
        except OSError as error:
            raise storage_error(error, folder) from error
        finally:
            writer.abandon()
        num_bytes += shard_bytes
        done_documents += writer.documents
        done_tokens += writer.tokens
        if on_progress is not None:
            on_progress(num_bytes, done_documents, done_tokens)
        record = ShardRecord(
            part=part.number,
            ordinal=ordinal,
            read=read,
            last=following is None,
            path=name if size else "",
            size=size,
            sha256=digest,
            documents=writer.documents,
            tokens=writer.tokens,
            held_out_documents=writer.held_out_documents,
            held_out_tokens=writer.held_out_tokens,
            sentences=writer.sentences,
            text_bytes=shard_bytes,
            dropped=dict(dropped),
        )
        yield record, writer.counts
        if record.last:
            return
        ordinal += 1


def shard_counts(folder: Path, record: ShardRecord, vocab_size: int) -> np.ndarray | None:
    """The unigram counts of a finished shard, read again; None if it is not what its record says."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    if not record.path:
        return counts
    path = folder / record.path
    try:
        if path.stat().st_size != record.size or sha256_of(path) != record.sha256:
            return None
        for chunk in Shard.open(path).chunks:
            counts += np.bincount(chunk.input_ids, minlength=vocab_size)
    except (OSError, pa.ArrowException):
        return None
    return counts


# writing the index


def write_index(
    folder: Path,
    records: Iterable[ShardRecord],
    counts: np.ndarray,
    tokenizer: Tokenizer,
    description: dict[str, Any],
) -> None:
    """Write everything but the shards; the manifest, which makes the folder a store, last.

    Args:
        records: of all finished shards, in any order.
        counts: of all their ids together, int64 [vocab_size].
        description: further entries of the manifest: corpus, name, fingerprints, options.

    Raises UserError where not one token is left, and OSError where the folder cannot be written.
    """
    records = sorted(records, key=lambda record: record.order)
    shards = [record for record in records if record.path]
    dropped: Counter[str] = Counter()
    for record in records:
        dropped.update(record.dropped)
    if not shards:
        why = "".join(f"; {count:,} by {reason}" for reason, count in sorted(dropped.items()))
        raise UserError(
            f"the corpus {description['name']} holds no token the tokenizer knows how to make"
            + (
                f", after these documents were dropped{why}: loosen the filters"
                if why
                else ": check its text"
            )
        )
    if not (folder / TOKENIZER).is_dir():
        save_tokenizer(tokenizer, folder / TOKENIZER)
    _write_lengths(folder, shards)
    with (folder / COUNTS).open("wb") as file:
        np.save(file, counts)
    columns = [[getattr(shard, name) for shard in shards] for name in INDEX_SCHEMA.names]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, INDEX_SCHEMA)]
    with (
        pa.OSFile(str(folder / INDEX), "wb") as sink,
        pa.ipc.new_stream(sink, INDEX_SCHEMA) as stream,
    ):
        stream.write_batch(pa.record_batch(arrays, schema=INDEX_SCHEMA))
    tokenizer_files = sorted(f"{TOKENIZER}/{file.name}" for file in (folder / TOKENIZER).iterdir())
    files = {}
    for name in [INDEX, LENGTHS, COUNTS, *tokenizer_files]:
        _sync(folder / name)
        files[name] = {"size": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
    manifest = {
        "version": STORE_VERSION,
        **description,
        "num_shards": len(shards),
        "num_documents": sum(shard.documents for shard in shards),
        "num_held_out": sum(shard.held_out_documents for shard in shards),
        "num_sentences": sum(shard.sentences for shard in shards),
        "num_tokens": sum(shard.tokens for shard in shards),
        "num_unk": int(counts[special_ids(tokenizer).unk]),
        "vocab_size": len(counts),
        "text_bytes": sum(record.text_bytes for record in records),
        "dropped_documents": dict(sorted(dropped.items())),
        "document_length_histogram": _histogram(folder),
        "files": files,
    }
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _sync(partial)
    os.replace(partial, folder / MANIFEST)


def _write_lengths(folder: Path, shards: list[ShardRecord]) -> None:
    total = sum(shard.documents for shard in shards)
    lengths = np.lib.format.open_memmap(folder / LENGTHS, mode="w+", dtype=np.uint32, shape=(total,))
    begin = 0
    for shard in shards:
        end = begin + shard.documents
        lengths[begin:end] = Shard.open(folder / shard.path).lengths()
        begin = end
    lengths.flush()


def _histogram(folder: Path) -> dict[str, int]:
    """Documents by length, in steps of powers of two: "64-127" -> how many."""
    lengths = np.load(folder / LENGTHS, mmap_mode="r")
    counts = np.zeros(33, dtype=np.int64)
    for begin in range(0, len(lengths), _LENGTHS_AT_ONCE):
        exponents = np.frexp(lengths[begin : begin + _LENGTHS_AT_ONCE].astype(np.float64))[1]
        counts += np.bincount(exponents, minlength=33)  # 2^(e-1) <= length < 2^e
    return {f"{1 << (e - 1)}-{(1 << e) - 1}": int(counts[e]) for e in range(1, 33) if counts[e]}


def storage_error(error: OSError, folder: Path) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"no space left for the tokenized corpus in {folder}: free some or choose another folder"
        )
    return UserError(f"cannot write the tokenized corpus to {folder} ({error}): choose another folder")


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
