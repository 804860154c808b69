"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fastbert.data.tokenizer import save_tokenizer
from fastbert.train import checkpoint as ckpt
from fastbert.train import optimizer_state
from fastbert.train.distributed import Ranks, is_of_communication
from fastbert.train.trainer import Trainer

SETTLE_S = 60.0  # that a run which ends with an error waits for its last checkpoint


class _LostRanks(Exception):
    """An error of communication, which is not one of the disk."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.error = error


class Saver:
    """Saves a trainer's run: `save` copies what is to be saved to the host, a thread of each rank writes it.

    Rank 0 writes the model and gives the checkpoint its name; every rank writes its share of the optimizer's
    state. One checkpoint is written at a time. Several ranks call each method after the same step, but
    `check`.
    """

    def __init__(
        self, run_dir: Path, trainer: Trainer, tokenizer: Tokenizer, keep_last: int, keep_every: int
    ) -> None:
        self._run_dir, self._trainer, self._tokenizer = run_dir, trainer, tokenizer
        self._keep_last, self._keep_every = keep_last, keep_every
        self._pending: tuple[int, Future[None]] | None = None
        self._begun: int | None = None  # the step of the last save
        self._writer = _Writer()
        # fresh memory for each checkpoint, which another thread gives back, leaves holes that add up
        self._kept: dict[str, Tensor] = {}

    @property
    def _ranks(self) -> Ranks:
        return self._trainer.ranks

    def save(self, trainer_state: dict[str, Any]) -> None:
        """Begin to save the step that the trainer is at, when the checkpoint before is written.

        Does nothing where that is of this step. `trainer_state` must be JSON. UserError where the one before
        could not be written.
        """
        trainer, step = self._trainer, self._trainer.step
        if step == self._begun:
            return
        self.wait()
        self._begun = step
        rng_states = self._ranks.gather(ckpt.rng_state(trainer.device))
        weights, copies = {}, {}
        for name, weight in trainer.weights().items():
            if self._ranks.is_main:
                if id(weight) not in copies:  # tied weights stay so
                    copies[id(weight)] = self._copy(name, weight)
                weights[name] = copies[id(weight)]
        optimizer = optimizer_state.host_copy(trainer.model, trainer.optimizer, self._ranks, self._copy)

        def save_model(folder: Path) -> None:
            trainer.model.save_pretrained(folder, state_dict=weights)
            limit = trainer.model.config.max_position_embeddings
            save_tokenizer(self._tokenizer, folder, model_max_length=limit)

        def save_optimizer(folder: Path) -> None:
            try:
                optimizer_state.write(folder, optimizer, self._ranks)
            except RuntimeError as error:
                if is_of_communication(error):
                    raise _LostRanks(error) from error
                raise

        def write() -> None:
            if rng_states is None:  # not rank 0
                save_optimizer(ckpt.partial_path(self._run_dir, step) / ckpt.STATE_DIR / ckpt.OPTIMIZER)
                return
            ckpt.save_checkpoint(
                self._run_dir,
                step,
                save_model=save_model,
                save_optimizer=save_optimizer,
                rng_states=rng_states,
                trainer_state=trainer_state,
                keep_last=self._keep_last,
                keep_every=self._keep_every,
            )

        self._pending = (step, self._writer.submit(write))

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy on the host, in memory that is kept for the next checkpoint."""
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape:
            kept = self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return kept.copy_(tensor.detach())

    def wait(self) -> None:
        """Until the checkpoint is written that `save` began last; UserError where it could not be."""
        if self._pending is None:
            return
        (step, written), self._pending = self._pending, None
        try:
            with self._ranks.main_first(f"checkpoint {step}"):
                written.result()
        except _LostRanks as lost:
            raise lost.error from None

    def check(self) -> None:
        """On rank 0: raise at once what `wait` would raise later."""
        if self._ranks.is_main and self._pending is not None:
            written = self._pending[1]
            if written.done() and written.exception() is not None:
                self.wait()

    def settle(self) -> None:
        """Give the checkpoint that is being written the time to be, at the end of a run that failed."""
        if self._pending is not None:
            wait([self._pending[1]], SETTLE_S)


class _Writer:
    """A thread that runs what it is given, one after the other.

    One for all checkpoints: memory that another thread gives back stays with that thread. A daemon, so that a
    rank which waits for one that hangs can end.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def submit(self, write: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._work.put((write, future))
        return future

    def _run(self) -> None:
        while True:
            write, future = self._work.get()
            try:
                write()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del write, future
            _trim()


def _trim() -> None:
    """Give the system what this process has freed: what writing takes leaves holes between what stays.

    glibc's allocator does so at the end of its heap only, so that memory rises for hours.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
