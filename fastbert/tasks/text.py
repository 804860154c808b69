"""Texts and pairs of texts from a table: which columns they stand in, and their features."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from tokenizers import Tokenizer

from fastbert.errors import UserError
from fastbert.tasks.glue import LAYOUTS, GlueName, Layout, LayoutName
from fastbert.tasks.settings import shown
from fastbert.tasks.tables import Choice, Format, Table, is_number, open_table
from fastbert.tasks.task import Feature, Say

_TEXT_NAMES = (  # the first that is there; of a question and a sentence the question comes first, as in QNLI
    *("sentence1", "premise", "question1", "text_a", "text1", "question", "query", "sentence", "text"),
    *("document", "review", "content", "comment", "body", "tweet", "message", "title"),
)
_PAIR_NAMES = (
    *("sentence2", "hypothesis", "question2", "text_b", "text2", "sentence", "answer", "passage", "context"),
)
_LABEL_NAMES = (
    *("label", "labels", "gold_label", "score", "class", "category", "target", "sentiment"),
    *("similarity", "rating", "stars", "intent", "y", "is_duplicate"),
)
_CODE_WORDS = 1.5  # words a cell at most, on average, of a column that is no text
_CODE_CHARS = 12  # and characters
_FEW_OF = 10  # a column with one value for so many rows is no text, however long the values are


@dataclass
class TextOptions:
    text: Annotated[str | None, shown("guessed, and said", "COLUMN")] = None
    """Column of the text, by name or number."""
    pair: Annotated[str | None, shown("guessed, and said", "COLUMN")] = None
    """Column of the second text of a pair; "none" = single texts."""
    label: Annotated[tuple[str, ...], shown("guessed, and said", "COLUMN")] = ()
    """Column of the label."""
    glue: Annotated[GlueName | None, shown("none", f"{{{','.join(get_args(GlueName))}}}")] = None
    """Read a GLUE file: its columns, quoting, label names and metric."""
    layout: Annotated[LayoutName | None, shown("none", f"{{{','.join(get_args(LayoutName))}}}")] = None
    """Read a file of NSMC, KorNLI or KorSTS."""
    format: Format = "auto"
    """Of the files; auto = by suffix."""
    header: Choice = "auto"
    """Whether the first row of CSV and TSV names the columns."""
    quotes: Choice = "auto"
    """Whether quotes enclose fields; auto = in CSV, not in TSV."""
    new_head: bool = False
    """Start a new head where the model has one already."""


@dataclass
class TextExample:
    text: str
    pair: str | None
    label: Any  # as in the file; None without one
    row: int
    path: Path

    @property
    def where(self) -> str:
        return f"{self.path} row {self.row}"


@dataclass
class Columns:
    text: int
    pair: int | None
    labels: tuple[int, ...]  # empty: the file has none


def read_texts(
    path: Path, options: TextOptions, *, labels_required: bool, say: Say, may_be_empty: bool = False
) -> Iterator[TextExample]:
    """The rows of a table as examples; says which columns were taken.

    Without `labels_required` labels are not read; with `may_be_empty` an empty cell is a label, too. A
    missing text (null) is an empty one.
    """
    layout = layout_of(options)
    table = open_table(
        path,
        format=options.format,
        header=options.header,
        quotes="no" if layout and options.quotes == "auto" and path.suffix != ".csv" else options.quotes,
        known_columns=_known(options, layout),
        guess=layout is None,
    )
    columns = _columns_of_layout(table, layout) if layout else _columns(table, options, labels_required)
    if not labels_required:
        columns.labels = ()
    elif not columns.labels:
        raise UserError(
            f"{path} has no column of labels, but {', '.join(map(repr, table.columns))}; name it with --label"
        )
    say(_described(table, columns))
    return _examples(table, columns, may_be_empty)


def layout_of(options: TextOptions) -> Layout | None:
    if options.glue and options.layout:
        raise UserError(f"--glue {options.glue} and --layout {options.layout} both name a layout; give one")
    name = options.glue or options.layout
    return LAYOUTS[name] if name else None


class Encoder:
    """Texts and pairs -> encodings of a task; says once that some of them were cut."""

    def __init__(self, say: Say) -> None:
        self.say, self.has_said = say, False

    def __call__(self, inputs: Sequence[Any], tokenizer: Tokenizer, max_length: int) -> list[Any]:
        """[CLS] text [SEP], or [CLS] text [SEP] pair [SEP], the longer one cut first."""
        tokenizer.enable_truncation(max_length)
        encodings = tokenizer.encode_batch(inputs)
        tokenizer.no_truncation()
        num_cut = sum(bool(encoding.overflowing) for encoding in encodings)
        if num_cut and not self.has_said:
            self.has_said = True
            self.say(
                f"{num_cut:,} of the first {len(inputs):,} sequences have more than {max_length} tokens: "
                "their rest is not read"
            )
        return encodings


def text_features(
    examples: Sequence[TextExample],
    targets: Sequence[Any],
    encode: Encoder,
    tokenizer: Tokenizer,
    max_length: int,
) -> list[Feature]:
    """One feature an example."""
    inputs = [e.text if e.pair is None else (e.text, e.pair) for e in examples]
    encodings = encode(inputs, tokenizer, max_length)
    return [
        Feature(encoding.ids, encoding.type_ids, target, index)
        for index, (encoding, target) in enumerate(zip(encodings, targets))
    ]


def _examples(table: Table, columns: Columns, may_be_empty: bool) -> Iterator[TextExample]:
    for row in table.rows():
        text = _text(row.values[columns.text], table, row.number)
        pair = None if columns.pair is None else _text(row.values[columns.pair], table, row.number)
        labels = [row.values[index] for index in columns.labels]
        for index, label in zip(columns.labels, labels):
            is_empty = label == "" and not may_be_empty
            is_nan = isinstance(label, float) and label != label  # what a parquet file has for a missing one
            if label is None or is_empty or is_nan:
                raise UserError(
                    f"{table.path} row {row.number} has no label (column {table.columns[index]!r} is empty "
                    "or NaN): mend or remove the row"
                )
        label = labels[0] if len(labels) == 1 else labels or None
        yield TextExample(text, pair, label, row.number, table.path)


def _text(value: Any, table: Table, number: int) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        # JSON can escape half a surrogate pair, which no encoding can write
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(
        f"{table.path} row {number} holds a {type(value).__name__} where text is expected; name the column "
        f"of the text with --text: {', '.join(map(repr, table.columns))}"
    )


# ---- which columns


def _known(options: TextOptions, layout: Layout | None) -> tuple[str, ...]:
    given = (options.text, options.pair, *options.label)
    named = tuple(name for name in given if name and name != "none" and not name.isdecimal())
    if layout:
        return (layout.text[0], layout.label[0])
    return named + _TEXT_NAMES + _PAIR_NAMES + _LABEL_NAMES


def _columns_of_layout(table: Table, layout: Layout) -> Columns:
    names = [layout.text, *([layout.pair] if layout.pair else [])]
    if table.has_header:
        places = [table.index(name, "--text") for name, _ in names]
        label = (table.columns.index(layout.label[0]),) if layout.label[0] in table.columns else ()
    else:
        width = len(table.columns)
        if layout.width and width != layout.width:
            raise UserError(
                f"{table.path} has {width} columns and no header that this layout knows; it has "
                f"{layout.width} columns: leave out --glue and --layout, and name the columns"
            )
        places = [place for _, place in names]
        label = (layout.label[1] % width,)
        if max(places) >= width:
            raise UserError(
                f"{table.path} has {width} columns, and the layout's text is in column {max(places) + 1}; "
                "leave out --glue and --layout, and name the columns"
            )
    return Columns(places[0], places[1] if layout.pair else None, label)


def _columns(table: Table, options: TextOptions, labels_required: bool) -> Columns:
    """The columns that are named, by an option or in the header, and the best guess for the others."""
    names = options.label if labels_required else [name for name in options.label if name in table.columns]
    labels = tuple(table.index(name, "--label") for name in names)
    rest = [index for index in range(len(table.columns)) if index not in labels]
    if options.text is not None:
        text: int | None = table.index(options.text, "--text")
    else:
        text = _first_named(table, _TEXT_NAMES, rest)
    rest = [index for index in rest if index != text]
    if options.pair is not None:
        pair = None if options.pair == "none" else table.index(options.pair, "--pair")
    else:
        is_named = text is not None and options.text is None
        pair = _first_named(table, _PAIR_NAMES, rest) if is_named else None
    rest = [index for index in rest if index != pair]
    labels = labels or _guess_label(table, rest, labels_required, text is None)
    if text is None:
        rest = [index for index in rest if index not in labels]
        texts = rest if len(rest) == 1 else [index for index in rest if _is_text(table, index)]
        if not texts or len(texts) > (2 if options.pair is None else 1):
            raise UserError(
                f"cannot tell which column of {table.path} is the text: name one of "
                f"{', '.join(map(repr, table.columns))} with --text"
            )
        text, pair = texts[0], texts[1] if len(texts) == 2 else pair
    return Columns(text, pair, labels)


def _first_named(table: Table, names: Sequence[str], candidates: Sequence[int]) -> int | None:
    if not table.has_header:
        return None
    lowered = {table.columns[i].lower(): i for i in reversed(candidates)}
    return next((lowered[name] for name in names if name in lowered), None)


def _guess_label(table: Table, rest: list[int], required: bool, has_text: bool) -> tuple[int, ...]:
    """A column with a label's name, else the one column of few, short or numeric values.

    With `has_text` the text is among the columns, too.
    """
    named = _first_named(table, _LABEL_NAMES, rest)
    if named is not None:
        return (named,)
    codes = [i for i in rest if _is_code(table, i) and not (has_text and _is_text(table, i))]
    if len(codes) > 1:
        codes = [i for i in codes if not _is_running_number(table, i)]
    if len(codes) > 1 and required:
        raise UserError(
            f"cannot tell which column of {table.path} is the label: name one of "
            f"{', '.join(map(repr, table.columns))} with --label"
        )
    return tuple(codes) if len(codes) == 1 < len(rest) + (not has_text) else ()


def _values(table: Table, column: int) -> list[Any]:
    return [row.values[column] for row in table.sample]


def _is_text(table: Table, column: int) -> bool:
    values = [value for value in _values(table, column) if isinstance(value, str)]
    is_few = len(values) >= _FEW_OF and len(set(values)) <= len(values) // _FEW_OF
    if not values or is_few or all(map(is_number, values)):
        return False
    words = sum(len(value.split()) for value in values) / len(values)
    return words > _CODE_WORDS or sum(map(len, values)) / len(values) > _CODE_CHARS


def _is_code(table: Table, column: int) -> bool:
    """Numbers, or values of which most come up again."""
    values = [str(value) for value in _values(table, column)]
    few = len(set(values)) <= max(2, len(values) // 2) or len(values) <= 4
    return few or all(map(is_number, values))


def _is_running_number(table: Table, column: int) -> bool:
    values = [str(value) for value in _values(table, column)]
    return all(value.isdecimal() for value in values) and all(
        int(a) < int(b) for a, b in itertools.pairwise(values)
    )


def _described(table: Table, columns: Columns) -> str:
    def name(index: int) -> str:
        return repr(table.columns[index]) if table.has_header else f"number {index + 1}"

    text = f"{table.path}: {table.format}, {'a header' if table.has_header else 'no header'}, text "
    text += name(columns.text) if columns.pair is None else f"{name(columns.text)} + {name(columns.pair)}"
    if columns.labels:
        text += f", label {', '.join(map(name, columns.labels))}"
    return text
