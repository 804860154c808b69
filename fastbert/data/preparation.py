"""Corpus -> a prepared data set, by any number of processes, and resumable: what `fastbert.prepare` does.

    corpus -> parts -> [hash pass: which documents are copies] -> write pass: filters, tokens, shards -> index

Each part is the work of one process, and every file it gives depends on the part and the options alone, so
any number of processes writes the same bytes. A journal names the finished shards; the next start after a
kill verifies them and goes on behind them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from fastbert.data.corpus import Corpus, Part
from fastbert.data.dedup import Buckets, hash_part, read_keep, write_keep
from fastbert.data.shards import (
    ShardRecord,
    WriteOptions,
    shard_counts,
    storage_error,
    write_index,
    write_part,
)
from fastbert.data.store import SHARDS, TOKENIZER, DocumentStore
from fastbert.data.tokenizer import load_tokenizer, vocabulary_size
from fastbert.errors import UserError

WORK = ".work"  # of an unfinished preparation, inside its folder
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Progress:
    """How far a part is in a pass: bytes and documents read, tokens written; `kept` by an earlier start."""

    part: int
    text_bytes: int
    documents: int
    tokens: int
    kept: bool = False
    finished: bool = False


OnProgress = Callable[[Progress], None]


def prepare_store(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    options: WriteOptions,
    description: dict[str, Any],
    *,
    deduplicate: bool = False,
    num_proc: int = 1,
    on_pass: Callable[[str, list[Part]], OnProgress],
) -> DocumentStore:
    """Write the data set of a corpus into `folder`, or what is missing of it.

    The folder holds the tokenizer already, and nobody else writes there. `on_pass` is told the name and the
    parts of each pass before it begins, and returns what is told its progress. Raises UserError for what the
    corpus cannot read, a disk that is full, a corpus of which nothing is left and a process that was killed;
    finished shards stay.
    """
    work = folder / WORK
    try:
        (folder / SHARDS).mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        for leftover in (folder / SHARDS).glob(".*.partial"):
            leftover.unlink()
        parts = list(corpus.parts(options.shard_bytes))
        context = _Context(folder, options)
        keep: _Keep | None = None
        if deduplicate:
            keep = _hash_pass(parts, work, context, num_proc, on_pass)
        records, counts = _write_pass(parts, keep, work, context, tokenizer, num_proc, on_pass)
        write_index(folder, records, counts, tokenizer, description)
    except OSError as error:
        raise _go_on_later(storage_error(error, folder), work) from error
    except BrokenProcessPool as error:
        killed = UserError("a process was killed, perhaps for lack of memory: try a smaller --num-proc")
        raise _go_on_later(killed, work) from error
    except UserError as error:
        raise _go_on_later(error, work) from error
    shutil.rmtree(work, ignore_errors=True)
    return DocumentStore.open(folder)


def _go_on_later(error: UserError, work: Path) -> UserError:
    finished = sum(1 for entry in _Journal(work / "shards.jsonl").read() if entry["path"])
    if not finished:
        return error
    kept = "1 finished shard is" if finished == 1 else f"{finished:,} finished shards are"
    return UserError(f"{error}; {kept} kept, and the same command goes on behind them")


class _Journal:
    """JSON lines that are on disk when `add` returns; a line that a kill cut short is none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        entries = []
        for line in self.path.read_bytes().split(b"\n"):
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        return entries

    def add(self, entry: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            # a line that was cut short ends here
            file.write(b"\n" + json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


# the two passes


@dataclass(frozen=True)
class _Keep:
    """Which documents the hash pass leaves."""

    path: Path
    starts: np.ndarray  # [parts + 1] int64

    def of(self, part: int) -> np.ndarray:
        return read_keep(self.path, int(self.starts[part]), int(self.starts[part + 1]))


def _hash_pass(
    parts: list[Part],
    work: Path,
    context: _Context,
    num_proc: int,
    on_pass: Callable[[str, list[Part]], OnProgress],
) -> _Keep:
    journal = _Journal(work / "hashed.jsonl")
    documents = {entry["part"]: entry["documents"] for entry in journal.read()}
    path = work / "keep.npy"
    if len(documents) < len(parts) or not path.exists():
        report = on_pass("looking for copies", parts)
        buckets = Buckets(work / "hashes")
        for number in documents:
            report(Progress(number, parts[number].num_bytes, documents[number], 0, kept=True, finished=True))

        def handle(records: np.ndarray, number: int) -> None:
            buckets.add(records)
            journal.add({"part": number, "documents": len(records)})
            documents[number] = len(records)
            report(Progress(number, parts[number].num_bytes, len(records), 0, finished=True))

        missing = (_Hash(part) for part in parts if part.number not in documents)
        _run(missing, lambda message: handle(*message), context, num_proc)
        write_keep(buckets, [documents[part.number] for part in parts], path)
        shutil.rmtree(work / "hashes", ignore_errors=True)
    counts = [documents[part.number] for part in parts]
    return _Keep(path, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _write_pass(
    parts: list[Part],
    keep: _Keep | None,
    work: Path,
    context: _Context,
    tokenizer: Tokenizer,
    num_proc: int,
    on_pass: Callable[[str, list[Part]], OnProgress],
) -> tuple[list[ShardRecord], np.ndarray]:
    report = on_pass("tokenizing", parts)
    journal = _Journal(work / "shards.jsonl")
    finished: dict[int, dict[int, ShardRecord]] = defaultdict(dict)
    for entry in journal.read():
        record = ShardRecord(**entry)
        finished[record.part][record.ordinal] = record
    counts = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
    records: list[ShardRecord] = []

    def handle(message: Progress | _Finished) -> None:
        if isinstance(message, Progress):
            report(message)
            return
        if message.is_new:
            journal.add(asdict(message.record))
        records.append(message.record)
        np.add(counts, message.counts, out=counts)

    def tasks() -> Iterator[_Write]:
        for part in parts:
            yield _Write(part, _in_order(finished[part.number]), keep)

    _run(tasks(), handle, context, num_proc)
    return records, counts


def _in_order(finished: dict[int, ShardRecord]) -> tuple[ShardRecord, ...]:
    """The records of a part's first shards, as far as there are all."""
    records: list[ShardRecord] = []
    while len(records) in finished:
        records.append(finished[len(records)])
        if records[-1].last:
            break
    return tuple(records)


# what the processes do


@dataclass(frozen=True)
class _Context:
    folder: Path
    options: WriteOptions


class _Task(Protocol):
    def run(self, context: _Context, send: Callable[[Any], None]) -> None: ...


@dataclass(frozen=True)
class _Finished:
    record: ShardRecord
    counts: np.ndarray
    is_new: bool


@dataclass(frozen=True)
class _Hash:
    part: Part

    def run(self, context: _Context, send: Callable[[Any], None]) -> None:
        send((hash_part(self.part), self.part.number))


@dataclass(frozen=True)
class _Write:
    part: Part
    finished: tuple[ShardRecord, ...]  # by an earlier start: the first that is damaged is written again
    keep: _Keep | None

    def run(self, context: _Context, send: Callable[[Any], None]) -> None:
        folder = context.folder
        tokenizer = load_tokenizer(folder / TOKENIZER)
        number, read, ordinal, text_bytes, documents, tokens = self.part.number, 0, 0, 0, 0, 0
        for record in self.finished:
            counts = shard_counts(folder, record, vocabulary_size(tokenizer))
            if counts is None:
                break
            send(_Finished(record, counts, is_new=False))
            read, ordinal = record.read, record.ordinal + 1
            text_bytes += record.text_bytes
            documents += record.documents
            tokens += record.tokens
            send(Progress(number, text_bytes, documents, tokens, kept=True, finished=record.last))
            if record.last:
                return

        def progress(new_bytes: int, new_documents: int, new_tokens: int) -> None:
            send(Progress(number, text_bytes + new_bytes, documents + new_documents, tokens + new_tokens))

        for record, counts in write_part(
            self.part,
            folder,
            tokenizer,
            context.options,
            read=read,
            ordinal=ordinal,
            keep=None if self.keep is None else self.keep.of(number),
            on_progress=progress,
        ):
            send(_Finished(record, counts, is_new=True))
            text_bytes += record.text_bytes
            documents += record.documents
            tokens += record.tokens
            if record.last:
                send(Progress(number, text_bytes, documents, tokens, finished=True))


# processes


def _run(tasks: Iterable[_Task], handle: Callable[[Any], None], context: _Context, num_proc: int) -> None:
    """Run the tasks and handle, here and one at a time, what they send."""
    if num_proc == 1:
        for task in tasks:
            task.run(context, handle)
        return
    # forked from a small process that has imported everything, or started anew where there is no fork
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    processes = multiprocessing.get_context(method)
    if method == "forkserver":
        processes.set_forkserver_preload([__name__])
    messages = processes.SimpleQueue()
    before = set(multiprocessing.active_children())
    waiting, running = iter(tasks), set[Future[None]]()
    pool = ProcessPoolExecutor(num_proc, processes, _start_worker, (context, messages))
    try:
        while True:
            for task in islice(waiting, 2 * num_proc - len(running)):
                running.add(pool.submit(_run_task, task))
            done, running = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            while not messages.empty():  # what a finished task sent is in there
                handle(messages.get())
            for future in done:
                future.result()
            if not running and not done:
                break
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[_Context, Any]


def _start_worker(context: _Context, messages: Any) -> None:
    global _worker
    _worker = (context, messages)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is parallel enough
    for number in (signal.SIGINT, signal.SIGTERM):  # of the whole group: the parent ends its processes itself
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process whose parent was killed must not write beside that of the next start."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _run_task(task: _Task) -> None:
    context, messages = _worker
    task.run(context, messages.put)
