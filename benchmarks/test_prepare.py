"""Preparing a data set: megabytes of text a second and core, and what a second process adds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.workloads import VOCAB_SIZE
from fastbert.data.corpus import open_corpus
from fastbert.data.preparation import prepare_store
from fastbert.data.shards import WriteOptions
from fastbert.data.tokenizer import save_tokenizer, train_tokenizer

_COPIES = 4  # of the built-in corpus of 2 MB: processes need a second to start


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in corpus as a file that can be cut: a sentence a line."""
    documents = ["\n".join(document) for document in open_corpus(None).documents()]
    path = tmp_path_factory.mktemp("text") / "docs.txt"
    path.write_text("\n\n".join(documents * _COPIES), encoding="utf-8")
    return path


@pytest.mark.parametrize("options", ["plain", "dedup"])
@pytest.mark.parametrize("num_proc", [1, 2])
def test_prepare(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    benchmark: BenchmarkFixture,
    num_proc: int,
    options: str,
) -> None:
    if num_proc > (os.cpu_count() or 1):
        pytest.skip(f"{num_proc} processes on {os.cpu_count()} cores say nothing")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    corpus = open_corpus([str(text)], format="sentences")
    tokenizer = train_tokenizer(corpus.sentences(2_000_000), vocab_size=VOCAB_SIZE)
    folders = iter(range(100))

    def fresh_folder() -> tuple[tuple[Path], dict[str, Any]]:
        folder = tmp_path / str(next(folders))
        save_tokenizer(tokenizer, folder / "tokenizer")
        return (folder,), {}

    def prepare(folder: Path) -> None:
        prepare_store(
            corpus,
            tokenizer,
            folder,
            WriteOptions(shard_bytes=500_000),
            {"corpus": corpus.description, "name": corpus.name},
            deduplicate=options == "dedup",
            num_proc=num_proc,
            on_pass=lambda name, parts: lambda progress: None,
        )

    benchmark.pedantic(prepare, setup=fresh_folder, rounds=3)
    if benchmark.stats is not None:
        rate = text.stat().st_size / 1e6 / benchmark.stats.stats.median
        benchmark.extra_info |= {"mb_per_s": round(rate, 3), "mb_per_s_core": round(rate / num_proc, 3)}
