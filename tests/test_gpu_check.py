"""The command for a machine with a GPU, without one: rows, peers, tables, verdicts, budgets."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")


from benchmarks import environment, gpu_check
from benchmarks.gpu import checks, operations, pretraining, timing
from benchmarks.gpu.attention import attention_cases
from benchmarks.gpu.cross_entropy import cross_entropy_cases, temporary_bytes
from benchmarks.gpu.pretraining import inference_cases, pretraining_cases
from benchmarks.gpu.projection import our_configs, qkv_cases
from benchmarks.gpu.setting import REAL, TINY, Operation, Setting
from benchmarks.task import table
from benchmarks.workloads import mixed_lengths
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
COMMON = {
    "machine": "Imaginary X100",
    "host_kind": "gpu-imaginary-x100",
    "torch": "2",
    "triton": "3",
    "commit": "c",
}


@in_the_parent_only
def test_everything_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestDryRun")


class TestDryRun:
    """Each row's task at a tiny size, with its peers; times are invented."""

    __test__ = INTERPRETED

    @pytest.fixture
    def setting(self) -> Setting:
        sizes = dataclasses.replace(TINY, tokens=16, lengths=(8,), heads=((1, 16),))
        return Setting(CPU, sizes, peak_tflops=None)

    def test_every_row_is_made_and_written(
        self, setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def clock(sides: Any) -> timing.Times:
            timing.no_clock(sides)
            return {name: [1.0 + number] * 20 for number, name in enumerate(sides)}

        file = tmp_path / "rows.jsonl"
        rows, failures = gpu_check.measure(
            list(operations.OPERATIONS),
            setting,
            dict.fromkeys(("gpu", "step", "host"), clock),
            gpu_check.Deadline(10),
            COMMON,
            file,
        )
        assert failures == []
        assert [json.loads(line) for line in file.read_text().splitlines()] == [row | COMMON for row in rows]
        kinds = [row["name"].split("[")[0] for row in rows]
        assert set(kinds) == {
            "copy", "matmul", "attention_fwd", "attention_bwd", "qkv_fwd", "qkv_bwd_dx", "qkv_bwd_dw",
            "dropout_add_norm_fwd", "dropout_add_norm_bwd", "bias_gelu_fwd", "bias_gelu_bwd",
            "linear_act_fwd", "linear_cross_entropy", "embed", "embed_bwd", "pad_rows", "unpad_rows",
            "lamb", "adamw", "call", "model",
        }  # fmt: skip
        by_name = {row["name"]: row for row in rows}
        # the measured product is the floor of what follows
        peak = by_name["matmul"]["tflops"]["torch matmul"]
        assert by_name["qkv_fwd[40 x 64]"]["floor"] == pytest.approx(peak, abs=0.06)
        # and so is the measured copy
        bandwidth = by_name["copy"]["gb_per_s"]["torch copy_"]
        assert by_name["bias_gelu_fwd[40 x 256]"]["floor"] == pytest.approx(bandwidth, abs=0.06)
        # versions and peers, named as what ran
        assert list(by_name["qkv_fwd[40 x 64]"]["ms"]) == [
            "fastbert pointers", "fastbert tma", "cuBLASLt", "cuBLASLt and stacking",
        ]  # fmt: skip
        assert "tma=True" in by_name["qkv_fwd[40 x 64]"]["configurations"]["fastbert tma"]
        equal = by_name["attention_bwd[1x16, of 8, dropout 0]"]
        # what a CPU has of SDPA ran, and was compared; the others say why they did not
        assert "torch sdpa flash, [B, H, L, D]" in equal["ms"]
        for name in ("torch sdpa cudnn, [B, H, L, D]", "flash-attn"):
            assert equal["refused"][name].startswith("does not run: ")
        mixed = by_name["attention_fwd[1x16, of Wikipedia's mix, dropout 0.1]"]
        assert any(name.startswith("torch sdpa by default, one call for each of") for name in mixed["ms"])
        loss = by_name["linear_cross_entropy[2 x 32, 50 words, forward and backward, fp32 parameters]"]
        assert list(loss["ms"]) == ["fastbert", "torch", "the eager path"]
        embedding = by_name["embed_bwd[16 x 32, 50 words, dropout 0.1]"]
        assert list(embedding["ms"]) == ["fastbert", "torch"]
        model = by_name["model[1 layers of 32, forward and backward, dropout 0.1]"]
        assert list(model["ms"])[:2] == ["fastbert", "the eager path"]
        assert model["ran"]["attention_backward"] == model["ran"]["qkv_projection"] == "triton"
        lines = table(rows).splitlines()
        assert len(lines) == 2 + len(rows)
        printed = capsys.readouterr().out
        assert "left out: flash-attn does not run: ModuleNotFoundError" in printed

    def test_the_command(
        self,
        setting: Setting,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr("benchmarks.gpu.setting.TINY", setting.sizes)
        monkeypatch.setattr(
            gpu_check, "check", lambda all_of_them, *_: [op for op in all_of_them if op.name == "qkv"]
        )
        assert gpu_check.main(["--dry-run", "--output", str(tmp_path)]) == 1
        printed = capsys.readouterr().out
        parts = [line for line in printed.splitlines() if line.startswith("==== ")]
        assert [line.split(",")[0][5:] for line in parts] == list(gpu_check.PARTS)
        assert "pretraining[1 layers of 32, Wikipedia's mix]  -" in printed
        assert "inference[1 layers of 32, 4 texts of mixed lengths]  -" in printed
        assert "training[tiny, Python's documentation, 3 s]: held-out MLM loss" in printed
        assert "failed:" not in printed
        assert "qkv_fwd[40 x 64]  -" in printed and "4 sides ran" in printed
        assert "not timed, because a test did not pass: attention\n" in printed
        assert list(tmp_path.iterdir()) == []  # a dry run writes nothing

    def test_a_wrong_peer_is_left_out(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        # the library's product with one weight of another
        monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b: x @ w.roll(1, 0).T + b)
        case = next(qkv_cases(setting))
        task = case.prepare()
        # what all sides are compared with is the library's: ours are left out, and that is a failure
        assert set(task.sides) == {"cuBLASLt", "cuBLASLt and stacking"}
        assert [problem.split(":")[0] for problem in task.failures()] == [
            "fastbert pointers wrong result", "fastbert tma wrong result",
        ]  # fmt: skip


# ---- the registry -----------------------------------------------------------------------------------------


def test_rows_on_a_card() -> None:
    setting = Setting(CPU, REAL, 790.0, has_targets=True)
    cases = {case.name: case.prepare for case in attention_cases(setting)}
    assert len(cases) == 16 and len(list(qkv_cases(setting))) == 18
    losses = [case.name.split("[")[1] for case in cross_entropy_cases(setting)]
    assert len(losses) == 12 and losses[0] == "1229 x 768, 30522 words, forward]"
    assert losses[-1] == "4915 x 1024, 30522 words, forward and backward, fp32 parameters]"
    targets = {name: prepare.args[-1] for name, prepare in cases.items() if prepare.args[-1]}  # type: ignore[attr-defined]
    assert targets == {
        f"attention_{direction}[16x64, of 512, dropout {p}]": target
        for direction, target in (("fwd", 350.0), ("bwd", 250.0))
        for p in ("0", "0.1")
    }


def test_temporaries_are_what_is_neither_there_before_nor_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = iter([1000, 1000 + 512 + 64])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: next(at_once))
    assert temporary_bytes(lambda: (torch.zeros(8), torch.zeros(8)), CPU) == 512


def test_the_mix_is_wikipedias() -> None:
    lengths = mixed_lengths(2**20, 512)
    assert sum(lengths) == 2**20 and max(lengths) == 512
    assert sum(lengths) / len(lengths) == pytest.approx(255.8, rel=0.03)
    assert sum(n * n for n in lengths) / sum(lengths) == pytest.approx(386, rel=0.02)
    assert sum(mixed_lengths(24, 8)) == 24 and max(mixed_lengths(24, 8)) <= 8


def test_every_test_that_is_asked_for_exists() -> None:
    names = [operation.name for operation in operations.OPERATIONS]
    assert len(set(names)) == len(names)
    for operation in operations.OPERATIONS:
        for test in operation.tests:
            file, *parts = test.split("::")
            source = (ROOT / file).read_text(encoding="utf-8")
            assert not parts or f"def {parts[-1]}" in source, test


def test_the_tables_choice_is_a_side_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dqkv = torch.zeros(64, 64).bfloat16(), torch.zeros(64, 3, 64).bfloat16()
    configs = our_configs("qkv_bwd_dw", 64, 64, (dqkv, x))
    monkeypatch.setattr("fastbert_kernels.linear.qkv_choice", lambda op, *tensors: "another")
    assert our_configs("qkv_bwd_dw", 64, 64, (dqkv, x)) == configs
    tuned = dataclasses.replace(configs["fastbert pointers"], num_stages=1)
    monkeypatch.setattr("fastbert_kernels.linear.qkv_choice", lambda op, *tensors: tuned)
    assert our_configs("qkv_bwd_dw", 64, 64, (dqkv, x)) == configs | {"fastbert as tuned": tuned}


# ---- the tests of an operation ----------------------------------------------------------------------------

SAMPLE = """
import os, pytest, time

def test_good(): pass
def test_bad():
    assert 1 + 1 == 3, "arithmetic"
@pytest.mark.skip(reason="no second GPU")
def test_skipped(): pass
def test_kernels_under_the_interpreter(): assert False
def test_other_crashes(): os._exit(9)
def test_other_after(): pass
"""


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one file of tests."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    return tmp_path


@in_the_parent_only
def test_outcomes_decide_what_is_timed(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {
        "good": ("test_sample.py::test_good", "test_sample.py::test_skipped"),
        "bad": ("test_sample.py::test_",),
        "unheard of": ("test_sample.py::test_other_after",),
        "only skipped": ("test_sample.py::test_skipped",),
        "machine": (),
    }
    registry = tuple(Operation(name, tests, lambda setting: iter(())) for name, tests in wanted.items())
    report = sample / "failures.txt"
    passed = gpu_check.check(registry, False, gpu_check.Deadline(1), report)
    assert [operation.name for operation in passed] == ["good", "machine"]
    printed = capsys.readouterr().out
    assert "bad: test_sample.py::test_bad failed: AssertionError: arithmetic" in printed
    assert "bad: test_sample.py::test_other_crashes did not finish" in printed
    assert "only skipped: none of its tests passed" in printed
    assert "skipped: Skipped: no second GPU" in printed and "interpreter" not in printed
    assert "tracebacks" in printed


@in_the_parent_only
def test_a_pytest_that_cannot_begin_is_a_failure_of_all(sample: Path) -> None:
    operation = Operation("op", ("test_absent.py",), lambda setting: iter(()))
    outcomes = checks.run_tests((operation,), 1, 60, sample / "failures.txt")
    (problem, nothing) = checks.verdict(operation, outcomes)
    assert "test_absent.py" in problem and nothing == "none of its tests passed"
    assert "test_absent.py" in (sample / "failures.txt").read_text()


@in_the_parent_only
def test_what_is_too_slow_did_not_finish(sample: Path) -> None:
    (sample / "test_sample.py").write_text("import time\ndef test_slow(): time.sleep(60)\n")
    operation = Operation("op", ("test_sample.py",), lambda setting: iter(()))
    begin = time.monotonic()
    outcomes = checks.run_tests((operation,), 1, 2, sample / "failures.txt")
    assert time.monotonic() - begin < 30
    assert checks.verdict(operation, outcomes)


def test_a_dry_run_runs_what_is_quick_in_the_interpreter() -> None:
    by_name = {operation.name: checks.in_a_dry_run(operation).tests for operation in operations.OPERATIONS}
    assert by_name["attention"] == ("tests/test_gpu_cases.py::TestKernels::test_attention",)
    assert by_name["activation"] == by_name["machine"] == ()


# ---- the machine ------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "torch sees none: --dry-run needs none" in said.err


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA Imaginary X100"])
def test_targets_and_the_known_floor_are_the_h200s(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name=name, total_memory=139 * 2**30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("benchmarks.gpu.timing.clocks", lambda device: {})
    options = argparse.Namespace(output=tmp_path, commit="abc+")
    setting, _, common, file = gpu_check.machine(options)
    assert (setting.peak_tflops, setting.has_targets) == ((790.0, True) if "H200" in name else (None, False))
    assert (
        setting.sizes is REAL
        and common["commit"] == "abc+"
        and common["machine"].startswith(f"{name}, 139 GiB")
    )
    assert file is not None and file.name == f"{environment.gpu_kind(name)}.jsonl"
    assert file.stem in ("gpu-nvidia-h200", "gpu-nvidia-imaginary-x100")


def test_the_command_needs_nothing_that_a_bare_machine_lacks() -> None:
    """A machine with a GPU may have torch, triton, transformers and pytest only."""
    code = (
        "import sys\n"
        "absent = ('rich', 'tyro', 'pyarrow', 'tensorboardX', 'matplotlib', 'tomli_w', 'pytest_benchmark')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "import benchmarks.gpu_check, benchmarks.gpu.operations, benchmarks.gpu.tuning\n"
        "import benchmarks.gpu.checks, benchmarks.gpu.pytest_part, tests.test_gpu_cases\n"
        "import benchmarks.gpu.pretraining, torch, importlib\n"
        "for operation in benchmarks.gpu.operations.OPERATIONS:\n"
        "    for test in operation.tests:\n"
        "        importlib.import_module(test.split('.py')[0].replace('/', '.'))\n"
        "from benchmarks.gpu.setting import TINY, Setting\n"
        "setting = Setting(torch.device('cpu'), TINY)\n"
        "assert benchmarks.gpu.pretraining.train_for(0.1, setting, lambda said: None)['loss_curve']\n"
    )
    environment_of_child = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
    }
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment_of_child, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr


# ---- parts ------------------------------------------------------------------------------------------------


def options_of(output: Path, *parts: str, minutes: float = 1.0) -> argparse.Namespace:
    return argparse.Namespace(
        output=output, minutes=minutes, parts=list(parts), commit=None, dry_run=False, part=None, report=None
    )


def test_a_part_has_its_share_and_what_the_parts_before_left(tmp_path: Path) -> None:
    given = {}

    def run(name: str, options: argparse.Namespace, file: Path, seconds: float) -> str:
        given[name] = seconds
        return ""

    gpu_check.run_parts(options_of(tmp_path, "kernels", "training"), tmp_path / "report.json", run)
    # 60 and 120 of 180 seconds, scaled to a minute; the first part took no time at all
    assert given["kernels"] == pytest.approx(20, abs=0.5) and given["training"] == pytest.approx(60, abs=0.5)
    assert sum(gpu_check.PARTS.values()) == 7 * 60


def test_a_part_that_fails_or_has_no_time_loses_no_other(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    ran = []

    def run(name: str, options: argparse.Namespace, file: Path, seconds: float) -> str:
        ran.append(name)
        report = gpu_check.Report.read(file)
        report.rows.append({"name": name})
        report.write(file)
        return "exit status -9" if name == "kernels" else ""

    gpu_check.run_parts(options_of(tmp_path, "kernels", "inference"), file, run)
    report = gpu_check.Report.read(file)
    assert [row["name"] for row in report.rows] == ran == ["kernels", "inference"]
    assert report.failures == ["part kernels: exit status -9"]
    gpu_check.run_parts(options_of(tmp_path, "tuning", minutes=-1.0), file, run)
    assert gpu_check.Report.read(file).failures[-1] == "part tuning: there was no time for it"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", ""),
        ("import os; os.abort()", "exit status -6"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])",
         "ended 0.2 s after its time"),
    ],
)  # fmt: skip
def test_a_part_runs_in_a_process_that_may_crash_or_hang(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.2)
    monkeypatch.setattr(gpu_check, "child_command", lambda *_: [sys.executable, "-c", code])
    begin = time.monotonic()
    seconds = 20.0 if "sleep" not in code else 0.5
    assert gpu_check.in_a_process("kernels", options_of(tmp_path), tmp_path / "r.json", seconds) == said
    assert time.monotonic() - begin < 30


