"""How kernels are launched: candidate configurations as pure functions, measured tables, the device guard.

A kernel whose best configuration depends on the GPU has a rule here: a pure function that returns an ordered
tuple of candidates. The first is launched where nothing was measured. `python -m fastbert_kernels.tune`
measures all of them on a GPU and writes the fastest into `tuned/<gpu>.json`; `choose` looks it up. Nothing is
timed while a model runs, so every process launches the same configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

# what rules tell apart and the compile report compiles for
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
# bytes of shared memory a program may have. sm_80 itself has 163 KiB, but its configurations also run on
# sm_86, sm_89 and sm_120, which have 99
MAX_SHARED_BYTES = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
TUNED_FOLDER = Path(__file__).parent / "tuned"

# persistent kernels under the interpreter: more than one, so that programs do share the tiles
_INTERPRETER_PROGRAMS = 3
_OLDEST_CAPABILITY = 8

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

# a program holds whole rows; the widest of them take all the registers of 16 warps
ROW_WIDTH_LIMIT = 8192
_ROW_THREAD_ELEMENTS = 16
# three fp32 sums of the columns also stay in registers
_ROW_BWD_THREAD_ELEMENTS = 8
_ROW_WARPS, _ROW_MAX_WARPS = 4, 16
# about as many as run at once on the largest GPU, and work enough for each to be worth a row of partial sums
_ROW_BWD_PROGRAMS = 512
_ROW_BWD_MIN_TILES = 4
# sorted rows of a program that sums up runs: partial sums of 4 bytes beside at least 32 rows of 2
_RUN_SUM_MIN_ROWS, _RUN_SUM_TILES = 32, 1024


@dataclass(frozen=True)
class LaunchConfig:
    """One launch over a [M, N] matrix: a program owns `tiles_m` tiles, one below another."""

    block_m: int
    block_n: int
    tiles_m: int = 1
    num_warps: int = 4
    num_stages: int = 1  # of the loop over the tiles: more of them are loaded ahead

    @property
    def rows_per_program(self) -> int:
        return self.block_m * self.tiles_m

    def num_row_programs(self, num_rows: int) -> int:
        return triton.cdiv(num_rows, self.rows_per_program)

    def num_programs(self, num_rows: int, num_cols: int) -> int:
        return self.num_row_programs(num_rows) * triton.cdiv(num_cols, self.block_n)


@dataclass(frozen=True)
class AttentionConfig:
    """One tile of attention: block_m queries against block_n keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class MatmulConfig:
    """One tile of a matrix product; group_m rows of tiles are walked together, to share the L2 cache."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    tma: bool = False  # tiles are fetched through tensor descriptors (sm_90 and newer)


@dataclass(frozen=True)
class CompileCase:
    """One kernel as a launcher launches it, for compiling without tensors and without a GPU.

    Every kernel module has a function `compile_cases(arch: str) -> list[CompileCase]` that covers each of its
    kernels with every configuration that could be launched on that architecture.
    """

    kernel: Any  # the @triton.jit function
    label: str  # tells the cases of one kernel and dtype apart: "erf", "head_dim 64, 128x64"
    dtype: str  # "fp32", "fp16" or "bf16"
    signature: dict[
        str, str
    ]  # run-time argument -> Triton type ("*bf16", "i32", "tensordesc<bf16[128, 64]>")
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int | None  # None: the launcher leaves it to Triton
    aligned: frozenset[str]  # arguments that are multiples of 16
    uses_dot: bool = False  # matrix instructions are expected


Candidate = TypeVar("Candidate", bound=Hashable)


# ---- elementwise kernels ----------------------------------------------------------------------------------


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


def row_gather_config(num_cols: int) -> LaunchConfig:
    """For a kernel that fetches whole rows of a [M, N] matrix by index, N down to 1 (ids)."""
    block_n = min(column_block(num_cols, limit=1024), triton.next_power_of_2(num_cols))
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


# ---- kernels over whole rows ------------------------------------------------------------------------------


def row_norm_fwd_config(num_cols: int) -> LaunchConfig:
    """For a kernel that normalises the rows of a [M, N] matrix, N up to ROW_WIDTH_LIMIT."""
    return _row_config(num_cols, _ROW_THREAD_ELEMENTS)


def row_norm_bwd_config(num_rows: int, num_cols: int) -> LaunchConfig:
    """For its gradients, which also sum columns: one row of partial sums for each program.

    At most 512 programs, whatever the number of rows, so that partial sums stay small. Depends on the shape
    only, never on the device, so the order of the sums does too. `tiles_m` is a run-time argument of the
    kernel: another number of rows compiles nothing.
    """
    config = _row_config(num_cols, _ROW_BWD_THREAD_ELEMENTS)
    tiles = triton.cdiv(num_rows, config.block_m)
    tiles_m = max(_ROW_BWD_MIN_TILES, triton.cdiv(tiles, _ROW_BWD_PROGRAMS))
    num_stages = 3 if config.block_n <= 2048 else 2 if config.block_n <= 4096 else 1
    return dataclasses.replace(config, tiles_m=tiles_m, num_stages=num_stages)


def _row_config(num_cols: int, thread_elements: int) -> LaunchConfig:
    """Several short rows to a program of 4 warps, or a long row to more warps."""
    block_n = max(_MIN_BLOCK_N, triton.next_power_of_2(num_cols))
    block_m = max(1, 32 * _ROW_WARPS * thread_elements // block_n)
    num_warps = min(_ROW_MAX_WARPS, block_m * block_n // (32 * thread_elements))
    return LaunchConfig(block_m=block_m, block_n=block_n, num_warps=num_warps)


def run_sum_config(num_rows: int, num_cols: int) -> LaunchConfig:
    """For a kernel that walks down sorted rows of a [M, N] matrix and adds up runs of them.

    Tiles are short enough to fill a GPU, and at most 1,024, for a run that crosses all of them is summed up
    by few programs. Depends on the shape only, never on the device, so the order of the sums does too.
    `tiles_m` is a run-time argument of the kernel: another number of rows compiles nothing.
    """
    block_n = column_block(num_cols, limit=1024)
    tile_rows = triton.next_power_of_2(triton.cdiv(max(1, num_rows), _RUN_SUM_TILES))
    return LaunchConfig(
        block_m=1,
        block_n=block_n,
        tiles_m=max(_RUN_SUM_MIN_ROWS, tile_rows),
        num_warps=max(1, block_n // (32 * _ROW_BWD_THREAD_ELEMENTS)),
    )


# ---- optimizers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerConfig:
    """How a step walks through all tensors: in tiles, none of which spans two tensors."""

    tile: int  # elements of a program; in the norm of the gradients a program takes several tiles
    block: int  # elements at a time
    norm_block: int
    norm_programs: int  # at most, and so many partial sums
    num_warps: int


def optimizer_config() -> OptimizerConfig:
    """One for all: the sizes decide the order of the sums, so they depend on neither the GPU nor the model.

    A block is a 16-byte load of bf16 a thread; the norm, with one stream to keep the memory busy, takes two.
    A tile is long beside the three dependent loads that find it, and short enough for a few million
    parameters to fill a GPU. All programs of the norm are on a GPU at once.
    """
    return OptimizerConfig(tile=16384, block=1024, norm_block=2048, norm_programs=1024, num_warps=4)


# ---- attention: candidates, the first is launched where nothing was measured ------------------------------


# (kernel, widest head) -> architecture -> (block_m, block_n, num_warps, num_stages) of 16-bit kernels. None
# spills on sm_80 or sm_90, with dropout or without. One must have a row block of 64 or less: short sequences
_ATTENTION_TILES = {
    ("fwd", 64): {
        "sm_80": ((128, 64, 8, 3), (64, 64, 4, 3)),
        "sm_90": ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)),
        "sm_100": ((128, 64, 8, 3), (64, 64, 4, 3)),
        "gfx942": ((128, 64, 4, 3), (64, 64, 4, 3)),
    },
    ("fwd", 128): {
        "sm_80": ((128, 32, 8, 2), (64, 64, 4, 2)),
        "sm_90": ((128, 64, 8, 2), (64, 64, 8, 2)),
        "sm_100": ((128, 64, 8, 2), (64, 64, 4, 2)),
        "gfx942": ((128, 64, 8, 2), (64, 64, 4, 2)),
    },
    ("dq", 64): {
        "sm_80": ((128, 64, 8, 2), (64, 32, 4, 2)),
        "sm_90": ((128, 64, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2)),
        "sm_100": ((128, 64, 8, 2), (64, 64, 4, 2)),
        "gfx942": ((64, 64, 4, 2), (64, 32, 4, 2)),
    },
    ("dq", 128): {
        "sm_80": ((128, 32, 8, 2), (64, 32, 4, 2)),
        "sm_90": ((128, 64, 8, 2), (64, 32, 4, 2)),
        "sm_100": ((128, 64, 8, 2), (64, 32, 4, 2)),
        "gfx942": ((64, 32, 4, 2),),
    },
    ("dkdv", 64): {
        "sm_80": ((32, 128, 8, 2), (32, 64, 8, 2)),
        "sm_90": ((64, 128, 8, 2), (32, 64, 4, 2), (32, 128, 8, 2)),
        "sm_100": ((64, 128, 8, 2), (64, 64, 4, 2)),
        "gfx942": ((32, 64, 4, 2), (32, 128, 8, 2)),
    },
    ("dkdv", 128): {
        "sm_80": ((32, 64, 8, 2),),
        "sm_90": ((32, 128, 8, 2), (32, 64, 8, 2)),
        "sm_100": ((64, 64, 8, 2), (32, 128, 8, 2)),
        "gfx942": ((32, 64, 4, 2),),
    },
}
# without matrix instructions a thread holds its operands in registers: small tiles, many threads
_ATTENTION_FP32_TILES = {
    ("fwd", 64): (64, 32, 8, 2),
    ("fwd", 128): (32, 16, 8, 1),
    ("dq", 64): (16, 32, 8, 1),
    ("dq", 128): (16, 16, 8, 1),
    ("dkdv", 64): (32, 32, 8, 1),
    ("dkdv", 128): (16, 16, 8, 1),
}


# elements of a tile of scores when keys are masked one by one, which takes registers, too
_ATTENTION_KEY_MASK_TILE = {"sm_80": {"fwd": 64 * 64, "dq": 64 * 64, "dkdv": 32 * 64}}
_ATTENTION_KEY_MASK_TILE_ELSEWHERE = 128 * 64


def attention_fwd_configs(
    arch: str, dtype: str, block_d: int, tile_rows: int, key_mask: bool
) -> tuple[AttentionConfig, ...]:
    """block_m queries of one sequence, block_n keys at a time. block_d: the head's width, a power of two."""
    configs = _attention_configs("fwd", arch, dtype, block_d, key_mask)
    return tuple(config for config in configs if config.block_m <= tile_rows)


