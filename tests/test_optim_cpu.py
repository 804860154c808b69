"""The step through torch's fused kernel on a CPU against the mathematics written out, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastbert.ops import backend, lamb, optimizer_cpu
from fastbert.ops.optimizer_cpu import CPU_PIECE
from fastbert.optim import AdamW, Lamb

# more than one piece; nothing; a number; several that share a piece; one that no longer fits into it
SHAPES = ((CPU_PIECE + 7,), (0,), (), (7, 5), (2, 3, 4), (CPU_PIECE - 20,), (9,))
COMMON = {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
FP64 = torch.float64

Tensors = list[Tensor]


def problem(grad_dtype: torch.dtype = FP64) -> tuple[Tensors, Tensors, Tensors, Tensors, list[float]]:
    """Weights, gradients, moments and step counts, as a step takes them."""
    params = [torch.randn(shape, dtype=FP64) for shape in SHAPES]
    params[3].zero_()  # no norm, no trust ratio
    grads = [torch.randn(shape, dtype=FP64).to(grad_dtype) for shape in SHAPES]
    grads[4] = grads[4].transpose(0, 2).contiguous().transpose(0, 2)
    exp_avgs = [torch.randn(shape, dtype=FP64) * 0.1 for shape in SHAPES]
    exp_avg_sqs = [torch.rand(shape, dtype=FP64) for shape in SHAPES]
    return params, grads, exp_avgs, exp_avg_sqs, [float(1 + i) for i in range(len(SHAPES))]


def assert_same_step(fast: Any, written_out: Any, grad_dtype: torch.dtype, options: dict[str, Any]) -> None:
    params, grads, exp_avgs, exp_avg_sqs, steps = problem(grad_dtype)
    expected = [[t.clone() for t in column] for column in (params, exp_avgs, exp_avg_sqs)]
    before = [grad.clone() for grad in grads]
    scratch = torch.full((2 * CPU_PIECE + 7,), float("nan"), dtype=FP64)  # what it holds plays no part
    fast(params, grads, exp_avgs, exp_avg_sqs, steps, scratch=scratch, **COMMON, **options)
    written_out(expected[0], grads, expected[1], expected[2], steps, **COMMON, **options)
    for ours, theirs in zip((params, exp_avgs, exp_avg_sqs), expected):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert all(torch.equal(a, b) for a, b in zip(grads, before))


@pytest.mark.parametrize("grad_scale", [1.0, 0.3])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(grad_scale: float, bias_correction: bool, weight_decay: float) -> None:
    options = {"grad_scale": grad_scale, "bias_correction": bias_correction, "weight_decay": weight_decay}
    assert_same_step(optimizer_cpu.adamw_, lamb.adamw_, FP64, options)


@pytest.mark.parametrize("grad_scale", [1.0, 0.3])
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize(("weight_decay", "use_trust_ratio"), [(0.1, True), (0.0, True), (0.1, False)])
def test_lamb(grad_scale: float, adam_w_mode: bool, weight_decay: float, use_trust_ratio: bool) -> None:
    options = {
        "grad_scale": grad_scale,
        "bias_correction": adam_w_mode,
        "weight_decay": weight_decay,
        "adam_w_mode": adam_w_mode,
        "use_trust_ratio": use_trust_ratio,
    }

    def written_out(*tensors: Any, **options: Any) -> None:
        lamb.lamb_(*tensors, grad_averaging=True, **options)

    assert_same_step(optimizer_cpu.lamb_, written_out, FP64, options)


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("written_out", [True, False])
def test_parts_of_tensors_have_the_norms_of_the_whole(written_out: bool, adam_w_mode: bool) -> None:
    """Halves of tensors, of which another rank has the other, equal half."""
    options = {"bias_correction": True, "weight_decay": 0.1, "adam_w_mode": adam_w_mode, "grad_scale": 0.3}
    options |= {"use_trust_ratio": True, **COMMON}
    params, grads, exp_avgs, exp_avg_sqs, steps = problem()
    halves = [[t.clone().reshape(-1) for t in column] for column in (params, grads, exp_avgs, exp_avg_sqs)]
    wholes = [[t.repeat(2) for t in column] for column in halves]
    sent = []

    def sum_over_shards(tensor: Tensor) -> Tensor:
        sent.append(tensor.numel())
        return tensor.mul_(2)

    if written_out:
        lamb.lamb_(*halves, steps, grad_averaging=True, sum_over_shards=sum_over_shards, **options)
    else:
        scratch = torch.full((CPU_PIECE + sum(map(Tensor.numel, params)),), float("nan"), dtype=FP64)
        optimizer_cpu.lamb_(*halves, steps, scratch=scratch, sum_over_shards=sum_over_shards, **options)
    lamb.lamb_(*wholes, steps, grad_averaging=True, **options)
    for ours, theirs in zip(halves, wholes):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b[: len(a)], rtol=1e-12, atol=1e-13)
    assert sent == [2 * len(SHAPES)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_lower_dtype_are_scaled_in_that_of_the_weights(dtype: torch.dtype) -> None:
    options = {"grad_scale": 0.3, "bias_correction": True, "weight_decay": 0.1}
    assert_same_step(optimizer_cpu.adamw_, lamb.adamw_, dtype, options)
    assert_same_step(optimizer_cpu.adamw_, lamb.adamw_, dtype, {**options, "grad_scale": 1.0})


@pytest.mark.parametrize("optimizer_class", [Lamb, AdamW])
def test_a_step_in_fp32_is_as_accurate_as_torchs(optimizer_class: type) -> None:
    """Against fp64: at most twice as far as the same mathematics written out in fp32."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in ((300, 1000), (50, 3), (17,))]
    grads = [[torch.randn(v.shape, generator=generator) for v in values] for _ in range(5)]

    def after(dtype: torch.dtype, written_out: bool) -> Tensor:
        params = [nn.Parameter(value.to(dtype)) for value in values]
        optimizer = optimizer_class(params, lr=0.01)
        if written_out:
            optimizer._scratch_for = lambda weights, all_at_once: None
        with backend.use("eager"):
            for step_grads in grads:
                for p, grad in zip(params, step_grads):
                    p.grad = grad.to(dtype)
                optimizer.step()
        return torch.cat([p.detach().double().flatten() for p in params])

    exact = after(FP64, written_out=False)
    torch.testing.assert_close(exact, after(FP64, written_out=True), rtol=1e-12, atol=1e-13)
    ours, plain = ((after(torch.float32, w) - exact).abs() for w in (False, True))
    assert ours.max() <= 2 * plain.max() and ours.mean() <= 2 * plain.mean()
