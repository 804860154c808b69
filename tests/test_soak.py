"""Long forms of fault tests: `pytest -m soak`. The short forms are in test_cli_distributed.py."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastbert.train.checkpoint import verify_checkpoint
from tests.test_cli_distributed import CONSTANT, ROOT, children
from tests.test_cli_pretrain import options, rows

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the ranks through /proc"),
]
KILLS, STEPS = 20, 900
WAIT_S = 120.0


def started(folder: Path, name: str, *more: str) -> subprocess.Popen[str]:
    """torchrun of two ranks, which starts them again after each kill."""
    arguments = options(
        folder,
        name,
        **CONSTANT,
        **{"steps": STEPS, "save-every": 7, "eval-every": 0, "dropout": 0.1, "workers": 1},
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(2 * KILLS), "--monitor-interval", "0.1"]
    return subprocess.Popen(
        [*command, "-m", "fastbert.pretrain", *arguments, *more],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until_it_trains(process: subprocess.Popen[str], log: Path, size: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while not log.exists() or log.stat().st_size <= size:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no step in {WAIT_S:g} s"
        time.sleep(0.01)


@pytest.mark.parametrize("more", [[], ["--shard"]], ids=["whole", "sharded"])
def test_ranks_killed_at_twenty_moments_take_each_step_once(tmp_path: Path, more: list[str]) -> None:
    """SIGKILL of either rank, while it starts, trains or saves: the same bits as a run that nobody killed."""
    rng = random.Random(0)
    process = started(tmp_path, "killed", *more)
    log = tmp_path / "killed" / "metrics.jsonl"
    try:
        for _ in range(KILLS):
            if rng.random() < 0.7:
                wait_until_it_trains(process, log, log.stat().st_size if log.exists() else 0)
                time.sleep(rng.uniform(0.0, 1.0))
            else:
                time.sleep(rng.uniform(0.5, 6.0))
            while not (ranks := children(process.pid)):  # between the end of the old ones and the new ones
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.01)
            os.kill(rng.choice(ranks), signal.SIGKILL)
        said, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert said.count("resumed from") >= KILLS // 2
    whole = started(tmp_path, "whole", *more)
    assert whole.communicate(timeout=600) and whole.returncode == 0
    killed, unharmed = (
        [row for row in rows(tmp_path / name) if "loss" in row] for name in ("killed", "whole")
    )
    assert [row["step"] for row in killed] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in killed] == [row["loss"] for row in unharmed]
    last = [tmp_path / name / f"checkpoint-{STEPS}" for name in ("killed", "whole")]
    for path in last:
        verify_checkpoint(path)
    weights, expected = (load_file(path / "model.safetensors") for path in last)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
