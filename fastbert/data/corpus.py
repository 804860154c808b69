"""Files -> documents, each a list of sentences: the first step of the data path.

`open_corpus` finds the files, recognises their format from their first bytes and refuses what it cannot read;
`Corpus.documents()` then streams document after document in constant memory. Text is read as UTF-8 and
NFC-normalised, so that Korean written on macOS (decomposed) and elsewhere (composed) gives the same ids.

Formats
  sentences      Google BERT's input: a sentence a line, a blank line between documents; lines are not split further
  prose          paragraphs between blank lines, hard-wrapped or not; two blank lines end a document (a chapter)
  wikiextractor  <doc ...> title, paragraphs a line each </doc>
  wikitext       " = Title = " between blank lines starts an article
  jsonl          an object a line, parquet a row, with a text column: one document each
"""

from __future__ import annotations

import ast
import glob
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from fastbert.data.sentences import ends_in_punctuation, join_wrapped, split_sentences
from fastbert.errors import UserError

FORMATS = ("auto", "sentences", "prose", "wikiextractor", "wikitext", "jsonl", "parquet")
READER_VERSION = 1  # part of the fingerprint: raise it whenever the same file gives other sentences

_HEAD_BYTES = 64 * 1024  # what the format is recognised from
_CHUNK_BYTES = 1 << 20
_WRAPPED_LINE_BYTES = 200  # a longer line is a paragraph of its own: nobody wraps at this width
_RUN_WORDS = 2_000  # prose without chapter gaps is cut into documents of about this many words
_TEXT_COLUMNS = ("text", "content", "document", "body")

_GUTENBERG_START = re.compile(r"^\*\*\* ?START OF (THE|THIS) PROJECT GUTENBERG", re.IGNORECASE)
_GUTENBERG_END = re.compile(r"^(\*\*\* ?END OF (THE|THIS)|End of (the |this )?)\s*Project Gutenberg", re.IGNORECASE)
_WIKITEXT_TITLE = re.compile(r"^ ?= [^=].* = ?$")
_WIKITEXT_HEADING = re.compile(r"^=( =)* (?P<title>.*?) =( =)*$")
_NUMBERED_HEADING = re.compile(r"^(chapter|book|part|section|letter|act|scene|canto|volume)\s+[\divxlc]+\b", re.I)
_MAX_HEADING_WORDS = 12


class _Source(Protocol):
    def documents(self) -> Iterator[list[str]]: ...

    def digest(self) -> str: ...


class Corpus:
    """Documents of a list of sources, in order.

    `name` is a short slug for a folder name, `description` one line on what is read.
    """

    def __init__(self, name: str, description: str, sources: Sequence[_Source]) -> None:
        self.name = name
        self.description = description
        self._sources = tuple(sources)

    def documents(self) -> Iterator[list[str]]:
        """Stream the documents, each a non-empty list of non-empty NFC sentences; can be iterated again.

        Raises UserError for undecodable bytes (file and byte offset), a broken row (file and line), and a file
        that holds no sentence at all.
        """
        for source in self._sources:
            yield from source.documents()

    def fingerprint(self) -> str:
        """Hex digest of contents, formats and reader version; neither of paths nor of modification times."""
        digest = hashlib.sha256(f"fastbert corpus {READER_VERSION}".encode())
        for source in self._sources:
            digest.update(source.digest().encode())
        return digest.hexdigest()


def open_corpus(
    paths: Sequence[str] | None, *, format: str = "auto", text_column: str | None = None
) -> Corpus:
    """Files, globs and folders (recursive, sorted, hidden files skipped) -> Corpus. None: Python's own documentation.

    Raises UserError for an unknown format, a path that does not exist or matches nothing, an empty or
    unreadable file, text that is UTF-16, and a text column that is missing or cannot be guessed.
    """
    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}: choose one of {', '.join(FORMATS)}")
    if paths is None:
        return _python_docs_corpus()
    if not paths:
        raise UserError("the list of corpus files is empty: name at least one file, folder or glob")
    files = list(dict.fromkeys(file for path in paths for file in _find_files(str(path))))
    sources = [_open_file(file, format, text_column) for file in files]
    total_bytes = sum(file.stat().st_size for file in files)
    formats = ", ".join(sorted({source.format for source in sources}))
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    name = _slug(Path(paths[0]), files)
    return Corpus(name, f"{name}: {count}, {total_bytes / 1e6:.1f} MB, {formats}", sources)


