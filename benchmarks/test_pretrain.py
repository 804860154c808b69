"""Whole training steps, and the whole of a run: packed fastbert, the textbook, and what else there is.

Losses are compared before anything is timed. Tokens are real tokens: no pad, no filler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import plain_loop
from benchmarks.model_cases import PackedSteps, Run, step_flop, training_task
from benchmarks.peers import Compiler
from benchmarks.task import OURS, Roof, Task, near
from benchmarks.workloads import (
    VOCAB_SIZE,
    packed_batch,
    typical_batch,
    wikipedia_512,
    windows_of,
)
from fastbert.batch import PackedBatch
from fastbert.config import BertConfig
from fastbert.data.loader import PackedLoader, Vocabulary
from fastbert.data.store import DocumentStore
from fastbert.modeling import BertForPreTraining
from fastbert.optim import Lamb, parameter_groups
from fastbert.train.trainer import Totals, Trainer

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # pretrain's default for mini


@pytest.fixture
def run(device: torch.device, roof: Roof, compiler: Compiler) -> Run:
    """BERT-Base with its dropout on a GPU, mini without on a CPU: as `fastbert.pretrain` has them."""
    size, options = ("base", {}) if device.type == "cuda" else ("mini", NO_DROPOUT)
    config = BertConfig.named(size, vocab_size=VOCAB_SIZE, **options)
    return Run(config, device, roof, compiler, sorted_rows=4 if device.type == "cpu" else 16)


def batch_of(workload: str, tokens: int, docs: tuple[DocumentStore, Vocabulary]) -> PackedBatch:
    if workload == "wikipedia-512":
        return typical_batch(wikipedia_512(tokens_per_batch=tokens))
    if workload == "python-docs-128":
        return typical_batch(windows_of(*docs, seq_len=128, tokens_per_batch=tokens // 2))
    length = int(workload.removeprefix("equal-"))
    return packed_batch([length] * (tokens // 2 // length), VOCAB_SIZE)


@pytest.mark.parametrize("workload", ["wikipedia-512", "python-docs-128", "equal-128", "equal-512"])
def test_training_step(
    workload: str,
    docs: tuple[DocumentStore, Vocabulary],
    run: Run,
    benchmark: BenchmarkFixture,
    in_turns: Callable[..., None],
) -> None:
    """Every peer at Wikipedia's length mix; the textbook and transformers elsewhere."""
    batch = batch_of(workload, 32_768 if run.device.type == "cuda" else 4096, docs)
    task = training_task(batch, replace(run, forms="all" if workload == "wikipedia-512" else "plain"))
    task.notes |= {"size": "base" if run.device.type == "cuda" else "mini", "workload": workload}
    task.notes["compile_s"] = {name: round(s, 1) for name, s in run.compiler.seconds.items()}
    in_turns(task, rounds=5 if len(task.sides) < 5 else 3)


BUDGETS = {"cpu": (1024, 2048, 4096, 8192, 16_384), "cuda": (1024, 4096, 16_384, 65_536)}


@pytest.mark.parametrize("number", range(5))
def test_token_budget(
    number: int, run: Run, benchmark: BenchmarkFixture, in_turns: Callable[..., None]
) -> None:
    """How many tokens a step should have: our step on Wikipedia's length mix, by the tokens of a batch."""
    budgets = BUDGETS[run.device.type]
    if number >= len(budgets):
        pytest.skip("this device has fewer budgets")
    batch = typical_batch(wikipedia_512(tokens_per_batch=budgets[number]))
    steps = PackedSteps(BertForPreTraining(run.config).to(run.device), batch, run.device)
    task = Task(
        batch.num_tokens, "token", flop=step_flop(run.config, batch), roof=run.roof, is_model=True,
        notes={"tokens_per_batch": budgets[number], "tokens": batch.num_tokens},
    )  # fmt: skip
    # the loss that batches of one sequence each have
    alone = steps.trainer.evaluate([batch.padded()])["loss"]
    task.admit(
        OURS, lambda: steps.step, near(alone, 1e-4 if run.device.type == "cpu" else 5e-3), lambda: steps.loss
    )
    in_turns(task, rounds=5 if budgets[number] < 8192 else 3)


STEPS = 4  # a call: one step of a plain loop is as long as ours, but may have half of its tokens


def test_run_with_its_loader(
    docs: tuple[DocumentStore, Vocabulary], benchmark: BenchmarkFixture, in_turns: Callable[..., None]
) -> None:
    """Steps of `python -m fastbert.pretrain --packed` on a CPU, loader and optimizer included.

    Against `benchmarks/plain_loop.py` on the same documents, pairs and masks, padded to 128: both take the
    next batches of their own stream at each call.
    """
    config = BertConfig.named("mini", vocab_size=VOCAB_SIZE, **NO_DROPOUT)
    model = BertForPreTraining(config)
    trainer = Trainer(model, Lamb(parameter_groups(model, 0.01), lr=5e-3), lambda updates: 5e-3)
    stream = iter(PackedLoader(windows_of(*docs, seq_len=128, tokens_per_batch=1024), workers=1))
    totals, tokens = Totals(), {OURS: [], "plain transformers loop": []}

    def steps() -> int:
        taken = 0
        for _ in range(STEPS):
            batch = next(stream)
            trainer.train_step([batch], totals)
            taken += batch.num_tokens
        tokens[OURS].append(taken)
        return taken

    def make_plain() -> Callable[[], int]:
        theirs = plain_loop.model_of(VOCAB_SIZE)
        theirs.load_state_dict(model.state_dict())
        first = next(iter(PackedLoader(windows_of(*docs, seq_len=128, tokens_per_batch=1024))))
        loss = theirs(**plain_loop.rows(first)).loss.item()
        ours = BertForPreTraining(config)
        ours.load_state_dict(theirs.state_dict())
        right = near(Trainer(ours, Lamb(ours.parameters()), lambda _: 0.0).evaluate([first])["loss"], 1e-4)
        assert not right(loss), right(loss)
        loader = PackedLoader(windows_of(*docs, seq_len=128, tokens_per_batch=2048), workers=1)
        plain = plain_loop.batches(iter(loader))
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=5e-4)

        def run() -> int:
            taken = 0
            for _ in range(STEPS):
                batch = next(plain)
                plain_loop.step(theirs, optimizer, batch)
                taken += int(batch["attention_mask"].sum())
            tokens["plain transformers loop"].append(taken)
            return taken

        return run

    def some(taken: int) -> str:
        return "" if taken else "no token was trained on"

    task = Task(1.0, "call", notes={"steps_a_call": STEPS})
    task.admit(OURS, lambda: steps, some)
    task.admit("plain transformers loop", make_plain, some)
    in_turns(task, rounds=5)
    if benchmark.stats is not None:
        info: dict[str, Any] = benchmark.extra_info
        del info["calls_per_s"]
        info["tokens_per_s"] = {
            name: round(sum(tokens[name][-5:]) / 5 / (ms / 1e3)) for name, ms in info["ms"].items()
        }
        rates = info["tokens_per_s"]
        info["times_faster_than"] = {n: round(rates[OURS] / r, 2) for n, r in rates.items() if n != OURS}
