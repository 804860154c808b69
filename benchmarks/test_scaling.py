"""How the cost of a training step grows: with the tokens of a batch, their length, layers and width.

Time is forward and backward; memory is what the forward saves for the backward, each tensor counted once
without the parameters, so it does not depend on an allocator. `benchmarks.plot` fits the exponents.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.workloads import VOCAB_SIZE
from fastbert.batch import PackedBatch
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining


@dataclass(frozen=True)
class Point:
    tokens: int = 2048
    length: int = 128
    layers: int = 2
    width: int = 256


POINTS = {
    "tokens": [Point(tokens=128 * n) for n in (1, 2, 4, 8, 16, 32, 64)],
    "length": [Point(tokens=4096, length=n) for n in (64, 128, 256, 512, 1024, 2048, 4096)],
    "layers": [Point(layers=n) for n in (1, 2, 4, 8)],
    "width": [Point(width=n) for n in (128, 256, 512, 768)],
}


def batch_of(point: Point) -> PackedBatch:
    num_sequences, masked = point.tokens // point.length, round(0.15 * point.tokens)
    return PackedBatch(
        input_ids=torch.randint(5, VOCAB_SIZE, (point.tokens,)),
        token_type_ids=torch.zeros(point.tokens, dtype=torch.long),
        position_ids=torch.arange(point.length).repeat(num_sequences),
        cu_seqlens=torch.arange(0, point.tokens + 1, point.length, dtype=torch.int32),
        max_seqlen=point.length,
        masked_positions=torch.randperm(point.tokens)[:masked].sort().values,
        masked_labels=torch.randint(5, VOCAB_SIZE, (masked,)),
        next_sentence_labels=torch.zeros(num_sequences, dtype=torch.long),
        num_tokens=point.tokens,
    )


@pytest.mark.parametrize(
    ("axis", "point"),
    [
        pytest.param(axis, point, id=f"{axis}-{getattr(point, axis)}")
        for axis, points in POINTS.items()
        for point in points
    ],
)
def test_scaling(axis: str, point: Point, benchmark: BenchmarkFixture) -> None:
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=point.width,
        num_hidden_layers=point.layers,
        num_attention_heads=point.width // 64,
        intermediate_size=4 * point.width,
        max_position_embeddings=max(512, point.length),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForPreTraining(config).train()
    batch = batch_of(point)

    def step() -> None:
        parts = model.loss_parts(batch)
        (parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count).backward()
        model.zero_grad()

    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss_parts(batch)
    benchmark.extra_info |= {"axis": axis, "value": getattr(point, axis), "saved_bytes": sum(saved.values())}
    del loss
    benchmark.pedantic(step, rounds=3, warmup_rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["tokens_per_s"] = round(point.tokens / benchmark.stats.stats.median)