def _slug(first: Path, files: list[Path]) -> str:
    stem = first.resolve().name if first.is_dir() else files[0].stem
    slug = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "corpus"
    return slug if first.is_dir() or len(files) == 1 else f"{slug}-and-{len(files) - 1}-more"


def _find_files(path: str) -> list[Path]:
    """One path, folder or glob -> the files behind it, sorted."""
    expanded = Path(path).expanduser()
    if expanded.is_dir():
        found = _files_in(expanded)
        if not found:
            raise UserError(f"the corpus folder {path} holds no files: name a folder with text in it")
        return found
    if expanded.exists():
        return [expanded]
    if glob.has_magic(path):
        matches = sorted(Path(match) for match in glob.glob(str(expanded), recursive=True))
        found = [file for match in matches for file in (_files_in(match) if match.is_dir() else [match])]
        if not found:
            raise UserError(f"the glob {path} matches no files: check it with ls")
        return found
    raise UserError(f"the corpus path {path} does not exist: name a file, a folder or a glob")


def _files_in(folder: Path) -> list[Path]:
    return sorted(
        Path(parent) / name
        for parent, folders, names in os.walk(folder)
        # assigning to the slice keeps os.walk out of hidden folders
        for folders[:] in [[entry for entry in folders if not entry.startswith(".")]]
        for name in names
        if not name.startswith(".")
    )


# ---------------------------------------------------------------------------------------------------------------
# one file


@dataclass(frozen=True)
class _File:
    path: Path
    format: str
    text_column: str | None  # of jsonl and parquet

    def documents(self) -> Iterator[list[str]]:
        empty = True
        for document in _READERS[self.format](self):
            if document:
                empty = False
                yield document
        if empty:
            raise UserError(
                f"{self.path} holds no sentence when read as {self.format}: remove it or name its format"
            )

    def digest(self) -> str:
        with _opened(self.path) as file:
            return f"{self.format} {self.text_column} {hashlib.file_digest(file, 'sha256').hexdigest()}\n"


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}): check the path and its permissions"
        ) from error


def _open_file(path: Path, format: str, text_column: str | None) -> _File:
    with _opened(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head.strip():
        raise UserError(f"the corpus file {path} is empty: remove it or fill it")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path} is UTF-16 text: convert it first, iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE")
    if format == "auto":
        format = "parquet" if head.startswith(b"PAR1") else detect_format(_head_lines(head))
    if format == "parquet":
        text_column = _parquet_text_column(path, text_column)
    elif format == "jsonl":
        text_column = _jsonl_text_column(path, text_column)
    else:
        text_column = None
    return _File(path, format, text_column)


def _head_lines(head: bytes) -> list[str]:
    """The whole lines of a file's first bytes; the last, cut one only when it is the only one."""
    lines = head.decode("utf-8-sig", errors="replace").splitlines()
    return lines[:-1] if len(lines) > 1 and len(head) == _HEAD_BYTES else lines


