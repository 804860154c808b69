"""How each corpus format is recognised, cut and read: a path -> documents, streamed."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import dropwhile, islice
from typing import Any

from fastbert.data.files import READ_ERRORS, Location, cannot_read, opened
from fastbert.data.sentences import ends_in_punctuation, join_wrapped, split_sentences
from fastbert.errors import UserError

HEAD_BYTES = 64 * 1024  # what a format is recognised from
_BLOCK_BYTES = 1 << 20  # of whole lines that are decoded together
_WRAPPED_LINE_BYTES = 200  # a longer line is a paragraph of its own: nobody wraps at this width
_RUN_WORDS = 2_000  # prose without chapter gaps is cut into documents of about this many words
_MAX_CHAPTER_WORDS = 20_000  # more between two gaps is no chapter: it is cut into runs, too
_TITLE_PAGE_SHARE = 0.9  # of headings among the paragraphs of what is no document
_COLUMN_ROWS = 1000  # of JSONL that are looked at for a text column
_TEXT_COLUMNS = ("text", "content", "document", "body")

_GUTENBERG_START = re.compile(r"^\*\*\* ?START OF (THE|THIS) PROJECT GUTENBERG", re.IGNORECASE)
_GUTENBERG_END = re.compile(
    r"^(\*\*\* ?END OF (THE|THIS)|End of (the |this )?)\s*Project Gutenberg", re.IGNORECASE
)
_WIKITEXT_TITLE = re.compile(r"^ ?= [^=].* = ?$")
_WIKITEXT_HEADING = re.compile(r"^=( =)* (?P<title>.*?) =( =)*$")
_NUMBERED_HEADING = re.compile(
    r"^(chapter|book|part|section|letter|act|scene|canto|volume)\s+[\divxlc]+\b", re.I
)
_MAX_HEADING_WORDS = 12


def head_lines(head: bytes) -> list[str]:
    """The whole lines of a file's first bytes; the last, cut one only when it is the only one."""
    lines = head.decode("utf-8-sig", errors="replace").splitlines()
    return lines[:-1] if len(lines) > 1 and len(head) == HEAD_BYTES else lines


def detect_format(lines: list[str]) -> str:
    """The text format of a file, from its first lines."""
    filled = [line for line in lines if line.strip()]
    first = filled[0].lstrip()
    if first.startswith("<doc "):
        return "wikiextractor"
    # an array of objects is no JSONL, but its reader says so best
    if re.match(r'\{\s*"|\[\s*(\{|$)', first):
        return "jsonl"
    if any(_is_wikitext_title(*window) for window in zip(["", *lines], lines, [*lines[1:], ""])):
        return "wikitext"
    # a sentence a line: most lines end like sentences, and hold no more than one
    ending = sum(ends_in_punctuation(line) for line in filled)
    sentences = sum(len(split_sentences(line)) for line in filled)
    return "sentences" if ending > 0.6 * len(filled) and sentences < 1.5 * len(filled) else "prose"


