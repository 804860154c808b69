"""Checkpoints that are complete or absent.

A run folder holds `checkpoint-STEP/` folders and a link `last` to the newest. Each is a Hugging Face model
folder plus `trainer_state/`:

    config.json  model.safetensors  tokenizer.json  tokenizer_config.json  vocab.txt
    trainer_state/optimizer/*.safetensors  rng.pt  trainer.json  manifest.json

It is written beside its name, synced to disk, and renamed: a kill or a full disk at any moment leaves the
checkpoints that were there. The manifest's sizes and SHA-256 sums tell a damaged one from a good one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from fastbert.errors import UserError
from fastbert.paths import stays_inside

STATE_DIR = "trainer_state"
OPTIMIZER = "optimizer"  # the folder of its state, in there
# what file systems say of links, and of the syncing of folders, that they do not have
_UNKNOWN_THERE = (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_NAME = re.compile(r"checkpoint-(\d+)$")


class DamagedCheckpoint(Exception):
    """A checkpoint whose files are not those of its manifest."""


def is_checkpoint(path: Path) -> bool:
    """Whether the folder is a checkpoint rather than a run that holds some."""
    return (path / STATE_DIR).is_dir()


def checkpoint_step(path: Path) -> int:
    match = _NAME.search(path.name)
    if match is None:
        raise UserError(f"{path} is not a checkpoint folder: its name is not checkpoint-STEP")
    return int(match.group(1))


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / f"checkpoint-{step}"


def partial_path(run_dir: Path, step: int) -> Path:
    """Where it is written, by all ranks, before it has its name. `remove_leftovers` first."""
    return run_dir / f".checkpoint-{step}.partial"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, newest (highest step) first."""
    found = [p for p in run_dir.glob("checkpoint-*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=checkpoint_step, reverse=True)


def save_checkpoint(
    run_dir: Path,
    step: int,
    *,
    save_model: Callable[[Path], None],
    save_optimizer: Callable[[Path], None],
    rng_states: list[dict[str, Any]],
    trainer_state: dict[str, Any],
    keep_last: int,
    keep_every: int = 0,
) -> Path:
    """Write `checkpoint-STEP`, point `last` at it and remove all but the newest `keep_last` and
    those of steps that are multiples of `keep_every`.

    `save_model(folder)` writes weights, config and tokenizer, `save_optimizer(folder)` the optimizer's state,
    of which other ranks may write their share into the same folder. `rng_states` has one of each rank.
    `trainer_state` must be JSON. Raises UserError where the disk is full or the folder cannot be written;
    what was there before is left as it was.
    """
    final, partial = checkpoint_path(run_dir, step), partial_path(run_dir, step)
    try:
        state_dir = partial / STATE_DIR
        state_dir.mkdir(parents=True, exist_ok=True)
        save_model(partial)
        save_optimizer(state_dir / OPTIMIZER)
        torch.save(rng_states, state_dir / "rng.pt")
        (state_dir / "trainer.json").write_text(json.dumps(trainer_state, indent=2) + "\n", encoding="utf-8")
        _write_manifest(partial)
        if final.exists():  # the same step again, after a resume from before it
            _remove(final)
        partial.rename(final)
        _sync_folder(run_dir)
        _point_last(run_dir, final.name)
    except (OSError, RuntimeError, SafetensorError) as error:  # what the three writers make of a full disk
        reason = "the disk is full" if _is_disk_full(error, run_dir) else str(error)
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"checkpoint {final} could not be written: {reason}; free some space or choose another --output "
            "(earlier checkpoints are intact)"
        ) from error
    for old in list_checkpoints(run_dir)[keep_last:]:
        if not keep_every or checkpoint_step(old) % keep_every:
            _remove(old)
    return final


def verify_checkpoint(path: Path) -> None:
    """Raise DamagedCheckpoint, naming the file, unless every file is as the manifest says."""
    manifest_path = path / STATE_DIR / "manifest.json"
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{manifest_path.name} cannot be read ({error})") from error
    for name, expected in manifest.items():
        if not stays_inside(name):
            raise DamagedCheckpoint(f"its manifest names {name}, outside of it")
        file = path / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{name} is missing")
        if file.stat().st_size != expected["size"]:
            raise DamagedCheckpoint(f"{name} has {file.stat().st_size} bytes, not {expected['size']}")
        if _sha256(file) != expected["sha256"]:
            raise DamagedCheckpoint(f"{name} has been altered")


def newest_intact(run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of `run_dir` that verifies; each damaged one is reported through `say`."""
    for path in list_checkpoints(run_dir):
        try:
            verify_checkpoint(path)
        except DamagedCheckpoint as damage:
            say(f"{path} is damaged ({damage}): using the checkpoint before it")
            continue
        return path
    return None


def model_folder(folder: Path, say: Callable[[str], None]) -> Path:
    """`folder` if it holds a model, else the newest intact checkpoint of the run folder that it is.

    Damaged checkpoints are reported through `say`. UserError if there is nothing of either kind.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give a run or model folder")
    if any((folder / name).is_file() for name in ("config.json", "modules.json")):
        return folder
    checkpoint = newest_intact(folder, say)
    if checkpoint is None:
        raise UserError(f"{folder} holds neither a model nor a checkpoint; give a run or model folder")
    return checkpoint


def load_state(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(RNG state of each rank, trainer state) of a verified checkpoint."""
    state_dir = path / STATE_DIR
    rng = torch.load(state_dir / "rng.pt", map_location="cpu", weights_only=True)
    return rng, json.loads((state_dir / "trainer.json").read_text(encoding="utf-8"))


def rng_state(device: torch.device) -> dict[str, Any]:
    """torch's generators of this process: the CPU's and, where it trains on one, the GPU's."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def make_run_dir(run_dir: Path) -> None:
    """Make the run folder and prove, before any work, that it can be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".write-probe"
        probe.write_bytes(b"\0")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"the run folder {run_dir} cannot be written ({error.strerror}); choose another --output"
        ) from error


@contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Hold the run folder; UserError where another process does. A killed process holds nothing."""
    lock = FileLock(run_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"the run folder {run_dir} is in use by another process; wait for it or choose another --output"
        ) from error
    try:
        yield
    finally:
        lock_file = run_dir / ".lock"
        with suppress(OSError):
            if [*run_dir.iterdir()] == [lock_file]:  # what was refused leaves nothing behind
                lock_file.unlink()
                run_dir.rmdir()
        lock.release()


def remove_leftovers(run_dir: Path) -> None:
    """Delete what an interrupted save or removal left behind.

    What was written whole, and only missed its name, gets it: a save of the same step again has moved the
    first one away by then.
    """
    for partial in run_dir.glob(".checkpoint-*.partial*"):
        final = run_dir / partial.name[1:].split(".", 1)[0]
        if not final.exists():
            with suppress(DamagedCheckpoint):
                verify_checkpoint(partial)
                partial.rename(final)
    for leftover in [*run_dir.glob(".checkpoint-*.partial*"), *run_dir.glob(".removed-*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def require_space(run_dir: Path, needed_bytes: int) -> None:
    """UserError unless the disk of the run folder has this much free."""
    free = shutil.disk_usage(run_dir).free
    if free < needed_bytes:
        raise UserError(
            f"the run folder {run_dir} has {free / 1e9:.2f} GB free, and its checkpoints need "
            f"{needed_bytes / 1e9:.2f} GB; free some space, lower --keep-last or choose another --output"
        )


def _write_manifest(folder: Path) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    manifest = {}
    for file in files:
        manifest[file.relative_to(folder).as_posix()] = {"size": file.stat().st_size, "sha256": _sha256(file)}
        _sync_file(file)
    path = folder / STATE_DIR / "manifest.json"
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _sync_file(path)
    _sync_folder(folder / STATE_DIR)
    _sync_folder(folder)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_file(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNKNOWN_THERE:
            raise
    finally:
        os.close(descriptor)


def _point_last(run_dir: Path, name: str) -> None:
    link = run_dir / f".last-{os.getpid()}"
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(name, target_is_directory=True)
    except OSError as error:
        if os.name != "nt" and error.errno not in _UNKNOWN_THERE:
            raise
        # Windows lets only some users make links, mounted buckets and shares know none: every command takes
        # the run folder itself
        return
    os.replace(link, run_dir / "last")


def _remove(path: Path) -> None:
    # renamed first, so that a kill in the middle leaves no half checkpoint under a checkpoint's name
    removed = path.with_name(f".removed-{path.name}-{os.getpid()}")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _is_disk_full(error: BaseException, folder: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # torch.save and safetensors give no errno: torch names a write that came out short, safetensors the code
    return "os error 28" in str(error) or shutil.disk_usage(folder).free < 1 << 20
