"""The data pipeline: how full the packs are, and how many real tokens a second one worker process makes."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.workloads import wikipedia_512, wikipedia_512_histogram, windows_of
from fastbert.data.loader import PackedLoader, Vocabulary, WindowBuilder, batches_of
from fastbert.data.packing import pack_histogram, packing_efficiency
from fastbert.data.store import DocumentStore


@pytest.fixture(params=["wikipedia-512", "python-docs-128"])
def windows(request: pytest.FixtureRequest, docs: tuple[DocumentStore, Vocabulary]) -> WindowBuilder:
    """At the token budgets of the commands: 32,768 on a GPU, 1,024 on a CPU."""
    if request.param == "wikipedia-512":
        return wikipedia_512(tokens_per_batch=32768)
    return windows_of(*docs, seq_len=128, tokens_per_batch=1024)


def test_pack_histogram(benchmark: BenchmarkFixture) -> None:
    """16.3 million sequences at 512; published: 99.949 % full, two times fewer packs than sequences."""
    histogram = wikipedia_512_histogram()
    groups = benchmark.pedantic(pack_histogram, args=(histogram, 512), rounds=5, warmup_rounds=1)
    fill = packing_efficiency(groups, 512)
    num_packs = sum(count for count, _ in groups)
    assert num_packs == 8_138_483
    benchmark.extra_info |= {"fill": round(fill, 5), "sequences_per_pack": histogram.sum() / num_packs}


def test_build_window(windows: WindowBuilder, benchmark: BenchmarkFixture) -> None:
    """What a worker does: instances, packs, masks and batches of one window."""
    window = benchmark.pedantic(windows.__getitem__, args=(1,), rounds=5, warmup_rounds=1)
    batches = list(batches_of(window, windows.settings.seq_len))
    tokens = sum(batch.num_tokens for batch in batches)
    sequences = sum(batch.num_sequences() for batch in batches)
    benchmark.extra_info |= {
        "fill": round(tokens / sum(batch.num_slots for batch in batches), 5),
        "padding_avoided": round(1 - tokens / (sequences * windows.settings.seq_len), 3),
        "masked_share": round(sum(int((b.masked_labels >= 0).sum()) for b in batches) / tokens, 4),
    }
    if benchmark.stats is not None:
        benchmark.extra_info["tokens_per_s"] = round(tokens / benchmark.stats.stats.median)


def test_one_worker_process(windows: WindowBuilder, benchmark: BenchmarkFixture) -> None:
    """Windows as the training process gets them from one worker, transport included."""
    loader = PackedLoader(windows, workers=1)
    stream = iter(loader)
    tokens: list[int] = []

    def take_a_window() -> None:
        window, taken = loader.window, 0
        while loader.window == window:
            taken += next(stream).num_tokens
        tokens.append(taken)

    # the first rounds take what the worker made ahead while this process started
    benchmark.pedantic(take_a_window, rounds=6, warmup_rounds=3)
    if benchmark.stats is not None:
        # the mean, not the median: single rounds find a window ready, or wait for one
        benchmark.extra_info["tokens_per_s"] = round(sum(tokens[3:]) / 6 / benchmark.stats.stats.mean)
