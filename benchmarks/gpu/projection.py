"""Rows of the QKV projection: both versions of the kernels against cuBLASLt on the stacked weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from fastbert_kernels import linear
from fastbert_kernels.launch import MatmulConfig
from fastbert_kernels.linear import qkv_fwd
from fastbert_kernels.linear_dw import qkv_bwd_dw
from fastbert_kernels.linear_dx import qkv_bwd_dx
from fastbert_kernels.numerics import INTERPRETED
from torch import Tensor

from benchmarks.gpu.setting import DTYPE, Setting
from benchmarks.gpu.timing import equals
from benchmarks.task import OURS, Case, Task


def qkv_cases(setting: Setting) -> Iterator[Case]:
    for op in ("qkv_fwd", "qkv_bwd_dx", "qkv_bwd_dw"):
        for width in setting.sizes.widths:
            for rows in setting.sizes.rows:
                yield Case(f"{op}[{rows} x {width}]", functools.partial(_qkv, op, rows, width, setting))


def _qkv(op: str, rows: int, width: int, setting: Setting) -> Task:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device).to(DTYPE)

    x, dqkv = random(rows, width), random(rows, 3, width)
    weights, biases = [random(width, width) / width**0.5 for _ in range(3)], [random(width) for _ in range(3)]
    stacked, bias = torch.cat(weights), torch.cat(biases)
    task = Task(6 * rows * width**2 / 1e12, "tflop", floor=setting.peak_tflops)

    if op == "qkv_fwd":
        tensors: tuple[Tensor, ...] = (x, *weights)
        launch: Callable[[MatmulConfig], Any] = lambda config: qkv_fwd(x, *weights, *biases, config=config)  # noqa: E731
        library = {
            "cuBLASLt": lambda: F.linear(x, stacked, bias),
            "cuBLASLt and stacking": lambda: F.linear(x, torch.cat(weights), torch.cat(biases)),
        }
    elif op == "qkv_bwd_dx":
        tensors = (dqkv, *weights)
        launch = lambda config: qkv_bwd_dx(dqkv, *weights, config)  # noqa: E731
        library = {
            "cuBLASLt": lambda: dqkv.flatten(1) @ stacked,
            "cuBLASLt and stacking": lambda: dqkv.flatten(1) @ torch.cat(weights),
        }
    else:
        tensors = (dqkv, x)
        launch = lambda config: qkv_bwd_dw(dqkv, x, config)  # noqa: E731
        library = {"cuBLASLt and sums": lambda: (dqkv.flatten(1).T @ x, dqkv.flatten(1).sum(0))}

    def results(output: Any) -> tuple[Tensor, ...]:
        """[the three weights or rows, the three biases], whichever side it comes from."""
        parts = output if isinstance(output, tuple) else (output,)
        if len(parts) == 6:
            parts = (torch.cat(parts[:3]), torch.cat(parts[3:]))
        return tuple(part.flatten(1) if part.dim() == 3 else part for part in parts)

    expected = results(next(iter(library.values()))())
    configs = our_configs(op, rows, width, tensors)
    for name, config in configs.items():
        task.admit(name, lambda config=config: functools.partial(launch, config), equals(expected, results))
    for name, call in library.items():
        task.admit(name, lambda call=call: call, equals(expected, results))
    task.notes = {"configurations": {name: str(config) for name, config in configs.items()}}
    return task


def our_configs(op: str, rows: int, width: int, tensors: tuple[Tensor, ...]) -> dict[str, MatmulConfig]:
    """The pointer and the TMA version, as they are launched without a table, and the table's choice."""
    named = {}
    for version, arch in (("pointers", "sm_80"), ("tma", "sm_90")):
        config = linear._rule(op, arch, "bf16", rows, width, width, True)[1][0]
        can_run = INTERPRETED or linear.candidates(op, *tensors)[1][0].tma
        if version == "pointers" or (config.tma and can_run):
            named[f"{OURS} {version}"] = config
    choice = linear.qkv_choice(op, *tensors)
    if not isinstance(choice, str) and choice not in named.values():
        named[f"{OURS} as tuned"] = choice
    return named