def _lines(path: Location, begin: int = 0, end: int | None = None) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends, NFC-normalised; of the bytes from begin to end.

    Both are line starts (or the end of the file).
    """
    offset = begin  # of the block in the file
    with opened(path) as file:
        if begin:
            file.seek(begin)
        while end is None or offset < end:
            wanted = _BLOCK_BYTES if end is None else min(_BLOCK_BYTES, end - offset)
            try:
                # readlines stops behind the line that takes it over its argument, and 0 is no limit
                block = b"".join(file.readlines(wanted - 1)) if wanted > 1 else file.readline()
            except READ_ERRORS as error:
                raise cannot_read(path, error) from error
            if not block:
                return
            try:
                text = block.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path} is not UTF-8 text: byte {offset + error.start} cannot be decoded; "
                    "convert the file first, for example with iconv -f ENCODING -t UTF-8"
                ) from error
            text = text.removeprefix("\ufeff") if offset == 0 else text
            offset += len(block)
            text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
            # not splitlines: it also ends lines at U+2028, which JSON allows inside strings
            yield from text.removesuffix("\n").split("\n")


def _read_sentences(
    path: Location, text_column: str | None, begin: int = 0, end: int | None = None
) -> Iterator[list[str]]:
    document: list[str] = []
    for line in _lines(path, begin, end):
        if sentence := line.strip():
            document.append(sentence)
        elif document:
            yield document
            document = []
    yield document


def _read_wikiextractor(
    path: Location, text_column: str | None, begin: int = 0, end: int | None = None
) -> Iterator[list[str]]:
    document: list[str] = []
    for line in _lines(path, begin, end):
        if line.startswith(("<doc ", "</doc>")):
            yield document
            document = []
        else:
            document += split_sentences(line)
    yield document


def _is_wikitext_title(before: str, line: str, after: str) -> bool:
    return _WIKITEXT_TITLE.match(line) is not None and not before.strip() and not after.strip()


def _read_wikitext(
    path: Location, text_column: str | None, begin: int = 0, end: int | None = None
) -> Iterator[list[str]]:
    document: list[str] = []
    before = line = ""
    for after in _with_end(_lines(path, begin, end)):
        if _is_wikitext_title(before, line, after):
            yield document
            document = []
        heading = _WIKITEXT_HEADING.match(line.strip())
        document += [heading["title"]] if heading and heading["title"] else split_sentences(line)
        before, line = line, after
    yield document


def _with_end(lines: Iterable[str]) -> Iterator[str]:
    """The lines and an empty one, so that a reader that looks one line ahead also sees the last one."""
    yield from lines
    yield ""


def _jsonl_rows(
    path: Location, begin: int = 0, end: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it is, the object) of each line."""
    where = f"{path} line" if begin == 0 else f"{path}, behind byte {begin}, line"
    for number, line in enumerate(_lines(path, begin, end), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} {number} is not valid JSON ({error.msg}): mend or remove it") from error
        if not isinstance(row, dict):
            raise UserError(f"{where} {number} is not a JSON object: each line must be one object")
        yield f"{where} {number}", row


def _read_jsonl(
    path: Location, text_column: str | None, begin: int = 0, end: int | None = None
) -> Iterator[list[str]]:
    for where, row in _jsonl_rows(path, begin, end):
        if text_column not in row:
            raise UserError(f"{where} has no column {text_column!r} but {_names(row)}: name the text column")
        yield row_sentences(row[text_column], where)


def _read_parquet(
    path: Location, text_column: str | None, begin: int = 0, end: int | None = None
) -> Iterator[list[str]]:
    """Row groups begin to end."""
    import pyarrow
    import pyarrow.parquet

    start = 1
    try:
        with opened(path) as file, pyarrow.parquet.ParquetFile(file) as table:
            groups = range(begin, table.num_row_groups if end is None else end)
            start += sum(table.metadata.row_group(group).num_rows for group in range(begin))
            for batch in table.iter_batches(batch_size=1024, row_groups=groups, columns=[text_column]):
                for number, text in enumerate(batch.column(0).to_pylist(), start=start):
                    yield row_sentences(text, f"{path} row {number}")
                start += batch.num_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read after row {start - 1} ({_first_line(error)})") from error


def row_sentences(text: Any, where: str) -> list[str]:
    """One row's text -> sentences; a null is an empty document, which is dropped."""
    if text is None:
        return []
    if not isinstance(text, str):
        raise UserError(
            f"{where} holds a {type(text).__name__} where text is expected: choose a column of strings"
        )
    # JSON can escape half a surrogate pair, which no encoding can write
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return split_sentences(unicodedata.normalize("NFC", text))


def _names(columns: Iterable[str]) -> str:
    return ", ".join(map(repr, columns)) or "no columns"


