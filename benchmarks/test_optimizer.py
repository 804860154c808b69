"""One optimizer step over the parameters of a BERT, clipping included on every side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining
from fastbert.optim import AdamW, Lamb

OPTIONS = {"lr": 1e-4, "eps": 1e-6, "weight_decay": 0.01}


def parameters_of(size: str, vocab_size: int) -> list[nn.Parameter]:
    with torch.device("meta"):
        shapes = [
            p.shape for p in BertForPreTraining(BertConfig.named(size, vocab_size=vocab_size)).parameters()
        ]
    params = [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = 1e-3 * torch.randn(p.shape)
    return params


def torch_step(params: list[nn.Parameter], **kind: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(params, **OPTIONS, **kind)

    def step() -> None:
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def check_adamw_equals_torch(params: list[nn.Parameter]) -> None:
    ours, theirs = ([nn.Parameter(p.detach().clone()) for p in params] for _ in range(2))
    for copies in (ours, theirs):
        for copy, p in zip(copies, params):
            copy.grad = None if p.grad is None else p.grad.clone()
    AdamW(ours, **OPTIONS).step()
    torch_step(theirs, fused=True)()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# 5.5 M and 29 M parameters
@pytest.mark.parametrize(("size", "vocab_size", "rounds"), [("mini", 8192, 15), ("small", 30522, 7)])
def test_step(
    size: str, vocab_size: int, rounds: int, benchmark: BenchmarkFixture, in_turns: Callable[..., None]
) -> None:
    params = parameters_of(size, vocab_size)
    check_adamw_equals_torch(params)
    num_parameters = sum(p.numel() for p in params)
    benchmark.extra_info["parameters"] = num_parameters
    norm: Tensor = nn.utils.get_total_norm(p.grad for p in params if p.grad is not None)
    assert norm > 1, "clipping must be active"
    # the sides share weights and gradients: what a step does to them does not change its time
    sides: dict[str, Callable[[], object]] = {
        "fastbert Lamb": Lamb(params, **OPTIONS).step,
        "fastbert AdamW": AdamW(params, **OPTIONS).step,
        "torch AdamW fused": torch_step(params, fused=True),
        "torch AdamW foreach": torch_step(params, foreach=True),
    }
    in_turns(sides, rounds=rounds, amount=num_parameters, unit="parameters")
