"""Whole training steps: packed fastbert, the textbook, and a plain transformers loop on the same instances.

Losses are compared before anything is timed. Tokens are real tokens: no pad, no filler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from benchmarks.reference import ReferenceBert
from benchmarks.workloads import VOCAB_SIZE, padded_arguments, typical_batch, wikipedia_512, windows_of
from fastbert.batch import PackedBatch
from fastbert.config import BertConfig
from fastbert.data.loader import PackedLoader, Vocabulary
from fastbert.data.store import DocumentStore
from fastbert.modeling import BertForPreTraining
from fastbert.optim import AdamW, Lamb, parameter_groups
from fastbert.train.trainer import Totals, Trainer

LR = 1e-4
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # pretrain's default for mini


def padded_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, arguments: dict[str, torch.Tensor]
) -> Callable[[], float]:
    def step() -> float:
        loss: Any = model(**arguments)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def packed_step(model: BertForPreTraining, batch: PackedBatch) -> Callable[[], float]:
    trainer = Trainer(model, AdamW(parameter_groups(model, 0.01), lr=LR), lambda updates: LR)

    def step() -> float:
        totals = Totals()
        trainer.train_step([batch], totals)
        return totals.metrics()["loss"]

    return step


@pytest.mark.parametrize("workload", ["wikipedia-512", "python-docs-128"])
def test_training_step(
    workload: str,
    docs: tuple[DocumentStore, Vocabulary],
    benchmark: BenchmarkFixture,
    in_turns: Callable[..., None],
) -> None:
    if workload == "wikipedia-512":
        batch = typical_batch(wikipedia_512(tokens_per_batch=4096))
    else:
        batch = typical_batch(windows_of(*docs, seq_len=128, tokens_per_batch=2048))
    padded = batch.padded()
    arguments = padded_arguments(padded)
    config = BertConfig.named("mini", vocab_size=VOCAB_SIZE, **NO_DROPOUT)
    ours = BertForPreTraining(config).train()
    reference = ReferenceBert(config).train()
    reference.load_state_dict(ours.state_dict())
    sides: dict[str, Callable[[], float]] = {
        "fastbert": packed_step(ours, batch),
        "reference": padded_step(reference, torch.optim.Adam(reference.parameters(), lr=LR), arguments),
    }
    try:
        import transformers
    except ImportError:
        pass
    else:
        theirs = transformers.BertForPreTraining(transformers.BertConfig(**config.to_diff_dict())).train()
        theirs.load_state_dict(ours.state_dict())
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, fused=True)
        sides["transformers"] = padded_step(theirs, optimizer, arguments)

    losses = {name: step() for name, step in sides.items()}  # of the first step, before any update
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["reference"], abs=2e-5), f"{name} trains on something else"

    benchmark.extra_info |= {
        "size": "mini",
        "workload": workload,
        "tokens": batch.num_tokens,
        "packed_slots": batch.num_slots,
        "padded_slots": padded.num_slots,
    }
    in_turns(sides, rounds=5, amount=batch.num_tokens, unit="tokens")


def test_default_run(docs: tuple[DocumentStore, Vocabulary], benchmark: BenchmarkFixture) -> None:
    """Steps of `python -m fastbert.pretrain --packed` on a CPU, with its loader and optimizer."""
    config = BertConfig.named("mini", vocab_size=VOCAB_SIZE, **NO_DROPOUT)
    model = BertForPreTraining(config)
    trainer = Trainer(model, Lamb(parameter_groups(model, 0.01), lr=5e-3), lambda updates: 5e-3)
    stream = iter(PackedLoader(windows_of(*docs, seq_len=128, tokens_per_batch=1024), workers=1))
    totals, tokens = Totals(), []

    def step() -> None:
        batch = next(stream)
        trainer.train_step([batch], totals)
        tokens.append(batch.num_tokens)

    benchmark.pedantic(step, rounds=15, warmup_rounds=3)
    if benchmark.stats is not None:
        per_step = sum(tokens) / len(tokens)
        benchmark.extra_info["tokens_per_s"] = round(per_step / benchmark.stats.stats.median)
