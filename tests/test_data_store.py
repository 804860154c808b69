"""The document store: exact contents, sharing, and what a failed or killed build leaves behind."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from fastbert.data import shards
from fastbert.data.cache import build_store
from fastbert.data.corpus import Corpus, open_corpus
from fastbert.data.store import DocumentStore
from fastbert.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer, vocabulary_size
from fastbert.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


class ListSource:
    """Documents from a list; `fail_after` raises behind that many."""

    def __init__(self, documents: list[list[str]], fail_after: int | None = None) -> None:
        self.list = documents
        self.fail_after = fail_after

    def documents(self) -> Iterator[list[str]]:
        for index, document in enumerate(self.list):
            if index == self.fail_after:
                raise RuntimeError("power cut")
            yield document

    def digest(self) -> str:
        return json.dumps(self.list)

    listing = digest
    num_bytes = 1

    def pieces(self, target_bytes: int) -> Iterator[ListSource]:
        yield self


def corpus_of(documents: list[list[str]], fail_after: int | None = None) -> Corpus:
    return Corpus("list", "a list", [ListSource(documents, fail_after)])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*SPECIAL_TOKENS, "a", "b", "un", "##a", "##b", "中", "."]), encoding="utf-8")
    return load_tokenizer(vocab)


DOCUMENTS = [["a unab .", "\u200b", "b"], ["\u200b", "\ufffd"], ["中中", "q unba"], ["a"]]


def as_lists(store: DocumentStore) -> list[tuple[list[int], list[int], list[int]]]:
    return [tuple(part.tolist() for part in store.document(i)) for i in range(len(store))]  # type: ignore[misc]


EXPECTED = [
    # a un ##a ##b . | b; the sentence of a zero-width space is gone
    ([5, 7, 8, 9, 11, 6], [1, 1, 0, 0, 1, 1], [5, 1]),
    # each Han character is a word; q is unknown
    ([10, 10, 1, 7, 9, 8], [1, 1, 1, 1, 0, 0], [2, 4]),
    ([5], [1], [1]),
]


@pytest.mark.parametrize("batch_chars", [1, 10, 1 << 19], ids=["a-document", "some", "all"])
def test_contents(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, batch_chars: int
) -> None:
    monkeypatch.setattr(shards, "_BATCH_CHARS", batch_chars)
    progress: list[tuple[int, int]] = []
    store = build_store(
        corpus_of(DOCUMENTS), tokenizer, tmp_path / "cache", on_progress=lambda *now: progress.append(now)
    )
    assert as_lists(store) == EXPECTED
    assert [part.dtype for part in store.document(0)] == [np.int32, np.uint8, np.int32]
    assert store.document_lengths.tolist() == [6, 6, 1]
    assert store.document_lengths.dtype == np.int64
    assert (len(store), store.num_tokens, store.num_sentences, store.vocab_size) == (3, 13, 5, 12)
    assert store.unk_share == 1 / 13
    assert progress[-1] == (3, 13)
    counts = store.unigram_counts
    assert counts.tolist() == [0, 1, 0, 0, 0, 2, 1, 2, 2, 2, 2, 1]
    # -sum p ln p: three ids once, five twice, of 13
    assert store.unigram_entropy == pytest.approx(math.log(13) - 10 / 13 * math.log(2), rel=1e-12)
    with pytest.raises(IndexError):
        store.document(3)


def test_a_word_starts_at_each_sentence(tmp_path: Path, tokenizer: Tokenizer) -> None:
    # both sentences end and begin with word number 0, so only the sentence border tells the words apart
    store = build_store(corpus_of([["una", "unb"]]), tokenizer, tmp_path / "cache")
    assert store.document(0)[1].tolist() == [1, 0, 1, 0]


def test_arrow_stream_has_a_row_a_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    store = build_store(corpus_of(DOCUMENTS), tokenizer, tmp_path / "cache")
    with pa.memory_map(str(store.path / "shards" / "000000-000.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert [str(kind) for kind in table.schema.types] == [
        "list<item: int32>",
        "list<item: uint8>",
        "list<item: int32>",
    ]
    assert [tuple(row.values()) for row in table.to_pylist()] == EXPECTED


def test_built_once_and_keyed_by_text_and_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    cache = tmp_path / "cache"
    first = build_store(corpus_of(DOCUMENTS), tokenizer, cache)
    again = build_store(corpus_of(DOCUMENTS, fail_after=0), tokenizer, cache)  # would fail if it read
    assert again.path == first.path
    other_text = build_store(corpus_of(DOCUMENTS[:1]), tokenizer, cache)
    other_tokenizer = build_store(corpus_of(DOCUMENTS), train_tokenizer(["a unab"]), cache)
    assert len({first.path, other_text.path, other_tokenizer.path}) == 3
    assert sorted(cache.iterdir()) == sorted({first.path, other_text.path, other_tokenizer.path})


def test_pickles_as_a_path_and_opens_in_another_process(tmp_path: Path, tokenizer: Tokenizer) -> None:
    store = build_store(corpus_of(DOCUMENTS), tokenizer, tmp_path / "cache")
    store.document(0)
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert as_lists(pickle.loads(data)) == EXPECTED
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).document(1)[0].tolist())"
    done = subprocess.run([sys.executable, "-c", code], input=data, cwd=ROOT, capture_output=True, check=True)
    assert json.loads(done.stdout) == EXPECTED[1][0]


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_many_processes_with_a_cold_cache(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Public case C-11: all get the same store, whoever was first, and nobody reads a half-written one."""
    text = tmp_path / "text.txt"
    text.write_text("a b.\nunab.\n\n" * 100)
    code = f"""
import multiprocessing
from pathlib import Path
from fastbert.data.cache import build_store
from fastbert.data.corpus import open_corpus
from fastbert.data.tokenizer import load_tokenizer
processes = multiprocessing.get_context("fork")
corpus, tokenizer = open_corpus([{str(text)!r}]), load_tokenizer({str(tmp_path / "vocab.txt")!r})
ready, results = processes.Barrier(4), processes.SimpleQueue()
def build():
    for turn in range(10):
        ready.wait()
        store = build_store(corpus, tokenizer, Path({str(tmp_path)!r}) / f"cache-{{turn}}")
        results.put((store.key, sum(int(store.document(i)[0].sum()) for i in range(len(store)))))
children = [processes.Process(target=build) for _ in range(4)]
for child in children:
    child.start()
for child in children:
    child.join()
print([child.exitcode for child in children], *(results.get() for _ in range(40)), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    status, *said = done.stdout.splitlines()
    assert status == "[0, 0, 0, 0]", done.stderr
    assert len(said) == 40
    assert len(set(said)) == 1
    assert all(len(list((tmp_path / f"cache-{turn}").iterdir())) == 1 for turn in range(10))


def test_nothing_to_store_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="corpus list holds no token"):
        build_store(corpus_of([["\u200b"]]), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_build_leaves_nothing(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_BATCH_CHARS", 1)
    with pytest.raises(RuntimeError, match="power cut"):
        build_store(corpus_of(DOCUMENTS, fail_after=2), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert as_lists(build_store(corpus_of(DOCUMENTS), tokenizer, tmp_path / "cache")) == EXPECTED


def test_a_full_disk_is_said_and_cleaned_up(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.np, "save", full)
    with pytest.raises(UserError, match=r"no space left for the tokenized corpus in .*cache: free some"):
        build_store(corpus_of(DOCUMENTS), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
def test_a_file_size_limit_while_writing_arrow_is_said(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from fastbert.data.cache import build_store
from fastbert.data.corpus import Corpus
from fastbert.data.tokenizer import train_tokenizer
from fastbert.errors import UserError
class Source:
    num_bytes = 1
    def pieces(self, target):
        yield self
    def documents(self):
        return iter([["a b c d " * 100]] * 2000)
    def digest(self):
        return "x"
tokenizer = train_tokenizer(["a b c d"])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    build_store(Corpus("x", "x", [Source()]), tokenizer, Path(sys.argv[1]))
except UserError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no space left for the tokenized corpus"), done.stdout
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write the tokenized corpus to .*file"):
        build_store(corpus_of(DOCUMENTS), tokenizer, tmp_path / "file")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_build_leaves_no_store(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b.\nunab.\n\n" * 200)
    code = f"""
