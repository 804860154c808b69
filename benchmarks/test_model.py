"""Inference on a padded batch, as a user of transformers.BertModel has it: ids and an attention mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.model_cases import Run, encoding_task
from benchmarks.peers import Compiler
from benchmarks.task import Roof
from benchmarks.workloads import VOCAB_SIZE, packed_batch, typical_batch, wikipedia_512
from fastbert.config import BertConfig


@pytest.fixture
def run(device: torch.device, roof: Roof, compiler: Compiler) -> Run:
    size = "base" if device.type == "cuda" else "mini"
    config = BertConfig.named(size, vocab_size=VOCAB_SIZE)
    return Run(config, device, roof, compiler, sorted_rows=4 if device.type == "cpu" else 16)


def budget(device: torch.device) -> int:
    return 32_768 if device.type == "cuda" else 4096


def test_encode_at_wikipedia_512(run: Run, in_turns: Callable[..., None]) -> None:
    """Against every peer."""
    batch = typical_batch(wikipedia_512(tokens_per_batch=budget(run.device)))
    task = encoding_task(batch, run)
    task.notes["compile_s"] = {name: round(s, 1) for name, s in run.compiler.seconds.items()}
    in_turns(task, rounds=5)


@pytest.mark.parametrize("length", [128, 512])
def test_encode_equal_lengths(length: int, run: Run, in_turns: Callable[..., None]) -> None:
    """No padding to save."""
    lengths = [length] * (budget(run.device) // length)
    in_turns(encoding_task(packed_batch(lengths, VOCAB_SIZE), replace(run, forms="plain")), rounds=5)


MIXES: dict[str, Callable[[np.random.Generator], int]] = {
    "uniform 256-512": lambda rng: rng.integers(256, 513),
    "uniform 1-512": lambda rng: rng.integers(1, 513),
    "geometric, mean 128": lambda rng: 1 + rng.geometric(1 / 127),
    "geometric, mean 60": lambda rng: 1 + rng.geometric(1 / 59),
}


@pytest.mark.parametrize("mix", MIXES)
def test_length_mix(mix: str, run: Run, in_turns: Callable[..., None]) -> None:
    """The more of a batch is padding to its longest, 512 in each, the more is saved."""
    rng, lengths = np.random.default_rng(0), [512]
    while sum(lengths) < budget(run.device) // 4:
        lengths.append(min(512, int(MIXES[mix](rng))))
    task = encoding_task(packed_batch(lengths, VOCAB_SIZE), replace(run, forms="plain"))
    task.notes["padding"] = round(1 - task.notes["tokens"] / task.notes["padded_slots"], 3)
    in_turns(task, rounds=3)
