"""A hub data set as a corpus, through Hugging Face `datasets` (the extra `data`).

`datasets` downloads and keeps it as Arrow files; any number of processes reads its rows where they lie.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastbert.data.corpus import Corpus
from fastbert.data.readers import choose_column, row_sentences
from fastbert.errors import UserError

_ROWS = 256  # read at once


@dataclass(frozen=True)
class _Rows:
    """The rows from begin to end of a column."""

    dataset: Any  # datasets.Dataset: sent to another process as the paths of its files
    name: str
    column: str
    num_bytes: int
    begin: int
    end: int

    def documents(self) -> Iterator[list[str]]:
        for begin in range(self.begin, self.end, _ROWS):
            texts = self.dataset[begin : min(begin + _ROWS, self.end)][self.column]
            for row, text in enumerate(texts, start=begin + 1):
                if sentences := row_sentences(text, f"{self.name} row {row}"):
                    yield sentences

    def digest(self) -> str:
        return self.listing()

    def listing(self) -> str:
        return f"{self.name} {self.dataset._fingerprint} {self.column} {self.begin}-{self.end}\n"

    def pieces(self, target_bytes: int) -> Iterator[_Rows]:
        num_pieces = max(1, round(self.num_bytes / target_bytes))
        bounds = [self.begin + (self.end - self.begin) * at // num_pieces for at in range(num_pieces + 1)]
        for begin, end in pairwise(bounds):
            yield replace(self, num_bytes=self.num_bytes // num_pieces, begin=begin, end=end)


def open_hub(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_column: str | None = None,
) -> Corpus:
    """A data set of the hub, a local one that `load_dataset` reads, or a folder of `save_to_disk` -> Corpus.

    Raises UserError where `datasets` is missing, for a data set that it cannot load, and for a column that is
    not there (naming those that are) or cannot be guessed. No code of the data set is run.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "--dataset needs Hugging Face's datasets: pip install 'fastbert-triton[data]'"
        ) from error
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            data = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            data = datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # the library has a type of its own for each cause
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(
            f"the data set {name} cannot be loaded ({reason}): check name, config and split"
        ) from error
    kinds = {column: getattr(feature, "dtype", "") for column, feature in data.features.items()}
    strings = [column for column, kind in kinds.items() if kind in ("string", "large_string")]
    column = choose_column(f"the data set {name}", text_column, list(kinds), strings)
    if not len(data):
        raise UserError(f"the data set {name} has no rows in its split {split}: choose another split")
    data = data.select_columns([column])
    rows = _Rows(data, name, column, int(data.data.nbytes), 0, len(data))
    slug = re.sub(r"[^\w.-]+", "-", Path(name).name).strip("-.") or "dataset"
    description = f"{slug}: {len(data):,} rows of {name}, column {column}, split {split}"
    return Corpus(slug, description + (f", revision {revision}" if revision else ""), [rows])