def test_the_command_of_a_part(tmp_path: Path) -> None:
    command = gpu_check.child_command(
        "inference", options_of(tmp_path, "kernels", "inference"), tmp_path / "report.json", 30.0
    )
    options = gpu_check.parsed(command[3:])
    assert (options.part, options.report) == ("inference", tmp_path / "report.json")
    assert options.minutes == 0.5 and options.parts == ["kernels", "inference"]


def test_the_machines_rates_go_from_part_to_part(tmp_path: Path) -> None:
    report = gpu_check.Report(rows=[{"name": "matmul", "tflops": {"torch matmul": 300.0}}])
    report.rows.append({"name": "copy", "gb_per_s": {"torch copy_": 1500.0}})
    report.write(tmp_path / "report.json")
    read = gpu_check.Report.read(tmp_path / "report.json")
    setting = read.peaks(Setting(CPU, TINY))
    assert (setting.peak_tflops, setting.peak_gb) == (300.0, 1500.0)
    assert read.peaks(Setting(CPU, TINY, 790.0, 4300.0)).peak_tflops == 790.0


def test_what_was_wanted_stands_beside_what_was_reached(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"name": "pretraining[24 layers of 1024, x]",
         "times_faster_than": {"reference": 9.0, "transformers": 3.1, "transformers sdpa, sorted": 1.4}},
        {"name": "inference[12 layers of 768, 1 texts]", "times_faster_than": {"transformers": 2.0}},
        {"name": "lamb[x]", "times_faster_than": {"apex FusedLAMB": 1.0}},
    ]  # fmt: skip
    assert gpu_check.verdicts(rows).splitlines() == [
        "pretraining[24 layers of 1024, x]: 3.10x transformers sdpa, padded, wanted 3x: met",
        "pretraining[24 layers of 1024, x]: 1.40x its best, wanted 1.5x: missed",
        "inference[12 layers of 768, 1 texts]: 2.00x transformers sdpa, padded, wanted 2.5x: missed",
    ]


