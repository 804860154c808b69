"""Fine-tuning steps at MiniLM's sizes on SST-2's lengths, against transformers padded in two ways.

Losses are compared before anything is timed. The weights and the words are random; only the lengths count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.task import Task
from fastbert.config import BertConfig
from fastbert.heads import BertForSequenceClassification
from fastbert.optim import parameter_groups
from fastbert.tasks.classify import ClassifyOptions, ClassifyTask
from fastbert.tasks.settings import Training
from fastbert.tasks.task import Feature
from fastbert.tasks.training import Stepper

MINILM = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BATCH, STEPS, FIXED_LENGTH = 32, 4, 128
GROUPED_STEPS = 50  # transformers' group_by_length sorts inside so many batches
LR = 2e-5


def sst2_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    """Token counts like those of SST-2's sentences: mean 23.3, deviation 10.6, from 4 to 66."""
    shape = (23.3 / 10.6) ** 2
    return np.clip(np.rint(rng.gamma(shape, 23.3 / shape, count)), 4, 66).astype(int)


def random_features(lengths: Sequence[int], rng: np.random.Generator) -> list[Feature]:
    return [
        Feature(
            [101, *rng.integers(1000, 30000, int(n) - 2).tolist(), 102], [0] * int(n), int(rng.integers(2))
        )
        for n in lengths
    ]


def padded_run(model: Any, batches: list[list[Feature]], width: int | None) -> Callable[[], float]:
    """Steps of transformers on rows padded to `width`, or to the longest; returns the mean loss of them."""
    groups = parameter_groups(model, 0.01)
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-6, fused=True)
    ready = []
    for batch in batches:
        longest = width or max(len(f.input_ids) for f in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, f in enumerate(batch):
            ids[row, : len(f.input_ids)] = torch.tensor(f.input_ids)
            mask[row, : len(f.input_ids)] = 1
        ready.append((ids, mask, torch.tensor([f.target for f in batch])))

    def run() -> float:
        losses = []
        for ids, mask, labels in ready:
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return float(np.mean(losses))

    return run


def grouped(features: list[Feature]) -> list[list[Feature]]:
    """`STEPS` batches as group_by_length makes them: sorted inside a large window, and some of these."""
    window = sorted(features, key=lambda f: -len(f.input_ids))
    batches = [window[at : at + BATCH] for at in range(0, len(window), BATCH)]
    # evenly spread over the window, so that the mix of lengths is that of the data
    return [batches[(2 * i + 1) * len(batches) // (2 * STEPS)] for i in range(STEPS)]


def shuffled(features: list[Feature], tokens: int, rng: np.random.Generator) -> list[list[Feature]]:
    """`STEPS` batches of random ones with `tokens` in all, within a hundredth, so that sides compare."""
    while True:
        chosen = [features[i] for i in rng.permutation(len(features))[: STEPS * BATCH]]
        if abs(tokens_of([chosen]) - tokens) <= tokens / 100:
            return [chosen[at : at + BATCH] for at in range(0, len(chosen), BATCH)]


def tokens_of(batches: list[list[Feature]]) -> int:
    return sum(len(f.input_ids) for batch in batches for f in batch)


@pytest.mark.parametrize("grouping", ["random", "by-length", "random-against-by-length"])
def test_sst2_steps(grouping: str, benchmark: BenchmarkFixture, in_turns: Callable[..., None]) -> None:
    """Four steps of 32 sentences; both sides get the same batches, random ones or grouped by length.

    In the last row transformers gets those by length, as its user would group them, and fastbert, where
    nobody has a reason to, random ones with as many tokens.
    """
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    if grouping == "random":
        features = random_features(sst2_lengths(rng, STEPS * BATCH), rng)
        batches = [features[at : at + BATCH] for at in range(0, len(features), BATCH)]
    else:
        features = random_features(sst2_lengths(rng, GROUPED_STEPS * BATCH), rng)
        batches = grouped(features)

    task = ClassifyTask(ClassifyOptions(), lambda text: None)
    task.labels = ["negative", "positive"]
    ours = BertForSequenceClassification(BertConfig(**MINILM))
    training = Training(lr=LR, warmup=0.0)
    stepper = Stepper(task, ours, training, torch.device("cpu"), total_steps=10**9)  # a constant rate

    def packed_run(batches: list[list[Feature]] = batches) -> float:
        units = [[index] for index in range(BATCH)]
        return float(np.mean([stepper.train_step(batch, units).item() for batch in batches]))

    def theirs() -> Any:
        config = transformers.BertConfig(**MINILM, num_labels=2)
        model = transformers.BertForSequenceClassification(config).train()
        model.load_state_dict(ours.state_dict())
        return model

    sides: dict[str, Callable[[], float]] = {
        "fastbert": packed_run,
        "transformers_dynamic": padded_run(theirs(), batches, None),
    }
    if grouping == "random":  # at a fixed length the order of the examples changes nothing
        sides["transformers_128"] = padded_run(theirs(), batches, FIXED_LENGTH)
    losses = {name: run() for name, run in sides.items()}
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["fastbert"], abs=1e-4), f"{name} trains on something else"
    tokens = tokens_of(batches)
    longest = [max(len(f.input_ids) for f in batch) for batch in batches]
    if grouping == "random-against-by-length":
        ours_only = shuffled(features, tokens, rng)
        sides["fastbert"] = lambda: packed_run(ours_only)
        benchmark.extra_info["fastbert_tokens"] = tokens_of(ours_only)
    benchmark.extra_info |= {
        "size": "MiniLM-L6",
        "tokens": tokens,
        "dynamic_slots": BATCH * sum(longest),
        "fixed_slots": BATCH * FIXED_LENGTH * STEPS,
    }
    # compared above, on the same batches
    in_turns(Task(STEPS * BATCH, "example", sides=dict(sides)), rounds=5)
