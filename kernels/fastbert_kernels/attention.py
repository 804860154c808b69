"""Flash attention within sequences of any lengths, with dropout and a key mask. Gradients: `attention_bwd`.

The online softmax of "FlashAttention-2" (Dao, 2023, algorithm 1), for an encoder: every query of a sequence
sees every key of it. Scores, softmax and their statistics are fp32.

The grid is made of tiles that exist, not of max_seqlen for each sequence: `attention_schedule` lists them,
longest sequences first, so that the programs that finish last are short.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.launch import (
    AttentionConfig,
    CompileCase,
    architecture,
    attention_fwd_configs,
    check_can_launch,
    choose,
    device_guard,
)
from fastbert_kernels.numerics import dot, input_precision
from fastbert_kernels.philox import dropout_keep, dropout_threshold
from fastbert_kernels.tune import TuningCase

HEAD_DIM_LIMIT = 128
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# offsets within a block of rows are 32-bit
ROW_STRIDE_LIMIT = 2**31 // 128

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


# ---- what the three kernels share -------------------------------------------------------------------------


@triton.jit
def tile_of_program(schedule_ptr, num_heads, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(head, first row, end of rows, first key row, end of key rows); without rows there is nothing to do."""
    # the heads of one tile are neighbours in the grid, as they are in memory
    pid = tl.program_id(0)
    head = pid % num_heads
    block = pid // num_heads
    entry = schedule_ptr + (block // (TILE_ROWS // BLOCK)).to(tl.int64) * 4
    first_row = tl.load(entry) + (block % (TILE_ROWS // BLOCK)) * BLOCK
    return head, first_row, tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def row_start(x_ptr, row, head, stride_t, stride_h):
    """Where `row` of one head of x [T, H, D] begins."""
    return x_ptr + row.to(tl.int64) * stride_t + head.to(tl.int64) * stride_h


@triton.jit
def load_block(
    base, rows_left, stride_t,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK_D] from `base` on, 0 beyond rows_left (ALL: not reached) and beyond the head's width."""
    # one 64-bit base and 32-bit offsets: a block of pointers would take twice the registers
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    pointers = base + (rows * stride_t + cols)
    if ALL and HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    elif ALL:
        return tl.load(pointers, mask=cols < HEAD_DIM, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        return tl.load(pointers, mask=rows < rows_left, other=0.0)
    else:
        return tl.load(pointers, mask=(rows < rows_left) & (cols < HEAD_DIM), other=0.0)


@triton.jit
def exp_scaled(x, reference, softmax_scale, EXACT: tl.constexpr):
    """exp(softmax_scale * (x - reference)); `reference` broadcasts."""
    if EXACT:
        # fp32 operands deserve it: the difference of near numbers is exact, their products are not
        return tl.exp2((x - reference) * (softmax_scale * LOG2_E))
    else:
        # one multiply-add an element
        return tl.exp2(x * (softmax_scale * LOG2_E) - reference * (softmax_scale * LOG2_E))


@triton.jit
def store_block(
    base, x, rows_left, stride_t, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    tl.store(base + (rows * stride_t + cols), x, mask=(rows < rows_left) & (cols < HEAD_DIM))


# ---- forward ----------------------------------------------------------------------------------------------


@triton.jit
def _fwd_blocks(
    acc, l_i, m_i, q, k_base, v_base, mask_base, begin, end, seqlen,
    stride_kt, stride_vt, softmax_scale, seed, threshold, query, bos, head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ALL: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries against keys from `begin`, where the bases point, to `end`; ALL: whole blocks."""
    offs_n = tl.arange(0, BLOCK_N)
    for start_n in range(begin, end, BLOCK_N):
        k = load_block(k_base, seqlen - start_n, stride_kt, HEAD_DIM, BLOCK_N, BLOCK_D, ALL)
        qk = dot(q, tl.trans(k), None, PRECISION)
        if HAS_KEY_MASK:
            keep_key = tl.load(mask_base + start_n + offs_n, mask=start_n + offs_n < seqlen, other=0)
            qk = tl.where((keep_key != 0)[None, :], qk, float("-inf"))
        elif not ALL:
            qk = tl.where((start_n + offs_n < seqlen)[None, :], qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        # without a key so far any finite maximum will do: -inf - -inf is NaN
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new) if HAS_KEY_MASK else m_new
        p = exp_scaled(qk, m_ref[:, None], softmax_scale, q.dtype == tl.float32)
        alpha = exp_scaled(m_i, m_ref, softmax_scale, q.dtype == tl.float32)
        l_i = l_i * alpha + tl.sum(p, 1)
        if HAS_DROPOUT:
            # after the sum: the softmax's denominator counts what is dropped
            keep = dropout_keep(seed, query, start_n, bos, head, threshold, BLOCK_M, BLOCK_N, False)
            p = tl.where(keep, p, 0.0)
        v = load_block(v_base, seqlen - start_n, stride_vt, HEAD_DIM, BLOCK_N, BLOCK_D, ALL)
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None], PRECISION)
        m_i = m_new
        k_base += BLOCK_N * stride_kt
        v_base += BLOCK_N * stride_vt
    return acc, l_i, m_i


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
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
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
    k_base = row_start(k_ptr, bos, head, stride_kt, stride_kh)
    v_base = row_start(v_ptr, bos, head, stride_vt, stride_vh)
    mask_base = key_mask_ptr + bos
    seed = tl.load(seed_ptr) if HAS_DROPOUT else 0

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    full = seqlen // BLOCK_N * BLOCK_N
    acc, l_i, m_i = _fwd_blocks(
        acc, l_i, m_i, q, k_base, v_base, mask_base, 0, full, seqlen,
        stride_kt, stride_vt, softmax_scale, seed, threshold, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, True, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip
    k_base = row_start(k_ptr, bos + full, head, stride_kt, stride_kh)
    v_base = row_start(v_ptr, bos + full, head, stride_vt, stride_vh)
    acc, l_i, m_i = _fwd_blocks(
        acc, l_i, m_i, q, k_base, v_base, mask_base, full, seqlen, seqlen,
        stride_kt, stride_vt, softmax_scale, seed, threshold, first_row - bos, bos, head,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, False, HAS_KEY_MASK, HAS_DROPOUT, PRECISION,
    )  # fmt: skip

    # by selection: a row without a key gives 0 whatever it holds
    has_key = l_i > 0.0
    l_safe = tl.where(has_key, l_i, 1.0)
    out = tl.where(has_key[:, None], acc * (dropout_scale / l_safe)[:, None], 0.0)
    out_base = row_start(out_ptr, first_row, head, stride_ot, stride_oh)
    store_block(out_base, out, rows_left, stride_ot, HEAD_DIM, BLOCK_M, BLOCK_D)
    lse = tl.where(has_key, m_i * softmax_scale + tl.log(l_safe), 0.0)
    offs_m = first_row + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + head.to(tl.int64) * total_tokens + offs_m, lse, mask=offs_m < end_row)


# ---- launcher ---------------------------------------------------------------------------------------------


def attention_schedule(cu_seqlens: Tensor, total_tokens: int, max_seqlen: int) -> Tensor:
    """The tiles of a batch, made once and read by every layer, forward and backward: int32 [tiles, 4].

    cu_seqlens [B+1] int32, from 0, never falling; repeated values are sequences of length zero. A row holds
    the first token row of a tile, the end of its rows, and the first and the end of the key rows they see.
    Longest sequences come first. Rows from cu_seqlens[-1] to total_tokens, which no sequence owns, get tiles
    without keys. The number of tiles depends on shapes only, and those left over have no rows. Tensor
    arithmetic: the host reads nothing. `max_seqlen` decides the height of a tile (`tile_rows`).
    """
    rows = tile_rows(max_seqlen)
    cu_seqlens = cu_seqlens.clamp(max=total_tokens)
    starts, ends = cu_seqlens, torch.cat([cu_seqlens[1:], cu_seqlens.new_full((1,), total_tokens)])
    # the last entry is the stretch that no sequence owns: its tiles are the shortest work, and come last
    unowned = starts.shape[0] - 1
    longest_first = (starts - ends)[:-1].argsort(stable=True)
    order = torch.cat([longest_first, longest_first.new_full((1,), unowned)])
    is_owned = order < unowned
    starts, ends = starts[order], ends[order]
    num_tiles = (ends - starts + rows - 1) // rows
    tiles_before = num_tiles.cumsum(0) - num_tiles

    tiles = torch.arange(min(total_tokens // rows + unowned + 1, total_tokens), device=starts.device)
    sequence = torch.searchsorted(tiles_before + num_tiles, tiles, right=True).clamp(max=unowned)
    first_row = starts[sequence] + (tiles - tiles_before[sequence]) * rows
    keys_start, keys_end = (torch.where(is_owned, bound, 0)[sequence] for bound in (starts, ends))
    return torch.stack([first_row, ends[sequence], keys_start, keys_end], dim=1).to(torch.int32)


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

    q, k, v [T, H, D], of one dtype (fp32, fp16, bf16), D from 1 to 128: rows and heads may be strided, as in
    views of a [T, 3, H, D] tensor. `schedule` is `attention_schedule`'s for the same max_seqlen. key_mask [T]
    bool: keys that may be seen. With dropout_p > 0, `seed` is an int64 tensor of one element on q's device;
    an element's fate depends on the seed, the head, its place in its sequence and where that begins.

    out is contiguous; out and lse are 0 in rows without a key; elsewhere lse is the natural logarithm of the
    softmax's denominator. Deterministic. `config` overrides `launch.choose`. ValueError for bad input.
    """
    T, H, D = check_tensors(q, {"k": k, "v": v}, key_mask=key_mask, dropout_p=dropout_p, seed=seed)
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((H, T), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    constants = constants_of(q, max_seqlen, key_mask, dropout_p)
    config = config or choice_of("attention_fwd", attention_fwd_configs, q, constants)
    threshold, scale = dropout_threshold(dropout_p)
    with device_guard(q):
        _attention_fwd_kernel[grid_of(schedule, H, constants, config.block_m)](
            q, k, v, mask_bytes(key_mask, q), q if seed is None else seed, schedule, out, lse,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
            T, H, D**-0.5, threshold, scale,
            **constants, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out, lse


# ---- what both launchers share ----------------------------------------------------------------------------


def constants_of(q: Tensor, max_seqlen: int, key_mask: Tensor | None, dropout_p: float) -> dict[str, Any]:
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
    """Columns that a head takes up: the next power of two, and no fewer than matrix instructions need."""
    return max(16, triton.next_power_of_2(head_dim))


def choice_of(op: str, rule: Callable[..., Any], q: Tensor, constants: dict[str, Any]) -> AttentionConfig:
    kind = (DTYPES[q.dtype], constants["BLOCK_D"], constants["TILE_ROWS"], constants["HAS_KEY_MASK"])
    return choose(op, tuning_key(*kind, constants["HAS_DROPOUT"]), rule(architecture(q), *kind), q)


def tuning_key(dtype: str, block_d: int, rows: int, key_mask: bool, dropout: bool) -> str:
    forms = (" key_mask" if key_mask else "") + (" dropout" if dropout else "")
    return f"{dtype} head_dim {block_d} tile_rows {rows}{forms}"


def grid_of(schedule: Tensor, num_heads: int, constants: dict[str, Any], block_rows: int) -> tuple[int]:
    return (schedule.shape[0] * (constants["TILE_ROWS"] // block_rows) * num_heads,)


def mask_bytes(key_mask: Tensor | None, unused: Tensor) -> Tensor:
    return unused if key_mask is None else key_mask.view(torch.uint8)


def check_tensors(
    q: Tensor,
    others: dict[str, Tensor],
    *,
    key_mask: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[int, int, int]:
    """(T, heads, head_dim), or a ValueError."""
    if q.dim() != 3:
        raise ValueError(f"q must be [T, heads, head_dim], but has shape {tuple(q.shape)}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float32, float16 or bfloat16, but is {q.dtype}")
    if q.shape[2] > HEAD_DIM_LIMIT:
        raise ValueError(
            f"head_dim {q.shape[2]} is above {HEAD_DIM_LIMIT}, the kernel's limit: use the eager path"
        )
    for name, x in {"q": q, **others}.items():
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must be like q, {tuple(q.shape)} {q.dtype} on {q.device}, "
                f"but is {tuple(x.shape)} {x.dtype} on {x.device}"
            )
        if x.shape[2] > 1 and x.stride(2) != 1:
            raise ValueError(
                f"{name} must have adjacent columns, but has column stride {x.stride(2)}: call .contiguous()"
            )
        if x.shape[0] > 1 and x.stride(0) >= ROW_STRIDE_LIMIT:
            raise ValueError(
                f"{name} has a row stride of {x.stride(0)}, the limit is {ROW_STRIDE_LIMIT - 1}: "
                "call .contiguous()"
            )
    if key_mask is not None and (
        key_mask.shape != q.shape[:1] or key_mask.dtype != torch.bool or not key_mask.is_contiguous()
    ):
        raise ValueError(
            f"key_mask must be [{q.shape[0]}] bool and contiguous, but is {list(key_mask.shape)} "
            f"{key_mask.dtype} with stride {key_mask.stride()}"
        )
    dropout_threshold(dropout_p)
    if dropout_p > 0.0 and (
        seed is None or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device
    ):
        given = "None" if seed is None else f"{tuple(seed.shape)} {seed.dtype} on {seed.device}"
        raise ValueError(f"dropout needs a seed, an int64 tensor of one element on {q.device}, not {given}")
    check_can_launch(_attention_fwd_kernel, q)
    return q.shape[0], q.shape[1], q.shape[2]


# ---- what is measured and what is compiled ----------------------------------------------------------------

# heads and widths of BERT-Large, of MiniLM, and of a wide head, at about the same work
TUNED_WIDTHS = ((16, 64), (12, 32), (8, 128))
TUNED_TOKENS = 16_384


class TuningBatch:
    """A batch of the Wikipedia kind for `tune`: half its sequences are full, the rest of any length."""

    def __init__(
        self, dtype: torch.dtype, num_heads: int, head_dim: int, max_seqlen: int, dropout: bool
    ) -> None:
        self.dtype, self.num_heads, self.head_dim, self.max_seqlen = dtype, num_heads, head_dim, max_seqlen
        self.dropout_p = 0.1 if dropout else 0.0
        lengths: list[int] = []
        while (left := TUNED_TOKENS - sum(lengths)) > 0:
            part = max_seqlen if len(lengths) % 2 else 1 + 97 * len(lengths) % max_seqlen
            lengths.append(min(part, left))
        self.seqlens = torch.tensor(lengths)
        self.flops = 4.0 * num_heads * head_dim * float(self.seqlens.square().sum())

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, 3, H, D], the schedule, a seed."""
        shape = (TUNED_TOKENS, 3, self.num_heads, self.head_dim)
        qkv = torch.randn(shape, dtype=self.dtype, device=device)
        cu_seqlens = torch.nn.functional.pad(self.seqlens.cumsum(0), (1, 0)).to(device, torch.int32)
        schedule = attention_schedule(cu_seqlens, TUNED_TOKENS, self.max_seqlen)
        return qkv, schedule, torch.tensor([2026], device=device)


def tuning_batches(arch: str, rule: Callable[..., Any]) -> list[tuple[str, Any, TuningBatch]]:
    """(key, candidates, batch) of each form that is measured."""
    cases = []
    for dtype in (torch.bfloat16, torch.float16):
        for num_heads, head_dim in TUNED_WIDTHS:
            for max_seqlen in (64, 512):
                for dropout in (False, True):
                    kind = (DTYPES[dtype], head_dim_block(head_dim), tile_rows(max_seqlen), False)
                    batch = TuningBatch(dtype, num_heads, head_dim, max_seqlen, dropout)
                    cases.append((tuning_key(*kind, dropout), rule(arch, *kind), batch))
    return cases


def tuning_cases(arch: str) -> list[TuningCase]:
    return [
        TuningCase("attention_fwd", key, candidates, functools.partial(_prepare, batch), batch.flops)
        for key, candidates, batch in tuning_batches(arch, attention_fwd_configs)
    ]


def _prepare(batch: TuningBatch, device: torch.device) -> Callable[[AttentionConfig], tuple[Tensor, ...]]:
    qkv, schedule, seed = batch.tensors(device)

    def launch(config: AttentionConfig) -> tuple[Tensor, ...]:
        return attention_fwd(
            *qkv.unbind(1), schedule, batch.max_seqlen, dropout_p=batch.dropout_p, seed=seed, config=config
        )

    return launch


def compile_cases(arch: str) -> list[CompileCase]:
    return attention_cases(arch, _attention_fwd_kernel, attention_fwd_configs)


def attention_cases(arch: str, kernel: Any, rule: Callable[..., Any]) -> list[CompileCase]:
    """Every configuration of one of the three kernels, in the forms that differ in registers or memory."""
    cases = []
    for dtype, head_dim, dropout, key_mask, rows, precision in _forms(arch):
        configs = rule(arch, dtype, head_dim_block(head_dim), rows, key_mask)
        # BERT's own width with every candidate; the other forms as they are launched without a table
        if (dtype, rows) != ("bf16", 128) or head_dim not in (64, 128) or key_mask:
            configs = configs[:1]
        for config in configs:
            cases.append(_attention_case(kernel, dtype, head_dim, dropout, key_mask, rows, precision, config))
    return cases


def _forms(arch: str) -> list[tuple[str, int, bool, bool, int, str]]:
    """dtype, head_dim, dropout, key mask, tile rows, precision."""
    forms = [("bf16", 64, dropout, False, 128, "ieee") for dropout in (True, False)]
    forms += [("bf16", 128, True, False, 128, "ieee"), ("bf16", 128, True, False, 64, "ieee")]
    forms += [("bf16", 64, True, False, 64, "ieee")]
    forms += [("bf16", width, True, True, 128, "ieee") for width in (64, 128)]
    # MiniLM's width, and two that are not a power of two: one needs a column mask, one also odd addresses
    forms += [("bf16", width, True, False, 128, "ieee") for width in (32, 26)]
    forms += [("fp32", width, True, False, 128, "ieee") for width in (64, 128)]
    if arch in ("sm_80", "sm_90"):  # where a spill fails the report
        forms += [("bf16", 96, True, False, 128, "ieee"), ("fp16", 64, True, False, 128, "ieee")]
        forms += [("fp32", width, True, False, 128, "tf32") for width in (64, 128)]
    return forms


def _attention_case(
    kernel: Any,
    dtype: str,
    head_dim: int,
    dropout: bool,
    key_mask: bool,
    rows: int,
    precision: str,
    config: AttentionConfig,
) -> CompileCase:
    types = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "key_mask_ptr": "*u8", "seed_ptr": "*i64"}
    types |= {"schedule_ptr": "*i32", "softmax_scale": "fp32", "dropout_scale": "fp32"}
    run_time = [name for name in kernel.arg_names if not name.isupper()]
    signature = {n: types.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in run_time}
    aligned = {n for n in run_time if n.endswith("_ptr") or (n.startswith("stride") and head_dim % 16 == 0)}
    forms = [f"head_dim {head_dim}", f"{config.block_m}x{config.block_n}", f"w{config.num_warps}"]
    forms += [f"s{config.num_stages}"]
    forms += [name for name, on in (("dropout", dropout), ("key mask", key_mask)) if on]
    forms += [f"tile_rows {rows}"] if rows != 128 else []
    forms += [precision] if precision != "ieee" else []
    return CompileCase(
        kernel=kernel,
        label=", ".join(forms),
        dtype=dtype,
        signature=signature,
        constexprs={
            "HEAD_DIM": head_dim,
            "HAS_KEY_MASK": key_mask,
            "HAS_DROPOUT": dropout,
            "TILE_ROWS": rows,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": head_dim_block(head_dim),
            "PRECISION": precision,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=frozenset(aligned),
        uses_dot=True,
    )