def jsonl_text_column(path: Location, text_column: str | None) -> str:
    """The text column by the first rows: more than one, since a text may be null."""
    columns: list[str] = []
    strings: list[str] = []
    for _, row in islice(_jsonl_rows(path), _COLUMN_ROWS):
        columns = columns or list(row)
        strings += [name for name, value in row.items() if isinstance(value, str) and name not in strings]
        if None not in row.values():
            break
    if not columns:
        raise UserError(f"{path} holds no JSON objects: each line must be one object with a text column")
    return choose_column(path, text_column, columns, strings)


def parquet_text_column(path: Location, text_column: str | None) -> str:
    import pyarrow
    import pyarrow.parquet

    try:
        with opened(path) as file:
            schema = pyarrow.parquet.read_schema(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({_first_line(error)})") from error
    is_string = (pyarrow.types.is_string, pyarrow.types.is_large_string)
    strings = [field.name for field in schema if any(test(field.type) for test in is_string)]
    return choose_column(path, text_column, schema.names, strings)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def choose_column(path: object, wanted: str | None, columns: list[str], strings: list[str]) -> str:
    if wanted is not None:
        if wanted not in columns:
            raise UserError(f"{path} has no column {wanted!r}: its columns are {_names(columns)}")
        return wanted
    for name in _TEXT_COLUMNS:
        if name in strings:
            return name
    if len(strings) == 1:
        return strings[0]
    raise UserError(f"cannot tell which column of {path} is the text: name one of {_names(columns)}")


# prose


def _read_prose(
    path: Location, text_column: str | None, begin: int = 0, end: int | None = None
) -> Iterator[list[str]]:
    """Always the whole file: what ends a document depends on all of it."""

    def paragraphs() -> Iterator[tuple[list[str], bool]]:
        return _paragraphs(_gutenberg_body(path))

    # the first pass tells running text, texts with gaps between them, and books whose chapters have titles
    is_title = [_is_heading(paragraph) for paragraph, gap in paragraphs() if gap]
    if not is_title:
        return _runs(paragraph for paragraph, _ in paragraphs())
    # in a book a gap without a title behind it is a poem or a footnote inside a chapter
    has_titles = 2 * sum(is_title) >= len(is_title)
    return _chapters(
        (paragraph, gap and (_is_heading(paragraph) or not has_titles)) for paragraph, gap in paragraphs()
    )


def _gutenberg_body(path: Location) -> Iterator[str]:
    """The lines of a book without Project Gutenberg's header and licence; all lines of any other text."""
    with opened(path) as file:
        is_gutenberg = any(_GUTENBERG_START.match(line) for line in head_lines(file.read(HEAD_BYTES)))
    lines = _lines(path)
    if is_gutenberg:
        marker = next(line for line in lines if _GUTENBERG_START.match(line))
        while not marker.rstrip().endswith("***"):  # a long title wraps
            marker = next(lines, "***")
    for line in lines:
        if is_gutenberg and _GUTENBERG_END.match(line):
            return
        yield line


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[list[str], bool]]:
    """Lines -> (the lines of a paragraph, whether two or more blank lines stand before it)."""
    paragraph: list[str] = []
    num_blanks, gap = 0, False
    for line in _with_end(dropwhile(_is_blank, lines)):
        is_long = paragraph and max(len(paragraph[-1].encode()), len(line.encode())) > _WRAPPED_LINE_BYTES
        if paragraph and (_is_blank(line) or is_long):
            yield paragraph, gap
            paragraph = []
            num_blanks = 0
        if _is_blank(line):
            num_blanks += 1
        else:
            gap = gap if paragraph else num_blanks >= 2
            paragraph.append(line)


def _is_blank(line: str) -> bool:
    return not line or line.isspace()


def _is_heading(paragraph: list[str]) -> bool:
    """A line of a title page or a table of contents: short, and no sentence."""
    text = join_wrapped(paragraph)
    if _NUMBERED_HEADING.match(text):
        return len(text.split()) <= 3 * _MAX_HEADING_WORDS
    if len(paragraph) > 1 or len(text.split()) > _MAX_HEADING_WORDS:
        return False
    return not ends_in_punctuation(text) or text.isupper()


