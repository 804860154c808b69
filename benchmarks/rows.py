"""The rows in `results/`: reading them, and which of them are one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


def read_rows(file: Path) -> list[Row]:
    """In the order in which they were measured."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def all_rows(folder: Path = RESULTS) -> list[Row]:
    return [row for file in sorted(folder.glob("*.jsonl")) for row in read_rows(file)]


def latest(rows: list[Row], host_kind: str | None = None) -> dict[str, Row]:
    """Name -> its last row, of machines of that kind."""
    return {row["name"]: row for row in rows if host_kind in (None, row["host_kind"])}


def run_named(name: str, folder: Path = RESULTS) -> list[Row]:
    """The rows of a file, or those that were measured at the commit of that name.

    ValueError if there are none.
    """
    if Path(name).is_file():
        rows = read_rows(Path(name))
    else:
        rows = [row for row in all_rows(folder) if len(name) >= 4 and row["commit"].startswith(name)]
    if not rows:
        known = ", ".join(sorted({row["commit"] for row in all_rows(folder)}))
        raise ValueError(
            f"{name} is neither a file of rows nor a commit with rows: there are rows of {known or 'none'}"
        )
    return rows
