"""A data set behind an address: its index is fetched at once, a shard when it is first read, each kept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

from fastbert.data.files import READ_ERRORS, Url, cannot_read, is_url
from fastbert.errors import UserError
from fastbert.paths import stays_inside

__all__ = ["fetch", "fetch_index", "is_url"]


def fetch_index(address: str, cache_dir: Path, manifest_name: str) -> Path:
    """Fetch all but the shards of the data set at `address`; returns the folder they are in.

    The folder's name depends on address and manifest, so a data set that changed gets another one.
    """
    data = _read(address, manifest_name)
    try:
        files: dict[str, Any] = json.loads(data)["files"]
        names = list(files)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{address} holds no readable manifest ({error}): check the address") from error
    folder = cache_dir / f"data-{hashlib.sha256(address.encode() + data).hexdigest()[:16]}"
    if not (folder / manifest_name).is_file():
        for name in names:
            if not stays_inside(name):
                raise UserError(f"the data set {address} names a file outside its folder ({name})")
            if not (folder / name).is_file():
                fetch(address, name, folder)
        _write(folder / manifest_name, data)
    return folder


def _read(address: str, name: str) -> bytes:
    import fsspec

    try:
        with fsspec.open(f"{address.rstrip('/')}/{name}", "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        raise UserError(
            f"{address} holds no prepared data set (it has no {name}): check the address"
        ) from error
    except READ_ERRORS as error:
        raise cannot_read(Url(address) / name, error) from error


def fetch(address: str, name: str, folder: Path) -> None:
    """Copy a file of the data set to `folder`, complete or not at all; FileNotFoundError if it is not there.

    Any number of processes may fetch the same file: each writes its own copy, and the last rename stays.
    """
    import fsspec

    source = Url(address) / name
    final = folder / name
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}.partial")
    try:
        fs, inner = fsspec.core.url_to_fs(str(source))
        if not fs.exists(inner):
            raise FileNotFoundError(str(source))
    except FileNotFoundError:
        raise
    except READ_ERRORS as error:
        raise cannot_read(source, error) from error
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(inner, str(partial))
        os.replace(partial, final)
    except OSError as error:
        raise _no_copy(error, source, folder) from error
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        raise _no_copy(error, Url(path.name), path.parent) from error
    finally:
        partial.unlink(missing_ok=True)


def _no_copy(error: OSError, source: Url, folder: Path) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"no space left in {folder} for {source}: free some, then give the same command again"
        )
    return UserError(f"{source} cannot be copied to {folder} ({error}): give the same command again")
