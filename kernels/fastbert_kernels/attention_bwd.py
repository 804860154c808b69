"""The gradients of `attention`'s q, k and v, without atomics.

Two kernels: `dq` is summed by the program that owns the queries, `dk` and `dv` by the one that owns the keys,
so two runs give the same bits ("FlashAttention-2", Dao, 2023, algorithm 2, taken apart where it adds dq up
atomically). Probabilities are made again from `lse`, and the dropout mask from its seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.attention import (
    LOG2_E,
    TuningBatch,
    attention_cases,
    attention_fwd,
    check_tensors,
    choice_of,
    constants_of,
    grid_of,
    load_block,
    mask_bytes,
    row_start,
    store_block,
    tile_of_program,
    tuning_batches,
)
from fastbert_kernels.launch import (
    AttentionConfig,
    CompileCase,
    attention_dkdv_configs,
    attention_dq_configs,
    device_guard,
)
from fastbert_kernels.numerics import dot
from fastbert_kernels.philox import dropout_keep, dropout_threshold
from fastbert_kernels.tune import TuningCase


@triton.jit
def probability(qk, lse, softmax_scale, EXACT: tl.constexpr):
    """exp(softmax_scale * qk - lse), as `exp_scaled` computes it."""
    if EXACT:
        return tl.exp(qk * softmax_scale - lse)
    else:
        return tl.exp2(qk * (softmax_scale * LOG2_E) - lse * LOG2_E)


@triton.jit
def _dq_blocks(
    dq, q, dout, lse, delta, k_base, v_base, mask_base, begin, end, seqlen,
    stride_kt, stride_vt, softmax_scale, seed, threshold, dropout_scale, query, bos, head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALL: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries against keys from `begin`, where the bases point, to `end`; ALL: whole blocks."""
    offs_n = tl.arange(0, BLOCK_N)
    for start_n in range(begin, end, BLOCK_N):
        k = load_block(k_base, seqlen - start_n, stride_kt, HEAD_DIM, BLOCK_N, BLOCK_D, ALL)
        v = load_block(v_base, seqlen - start_n, stride_vt, HEAD_DIM, BLOCK_N, BLOCK_D, ALL)
        p = probability(
            dot(q, tl.trans(k), None, PRECISION), lse[:, None], softmax_scale, q.dtype == tl.float32
        )
        if HAS_KEY_MASK:
            keep_key = tl.load(mask_base + start_n + offs_n, mask=start_n + offs_n < seqlen, other=0)
            p = tl.where((keep_key != 0)[None, :], p, 0.0)
        elif not ALL:
            p = tl.where((start_n + offs_n < seqlen)[None, :], p, 0.0)
        dp = dot(dout, tl.trans(v), None, PRECISION)
        if HAS_DROPOUT:
            keep = dropout_keep(seed, query, start_n, bos, head, threshold, BLOCK_M, BLOCK_N, False)
            dp = tl.where(keep, dp * dropout_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq, PRECISION)
        k_base += BLOCK_N * stride_kt
        v_base += BLOCK_N * stride_vt
    return dq


