"""A checkpoint is complete or absent: kills, full disks, damage, retention."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fastbert import UserError
from fastbert.train import checkpoint as ckpt


def save_moment(folder: Path, step: int) -> None:
    folder.mkdir()
    save_file({"moment": torch.full((3,), float(step))}, folder / "moment.safetensors")


def save(run_dir: Path, step: int, keep_last: int = 3, keep_every: int = 0) -> Path:
    return ckpt.save_checkpoint(
        run_dir,
        step,
        save_model=lambda folder: (folder / "weights.bin").write_bytes(bytes([step]) * 1000) and None,
        save_optimizer=lambda folder: save_moment(folder, step),
        rng_states=[ckpt.rng_state(torch.device("cpu"))],
        trainer_state={"step": step},
        keep_last=keep_last,
        keep_every=keep_every,
    )


def test_save_then_load(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert path == tmp_path / "checkpoint-7"
    ckpt.verify_checkpoint(path)
    moments = load_file(path / ckpt.STATE_DIR / ckpt.OPTIMIZER / "moment.safetensors")
    assert torch.equal(moments["moment"], torch.full((3,), 7.0))
    rng, state = ckpt.load_state(path)
    assert state == {"step": 7}
    expected = torch.rand(4)
    ckpt.restore_rng(rng[0], torch.device("cpu"))
    torch.testing.assert_close(torch.rand(4), expected, atol=0, rtol=0)


def test_last_points_at_the_newest_and_old_ones_go(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step, keep_last=2)
    assert [p.name for p in ckpt.list_checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-10"]
    assert os.readlink(tmp_path / "last") == "checkpoint-100"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-100", "last"]


def test_those_of_every_so_many_steps_are_kept_too(tmp_path: Path) -> None:
    for step in (10, 15, 20, 25, 30, 31):
        save(tmp_path, step, keep_last=2, keep_every=10)
    kept = [p.name for p in ckpt.list_checkpoints(tmp_path)]
    assert kept == ["checkpoint-31", "checkpoint-30", "checkpoint-20", "checkpoint-10"]


def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "checkpoint-5" / "weights.bin").write_bytes(b"damaged")
    ckpt.verify_checkpoint(save(tmp_path, 5))


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    weights = newest / "weights.bin"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "altered":
        weights.write_bytes(b"x" + weights.read_bytes()[1:])
    elif damage == "missing":
        weights.unlink()
    else:
        (newest / ckpt.STATE_DIR / "manifest.json").write_text("{")
    said: list[str] = []
    assert ckpt.newest_intact(tmp_path, said.append) == tmp_path / "checkpoint-1"
    assert len(said) == 1
    assert "checkpoint-2 is damaged" in said[0]
    assert ("manifest" if damage == "no manifest" else "weights.bin") in said[0]


def test_no_intact_checkpoint(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "weights.bin").unlink()
    assert ckpt.newest_intact(tmp_path, lambda text: None) is None


# what the writers of text, tensors and weights raise on a full disk
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise error

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(ckpt.shutil, "disk_usage", lambda _: usage._replace(free=4096))
    with pytest.raises(UserError, match=r"checkpoint-2 could not be written: the disk is full; free some"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir() if p.name != "last"] == ["checkpoint-1"]
    ckpt.verify_checkpoint(tmp_path / "checkpoint-1")


# after each of the calls that a save makes to the file system, the process dies
@pytest.mark.parametrize("call", ["torch.save", "manifest", "rename", "last", "remove"])
def test_a_kill_at_any_moment_leaves_an_intact_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save(tmp_path, 1)

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    target = {
        "torch.save": (torch, "save"),
        "manifest": (ckpt, "_write_manifest"),
        "rename": (ckpt, "_sync_folder"),
        "last": (ckpt, "_point_last"),
        "remove": (ckpt, "_remove"),
    }[call]
    with monkeypatch.context() as patch:
        patch.setattr(*target, die)
        with pytest.raises(Killed):
            save(tmp_path, 2, keep_last=1)
    intact = ckpt.newest_intact(tmp_path, lambda text: pytest.fail(text))
    expected = 2 if call in ("last", "remove") else 1
    assert intact == tmp_path / f"checkpoint-{expected}"
    # the next run cleans up and goes on
    ckpt.remove_leftovers(tmp_path)
    save(tmp_path, 3)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".checkpoint")]


def test_a_step_saved_again_is_not_lost_between_the_old_one_and_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the first one was moved away, before the second has its name: the second gets it."""
    save(tmp_path, 2)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        rename = Path.rename
        patch.setattr(Path, "rename", lambda self, to: die() if "partial" in self.name else rename(self, to))
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    assert ckpt.list_checkpoints(tmp_path) == []
    ckpt.remove_leftovers(tmp_path)
    assert ckpt.newest_intact(tmp_path, pytest.fail) == tmp_path / "checkpoint-2"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_file_system_that_copies_where_it_should_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of the copy: half a checkpoint has the name, and the one before it is used."""
    save(tmp_path, 1)

    def copy_half(self: Path, to: Path) -> None:
        files = sorted(file for file in self.rglob("*") if file.is_file())
        for file in files[: len(files) // 2]:
            target = to / file.relative_to(self)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", copy_half)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    assert (tmp_path / "checkpoint-2").is_dir()
    said: list[str] = []
    assert ckpt.newest_intact(tmp_path, said.append) == tmp_path / "checkpoint-1"
    assert len(said) == 1 and "checkpoint-2 is damaged" in said[0]
    ckpt.remove_leftovers(tmp_path)  # as each start does
    save(tmp_path, 2)
    ckpt.verify_checkpoint(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EINVAL])
def test_a_file_system_without_links_and_without_the_syncing_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    sync = os.fsync
    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(os, "fsync", lambda d: refuse() if stat.S_ISDIR(os.fstat(d).st_mode) else sync(d))
    save(tmp_path, 1)
    assert ckpt.newest_intact(tmp_path, pytest.fail) == tmp_path / "checkpoint-1"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_clock_that_goes_back_does_not_change_which_is_newest(tmp_path: Path) -> None:
    for age, step in enumerate((1, 2, 3)):
        path = save(tmp_path, step, keep_last=2)
        for file in (path, *path.rglob("*")):
            os.utime(file, (1e9 - 1e6 * age, 1e9 - 1e6 * age))
    assert [p.name for p in ckpt.list_checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-2"]
    assert ckpt.newest_intact(tmp_path, pytest.fail) == tmp_path / "checkpoint-3"


def test_a_manifest_that_names_a_file_outside_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    manifest = path / "trainer_state" / "manifest.json"
    names = json.loads(manifest.read_text()) | {"../last": {"size": 0, "sha256": ""}}
    manifest.write_text(json.dumps(names))
    with pytest.raises(ckpt.DamagedCheckpoint, match=r"names \.\./last, outside of it"):
        ckpt.verify_checkpoint(path)


def test_a_half_removed_checkpoint_has_no_checkpoint_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(ckpt.shutil, "rmtree", lambda *_, **__: None)  # killed before anything is deleted
    save(tmp_path, 2, keep_last=1)
    assert [p.name for p in ckpt.list_checkpoints(tmp_path)] == ["checkpoint-2"]


def test_run_folder_must_be_writable_and_large_enough(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run cannot be written \(.*\); choose another --output"):
        ckpt.make_run_dir(tmp_path / "file" / "run")
    with pytest.raises(UserError, match=r"its checkpoints need 1000000000\.00 GB; free some space"):
        ckpt.require_space(tmp_path, 10**18)


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    manifest = json.loads((path / ckpt.STATE_DIR / "manifest.json").read_text())
    assert sorted(manifest) == [
        "trainer_state/optimizer/moment.safetensors",
        "trainer_state/rng.pt",
        "trainer_state/trainer.json",
        "weights.bin",
    ]
    assert manifest["weights.bin"]["size"] == 1000


def test_one_process_a_run_folder(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from fastbert.train.checkpoint import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(UserError, match="is in use by another process; wait for it"),
            ckpt.exclusive(tmp_path),
        ):
            pass
        other.kill()
        other.wait()
    with ckpt.exclusive(tmp_path):  # a killed process holds nothing
        pass
