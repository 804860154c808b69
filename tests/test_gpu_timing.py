"""How `gpu_check` times: rows, tables, clocks and tuning, with invented times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import launch
from fastbert_kernels.tune import TuningCase

from benchmarks import gpu_check
from benchmarks.gpu import operations, timing, tuning
from benchmarks.gpu.setting import TINY, Operation, Setting
from benchmarks.gpu.timing import ROUNDS, WARM_UP_ROUNDS, equals
from benchmarks.task import RATES, Case, Task, is_the_basis, row_of, table

CPU = torch.device("cpu")
COMMON = {"machine": "Imaginary X100", "torch": "2", "triton": "3", "commit": "c"}


def milliseconds(**sides: float) -> timing.Times:
    """Of each side: rounds around its median, the 20 % quantile a tenth below, the 80 % one a tenth above."""
    spread = [0.8] * 3 + [0.9] * 6 + [1.0] * 3 + [1.1] * 6 + [1.2] * 3
    return {name: [ms * factor for factor in spread] for name, ms in sides.items()}


# ---- rows and tables --------------------------------------------------------------------------------------


def task_of(**fields: Any) -> Task:
    task = Task(**{"amount": 2.0, "unit": "tflop", **fields})
    for name in ("fastbert a", "fastbert b", "peer", "slow peer"):
        task.sides[name] = lambda: None
    return task


def test_a_row_has_medians_quantiles_rates_and_shares() -> None:
    task = task_of(floor=800.0, target=350.0)
    task.refused, task.notes = {"cudnn": "does not run: X"}, {"tokens": 7}
    times = milliseconds(**{"fastbert a": 8.0, "fastbert b": 5.0, "peer": 4.0, "slow peer": 10.0})
    row = row_of("op[1]", task, times)
    assert row["ours"] == "fastbert b" and row["rounds"] == 21
    assert row["ms"] == {"fastbert a": 8.0, "fastbert b": 5.0, "peer": 4.0, "slow peer": 10.0}
    assert row["p20_ms"]["peer"] == 3.6 and row["p80_ms"]["peer"] == 4.4
    # 2 TFLOP in 5 ms
    assert row["tflops"]["fastbert b"] == 400.0
    assert row["share_of_floor"] == 0.5 and row["share_of_target"] == pytest.approx(1.143)
    assert row["times_faster_than"] == {"peer": 0.8, "slow peer": 2.0}
    assert row["refused"] == {"cudnn": "does not run: X"} and row["tokens"] == 7
    line = table([row]).splitlines()[2]
    assert line.split() == ["op[1]", "5", "400", "TFLOP/s", "50%", "350:", "met", "(114%)", "0.80x", "peer"]


def test_a_missed_target_and_a_row_without_sides_to_compare_with() -> None:
    task = Task(4.0, "gb", target=3000.0, sides={"torch copy_": lambda: None})
    line = table([row_of("copy", task, {"torch copy_": [2.0] * ROUNDS})]).splitlines()[2]
    assert line.split() == ["copy", "2", "2,000", "GB/s", "-", "3,000:", "missed", "(67%)", "-"]


@pytest.mark.parametrize(("unit", "key"), RATES.items())
def test_each_unit_has_its_rate(unit: str, key: str) -> None:
    row = row_of("row", task_of(amount=3.0, unit=unit), milliseconds(**dict.fromkeys(task_of().sides, 1.5)))
    assert row[key]["peer"] == 2000.0


def test_sides_that_do_not_run_or_differ_are_refused() -> None:
    right = torch.arange(4.0)
    task = Task(1.0, "call")

    def broken() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmany lines")

    task.admit("fastbert", lambda: lambda: right, equals((right,)))
    task.admit("peer", lambda: lambda: right + 1, equals((right,)))
    task.admit("large", broken, is_the_basis)
    task.admit("dropping", lambda: lambda: right * 0, equals((right,)), lambda: lambda: right)
    assert list(task.sides) == ["fastbert", "dropping"] and task.failures() == []
    assert task.refused["peer"].startswith("wrong result: output 0 is 1 away")
    assert task.refused["large"] == "does not run: OutOfMemoryError: CUDA out of memory."
    task.admit("fastbert too", lambda: lambda: right + 1, equals((right,)))
    assert task.failures()[0].startswith("fastbert too wrong result")
    assert Task(1.0, "call").failures() == ["no side ran"]


def test_rows_that_cannot_be_made_are_failures_and_late_ones_are_named(tmp_path: Path) -> None:
    deadline = gpu_check.Deadline(10)
    ran = []

    def broken() -> Task:
        raise RuntimeError("no kernel image\nmore")

    def last() -> Task:
        ran.append("last")
        deadline.end = time.monotonic()
        return task_of()

    cases = [Case("broken", broken), Case("last", last), Case("late", broken)]
    operation = Operation("op", (), lambda setting: iter(cases))
    rows, failures = gpu_check.measure(
        [operation], Setting(CPU, TINY), timing.dry_clocks(), deadline, COMMON, tmp_path / "rows.jsonl"
    )
    assert failures == ["broken: RuntimeError: no kernel image"]
    assert [row["name"] for row in rows] == ["last"] and deadline.left_out == ["late"]
    assert json.loads((tmp_path / "rows.jsonl").read_text())["machine"] == "Imaginary X100"


# ---- clocks -----------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU whose flush takes 1 ms, and whose host needs `host_s` to launch a call that takes 5 ms."""
    fake = SimpleNamespace(now=0.0, host=0.0, host_s=0.0, flushes=0)

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = fake.now

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Flush:
        def zero_(self) -> None:
            fake.flushes += 1
            fake.now += 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: fake.host)
    fake.clock = lambda ahead: timing.GpuClock(CPU, ahead)
    monkeypatch.setattr(timing.torch, "empty", lambda *args, **kwargs: Flush())
    return fake


