"""`torchrun -m fastbert.pretrain`: one run of several ranks, resumed on other numbers, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from fastbert import BertForPreTraining
from fastbert.pretrain import main
from fastbert.train.checkpoint import newest_intact
from tests.test_cli_pretrain import options, rows
from tests.training_ranks import run_commands

ROOT = Path(__file__).resolve().parents[1]
CONSTANT = {"schedule": "constant", "warmup": 0, "log-every": 1}  # rates that do not depend on --steps
SHORT = {"steps": 8, "eval-every": 0, "save-every": 100, "rank-timeout": 15}


def spawn(commands: list[dict[str, Any]], folder: Path) -> None:
    """Run the commands in one pair of processes, which meet at a store of this one's, as with torchrun."""
    folder.mkdir()
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.spawn(run_commands, args=(commands, store.port, str(folder)), nprocs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All commands of two ranks, in one pair of processes; a run of one rank goes on from one of theirs."""
    folder = tmp_path_factory.mktemp("runs")
    dropout = {**CONSTANT, "dropout": 0.1}
    commands: list[dict[str, Any]] = [
        {"arguments": options(folder, "two", **CONSTANT, steps=8)},
        {"arguments": options(folder, "dropout", **dropout, steps=8)},
        {
            "arguments": options(
                folder, "dropout-resumed", **dropout, steps=8, resume=folder / "dropout" / "checkpoint-4"
            )
        },
        {"arguments": [*options(folder, "sharded", **dropout, steps=8), "--shard"]},
        {
            "arguments": [
                *options(
                    folder, "sharded-resumed", **dropout, steps=8, resume=folder / "sharded" / "checkpoint-4"
                ),
                "--shard",
            ]
        },
        {"arguments": options(folder, "wrong", **{"seq-len": 4})},
        {"arguments": options(folder, "full", **SHORT), "fault": "full disk"},
    ]
    spawn(commands, folder / "first")
    # from 2 ranks to 1, back to 2 that hold parts, and to 2 that hold all
    assert main(options(folder, "two", **CONSTANT, steps=12, accumulate=2)) == 0
    commands = [
        {"arguments": [*options(folder, "two", **CONSTANT, steps=14), "--shard"]},
        {"arguments": options(folder, "two", **CONSTANT, steps=16)},
        {"arguments": options(folder, "hang", **SHORT), "fault": "hang"},
    ]
    spawn(commands, folder / "back")
    commands = [{"arguments": options(folder, "one-wrong", **SHORT), "rank1": ["--device", "cuda:77"]}]
    spawn(commands, folder / "one-wrong")
    assert main(options(folder, "one", **CONSTANT, steps=16, accumulate=2)) == 0
    return folder


def said(folder: Path, number: int, rank: int) -> tuple[str, str]:
    """(standard output, standard error) of a rank in a command."""
    out, err = ((folder / f"{number}.rank{rank}.{name}").read_text() for name in ("out", "err"))
    return out, err


def test_a_run_moved_between_numbers_of_ranks_is_that_of_one(folder: Path) -> None:
    whole, moved = rows(folder / "one"), rows(folder / "two")
    # an evaluation more, at the end that was not one
    moved = [row for row in moved if "loss" in row or row["step"] != 14]
    assert [row["step"] for row in moved if "loss" in row] == list(range(1, 17))
    for one, two in zip(whole, moved, strict=True):
        for name in one.keys() - {"tokens_per_s", "mfu"}:
            assert one[name] == pytest.approx(two[name], rel=2e-6), (one["step"], name)
    for command in (0, 1):
        out, _ = said(folder / "back", command, 0)
        assert "resumed from" in out
        assert "a step now has" not in out


def test_only_rank_0_speaks(folder: Path) -> None:
    out, err = said(folder / "first", 0, 0)
    assert "steps of 256 tokens" in out
    assert "on 2 ranks (cpu)" in out
    assert out.endswith("status 0\n")
    assert said(folder / "first", 0, 1) == ("status 0\n", "")
    assert not err


@pytest.mark.parametrize("name", ["dropout", "sharded"])
def test_a_resume_on_the_same_ranks_changes_no_bit(folder: Path, name: str) -> None:
    one, two = (folder / run / "last" for run in (name, f"{name}-resumed"))
    weights, resumed = (load_file(path / "model.safetensors") for path in (one, two))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    states = [torch.load(path / "trainer_state" / "rng.pt") for path in (one, two)]
    assert len(states[0]) == 2
    for rank, other in zip(*states, strict=True):
        assert torch.equal(rank["cpu"], other["cpu"])
    assert not torch.equal(states[0][0]["cpu"], states[0][1]["cpu"])  # each rank drops out on its own


def test_each_rank_saves_its_part(folder: Path) -> None:
    """The shares of the files add up to the moments; the model is the one that transformers loads."""
    path = folder / "sharded" / "last"
    weights = load_file(path / "model.safetensors")
    files = [load_file(file) for file in sorted((path / "trainer_state" / "optimizer").iterdir())]
    assert len(files) == 2
    for name, weight in weights.items():
        parts = [file[f"{name}.exp_avg"] for file in files if f"{name}.exp_avg" in file]
        assert torch.cat(parts).shape == weight.shape, name
        assert len(parts) == 2 or len(weight) == 1, name
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["BertForPreTraining"]
    BertForPreTraining.from_pretrained(path)


def test_an_error_is_said_once(folder: Path) -> None:
    ranks = [said(folder / "first", 5, rank) for rank in range(2)]
    assert sorted(err for _, err in ranks) == ["", "error: --seq-len 4 is below 8; give at least 8\n"]
    assert [out for out, _ in ranks] == ["status 2\n"] * 2


def test_an_error_of_one_rank_ends_all(folder: Path) -> None:
    out, err = said(folder / "one-wrong", 0, 1)
    assert err.startswith("error: 2 ranks are started on this machine, and torch sees 0 GPUs")
    assert out == "status 2\n"
    assert said(folder / "one-wrong", 0, 0)[1] == ""
    assert said(folder / "one-wrong", 0, 0)[0].endswith("status 2\n")


def test_a_rank_that_hangs_is_named(folder: Path) -> None:
    _, err = said(folder / "back", 2, 0)
    assert err.startswith(f"error: rank 1 on {socket.gethostname()} died, or kept the others waiting ")
    assert "for more than 15 s: look at what it printed" in err
    assert said(folder / "back", 2, 1)[1] == ""


def test_a_full_disk_is_said_by_the_rank_that_writes(folder: Path) -> None:
    assert said(folder / "first", 6, 0)[1] == "error: the disk is full\n"
    assert said(folder / "first", 6, 1) == ("status 2\n", "")


def torchrun(arguments: list[str], port: int, node: int) -> subprocess.Popen[str]:
    """torchrun of one of two hosts, with one rank."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "run"]
    command += ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", "localhost"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", "-m", "fastbert.pretrain", *arguments]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds a rank's process through /proc")
def test_a_killed_rank_of_two_hosts_is_started_again_and_no_step_is_lost(folder: Path) -> None:
    run = folder / "killed"
    arguments = options(folder, "killed", **CONSTANT, **{"steps": 16, "save-every": 2})
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    hosts = [torchrun(arguments, port, node) for node in range(2)]
    try:
        deadline = time.monotonic() + 120
        while not (run / "last").exists():
            assert all(host.poll() is None for host in hosts), [host.communicate()[0] for host in hosts]
            assert time.monotonic() < deadline, "the run did not start"
            time.sleep(0.02)
        os.kill(children(hosts[1].pid)[0], signal.SIGKILL)
        said = [host.communicate(timeout=180)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    assert any("resumed from" in text for text in said)
    # each step once, with the numbers of a run that nobody killed
    killed, whole = ([row for row in rows(path) if "loss" in row] for path in (run, folder / "one"))
    for one, two in zip(killed, whole, strict=True):
        assert one["step"] == two["step"]
        assert one["loss"] == pytest.approx(two["loss"], rel=2e-6), one["step"]
    assert newest_intact(run, pytest.fail) == run / "checkpoint-16"
