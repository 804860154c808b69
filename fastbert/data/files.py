"""Bytes of a corpus or a data set: local files, whatever address fsspec opens, compressed or not."""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbert.errors import UserError

# ValueError: a protocol that fsspec does not know
READ_ERRORS = (OSError, EOFError, ValueError, ImportError, zlib.error)
_REMOTE_BUFFER = 1 << 20


@dataclass(frozen=True)
class Url:
    """An address that fsspec opens, such as s3://bucket/file.txt."""

    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        return self.address.rstrip("/").rsplit("/", 1)[-1]

    @property
    def stem(self) -> str:
        return self.name.split(".", 1)[0] or self.name

    def __truediv__(self, relative: str) -> Url:
        return Url(f"{self.address.rstrip('/')}/{relative}")


Location = Path | Url


def is_url(path: str) -> bool:
    return "://" in path


def location(path: str) -> Location:
    return Url(path) if is_url(path) else Path(path).expanduser()


def compression(path: Location) -> str | None:
    """gzip, zstd, … by the name's end; None for what is not compressed."""
    from fsspec.utils import infer_compression

    return infer_compression(str(path))


def opened(path: Location) -> io.BufferedReader:
    """The file, decompressed, for reading; seekable unless compressed. UserError naming it if that fails."""
    try:
        if isinstance(path, Path) and compression(path) is None:
            return path.open("rb")
        import fsspec

        file: Any = fsspec.open(str(path), "rb", compression="infer").open()
        return io.BufferedReader(file, _REMOTE_BUFFER)
    except READ_ERRORS as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Location, error: Exception) -> UserError:
    """One sentence for what went wrong with a file."""
    if isinstance(error, ImportError):
        return UserError(f"cannot read {path}: {_reason(error)}; install that package")
    return UserError(f"cannot read {path} ({_reason(error)}): check the path and its permissions")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def find_urls(path: str) -> list[tuple[Url, int]]:
    """(address, bytes) of the files behind an address: a file, a folder (recursive) or a glob; sorted.

    Hidden files and folders are left out, as in local folders. Raises UserError where there is nothing.
    """
    from fsspec.core import url_to_fs

    try:
        fs, inner = url_to_fs(path)
        if any(char in inner for char in "*?["):
            found = fs.glob(inner, detail=True)
        elif fs.isdir(inner):
            found = fs.find(inner, detail=True)
        else:
            found = {inner: fs.info(inner)}
        root = inner.rstrip("/")
        files = sorted(
            (name, int(info.get("size") or 0))
            for name, info in found.items()
            if info["type"] == "file" and not _is_hidden(name.removeprefix(root))
        )
    except READ_ERRORS as error:
        raise cannot_read(Url(path), error) from error
    if not files:
        raise UserError(f"the corpus address {path} holds no files: check it")
    return [(Url(fs.unstrip_protocol(name)), size) for name, size in files]


def _is_hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.split("/"))


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise cannot_read(path, error) from error
