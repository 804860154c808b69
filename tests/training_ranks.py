"""What each process of a distributed training test runs; a module of its own, so that it starts quickly."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fastbert import AdamW, BertConfig, BertForPreTraining, Lamb, PackedBatch
from fastbert.batch import IGNORE_INDEX
from fastbert.data.loader import LoaderSettings, PackedLoader, Vocabulary, WindowBuilder
from fastbert.errors import UserError
from fastbert.optim import parameter_groups
from fastbert.pretrain import main
from fastbert.train import checkpoint as ckpt
from fastbert.train import distributed, optimizer_state
from fastbert.train.distributed import Ranks, StopVote, shard
from fastbert.train.trainer import Totals, Trainer
from tests.documents import random_store

STEPS, MICRO_BATCHES = 20, 4  # of a step, over all ranks


def builder() -> WindowBuilder:
    store = random_store(60, vocab_size=100)
    vocabulary = Vocabulary(cls=2, sep=3, mask=4, unk=1, ordinary=np.arange(10, 100))
    return WindowBuilder(
        store, np.arange(60), vocabulary, LoaderSettings(seq_len=32, tokens_per_batch=128, seed=0)
    )


def emptied(batch: PackedBatch) -> PackedBatch:
    """A batch of the same shapes without any token or target, as a rank has that ran out of data."""
    return dataclasses.replace(
        batch,
        input_ids=batch.input_ids * 0,
        token_type_ids=batch.token_type_ids * 0,
        masked_positions=batch.masked_positions * 0,
        masked_labels=torch.full_like(batch.masked_labels, IGNORE_INDEX),
        next_sentence_labels=torch.full_like(batch.next_sentence_labels, IGNORE_INDEX),
        num_tokens=0,
    )


def batches(ranks: Ranks) -> Iterator[PackedBatch]:
    """This rank's share of the stream; every third batch has few targets, and each seventh nothing at all."""
    for round_, batch in enumerate(PackedLoader(builder(), rank=ranks.rank, world_size=ranks.world_size)):
        number = round_ * ranks.world_size + ranks.rank
        if number % 7 == 3:
            batch = emptied(batch)
        elif number % 3 == 0:
            labels = batch.masked_labels.clone()
            labels[2:] = IGNORE_INDEX
            batch = dataclasses.replace(batch, masked_labels=labels)
        yield batch