def attention_dq_configs(
    arch: str, dtype: str, block_d: int, tile_rows: int, key_mask: bool
) -> tuple[AttentionConfig, ...]:
    """As attention_fwd_configs."""
    configs = _attention_configs("dq", arch, dtype, block_d, key_mask)
    return tuple(config for config in configs if config.block_m <= tile_rows)


def attention_dkdv_configs(
    arch: str, dtype: str, block_d: int, tile_rows: int, key_mask: bool
) -> tuple[AttentionConfig, ...]:
    """block_n keys of one sequence, block_m queries at a time."""
    configs = _attention_configs("dkdv", arch, dtype, block_d, key_mask)
    return tuple(config for config in configs if config.block_n <= tile_rows)


@functools.cache
def _attention_configs(
    kernel: str, arch: str, dtype: str, block_d: int, key_mask: bool
) -> tuple[AttentionConfig, ...]:
    width = 64 if block_d <= 64 else 128
    if dtype == "fp32":
        return (AttentionConfig(*_ATTENTION_FP32_TILES[kernel, width]),)
    configs = (AttentionConfig(*tile) for tile in _ATTENTION_TILES[kernel, width][arch])
    limit = _ATTENTION_KEY_MASK_TILE.get(arch, {}).get(kernel, _ATTENTION_KEY_MASK_TILE_ELSEWHERE)
    return tuple(c for c in configs if not key_mask or c.block_m * c.block_n <= limit)


