"""The tuning command and its tables, with a fake operation and a fake clock: no GPU is needed."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import launch, tune
from fastbert_kernels.launch import ARCHITECTURES, MatmulConfig, choose, read_tuned_rows, tuned_file
from fastbert_kernels.tune import ROUNDS, WARM_UP_ROUNDS, TuningCase, all_tuning_cases, tune_all

KERNELS = Path(launch.__file__).parent
CPU = torch.device("cpu")
GPU = "NVIDIA Imaginary X100"
SMALL, LARGE = MatmulConfig(64, 64, 32, 8, 4, 3), MatmulConfig(128, 128, 64, 8, 8, 3)
# a candidate need not be a Triton configuration
CANDIDATES = (SMALL, LARGE, "cublaslt")


class OnGpu:
    """Stands for a tensor on a GPU that this machine does not have."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the imaginary GPU's table is; it does not exist yet."""
    monkeypatch.setattr(launch, "TUNED_FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    launch._tuned_choices.cache_clear()
    return tmp_path / "nvidia-imaginary-x100.json"


@pytest.fixture(autouse=True)
def _no_device_is_remembered() -> Any:
    yield
    launch._tuned_choices.cache_clear()


class Doubling:
    """y = 2 x, on any candidate; `wrong` maps a candidate to what it does instead."""

    def __init__(self, wrong: dict[Any, Callable[[Tensor, Tensor], object]] | None = None) -> None:
        self.wrong = wrong or {}
        self.launched: list[Any] = []
        self.x = torch.randn(7, 5)

    def prepare(self, device: torch.device) -> Callable[[Any], tuple[Tensor, ...]]:
        y = torch.empty_like(self.x)

        def run(candidate: Any) -> tuple[Tensor, ...]:
            self.launched.append(candidate)
            if candidate in self.wrong:
                self.wrong[candidate](self.x, y)
            else:
                torch.mul(self.x, 2, out=y)
            return (y,)

        return run

    def case(self, op: str = "qkv_fwd", key: str = "bf16 1024", candidates: Any = CANDIDATES) -> TuningCase:
        return TuningCase(op, key, candidates, self.prepare, flops=3e9, bytes=6e6)


class Clock:
    """Says what a candidate's calls took, in order; each call really runs."""

    def __init__(self, operation: Doubling, times: dict[Any, Callable[[int], float]]) -> None:
        self.operation, self.times = operation, times
        self.timed: list[Any] = []

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        candidate = self.operation.launched[-1]
        self.timed.append(candidate)
        return self.times[candidate](self.timed.count(candidate) - 1)


def constant(ms: float) -> Callable[[int], float]:
    return lambda call: ms


def test_the_smallest_median_wins_and_candidates_alternate() -> None:
    operation = Doubling()
    times = {
        SMALL: constant(3.0),
        # slow at first, as a GPU that wakes up: those rounds do not count
        LARGE: lambda call: 50.0 if call < WARM_UP_ROUNDS else (1.5 if call % 2 else 2.5),
        # one call in ten is far off: the median does not see it
        "cublaslt": lambda call: 90.0 if call % 10 == 5 else 1.5,
    }
    clock = Clock(operation, times)
    row = tune.tune(operation.case(), CPU, clock)
    assert row["choice"] == "cublaslt"
    assert row["median_ms"] == {str(SMALL): 3.0, str(LARGE): 2.0, "cublaslt": 1.5}
    # 3e9 operations and 6e6 bytes in 1.5 ms
    assert (row["tflops"], row["gbps"]) == (2.0, 4)
    assert clock.timed == list(CANDIDATES) * (WARM_UP_ROUNDS + ROUNDS)
    assert "refused" not in row


def writes_nothing(x: Tensor, y: Tensor) -> None:
    pass


def forgets_the_tail(x: Tensor, y: Tensor) -> None:
    torch.mul(x, 2, out=y)
    y[-1] = 0


def accumulates(x: Tensor, y: Tensor) -> None:
    y.add_(2 * x)


def does_not_fit(x: Tensor, y: Tensor) -> None:
    raise RuntimeError("out of resource: shared memory\nand more lines")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (writes_nothing, "wrong result: output 0 is nan away"),
        (accumulates, "wrong result: output 0 is nan away"),
        (forgets_the_tail, "wrong result: output 0 is "),
        (does_not_fit, "does not run: RuntimeError: out of resource: shared memory"),
    ],
)
def test_a_wrong_candidate_is_refused_and_said(
    fault: Callable[[Tensor, Tensor], object], reason: str, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operation = Doubling({LARGE: fault})
    # it would be by far the fastest
    clock = Clock(operation, {SMALL: constant(2.0), LARGE: constant(0.1), "cublaslt": constant(3.0)})
    (row,) = tune_all([operation.case()], CPU, GPU, clock, table)
    assert row["choice"] == str(SMALL)
    assert list(row["median_ms"]) == [str(SMALL), "cublaslt"] and LARGE not in clock.timed
    assert row["refused"][str(LARGE)].startswith(reason) and "\n" not in row["refused"][str(LARGE)]
    assert f"refused      {LARGE}: {reason}" in capsys.readouterr().out


def test_a_launch_must_return_its_outputs() -> None:
    case = TuningCase("op", "key", CANDIDATES, lambda device: lambda candidate: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="launch of op key must return a tuple of its outputs, not None"):
        tune.tune(case, CPU, constant(1.0))  # type: ignore[arg-type]


def test_rounding_differently_is_right() -> None:
    right = torch.tensor([1.0, -3.0, 0.01], dtype=torch.bfloat16)
    one_step_away = torch.nextafter(right, torch.tensor(9.0, dtype=torch.bfloat16))
    assert tune.difference((one_step_away,), (right,)) == ""
    assert tune.difference((right[:2],), (right,)).startswith("output 0 is [2] torch.bfloat16, not [3]")
    assert tune.difference((right.float(),), (right,)).startswith("output 0 is [3] torch.float32, not [3]")


@pytest.mark.parametrize("winner", CANDIDATES, ids=str)
def test_what_was_measured_is_what_is_launched(winner: Any, table: Path) -> None:
    operation = Doubling()
    clock = Clock(operation, {c: constant(1.0 if c == winner else 2.0) for c in CANDIDATES})
    tune_all([operation.case()], CPU, GPU, clock, table)
    assert tuned_file(GPU) == table and table.exists()
    assert choose("qkv_fwd", "bf16 1024", CANDIDATES, OnGpu()) == winner
    # nothing measured for it: the rule's first
    assert choose("qkv_fwd", "bf16 768", CANDIDATES, OnGpu()) == SMALL
    assert choose("qkv_bwd", "bf16 1024", CANDIDATES, OnGpu()) == SMALL
    # the interpreter has no table
    assert choose("qkv_fwd", "bf16 1024", CANDIDATES, torch.zeros(1)) == SMALL


def test_the_table_says_where_it_is_from(table: Path) -> None:
    operation = Doubling()
    tune_all([operation.case()], CPU, GPU, Clock(operation, dict.fromkeys(CANDIDATES, constant(1.0))), table)
    content = json.loads(table.read_text())
    assert content["gpu"] == GPU
    (row,) = content["rows"]
    assert row["torch"] == torch.__version__ and row["triton"] and row["commit"]
    assert row["choice"] == str(SMALL), "of equal ones the rule's first"
    # a changed row is a changed line
    assert sum(line.startswith("  {") for line in table.read_text().splitlines()) == 1


def test_without_a_table_the_first_candidate_is_launched(table: Path) -> None:
    assert not table.exists()
    assert choose("qkv_fwd", "bf16 1024", CANDIDATES, OnGpu()) == SMALL


def test_a_table_that_names_no_candidate_is_one_clear_error(table: Path) -> None:
    tune.write_table(table, GPU, [{"op": "qkv_fwd", "key": "bf16 1024", "choice": "MatmulConfig(1)"}])
    with pytest.raises(
        ValueError, match=r"names MatmulConfig\(1\) for qkv_fwd bf16 1024, .* 3 candidates: run"
    ):
        choose("qkv_fwd", "bf16 1024", CANDIDATES, OnGpu())


def test_an_interrupted_run_leaves_the_old_table(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Doubling()
    clock = Clock(operation, dict.fromkeys(CANDIDATES, constant(1.0)))
    tune_all([operation.case()], CPU, GPU, clock, table)
    before = table.read_text()

    def interrupted(call: int) -> float:
        raise KeyboardInterrupt

    slower = Clock(operation, {SMALL: constant(9.0), LARGE: constant(1.0), "cublaslt": interrupted})
    with pytest.raises(KeyboardInterrupt):
        tune_all([operation.case()], CPU, GPU, slower, table)
    assert table.read_text() == before

    def killed(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    # even while it writes: the new table is whole before it takes the old one's place
    monkeypatch.setattr(tune.os, "replace", killed)
    other = Clock(operation, {SMALL: constant(9.0), LARGE: constant(1.0), "cublaslt": constant(9.0)})
    with pytest.raises(KeyboardInterrupt):
        tune_all([operation.case()], CPU, GPU, other, table)
    assert table.read_text() == before
    assert {path.name for path in table.parent.glob("*.json")} == {table.name}


def test_rows_of_other_operations_stay(table: Path) -> None:
    operation = Doubling()
    fast = {
        winner: Clock(operation, {c: constant(1.0 + (c != winner)) for c in CANDIDATES})
        for winner in CANDIDATES
    }
    both = [operation.case("qkv_fwd", "a"), operation.case("qkv_fwd", "b"), operation.case("other", "a")]
    tune_all(both, CPU, GPU, fast[SMALL], table)
    tune_all(both[:1], CPU, GPU, fast[LARGE], table)
    rows = {(row["op"], row["key"]): row["choice"] for row in read_tuned_rows(table)}
    # key "b" is gone with its operation's old rows
    assert rows == {("other", "a"): str(SMALL), ("qkv_fwd", "a"): str(LARGE)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can tune")
def test_the_command_refuses_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        tune.main(["--output", str(tmp_path / "table.json")])
    assert exit_status.value.code == 2
    assert capsys.readouterr().err.endswith("tuning measures on a GPU, but torch sees none on this machine\n")
    assert not list(tmp_path.iterdir())


def test_the_command_measures_what_the_modules_name(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operation = Doubling()
    asked: list[str] = []

    def cases(arch: str) -> list[TuningCase]:
        asked.append(arch)
        return [operation.case("one"), operation.case("two")]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", lambda *size, device: OnGpu())
    monkeypatch.setattr(tune, "architecture", lambda x: "sm_90")
    monkeypatch.setattr(tune, "all_tuning_cases", cases)
    monkeypatch.setattr(
        tune, "gpu_timer", lambda device: Clock(operation, dict.fromkeys(CANDIDATES, constant(1.0)))
    )
    with pytest.raises(SystemExit):
        tune.main(["--only", "three"])
    assert "--only three: not one of one, two" in capsys.readouterr().err
    assert tune.main(["--only", "two"]) == 0
    assert [row["op"] for row in read_tuned_rows(table)] == ["two"]
    assert tune.main(["--output", str(tmp_path / "elsewhere.json")]) == 0
    assert [row["op"] for row in read_tuned_rows(tmp_path / "elsewhere.json")] == ["one", "two"]
    assert asked == ["sm_90"] * 3


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tuning_cases_are_told_apart(arch: str) -> None:
    cases = all_tuning_cases(arch)
    names = [(case.op, case.key) for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        assert len({str(candidate) for candidate in case.candidates}) == len(case.candidates) > 0
        assert any(dtype in case.key for dtype in ("fp32", "fp16", "bf16")), (
            f"no dtype in {case.op} {case.key}"
        )


def test_shipped_tables_name_their_gpu_and_real_candidates() -> None:
    candidates: dict[tuple[str, str], set[str]] = {}
    for case in (case for arch in ARCHITECTURES for case in all_tuning_cases(arch)):
        candidates.setdefault((case.op, case.key), set()).update(map(str, case.candidates))
    for file in (KERNELS / "tuned").glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        assert tuned_file(content["gpu"]) == file
        for row in content["rows"]:
            assert row["choice"] in candidates[row["op"], row["key"]], "the rule changed: tune again"
            assert row["choice"] == min(row["median_ms"], key=row["median_ms"].get)
            assert row["torch"] and row["triton"] and row["commit"]


@pytest.mark.parametrize("file", sorted(KERNELS.rglob("*.py")), ids=lambda file: file.name)
def test_nothing_is_timed_while_a_model_runs(file: Path) -> None:
    # autotune runs kernels that accumulate more than once, in each process by itself, and ranks may differ
    names = {
        name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in (getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "name", None))
    }
    assert not names & {"autotune", "Autotuner"}
    if file.name != "tune.py":
        assert not names & {"Event", "do_bench", "do_bench_cudagraph", "perf_counter", "perf_counter_ns"}
