"""Tables as a stream of rows: CSV, TSV, JSONL and parquet, with or without a header.

A row's number is the one an editor shows: the line where it begins (CSV, TSV, JSONL), or its place in the
table, from 1 (parquet). Every problem is a UserError that names file and row.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastbert.data.files import opened
from fastbert.errors import UserError

Format = Literal["auto", "csv", "tsv", "jsonl", "parquet"]
Choice = Literal["auto", "yes", "no"]
SAMPLE_ROWS = 1000  # that a header and the columns are guessed from
_MAX_FIELD = 1 << 30  # characters; the csv module's own limit, 131,072, is less than some documents have
_BY_SUFFIX = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


@dataclass
class Row:
    number: int
    values: list[Any]  # strings; of JSONL and parquet whatever stands there, None for a missing field


@dataclass
class Table:
    """An opened table. `columns` are the header's names, or "1", "2", … without a header."""

    path: Path
    format: str
    columns: list[str]
    has_header: bool
    sample: list[Row]  # its first rows, header excluded
    quotes: bool = True

    def rows(self) -> Iterator[Row]:
        """All rows, streamed from the file; each has a value for every column."""
        rows = _raw_rows(self.path, self.format, self.quotes, self.columns)
        for row in itertools.islice(rows, 1, None) if self._skips_first else rows:
            self._check_width(row)
            yield row

    @property
    def _skips_first(self) -> bool:
        return self.has_header and self.format in ("csv", "tsv")

    def _check_width(self, row: Row) -> None:
        found, wanted = len(row.values), len(self.columns)
        if found == wanted:
            return
        quoting = ""
        if self.format == "tsv":
            quoting = "; a file whose fields are quoted needs --quotes yes"
        raise UserError(
            f"{self.path} row {row.number} has {found} columns, the table has {wanted} "
            f"({_shown(self.columns)}): mend or remove the row{quoting}"
        )

    def index(self, column: str, option: str) -> int:
        """The place of a column given by name or, from 1, by number; UserError lists what is there."""
        if column in self.columns:
            return self.columns.index(column)
        if column.isdecimal() and 1 <= int(column) <= len(self.columns):
            return int(column) - 1
        raise UserError(
            f"{self.path} has no column {column!r}, but {_shown(self.columns)}; name one of them with "
            f"{option}"
        )


def open_table(
    path: Path,
    *,
    format: Format = "auto",
    header: Choice = "auto",
    quotes: Choice = "auto",
    known_columns: Sequence[str] = (),
    guess: bool = True,
) -> Table:
    """Look at a file's first rows and say how it is laid out.

    The format is that of the suffix, else what the first line looks like. In CSV fields may be quoted, in TSV
    a quote is a character (GLUE's files are like this), unless `quotes` says otherwise. The first row is a
    header if a cell of it is one of `known_columns` (in any case), or, with `guess`, if it differs from all
    rows below as names do: see `_looks_like_header`.

    Raises UserError for a file that cannot be read, is not UTF-8, or has no rows.
    """
    kind = _format(path) if format == "auto" else format
    quoted = kind == "csv" if quotes == "auto" else quotes == "yes"
    if kind in ("jsonl", "parquet"):
        columns = _parquet_columns(path) if kind == "parquet" else _jsonl_columns(path)
        sample = list(itertools.islice(_raw_rows(path, kind, quoted, columns), SAMPLE_ROWS))
        if not sample:
            raise _empty(path)
        return Table(path, kind, columns, True, sample, quoted)
    first = list(itertools.islice(_raw_rows(path, kind, quoted, []), SAMPLE_ROWS + 1))
    if not first:
        raise _empty(path)
    if header == "auto":
        known = {name.lower() for name in known_columns}
        named = any(str(cell).strip().lower() in known for cell in first[0].values)
        has_header = named or (guess and _looks_like_header(first))
    else:
        has_header = header == "yes"
    if has_header and len(first) == 1:
        raise UserError(f"{path} holds a header and no rows; give a file with examples")
    width = len(first[0].values)
    columns = [str(cell).strip() for cell in first[0].values] if has_header else _numbered(width)
    table = Table(path, kind, columns, has_header, first[1:] if has_header else first, quoted)
    for row in table.sample:
        table._check_width(row)
    return table


def _empty(path: Path) -> UserError:
    return UserError(f"{path} is empty; give a file with at least one row")


def _numbered(width: int) -> list[str]:
    return [str(number) for number in range(1, width + 1)]


def _shown(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns)) or "no columns"


def _looks_like_header(rows: list[Row]) -> bool:
    """Whether a column says so: numbers under a word, or few values that repeat under one that does not."""
    below = [row.values for row in rows[1:] if len(row.values) == len(rows[0].values)]
    if len(below) < 2:
        return False
    for column, cell in enumerate(rows[0].values):
        values = [row[column] for row in below]
        distinct = set(values)
        if not is_number(cell) and all(map(is_number, values)):
            return True
        if len(distinct) <= len(values) // 4 and cell not in distinct and len(below) >= 8:
            return True
    return False


def is_number(text: Any) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


# ---- formats


def _format(path: Path) -> str:
    kind = _BY_SUFFIX.get(path.suffix.lower())
    if kind is not None:
        return kind
    with opened(path) as file:
        line = file.readline(1 << 20)
    if line.startswith(b"PAR1"):
        return "parquet"
    if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return "jsonl"
    return "tsv"  # also of lines without a tab, such as a text a line, where a comma is a comma


def _raw_rows(path: Path, kind: str, quoted: bool, columns: list[str]) -> Iterator[Row]:
    if kind == "parquet":
        return _parquet_rows(path, columns)
    if kind == "jsonl":
        return _jsonl_rows(path, columns)
    return _delimited_rows(path, "\t" if kind == "tsv" else ",", quoted)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their ends; a byte-order mark is dropped."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path} line {number} is not UTF-8 (its byte {error.start + 1}); convert the file "
                    "first, for example with iconv -f ENCODING -t UTF-8"
                ) from error
            yield text.removeprefix("\ufeff") if number == 1 else text


def _delimited_rows(path: Path, delimiter: str, quoted: bool) -> Iterator[Row]:
    if not quoted:  # the csv module would end a row at a lone carriage return
        for number, line in enumerate(_lines(path), start=1):
            text = line.removesuffix("\n").removesuffix("\r")
            if text:
                yield Row(number, text.split(delimiter))
        return
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.reader(_lines(path), delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{path} row {number} is not well-formed ({error}): mend its quotes, or read quotes as "
                "characters with --quotes no"
            ) from error
        if values:
            yield Row(number, values)


def _jsonl_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{path} line {number} is no JSON ({error}); JSONL has an object a line"
            ) from error
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is not a JSON object: each line must be one object")
        yield number, row


def _jsonl_columns(path: Path) -> list[str]:
    """All fields of the first rows, in the order they come up; a row may lack some."""
    columns: dict[str, None] = {}
    for _, row in itertools.islice(_jsonl_objects(path), SAMPLE_ROWS):
        columns.update(dict.fromkeys(row))
    return list(columns)


def _jsonl_rows(path: Path, columns: list[str]) -> Iterator[Row]:
    for number, row in _jsonl_objects(path):
        yield Row(number, [row.get(column) for column in columns])


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    opened(path).close()
    try:
        names: list[str] = pyarrow.parquet.read_schema(path).names
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a readable parquet file ({reason})") from error
    return names


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in zip(*(column.to_pylist() for column in batch.columns)):
                    number += 1
                    yield Row(number, list(values))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read after row {number} ({reason})") from error
