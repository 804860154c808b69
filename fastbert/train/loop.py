"""The loop around the trainer: metrics, evaluations, checkpoints, signals."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from fastbert.batch import IGNORE_INDEX, PackedBatch
from fastbert.config import BertConfig
from fastbert.data.device_masking import DeviceMasking
from fastbert.data.loader import PackedLoader, joined_states
from fastbert.data.store import DocumentStore
from fastbert.errors import UserError
from fastbert.ops import backend
from fastbert.train import checkpoint as ckpt
from fastbert.train.distributed import Ranks, StopVote
from fastbert.train.flops import training_flops
from fastbert.train.report import NoReport, RunReport, peak_flops
from fastbert.train.saving import Saver
from fastbert.train.settings import Settings
from fastbert.train.step import PRECISIONS
from fastbert.train.trainer import Totals, Trainer

# steps in a row without a finite gradient that end a run; fp16 needs up to 16 to find its loss scale
MAX_BAD_STEPS = 30
ECHO_S = 5.0  # in which a signal's second arrival is the first one, passed on


@dataclass
class RunData:
    loader: PackedLoader
    held_out: list[PackedBatch]
    store: DocumentStore
    key: dict[str, Any]  # what the position in the stream depends on
    example: str  # a sentence with a [MASK] to try at the end
    masking: DeviceMasking | None  # of the loader's batches, if they come without masks


class Interruption:
    """SIGINT and SIGTERM end the run after the step in progress; a second one ends it at once.

    With several ranks, one that follows at once is the same: job managers signal every process, and torchrun
    then passes on what it got.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.signal: int | None = None
        self._ranks, self._time = ranks or Ranks(), 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            if self._ranks.alone or time.monotonic() - self._time > ECHO_S:
                os._exit(128 + number)
            return
        self.signal, self._time = number, time.monotonic()
        if not self._ranks.is_main:
            return
        # not through the console, which the signal may have interrupted
        os.write(2, b"\nfinishing the step and saving; a second signal ends the run at once\n")


@dataclass
class Pace:
    """Work done since the last metric row."""

    tokens: int = 0
    slots: int = 0  # positions the model computed
    padded_slots: int = 0  # positions rows of seq_len would have had
    flops: float = 0.0
    seconds: float = 0.0

    def add(
        self,
        batch: PackedBatch,
        slots: int,
        seq_len: int,
        config: BertConfig,
        masking: DeviceMasking | None = None,
    ) -> None:
        seqlens = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1])[: batch.num_sequences()].long()
        self.tokens += batch.num_tokens
        self.slots += slots
        self.padded_slots += len(seqlens) * seq_len
        if masking is None:
            num_masked = int((batch.masked_labels != IGNORE_INDEX).sum())
        else:
            num_masked = masking.num_asked(seqlens.numpy())
        self.flops += training_flops(config, batch.num_tokens, int((seqlens * seqlens).sum()), num_masked)

    def summed(self, ranks: Ranks) -> Pace:
        """The work of all ranks, in this one's time."""
        names = ("tokens", "slots", "padded_slots", "flops")
        sums = dict(zip(names, ranks.sum_on_host([getattr(self, name) for name in names])))
        return Pace(
            int(sums["tokens"]), int(sums["slots"]), int(sums["padded_slots"]), sums["flops"], self.seconds
        )

    def metrics(self, peak: float) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "padding_avoided": 1 - self.slots / self.padded_slots,
            "mfu": self.flops / self.seconds / peak,
        }