# ---- matrix products: candidates, the first is launched where nothing was measured ------------------------

# tiles of 16-bit products that are fetched through tensor descriptors. 128 x 256 has the higher intensity and
# the fewer tiles; 128 x 128 with four stages is what hides memory best without it
_DESCRIPTOR_TILES = (
    MatmulConfig(128, 128, 64, group_m=8, num_warps=8, num_stages=4, tma=True),
    MatmulConfig(128, 256, 64, group_m=8, num_warps=8, num_stages=3, tma=True),
    MatmulConfig(128, 128, 64, group_m=8, num_warps=4, num_stages=3, tma=True),
    MatmulConfig(64, 128, 64, group_m=8, num_warps=4, num_stages=4, tma=True),
    MatmulConfig(64, 64, 64, group_m=8, num_warps=4, num_stages=4, tma=True),
)
# 128 x 128 with 4 warps spills in dW on sm_80
_HALF_TILES = (
    MatmulConfig(128, 128, 64, group_m=8, num_warps=8, num_stages=3),
    MatmulConfig(128, 128, 32, group_m=8, num_warps=8, num_stages=4),
    MatmulConfig(64, 64, 64, group_m=8, num_warps=4, num_stages=3),
)
_FP32_TILES = {
    # without matrix instructions a thread holds its operands in registers: small tiles. Larger ones spill a
    # little in one of the products, another one with each Triton
    "fp32": (
        MatmulConfig(64, 32, 32, group_m=8, num_warps=8, num_stages=2),
        MatmulConfig(32, 32, 32, group_m=8, num_warps=4, num_stages=3),
    ),
    "tf32": (
        MatmulConfig(128, 128, 32, group_m=8, num_warps=8, num_stages=2),
        MatmulConfig(64, 64, 32, group_m=8, num_warps=4, num_stages=2),
    ),
}
# rows that start anywhere are loaded element by element, with an address in registers for each
_UNALIGNED_HALF_TILES = (
    MatmulConfig(128, 128, 32, group_m=8, num_warps=8, num_stages=2),
    MatmulConfig(64, 64, 32, group_m=8, num_warps=8, num_stages=2),
)
_ACT_THREAD_ELEMENTS, _ACT_UNALIGNED_THREAD_ELEMENTS = 64, 16
# AMD's compiler keeps one tile fewer in flight for the same number, and 64 KiB of shared memory hold two
_AMD_STAGES = 2
_DESCRIPTOR_ARCHITECTURES = ("sm_90", "sm_100")
# so few rows do not fill a GPU with large tiles
_FEW_ROWS = 1024
# two to four waves of programs on the GPUs of ARCHITECTURES, and a split long enough to pay for its sum
_DW_PROGRAMS = 384
_DW_MIN_SPLIT_ROWS = 2048
_DW_TILE = 128


