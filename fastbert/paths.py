"""Names of files that come from outside: from a manifest, an index of shards, a list of modules."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath


def stays_inside(name: str) -> bool:
    """Whether a file of this name lies below the folder or the address that names it, on any system.

    Not so absolute paths, `..`, and what an address could make into one of them: a colon (a drive, another
    address, fsspec's `::`) or a percent sign (`%2e%2e`). Links are followed: the hub's cache consists of
    them, and who can make one in a folder can read the file anyway.
    """
    windows = PureWindowsPath(name)  # takes both / and \ for what parts a path
    is_relative = not (PurePosixPath(name).is_absolute() or windows.is_absolute() or windows.anchor)
    return bool(name) and is_relative and ".." not in windows.parts and not set(name) & set(":%\0")