def test_pretraining_rows_have_the_targets() -> None:
    setting = Setting(CPU, REAL, 790.0, 4300.0, has_targets=True)
    cases = list(pretraining_cases(setting))
    assert [case.name for case in cases[:3]] == [
        "pretraining[24 layers of 1024, Wikipedia's mix]",
        "pretraining[24 layers of 1024, 512]",
        "pretraining[24 layers of 1024, 128]",
    ]
    assert [case.prepare.args[3] for case in cases[:4]] == [242_000, 238_000, 252_000, None]  # type: ignore[attr-defined]
    assert len(cases) == 8 and len(list(inference_cases(setting))) == 5


def test_a_step_that_trains_on_something_else_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"eager": [7.0, 6.9, 6.8, 6.7], "auto": [7.0, 6.9, 6.8, 6.7]}
    monkeypatch.setattr(pretraining, "_losses", lambda *args: losses[args[4]])
    assert pretraining.step_problems(Setting(CPU, TINY)) == []
    losses["eager"] = [7.0, 7.0, 7.0, 7.0]
    assert pretraining.step_problems(Setting(CPU, TINY)) == [
        "training does not lower the loss: [7.0, 7.0, 7.0, 7.0]"
    ]


def test_deadlines() -> None:
    deadline = gpu_check.Deadline(math.inf)
    assert deadline.has_time("a") and deadline.left_out == []
    deadline.end = time.monotonic() - 1
    assert not deadline.has_time("b") and deadline.left_out == ["b"] and deadline.left_s() == 0.0
