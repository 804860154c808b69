"""`python -m fastbert.prepare`: a corpus of any size -> a tokenized data set for `pretrain --data`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from tokenizers import Tokenizer

from fastbert.data.corpus import Corpus, Part, open_corpus
from fastbert.data.filters import Filters
from fastbert.data.preparation import WORK, OnProgress, Progress, prepare_store
from fastbert.data.shards import WriteOptions, storage_error
from fastbert.data.store import MANIFEST, TOKENIZER, DocumentStore
from fastbert.data.tokenizer import (
    TOKENIZER_CHARS,
    load_tokenizer,
    save_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)
from fastbert.errors import UserError
from fastbert.tasks.settings import shown
from fastbert.train import checkpoint as ckpt
from fastbert.train.settings import MAX_POSITIONS, Format

_LINE_SECONDS = 10.0  # between lines of progress where there is no terminal


@dataclass
class Input:
    corpus: Annotated[tuple[str, ...], shown("the documentation inside every Python", "PATH [PATH ...]")] = ()
    """Files, globs, folders or addresses (s3://…) of text."""
    format: Format = "auto"
    """How documents are laid out in the files."""
    text_column: Annotated[str | None, shown("text, content, document or body", "STR")] = None
    """Column of JSONL and parquet files, or of the data set, that holds the text."""
    dataset: Annotated[str | None, shown("none", "NAME")] = None
    """Hub data set, or a folder, that Hugging Face's datasets loads: instead of --corpus."""
    dataset_config: Annotated[str | None, shown("the data set's own", "STR")] = None
    """Its configuration."""
    split: str = "train"
    """Its split."""
    revision: Annotated[str | None, shown("the newest", "STR")] = None
    """Commit, branch or tag of the hub that pins it."""


@dataclass
class Tokens:
    tokenizer: Annotated[Path | None, shown("trained on the corpus", "PATH")] = None
    """Hugging Face, run or data set folder, tokenizer.json or vocab.txt to use."""
    vocab_size: int = 30522
    """Pieces of a trained tokenizer at most; a small corpus supports fewer."""
    cased: bool = False
    """Keep upper and lower case apart in a trained tokenizer."""


@dataclass
class Selection:
    dedup: bool = False
    """Keep only the first of equal documents; the corpus is read twice."""
    min_chars: int = 0
    """Drop documents with fewer characters."""
    max_chars: Annotated[int | None, shown("no limit", "INT")] = None
    """Drop documents with more characters."""
    min_letters: float = 0.0
    """Drop documents in which letters, of any script, are a smaller share of the characters."""
    max_symbols: float = 1.0
    """Drop documents in which symbols and signs of markup and code are a larger share of the characters."""
    max_repeated: float = 1.0
    """Drop documents in which repeated sentences are a larger share of the characters."""
    held_out: float = 0.01
    """Share of the documents that is held out from training, drawn by a hash of their text."""
    seed: int = 12345
    """Of the hash that holds documents out."""


@dataclass
class Work:
    output: Annotated[Path | None, shown("data/NAME", "DIR")] = None
    """Folder of the data set; one that is unfinished is continued."""
    num_proc: Annotated[int | None, shown("as many as there are cores", "INT")] = None
    """Processes; their number changes no byte of the result."""
    shard_mb: float = 32.0
    """Text in a shard, in megabytes."""


@dataclass
class Settings:
    input: Input = field(default_factory=Input)
    tokens: Tokens = field(default_factory=Tokens)
    selection: Selection = field(default_factory=Selection)
    work: Work = field(default_factory=Work)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status (0, 2 = bad input, 128 + signal)."""
    settings = tyro.cli(
        Settings,
        args=sys.argv[1:] if arguments is None else arguments,
        prog="python -m fastbert.prepare",
        description=(
            "Tokenize a corpus of any size into a data set that python -m fastbert.pretrain --data reads."
        ),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        prepare(settings, Console())
        return 0
    except _Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except UserError as error:
        stderr = Console(stderr=True)
        stderr.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Terminated(KeyboardInterrupt):
    pass


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def prepare(settings: Settings, console: Console) -> DocumentStore:
    """Make, continue or recognise the data set that `settings` ask for; UserError for bad input."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    options = _write_options(settings)
    corpus = _corpus(settings.input)
    folder = settings.work.output or Path("data") / corpus.name
    ckpt.make_run_dir(folder)
    with ckpt.exclusive(folder):
        say(f"corpus: {corpus.description}")
        asked = _asked(settings, corpus)
        if (folder / MANIFEST).exists():
            store = DocumentStore.open(folder)
            _compare(folder, store.manifest.get("options", {}), asked)
            shutil.rmtree(folder / WORK, ignore_errors=True)
            say(f"{folder} is finished already: {_contents(store)}")
            return store
        _begin(folder, asked)
        tokenizer = _tokenizer(settings.tokens, corpus, folder, say)
        description = {
            "corpus": corpus.description,
            "name": corpus.name,
            "fingerprints": {"corpus": corpus.listing(), "tokenizer": tokenizer_fingerprint(tokenizer)},
            "options": asked,
        }
        num_proc = settings.work.num_proc or _num_cores()
        report = _Report(console)
        try:
            store = prepare_store(
                corpus,
                tokenizer,
                folder,
                options,
                description,
                deduplicate=settings.selection.dedup,
                num_proc=num_proc,
                on_pass=report.begin,
            )
        except KeyboardInterrupt:
            report.close()
            say(f"stopped; finished shards are kept in {folder}, and the same command goes on behind them")
            raise
        finally:
            report.close()
    dropped = store.manifest["dropped_documents"]
    say(f"data set: {_contents(store)}")
    if dropped:
        say("dropped: " + ", ".join(f"{count:,} documents by {reason}" for reason, count in dropped.items()))
    say(f"next: python -m fastbert.pretrain --packed --data {folder}")
    return store


def _num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _contents(store: DocumentStore) -> str:
    return (
        f"{len(store):,} documents ({store.num_held_out:,} held out), {store.num_tokens:,} tokens, "
        f"{100 * store.unk_share:.2f} % unknown, {store.num_shards:,} shards"
    )


def _corpus(given: Input) -> Corpus:
    if given.dataset is None:
        return open_corpus(given.corpus or None, format=given.format, text_column=given.text_column)
    if given.corpus:
        raise UserError(f"--dataset {given.dataset} and --corpus are both given; leave out one of the two")
    from fastbert.data.hub import open_hub

    return open_hub(
        given.dataset,
        config=given.dataset_config,
        split=given.split,
        revision=given.revision,
        text_column=given.text_column,
    )


def _write_options(settings: Settings) -> WriteOptions:
    s = settings.selection
    shares = {
        "--min-letters": s.min_letters,
        "--max-symbols": s.max_symbols,
        "--max-repeated": s.max_repeated,
    }
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise UserError(f"{name} {value} is out of range; give a share from 0 to 1")
    at_least = {
        "--min-chars": (s.min_chars, 0),
        "--max-chars": (s.max_chars, 1),
        "--num-proc": (settings.work.num_proc, 1),
        "--shard-mb": (settings.work.shard_mb, 0.001),
        "--vocab-size": (settings.tokens.vocab_size, 100),
    }
    for name, (number, least) in at_least.items():
        if number is not None and not number >= least:
            raise UserError(f"{name} {number} is out of range; give at least {least}")
    if not 0 <= s.held_out < 1:
        raise UserError(f"--held-out {s.held_out} is out of range; give a share from 0 to below 1")
    filters = Filters(s.min_chars, s.max_chars, s.min_letters, s.max_symbols, s.max_repeated)
    return WriteOptions(round(settings.work.shard_mb * 1e6), filters, s.held_out, s.seed)


def _asked(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """What decides the bytes of the data set: a preparation is only continued with the same."""
    tokens: dict[str, Any] = asdict(settings.tokens)
    if settings.tokens.tokenizer is not None:
        fingerprint = tokenizer_fingerprint(_given_tokenizer(settings.tokens))
        tokens = {"tokenizer": f"given, {fingerprint[:16]}"}
    else:
        tokens["tokenizer"] = "trained"
    return {
        "corpus": corpus.listing(),
        **tokens,
        **asdict(settings.selection),
        "shard_mb": settings.work.shard_mb,
    }


def _compare(folder: Path, before: dict[str, Any], asked: dict[str, Any]) -> None:
    for name in dict.fromkeys([*before, *asked]):
        old, new = before.get(name), asked.get(name)
        if old == new:
            continue
        if name == "corpus":
            what = "other files than these, or they have changed"
        else:
            what = f"--{name.replace('_', '-')} {old}, but {new} is asked for"
        raise UserError(
            f"{folder} was begun with {what}; give the same options as then, or choose another --output"
        )


def _begin(folder: Path, asked: dict[str, Any]) -> None:
    """Write down what was asked for, or compare with what was."""
    path = folder / WORK / "options.json"
    if path.exists():
        _compare(folder, json.loads(path.read_text(encoding="utf-8")), asked)
        return
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in (".lock", WORK))
    if others:
        raise UserError(f"{folder} holds {others[0]}, which is no data set; choose another --output")
    try:
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asked), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise storage_error(error, folder) from error


