"""Harness: pytest-benchmark, rows that name machine, versions and commit, and sides measured in turns."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.environment import commit, of_cpu, of_gpu
from benchmarks.machine import measured_roof
from benchmarks.memory import of_calls
from benchmarks.peers import Compiler
from benchmarks.task import Call, Check, Roof, Task, figures, is_the_basis, near
from benchmarks.workloads import python_docs
from fastbert.data.loader import Vocabulary
from fastbert.data.store import DocumentStore
from fastbert.ops import backend

SAME = 1e-3  # relative: what sides without a check of their own may differ by
RESULTS = Path(__file__).parent / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="append the rows to benchmarks/results/")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def environment_of(device: torch.device) -> dict[str, Any]:
    return of_cpu() if device.type == "cpu" else of_gpu(device, commit())


@pytest.fixture
def environment(request: pytest.FixtureRequest, device: torch.device) -> dict[str, Any]:
    """Of the GPU, where there is one, for rows that are held against its rates; the others run on the CPU."""
    return environment_of(device if "roof" in request.fixturenames else torch.device("cpu"))


@pytest.fixture(scope="session")
def roof(device: torch.device) -> Roof:
    """Measured once a session: the rates that floors, shares and MFU are made of."""
    return measured_roof(device)


@pytest.fixture
def compiler() -> Compiler:
    """torch.compile, with a limit on the time that a row may spend in it."""
    return Compiler()


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
def in_turns(benchmark: BenchmarkFixture, device: torch.device) -> Callable[..., None]:
    """Time the sides of one task alternately, so that a busy moment hits all of them.

    in_turns(task, rounds) takes a `Task`, which has checked each of its sides; in_turns(sides, rounds,
    amount, unit) takes name -> call, and checks that all calls return what the first one does, to a
    thousandth. So nothing is timed that computes something else. The first side is the row's own; medians,
    quantiles and rates (amount of `unit` a second) of all sides and how many times faster the first one is go
    into its extra_info.
    """

    def measure(sides: Task | dict[str, Call], rounds: int, amount: float = 0.0, unit: str = "") -> None:
        task = sides if isinstance(sides, Task) else compared(sides, amount, unit)
        problems = task.failures()
        assert not problems, "; ".join(problems)
        first, *others = task.sides
        calls = {name: finished(call, device) for name, call in task.sides.items()}
        seconds: dict[str, list[float]] = {name: [] for name in others}

        def run_the_others() -> None:
            for name in others:
                start = time.perf_counter()
                calls[name]()
                seconds[name].append(time.perf_counter() - start)

        if task.flop or task.bytes:
            benchmark.extra_info |= of_calls(task.sides, device)
        with mock.patch.object(backend, "_last_run", {}):
            benchmark.pedantic(calls[first], setup=run_the_others, rounds=rounds, warmup_rounds=1)
            if "ran" not in task.notes:
                benchmark.extra_info["ran"] = backend.last_run()
        benchmark.extra_info |= task.notes | ({"refused": task.refused} if task.refused else {})
        if benchmark.stats is None:  # --benchmark-disable: the sides ran once
            return
        # without the warm-up rounds
        times = {first: list(benchmark.stats.stats.data)}
        times |= {name: values[-rounds:] for name, values in seconds.items()}
        in_ms = {name: [1e3 * s for s in values] for name, values in times.items()}
        benchmark.extra_info |= figures(task, in_ms, first)

    return measure


def compared(sides: dict[str, Call], amount: float, unit: str) -> Task:
    """A task of sides that all return what the first one does. AssertionError if one does not."""
    task = Task(amount, unit.removesuffix("s"))
    check: Check = is_the_basis
    for name, call in sides.items():
        result = call()
        assert result is not None, f"{name} returns nothing to compare"
        assert not check(result), f"{name}: {check(result)}"
        if check is is_the_basis:
            check = near(result, SAME)
        task.sides[name] = call
    return task


def finished(call: Call, device: torch.device) -> Call:
    """`call`, and the device is done with it."""
    if device.type != "cuda":
        return call

    def run() -> None:
        call()
        torch.cuda.synchronize(device)

    return run


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> tuple[DocumentStore, Vocabulary]:
    return python_docs(tmp_path_factory.mktemp("store"))
