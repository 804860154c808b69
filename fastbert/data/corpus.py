"""Files -> documents, each a list of sentences: the first step of the data path.

`open_corpus` finds the files (or addresses that fsspec opens), recognises their format from their first bytes
and refuses what it cannot read; `Corpus.documents()` then streams document after document in constant memory,
and `Corpus.parts()` cuts it into parts that processes can read at the same time. Text is read as UTF-8 and
NFC-normalised, so that Korean written on macOS (decomposed) and elsewhere (composed) gives the same ids.

Formats
  sentences      Google BERT's input: a sentence a line (not split further), a blank line between documents
  prose          paragraphs between blank lines, hard-wrapped or not; two blank lines end a document
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from fastbert.data.files import (
    READ_ERRORS,
    Location,
    cannot_read,
    compression,
    find_urls,
    is_url,
    opened,
    size_of,
)
from fastbert.data.readers import (
    HEAD_BYTES,
    READERS,
    cuts,
    detect_format,
    head_lines,
    jsonl_text_column,
    parquet_text_column,
)
from fastbert.data.sentences import join_wrapped, split_sentences
from fastbert.errors import UserError

FORMATS = ("auto", "sentences", "prose", "wikiextractor", "wikitext", "jsonl", "parquet")
READER_VERSION = 1  # part of the fingerprint: raise it whenever the same file gives other sentences


class Piece(Protocol):
    """Some documents of a source; may be sent to another process."""

    @property
    def num_bytes(self) -> int:
        """Of its text, about."""

    def documents(self) -> Iterator[list[str]]: ...


class Source(Protocol):
    def documents(self) -> Iterator[list[str]]: ...

    def digest(self) -> str:
        """Of the contents: reads all of them."""

    def listing(self) -> str:
        """What is known of the contents without reading them."""

    def pieces(self, target_bytes: int) -> Iterator[Piece]:
        """All documents in order, in pieces of about that size."""


@dataclass(frozen=True)
class Part:
    """A run of documents of a corpus, read on its own."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def documents(self) -> Iterator[list[str]]:
        for piece in self.pieces:
            yield from piece.documents()


class Corpus:
    """Documents of a list of sources, in order.

    `name` is a short slug for a folder name, `description` one line on what is read.
    """

    def __init__(self, name: str, description: str, sources: Sequence[Source]) -> None:
        self.name = name
        self.description = description
        self._sources = tuple(sources)

    def documents(self) -> Iterator[list[str]]:
        """Stream the documents, each a non-empty list of non-empty NFC sentences; can be iterated again.

        Raises UserError for undecodable bytes (file and byte offset), a broken row (file and line) and a
        file that holds no sentence at all.
        """
        for source in self._sources:
            yield from source.documents()

    def fingerprint(self) -> str:
        """Hex digest of contents, formats and reader version; neither of paths nor of modification times."""
        digest = hashlib.sha256(f"fastbert corpus {READER_VERSION}".encode())
        for source in self._sources:
            digest.update(source.digest().encode())
        return digest.hexdigest()

    def listing(self) -> str:
        """Hex digest of names, sizes and formats: what can be known of a large corpus before it is read."""
        digest = hashlib.sha256(f"fastbert corpus {READER_VERSION}".encode())
        for source in self._sources:
            digest.update(source.listing().encode())
        return digest.hexdigest()

    def parts(self, target_bytes: int) -> Iterator[Part]:
        """The documents in order, in parts of about `target_bytes`: whole documents each.

        A large file is cut where a document starts; compressed files and prose cannot be, and may give a
        larger part. The same corpus and target give the same parts.
        """
        pieces: list[Piece] = []
        number = size = 0
        for piece in (piece for source in self._sources for piece in source.pieces(target_bytes)):
            if pieces and size + piece.num_bytes > 1.5 * target_bytes:
                yield Part(number, tuple(pieces))
                number, pieces, size = number + 1, [], 0
            pieces.append(piece)
            size += piece.num_bytes
        if pieces:
            yield Part(number, tuple(pieces))

    def sentences(self, max_chars: int) -> Iterator[str]:
        """The sentences of the first `max_chars` characters."""
        for document in self.documents():
            yield from document
            max_chars -= sum(map(len, document))
            if max_chars <= 0:
                return


def open_corpus(
    paths: Sequence[str] | None, *, format: str = "auto", text_column: str | None = None
) -> Corpus:
    """Files, globs and folders (recursive, sorted, none hidden) -> Corpus; None -> Python's documentation.

    A path may be an address that fsspec opens, and a file may be compressed (.gz, .bz2, .xz, .zst). Raises
    UserError for an unknown format, a path that does not exist or matches nothing, an empty or unreadable
    file, one that is no text, text that is UTF-16, and a text column that is missing or cannot be guessed.
    """
    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}: choose one of {', '.join(FORMATS)}")
    if paths is None:
        return _python_docs_corpus()
    if not paths:
        raise UserError("the list of corpus files is empty: name at least one file, folder or glob")
    files = dict(found for path in paths for found in _find_files(str(path)))  # each once
    sources = [_open_file(file, size, format, text_column) for file, size in files.items()]
    formats = ", ".join(sorted({source.format for source in sources}))
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    name = _slug(str(paths[0]), list(files))
    return Corpus(name, f"{name}: {count}, {sum(files.values()) / 1e6:.1f} MB, {formats}", sources)