def _chapters(paragraphs: Iterable[tuple[list[str], bool]]) -> Iterator[list[str]]:
    """(paragraph, whether it starts a document) -> documents, without those that are headings only."""
    document: list[list[str]] = []
    num_words = num_headings = 0
    for paragraph, starts_document in _with_last(paragraphs):
        if starts_document:
            # title pages, tables of contents and lone titles are no documents
            if num_headings < _TITLE_PAGE_SHARE * len(document):
                yield _sentences(document)
            document, num_words, num_headings = [], 0, 0
        document.append(paragraph)
        num_words += _count_words(paragraph)
        num_headings += _is_heading(paragraph)
        if num_words > _MAX_CHAPTER_WORDS:
            yield from _runs(document)
            document, num_words, num_headings = [], 0, 0


def _with_last(paragraphs: Iterable[tuple[list[str], bool]]) -> Iterator[tuple[list[str], bool]]:
    """The paragraphs and a start after the last one, which closes the last document."""
    yield from paragraphs
    yield [], True


def _runs(paragraphs: Iterable[list[str]]) -> Iterator[list[str]]:
    """Paragraphs -> documents of about _RUN_WORDS words; no paragraph is cut."""
    document: list[list[str]] = []
    num_words = 0
    for paragraph in paragraphs:
        document.append(paragraph)
        num_words += _count_words(paragraph)
        if num_words >= _RUN_WORDS:
            yield _sentences(document)
            document, num_words = [], 0
    yield _sentences(document)


def _sentences(paragraphs: Iterable[list[str]]) -> list[str]:
    return [sentence for paragraph in paragraphs for sentence in split_sentences(join_wrapped(paragraph))]


def _count_words(paragraph: list[str]) -> int:
    """Words by spaces, or a word per ten bytes where no spaces are written."""
    return sum(max(len(line.split()), len(line.encode()) // 10) for line in paragraph)


READERS: dict[str, Callable[[Location, str | None, int, int | None], Iterator[list[str]]]] = {
    "sentences": _read_sentences,
    "prose": _read_prose,
    "wikiextractor": _read_wikiextractor,
    "wikitext": _read_wikitext,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}


# cutting


def cuts(path: Location, format: str, num_bytes: int, target_bytes: int) -> list[int]:
    """Where to cut a file into pieces of about `target_bytes`, each of whole documents.

    Returns the starts of all pieces but the first: byte offsets, or row groups of parquet. Reading the pieces
    one after the other gives the documents of the file. Prose is never cut.
    """
    if format == "parquet":
        return _parquet_cuts(path, target_bytes)
    starts: list[int] = []
    if format == "prose":
        return starts
    position = target_bytes
    with opened(path) as file:
        while position < num_bytes:
            start = _next_document(file, format, position)
            if start is None:
                break
            starts.append(start)
            position = start + target_bytes
    return starts


def _next_document(file: Any, format: str, position: int) -> int | None:
    """The offset of the first line behind `position` that certainly starts a document."""
    file.seek(position)
    offset = position + len(file.readline())  # the rest of a line that began before
    before, line = "?", file.readline()
    while line:
        after = file.readline()
        text = line.decode("utf-8", errors="replace")
        starts = {
            "jsonl": True,
            "sentences": not before.strip() and bool(text.strip()),
            "wikiextractor": text.startswith("<doc "),
            "wikitext": _is_wikitext_title(before, text.rstrip("\r\n"), after.decode("utf-8", "replace")),
        }
        if starts[format]:
            return offset
        offset += len(line)
        before, line = text, after
    return None


def _parquet_cuts(path: Location, target_bytes: int) -> list[int]:
    import pyarrow
    import pyarrow.parquet

    try:
        with opened(path) as file:
            metadata = pyarrow.parquet.read_metadata(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({_first_line(error)})") from error
    starts, size = [], 0
    for group in range(metadata.num_row_groups):
        if size >= target_bytes:
            starts.append(group)
            size = 0
        size += metadata.row_group(group).total_byte_size
    return starts