def _given_tokenizer(tokens: Tokens) -> Tokenizer:
    assert tokens.tokenizer is not None
    return load_tokenizer(tokens.tokenizer, cased=tokens.cased or None)


def _tokenizer(tokens: Tokens, corpus: Corpus, folder: Path, say: Callable[[str], None]) -> Tokenizer:
    """The folder's tokenizer, made if it is not there yet."""
    if not (folder / TOKENIZER).is_dir():
        if tokens.tokenizer is not None:
            tokenizer = _given_tokenizer(tokens)
        else:
            say("training a tokenizer")
            sentences = corpus.sentences(TOKENIZER_CHARS)
            tokenizer = train_tokenizer(sentences, vocab_size=tokens.vocab_size, cased=tokens.cased)
        partial = folder / WORK / TOKENIZER
        try:
            shutil.rmtree(partial, ignore_errors=True)
            save_tokenizer(tokenizer, partial, model_max_length=MAX_POSITIONS)
            partial.rename(folder / TOKENIZER)
        except OSError as error:
            raise storage_error(error, folder) from error
    tokenizer = load_tokenizer(folder / TOKENIZER)
    say(f"tokenizer: {tokenizer.get_vocab_size():,} pieces")
    return tokenizer


class _Report:
    """Progress with the time that is left: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Bar | None = None

    def begin(self, name: str, parts: list[Part]) -> OnProgress:
        self.close()
        self.name, self.sizes = name, [part.num_bytes for part in parts]
        self.total = sum(self.sizes)
        self.latest: dict[int, Progress] = {}
        self.done = self.kept = self.documents = self.tokens = 0
        self.started = self.last_line = time.perf_counter()
        if self.console.is_terminal:
            columns = (TextColumn(name), BarColumn(bar_width=None), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=self.console)
            self._task = self._bar.add_task("", total=self.total)
            self._bar.start()
        return self.update

    def _bytes(self, progress: Progress | None) -> int:
        """Of a part, by its size in the corpus: what it holds decompressed is not known before."""
        if progress is None:
            return 0
        size = self.sizes[progress.part]
        return size if progress.finished else min(size, progress.text_bytes)

    def update(self, progress: Progress) -> None:
        before = self.latest.get(progress.part)
        self.latest[progress.part] = progress
        step = self._bytes(progress) - self._bytes(before)
        self.done += step
        self.kept += step if progress.kept else 0
        self.documents += progress.documents - (before.documents if before else 0)
        self.tokens += progress.tokens - (before.tokens if before else 0)
        now = time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=self._line(now))
        elif now - self.last_line >= _LINE_SECONDS:
            self.last_line = now
            self.console.print(f"{self.name}: {self._line(now)}", highlight=False, soft_wrap=True)

    def _line(self, now: float) -> str:
        rate = max(self.done - self.kept, 1) / max(now - self.started, 1e-3)
        left = timedelta(seconds=round((self.total - self.done) / rate)) if self.done > self.kept else "?"
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        return (
            f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {self.documents:,} documents{tokens}, "
            f"{rate / 1e6:.2f} MB/s, eta {left}"
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


if __name__ == "__main__":
    sys.exit(main())