def run_training(
    settings: Settings, trainer: Trainer, data: RunData, tokenizer: Tokenizer, console: Console, run_dir: Path
) -> int:
    o, run, seq_len = settings.optimization, settings.run, settings.data.seq_len
    assert o.steps is not None and o.precision is not None and run.save_every is not None
    config, ranks = trainer.model.config, trainer.ranks
    references = {"ln V": math.log(config.vocab_size), "unigram entropy": data.store.unigram_entropy}
    parameters = sum(p.numel() for p in trainer.model.parameters())
    if trainer.step >= o.steps:
        console.print(
            f"{run_dir} has finished its {trainer.step} steps: nothing to train; raise --steps to continue "
            "it, or choose another --output",
            soft_wrap=True,
        )
        return 0
    console.print(
        f"training BERT-{settings.model.size} ({parameters / 1e6:.1f} M parameters) for {o.steps} steps of "
        f"{settings.data.tokens_per_batch * o.accumulate * ranks.world_size:,} tokens, {o.optimizer} at "
        f"{o.lr:g}, {o.precision} on {_devices(trainer)}, {'packed' if settings.data.packed else 'padded'} "
        f"at {seq_len}, into {run_dir}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"the MLM loss starts near ln V = {references['ln V']:.2f}; a model that only knows word "
        f"frequencies would reach the unigram entropy, {references['unigram entropy']:.2f}",
        highlight=False,
        soft_wrap=True,
    )
    if trainer.device.type != "cpu":
        head_dim = config.hidden_size // config.num_attention_heads
        decision = backend.explain("attention", trainer.device, PRECISIONS[o.precision], head_dim)
        console.print(f"attention runs on {decision.implementation}: {decision.reason}", soft_wrap=True)
    peak = peak_flops(trainer.device, o.precision) * ranks.world_size
    report = (RunReport if ranks.is_main else NoReport)(run_dir, console, o.steps, trainer.step, references)
    stream = iter(data.loader)
    held_out = [batch if settings.data.packed else batch.padded() for batch in data.held_out]
    totals, pace, all_tokens, all_seconds = Totals(), Pace(), 0, 0.0
    row: dict[str, Any] = {}
    skipped = trainer.step - trainer.updates
    logged, bad_steps = trainer.step, 0  # bad_steps: those skipped since the last report of a good one

    saver = Saver(run_dir, trainer, tokenizer, run.keep_last, run.keep_every)

    def save() -> None:
        loader_states = ranks.gather(data.loader.state_dict())
        saver.save(
            {
                "trainer": trainer.state_dict(),  # waits for the device
                "loader": loader_states and joined_states(loader_states),
                "data": data.key,
                "optimizer": o.optimizer,
                "phase": o.phase,
                "batches_per_step": o.accumulate * ranks.world_size,
            }
        )

    stop, vote = None, StopVote(ranks)
    with Interruption(ranks) as interruption:
        try:
            while trainer.step < o.steps and stop is None:
                started = time.perf_counter()
                batches = _next_batches(stream, settings, pace, config, data.masking)
                trainer.train_step(batches, totals)
                last = trainer.step == o.steps
                logs = trainer.step % run.log_every == 0 or last
                stop = vote(interruption.signal, wait=logs)
                if logs:
                    saver.check()
                    row = {"step": trainer.step, **totals.metrics(ranks)}  # waits for the device
                    pace = pace.summed(ranks)
                    pace.seconds += time.perf_counter() - started
                    new = trainer.step - trainer.updates - skipped
                    if new:
                        report.say(_skipped(trainer, new))
                    bad_steps = bad_steps + new if new == trainer.step - logged else 0
                    skipped, logged = skipped + new, trainer.step
                    if bad_steps >= MAX_BAD_STEPS:
                        raise _gave_up(trainer, bad_steps, batches, run_dir)
                    row |= {
                        "lr": float(trainer.optimizer.param_groups[0]["lr"]),
                        "grad_norm": float(trainer.optimizer.grad_norm),
                        **pace.metrics(peak),
                    }
                    report.log(row)
                    all_tokens, all_seconds = all_tokens + pace.tokens, all_seconds + pace.seconds
                    totals, pace = Totals(), Pace()
                else:
                    pace.seconds += time.perf_counter() - started
                    report.advance(trainer.step)
                if held_out and run.eval_every and (trainer.step % run.eval_every == 0 or last):
                    scores = {f"eval_{name}": value for name, value in trainer.evaluate(held_out).items()}
                    scores["eval_mlm_perplexity"] = math.exp(min(scores["eval_mlm_loss"], 700.0))
                    report.log({"step": trainer.step, **scores})
                    row = row | scores  # a new dict: the training row is logged already
                if trainer.step % run.save_every == 0 and not last:
                    save()
                    report.draw()
            save()
            saver.wait()
            path = ckpt.checkpoint_path(run_dir, trainer.step)
            report.draw()
        except UserError:
            saver.settle()
            raise
        finally:
            stream.close()  # ends the loader's processes, for which the exit of this one would wait
            report.close()
    if stop is not None:
        report.say(f"stopped after step {trainer.step}; the same command continues from {path}")
        return 128 + stop
    _finish(report, row, references, all_tokens, all_seconds, path, data.example)
    return 0