@pytest.mark.parametrize(
    ("ahead", "host_s", "flushes"), [(True, 0.0041, 8), (True, 9.0, timing.MOST_FLUSHES), (False, 0.0041, 1)]
)
def test_the_gpu_is_busy_until_the_host_has_launched(
    ahead: bool, host_s: float, flushes: int, gpu: SimpleNamespace
) -> None:
    calls: list[str] = []

    def side(name: str) -> Callable[[], None]:
        def call() -> None:
            calls.append(name)
            gpu.now += 5.0
            gpu.host += host_s

        return call

    clock = gpu.clock(ahead)
    probes = 3 * ahead
    times = clock({"a": side("a"), "b": side("b")})
    assert times == {"a": [5.0] * ROUNDS, "b": [5.0] * ROUNDS}
    assert calls[2 * probes :] == ["a", "b"] * (WARM_UP_ROUNDS + ROUNDS)
    # the probe of the flush's own time is two of them
    assert gpu.flushes == 2 * (6 * ahead + (WARM_UP_ROUNDS + ROUNDS) * flushes)
    assert clock.once(side("a")) == 5.0


def test_the_host_clock_measures_a_call() -> None:
    sides = {"a": lambda: None, "b": lambda: time.sleep(2e-5)}
    times = timing.host_clock(sides)
    assert len(times["a"]) == ROUNDS and min(times["b"]) > 0.02


# ---- tuning -----------------------------------------------------------------------------------------------


@pytest.fixture
def tunable(monkeypatch: pytest.MonkeyPatch) -> list[TuningCase]:
    """Two operations with two candidates each; "second" is faster."""

    def prepare(device: torch.device) -> Callable[[Any], tuple[torch.Tensor, ...]]:
        def run(candidate: str) -> tuple[torch.Tensor, ...]:
            run.last = candidate  # type: ignore[attr-defined]
            return (torch.ones(3),)

        return run

    keys = [
        "fp16 head_dim 64 tile_rows 128 dropout",
        "bf16 head_dim 64 tile_rows 64",
        "bf16 head_dim 64 tile_rows 128",
    ]
    cases = [
        TuningCase(op, key, ("first", "second"), prepare, 1e9)
        for op in ("qkv_fwd", "attention_dq")
        for key in keys
    ]
    monkeypatch.setattr(tuning, "all_tuning_cases", lambda arch: cases)
    monkeypatch.setattr(tuning, "compile_in_parallel", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary X100")

    class Clock:
        def __init__(self, device: torch.device, ahead: bool) -> None:
            self.calls = 0

        def once(self, call: Callable[[], Any]) -> float:
            call()
            self.calls += 1
            return 2.0 if self.calls % 2 else 1.0

    monkeypatch.setattr(tuning, "GpuClock", Clock)
    return cases


def test_tuning_begins_with_what_training_uses(tunable: list[TuningCase]) -> None:
    order = [case.key for case in tuning.cases_in_order(CPU, {"attention"})]
    assert order == [tunable[5].key, tunable[4].key, tunable[3].key]
    assert len(tuning.cases_in_order(CPU, {"attention", "qkv"})) == 6


def test_compiling_in_other_processes(capsys: pytest.CaptureFixture[str]) -> None:
    # no operation is called so: the process that was to compile it says that there is no such case
    tuning.compile_in_parallel(CPU, {"nothing"}, [0], 120, processes=1)
    assert "compiled 0 of 1 cases in 1 processes\n    IndexError" in capsys.readouterr().out


def test_the_table_keeps_what_was_not_measured_again(tunable: list[TuningCase], tmp_path: Path) -> None:
    file = tmp_path / "imaginary.json"
    old = {"op": "qkv_fwd", "key": "bf16 old", "choice": "first"}
    tuning.write_rows(file, "Imaginary X100", [old, {**old, "key": tunable[4].key}], COMMON)
    assert tuning.tune_within(CPU, {"attention"}, 60, COMMON, file) == []
    rows = {(row["op"], row["key"]): row for row in launch.read_tuned_rows(file)}
    assert len(rows) == 5 and rows["qkv_fwd", "bf16 old"]["choice"] == "first"
    assert rows["attention_dq", tunable[4].key]["choice"] == "second"
    assert rows["attention_dq", tunable[4].key]["commit"] == "c"
    left_out = tuning.tune_within(CPU, {"qkv"}, -1, COMMON, file)
    # what has a row is not measured again
    assert len(left_out) == 2 and left_out[0] == f"qkv_fwd {tunable[2].key}"
    assert len(launch.read_tuned_rows(file)) == 5


def test_the_table_also_lies_beside_the_rows(
    tunable: list[TuningCase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "TUNED_FOLDER", tmp_path / "tuned")
    (tmp_path / "out").mkdir()
    deadline = gpu_check.Deadline(1)
    attention = next(op for op in operations.OPERATIONS if op.name == "attention")
    gpu_check.tune(Setting(CPU, TINY), [attention], deadline, COMMON, tmp_path / "out")
    assert deadline.left_out == []
    copy, table_file = tmp_path / "out" / "imaginary-x100.json", tmp_path / "tuned" / "imaginary-x100.json"
    assert len(launch.read_tuned_rows(copy)) == 3 and copy.read_text() == table_file.read_text()