def detect_format(lines: list[str]) -> str:
    """The text format of a file, from its first lines."""
    filled = [line for line in lines if line.strip()]
    first = filled[0].lstrip()
    if first.startswith("<doc "):
        return "wikiextractor"
    if re.match(r'\{\s*"', first):
        return "jsonl"
    if any(_is_wikitext_title(*window) for window in zip(["", *lines], lines, [*lines[1:], ""])):
        return "wikitext"
    # a sentence a line: most lines end like sentences, and hold no more than one
    ending = sum(ends_in_punctuation(line) for line in filled)
    sentences = sum(len(split_sentences(line)) for line in filled)
    return "sentences" if ending > 0.6 * len(filled) and sentences < 1.5 * len(filled) else "prose"


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends, NFC-normalised, read in chunks that end at line ends."""
    offset = 0  # of the first byte of `pending` in the file
    with _opened(path) as file:
        pending = b""
        while True:
            chunk = file.read(_CHUNK_BYTES)
            pending += chunk
            cut = pending.rfind(b"\n") + 1 if chunk else len(pending)
            if cut:
                try:
                    text = pending[:cut].decode("utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path} is not UTF-8 text: byte {offset + error.start} cannot be decoded; "
                        "convert the file first, for example with iconv -f ENCODING -t UTF-8"
                    ) from error
                if offset == 0:
                    text = text.removeprefix("\ufeff")
                offset += cut
                pending = pending[cut:]
                text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
                # only "\n" ends a line here: str.splitlines also knows U+2028, which JSON allows inside strings
                lines = text.split("\n")
                yield from lines if lines[-1] else lines[:-1]
            if not chunk:
                return


# ---------------------------------------------------------------------------------------------------------------
# readers: one a format


def _read_sentences(file: _File) -> Iterator[list[str]]:
    document: list[str] = []
    for line in _lines(file.path):
        if sentence := line.strip():
            document.append(sentence)
        elif document:
            yield document
            document = []
    yield document


def _read_wikiextractor(file: _File) -> Iterator[list[str]]:
    document: list[str] = []
    for line in _lines(file.path):
        if line.startswith(("<doc ", "</doc>")):
            yield document
            document = []
        else:
            document += split_sentences(line)
    yield document


def _is_wikitext_title(before: str, line: str, after: str) -> bool:
    return _WIKITEXT_TITLE.match(line) is not None and not before.strip() and not after.strip()


def _read_wikitext(file: _File) -> Iterator[list[str]]:
    document: list[str] = []
    before = line = ""
    for after in _with_end(_lines(file.path)):
        if _is_wikitext_title(before, line, after):
            yield document
            document = []
        heading = _WIKITEXT_HEADING.match(line.strip())
        document += [heading["title"]] if heading else split_sentences(line)
        before, line = line, after
    yield document


def _with_end(lines: Iterable[str]) -> Iterator[str]:
    """The lines and an empty one, so that a reader that looks one line ahead also sees the last one."""
    yield from lines
    yield ""


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not valid JSON ({error.msg}): mend or remove it") from error
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is not a JSON object: each line must be one object")
        yield number, row


def _read_jsonl(file: _File) -> Iterator[list[str]]:
    for number, row in _jsonl_rows(file.path):
        if file.text_column not in row:
            raise UserError(
                f"{file.path} line {number} has no column {file.text_column!r} but {_names(row)}: name the text column"
            )
        yield _row_sentences(row[file.text_column], f"{file.path} line {number}")


def _read_parquet(file: _File) -> Iterator[list[str]]:
    import pyarrow.parquet

    start = 1
    with pyarrow.parquet.ParquetFile(file.path) as table:
        for batch in table.iter_batches(batch_size=1024, columns=[file.text_column]):
            for number, text in enumerate(batch.column(0).to_pylist(), start=start):
                yield _row_sentences(text, f"{file.path} row {number}")
            start += batch.num_rows


def _row_sentences(text: Any, where: str) -> list[str]:
    """One row's text -> sentences; a null is an empty document, which is dropped."""
    if text is None:
        return []
    if not isinstance(text, str):
        raise UserError(f"{where} holds a {type(text).__name__} where text is expected: choose a column of strings")
    # JSON can escape half a surrogate pair, which no encoding can write
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return split_sentences(unicodedata.normalize("NFC", text))


def _names(columns: Iterable[str]) -> str:
    return ", ".join(map(repr, columns)) or "no columns"


def _jsonl_text_column(path: Path, text_column: str | None) -> str:
    for _, row in _jsonl_rows(path):
        strings = [name for name, value in row.items() if isinstance(value, str)]
        return _choose_column(path, text_column, list(row), strings)
    raise UserError(f"{path} holds no JSON objects: each line must be one object with a text column")


def _parquet_text_column(path: Path, text_column: str | None) -> str:
    import pyarrow
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({str(error).splitlines()[0]})") from error
    is_string = (pyarrow.types.is_string, pyarrow.types.is_large_string)
    strings = [field.name for field in schema if any(test(field.type) for test in is_string)]
    return _choose_column(path, text_column, schema.names, strings)


def _choose_column(path: Path, wanted: str | None, columns: list[str], strings: list[str]) -> str:
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


def _read_prose(file: _File) -> Iterator[list[str]]:
    # a first pass, which stops at the first gap, tells chapters from running text
    if any(gap for _, gap in _paragraphs(_gutenberg_body(file.path))):
        yield from _chapters(_paragraphs(_gutenberg_body(file.path)))
    else:
        yield from _runs(_paragraphs(_gutenberg_body(file.path)))


def _gutenberg_body(path: Path) -> Iterator[str]:
    """The lines of a book without Project Gutenberg's header and licence; all lines of any other text."""
    with _opened(path) as file:
        is_gutenberg = any(_GUTENBERG_START.match(line) for line in _head_lines(file.read(_HEAD_BYTES)))
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
    blanks, seen_any = 0, False
    for line in lines:
        if not line.strip():
            if paragraph:
                yield paragraph, seen_any and gap
                seen_any, paragraph = True, []
            blanks += 1
            continue
        if paragraph and _WRAPPED_LINE_BYTES < max(len(paragraph[-1].encode()), len(line.encode())):
            yield paragraph, seen_any and gap
            seen_any, paragraph = True, []
        if not paragraph:
            gap, blanks = blanks >= 2, 0
        paragraph.append(line)
    if paragraph:
        yield paragraph, seen_any and gap