def trainer(
    ranks: Ranks,
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    sharded: bool = False,
    precision: str = "fp32",
    kind: type = Lamb,
) -> Trainer:
    torch.manual_seed(0)
    model = BertForPreTraining(
        BertConfig(
            vocab_size=101,  # of which no number of ranks gets equal parts
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if sharded:
        shard(model, ranks, torch.bfloat16 if precision == "bf16" else None)
    optimizer = kind(parameter_groups(model, 0.01), lr=1e-2)
    return Trainer(model, optimizer, lambda k: 1e-2 * min(1.0, (k + 1) / 4), precision, ranks=ranks)


def trained(ranks: Ranks, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Losses and gradient norms of each step, an evaluation, and the weights."""
    runner, stream = trainer(ranks, **options), batches(ranks)
    rows = []
    for _ in range(steps):
        totals = Totals()
        runner.train_step([next(stream) for _ in range(MICRO_BATCHES // ranks.world_size)], totals)
        rows.append({**totals.metrics(ranks), "grad_norm": float(runner.optimizer.grad_norm)})
    one = Ranks()
    held_out = [batch for batch, _ in zip(batches(one), range(7))]  # no multiple of the ranks
    return {"rows": rows, "evaluation": runner.evaluate(held_out), "weights": runner.weights()}


def moved(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Ten steps, saved, and ten more by another trainer: from whole weights to parts, and the other way."""
    found = {}
    for name, before, after in (("to parts", False, True), ("to whole", True, False), ("parts", True, True)):
        first, stream = trainer(ranks, sharded=before), batches(ranks)
        for _ in range(STEPS // 2):
            first.train_step([next(stream) for _ in range(MICRO_BATCHES // ranks.world_size)], Totals())
        path = folder / f"{name}-{ranks.world_size}"
        optimizer_state.write(path, optimizer_state.host_copy(first.model, first.optimizer, ranks), ranks)
        weights = ranks.from_main({key: weight.clone() for key, weight in first.weights().items()})
        second = trainer(ranks, sharded=after)
        optimizer_state.load(path, second.model, second.optimizer, ranks)
        second.load_weights(weights)
        second.load_state_dict(first.state_dict())
        for _ in range(STEPS // 2):
            second.train_step([next(stream) for _ in range(MICRO_BATCHES // ranks.world_size)], Totals())
        found[name] = second.weights()
    return found


def with_a_bad_gradient(ranks: Ranks, bad_rank: int, **options: Any) -> dict[str, Any]:
    """A step in which one rank's gradient is not finite, between two good ones."""
    runner, stream = trainer(ranks, **options), batches(ranks)
    weight = runner.model.bert.pooler.dense.weight
    seen = []
    for step in range(3):
        poison = float("nan") if step == 1 and ranks.rank == bad_rank else 1.0
        handle = runner.model.bert.pooler.register_forward_hook(
            lambda module, inputs, output, poison=poison: output * poison
        )
        runner.train_step([next(stream) for _ in range(2)], Totals())
        handle.remove()
        seen.append((runner.updates, _whole(weight.detach()).clone()))
    return {"seen": seen, "scale": runner.scaler.get_scale() if runner.scaler.is_enabled() else None}


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def votes(ranks: Ranks) -> list[int | None]:
    """What a rank hears at the end of each step: rank 1 gets a signal in steps 2 and 7."""
    vote = StopVote(ranks)
    signals = {2: 15, 7: 2} if ranks.rank == 1 else {}
    return [vote(signals.get(step), wait=step % 4 == 3) for step in range(9)]


def elements(ranks: Ranks) -> tuple[int, int]:
    """How many elements of the weights and of the moments a rank holds, of a sharded model."""
    runner, stream = trainer(ranks, sharded=True), batches(ranks)
    runner.train_step([next(stream) for _ in range(2)], Totals())
    weights = sum(p.to_local().numel() for p in runner.device_step.params)
    moments = sum(t.numel() for state in runner.optimizer.state.values() for t in state.values() if t.dim())
    return weights, moments


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Every check; what each rank found goes into `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{world_size}", world_size)
    ranks = Ranks(rank, world_size, rank, world_size, store)
    ranks.join(torch.device("cpu"), 60)
    found = {
        "fp32": trained(ranks),
        "fp64": trained(ranks, steps=6, dtype=torch.float64, checkpointing=True),
        "bad": with_a_bad_gradient(ranks, bad_rank=1),
        "sharded fp32": trained(ranks, sharded=True),
        "sharded fp64": trained(ranks, steps=6, dtype=torch.float64, checkpointing=True, sharded=True),
        "sharded adamw": trained(ranks, steps=6, dtype=torch.float64, sharded=True, kind=AdamW),
        "sharded bf16": trained(ranks, steps=6, precision="bf16", sharded=True),
        "sharded bad": with_a_bad_gradient(ranks, bad_rank=1, sharded=True),
        "sharded bad fp16": with_a_bad_gradient(ranks, bad_rank=1, sharded=True, precision="fp16"),
        "moved": moved(ranks, Path(folder)),
        "elements": elements(ranks),
        "votes": votes(ranks),
    }
    torch.save(found, Path(folder) / f"rank{rank}of{world_size}.pt")
    ranks.leave()


def run_commands(rank: int, commands: list[dict[str, Any]], port: int, folder: str) -> None:
    """`python -m fastbert.pretrain` as torchrun would start it, one command after the other, with 2 ranks.

    A command has `arguments`, those of one rank alone, and may have a `fault`, after which none can follow.
    """
    torch.set_num_threads(1)
    distributed.GRACE_S = 1.0
    for number, command in enumerate(commands):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        arguments = [*command["arguments"], *command.get(f"rank{rank}", [])]
        with contextlib.ExitStack() as stack:
            out, err = (
                stack.enter_context(open(f"{folder}/{number}.rank{rank}.{name}", "w"))
                for name in ("out", "err")
            )
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            stack.enter_context(_fault(command.get("fault"), rank))
            status = main(arguments)
            print(f"status {status}")


@contextlib.contextmanager
def _fault(name: str | None, rank: int) -> Iterator[None]:
    original = Trainer.train_step, ckpt.save_checkpoint
    if name == "hang" and rank == 1:

        def train_step(self: Trainer, *arguments: Any) -> None:
            if self.step == 3:
                time.sleep(20)
            original[0](self, *arguments)

        Trainer.train_step = train_step  # type: ignore[method-assign]
    if name == "full disk":

        def save_checkpoint(*_: Any, **__: Any) -> None:
            raise UserError("the disk is full")

        ckpt.save_checkpoint = save_checkpoint  # type: ignore[assignment]
    try:
        yield
    finally:
        Trainer.train_step, ckpt.save_checkpoint = original  # type: ignore[method-assign]
