"""How the cost of a training step grows: with the tokens of a batch, their length, layers and width.

Time is forward and backward; memory is what the forward saves for the backward, each tensor counted once
without the parameters, so it does not depend on an allocator. `benchmarks.plot` fits the exponents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.reference import ReferenceBert
from benchmarks.task import near
from benchmarks.workloads import VOCAB_SIZE, packed_batch, padded_arguments
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


def saved_bytes(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """What the forward pass keeps for the backward pass, each storage once, without the parameters."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()
    num_bytes = sum(storage.nbytes() for storage in saved.values())
    del loss
    return num_bytes


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
    batch = packed_batch([point.length] * (point.tokens // point.length), VOCAB_SIZE)

    def step_loss() -> torch.Tensor:
        parts = model.loss_parts(batch)
        return parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count

    def step() -> None:
        step_loss().backward()
        model.zero_grad()

    info = {"axis": axis, "value": getattr(point, axis), "saved_bytes": saved_bytes(model, step_loss)}
    if axis == "length":
        # the textbook on the same rows, which keeps its scores
        reference = ReferenceBert(config).train()
        reference.load_state_dict(model.state_dict())
        arguments = padded_arguments(batch.padded())
        info["reference_saved_bytes"] = saved_bytes(reference, lambda: reference(**arguments))
        with torch.no_grad():
            problem = near(reference(**arguments), 1e-4)(step_loss())
        assert not problem, problem
    benchmark.extra_info |= info
    benchmark.pedantic(step, rounds=3, warmup_rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["tokens_per_s"] = round(point.tokens / benchmark.stats.stats.median)
