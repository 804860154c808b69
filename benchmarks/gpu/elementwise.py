"""Rows of what stands between a layer's products, and of the feed-forward product with its activation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from fastbert_kernels import linear_act
from fastbert_kernels.bias_gelu import bias_gelu_bwd, bias_gelu_fwd
from fastbert_kernels.dropout_add_norm import dropout_add_norm_bwd, dropout_add_norm_fwd
from fastbert_kernels.launch import linear_act_configs
from fastbert_kernels.numerics import INTERPRETED
from torch import Tensor

from benchmarks import targets
from benchmarks.gpu.setting import DTYPE, Setting
from benchmarks.gpu.timing import equals
from benchmarks.task import OURS, Case, Task, is_the_basis

EPS = 1e-12


def norm_cases(setting: Setting) -> Iterator[Case]:
    for width in setting.sizes.widths:
        for rows in setting.sizes.rows:
            for p in (0.0, 0.1):
                for direction in ("fwd", "bwd"):
                    yield Case(
                        f"dropout_add_norm_{direction}[{rows} x {width}, dropout {p:g}]",
                        functools.partial(_norm, direction, rows, width, p, setting),
                    )


def _norm(direction: str, rows: int, width: int, p: float, setting: Setting) -> Task:
    x, residual, dy = (torch.randn(rows, width, device=setting.device).to(DTYPE) for _ in range(3))
    bias, weight, norm_bias = (torch.randn(width, device=setting.device).to(DTYPE) for _ in range(3))
    seed = torch.tensor([2026], device=setting.device)

    def ours(p: float) -> tuple[Tensor, Tensor, Tensor]:
        return dropout_add_norm_fwd(x, residual, bias, weight, norm_bias, EPS, p, seed)

    def theirs(p: float, x: Tensor, residual: Tensor, *vectors: Tensor) -> Tensor:
        bias, weight, norm_bias = vectors
        return F.layer_norm(F.dropout(x + bias, p) + residual, (width,), weight, norm_bias, EPS)

    leaves = [t.detach().requires_grad_() for t in (x, residual, bias, weight, norm_bias)]

    def gradients(function: Callable[..., Tensor], p: float) -> Callable[[], tuple[Tensor, ...]]:
        out = function(p, *leaves)
        return functools.partial(torch.autograd.grad, out, leaves, dy, retain_graph=True)

    forms = {"torch": theirs, "torch compiled": torch.compile(theirs, dynamic=False)}
    if INTERPRETED:
        del forms["torch compiled"]  # its compiler may not be there, and nothing is timed
    passes = 3 if direction == "fwd" else 5 if p else 4
    task = Task(
        passes * x.nbytes / 1e9,
        "gb",
        floor=setting.peak_gb,
        target=targets.NORM_SHARE * setting.peak_gb if setting.peak_gb else None,
    )
    if direction == "fwd":
        expected = (theirs(0.0, x, residual, bias, weight, norm_bias),)
        first = lambda out: out[:1]  # noqa: E731
        task.admit(OURS, lambda: lambda: ours(p), equals(expected, first), lambda: lambda: ours(0.0))
        for name, form in forms.items():
            call = lambda q, form=form: lambda: form(q, x, residual, bias, weight, norm_bias)  # noqa: E731
            task.admit(name, functools.partial(call, p), equals(expected), functools.partial(call, 0.0))
        return task
    expected = gradients(theirs, 0.0)()

    def backward(p: float) -> Callable[[], tuple[Tensor | None, ...]]:
        _, mean, rstd = ours(p)
        return lambda: dropout_add_norm_bwd(dy, x, residual, bias, weight, mean, rstd, p, seed)

    task.admit(OURS, lambda: backward(p), equals(expected, tuple), lambda: backward(0.0))
    for name, form in forms.items():
        call = functools.partial(gradients, form)
        task.admit(name, functools.partial(call, p), equals(expected, tuple), functools.partial(call, 0.0))
    return task


def activation_cases(setting: Setting) -> Iterator[Case]:
    for width in setting.sizes.widths:
        for rows in setting.sizes.rows:
            for direction in ("fwd", "bwd"):
                yield Case(
                    f"bias_gelu_{direction}[{rows} x {4 * width}]",
                    functools.partial(_bias_gelu, direction, rows, 4 * width, setting),
                )
            yield Case(
                f"linear_act_fwd[{rows} x {width} to {4 * width}]",
                functools.partial(_linear_act, rows, width, setting),
            )


def _bias_gelu(direction: str, rows: int, width: int, setting: Setting) -> Task:
    x, dy = (torch.randn(rows, width, device=setting.device).to(DTYPE) for _ in range(2))
    bias = torch.randn(width, device=setting.device).to(DTYPE)
    task = Task((2 if direction == "fwd" else 3) * x.nbytes / 1e9, "gb", floor=setting.peak_gb)
    if direction == "fwd":
        expected = (F.gelu(x + bias),)
        task.admit(OURS, lambda: lambda: bias_gelu_fwd(x, bias), equals(expected))
        task.admit("torch", lambda: lambda: F.gelu(x + bias), is_the_basis)
        return task
    leaves = [t.detach().requires_grad_() for t in (x, bias)]
    out = F.gelu(leaves[0] + leaves[1])
    gradients = functools.partial(torch.autograd.grad, out, leaves, dy, retain_graph=True)
    task.admit(OURS, lambda: lambda: bias_gelu_bwd(dy, x, bias), equals(gradients(), tuple))
    task.admit("torch", lambda: gradients, is_the_basis)
    return task


def _linear_act(rows: int, width: int, setting: Setting) -> Task:
    x = torch.randn(rows, width, device=setting.device).to(DTYPE)
    weight = torch.randn(4 * width, width, device=setting.device).to(DTYPE) / width**0.5
    bias = torch.randn(4 * width, device=setting.device).to(DTYPE)
    task = Task(8 * rows * width**2 / 1e12, "tflop", floor=setting.peak_tflops)
    product = F.linear(x, weight)
    expected = (bias_gelu_fwd(product, bias), product)

    configs = {}
    can_use_tma = INTERPRETED or linear_act.candidates(x, weight)[1][0].tma
    for version, arch in (("pointers", "sm_80"), ("tma", "sm_90")):
        config = linear_act_configs(arch, "bf16", rows, True)[0]
        if version == "pointers" or can_use_tma:
            configs[f"{OURS} {version}"] = config
    choice = linear_act.linear_act_choice(x, weight)
    if not isinstance(choice, str) and choice not in configs.values():
        configs[f"{OURS} as tuned"] = choice
    for name, config in configs.items():
        launch = functools.partial(linear_act.linear_act_fwd, x, weight, bias, config=config)
        task.admit(name, lambda launch=launch: launch, equals(expected, tuple))

    def behind_cublaslt() -> tuple[Tensor, Tensor]:
        h = F.linear(x, weight)
        return bias_gelu_fwd(h, bias), h

    task.admit(f"{OURS} behind cuBLASLt", lambda: behind_cublaslt, equals(expected, tuple))
    task.admit("torch", lambda: lambda: F.gelu(F.linear(x, weight, bias)), equals(expected[:1]))
    task.notes = {"configurations": {name: str(config) for name, config in configs.items()}}
    return task
