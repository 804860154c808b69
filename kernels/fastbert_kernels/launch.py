"""How kernels are launched: block sizes as pure functions, the device guard, the cases to compile."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

# elements of a tile: two 16-byte loads of bf16 a thread at 4 warps. Twice as many double the registers
# (erf in fp32: 40 -> 80), and the column sum then spills on sm_90
_TILE = 2048
# the column sum also keeps an fp32 accumulator of the tile in registers, so more threads share it
_COLUMN_SUM_WARPS = 8
# enough programs to fill the largest GPU several times over
_COLUMN_SUM_PROGRAMS = 1024
# bounds the partial sums: with 8-row tiles their traffic is 8 bytes per 128 elements
_COLUMN_SUM_MAX_TILES = 16
_MIN_BLOCK_N = 64


@dataclass(frozen=True)
class LaunchConfig:
    """One launch over a [M, N] matrix: a program owns `tiles_m` tiles, one below another."""

    block_m: int
    block_n: int
    tiles_m: int = 1
    num_warps: int = 4

    @property
    def rows_per_program(self) -> int:
        return self.block_m * self.tiles_m

    def num_row_programs(self, num_rows: int) -> int:
        return triton.cdiv(num_rows, self.rows_per_program)

    def num_programs(self, num_rows: int, num_cols: int) -> int:
        return self.num_row_programs(num_rows) * triton.cdiv(num_cols, self.block_n)


@dataclass(frozen=True)
class CompileCase:
    """One kernel as a launcher launches it, for compiling without tensors and without a GPU.

    Every kernel module has a function `compile_cases() -> list[CompileCase]` that covers each of its kernels.
    """

    kernel: Any  # the @triton.jit function
    label: str  # tells the cases of one kernel and dtype apart: "erf", "head_dim 64"
    dtype: str  # "fp32", "fp16" or "bf16"
    signature: dict[str, str]  # run-time argument -> Triton type ("*bf16", "i32", "fp32")
    constexprs: dict[str, Any]
    config: LaunchConfig
    aligned: frozenset[str] = field(default_factory=frozenset)  # arguments that are multiples of 16
    max_spill_bytes: int = 0  # ptxas spill stores + loads (CUDA), spilled registers x 4 (AMD)


def column_block(num_cols: int, limit: int) -> int:
    """Columns of a tile: the largest power of two up to `limit` whose tiles waste at most an eighth of a row.

    A row shorter than the smallest block, or that no block fits so well, gets the smallest one (64).
    """
    block = limit
    while block > _MIN_BLOCK_N:
        if (triton.cdiv(num_cols, block) * block - num_cols) * 8 <= num_cols:
            return block
        block //= 2
    return _MIN_BLOCK_N


def elementwise_config(num_cols: int) -> LaunchConfig:
    """For a kernel that reads and writes each element of a [M, N] matrix once.

    Depends on the width only, so a batch of another number of rows never compiles anything.
    """
    block_n = column_block(num_cols, limit=1024)
    return LaunchConfig(block_m=_TILE // block_n, block_n=block_n)


def column_sum_config(num_rows: int, num_cols: int) -> LaunchConfig:
    """For a kernel that also sums the columns of a [M, N] matrix: one row of partial sums per row program.

    Few rows: one tile a program, so that a small matrix still fills the GPU. Many rows: up to 16 tiles, so
    that the partial sums stay small. Depends on the shape only, never on the device, so the order of the sums
    does too. `tiles_m` is a run-time argument of the kernel: another number of rows compiles nothing.
    """
    block_n = column_block(num_cols, limit=256)
    block_m = _TILE // block_n
    tiles = triton.cdiv(num_rows, block_m) * triton.cdiv(num_cols, block_n)
    tiles_m = min(max(1, tiles // _COLUMN_SUM_PROGRAMS), _COLUMN_SUM_MAX_TILES)
    return LaunchConfig(block_m=block_m, block_n=block_n, tiles_m=tiles_m, num_warps=_COLUMN_SUM_WARPS)


def device_guard(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's. ROCm's device is "cuda" too."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def check_can_launch(kernel: Any, x: Tensor) -> None:
    """ValueError if x is not where `kernel` runs: on a GPU, or anywhere under TRITON_INTERPRET=1."""
    if x.device.type != "cuda" and isinstance(kernel, triton.JITFunction):
        raise ValueError(
            f"x is on {x.device}, but Triton kernels run on a GPU: move it to one, or set TRITON_INTERPRET=1 "
            "before Triton is imported"
        )
