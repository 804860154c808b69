"""Gradients of the weights and biases of the query, key and value projections (`linear.qkv_fwd`).

dw_i = dy_i.T @ x, three products over the T rows, and db_i, the column sums of dy_i, ride in one launch.
Summing a tile of dy there would read into registers what the matrix instructions take from shared memory,
and would make them wait for it on sm_90 (ptxas says so). So for 16-bit dy the sum is a second, narrow product
with ones: exact products, the same fp32 sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastbert_kernels.launch import (
    CompileCase,
    MatmulConfig,
    check_can_launch,
    device_guard,
    qkv_bwd_dw_splits,
)
from fastbert_kernels.linear import (
    CUBLASLT,
    DTYPES,
    cases_of_op,
    check_dqkv,
    check_matrix,
    checked_config,
    compile_case,
    descriptor,
    launch_options,
    select,
    tile_position,
    tuned_shapes,
)
from fastbert_kernels.numerics import dot, input_precision
from fastbert_kernels.tune import TuningCase

# columns of the product with ones: the narrowest that every architecture has an instruction for
ONES: tl.constexpr = tl.constexpr(16)
SUM_BLOCK = 1024
# a split of dW's rows begins at a block of every configuration
SPLIT_ROWS_MULTIPLE = 64
OUTPUTS = ("dwq", "dwk", "dwv", "dbq", "dbk", "dbv")


@triton.jit
def _ones(ROWS: tl.constexpr, DTYPE: tl.constexpr):
    # by way of fp32: the interpreter has no bf16 constants
    return tl.full((ROWS, ONES), 1.0, tl.float32).to(DTYPE)


@triton.jit
def _column_sums(db):
    """The first of the equal columns of a product with ones."""
    first = (tl.arange(0, ONES) == 0)[None, :]
    return tl.sum(tl.where(first, db, 0.0), axis=1)


@triton.jit
def _dw_tile(
    dy_ptrs,
    x_ptrs,
    stride_dt,
    stride_xt,
    in_features,
    in_cols,
    num_rows,
    WITH_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    ts = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    IS_FP32: tl.constexpr = x_ptrs.dtype.element_ty == tl.float32
    db = tl.zeros((BLOCK_M,) if IS_FP32 else (BLOCK_M, ONES), dtype=tl.float32)
    for t in range(0, num_rows, BLOCK_K):
        in_t = (ts < num_rows - t)[:, None]
        dy = tl.load(dy_ptrs, mask=in_t & in_features[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=in_t & in_cols[None, :], other=0.0)
        acc = dot(dy.T, x, acc, INPUT_PRECISION)
        if WITH_DB:
            if IS_FP32:
                db += tl.sum(dy, axis=0)
            else:
                db = dot(dy.T, _ones(BLOCK_K, dy.dtype), db, "ieee")
        dy_ptrs += BLOCK_K * stride_dt
        x_ptrs += BLOCK_K * stride_xt
    if not IS_FP32:
        db = _column_sums(db)
    return acc, db


@triton.jit(do_not_specialize=["T", "rows_per_split"])
def _qkv_bwd_dw_kernel(
    dqkv_ptr,  # [T, 3, N], features adjacent
    x_ptr,  # [T, K]
    dwq_ptr,  # [N, K] for each split, in the weights' dtype if there is one split, else fp32
    dwk_ptr,
    dwv_ptr,
    dbq_ptr,  # [N] for each split
    dbk_ptr,
    dbv_ptr,
    stride_dt,
    stride_xt,
    stride_split,
    T,
    N,
    K,
    rows_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    num_tiles_m = tl.cdiv(N, BLOCK_M)
    num_tiles_n = tl.cdiv(K, BLOCK_N)
    which = tl.program_id(0) // (num_tiles_m * num_tiles_n)
    tile = tl.program_id(0) - which * (num_tiles_m * num_tiles_n)
    tile_m, tile_n = tile_position(tile, num_tiles_m, num_tiles_n, GROUP_M)
    split = tl.program_id(1).to(tl.int64)
    start = split * rows_per_split
    num_rows = tl.minimum(T - start, rows_per_split).to(tl.int32)

    features = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ts = start + tl.arange(0, BLOCK_K)
    dy_ptrs = dqkv_ptr + ts[:, None] * stride_dt + (which * N + features)[None, :]
    x_ptrs = x_ptr + ts[:, None] * stride_xt + cols[None, :]
    dw_ptr = select(which, dwq_ptr, dwk_ptr, dwv_ptr) + split * stride_split
    if tile_n == 0:  # one column of tiles also sums dy: two loops, so that the others do not pay for it
        acc, db = _dw_tile(
            dy_ptrs, x_ptrs, stride_dt, stride_xt, features < N, cols < K, num_rows,
            True, BLOCK_M, BLOCK_N, BLOCK_K, INPUT_PRECISION,
        )  # fmt: skip
        db_ptr = select(which, dbq_ptr, dbk_ptr, dbv_ptr) + split * stride_split
        tl.store(db_ptr + features, db, mask=features < N)
    else:
        acc, db = _dw_tile(
            dy_ptrs, x_ptrs, stride_dt, stride_xt, features < N, cols < K, num_rows,
            False, BLOCK_M, BLOCK_N, BLOCK_K, INPUT_PRECISION,
        )  # fmt: skip
    dw_ptrs = dw_ptr + features.to(tl.int64)[:, None] * K + cols[None, :]
    tl.store(dw_ptrs, acc, mask=(features < N)[:, None] & (cols < K)[None, :])


@triton.jit
def _dw_descriptor_tile(
    dqkv_desc,
    x_desc,
    start,
    end,
    first_feature,
    first_col,
    WITH_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, ONES), dtype=tl.float32)
    for t in range(start, end, BLOCK_K):
        dy = dqkv_desc.load([t, first_feature])
        x = x_desc.load([t, first_col])
        acc = dot(dy.T, x, acc, "ieee")
        if WITH_DB:
            db = dot(dy.T, _ones(BLOCK_K, dy.dtype), db, "ieee")
    return acc, _column_sums(db)


@triton.jit(do_not_specialize=["T", "rows_per_split"])
def _qkv_bwd_dw_descriptor_kernel(
    dqkv_desc,  # [T, 3 * N]
    x_desc,  # [T, K]
    dwq_ptr,  # [N, K] for each split, in the weights' dtype if there is one split, else fp32
    dwk_ptr,
    dwv_ptr,
    dbq_ptr,  # [N] for each split
    dbk_ptr,
    dbv_ptr,
    stride_split,
    T,
    N,
    K,
    rows_per_split,  # a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    num_tiles_m = tl.cdiv(N, BLOCK_M)
    num_tiles_n = tl.cdiv(K, BLOCK_N)
    which = tl.program_id(0) // (num_tiles_m * num_tiles_n)
    tile = tl.program_id(0) - which * (num_tiles_m * num_tiles_n)
    tile_m, tile_n = tile_position(tile, num_tiles_m, num_tiles_n, GROUP_M)
    split = tl.program_id(1)
    start = split * rows_per_split
    end = tl.minimum(T, start + rows_per_split)
    # a tile may reach into the next projection: what it gets from there is not stored
    first_feature = which * N + tile_m * BLOCK_M

    features = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offset = split.to(tl.int64) * stride_split
    dw_ptr = select(which, dwq_ptr, dwk_ptr, dwv_ptr) + offset
    if tile_n == 0:
        acc, db = _dw_descriptor_tile(
            dqkv_desc, x_desc, start, end, first_feature, 0, True, BLOCK_M, BLOCK_N, BLOCK_K
        )
        db_ptr = select(which, dbq_ptr, dbk_ptr, dbv_ptr) + offset
        tl.store(db_ptr + features, db, mask=features < N)
    else:
        acc, db = _dw_descriptor_tile(
            dqkv_desc, x_desc, start, end, first_feature, tile_n * BLOCK_N, False, BLOCK_M, BLOCK_N, BLOCK_K
        )
    dw_ptrs = dw_ptr + features.to(tl.int64)[:, None] * K + cols[None, :]
    tl.store(dw_ptrs, acc, mask=(features < N)[:, None] & (cols < K)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _qkv_bwd_dw_sum_kernel(
    partial_ptr,  # [num_splits, 3, N * K + N] fp32: a dW and its db, one after the other
    dwq_ptr,  # [N, K]
    dwk_ptr,
    dwv_ptr,
    dbq_ptr,  # [N]
    dbk_ptr,
    dbv_ptr,
    num_splits,
    N,
    K,
    BLOCK: tl.constexpr,
):
    which = tl.program_id(1)
    weights = N.to(tl.int64) * K
    size = weights + N
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ptrs = partial_ptr + which * size + offsets
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(num_splits):
        total += tl.load(ptrs, mask=offsets < size, other=0.0)
        ptrs += 3 * size
    tl.store(select(which, dwq_ptr, dwk_ptr, dwv_ptr) + offsets, total, mask=offsets < weights)
    is_bias = (offsets >= weights) & (offsets < size)
    tl.store(select(which, dbq_ptr, dbk_ptr, dbv_ptr) + (offsets - weights), total, mask=is_bias)


def qkv_bwd_dw(
    dqkv: Tensor, x: Tensor, config: MatmulConfig | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dqkv [T, 3, N], x [T, K] -> dwq, dwk, dwv [N, K], dbq, dbk, dbv [N], in x's dtype.

    dw_i = dqkv[:, i].T @ x and db_i = the column sums of dqkv[:, i], in fp32, rounded once. Where the tiles
    of the three products are few and T is large, T is split: fp32 partial sums, then one sum over them in
    order. No atomics, and the split depends on the shape only: two runs give the same bits. T = 0 gives
    zeros. Rows of both may be strided. `config` and errors as in `linear.qkv_fwd`.
    """
    check_dqkv(dqkv)
    check_matrix("x", x)
    if x.shape[0] != dqkv.shape[0] or x.dtype != dqkv.dtype or x.device != dqkv.device:
        raise ValueError(
            f"x must be [{dqkv.shape[0]}, K] {dqkv.dtype} on {dqkv.device} to fit dqkv, "
            f"but is {list(x.shape)} {x.dtype} on {x.device}"
        )
    check_can_launch(_qkv_bwd_dw_kernel, x)
    T, _, N = dqkv.shape
    K = x.shape[1]
    if T == 0:
        return _six(N, K, x, torch.zeros)
    outputs = _six(N, K, x, torch.empty)
    config = checked_config("qkv_bwd_dw", config, dqkv, x)
    splits, rows_per_split = split_rows(T, N, K)
    size = N * K + N
    if splits == 1:
        sums, stride_split = outputs, 0
    else:
        partial = torch.empty((splits, 3, size), dtype=torch.float32, device=x.device)
        weights, biases = partial[0, :, : N * K].unbind(), partial[0, :, N * K :].unbind()
        sums, stride_split = (*weights, *biases), partial.stride(0)
    tiles = 3 * triton.cdiv(N, config.block_m) * triton.cdiv(K, config.block_n)
    with device_guard(x):
        if config.tma:
            dqkv_desc = TensorDescriptor.from_tensor(dqkv.view(T, 3 * N), [config.block_k, config.block_m])
            x_desc = TensorDescriptor.from_tensor(x, [config.block_k, config.block_n])
            _qkv_bwd_dw_descriptor_kernel[(tiles, splits)](
                dqkv_desc, x_desc, *sums, stride_split, T, N, K, rows_per_split, **launch_options(config)
            )
        else:
            _qkv_bwd_dw_kernel[(tiles, splits)](
                dqkv, x, *sums, dqkv.stride(0), x.stride(0), stride_split, T, N, K, rows_per_split,
                INPUT_PRECISION=input_precision(x.dtype), **launch_options(config),
            )  # fmt: skip
        if splits > 1:
            _qkv_bwd_dw_sum_kernel[(triton.cdiv(size, SUM_BLOCK), 3)](
                partial, *outputs, splits, N, K, BLOCK=SUM_BLOCK
            )
    return outputs