def qkv_fwd_configs(
    arch: str, dtype: str, num_rows: int, num_features: int, aligned: bool
) -> tuple[MatmulConfig, ...]:
    """For [rows, K] x 3 [features, K]; block_m along rows, block_n along features, block_k along K.

    dtype is "fp16", "bf16", "fp32", or "tf32" for fp32 with TF32 products. `aligned` says that every row
    starts at a multiple of 16 elements and of 16 bytes. A tensor descriptor also stores the output, so with
    one a tile may not reach from one of the three projections into the next.
    """
    configs = _matmul_configs(arch, dtype, num_rows, aligned)
    fitting = tuple(c for c in configs if not c.tma or num_features % c.block_n == 0)
    return fitting or _matmul_configs(arch, dtype, num_rows, aligned, descriptors=False)


def linear_act_configs(arch: str, dtype: str, num_rows: int, aligned: bool) -> tuple[MatmulConfig, ...]:
    """For [rows, K] x [features, K] with an activation behind it; blocks as in qkv_fwd_configs.

    The activation takes registers beside the sums, and addresses of unaligned rows do: larger tiles spill.
    """
    limit = _ACT_THREAD_ELEMENTS if aligned or dtype in _FP32_TILES else _ACT_UNALIGNED_THREAD_ELEMENTS
    configs = _matmul_configs(arch, dtype, num_rows, aligned)
    return tuple(c for c in configs if c.block_m * c.block_n <= limit * 32 * c.num_warps)


def qkv_bwd_dx_configs(
    arch: str, dtype: str, num_rows: int, num_features: int, aligned: bool
) -> tuple[MatmulConfig, ...]:
    """For [rows, 3 features] x [3 features, K]; block_m along rows, block_n along K, block_k along features.

    A block of features may not reach from one projection into the next where descriptors fetch it.
    """
    configs = _matmul_configs(arch, dtype, num_rows, aligned)
    fitting = tuple(c for c in configs if not c.tma or num_features % c.block_k == 0)
    return fitting or _matmul_configs(arch, dtype, num_rows, aligned, descriptors=False)


def qkv_bwd_dw_configs(arch: str, dtype: str, num_rows: int, aligned: bool) -> tuple[MatmulConfig, ...]:
    """For 3 [features, rows] x [rows, K]; block_m along features, block_n along K, block_k along rows."""
    return _matmul_configs(arch, dtype, num_rows, aligned)