def _is_heading(paragraph: list[str]) -> bool:
    """A line of a title page or a table of contents: short, and no sentence."""
    text = " ".join(paragraph).strip()
    if len(paragraph) > 1 or len(text.split()) > _MAX_HEADING_WORDS:
        return False
    return not ends_in_punctuation(text) or text.isupper() or _NUMBERED_HEADING.match(text) is not None


def _chapters(paragraphs: Iterable[tuple[list[str], bool]]) -> Iterator[list[str]]:
    document: list[str] = []
    num_paragraphs = num_headings = 0
    for paragraph, gap in paragraphs:
        if gap:
            # title pages, tables of contents and lone titles are no documents
            yield document if num_headings < 0.9 * num_paragraphs else []
            document, num_paragraphs, num_headings = [], 0, 0
        document += split_sentences(join_wrapped(paragraph))
        num_paragraphs += 1
        num_headings += _is_heading(paragraph)
    yield document if num_headings < 0.9 * num_paragraphs else []


def _runs(paragraphs: Iterable[tuple[list[str], bool]]) -> Iterator[list[str]]:
    document: list[str] = []
    num_words = 0
    for paragraph, _ in paragraphs:
        text = join_wrapped(paragraph)
        document += split_sentences(text)
        # Chinese and Japanese have no spaces: two bytes and more a word is a fair count for them
        num_words += max(len(text.split()), len(text.encode()) // 10)
        if num_words >= _RUN_WORDS:
            yield document
            document, num_words = [], 0
    yield document


_READERS: dict[str, Callable[[_File], Iterator[list[str]]]] = {
    "sentences": _read_sentences,
    "prose": _read_prose,
    "wikiextractor": _read_wikiextractor,
    "wikitext": _read_wikitext,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}


# ---------------------------------------------------------------------------------------------------------------
# the built-in corpus

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_LIST_LINE = re.compile(r"\s*([-*+o•]\s|\d+[.)]\s|>>>|\.\.\.|\$ |:\w|@\w|\S+(\(.*?\))?\s+--?\s)")
_RULER_LINE = re.compile(r"\W*$")


class _PythonDocs:
    def documents(self) -> Iterator[list[str]]:
        return (list(document) for document in _python_documents())

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(_python_documents()).encode()).hexdigest()


def _python_docs_corpus() -> Corpus:
    documents = _python_documents()
    num_bytes = sum(len(sentence.encode()) + 1 for document in documents for sentence in document)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    description = (
        f"the documentation that comes with Python {version} (pydoc topics and the standard library's docstrings): "
        f"{len(documents):,} documents, {num_bytes / 1e6:.1f} MB"
    )
    return Corpus("python-docs", description, [_PythonDocs()])


@cache
def _python_documents() -> tuple[tuple[str, ...], ...]:
    """pydoc's topics, then the docstrings of the standard library in path and line order, each text once.

    The modules are parsed, never imported: importing some of them opens windows or a browser.
    """
    from pydoc_data.topics import topics

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(stdlib.rglob("*.py"), key=lambda path: path.relative_to(stdlib).as_posix()):
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(stdlib).parts):
            texts += _docstrings(path)
    documents = (tuple(_docstring_sentences(text)) for text in dict.fromkeys(map(inspect.cleandoc, texts)))
    return tuple(document for document in documents if document)


def _docstrings(path: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some modules hold invalid escapes on purpose
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []  # a distribution may ship templates or files of another version: they hold no documentation
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, owners)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node, clean=False))]


def _docstring_sentences(text: str) -> list[str]:
    """Wrapped prose is joined before it is split; lines of lists, tables and code stay lines."""
    sentences: list[str] = []
    for block in re.split(r"\n\s*\n", unicodedata.normalize("NFC", text)):
        lines = [line for line in block.splitlines() if not _RULER_LINE.match(line)]
        is_code = all(line.startswith("    ") for line in lines)
        unit: list[str] = []
        for line in lines:
            if unit and (is_code or _LIST_LINE.match(line)):
                sentences += split_sentences(join_wrapped(unit))
                unit = []
            unit.append(line)
        sentences += split_sentences(join_wrapped(unit))
    return sentences