@triton.jit(do_not_specialize=["total_tokens", "threshold"])
def _attention_dq_kernel(
    dout_ptr,  # [T, H, D]
    q_ptr,  # [T, H, D]
    k_ptr,  # [T, H, D]
    v_ptr,  # [T, H, D]
    out_ptr,  # [T, H, D]
    lse_ptr,  # [H, T] fp32
    key_mask_ptr,  # [T] uint8
    seed_ptr,  # [1] int64
    schedule_ptr,  # [tiles, 4] int32
    dq_ptr,  # [T, H, D]
    delta_ptr,  # [H, T] fp32
    stride_dot, stride_doh, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_dqt, stride_dqh,
    total_tokens, num_heads, softmax_scale, threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, first_row, end_row, bos, eos = tile_of_program(schedule_ptr, num_heads, TILE_ROWS, BLOCK_M)
    if first_row >= end_row:
        return
    seqlen, rows_left = eos - bos, end_row - first_row
    q_base = row_start(q_ptr, first_row, head, stride_qt, stride_qh)
    q = load_block(q_base, rows_left, stride_qt, HEAD_DIM, BLOCK_M, BLOCK_D, False)
    dout_base = row_start(dout_ptr, first_row, head, stride_dot, stride_doh)
    dout = load_block(dout_base, rows_left, stride_dot, HEAD_DIM, BLOCK_M, BLOCK_D, False)
    out_base = row_start(out_ptr, first_row, head, stride_ot, stride_oh)
    out = load_block(out_base, rows_left, stride_ot, HEAD_DIM, BLOCK_M, BLOCK_D, False)
    # rowsum(dP * P) = rowsum(dO * O), with dropout too; the other kernel reads it
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    offs_m = first_row + tl.arange(0, BLOCK_M)
    statistics = head.to(tl.int64) * total_tokens + offs_m
    tl.store(delta_ptr + statistics, delta, mask=offs_m < end_row)
    lse = tl.load(lse_ptr + statistics, mask=offs_m < end_row, other=0.0)

    k_base = row_start(k_ptr, bos, head, stride_kt, stride_kh)
    v_base = row_start(v_ptr, bos, head, stride_vt, stride_vh)
    mask_base = key_mask_ptr + bos
    seed = tl.load(seed_ptr) if HAS_DROPOUT else 0
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full = seqlen // BLOCK_N * BLOCK_N
    dq = _dq_blocks(
        dq, q, dout, lse, delta, k_base, v_base, mask_base, 0, full, seqlen,
        stride_kt, stride_vt, softmax_scale, seed, threshold, dropout_scale, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, True, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    k_base = row_start(k_ptr, bos + full, head, stride_kt, stride_kh)
    v_base = row_start(v_ptr, bos + full, head, stride_vt, stride_vh)
    dq = _dq_blocks(
        dq, q, dout, lse, delta, k_base, v_base, mask_base, full, seqlen, seqlen,
        stride_kt, stride_vt, softmax_scale, seed, threshold, dropout_scale, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, False, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    dq_base = row_start(dq_ptr, first_row, head, stride_dqt, stride_dqh)
    store_block(dq_base, dq * softmax_scale, rows_left, stride_dqt, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _dkdv_blocks(
    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, keep_key, begin, end, seqlen,
    stride_qt, stride_dot, softmax_scale, seed, threshold, dropout_scale, key, bos, head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALL: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of keys against the queries from `begin`, where q's and dout's bases point, to `end`."""
    # everything is transposed, keys x queries, so that the probabilities are a left operand as they come
    for start_m in range(begin, end, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_block(q_base, seqlen - start_m, stride_qt, HEAD_DIM, BLOCK_M, BLOCK_D, ALL)
        if ALL:
            lse = tl.load(lse_base + offs_m)
            delta = tl.load(delta_base + offs_m)
        else:
            # beyond the last query q, dout and delta are 0, and so is all that they add
            lse = tl.load(lse_base + offs_m, mask=offs_m < seqlen, other=0.0)
            delta = tl.load(delta_base + offs_m, mask=offs_m < seqlen, other=0.0)
        p_t = probability(
            dot(k, tl.trans(q), None, PRECISION), lse[None, :], softmax_scale, q.dtype == tl.float32
        )
        if HAS_KEY_MASK:
            p_t = tl.where(keep_key[:, None], p_t, 0.0)
        dout = load_block(dout_base, seqlen - start_m, stride_dot, HEAD_DIM, BLOCK_M, BLOCK_D, ALL)
        dp_t = dot(v, tl.trans(dout), None, PRECISION)
        if HAS_DROPOUT:
            keep = dropout_keep(seed, start_m, key, bos, head, threshold, BLOCK_M, BLOCK_N, True)
            dropped_t = tl.where(keep, p_t * dropout_scale, 0.0)
            dp_t = tl.where(keep, dp_t * dropout_scale, 0.0)
        else:
            dropped_t = p_t
        dv = dot(dropped_t.to(dout.dtype), dout, dv, PRECISION)
        ds_t = p_t * (dp_t - delta[None, :])
        dk = dot(ds_t.to(q.dtype), q, dk, PRECISION)
        q_base += BLOCK_M * stride_qt
        dout_base += BLOCK_M * stride_dot
    return dk, dv


@triton.jit(do_not_specialize=["total_tokens", "threshold"])
def _attention_dkdv_kernel(
    dout_ptr,  # [T, H, D]
    q_ptr,  # [T, H, D]
    k_ptr,  # [T, H, D]
    v_ptr,  # [T, H, D]
    lse_ptr,  # [H, T] fp32
    delta_ptr,  # [H, T] fp32
    key_mask_ptr,  # [T] uint8
    seed_ptr,  # [1] int64
    schedule_ptr,  # [tiles, 4] int32
    dk_ptr,  # [T, H, D]
    dv_ptr,  # [T, H, D]
    stride_dot, stride_doh, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    total_tokens, num_heads, softmax_scale, threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # here a tile's rows are keys
    head, first_row, end_row, bos, eos = tile_of_program(schedule_ptr, num_heads, TILE_ROWS, BLOCK_N)
    if first_row >= end_row:
        return
    seqlen, rows_left = eos - bos, end_row - first_row
    k_base = row_start(k_ptr, first_row, head, stride_kt, stride_kh)
    k = load_block(k_base, rows_left, stride_kt, HEAD_DIM, BLOCK_N, BLOCK_D, False)
    v_base = row_start(v_ptr, first_row, head, stride_vt, stride_vh)
    v = load_block(v_base, rows_left, stride_vt, HEAD_DIM, BLOCK_N, BLOCK_D, False)
    offs_n = tl.arange(0, BLOCK_N)
    if HAS_KEY_MASK:
        keep_key = tl.load(key_mask_ptr + first_row + offs_n, mask=offs_n < rows_left, other=0) != 0
    else:
        keep_key = 0
    q_base = row_start(q_ptr, bos, head, stride_qt, stride_qh)
    dout_base = row_start(dout_ptr, bos, head, stride_dot, stride_doh)
    statistics = head.to(tl.int64) * total_tokens + bos
    lse_base, delta_base = lse_ptr + statistics, delta_ptr + statistics
    seed = tl.load(seed_ptr) if HAS_DROPOUT else 0

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    full = seqlen // BLOCK_M * BLOCK_M
    dk, dv = _dkdv_blocks(
        dk, dv, k, v, q_base, dout_base, lse_base, delta_base, keep_key, 0, full, seqlen,
        stride_qt, stride_dot, softmax_scale, seed, threshold, dropout_scale, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, True, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    q_base = row_start(q_ptr, bos + full, head, stride_qt, stride_qh)
    dout_base = row_start(dout_ptr, bos + full, head, stride_dot, stride_doh)
    dk, dv = _dkdv_blocks(
        dk, dv, k, v, q_base, dout_base, lse_base, delta_base, keep_key, full, seqlen, seqlen,
        stride_qt, stride_dot, softmax_scale, seed, threshold, dropout_scale, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, False, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    dk_base = row_start(dk_ptr, first_row, head, stride_dkt, stride_dkh)
    store_block(dk_base, dk * softmax_scale, rows_left, stride_dkt, HEAD_DIM, BLOCK_N, BLOCK_D)
    dv_base = row_start(dv_ptr, first_row, head, stride_dvt, stride_dvh)
    store_block(dv_base, dv, rows_left, stride_dvt, HEAD_DIM, BLOCK_N, BLOCK_D)


def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule: Tensor,
    max_seqlen: int,
    *,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    dq_config: AttentionConfig | None = None,
    dkdv_config: AttentionConfig | None = None,
) -> Tensor:
    """Gradients of `attention_fwd`'s q, k and v in one tensor: dqkv [T, 3, H, D], contiguous, in q's dtype.

    dout and out [T, H, D], lse [H, T] as the forward gave it, the rest as it was there. Rows that no sequence
    owns get 0. Deterministic. Two launches: the first leaves rowsum(dout * out) for the second.
    """
    others = {"k": k, "v": v, "dout": dout, "out": out}
    T, H, D = check_tensors(q, others, key_mask=key_mask, dropout_p=dropout_p, seed=seed)
    dqkv = torch.empty((T, 3, H, D), dtype=q.dtype, device=q.device)
    if dqkv.numel() == 0:
        return dqkv
    dq, dk, dv = dqkv.unbind(1)
    delta = torch.empty_like(lse)
    constants = constants_of(q, max_seqlen, key_mask, dropout_p)
    dq_config = dq_config or choice_of("attention_dq", attention_dq_configs, q, constants)
    dkdv_config = dkdv_config or choice_of("attention_dkdv", attention_dkdv_configs, q, constants)
    threshold, scale = dropout_threshold(dropout_p)
    mask, seed = mask_bytes(key_mask, q), q if seed is None else seed
    inputs = (*dout.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    with device_guard(q):
        _attention_dq_kernel[grid_of(schedule, H, constants, dq_config.block_m)](
            dout, q, k, v, out, lse, mask, seed, schedule, dq, delta,
            *inputs, *out.stride()[:2], *dq.stride()[:2],
            T, H, D**-0.5, threshold, scale,
            **constants, BLOCK_M=dq_config.block_m, BLOCK_N=dq_config.block_n,
            num_warps=dq_config.num_warps, num_stages=dq_config.num_stages,
        )  # fmt: skip
        _attention_dkdv_kernel[grid_of(schedule, H, constants, dkdv_config.block_n)](
            dout, q, k, v, lse, delta, mask, seed, schedule, dk, dv,
            *inputs, *dk.stride()[:2], *dv.stride()[:2],
            T, H, D**-0.5, threshold, scale,
            **constants, BLOCK_M=dkdv_config.block_m, BLOCK_N=dkdv_config.block_n,
            num_warps=dkdv_config.num_warps, num_stages=dkdv_config.num_stages,
        )  # fmt: skip
    return dqkv


def tuning_cases(arch: str) -> list[TuningCase]:
    """Each kernel with its own candidates; the other one as it is launched without a table."""
    cases = []
    for op, rule, share in (("dq", attention_dq_configs, 1.5), ("dkdv", attention_dkdv_configs, 2.0)):
        for key, candidates, batch in tuning_batches(arch, rule):
            prepare = functools.partial(_prepare, batch, f"{op}_config")
            cases.append(TuningCase(f"attention_{op}", key, candidates, prepare, share * batch.flops))
    return cases


def _prepare(
    batch: TuningBatch, argument: str, device: torch.device
) -> Callable[[AttentionConfig], tuple[Tensor, ...]]:
    qkv, schedule, seed = batch.tensors(device)
    form: dict[str, Any] = {"dropout_p": batch.dropout_p, "seed": seed}
    out, lse = attention_fwd(*qkv.unbind(1), schedule, batch.max_seqlen, **form)
    dout = torch.randn_like(out)

    def launch(config: AttentionConfig) -> tuple[Tensor, ...]:
        configs: dict[str, Any] = {argument: config}
        return (attention_bwd(dout, *qkv.unbind(1), out, lse, schedule, batch.max_seqlen, **form, **configs),)

    return launch


def compile_cases(arch: str) -> list[CompileCase]:
    return [
        *attention_cases(arch, _attention_dq_kernel, attention_dq_configs),
        *attention_cases(arch, _attention_dkdv_kernel, attention_dkdv_configs),
    ]