def _matmul_configs(
    arch: str, dtype: str, num_rows: int, aligned: bool, descriptors: bool = True
) -> tuple[MatmulConfig, ...]:
    if dtype in _FP32_TILES:
        configs = _FP32_TILES[dtype]
    elif not aligned:
        configs = _UNALIGNED_HALF_TILES
    elif descriptors and arch in _DESCRIPTOR_ARCHITECTURES:
        configs = _DESCRIPTOR_TILES
    else:
        configs = _HALF_TILES
    if arch == "gfx942":
        configs = tuple(dataclasses.replace(c, num_stages=_AMD_STAGES) for c in configs)
    if num_rows <= _FEW_ROWS:
        configs = tuple(sorted(configs, key=lambda c: c.block_m * c.block_n))
    return configs


def qkv_bwd_dw_splits(num_rows: int, num_features: int, num_inputs: int) -> int:
    """Parts into which the rows of dW's product are divided: its [features, K] tiles alone are few.

    Depends on the shape only, never on the device or the configuration, so the order of the sums does too.
    """
    tiles = 3 * triton.cdiv(num_features, _DW_TILE) * triton.cdiv(num_inputs, _DW_TILE)
    return max(1, min(_DW_PROGRAMS // tiles, num_rows // _DW_MIN_SPLIT_ROWS))


def rows_bucket(num_rows: int) -> int:
    """The power of two, at least 128, that num_rows is measured under: part of a tuning key."""
    return max(128, triton.next_power_of_2(num_rows))


# ---- the GPU at hand --------------------------------------------------------------------------------------


def architecture(x: Tensor) -> str:
    """The name in ARCHITECTURES whose rules hold on x's device; "sm_80" for a CPU tensor (interpreter).

    ValueError for a GPU that is too old.
    """
    return "sm_80" if x.device.type == "cpu" else _device_architecture(x.device)


@functools.cache
def _device_architecture(device: torch.device) -> str:
    if torch.version.hip:
        return "gfx942"
    return architecture_of(torch.cuda.get_device_capability(device))


def architecture_of(capability: tuple[int, int]) -> str:
    """The rules for an NVIDIA GPU. Consumer Blackwell (12.x) has neither tcgen05 nor room: sm_80's."""
    major, minor = capability
    if major < _OLDEST_CAPABILITY:
        raise ValueError(
            f"this GPU has compute capability {major}.{minor}, but the Triton kernels need "
            f"{_OLDEST_CAPABILITY}.0 or newer: use the eager backend on it"
        )
    if major == 9:
        return "sm_90"
    return "sm_100" if major in (10, 11) else "sm_80"


def num_programs_persistent(x: Tensor) -> int:
    """Programs of a persistent kernel: x's multiprocessors; a few for a CPU tensor (interpreter)."""
    return _INTERPRETER_PROGRAMS if x.device.type == "cpu" else _num_multiprocessors(x.device)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- measured tables --------------------------------------------------------------------------------------


def choose(op: str, key: str, candidates: tuple[Candidate, ...], x: Tensor) -> Candidate:
    """The candidate that `tuned/` names for (op, key) on x's GPU, or the first where it names none.

    A lookup: nothing is timed, and nothing depends on the process or on earlier calls. `key` tells dtypes and
    shapes apart and holds nothing that changes with every batch. ValueError for a table that names something
    that is not a candidate.
    """
    name = None if x.device.type == "cpu" else _tuned_choices(x.device).get((op, key))
    return candidates[0] if name is None else _candidate_named(name, op, key, candidates)


@functools.cache
def _candidate_named(name: str, op: str, key: str, candidates: tuple[Candidate, ...]) -> Candidate:
    for candidate in candidates:
        if str(candidate) == name:
            return candidate
    raise ValueError(
        f"the tuning table names {name} for {op} {key}, which is not one of its {len(candidates)} "
        "candidates: run `python -m fastbert_kernels.tune` again on this GPU, or delete the table"
    )


@functools.cache
def _tuned_choices(device: torch.device) -> dict[tuple[str, str], str]:
    """(op, key) -> the name (`str`) of the fastest candidate."""
    rows = read_tuned_rows(tuned_file(torch.cuda.get_device_name(device)))
    return {(row["op"], row["key"]): row["choice"] for row in rows}


def tuned_file(gpu: str) -> Path:
    """Where the table of the GPU of that name is; it need not exist."""
    return TUNED_FOLDER / (re.sub(r"[^a-z0-9.]+", "-", gpu.lower()).strip("-") + ".json")


def read_tuned_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a table as `tune` wrote them; none if there is no such file."""
    if not file.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return rows


# ---- launching --------------------------------------------------------------------------------------------


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
