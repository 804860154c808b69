"""Flash attention over sequences of any lengths, forward and backward, with dropout and a key mask.

The online softmax of "FlashAttention-2" (Dao, 2023, algorithms 1 and 2), for an encoder: every query of a sequence
sees every key of it. Scores, softmax and their statistics are fp32. The backward pass makes the probabilities again
from `lse`, and the dropout mask from its seed.

The grid is made of tiles that exist, not of max_seqlen for each sequence: `attention_schedule` lists them, longest
sequences first, so that the last programs to finish are short. There are no atomics: `dq` is summed by the program
that owns the queries, `dk` and `dv` by the one that owns the keys, so two runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.launch import (
    AttentionConfig,
    architecture,
    attention_dkdv_configs,
    attention_dq_configs,
    attention_fwd_configs,
    check_can_launch,
    choose,
    device_guard,
)
from fastbert_kernels.numerics import dot, input_precision
from fastbert_kernels.philox import dropout_keep, dropout_threshold

HEAD_DIM_LIMIT = 128
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


# ---- what all three kernels share -------------------------------------------------------------------------


@triton.jit
def _tile(schedule_ptr, num_heads, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(head, first row, end of rows, first key row, end of key rows) of this program; no rows: nothing to do."""
    # the heads of one tile are neighbours in the grid, as they are in memory
    pid = tl.program_id(0)
    head = pid % num_heads
    piece = pid // num_heads
    entry = schedule_ptr + (piece // (TILE_ROWS // BLOCK)).to(tl.int64) * 4
    first_row = tl.load(entry) + (piece % (TILE_ROWS // BLOCK)) * BLOCK
    return head, first_row, tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def _rows_of(x_ptr, first_row, head, stride_t, stride_h, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [BLOCK, BLOCK_D] to consecutive rows of one head of x [T, H, D]."""
    rows = first_row.to(tl.int64) + tl.arange(0, BLOCK)
    return x_ptr + head.to(tl.int64) * stride_h + rows[:, None] * stride_t + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _load(
    pointers,
    rows_left,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALL_ROWS: tl.constexpr,
):
    """A [BLOCK, BLOCK_D] block, 0 beyond its rows and beyond the head's width."""
    row_mask = (tl.arange(0, BLOCK) < rows_left)[:, None]
    col_mask = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if ALL_ROWS and HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    elif ALL_ROWS:
        return tl.load(pointers, mask=col_mask, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        return tl.load(pointers, mask=row_mask, other=0.0)
    else:
        return tl.load(pointers, mask=row_mask & col_mask, other=0.0)


@triton.jit
def _store(pointers, x, rows_left, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    mask = (tl.arange(0, BLOCK) < rows_left)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(pointers, x, mask=mask)


# ---- forward ----------------------------------------------------------------------------------------------


@triton.jit
def _fwd_blocks(
    acc, l_i, m_i, q, k_ptrs, v_ptrs, mask_ptrs, begin, end, seqlen,
    stride_kt, stride_vt, qk_scale, seed, threshold, query, bos, head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALL_KEYS: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries against the key blocks from `begin` to `end`; ALL_KEYS: none of them passes the end."""
    offs_n = tl.arange(0, BLOCK_N)
    for start_n in range(begin, end, BLOCK_N):
        k = _load(k_ptrs, seqlen - start_n, HEAD_DIM, BLOCK_N, BLOCK_D, ALL_KEYS)
        qk = dot(q, tl.trans(k), None, PRECISION) * qk_scale
        if not ALL_KEYS:
            qk = tl.where((start_n + offs_n < seqlen)[None, :], qk, float("-inf"))
        if HAS_KEY_MASK:
            keep_key = tl.load(mask_ptrs, mask=start_n + offs_n < seqlen, other=0)
            qk = tl.where((keep_key != 0)[None, :], qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        if HAS_KEY_MASK:
            # no key so far: any finite maximum will do, -inf - -inf is NaN
            m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            m_ref = m_new
        p = tl.exp2(qk - m_ref[:, None])
        alpha = tl.exp2(m_i - m_ref)
        l_i = l_i * alpha + tl.sum(p, 1)
        if HAS_DROPOUT:
            # the softmax's denominator counts what is dropped
            keep = dropout_keep(seed, query, start_n, bos, head, threshold, BLOCK_M, BLOCK_N, False)
            p = tl.where(keep, p, 0.0)
        v = _load(v_ptrs, seqlen - start_n, HEAD_DIM, BLOCK_N, BLOCK_D, ALL_KEYS)
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None], PRECISION)
        m_i = m_new
        k_ptrs += BLOCK_N * stride_kt
        v_ptrs += BLOCK_N * stride_vt
        if HAS_KEY_MASK:
            mask_ptrs += BLOCK_N
    return acc, l_i, m_i, k_ptrs, v_ptrs, mask_ptrs


@triton.jit(do_not_specialize=["total_tokens", "threshold"])
def _attention_fwd_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [T, H, D]
    v_ptr,  # [T, H, D]
    key_mask_ptr,  # [T] uint8
    seed_ptr,  # [1] int64
    schedule_ptr,  # [tiles, 4] int32
    out_ptr,  # [T, H, D]
    lse_ptr,  # [H, T] fp32
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    total_tokens,
    num_heads,
    softmax_scale,
    threshold,
    dropout_scale,
    HEAD_DIM: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, first_row, end_row, bos, eos = _tile(schedule_ptr, num_heads, TILE_ROWS, BLOCK_M)
    if first_row >= end_row:
        return
    seqlen = eos - bos
    q = _load(
        _rows_of(q_ptr, first_row, head, stride_qt, stride_qh, BLOCK_M, BLOCK_D),
        end_row - first_row, HEAD_DIM, BLOCK_M, BLOCK_D, False,
    )  # fmt: skip
    k_ptrs = _rows_of(k_ptr, bos, head, stride_kt, stride_kh, BLOCK_N, BLOCK_D)
    v_ptrs = _rows_of(v_ptr, bos, head, stride_vt, stride_vh, BLOCK_N, BLOCK_D)
    mask_ptrs = key_mask_ptr + bos.to(tl.int64) + tl.arange(0, BLOCK_N)
    seed = tl.load(seed_ptr) if HAS_DROPOUT else 0
    qk_scale = softmax_scale * LOG2_E

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    full = seqlen // BLOCK_N * BLOCK_N
    acc, l_i, m_i, k_ptrs, v_ptrs, mask_ptrs = _fwd_blocks(
        acc, l_i, m_i, q, k_ptrs, v_ptrs, mask_ptrs, 0, full, seqlen,
        stride_kt, stride_vt, qk_scale, seed, threshold, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, True, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    acc, l_i, m_i, k_ptrs, v_ptrs, mask_ptrs = _fwd_blocks(
        acc, l_i, m_i, q, k_ptrs, v_ptrs, mask_ptrs, full, seqlen, seqlen,
        stride_kt, stride_vt, qk_scale, seed, threshold, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, False, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip

    has_key = l_i > 0.0
    l_safe = tl.where(has_key, l_i, 1.0)
    # by selection: a row without a key gives 0 whatever it holds
    out = tl.where(has_key[:, None], acc * (dropout_scale / l_safe)[:, None], 0.0)
    out_ptrs = _rows_of(out_ptr, first_row, head, stride_ot, stride_oh, BLOCK_M, BLOCK_D)
    _store(out_ptrs, out, end_row - first_row, HEAD_DIM, BLOCK_M, BLOCK_D)
    lse = tl.where(has_key, m_i * LN_2 + tl.log(l_safe), 0.0)
    offs_m = first_row + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + head.to(tl.int64) * total_tokens + offs_m, lse, mask=offs_m < end_row)


# ---- backward ---------------------------------------------------------------------------------------------


@triton.jit
def _dq_blocks(
    dq, q, dout, lse, delta, k_ptrs, v_ptrs, mask_ptrs, begin, end, seqlen,
    stride_kt, stride_vt, qk_scale, seed, threshold, dropout_scale, query, bos, head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALL_KEYS: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    for start_n in range(begin, end, BLOCK_N):
        k = _load(k_ptrs, seqlen - start_n, HEAD_DIM, BLOCK_N, BLOCK_D, ALL_KEYS)
        v = _load(v_ptrs, seqlen - start_n, HEAD_DIM, BLOCK_N, BLOCK_D, ALL_KEYS)
        qk = dot(q, tl.trans(k), None, PRECISION) * qk_scale
        p = tl.exp2(qk - lse[:, None])
        if not ALL_KEYS:
            p = tl.where((start_n + offs_n < seqlen)[None, :], p, 0.0)
        if HAS_KEY_MASK:
            keep_key = tl.load(mask_ptrs, mask=start_n + offs_n < seqlen, other=0)
            p = tl.where((keep_key != 0)[None, :], p, 0.0)
        dp = dot(dout, tl.trans(v), None, PRECISION)
        if HAS_DROPOUT:
            keep = dropout_keep(seed, query, start_n, bos, head, threshold, BLOCK_M, BLOCK_N, False)
            dp = tl.where(keep, dp * dropout_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq, PRECISION)
        k_ptrs += BLOCK_N * stride_kt
        v_ptrs += BLOCK_N * stride_vt
        if HAS_KEY_MASK:
            mask_ptrs += BLOCK_N
    return dq, k_ptrs, v_ptrs, mask_ptrs


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
    stride_dot,
    stride_doh,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_dqt,
    stride_dqh,
    total_tokens,
    num_heads,
    softmax_scale,
    threshold,
    dropout_scale,
    HEAD_DIM: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, first_row, end_row, bos, eos = _tile(schedule_ptr, num_heads, TILE_ROWS, BLOCK_M)
    if first_row >= end_row:
        return
    seqlen = eos - bos
    rows_left = end_row - first_row
    q = _load(
        _rows_of(q_ptr, first_row, head, stride_qt, stride_qh, BLOCK_M, BLOCK_D),
        rows_left, HEAD_DIM, BLOCK_M, BLOCK_D, False,
    )  # fmt: skip
    dout = _load(
        _rows_of(dout_ptr, first_row, head, stride_dot, stride_doh, BLOCK_M, BLOCK_D),
        rows_left, HEAD_DIM, BLOCK_M, BLOCK_D, False,
    )  # fmt: skip
    out = _load(
        _rows_of(out_ptr, first_row, head, stride_ot, stride_oh, BLOCK_M, BLOCK_D),
        rows_left, HEAD_DIM, BLOCK_M, BLOCK_D, False,
    )  # fmt: skip
    # rowsum(dP * P) = rowsum(dO * O), with dropout too
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    offs_m = first_row + tl.arange(0, BLOCK_M)
    statistics = head.to(tl.int64) * total_tokens + offs_m
    tl.store(delta_ptr + statistics, delta, mask=offs_m < end_row)
    lse = tl.load(lse_ptr + statistics, mask=offs_m < end_row, other=0.0) * LOG2_E

    k_ptrs = _rows_of(k_ptr, bos, head, stride_kt, stride_kh, BLOCK_N, BLOCK_D)
    v_ptrs = _rows_of(v_ptr, bos, head, stride_vt, stride_vh, BLOCK_N, BLOCK_D)
    mask_ptrs = key_mask_ptr + bos.to(tl.int64) + tl.arange(0, BLOCK_N)
    seed = tl.load(seed_ptr) if HAS_DROPOUT else 0
    qk_scale = softmax_scale * LOG2_E

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full = seqlen // BLOCK_N * BLOCK_N
    dq, k_ptrs, v_ptrs, mask_ptrs = _dq_blocks(
        dq, q, dout, lse, delta, k_ptrs, v_ptrs, mask_ptrs, 0, full, seqlen,
        stride_kt, stride_vt, qk_scale, seed, threshold, dropout_scale, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, True, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    dq, k_ptrs, v_ptrs, mask_ptrs = _dq_blocks(
        dq, q, dout, lse, delta, k_ptrs, v_ptrs, mask_ptrs, full, seqlen, seqlen,
        stride_kt, stride_vt, qk_scale, seed, threshold, dropout_scale, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, False, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    dq_ptrs = _rows_of(dq_ptr, first_row, head, stride_dqt, stride_dqh, BLOCK_M, BLOCK_D)
    _store(dq_ptrs, dq * softmax_scale, rows_left, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _dkdv_blocks(
    dk, dv, k, v, q_ptrs, dout_ptrs, lse_ptrs, delta_ptrs, keep_key, begin, end, seqlen,
    stride_qt, stride_dot, qk_scale, seed, threshold, dropout_scale, key, bos, head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALL_QUERIES: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # everything is transposed, keys x queries, so that probabilities are a left operand as they come
    offs_m = tl.arange(0, BLOCK_M)
    for start_m in range(begin, end, BLOCK_M):
        q = _load(q_ptrs, seqlen - start_m, HEAD_DIM, BLOCK_M, BLOCK_D, ALL_QUERIES)
        dout = _load(dout_ptrs, seqlen - start_m, HEAD_DIM, BLOCK_M, BLOCK_D, ALL_QUERIES)
        if ALL_QUERIES:
            lse = tl.load(lse_ptrs) * LOG2_E
            delta = tl.load(delta_ptrs)
        else:
            is_query = start_m + offs_m < seqlen
            # a probability of exp2(-inf) = 0 beyond the last query
            lse = tl.load(lse_ptrs, mask=is_query, other=float("inf")) * LOG2_E
            delta = tl.load(delta_ptrs, mask=is_query, other=0.0)
        p_t = tl.exp2(dot(k, tl.trans(q), None, PRECISION) * qk_scale - lse[None, :])
        if HAS_KEY_MASK:
            p_t = tl.where(keep_key[:, None], p_t, 0.0)
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
        q_ptrs += BLOCK_M * stride_qt
        dout_ptrs += BLOCK_M * stride_dot
        lse_ptrs += BLOCK_M
        delta_ptrs += BLOCK_M
    return dk, dv, q_ptrs, dout_ptrs, lse_ptrs, delta_ptrs


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
    stride_dot,
    stride_doh,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dkt,
    stride_dkh,
    stride_dvt,
    stride_dvh,
    total_tokens,
    num_heads,
    softmax_scale,
    threshold,
    dropout_scale,
    HEAD_DIM: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # here a tile's rows are keys
    head, first_row, end_row, bos, eos = _tile(schedule_ptr, num_heads, TILE_ROWS, BLOCK_N)
    if first_row >= end_row:
        return
    seqlen = eos - bos
    rows_left = end_row - first_row
    k = _load(
        _rows_of(k_ptr, first_row, head, stride_kt, stride_kh, BLOCK_N, BLOCK_D),
        rows_left, HEAD_DIM, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    v = _load(
        _rows_of(v_ptr, first_row, head, stride_vt, stride_vh, BLOCK_N, BLOCK_D),
        rows_left, HEAD_DIM, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    if HAS_KEY_MASK:
        keep_key = (
            tl.load(key_mask_ptr + first_row.to(tl.int64) + offs_n, mask=offs_n < rows_left, other=0) != 0
        )
    else:
        keep_key = 0
    q_ptrs = _rows_of(q_ptr, bos, head, stride_qt, stride_qh, BLOCK_M, BLOCK_D)
    dout_ptrs = _rows_of(dout_ptr, bos, head, stride_dot, stride_doh, BLOCK_M, BLOCK_D)
    statistics = head.to(tl.int64) * total_tokens + bos + tl.arange(0, BLOCK_M)
    lse_ptrs, delta_ptrs = lse_ptr + statistics, delta_ptr + statistics
    seed = tl.load(seed_ptr) if HAS_DROPOUT else 0
    qk_scale = softmax_scale * LOG2_E

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    full = seqlen // BLOCK_M * BLOCK_M
    dk, dv, q_ptrs, dout_ptrs, lse_ptrs, delta_ptrs = _dkdv_blocks(
        dk, dv, k, v, q_ptrs, dout_ptrs, lse_ptrs, delta_ptrs, keep_key, 0, full, seqlen,
        stride_qt, stride_dot, qk_scale, seed, threshold, dropout_scale, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, True, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    dk, dv, q_ptrs, dout_ptrs, lse_ptrs, delta_ptrs = _dkdv_blocks(
        dk, dv, k, v, q_ptrs, dout_ptrs, lse_ptrs, delta_ptrs, keep_key, full, seqlen, seqlen,
        stride_qt, stride_dot, qk_scale, seed, threshold, dropout_scale, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, False, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    dk_ptrs = _rows_of(dk_ptr, first_row, head, stride_dkt, stride_dkh, BLOCK_N, BLOCK_D)
    dv_ptrs = _rows_of(dv_ptr, first_row, head, stride_dvt, stride_dvh, BLOCK_N, BLOCK_D)
    _store(dk_ptrs, dk * softmax_scale, rows_left, HEAD_DIM, BLOCK_N, BLOCK_D)
    _store(dv_ptrs, dv, rows_left, HEAD_DIM, BLOCK_N, BLOCK_D)


# ---- launchers --------------------------------------------------------------------------------------------


def attention_schedule(cu_seqlens: Tensor, total_tokens: int, max_seqlen: int) -> Tensor:
    """The tiles of a batch, made once and read by every layer, forward and backward: int32 [tiles, 4].

    cu_seqlens [B+1] int32, from 0, never falling; repeated values are sequences of length zero. A row holds the
    first token row of a tile, the end of its rows, and the first and the end of the key rows they see. Sequences
    come longest first. Rows from cu_seqlens[-1] up to total_tokens, which no sequence owns, get tiles without keys;
    the number of tiles depends on shapes only, and those left over have no rows. Tensor arithmetic: the host reads
    nothing. `max_seqlen` decides the height of a tile (`tile_rows`).
    """
    rows = tile_rows(max_seqlen)
    cu_seqlens = cu_seqlens.clamp(max=total_tokens)
    end = cu_seqlens.new_full((1,), total_tokens)
    starts, ends = cu_seqlens, torch.cat([cu_seqlens[1:], end])
    # the pseudo-sequence of unowned rows sees no keys, so it comes last
    order = torch.cat(
        [(starts - ends)[:-1].argsort(stable=True), end.new_full((1,), starts.shape[0] - 1).long()]
    )
    is_owned = order < starts.shape[0] - 1
    starts, ends = starts[order], ends[order]
    num_tiles = (ends - starts + rows - 1) // rows
    last_tile = num_tiles.cumsum(0)

    tiles = torch.arange(min(total_tokens // rows + starts.shape[0], total_tokens), device=starts.device)
    sequence = torch.searchsorted(last_tile, tiles, right=True).clamp(max=starts.shape[0] - 1)
    first_row = starts[sequence] + (tiles - last_tile[sequence] + num_tiles[sequence]) * rows
    key_start = torch.where(is_owned, starts, 0)[sequence]
    key_end = torch.where(is_owned, ends, 0)[sequence]
    return torch.stack([first_row, ends[sequence], key_start, key_end], dim=1).to(torch.int32)


def tile_rows(max_seqlen: int) -> int:
    """Rows of a tile of the schedule; a program's block of rows divides it."""
    return 64 if max_seqlen <= 64 else 128


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Tensor,
    max_seqlen: int,
    *,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """dropout(softmax(q k^T / sqrt(D))) v within each sequence -> (out [T, H, D], lse [H, T] fp32).

    q, k, v [T, H, D], of one dtype (fp32, fp16, bf16), D from 1 to 128: rows and heads may be strided, as in views
    of a [T, 3, H, D] tensor. `schedule` is `attention_schedule`'s for the same max_seqlen. key_mask [T] bool: keys
    that may be seen. With dropout_p > 0, `seed` is an int64 tensor of one element on q's device; an element's fate
    depends on the seed, the head, its place in its sequence and where that begins. out is contiguous; it is 0, and
    lse is 0, in rows without a key; elsewhere lse is the natural logarithm of the softmax's denominator.
    Deterministic. `config` overrides the choice of `launch`. ValueError for bad input.
    """
    T, H, D = _check(q, k, v, key_mask=key_mask, dropout_p=dropout_p, seed=seed)
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((H, T), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    constants = _constants(q, max_seqlen, key_mask, dropout_p)
    config = config or _choice("attention_fwd", attention_fwd_configs, q, constants)
    threshold, scale = dropout_threshold(dropout_p)
    with device_guard(q):
        _attention_fwd_kernel[_grid(schedule, H, constants, config.block_m)](
            q, k, v, _bytes(key_mask, q), seed if seed is not None else q, schedule, out, lse,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
            T, H, D**-0.5, threshold, scale,
            **constants, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out, lse


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
    """Gradients of `attention_fwd`'s q, k and v, in one tensor: dqkv [T, 3, H, D], contiguous, in q's dtype.

    dout and out [T, H, D], lse [H, T] as the forward gave it, the rest as it was there. Rows that no sequence owns
    get 0. Deterministic: no atomics. Two launches; the first leaves rowsum(dout * out) for the second.
    """
    T, H, D = _check(q, k, v, dout=dout, out=out, key_mask=key_mask, dropout_p=dropout_p, seed=seed)
    dqkv = torch.empty((T, 3, H, D), dtype=q.dtype, device=q.device)
    if dqkv.numel() == 0:
        return dqkv
    dq, dk, dv = dqkv.unbind(1)
    delta = torch.empty_like(lse)
    constants = _constants(q, max_seqlen, key_mask, dropout_p)
    dq_config = dq_config or _choice("attention_dq", attention_dq_configs, q, constants)
    dkdv_config = dkdv_config or _choice("attention_dkdv", attention_dkdv_configs, q, constants)
    threshold, scale = dropout_threshold(dropout_p)
    mask, seed = _bytes(key_mask, q), seed if seed is not None else q
    with device_guard(q):
        _attention_dq_kernel[_grid(schedule, H, constants, dq_config.block_m)](
            dout, q, k, v, out, lse, mask, seed, schedule, dq, delta,
            dout.stride(0), dout.stride(1), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            v.stride(0), v.stride(1), out.stride(0), out.stride(1), dq.stride(0), dq.stride(1),
            T, H, D**-0.5, threshold, scale,
            **constants, BLOCK_M=dq_config.block_m, BLOCK_N=dq_config.block_n,
            num_warps=dq_config.num_warps, num_stages=dq_config.num_stages,
        )  # fmt: skip
        _attention_dkdv_kernel[_grid(schedule, H, constants, dkdv_config.block_n)](
            dout, q, k, v, lse, delta, mask, seed, schedule, dk, dv,
            dout.stride(0), dout.stride(1), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            v.stride(0), v.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1),
            T, H, D**-0.5, threshold, scale,
            **constants, BLOCK_M=dkdv_config.block_m, BLOCK_N=dkdv_config.block_n,
            num_warps=dkdv_config.num_warps, num_stages=dkdv_config.num_stages,
        )  # fmt: skip
    return dqkv


def _constants(q: Tensor, max_seqlen: int, key_mask: Tensor | None, dropout_p: float) -> dict[str, Any]:
    head_dim = q.shape[2]
    return {
        "HEAD_DIM": head_dim,
        "HAS_KEY_MASK": key_mask is not None,
        "HAS_DROPOUT": dropout_p > 0.0,
        "TILE_ROWS": tile_rows(max_seqlen),
        "BLOCK_D": head_dim_block(head_dim),
        "PRECISION": input_precision(q.dtype),
    }


def head_dim_block(head_dim: int) -> int:
    """Columns that a head takes up in registers: the next power of two; matrix instructions need 16."""
    return max(16, triton.next_power_of_2(head_dim))


def _choice(op: str, rule: Any, q: Tensor, constants: dict[str, Any]) -> AttentionConfig:
    kind = (DTYPES[q.dtype], constants["BLOCK_D"], constants["HAS_DROPOUT"], constants["TILE_ROWS"])
    key = "{} head_dim {} {} tile_rows {}".format(*kind[:2], "dropout" if kind[2] else "no dropout", kind[3])
    return choose(op, key, rule(architecture(q), *kind), q)


def _grid(schedule: Tensor, num_heads: int, constants: dict[str, Any], block_rows: int) -> tuple[int]:
    return (schedule.shape[0] * (constants["TILE_ROWS"] // block_rows) * num_heads,)


def _bytes(key_mask: Tensor | None, unused: Tensor) -> Tensor:
    return unused if key_mask is None else key_mask.view(torch.uint8)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dout: Tensor | None = None,
    out: Tensor | None = None,
    key_mask: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[int, int, int]:
    if q.dim() != 3:
        raise ValueError(f"q must be [T, heads, head_dim], but has shape {tuple(q.shape)}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float32, float16 or bfloat16, but is {q.dtype}")
    if q.shape[2] > HEAD_DIM_LIMIT:
        raise ValueError(
            f"head_dim {q.shape[2]} is above {HEAD_DIM_LIMIT}, the widest head of the kernel: use the eager path"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout), ("out", out)):
        if x is None:
            continue
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must be like q, {tuple(q.shape)} {q.dtype} on {q.device}, "
                f"but is {tuple(x.shape)} {x.dtype} on {x.device}"
            )
        if x.shape[2] > 1 and x.stride(2) != 1:
            raise ValueError(
                f"{name} must have adjacent columns, but has column stride {x.stride(2)}: call .contiguous()"
            )
    if key_mask is not None and (
        key_mask.shape != q.shape[:1] or key_mask.dtype != torch.bool or not key_mask.is_contiguous()
    ):
        raise ValueError(
            f"key_mask must be [{q.shape[0]}] bool, contiguous, but is {list(key_mask.shape)} {key_mask.dtype} "
            f"of stride {key_mask.stride()}"
        )
    dropout_threshold(dropout_p)
    if dropout_p > 0.0 and (
        seed is None or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device
    ):
        given = "None" if seed is None else f"{tuple(seed.shape)} {seed.dtype} on {seed.device}"
        raise ValueError(
            f"dropout needs a seed, an int64 tensor of one element on {q.device}, but got {given}"
        )
    check_can_launch(_attention_fwd_kernel, q)
    return q.shape[0], q.shape[1], q.shape[2]
