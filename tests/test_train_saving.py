"""Checkpoints are written while training goes on: what is saved is the step at which the save began."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastbert import UserError
from fastbert.data.tokenizer import train_tokenizer
from fastbert.train import checkpoint as ckpt
from fastbert.train import optimizer_state
from fastbert.train.saving import Saver
from fastbert.train.trainer import Totals, Trainer
from tests.test_train_trainer import make_batches, make_trainer

WAIT_S = 60.0


def make_saver(run_dir: Path, keep_last: int = 2) -> tuple[Saver, Trainer]:
    trainer = make_trainer(dropout=0.1)
    tokenizer = train_tokenizer(["one two three"] * 9, vocab_size=200)
    return Saver(run_dir, trainer, tokenizer, keep_last, 0), trainer


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writers wait until it is set."""
    gate, write = threading.Event(), optimizer_state.write

    def waiting(*arguments: Any) -> None:
        assert gate.wait(WAIT_S)
        write(*arguments)

    monkeypatch.setattr(optimizer_state, "write", waiting)
    yield gate
    gate.set()


def moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    return optimizer_state.host_copy(trainer.model, trainer.optimizer, trainer.ranks)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, gate: threading.Event) -> None:
    saver, trainer = make_saver(tmp_path)
    batches = make_batches(6)
    trainer.train_step(batches[:2], Totals())
    weights = {name: weight.clone() for name, weight in trainer.weights().items()}
    state, rng = moments(trainer), torch.get_rng_state()
    saver.save({"step": 1})
    for at in (2, 4):
        trainer.train_step(batches[at : at + 2], Totals())
    torch.rand(3)
    assert not ckpt.list_checkpoints(tmp_path)  # no name before it is whole
    saver.check()
    gate.set()
    saver.wait()
    path = tmp_path / "checkpoint-1"
    ckpt.verify_checkpoint(path)
    saved = load_file(path / "model.safetensors")
    for name, weight in saved.items():
        assert torch.equal(weight, weights[name]), name
    assert not torch.equal(saved["bert.pooler.dense.weight"], trainer.model.bert.pooler.dense.weight)
    assert torch.equal(ckpt.load_state(path)[0][0]["cpu"], rng)
    (file,) = (path / ckpt.STATE_DIR / ckpt.OPTIMIZER).iterdir()
    written = load_file(file)
    assert written.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(written[name], value), name


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path, gate: threading.Event) -> None:
    saver, trainer = make_saver(tmp_path)
    batch = make_batches(1)
    trainer.train_step(batch, Totals())
    saver.save({})
    trainer.train_step(batch, Totals())
    threading.Timer(0.2, gate.set).start()
    saver.save({})  # waits for the first
    assert (tmp_path / "checkpoint-1").is_dir()
    saver.wait()
    saver.wait()  # nothing to wait for
    assert [path.name for path in ckpt.list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-1"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """A signal at a step that is saved anyway ends in a second save of it."""
    saver, trainer = make_saver(tmp_path)
    trainer.train_step(make_batches(1), Totals())
    saver.save({})
    saver.wait()
    written = (tmp_path / "checkpoint-1").stat().st_ino
    saver.save({})
    saver.wait()
    assert (tmp_path / "checkpoint-1").stat().st_ino == written


def test_a_run_that_fails_meanwhile_leaves_its_checkpoint(tmp_path: Path, gate: threading.Event) -> None:
    saver, trainer = make_saver(tmp_path)
    saver.settle()  # nothing to wait for
    trainer.train_step(make_batches(1), Totals())
    saver.save({})
    threading.Timer(0.2, gate.set).start()
    saver.settle()
    ckpt.verify_checkpoint(tmp_path / "checkpoint-1")


def test_a_disk_that_fills_up_meanwhile_is_said_at_the_next_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, trainer = make_saver(tmp_path)
    batch = make_batches(1)
    trainer.train_step(batch, Totals())
    saver.save({})
    saver.wait()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(optimizer_state, "write", full)
    trainer.train_step(batch, Totals())
    saver.save({})
    assert saver._pending is not None
    saver._pending[1].exception(WAIT_S)
    with pytest.raises(UserError, match=r"checkpoint-2 could not be written: the disk is full; free some"):
        saver.check()
    assert [path.name for path in tmp_path.iterdir() if path.name != "last"] == ["checkpoint-1"]
    ckpt.verify_checkpoint(tmp_path / "checkpoint-1")


def test_a_file_of_the_state_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    """What DCP raises is no Exception, and holds the error of each rank."""
    saver, trainer = make_saver(tmp_path)
    trainer.train_step(make_batches(1), Totals())
    (ckpt.partial_path(tmp_path, 1) / ckpt.STATE_DIR).mkdir(parents=True)
    (ckpt.partial_path(tmp_path, 1) / ckpt.STATE_DIR / ckpt.OPTIMIZER).write_text("in the way")
    saver.save({})
    with pytest.raises(UserError, match=r"checkpoint-1 could not be written: .*File exists"):
        saver.wait()


def test_a_checkpoint_without_a_state_is_said(tmp_path: Path) -> None:
    _, trainer = make_saver(tmp_path)
    with pytest.raises(UserError, match="holds no optimizer state to go on from"):
        optimizer_state.load(tmp_path / "none", trainer.model, trainer.optimizer, trainer.ranks)
