"""`pretrain --compile`: the plain run's losses, its checkpoints, and a reason where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fastbert import BertForPreTraining, compiled
from fastbert.pretrain import main
from tests.small_models import small_config
from tests.test_cli_pretrain import options, rows

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and differentiates as inductor does, and compiles no C++."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch.compiler.reset()


def tensor_names(run: Path) -> list[str]:
    with safe_open(run / "last" / "model.safetensors", "pt") as file:
        return sorted(file.keys())


@pytest.mark.usefixtures("quick")
def test_a_compiled_run_is_the_plain_run_and_continues(tmp_path: Path) -> None:
    short = {"steps": 4, "log-every": 1}
    assert main(options(tmp_path, "plain", **short)) == 0
    assert main([*options(tmp_path, "compiled", **short), "--compile"]) == 0
    for ours, plain in zip(rows(tmp_path / "compiled"), rows(tmp_path / "plain"), strict=True):
        for name in ("mlm_loss", "nsp_loss", "eval_mlm_loss", "grad_norm"):
            assert ours.get(name) == pytest.approx(plain.get(name), abs=1e-4)
    names = tensor_names(tmp_path / "compiled")
    assert names == tensor_names(tmp_path / "plain")
    assert not any("_orig_mod" in name for name in names)
    assert "compile = true" in (tmp_path / "compiled" / "config.toml").read_text()
    more = short | {"steps": 5, "eval-every": 0}
    assert main([*options(tmp_path, "compiled", **more), "--compile"]) == 0
    assert [row["step"] for row in rows(tmp_path / "compiled") if "lr" in row] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("quick")
def test_parameters_keep_their_names() -> None:
    model = BertForPreTraining(small_config())
    names = list(model.state_dict())
    compiled.compile_losses(model)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in BertForPreTraining(small_config()).named_parameters()
    ]


def test_without_a_compiler_the_reason_is_said(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": "/nonexistent",
        "CXX": "no-such-compiler",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    command = [
        sys.executable,
        "-m",
        "fastbert.pretrain",
        *options(tmp_path, "run"),
        "--device",
        "cpu",
        "--compile",
    ]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2, result.stderr
    assert "error: --compile cannot be used here (InvalidCxxCompiler" in result.stderr
    assert "leave it out" in result.stderr
    assert not list((tmp_path / "run").glob("checkpoint-*"))
