"""dx of the query, key and value projections (`linear.qkv_fwd`): one product over all output features."""

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
    num_programs_persistent,
)
from fastbert_kernels.linear import (
    CUBLASLT,
    cases_of_op,
    check_dqkv,
    check_weights,
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


@triton.jit(do_not_specialize=["T"])
def _qkv_bwd_dx_kernel(
    dqkv_ptr,  # [T, 3, N], features adjacent
    wq_ptr,  # [N, K] contiguous
    wk_ptr,
    wv_ptr,
    dx_ptr,  # [T, K] contiguous
    stride_dt,
    T,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    tile_m, tile_n = tile_position(tl.program_id(0), tl.cdiv(T, BLOCK_M), tl.cdiv(K, BLOCK_N), GROUP_M)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    features = tl.arange(0, BLOCK_K)
    in_cols = (cols < K)[None, :]
    # rows beyond the end repeat the last one and are not stored
    dy_ptrs = dqkv_ptr + tl.minimum(rows, T - 1)[:, None] * stride_dt + features[None, :]
    w_offsets = features[:, None] * K + cols[None, :]
    steps = tl.cdiv(N, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(3 * steps):
        which = step // steps
        first = (step - which * steps) * BLOCK_K
        w_ptrs = select(which, wq_ptr, wk_ptr, wv_ptr) + first.to(tl.int64) * K + w_offsets
        if EVEN_N:
            dy = tl.load(dy_ptrs + (which * N + first))
            w = tl.load(w_ptrs, mask=in_cols, other=0.0)
        else:
            in_n = features < N - first
            dy = tl.load(dy_ptrs + (which * N + first), mask=in_n[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=in_n[:, None] & in_cols, other=0.0)
        acc = dot(dy, w, acc, INPUT_PRECISION)
    tl.store(dx_ptr + rows[:, None] * K + cols[None, :], acc, mask=(rows < T)[:, None] & in_cols)


@triton.jit(do_not_specialize=["T"])
def _qkv_bwd_dx_descriptor_kernel(
    dqkv_desc,  # [T, 3 * N]; N is a multiple of BLOCK_K
    wq_desc,  # [N, K]
    wk_desc,
    wv_desc,
    dx_desc,  # [T, K]
    T,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    num_tiles_m = tl.cdiv(T, BLOCK_M)
    num_tiles_n = tl.cdiv(K, BLOCK_N)
    steps = N // BLOCK_K
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_position(tile, num_tiles_m, num_tiles_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(3 * steps):
            which = step // steps
            # a selection between the addresses of three kernel parameters, as in the forward
            if which == 0:
                w_desc = wq_desc
            elif which == 1:
                w_desc = wk_desc
            else:
                w_desc = wv_desc
            dy = dqkv_desc.load([tile_m * BLOCK_M, step * BLOCK_K])
            w = w_desc.load([(step - which * steps) * BLOCK_K, tile_n * BLOCK_N])
            acc = dot(dy, w, acc, "ieee")
        dx_desc.store([tile_m * BLOCK_M, tile_n * BLOCK_N], acc.to(dx_desc.dtype))


def qkv_bwd_dx(
    dqkv: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, config: MatmulConfig | None = None
) -> Tensor:
    """dqkv [T, 3, N], three weights [N, K] -> dx [T, K], contiguous, in dqkv's dtype.

    dx = sum of dqkv[:, i] @ w_i: one fp32 sum over all 3 N features, rounded once. T may be 0, rows of dqkv
    may be strided. Deterministic, and a row depends on that row only. `config` and errors as in
    `linear.qkv_fwd`.
    """
    check_dqkv(dqkv)
    if wq.dim() != 2 or wq.shape[0] != dqkv.shape[2]:
        raise ValueError(f"wq must be [{dqkv.shape[2]}, K] to fit dqkv, but has shape {tuple(wq.shape)}")
    check_weights(dqkv, wq.shape[1], wq, wk, wv)
    check_can_launch(_qkv_bwd_dx_kernel, dqkv)
    T, _, N = dqkv.shape
    K = wq.shape[1]
    dx = torch.empty((T, K), dtype=dqkv.dtype, device=dqkv.device)
    if dx.numel() == 0:
        return dx
    config = checked_config("qkv_bwd_dx", config, dqkv, wq, wk, wv)
    tiles = triton.cdiv(T, config.block_m) * triton.cdiv(K, config.block_n)
    with device_guard(dqkv):
        if config.tma:
            dqkv_desc = TensorDescriptor.from_tensor(dqkv.view(T, 3 * N), [config.block_m, config.block_k])
            w_descs = [
                TensorDescriptor.from_tensor(w, [config.block_k, config.block_n]) for w in (wq, wk, wv)
            ]
            dx_desc = TensorDescriptor.from_tensor(dx, [config.block_m, config.block_n])
            _qkv_bwd_dx_descriptor_kernel[(min(tiles, num_programs_persistent(dqkv)),)](
                dqkv_desc, *w_descs, dx_desc, T, N, K, **launch_options(config)
            )
        else:
            _qkv_bwd_dx_kernel[(tiles,)](
                dqkv, wq, wk, wv, dx, dqkv.stride(0), T, N, K,
                EVEN_N=N % config.block_k == 0, INPUT_PRECISION=input_precision(dqkv.dtype),
                **launch_options(config),
            )  # fmt: skip
    return dx


# ---- compiling and tuning ---------------------------------------------------------------------------------


def compile_cases(arch: str) -> list[CompileCase]:
    """Both kernels with each configuration of their rule."""
    return cases_of_op("qkv_bwd_dx", arch, _dx_case)


def _dx_case(config: MatmulConfig, dtype: str, width: int, label: str) -> CompileCase:
    element = "fp32" if dtype == "tf32" else dtype
    weights = [f"w{i}" for i in "qkv"]
    constants: dict[str, Any] = {}
    if config.tma:
        kernel = _qkv_bwd_dx_descriptor_kernel
        signature = {"dqkv_desc": descriptor(element, config.block_m, config.block_k)}
        signature |= {f"{w}_desc": descriptor(element, config.block_k, config.block_n) for w in weights}
        signature |= {"dx_desc": descriptor(element, config.block_m, config.block_n)}
    else:
        kernel = _qkv_bwd_dx_kernel
        signature = {f"{t}_ptr": f"*{element}" for t in ("dqkv", *weights, "dx")} | {"stride_dt": "i32"}
        constants["EVEN_N"] = width % config.block_k == 0
        constants["INPUT_PRECISION"] = "tf32" if dtype == "tf32" else "ieee"
    signature |= dict.fromkeys(("T", "N", "K"), "i32")
    return compile_case(kernel, label, element, signature, constants, config, width)


def tuning_cases(arch: str) -> list[TuningCase]:
    """dx at BERT's widths."""
    return [
        TuningCase("qkv_bwd_dx", key, (CUBLASLT, *configs), functools.partial(_prepare_dx, *shape), flops)
        for key, configs, shape, flops in tuned_shapes("qkv_bwd_dx", arch)
    ]


def _prepare_dx(
    dtype: torch.dtype, num_rows: int, width: int, device: torch.device
) -> Callable[[MatmulConfig | str], tuple[Tensor, ...]]:
    dqkv = torch.randn(num_rows, 3, width, dtype=dtype, device=device)
    weights = [torch.randn(width, width, dtype=dtype, device=device) / width**0.5 for _ in range(3)]

    def launch(candidate: MatmulConfig | str) -> tuple[Tensor, ...]:
        if isinstance(candidate, str):
            return (dqkv.flatten(1) @ torch.cat(weights),)
        return (qkv_bwd_dx(dqkv, *weights, config=candidate),)

    return launch
