"""Harness: pytest-benchmark, rows that name machine, versions and commit, and sides measured in turns."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.environment import of_cpu
from benchmarks.workloads import python_docs
from fastbert.data.loader import Vocabulary
from fastbert.data.store import DocumentStore

RESULTS = Path(__file__).parent / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="append the rows to benchmarks/results/")


@pytest.fixture(scope="session")
def environment() -> dict[str, Any]:
    return of_cpu()


@pytest.fixture(autouse=True)
def _row(request: pytest.FixtureRequest, environment: dict[str, Any]) -> Iterator[None]:
    """Every row carries the environment; `--record` appends it to the results of this kind of machine."""
    torch.manual_seed(0)
    benchmark: BenchmarkFixture = request.getfixturevalue("benchmark")
    yield
    if benchmark.stats is None:
        return
    benchmark.extra_info.update(environment)
    if not request.config.getoption("--record"):
        return
    stats = benchmark.stats.stats
    row = {
        "name": benchmark.name,
        "median_s": stats.median,
        "min_s": stats.min,
        "max_s": stats.max,
        "iqr_s": stats.iqr,
        "rounds": stats.rounds,
        **benchmark.extra_info,
    }
    with (RESULTS / f"{environment['host_kind']}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture
def in_turns(benchmark: BenchmarkFixture) -> Callable[..., None]:
    """Measure several sides of one task alternately, so that a busy moment hits all of them.

    in_turns(sides, rounds, amount, unit): the first side is the row's own; medians, rates (amount of `unit`
    a second) and how many times faster the first side is go into its extra_info.
    """

    def measure(sides: dict[str, Callable[[], object]], rounds: int, amount: float, unit: str) -> None:
        first, *others = sides
        seconds: dict[str, list[float]] = {name: [] for name in others}

        def run_the_others() -> None:
            for name in others:
                start = time.perf_counter()
                sides[name]()
                seconds[name].append(time.perf_counter() - start)

        benchmark.pedantic(sides[first], setup=run_the_others, rounds=rounds, warmup_rounds=1)
        if benchmark.stats is None:  # --benchmark-disable: the sides ran once
            return
        medians = {first: benchmark.stats.stats.median}
        medians |= {name: statistics.median(times[-rounds:]) for name, times in seconds.items()}
        benchmark.extra_info["ms"] = {name: round(1e3 * m, 2) for name, m in medians.items()}
        benchmark.extra_info[f"{unit}_per_s"] = {name: round(amount / m) for name, m in medians.items()}
        benchmark.extra_info["times_faster_than"] = {
            name: round(medians[name] / medians[first], 2) for name in others
        }

    return measure


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> tuple[DocumentStore, Vocabulary]:
    return python_docs(tmp_path_factory.mktemp("store"))