import os, signal
from pathlib import Path
from fastbert.data import cache, shards
from fastbert.data.corpus import open_corpus
from fastbert.data.tokenizer import load_tokenizer
shards._BATCH_CHARS = 100
cache.build_store(open_corpus([{str(text)!r}]), load_tokenizer({str(tmp_path / "vocab.txt")!r}),
    Path({str(tmp_path / "cache")!r}), on_progress=lambda *now: os.kill(os.getpid(), signal.SIGKILL))
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (half,) = (tmp_path / "cache").iterdir()
    assert half.name.startswith(".")
    for path in [half, *half.rglob("*")]:  # as if it had been killed two hours ago
        os.utime(path, (path.stat().st_mtime - 7200,) * 2)
    store = build_store(open_corpus([str(text)]), tokenizer, tmp_path / "cache")
    assert len(store) == 200
    assert list((tmp_path / "cache").iterdir()) == [store.path]


def test_damage_is_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = build_store(corpus_of(DOCUMENTS * 50), tokenizer, tmp_path / "cache").path
    (path / "unigram_counts.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"unigram_counts.npy is not what its manifest says"):
        DocumentStore.open(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="holds no readable store"):
        DocumentStore.open(path)
    (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"holds no prepared data set \(it has no manifest.json\)"):
        DocumentStore.open(path)


def test_vocabulary_size_is_the_largest_id_and_one(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*SPECIAL_TOKENS, "a", "", "a", "b"]))
    tokenizer = load_tokenizer(vocab)  # ids 5 and 6 are holes
    store = build_store(corpus_of([["a b"]]), tokenizer, tmp_path / "cache")
    assert store.document(0)[0].tolist() == [7, 8]
    assert store.vocab_size == vocabulary_size(tokenizer) == 9


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    code = """
import random, resource, sys
from pathlib import Path
from fastbert.data.cache import build_store
from fastbert.data.corpus import open_corpus
from fastbert.data.tokenizer import train_tokenizer
words = ["w%d" % i for i in range(3000)]
rng = random.Random(0)
def write(path, megabytes):
    with open(path, "w") as file:
        for _ in range(megabytes * 10):
            for _ in range(100):
                file.write(" ".join(rng.choices(words, k=180)) + ".\\n")
            file.write("\\n")
    return open_corpus([str(path)], format="sentences")
folder = Path(sys.argv[1])
tokenizer = train_tokenizer([" ".join(words)] * 4, vocab_size=4000)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = build_store(write(folder / "small.txt", 2), tokenizer, folder / "cache")
after_small = peak()
large = build_store(write(folder / "large.txt", 10), tokenizer, folder / "cache")
print(small.num_tokens, large.num_tokens, after_small, peak())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    small, large, after_small, after_large = map(int, done.stdout.split())
    assert large == pytest.approx(5 * small, rel=0.01)
    assert after_large < 1.2 * after_small