def _devices(trainer: Trainer) -> str:
    """The device, and how many ranks train, each on its own."""
    ranks, kind = trainer.ranks, trainer.device.type
    sharded = ", each with a part of the weights" if trainer.sharded else ""
    return str(trainer.device) if ranks.alone else f"{ranks.world_size} ranks ({kind}){sharded}"


def _gave_up(trainer: Trainer, count: int, batches: list[Any], run_dir: Path) -> UserError:
    """What ends a run without a finite gradient; the last step's batches are saved, by each rank its own."""
    path = run_dir / f"bad-batch-{trainer.step}-rank-{trainer.ranks.rank}.pt"
    torch.save([asdict(batch) for batch in batches], path)
    return UserError(
        f"the gradients of the last {count} steps were not finite: give a lower --lr or another --precision; "
        f"the batch of step {trainer.step} is in {path}, and the same command continues from the last "
        "checkpoint"
    )


def _skipped(trainer: Trainer, count: int) -> str:
    steps = "one step" if count == 1 else f"{count} steps"
    text = (
        f"step {trainer.step}: {steps} since the last report had a gradient that is not finite "
        "and changed nothing"
    )
    if trainer.scaler.is_enabled():
        text += f"; the loss scale is now {trainer.scaler.get_scale():g}"
    return text


def _next_batches(
    stream: Iterator[PackedBatch],
    settings: Settings,
    pace: Pace,
    config: BertConfig,
    masking: DeviceMasking | None,
) -> list[Any]:
    batches: list[Any] = []
    for _ in range(settings.optimization.accumulate):
        batch = next(stream)
        batches.append(batch if settings.data.packed else batch.padded())
        pace.add(batch, batches[-1].num_slots, settings.data.seq_len, config, masking)
    return batches


def _finish(
    report: RunReport,
    row: dict[str, Any],
    references: dict[str, float],
    tokens: int,
    seconds: float,
    path: Path,
    example: str,
) -> None:
    entries = {
        "MLM loss": f"{row['mlm_loss']:.3f} in training"
        + (f", {row['eval_mlm_loss']:.3f} held out" if "eval_mlm_loss" in row else ""),
        **{name: f"{value:.3f}" for name, value in references.items()},
        "MLM accuracy": f"{100 * row.get('eval_mlm_accuracy', row['mlm_accuracy']):.1f} %",
        "NSP accuracy": f"{100 * row.get('eval_nsp_accuracy', row['nsp_accuracy']):.1f} %",
        "tokens": f"{tokens:,} in {seconds:.0f} s of training, {tokens / seconds:,.0f} a second",
        "checkpoint": str(path),
        "loss curve": str(path.parent / "loss_curve.png"),
    }
    if not row["nsp_loss"]:
        del entries["NSP accuracy"]
    report.final_table(entries)
    run_dir, quoted = shlex.quote(str(path.parent)), json.dumps(example, ensure_ascii=False)
    report.say(f"next: python -m fastbert.fill_mask {run_dir} {quoted}")
