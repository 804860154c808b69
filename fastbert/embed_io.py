"""What `fastbert.embed` reads and writes: texts line by line, vectors as they come, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from fastbert.errors import UserError

FORMATS = (".npy", ".jsonl", ".parquet")
_HEADER_BYTES = 128  # of an .npy file: enough for any shape of two axes


# ---- texts ------------------------------------------------------------------------------------------------


class TextReader:
    """The texts of files, one a line; of `.jsonl` files, or with a `field`, the string in that field.

    "-" is stdin. An empty line is an empty text. UserError, naming file and line, for what cannot be read.
    """

    def __init__(self, files: Sequence[str], field: str | None) -> None:
        self.files, self.field = files, field
        self.bytes_read = 0
        sizes = [_size(name) for name in files]
        self.total_bytes = None if None in sizes else sum(size or 0 for size in sizes)

    def __iter__(self) -> Iterator[str]:
        for name in self.files:
            field = self.field or ("text" if name.endswith(".jsonl") else None)
            shown = "stdin" if name == "-" else name
            with _opened(name) as file:
                for number, line in enumerate(file, start=1):
                    self.bytes_read += len(line)
                    text = _decoded(line, shown, number)
                    yield text if field is None else _field(text, field, shown, number)


def _size(name: str) -> int | None:
    """Bytes of a regular file, None for a pipe."""
    try:
        return (os.fstat(sys.stdin.fileno()) if name == "-" else os.stat(name)).st_size or None
    except (OSError, ValueError):
        return None


def _opened(name: str) -> BinaryIO:
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False) if name == "-" else open(name, "rb")
    except OSError as error:
        raise UserError(
            f"cannot read {name} ({error.strerror}): check the path and its permissions"
        ) from error


def _decoded(line: bytes, name: str, number: int) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"line {number} of {name} is not UTF-8 (its byte {error.start + 1}); convert the file first, for "
            "example with iconv -f ENCODING -t UTF-8"
        ) from error
    text = text.removeprefix("\ufeff") if number == 1 else text
    return text.removesuffix("\n").removesuffix("\r")


def _field(line: str, field: str, name: str, number: int) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"line {number} of {name} is no JSON ({error}); JSONL has an object a line"
        ) from error
    text = row.get(field) if isinstance(row, dict) else None
    if isinstance(text, str):
        return text
    has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
    what = "no string" if isinstance(row, dict) and field in row else "no field"
    raise UserError(f"line {number} of {name} has {what} {field!r} (it has: {has}); name one with --field")


# ---- vectors ----------------------------------------------------------------------------------------------


class VectorWriter(Protocol):
    def write(self, vectors: np.ndarray) -> None:
        """Append rows [n, dimension]."""

    def finish(self) -> None:
        """Make the result complete."""

    def abandon(self) -> None:
        """Leave nothing behind."""


def open_writer(output: str, dimension: int, dtype: np.dtype[Any]) -> VectorWriter:
    """For a file by its suffix, or .npy on stdout for "-"."""
    if output == "-":
        return _NpyOnStdout(dimension, dtype)
    path = Path(output)
    if path.suffix not in FORMATS:
        raise UserError(f"--output {output} has none of the suffixes {', '.join(FORMATS)}; give it one")
    if not path.parent.is_dir():
        raise UserError(f"--output {output}: the folder {path.parent} does not exist; create it first")
    return _File(path, dimension, dtype)


class _File:
    """Written beside and renamed at the end."""

    def __init__(self, path: Path, dimension: int, dtype: np.dtype[Any]) -> None:
        self.path, self.temporary = path, path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self.file: Any = self.temporary.open("wb")
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror}): choose another --output") from error
        kinds: dict[str, Callable[..., Any]] = {".npy": _Npy, ".jsonl": _Jsonl, ".parquet": _Parquet}
        self.rows = kinds[path.suffix](self.file, dimension, dtype)

    def write(self, vectors: np.ndarray) -> None:
        self.rows.write(vectors)

    def finish(self) -> None:
        self.rows.finish()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.temporary.replace(self.path)

    def abandon(self) -> None:
        self.file.close()
        self.temporary.unlink(missing_ok=True)


class _Npy:
    """Rows behind room for a header, which is written when their number is known."""

    def __init__(self, file: BinaryIO, dimension: int, dtype: np.dtype[Any]) -> None:
        self.file, self.dimension, self.dtype = file, dimension, dtype
        self.start, self.num_rows = file.tell(), 0
        # zeros: what is interrupted here is no .npy file
        file.write(bytes(_HEADER_BYTES))

    def write(self, vectors: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(vectors, dtype=self.dtype).data)
        self.num_rows += len(vectors)

    def finish(self) -> None:
        self.file.seek(self.start)
        self.file.write(npy_header((self.num_rows, self.dimension), self.dtype))
        self.file.seek(0, os.SEEK_END)
        self.file.flush()


def npy_header(shape: tuple[int, int], dtype: np.dtype[Any]) -> bytes:
    """The header of an .npy file (format 1.0) of `_HEADER_BYTES` bytes."""
    entries = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    prefix = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
    return prefix + entries.encode("ascii").ljust(_HEADER_BYTES - 11) + b"\n"


class _NpyOnStdout:
    """Straight into a redirected file; into a pipe, whose header comes first, through a temporary file."""

    def __init__(self, dimension: int, dtype: np.dtype[Any]) -> None:
        self.stdout = open(sys.stdout.fileno(), "wb", closefd=False)  # noqa: SIM115
        if self.stdout.isatty():
            raise UserError("vectors are binary: redirect them, > vectors.npy, or name an --output")
        self.is_file = self.stdout.seekable() and not _appends(self.stdout.fileno())
        self.target: Any = self.stdout if self.is_file else tempfile.TemporaryFile()  # noqa: SIM115
        self.rows = _Npy(self.target, dimension, dtype)

    def write(self, vectors: np.ndarray) -> None:
        self.rows.write(vectors)

    def finish(self) -> None:
        self.rows.finish()
        if not self.is_file:
            self.target.seek(0)
            shutil.copyfileobj(self.target, self.stdout, 1 << 20)
        self.stdout.flush()

    def abandon(self) -> None:
        pass


def _appends(descriptor: int) -> bool:
    """Whether every write goes to the end, as behind >>."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND)


class _Jsonl:
    """{"row": 0, "embedding": [...]}"""

    def __init__(self, file: BinaryIO, dimension: int, dtype: np.dtype[Any]) -> None:
        self.file, self.dtype, self.num_rows = file, dtype, 0

    def write(self, vectors: np.ndarray) -> None:
        for vector in vectors.astype(self.dtype):
            # the shortest digits that give the same number again
            numbers = ", ".join(map(str, vector))
            self.file.write(f'{{"row": {self.num_rows}, "embedding": [{numbers}]}}\n'.encode("ascii"))
            self.num_rows += 1

    def finish(self) -> None:
        pass


class _Parquet:
    """A column `embedding` of fixed-size lists."""

    def __init__(self, file: BinaryIO, dimension: int, dtype: np.dtype[Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.pa, self.dtype, self.dimension = pa, dtype, dimension
        self.kind = pa.list_(pa.from_numpy_dtype(dtype), dimension)
        self.writer = pq.ParquetWriter(file, pa.schema([("embedding", self.kind)]))

    def write(self, vectors: np.ndarray) -> None:
        flat = self.pa.array(vectors.astype(self.dtype).ravel())
        column = self.pa.FixedSizeListArray.from_arrays(flat, self.dimension)
        self.writer.write_table(self.pa.table({"embedding": column.cast(self.kind)}))

    def finish(self) -> None:
        self.writer.close()
