"""The store of a corpus in a run's cache: made once for a corpus and a tokenizer.

It is written under another name, shard after shard, and renamed when it is whole: memory does not grow with
the corpus, and a killed process leaves nothing like a store.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fastbert.data.corpus import Corpus
from fastbert.data.shards import WriteOptions, storage_error, write_index, write_part
from fastbert.data.store import SHARDS, STORE_VERSION, DocumentStore
from fastbert.data.tokenizer import tokenizer_fingerprint, vocabulary_size

_ABANDONED_SECONDS = 3600  # a build writes every second: one this old was killed


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
        (building / SHARDS).mkdir()
        options = WriteOptions()
        counts = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
        records = []
        before = [0, 0]  # documents and tokens of the parts before this one

        def progress(_: int, documents: int, tokens: int) -> None:
            if on_progress is not None:
                on_progress(before[0] + documents, before[1] + tokens)

        for part in corpus.parts(options.shard_bytes):
            for record, shard_counts in write_part(part, building, tokenizer, options, on_progress=progress):
                counts += shard_counts
                records.append(record)
            before = [sum(r.documents for r in records), sum(r.tokens for r in records)]
        description = {"corpus": corpus.description, "name": corpus.name, "fingerprints": fingerprints}
        write_index(building, records, counts, tokenizer, description)
        _publish(building, final)
    except OSError as error:
        raise storage_error(error, final.parent) from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
    return DocumentStore.open(final)


def _remove_abandoned(final: Path) -> None:
    """Delete what builds of the same store left behind when they were killed."""
    for folder in final.parent.glob(f".{final.name}-*"):
        newest = max((entry.stat().st_mtime for entry in folder.rglob("*")), default=folder.stat().st_mtime)
        if time.time() - newest > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _publish(building: Path, final: Path) -> None:
    os.chmod(building, 0o755)  # mkdtemp makes private folders, but a cache may be shared
    try:
        building.rename(final)
    except OSError:
        # another process was quicker with the same store: its content is the same
        if not final.is_dir():
            raise