def _slug(first: str, files: list[Location]) -> str:
    is_folder = Path(first).is_dir()
    stem = Path(first).resolve().name if is_folder else files[0].stem
    slug = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "corpus"
    return slug if is_folder or len(files) == 1 else f"{slug}-and-{len(files) - 1}-more"


def _find_files(path: str) -> list[tuple[Location, int]]:
    """One path, address, folder or glob -> the files behind it and their sizes, sorted."""
    if is_url(path):
        return [*find_urls(path)]
    return [(file, size_of(file)) for file in _find_local_files(path)]


def _find_local_files(path: str) -> list[Path]:
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


@dataclass(frozen=True)
class _File:
    """A file, or the documents of it from `begin` to `end` (bytes; row groups of parquet)."""

    path: Location
    format: str
    text_column: str | None  # of jsonl and parquet
    num_bytes: int
    begin: int = 0
    end: int | None = None

    def documents(self) -> Iterator[list[str]]:
        empty = True
        for document in READERS[self.format](self.path, self.text_column, self.begin, self.end):
            if document:
                empty = False
                yield document
        if empty and self.begin == 0 and self.end is None:
            raise UserError(
                f"{self.path} holds no sentence when read as {self.format}: remove it or name its format"
            )

    def digest(self) -> str:
        with opened(self.path) as file:
            return f"{self.format} {self.text_column} {hashlib.file_digest(file, 'sha256').hexdigest()}\n"

    def listing(self) -> str:
        return f"{self.path.name} {self.num_bytes} {self.format} {self.text_column}\n"

    def pieces(self, target_bytes: int) -> Iterator[_File]:
        starts: list[int] = []
        if self.num_bytes > 1.5 * target_bytes and compression(self.path) is None:
            starts = cuts(self.path, self.format, self.num_bytes, target_bytes)
        if not starts:
            yield self
            return
        # a row group's bytes are compressed and unknown here: the file's are shared out
        share = self.num_bytes // (len(starts) + 1)
        for begin, end in pairwise([0, *starts, None]):
            assert begin is not None
            size = share if self.format == "parquet" else (self.num_bytes if end is None else end) - begin
            yield replace(self, num_bytes=size, begin=begin, end=end)


def _open_file(path: Location, num_bytes: int, format: str, text_column: str | None) -> _File:
    with opened(path) as file:
        try:
            head = file.read(HEAD_BYTES)
        except READ_ERRORS as error:
            raise cannot_read(path, error) from error
    if not head.strip():
        raise UserError(f"the corpus file {path} is empty: remove it or fill it")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path} is UTF-16 text: convert it first, iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE")
    is_parquet = head.startswith(b"PAR1")
    if not is_parquet and (b"\0" in head or head.startswith(b"%PDF")):
        raise UserError(
            f"{path} is no text (its first bytes are those of an image, archive or other program's file): "
            "remove it from the corpus, or name the text files by a glob such as 'corpus/*.txt'"
        )
    if format == "auto":
        format = "parquet" if is_parquet else detect_format(head_lines(head))
    if format == "parquet":
        text_column = parquet_text_column(path, text_column)
    elif format == "jsonl":
        text_column = jsonl_text_column(path, text_column)
    else:
        text_column = None
    return _File(path, format, text_column, num_bytes)


_MIN_DOCSTRING_BYTES = 80  # "Return the name." is no document: there is nothing to predict it from
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_LIST_LINE = re.compile(r"\s*([-*+o•]\s|\d+[.)]\s|>>>|\.\.\.|\$ |:\w|@\w|\S+(\(.*?\))?\s+--?\s)")
_RULER_LINE = re.compile(r"\W*$")


class _PythonDocs:
    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, _python_documents()))

    def documents(self) -> Iterator[list[str]]:
        return (list(document) for document in _python_documents())

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(_python_documents()).encode()).hexdigest()

    def listing(self) -> str:
        return self.digest()

    def pieces(self, target_bytes: int) -> Iterator[_PythonDocs]:
        yield self  # two megabytes


def _python_docs_corpus() -> Corpus:
    documents = _python_documents()
    num_bytes = sum(map(_num_bytes, documents))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    description = (
        f"Python {version}'s own documentation (pydoc topics and standard library docstrings): "
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
    return tuple(document for document in documents if _num_bytes(document) >= _MIN_DOCSTRING_BYTES)


def _num_bytes(document: Iterable[str]) -> int:
    return sum(len(sentence.encode()) + 1 for sentence in document)


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
        is_code = all(line.startswith("   ") for line in lines)
        unit: list[str] = []
        for line in lines:
            if unit and (is_code or _LIST_LINE.match(line)):
                sentences += split_sentences(join_wrapped(unit))
                unit = []
            unit.append(line)
        sentences += split_sentences(join_wrapped(unit))
    return sentences
