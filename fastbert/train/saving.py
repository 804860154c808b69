"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fastbert.data.tokenizer import save_tokenizer
from fastbert.train import checkpoint as ckpt
from fastbert.train import optimizer_state
from fastbert.train.distributed import Ranks, is_of_communication
from fastbert.train.trainer import Trainer


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

    @property
    def _ranks(self) -> Ranks:
        return self._trainer.ranks

    def save(self, trainer_state: dict[str, Any]) -> None:
        """Begin to save the step that the trainer is at, when the checkpoint before is written.

        `trainer_state` must be JSON. UserError where that one could not be written.
        """
        self.wait()
        trainer, step = self._trainer, self._trainer.step
        rng_states = self._ranks.gather(ckpt.rng_state(trainer.device))
        copies: dict[int, Any] = {}  # tied weights stay so
        weights = {
            name: copies.setdefault(id(weight), weight.to("cpu", copy=True))
            for name, weight in trainer.weights().items()
            if self._ranks.is_main
        }
        optimizer = optimizer_state.host_copy(trainer.model, trainer.optimizer, self._ranks)

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

        self._pending = (step, _in_thread(write))

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


def _in_thread(write: Any) -> Future[None]:
    """A daemon: a rank that waits for one that hangs can end."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            write()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
