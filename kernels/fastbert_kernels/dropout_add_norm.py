"""LayerNorm(residual + dropout(x + bias)), what closes each half of a layer, and its gradients.

A program holds whole rows in registers. The backward pass reads what the forward pass read and makes the sum
and its dropout mask again: beside the inputs, which their producers and the next product hold anyway, 8 bytes
a row are saved (mean and 1 / standard deviation). Storing the sum instead would move as many bytes, and round
it; getting it back from y would divide by a weight, which may be 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.launch import (
    ROW_WIDTH_LIMIT,
    CompileCase,
    LaunchConfig,
    check_can_launch,
    device_guard,
    row_norm_bwd_config,
    row_norm_fwd_config,
)
from fastbert_kernels.philox import PHILOX_ROUNDS, dropout_threshold

WIDTH_LIMIT = ROW_WIDTH_LIMIT
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# a tile of partial sums, in the kernel that adds them up
SUM_ROWS = 64
SUM_COLS = 32


@triton.jit
def keep_in_rows(seed, rows, threshold, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which elements of whole rows stay: [ROWS, COLS] bool for rows [ROWS] int64; COLS is a multiple of 8.

    Element (r, c) depends on the seed (int64), the row and the column only. One Philox call, of the counter
    (c // 8, low word of the row, high word, 0), serves 8 columns that lie side by side, as a thread's 16-byte
    load of 16-bit numbers does: half c % 2 of word c % 8 // 2.
    """
    c0 = tl.broadcast_to(tl.arange(0, COLS // 8)[None, :].to(tl.uint32), [ROWS, COLS // 8])
    c1 = tl.broadcast_to((rows & 0xFFFFFFFF).to(tl.uint32)[:, None], [ROWS, COLS // 8])
    c2 = tl.broadcast_to((rows >> 32).to(tl.uint32)[:, None], [ROWS, COLS // 8])
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c0 & 0, PHILOX_ROUNDS)
    w0 = tl.reshape(w0, [ROWS, COLS // 8, 1, 1])
    w1 = tl.reshape(w1, [ROWS, COLS // 8, 1, 1])
    w2 = tl.reshape(w2, [ROWS, COLS // 8, 1, 1])
    w3 = tl.reshape(w3, [ROWS, COLS // 8, 1, 1])
    number = tl.reshape(tl.arange(0, 4), [1, 1, 4, 1])
    half = tl.reshape(tl.arange(0, 2), [1, 1, 1, 2])
    word = tl.where(number < 2, tl.where(number == 0, w0, w1), tl.where(number == 2, w2, w3))
    # the comparison looks at the upper 16 bits, below which the threshold has zeros
    bits = word << (16 - half * 16).to(tl.uint32)
    bits = tl.reshape(tl.broadcast_to(bits, [ROWS, COLS // 8, 4, 2]), [ROWS, COLS])
    return bits >= (threshold.to(tl.uint32) << 16)


@triton.jit
def _tile(x_ptr, first_row, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to [BLOCK_M, BLOCK_N] from first_row on, which is int64."""
    rows, cols = tl.arange(0, BLOCK_M).to(tl.int64), tl.arange(0, BLOCK_N)
    return x_ptr + first_row * stride + (rows[:, None] * stride + cols[None, :])


@triton.jit
def _vector(x_ptr, cols, in_row):
    return tl.load(x_ptr + cols, mask=in_row, other=0.0).to(tl.float32)


@triton.jit
def _load_sum(
    x_ptr, residual_ptr, bias, stride_xm, stride_rm, first_row, mask, keep, dropout_scale,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """residual + dropout(x + bias) in fp32, the same in both passes; anything where masked."""
    h = tl.load(_tile(x_ptr, first_row, stride_xm, BLOCK_M, BLOCK_N), mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        h += bias[None, :]
    if HAS_DROPOUT:
        h = tl.where(keep, h * dropout_scale, 0.0)
    if HAS_RESIDUAL:
        h += tl.load(_tile(residual_ptr, first_row, stride_rm, BLOCK_M, BLOCK_N), mask=mask, other=0.0)
    return h


@triton.jit
def row_statistics(h, mask, N, eps):
    """(mean, 1 / standard deviation) [ROWS] of h [ROWS, COLS], whose first N columns count, 0 elsewhere."""
    # the corrected two-pass algorithm (Chan, Golub and LeVeque, 1983, formula 1.7). The correction also takes
    # the rounding of the first sum out of the mean: a constant row is that constant, to the last bit
    rough_mean = tl.sum(h, axis=1) / N
    distance = tl.where(mask, h - rough_mean[:, None], 0.0)
    correction = tl.sum(distance, axis=1) / N
    variance = tl.sum(distance * distance, axis=1) / N - correction * correction
    mean = rough_mean + correction
    return mean, tl.rsqrt(tl.maximum(variance, 0.0) + eps)


# what changes with the batch is not specialised on: being 1 or a multiple of 16 would compile another kernel
@triton.jit(do_not_specialize=["M", "threshold"])
def _dropout_add_norm_fwd_kernel(
    x_ptr,  # [M, N]
    residual_ptr,  # [M, N]
    bias_ptr,  # [N]
    weight_ptr,  # [N]
    norm_bias_ptr,  # [N]
    seed_ptr,  # [1] int64
    y_ptr,  # [M, N]
    mean_ptr,  # [M] fp32
    rstd_ptr,  # [M] fp32
    stride_xm,
    stride_rm,
    stride_ym,
    M,
    N,
    eps,
    threshold,
    dropout_scale,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    in_row = cols < N
    mask = (rows < M)[:, None] & in_row[None, :]
    seed = tl.load(seed_ptr) if HAS_DROPOUT else 0
    keep = keep_in_rows(seed, rows, threshold, BLOCK_M, BLOCK_N) if HAS_DROPOUT else mask
    bias = _vector(bias_ptr, cols, in_row) if HAS_BIAS else 0.0
    h = _load_sum(
        x_ptr, residual_ptr, bias, stride_xm, stride_rm, first_row, mask, keep, dropout_scale,
        HAS_BIAS, HAS_RESIDUAL, HAS_DROPOUT, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    mean, rstd = row_statistics(h, mask, N, eps)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)

    weight = _vector(weight_ptr, cols, in_row)
    norm_bias = _vector(norm_bias_ptr, cols, in_row)
    y = (h - mean[:, None]) * rstd[:, None] * weight[None, :] + norm_bias[None, :]
    tl.store(_tile(y_ptr, first_row, stride_ym, BLOCK_M, BLOCK_N), y, mask=mask)


@triton.jit(do_not_specialize=["M", "tiles_m", "threshold"])
def _dropout_add_norm_bwd_kernel(
    dy_ptr,  # [M, N]
    x_ptr,  # [M, N]
    residual_ptr,  # [M, N]
    bias_ptr,  # [N]
    weight_ptr,  # [N]
    mean_ptr,  # [M] fp32
    rstd_ptr,  # [M] fp32
    seed_ptr,  # [1] int64
    dx_ptr,  # [M, N]
    dresidual_ptr,  # [M, N]
    partial_ptr,  # [programs, SUMS, N] fp32, contiguous
    stride_dym,
    stride_xm,
    stride_rm,
    stride_dxm,
    M,
    N,
    tiles_m,
    threshold,
    dropout_scale,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    OWN_DRESIDUAL: tl.constexpr,  # it is not dx
    SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,  # of the loop: tiles that are on their way
):
    # the widest rows leave no registers for what can be had again: the same values, from the cache
    LEAN: tl.constexpr = BLOCK_N > 4096
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    in_row = cols < N
    seed = tl.load(seed_ptr) if HAS_DROPOUT else 0
    bias = _vector(bias_ptr, cols, in_row) if HAS_BIAS else 0.0
    weight = _vector(weight_ptr, cols, in_row)
    dweight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dnorm_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(0, tiles_m, num_stages=NUM_STAGES):
        first_row = (pid * tiles_m + tile) * BLOCK_M
        rows = first_row + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & in_row[None, :]
        keep = keep_in_rows(seed, rows, threshold, BLOCK_M, BLOCK_N) if HAS_DROPOUT else mask
        if LEAN and HAS_BIAS:
            bias = _vector(bias_ptr, cols, in_row)
        h = _load_sum(
            x_ptr, residual_ptr, bias, stride_xm, stride_rm, first_row, mask, keep, dropout_scale,
            HAS_BIAS, HAS_RESIDUAL, HAS_DROPOUT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        dy = tl.load(_tile(dy_ptr, first_row, stride_dym, BLOCK_M, BLOCK_N), mask=mask, other=0.0)
        dy = dy.to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        xhat = (h - mean[:, None]) * rstd[:, None]
        dnorm_bias += dy  # 0 where masked, and so are all terms of the other sums
        dweight += dy * xhat
        if LEAN:
            weight = _vector(weight_ptr, cols, in_row)
        dxhat = dy * weight[None, :]
        mean_dxhat = tl.sum(dxhat, axis=1) / N
        mean_product = tl.sum(dxhat * xhat, axis=1) / N
        dh = (dxhat - mean_dxhat[:, None] - xhat * mean_product[:, None]) * rstd[:, None]
        if LEAN and HAS_DROPOUT:
            keep = keep_in_rows(tl.load(seed_ptr), rows, threshold, BLOCK_M, BLOCK_N)
        dx = tl.where(keep, dh * dropout_scale, 0.0) if HAS_DROPOUT else dh
        tl.store(_tile(dx_ptr, first_row, stride_dxm, BLOCK_M, BLOCK_N), dx, mask=mask)
        if OWN_DRESIDUAL:
            tl.store(_tile(dresidual_ptr, first_row, stride_dxm, BLOCK_M, BLOCK_N), dh, mask=mask)
        if HAS_BIAS:
            dbias += dx  # beyond the last row rstd is 0; beyond the last column nothing is stored
    partial_row = partial_ptr + pid * SUMS * N + cols
    tl.store(partial_row, tl.sum(dweight, axis=0), mask=in_row)
    tl.store(partial_row + N, tl.sum(dnorm_bias, axis=0), mask=in_row)
    if HAS_BIAS:
        tl.store(partial_row + 2 * N, tl.sum(dbias, axis=0), mask=in_row)


@triton.jit(do_not_specialize=["num_partials"])
def _sum_partials_kernel(
    partial_ptr,  # [num_partials, SUMS, N] fp32
    dweight_ptr,  # [N]
    dnorm_bias_ptr,  # [N]
    dbias_ptr,  # [N]
    num_partials,
    N,
    SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    which = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_partials, BLOCK_M):
        mask = (start + rows < num_partials)[:, None] & (cols < N)[None, :]
        row_offsets = ((start + rows).to(tl.int64) * SUMS + which) * N
        acc += tl.load(partial_ptr + row_offsets[:, None] + cols[None, :], mask=mask, other=0.0)
    total = tl.sum(acc, axis=0)
    if which == 0:
        tl.store(dweight_ptr + cols, total, mask=cols < N)
    elif which == 1:
        tl.store(dnorm_bias_ptr + cols, total, mask=cols < N)
    else:
        tl.store(dbias_ptr + cols, total, mask=cols < N)


def dropout_add_norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    fp32_out: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm(residual + dropout(x + bias)) -> (y [M, N] contiguous, mean [M] fp32, rstd [M] fp32).

    x [M, N] in fp32, fp16 or bf16, N up to 8,192; residual [M, N], or None for none; bias [N], or None;
    weight and norm_bias [N], of one dtype. Each of them has x's dtype or fp32. y has x's dtype, or fp32 with
    `fp32_out`. Rows of x and residual may be strided, M and N may be 0. Everything between loading and
    storing is fp32, eps included; the variance is taken about the mean. With dropout_p > 0, `seed` is an
    int64 tensor of one element on x's device; an element's fate depends on the seed and its place in x.
    Deterministic. ValueError for anything else.
    """
    _check(x, residual, bias, {"weight": weight, "norm_bias": norm_bias}, dropout_p, seed)
    M, N = x.shape
    y = torch.empty((M, N), dtype=torch.float32 if fp32_out else x.dtype, device=x.device)
    mean, rstd = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))
    if y.numel() == 0:
        return y, mean.zero_(), rstd.zero_()
    config = row_norm_fwd_config(N)
    threshold, scale = dropout_threshold(dropout_p)
    with device_guard(x):
        _dropout_add_norm_fwd_kernel[(config.num_row_programs(M),)](
            x, x if residual is None else residual, x if bias is None else bias, weight, norm_bias,
            x if seed is None else seed, y, mean, rstd,
            x.stride(0), x.stride(0) if residual is None else residual.stride(0), y.stride(0),
            M, N, eps, threshold, scale,
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_DROPOUT=dropout_p > 0.0,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
        )  # fmt: skip
    return y, mean, rstd


def dropout_add_norm_bwd(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Gradients of `dropout_add_norm_fwd`: (dx, dresidual, dbias, dweight, dnorm_bias), each as its tensor.

    dy [M, N] in y's dtype, its rows may be strided; the rest as in the forward, which gave mean and rstd.
    dresidual or dbias is None where there is no residual or bias. Without dropout, a residual of x's dtype
    has the gradient of x: dresidual is dx, the same tensor. The three column sums are sums of unrounded
    terms: fp32 partial sums, a row of them for each program, which a second kernel adds in order. No atomics,
    so two runs give the same bits. M = 0 gives zeros. ValueError as in the forward.
    """
    _check(x, residual, bias, {"weight": weight}, dropout_p, seed)
    _check_matrix("dy", dy)
    _check_like_x("dy", dy, x)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if statistic.shape != x.shape[:1] or statistic.dtype != torch.float32:
            raise ValueError(
                f"{name} must be the forward's, [{x.shape[0]}] torch.float32, "
                f"but is {list(statistic.shape)} {statistic.dtype}"
            )
    M, N = x.shape
    has_own_dresidual = residual is not None and (dropout_p > 0.0 or residual.dtype != x.dtype)
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    dresidual = dx if residual is not None else None
    if residual is not None and has_own_dresidual:
        dresidual = torch.empty((M, N), dtype=residual.dtype, device=x.device)
    dweight, dnorm_bias = (torch.empty(N, dtype=weight.dtype, device=x.device) for _ in range(2))
    dbias = None if bias is None else torch.empty(N, dtype=bias.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, dresidual, None if dbias is None else dbias.zero_(), dweight.zero_(), dnorm_bias.zero_()
    config = row_norm_bwd_config(M, N)
    num_partials, sums = config.num_row_programs(M), 2 if bias is None else 3
    partial = torch.empty((num_partials, sums, N), dtype=torch.float32, device=x.device)
    threshold, scale = dropout_threshold(dropout_p)
    with device_guard(x):
        _dropout_add_norm_bwd_kernel[(num_partials,)](
            dy, x, x if residual is None else residual, x if bias is None else bias, weight, mean, rstd,
            x if seed is None else seed, dx, dx if dresidual is None else dresidual, partial,
            dy.stride(0), x.stride(0), x.stride(0) if residual is None else residual.stride(0), dx.stride(0),
            M, N, config.tiles_m, threshold, scale,
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_DROPOUT=dropout_p > 0.0,
            OWN_DRESIDUAL=has_own_dresidual, SUMS=sums, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            NUM_STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
        _sum_partials_kernel[(triton.cdiv(N, SUM_COLS), sums)](
            partial, dweight, dnorm_bias, dweight if dbias is None else dbias, num_partials, N,
            SUMS=sums, BLOCK_M=SUM_ROWS, BLOCK_N=SUM_COLS,
        )  # fmt: skip
    return dx, dresidual, dbias, dweight, dnorm_bias


def _check(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    parameters: dict[str, Tensor],
    dropout_p: float,
    seed: Tensor | None,
) -> None:
    _check_matrix("x", x)
    if x.shape[1] > WIDTH_LIMIT:
        raise ValueError(
            f"x is {x.shape[1]} wide, and the kernel's limit is {WIDTH_LIMIT}: use the eager path"
        )
    allowed, dtypes = _allowed(x)
    if residual is not None:
        _check_like_x("residual", residual, x)
    for name, vector in (parameters if bias is None else parameters | {"bias": bias}).items():
        if vector.shape != x.shape[1:] or vector.dtype not in allowed or vector.device != x.device:
            raise ValueError(
                f"{name} must be [{x.shape[1]}] {dtypes} on {x.device} to fit x, "
                f"but is {list(vector.shape)} {vector.dtype} on {vector.device}"
            )
        if vector.shape[0] > 1 and vector.stride(0) != 1:
            raise ValueError(
                f"{name} must be contiguous, but has stride {vector.stride(0)}: call .contiguous()"
            )
    if len({vector.dtype for vector in parameters.values()}) > 1:
        given = " and ".join(f"{name} {vector.dtype}" for name, vector in parameters.items())
        raise ValueError(f"the parameters of the norm must have one dtype, but are {given}")
    dropout_threshold(dropout_p)
    if dropout_p > 0.0 and (
        seed is None or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != x.device
    ):
        given = "None" if seed is None else f"{tuple(seed.shape)} {seed.dtype} on {seed.device}"
        raise ValueError(f"dropout needs a seed, an int64 tensor of one element on {x.device}, not {given}")
    check_can_launch(_dropout_add_norm_fwd_kernel, x)


def _check_like_x(name: str, given: Tensor, x: Tensor) -> None:
    _check_matrix(name, given)
    allowed, dtypes = _allowed(x)
    if given.shape != x.shape or given.dtype not in allowed or given.device != x.device:
        raise ValueError(
            f"{name} must be {tuple(x.shape)} {dtypes} on {x.device} to fit x, "
            f"but is {tuple(given.shape)} {given.dtype} on {given.device}"
        )


def _allowed(x: Tensor) -> tuple[set[torch.dtype], str]:
    """What may lie beside x: its own dtype and fp32; in words, too."""
    dtypes = dict.fromkeys((x.dtype, torch.float32))
    return set(dtypes), " or ".join(str(dtype) for dtype in dtypes)


def _check_matrix(name: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name} must be [M, N], but has shape {tuple(x.shape)}: call .reshape(-1, N)")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, but is {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(
            f"{name} must have adjacent columns, but has column stride {x.stride(1)}: call .contiguous()"
        )


# ---- what is compiled -------------------------------------------------------------------------------------


def compile_cases(arch: str) -> list[CompileCase]:
    """Every block of the rules, in BERT's forms and its autocast's; the rarer ones where a spill fails."""
    M = 16384
    spills_fail = arch in ("sm_80", "sm_90")
    cases = []
    # widths: BERT-Large, BERT-Base, MiniLM, a tiny one, the widest blocks, and one with odd addresses
    for width, dtype, other, form in (
        (1024, "bf16", "bf16", "residual bias dropout"),
        (1024, "bf16", "bf16", "residual bias"),
        (1024, "bf16", "bf16", "residual dropout"),
        (1024, "bf16", "bf16", ""),
        (1024, "bf16", "fp32", "residual bias dropout"),
        (1024, "bf16", "fp32", "residual bias"),
        (1024, "bf16", "fp32", "residual bias dropout fp32-y"),
        (1024, "fp16", "fp16", "residual bias dropout"),
        (1024, "fp32", "fp32", "residual bias dropout"),
        (1024, "fp32", "fp32", ""),
        (768, "bf16", "bf16", "residual bias dropout"),
        (384, "bf16", "bf16", "residual bias dropout"),
        (64, "bf16", "bf16", "residual bias dropout"),
        (2048, "bf16", "bf16", "residual bias dropout"),
        (4096, "bf16", "bf16", "residual bias dropout"),
        (8192, "bf16", "bf16", "residual bias dropout"),
        (8192, "fp32", "fp32", "residual bias dropout"),
        (1023, "bf16", "bf16", "residual bias dropout"),
    ):  # fmt: skip
        if not spills_fail and (width < 768 or "bias dropout" not in form or dtype == "fp16"):
            continue
        for kernel, config in (
            (_dropout_add_norm_fwd_kernel, row_norm_fwd_config(width)),
            (_dropout_add_norm_bwd_kernel, row_norm_bwd_config(M, width)),
        ):
            cases.append(_row_case(kernel, config, width, dtype, other, form))
        if form == "residual bias dropout":
            cases.append(_sum_case(width, dtype, other))
    return cases


def _row_case(
    kernel: Any, config: LaunchConfig, width: int, dtype: str, other: str, form: str
) -> CompileCase:
    """`other` is the dtype of the parameters and of the residual."""
    types = dict.fromkeys(("residual_ptr", "bias_ptr", "weight_ptr", "norm_bias_ptr"), f"*{other}")
    types |= {"dresidual_ptr": f"*{other}", "seed_ptr": "*i64", "eps": "fp32", "dropout_scale": "fp32"}
    types |= dict.fromkeys(("mean_ptr", "rstd_ptr", "partial_ptr"), "*fp32")
    if "fp32-y" in form:  # the last layer's, under autocast
        types |= {"y_ptr": "*fp32", "dy_ptr": "*fp32"}
    run_time = [name for name in kernel.arg_names if not name.isupper() or len(name) == 1]
    constants = {
        "HAS_BIAS": "bias" in form,
        "HAS_RESIDUAL": "residual" in form,
        "HAS_DROPOUT": "dropout" in form,
        "OWN_DRESIDUAL": "residual" in form and ("dropout" in form or dtype != other),
        "SUMS": 3 if "bias" in form else 2,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
    }
    strides = {"stride_xm", "stride_rm", "stride_ym", "stride_dym", "stride_dxm"}
    aligned = {name for name in run_time if name.endswith("_ptr")}
    if width % 16 == 0:
        aligned |= {"N", *strides} & set(run_time)
    return CompileCase(
        kernel=kernel,
        label=", ".join(
            [f"width {width}", *form.split(), *([] if dtype == other else [f"parameters {other}"])]
        ),
        dtype=dtype,
        signature={n: types.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in run_time},
        constexprs={name: value for name, value in constants.items() if name in kernel.arg_names},
        num_warps=config.num_warps,
        num_stages=None,
        aligned=frozenset(aligned),
    )


def _sum_case(width: int, dtype: str, other: str) -> CompileCase:
    outputs = dict.fromkeys(("dweight_ptr", "dnorm_bias_ptr", "dbias_ptr"), f"*{other}")
    return CompileCase(
        kernel=_sum_partials_kernel,
        label=f"width {width}" + ("" if dtype == other else f", parameters {other}"),
        dtype=dtype,
        signature={"partial_ptr": "*fp32", **outputs, "num_partials": "i32", "N": "i32"},
        constexprs={"SUMS": 3, "BLOCK_M": SUM_ROWS, "BLOCK_N": SUM_COLS},
        num_warps=4,
        num_stages=None,
        aligned=frozenset({"partial_ptr", *outputs} | ({"N"} if width % 16 == 0 else set())),
    )
