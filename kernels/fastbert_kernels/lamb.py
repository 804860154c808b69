"""A step of LAMB, or of BERT's AdamW, over any number of tensors: three launches, or two.

    1. sums of squares of all gradients
    2. their norm, clipping, moments; sums of squares of each tensor's weights and of its update
    3. each tensor's trust ratio, weights

Fewer are not possible without a barrier across the grid, that is without atomics: no moment may change before
every gradient is known to be finite, and no weight before the update of its whole tensor is known. Without
any trust ratio (AdamW) the second launch writes the weights, too. The second stage of a sum costs no launch:
every program that needs it adds up the same few partial sums in the same order.

A launch walks through all tensors (tensor_table.py). Those that need other machine code, for another type of
parameter or gradient, or for an address that is no multiple of 16, get launches of their own. The third
launch computes the update again: reading the moments costs as much as writing the update and reading
that, and takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.launch import CompileCase, check_can_launch, device_guard, optimizer_config
from fastbert_kernels.numerics import INTERPRETED
from fastbert_kernels.tensor_table import (
    EXP_AVG,
    EXP_AVG_SQ,
    FIRST_TILE,
    GRAD,
    GROUP,
    NUM_FIELDS,
    NUM_TILES,
    NUMEL,
    PARAM,
    STEP,
    WEIGHT,
    StepCache,
    StepTensors,
)

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# the fields of a group's options, fp64
NUM_OPTIONS: tl.constexpr = tl.constexpr(11)
LR: tl.constexpr = tl.constexpr(0)
BETA1: tl.constexpr = tl.constexpr(1)
BETA2: tl.constexpr = tl.constexpr(2)
GRAD_SHARE: tl.constexpr = tl.constexpr(3)  # of a gradient in the first moment
SQUARE_SHARE: tl.constexpr = tl.constexpr(4)  # of its square in the second
EPS: tl.constexpr = tl.constexpr(5)
DECAY: tl.constexpr = tl.constexpr(6)  # as part of the update
GRAD_DECAY: tl.constexpr = tl.constexpr(7)  # as part of the gradient
LOG_BETA1: tl.constexpr = tl.constexpr(8)  # -inf: no correction
LOG_BETA2: tl.constexpr = tl.constexpr(9)
TRUST_RATIO: tl.constexpr = tl.constexpr(10)  # 1 or 0

INFINITY: tl.constexpr = tl.constexpr(float("inf"))
SUM_BLOCK: tl.constexpr = tl.constexpr(1024)


# ---- device functions -------------------------------------------------------------------------------------


@triton.jit
def _at(row_ptr, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, start):
    """The address of element `start` of one of the tensors of a row."""
    pointer = tl.load(row_ptr + FIELD).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _step_at(row_ptr):
    return tl.load(row_ptr + STEP).to(tl.pointer_type(tl.float32))


@triton.jit
def _load(pointer, offsets, count, MASKED: tl.constexpr):
    # without a mask, because one that may end anywhere keeps a thread from loading 16 bytes at once
    if MASKED:  # noqa: SIM108
        x = tl.load(pointer + offsets, mask=offsets < count, other=0.0)
    else:
        x = tl.load(pointer + offsets)
    return x.to(tl.float32)


@triton.jit
def _store(pointer, offsets, count, x, MASKED: tl.constexpr):
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        # the interpreter cuts off half of the bits: add what makes that a rounding to nearest, ties to even
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    if MASKED:
        tl.store(pointer + offsets, x.to(pointer.dtype.element_ty), mask=offsets < count)
    else:
        tl.store(pointer + offsets, x.to(pointer.dtype.element_ty))


@triton.jit
def _sum(pointer, count):
    """Of `count` fp32 values, in an order that depends on `count` only."""
    sums = tl.zeros((SUM_BLOCK,), dtype=tl.float32)
    for start in range(0, count, SUM_BLOCK):
        offsets = start + tl.arange(0, SUM_BLOCK)
        sums += tl.load(pointer + offsets, mask=offsets < count, other=0.0)
    return tl.sum(sums)


@triton.jit
def _option(group_ptr, OPTION: tl.constexpr):
    return tl.load(group_ptr + OPTION).to(tl.float32)


@triton.jit
def _corrections(group_ptr, step):
    """(a, b) with (m/c1) / (sqrt(v/c2) + eps) = a * m / (sqrt(v) + b * eps)."""
    # in fp64, as the host computes it in the eager step: 1 - 0.999**1 cancels
    step = step.to(tl.float64)
    c1 = 1.0 - tl.exp(step * tl.load(group_ptr + LOG_BETA1))
    root = tl.sqrt(1.0 - tl.exp(step * tl.load(group_ptr + LOG_BETA2)))
    return (root / c1).to(tl.float32), root.to(tl.float32)


@triton.jit
def _update(m, v, p, eps, decay):
    """The update over the correction a, which the learning rate or the trust ratio makes good."""
    return tl.div_rn(m, tl.sqrt_rn(v) + eps) + tl.where(decay == 0.0, 0.0, p * decay)


@triton.jit
def _write_weights(weight_ptr, param_ptr, offsets, count, p, PARAM_DTYPE: tl.constexpr, MASKED: tl.constexpr):
    _store(weight_ptr, offsets, count, p, MASKED)
    if PARAM_DTYPE != tl.float32:  # noqa: SIM300
        _store(param_ptr, offsets, count, p, MASKED)


@triton.jit
def _square_block(grad_ptr, offsets, count, MASKED: tl.constexpr):
    g = _load(grad_ptr, offsets, count, MASKED)
    return g * g


@triton.jit
def _moments_block(
    grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_ptr, param_ptr, offsets, count,
    scale, beta1, beta2, grad_share, square_share, grad_decay, eps, decay, rate,
    PARAM_DTYPE: tl.constexpr, APPLY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """New moments, with APPLY also new weights; returns the squares of the weights and of the update."""
    p = _load(weight_ptr, offsets, count, MASKED)
    g = _load(grad_ptr, offsets, count, MASKED) * scale + tl.where(grad_decay == 0.0, 0.0, p * grad_decay)
    m = _load(exp_avg_ptr, offsets, count, MASKED) * beta1 + g * grad_share
    v = _load(exp_avg_sq_ptr, offsets, count, MASKED) * beta2 + g * g * square_share
    _store(exp_avg_ptr, offsets, count, m, MASKED)
    _store(exp_avg_sq_ptr, offsets, count, v, MASKED)
    u = _update(m, v, p, eps, decay)
    if MASKED:
        u = tl.where(offsets < count, u, 0.0)  # an eps too small for fp32 makes it 0 / 0
    if APPLY:
        _write_weights(weight_ptr, param_ptr, offsets, count, p - u * rate, PARAM_DTYPE, MASKED)
    return p * p, u * u


@triton.jit
def _apply_block(
    exp_avg_ptr, exp_avg_sq_ptr, weight_ptr, param_ptr, offsets, count, eps, decay, rate,
    PARAM_DTYPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    m = _load(exp_avg_ptr, offsets, count, MASKED)
    v = _load(exp_avg_sq_ptr, offsets, count, MASKED)
    p = _load(weight_ptr, offsets, count, MASKED)
    u = _update(m, v, p, eps, decay)
    _write_weights(weight_ptr, param_ptr, offsets, count, p - u * rate, PARAM_DTYPE, MASKED)


# ---- kernels: the whole blocks of a tile without a mask, then the rest ------------------------------------


@triton.jit(do_not_specialize=["first_tile", "num_tiles", "first_partial"])
def _grad_norm_kernel(
    table_ptr,  # [tensors, NUM_FIELDS] int64
    tiles_ptr,  # [tiles, 2] int32
    steps_ptr,  # [tensors] fp32, out: the counts before this step
    partial_ptr,  # [partial sums] fp32, out
    first_tile,
    num_tiles,
    first_partial,
    GRAD_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(pid, num_tiles, tl.num_programs(0)):
        tile = first_tile + i
        tensor = tl.load(tiles_ptr + tile * 2)
        number = tl.load(tiles_ptr + tile * 2 + 1)
        row_ptr = table_ptr + tensor * NUM_FIELDS
        start = number.to(tl.int64) * TILE
        count = tl.minimum(tl.load(row_ptr + NUMEL) - start, TILE).to(tl.int32)
        whole = count // BLOCK * BLOCK
        grad_ptr = _at(row_ptr, GRAD, GRAD_DTYPE, ALIGNED, start)
        for block in range(0, whole, BLOCK):
            sums += _square_block(grad_ptr, block + lanes, count, False)
        if whole < count:
            sums += _square_block(grad_ptr, whole + lanes, count, True)
        if tile == tl.load(row_ptr + FIRST_TILE):
            # the next launch changes the count while other programs of it read this copy
            tl.store(steps_ptr + tensor, tl.load(_step_at(row_ptr)))
    tl.store(partial_ptr + first_partial + pid, tl.sum(sums))


@triton.jit(do_not_specialize=["num_partials", "first_tile", "total_tiles"])
def _moments_kernel(
    table_ptr,  # [tensors, NUM_FIELDS] int64
    tiles_ptr,  # [tiles, 2] int32
    options_ptr,  # [groups, NUM_OPTIONS] fp64
    steps_ptr,  # [tensors] fp32
    partial_ptr,  # [num_partials] fp32
    loss_scale_ptr,  # [1] fp32
    norm_ptr,  # [] fp32, out: of the unscaled gradients
    squares_ptr,  # [2, total_tiles] fp32, out: sums over a tile's weights, over its update
    max_grad_norm,
    num_partials,
    first_tile,
    total_tiles,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    APPLY: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = first_tile + tl.program_id(0)
    tensor = tl.load(tiles_ptr + tile * 2)
    number = tl.load(tiles_ptr + tile * 2 + 1)
    row_ptr = table_ptr + tensor * NUM_FIELDS
    group_ptr = options_ptr + tl.load(row_ptr + GROUP) * NUM_OPTIONS
    loss_scale = tl.load(loss_scale_ptr)
    norm = tl.div_rn(tl.sqrt_rn(_sum(partial_ptr, num_partials)), loss_scale)
    if tile == 0:
        tl.store(norm_ptr, norm)
    if norm < INFINITY:  # false for NaN
        clips = (max_grad_norm > 0.0) & (norm > max_grad_norm)
        clip = tl.div_rn(tl.where(clips, max_grad_norm, 1.0), tl.where(clips, norm, 1.0))
        scale = tl.div_rn(clip, loss_scale)
        step = tl.load(steps_ptr + tensor) + 1.0
        if tile == tl.load(row_ptr + FIRST_TILE):
            tl.store(_step_at(row_ptr), step)
        a, b = _corrections(group_ptr, step)
        eps = b * _option(group_ptr, EPS)
        decay = tl.div_rn(_option(group_ptr, DECAY), a)
        rate = a * _option(group_ptr, LR)
        beta1 = _option(group_ptr, BETA1)
        beta2 = _option(group_ptr, BETA2)
        grad_share = _option(group_ptr, GRAD_SHARE)
        square_share = _option(group_ptr, SQUARE_SHARE)
        grad_decay = _option(group_ptr, GRAD_DECAY)

        start = number.to(tl.int64) * TILE
        count = tl.minimum(tl.load(row_ptr + NUMEL) - start, TILE).to(tl.int32)
        whole = count // BLOCK * BLOCK
        lanes = tl.arange(0, BLOCK)
        grad_ptr = _at(row_ptr, GRAD, GRAD_DTYPE, ALIGNED, start)
        exp_avg_ptr = _at(row_ptr, EXP_AVG, tl.float32, ALIGNED, start)
        exp_avg_sq_ptr = _at(row_ptr, EXP_AVG_SQ, tl.float32, ALIGNED, start)
        weight_ptr = _at(row_ptr, WEIGHT, tl.float32, ALIGNED, start)
        param_ptr = _at(row_ptr, PARAM, PARAM_DTYPE, ALIGNED, start)
        p_sums = tl.zeros((BLOCK,), dtype=tl.float32)
        u_sums = tl.zeros((BLOCK,), dtype=tl.float32)
        for block in range(0, whole, BLOCK):
            p_squares, u_squares = _moments_block(
                grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_ptr, param_ptr, block + lanes, count,
                scale, beta1, beta2, grad_share, square_share, grad_decay, eps, decay, rate,
                PARAM_DTYPE, APPLY, False,
            )  # fmt: skip
            p_sums += p_squares
            u_sums += u_squares
        if whole < count:
            p_squares, u_squares = _moments_block(
                grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_ptr, param_ptr, whole + lanes, count,
                scale, beta1, beta2, grad_share, square_share, grad_decay, eps, decay, rate,
                PARAM_DTYPE, APPLY, True,
            )  # fmt: skip
            p_sums += p_squares
            u_sums += u_squares
        if not APPLY:
            tl.store(squares_ptr + tile, tl.sum(p_sums))
            tl.store(squares_ptr + total_tiles + tile, tl.sum(u_sums))


@triton.jit(do_not_specialize=["first_tile", "total_tiles"])
def _apply_kernel(
    table_ptr,  # [tensors, NUM_FIELDS] int64
    tiles_ptr,  # [tiles, 2] int32
    options_ptr,  # [groups, NUM_OPTIONS] fp64
    steps_ptr,  # [tensors] fp32
    norm_ptr,  # [] fp32
    squares_ptr,  # [2, total_tiles] fp32
    first_tile,
    total_tiles,
    PARAM_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = first_tile + tl.program_id(0)
    tensor = tl.load(tiles_ptr + tile * 2)
    row_ptr = table_ptr + tensor * NUM_FIELDS
    group_ptr = options_ptr + tl.load(row_ptr + GROUP) * NUM_OPTIONS
    if tl.load(norm_ptr) < INFINITY:
        a, b = _corrections(group_ptr, tl.load(steps_ptr + tensor) + 1.0)
        eps = b * _option(group_ptr, EPS)
        decay = tl.div_rn(_option(group_ptr, DECAY), a)
        sums_ptr = squares_ptr + tl.load(row_ptr + FIRST_TILE)
        num_tiles = tl.load(row_ptr + NUM_TILES).to(tl.int32)
        p_norm = tl.sqrt_rn(_sum(sums_ptr, num_tiles))
        u_norm = tl.sqrt_rn(_sum(sums_ptr + total_tiles, num_tiles))
        adapts = (_option(group_ptr, TRUST_RATIO) > 0.0) & (p_norm > 0.0) & (u_norm > 0.0)
        ratio = tl.div_rn(tl.where(adapts, p_norm, a), tl.where(adapts, u_norm, 1.0))
        rate = ratio * _option(group_ptr, LR)

        start = tl.load(tiles_ptr + tile * 2 + 1).to(tl.int64) * TILE
        count = tl.minimum(tl.load(row_ptr + NUMEL) - start, TILE).to(tl.int32)
        whole = count // BLOCK * BLOCK
        lanes = tl.arange(0, BLOCK)
        exp_avg_ptr = _at(row_ptr, EXP_AVG, tl.float32, ALIGNED, start)
        exp_avg_sq_ptr = _at(row_ptr, EXP_AVG_SQ, tl.float32, ALIGNED, start)
        weight_ptr = _at(row_ptr, WEIGHT, tl.float32, ALIGNED, start)
        param_ptr = _at(row_ptr, PARAM, PARAM_DTYPE, ALIGNED, start)
        for block in range(0, whole, BLOCK):
            _apply_block(
                exp_avg_ptr, exp_avg_sq_ptr, weight_ptr, param_ptr, block + lanes, count,
                eps, decay, rate, PARAM_DTYPE, False,
            )  # fmt: skip
        if whole < count:
            _apply_block(
                exp_avg_ptr, exp_avg_sq_ptr, weight_ptr, param_ptr, whole + lanes, count,
                eps, decay, rate, PARAM_DTYPE, True,
            )  # fmt: skip


@triton.jit
def _tensor_squares_kernel(
    table_ptr,  # [tensors, NUM_FIELDS] int64
    squares_ptr,  # [2, total_tiles] fp32
    sums_ptr,  # [2, tensors] fp32, out
    num_tensors,
    total_tiles,
):
    """What `_apply_kernel` adds up, for tensors that are parts of others: one program a tensor."""
    tensor = tl.program_id(0)
    row_ptr = table_ptr + tensor * NUM_FIELDS
    first_ptr = squares_ptr + tl.load(row_ptr + FIRST_TILE)
    num_tiles = tl.load(row_ptr + NUM_TILES).to(tl.int32)
    tl.store(sums_ptr + tensor, _sum(first_ptr, num_tiles))
    tl.store(sums_ptr + num_tensors + tensor, _sum(first_ptr + total_tiles, num_tiles))


# ---- launcher ---------------------------------------------------------------------------------------------


class GroupOptions(NamedTuple):
    """The options of a group of parameters, as in fastbert.optim."""

    lr: float | Tensor  # a tensor is read on the device when the step runs, or when a graph replays it
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    grad_averaging: bool = True
    adam_w_mode: bool = True
    use_trust_ratio: bool = False

    def row(self) -> list[float]:
        """The NUM_OPTIONS fields; 0 for a learning rate that is a tensor."""
        lr = 0.0 if isinstance(self.lr, Tensor) else self.lr
        grad_share = 1 - self.beta1 if self.grad_averaging else 1.0
        decays = (self.weight_decay, 0.0) if self.adam_w_mode else (0.0, self.weight_decay)
        logs = [
            math.log(beta) if self.bias_correction and beta else -math.inf
            for beta in (self.beta1, self.beta2)
        ]
        shares = (self.beta1, self.beta2, grad_share, 1 - self.beta2)
        return [lr, *shares, self.eps, *decays, *logs, float(self.use_trust_ratio)]


def optimizer_step(
    tensors: StepTensors,
    options: Sequence[GroupOptions],
    cache: StepCache,
    *,
    max_grad_norm: float | None = None,
    loss_scale: Tensor | None = None,
    sum_over_shards: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """One step of LAMB or AdamW in place -> norm of the unscaled gradients of all tensors, 0-dim fp32.

    u = (m/c1) / (sqrt(v/c2) + eps) + weight_decay * p;  p -= lr * ratio * u, the ratio being ||p|| / ||u|| of
    the tensor where its group wants it and neither norm is 0, else 1. Gradients are divided by `loss_scale`
    (fp32, 1 element, on the tensors' device) and clipped by their norm to `max_grad_norm`; None or 0 clips
    nothing. They are read only. Where the norm is not finite, nothing else changes a bit.

    Tensors that are parts of others, of which other ranks have the rest, have the norms of the whole ones
    through `sum_over_shards`, which adds up a tensor in place over those ranks: once, and again where there
    are trust ratios.

    The host reads nothing. Maths in fp32, corrections for the step count in fp64. Deterministic: partial sums
    in a fixed order, no atomics. A CUDA graph may capture it (StepCache). ValueError for tensors that are
    not as StepTensors says, or that are on no device that runs kernels.
    """
    x = tensors.params[0]
    check_can_launch(_grad_norm_kernel, x)
    launches, table, tiles = cache.layout(tensors)
    rows = cache.options.of(torch.tensor([group.row() for group in options], dtype=torch.float64), x.device)
    for row, group in zip(rows, options):
        if isinstance(group.lr, Tensor):
            row[LR.value].copy_(group.lr)
    if loss_scale is None:
        loss_scale = cache.one.of(torch.ones(1), x.device)
    applies_at_once = not any(group.use_trust_ratio for group in options)
    config = optimizer_config()
    num_programs = [min(launch.num_tiles, config.norm_programs) for launch in launches]
    total_tiles = tiles.shape[0]
    steps = torch.empty(len(tensors.params), dtype=torch.float32, device=x.device)
    partial = torch.empty(sum(num_programs), dtype=torch.float32, device=x.device)
    squares = torch.empty((2, total_tiles), dtype=torch.float32, device=x.device)
    norm = torch.empty((), dtype=torch.float32, device=x.device)
    with device_guard(x):
        for i, launch in enumerate(launches):
            _grad_norm_kernel[(num_programs[i],)](
                table, tiles, steps, partial, launch.first_tile, launch.num_tiles, sum(num_programs[:i]),
                GRAD_DTYPE=TRITON_DTYPES[launch.grad_dtype], ALIGNED=launch.aligned,
                TILE=config.tile, BLOCK=config.norm_block, num_warps=config.num_warps,
            )  # fmt: skip
        if sum_over_shards is not None:
            partial = sum_over_shards(partial.sum(0, keepdim=True))
        for launch in launches:
            _moments_kernel[(launch.num_tiles,)](
                table, tiles, rows, steps, partial, loss_scale, norm, squares,
                float(max_grad_norm or 0.0), partial.numel(), launch.first_tile, total_tiles,
                PARAM_DTYPE=TRITON_DTYPES[launch.param_dtype], GRAD_DTYPE=TRITON_DTYPES[launch.grad_dtype],
                ALIGNED=launch.aligned, APPLY=applies_at_once,
                TILE=config.tile, BLOCK=config.block, num_warps=config.num_warps,
            )  # fmt: skip
        if sum_over_shards is not None and not applies_at_once:
            sums = torch.empty((2, len(tensors.params)), dtype=torch.float32, device=x.device)
            _tensor_squares_kernel[(sums.shape[1],)](table, squares, sums, sums.shape[1], total_tiles)
            # a whole tensor's sum in the place of the first tile of this part of it
            squares.zero_()[:, table[:, FIRST_TILE.value]] = sum_over_shards(sums)
        for launch in () if applies_at_once else launches:
            _apply_kernel[(launch.num_tiles,)](
                table, tiles, rows, steps, norm, squares, launch.first_tile, total_tiles,
                PARAM_DTYPE=TRITON_DTYPES[launch.param_dtype], ALIGNED=launch.aligned,
                TILE=config.tile, BLOCK=config.block, num_warps=config.num_warps,
            )  # fmt: skip
    return norm


def compile_cases(arch: str) -> list[CompileCase]:
    """The types that models have, everywhere alike; the forms that are rare, for one type of each size."""
    names = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
    types = {"table_ptr": "*i64", "tiles_ptr": "*i32", "options_ptr": "*fp64", "max_grad_norm": "fp32"}
    config = optimizer_config()
    cases = []

    def add(kernel: Any, label: str, dtype: str, **constexprs: Any) -> None:
        if "TILE" in kernel.arg_names:
            constexprs |= {"TILE": config.tile}
        arguments = [name for name in kernel.arg_names if name not in constexprs]
        signature = {n: types.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in arguments}
        pointers = frozenset(name for name in arguments if name.endswith("_ptr"))
        cases.append(
            CompileCase(kernel, label, dtype, signature, constexprs, config.num_warps, None, pointers)
        )

    def add_moments(param: str, grad: str, aligned: bool, apply: bool) -> None:
        label = f"{grad} gradient" + ("" if aligned else ", unaligned") + (", apply" if apply else "")
        add(
            _moments_kernel, label, param, PARAM_DTYPE=names[param], GRAD_DTYPE=names[grad], ALIGNED=aligned,
            APPLY=apply, BLOCK=config.block,
        )  # fmt: skip

    add(_tensor_squares_kernel, "parts of tensors", "fp32")
    for aligned, dtypes in ((True, ("fp32", "fp16", "bf16")), (False, ("fp32", "bf16"))):
        label = "aligned" if aligned else "unaligned"
        for name in dtypes:
            dtype = names[name]
            add(
                _grad_norm_kernel, label, name, GRAD_DTYPE=dtype, ALIGNED=aligned, BLOCK=config.norm_block
            )  # fmt: skip
            add(_apply_kernel, label, name, PARAM_DTYPE=dtype, ALIGNED=aligned, BLOCK=config.block)
            for apply in (False, True):
                add_moments(name, name, aligned, apply)
    for param, grad in (("fp32", "fp16"), ("fp32", "bf16"), ("fp16", "fp32"), ("bf16", "fp32")):
        add_moments(param, grad, aligned=True, apply=False)
    return cases
