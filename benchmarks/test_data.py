"""The data pipeline: how full the packs are, and how many real tokens a second one worker process makes."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.workloads import wikipedia_512, wikipedia_512_histogram, windows_of
from fastbert.data.loader import (
    BATCHES_PER_WINDOW,
    PackedLoader,
    Vocabulary,
    WindowBuilder,
    batches_of,
)
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


ROWS = 32  # of a padded batch
WINDOW = 50  # batches that are sorted together, as transformers' group_by_length does


def histograms() -> dict[str, np.ndarray]:
    """Lengths up to 512 (index n-1: how many of n tokens)."""
    n = np.arange(1, 513)
    geometric = {f"geometric, mean {mean}": (1 - 1 / mean) ** n * 1e6 for mean in (24, 60, 128)}
    return {
        "Wikipedia at 512": wikipedia_512_histogram(),
        "uniform": np.full(512, 2000),
        **{name: counts.astype(np.int64) for name, counts in geometric.items()},
    }


@pytest.mark.parametrize("name", histograms())
def test_packing_fill(name: str, benchmark: BenchmarkFixture) -> None:
    """The share of slots that hold a token: in packs, and in batches of 32 rows that are padded."""
    histogram = histograms()[name]
    groups = benchmark.pedantic(pack_histogram, args=(histogram, 512), rounds=5, warmup_rounds=1)
    packed = sum(count * sum(lengths) for count, lengths in groups)
    n = np.arange(1, 513)
    assert packed == histogram @ n, "every token is in a pack"
    share = histogram / histogram.sum()
    mean = float(share @ n)
    # the longest of a batch is at most n with probability (share up to n) ** rows
    at_most = np.cumsum(share) ** ROWS
    longest = float(np.diff(at_most, prepend=0.0) @ n)
    drawn = np.random.default_rng(0).choice(n, size=(20, WINDOW * ROWS), p=share)
    in_order = np.sort(drawn, axis=1).reshape(-1, ROWS)
    benchmark.extra_info |= {
        "fill": {
            "packed, LPFHP": round(packing_efficiency(groups, 512), 5),
            "sorted in windows of 50": round(float(in_order.sum() / (in_order[:, -1] * ROWS).sum()), 4),
            "padded to the longest of 32": round(mean / longest, 4),
            "padded to 512": round(mean / 512, 4),
        },
        "mean_length": round(mean, 1),
        "mix": name,
    }


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
    stream = iter(PackedLoader(windows, workers=1))
    tokens: list[int] = []

    def take_a_window() -> None:
        tokens.append(sum(next(stream).num_tokens for _ in range(BATCHES_PER_WINDOW)))

    # the first rounds take what the worker made ahead while this process started
    benchmark.pedantic(take_a_window, rounds=6, warmup_rounds=3)
    if benchmark.stats is not None:
        # the mean, not the median: single rounds find a window ready, or wait for one
        benchmark.extra_info["tokens_per_s"] = round(sum(tokens[3:]) / 6 / benchmark.stats.stats.mean)
