"""Which documents of a corpus are exact copies of an earlier one, in bounded memory.

A document's hash (128 bits of its sentences) goes to one of 256 bucket files, and each is sorted on its own.
Memory is that of one bucket: about 75 bytes for each 256 documents, 300 MB for a thousand million of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastbert.data.corpus import Part

NUM_BUCKETS = 256
_RECORD = np.dtype([("low", "<u8"), ("high", "<u8"), ("part", "<u4"), ("row", "<u4")])
_ROWS_AT_ONCE = 1 << 22


def hash_part(part: Part) -> np.ndarray:
    """A record of each document of a part, in order."""
    digests = bytearray()
    for sentences in part.documents():
        digests += hashlib.blake2b("\n".join(sentences).encode(), digest_size=16).digest()
    halves = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    records = np.empty(len(halves), dtype=_RECORD)
    records["low"], records["high"] = halves[:, 0], halves[:, 1]
    records["part"], records["row"] = part.number, np.arange(len(halves))
    return records


class Buckets:
    """The bucket files in a folder. A part that was added before may be added again: a kill does no harm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.bin"):  # a kill may have cut the last record short
            os.truncate(path, path.stat().st_size // _RECORD.itemsize * _RECORD.itemsize)

    def add(self, records: np.ndarray) -> None:
        order = np.argsort(records["low"] % NUM_BUCKETS, kind="stable")
        sorted_records = records[order]
        bounds = np.searchsorted(sorted_records["low"] % NUM_BUCKETS, np.arange(NUM_BUCKETS + 1))
        for bucket in np.flatnonzero(np.diff(bounds)):
            with (self.folder / f"{bucket:03d}.bin").open("ab") as file:
                file.write(sorted_records[bounds[bucket] : bounds[bucket + 1]].tobytes())

    def duplicates(self) -> Iterator[np.ndarray]:
        """(part, row) of every document that has an equal one before it in the corpus, a bucket at a time."""
        for path in sorted(self.folder.glob("*.bin")):
            records = np.fromfile(path, dtype=_RECORD)
            records = records[np.lexsort([records[name] for name in ("row", "part", "high", "low")])]
            first, second = records[:-1], records[1:]
            is_equal = (first["low"] == second["low"]) & (first["high"] == second["high"])
            # the same document twice: its part was added again after a kill
            is_same = (first["part"] == second["part"]) & (first["row"] == second["row"])
            copies = second[is_equal & ~is_same]
            yield np.stack([copies["part"], copies["row"]], axis=1).astype(np.int64)


def write_keep(buckets: Buckets, documents: list[int], path: Path) -> None:
    """Write which documents are kept, a byte each, parts one after the other.

    `documents` is how many each part holds.
    """
    starts = np.concatenate([[0], np.cumsum(documents)]).astype(np.int64)
    partial = path.with_name(f".{path.name}.partial")
    keep = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=(int(starts[-1]),))
    for begin in range(0, len(keep), _ROWS_AT_ONCE):
        keep[begin : begin + _ROWS_AT_ONCE] = 1
    for copies in buckets.duplicates():
        keep[starts[copies[:, 0]] + copies[:, 1]] = 0
    keep.flush()
    os.replace(partial, path)


def read_keep(path: Path, begin: int, end: int) -> np.ndarray:
    """bool [end - begin]."""
    return np.load(path, mmap_mode="r")[begin:end].astype(bool)