def split_rows(num_rows: int, num_features: int, num_inputs: int) -> tuple[int, int]:
    """(splits, rows of each but the last). None is empty; each begins at a block of every configuration."""
    splits = qkv_bwd_dw_splits(num_rows, num_features, num_inputs)
    rows = triton.cdiv(triton.cdiv(num_rows, splits), SPLIT_ROWS_MULTIPLE) * SPLIT_ROWS_MULTIPLE
    return triton.cdiv(num_rows, rows), rows


def _six(
    N: int, K: int, x: Tensor, allocate: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dwq, dwk, dwv = (allocate((N, K), dtype=x.dtype, device=x.device) for _ in range(3))
    dbq, dbk, dbv = (allocate((N,), dtype=x.dtype, device=x.device) for _ in range(3))
    return dwq, dwk, dwv, dbq, dbk, dbv


# ---- compiling and tuning ---------------------------------------------------------------------------------


def compile_cases(arch: str) -> list[CompileCase]:
    """Both kernels with each configuration of their rule, and the sum over splits."""
    return [*cases_of_op("qkv_bwd_dw", arch, _dw_case), *(_sum_case(dtype) for dtype in DTYPES.values())]


def _dw_case(config: MatmulConfig, dtype: str, width: int, label: str) -> CompileCase:
    """At BERT-Base's width with splits, so into fp32 partial sums; at the others into the gradients."""
    element = "fp32" if dtype == "tf32" else dtype
    sums = {f"{t}_ptr": "*fp32" if width == 768 else f"*{element}" for t in OUTPUTS}
    sizes = dict.fromkeys(("stride_split", "T", "N", "K", "rows_per_split"), "i32")
    constants: dict[str, Any] = {}
    if config.tma:
        kernel = _qkv_bwd_dw_descriptor_kernel
        signature = {
            "dqkv_desc": descriptor(element, config.block_k, config.block_m),
            "x_desc": descriptor(element, config.block_k, config.block_n),
        }
    else:
        kernel = _qkv_bwd_dw_kernel
        signature = {"dqkv_ptr": f"*{element}", "x_ptr": f"*{element}"}
        sizes |= dict.fromkeys(("stride_dt", "stride_xt"), "i32")
        constants["INPUT_PRECISION"] = "tf32" if dtype == "tf32" else "ieee"
    return compile_case(kernel, label, element, signature | sums | sizes, constants, config, width)


def _sum_case(dtype: str) -> CompileCase:
    signature = {"partial_ptr": "*fp32"} | {f"{t}_ptr": f"*{dtype}" for t in OUTPUTS}
    signature |= dict.fromkeys(("num_splits", "N", "K"), "i32")
    return CompileCase(
        kernel=_qkv_bwd_dw_sum_kernel,
        label=f"{dtype} 768 wide",
        dtype=dtype,
        signature=signature,
        constexprs={"BLOCK": SUM_BLOCK},
        num_warps=4,
        num_stages=None,
        aligned=frozenset(signature) - {"num_splits"},
    )


def tuning_cases(arch: str) -> list[TuningCase]:
    """dW and db at BERT's widths."""
    return [
        TuningCase("qkv_bwd_dw", key, (CUBLASLT, *configs), functools.partial(_prepare_dw, *shape), flops)
        for key, configs, shape, flops in tuned_shapes("qkv_bwd_dw", arch)
    ]


def _prepare_dw(
    dtype: torch.dtype, num_rows: int, width: int, device: torch.device
) -> Callable[[MatmulConfig | str], tuple[Tensor, ...]]:
    dqkv = torch.randn(num_rows, 3, width, dtype=dtype, device=device)
    x = torch.randn(num_rows, width, dtype=dtype, device=device)

    def launch(candidate: MatmulConfig | str) -> tuple[Tensor, ...]:
        if isinstance(candidate, str):
            dy = dqkv.flatten(1)
            return (*(dy.t() @ x).view(3, width, width), *dy.sum(0).view(3, width))
        return qkv_bwd_dw(dqkv, x, config=candidate)

    return launch
