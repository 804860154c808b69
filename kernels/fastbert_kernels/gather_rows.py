"""Rows by index, between padded batches and kept tokens end to end, in either direction.

Both directions gather. Padding would be a scatter behind a pass of zeros; with the index turned round, each
slot of the result knows its row or that it has none, and everything is written once. Elements are moved as
integers of their size, so any dtype goes through the same few kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.launch import CompileCase, check_can_launch, device_guard, row_gather_config

# bytes of an element -> as what it is moved
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# what changes with the batch is not specialised on: being 1 or a multiple of 16 would compile another kernel
@triton.jit(do_not_specialize=["num_rows", "M", "fill"])
def _gather_rows_kernel(
    x_ptr,  # [num_rows, N]
    index_ptr,  # [M] int64
    y_ptr,  # [M, N], contiguous
    stride_xm,
    num_rows,
    M,
    N,
    fill,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = (cols < N)[None, :]
    index = tl.load(index_ptr + rows, mask=rows < M, other=-1)
    has_row = ((index >= 0) & (index < num_rows))[:, None]
    values = tl.load(x_ptr + index[:, None] * stride_xm + cols[None, :], mask=has_row & in_row, other=0)
    values = tl.where(has_row, values, fill.to(values.dtype))
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], values, mask=(rows < M)[:, None] & in_row)


def gather_rows(x: Tensor, index: Tensor, fill: float = 0.0) -> Tensor:
    """Row i of the result is row index[i] of x, or `fill` where there is no such row: [M, N], contiguous.

    x [num_rows, N] of any dtype with elements of up to 8 bytes, its rows may be strided; index [M] int64. A
    copy of bits: NaN stays what it is. No two programs write one element, so the bits are the same in every
    run. M, N and num_rows may be 0. ValueError for what does not fit.
    """
    if x.dim() != 2 or index.dim() != 1 or index.dtype != torch.int64 or not index.is_contiguous():
        raise ValueError(
            f"x and index must be [rows, N] and [M] torch.int64, contiguous, "
            f"but are {list(x.shape)} and {list(index.shape)} {index.dtype}"
        )
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"x must have adjacent columns, but has column stride {x.stride(1)}")
    if x.element_size() not in CARRIERS:
        raise ValueError(
            f"x has elements of {x.element_size()} bytes, {x.dtype}: at most 8 are moved at once"
        )
    check_can_launch(_gather_rows_kernel, x)
    M, N = index.shape[0], x.shape[1]
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    carrier, config = CARRIERS[x.element_size()], row_gather_config(N)
    bits = int(torch.full((1,), fill, dtype=x.dtype).view(carrier))
    with device_guard(x):
        _gather_rows_kernel[(config.num_row_programs(M), triton.cdiv(N, config.block_n))](
            x.view(carrier), index, y.view(carrier), x.stride(0), x.shape[0], M, N, bits,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
        )  # fmt: skip
    return y


def inverse_index(index: Tensor, num_slots: int) -> Tensor:
    """Which row goes to each of num_slots, int64 [num_slots], -1 for none; no slot is named twice."""
    inverse = torch.full((num_slots,), -1, dtype=torch.int64, device=index.device)
    # each slot gets one row, so the order of the writes does not matter
    return inverse.index_copy_(0, index, torch.arange(index.shape[0], device=index.device))


# ---- what is compiled -------------------------------------------------------------------------------------


def compile_cases(arch: str) -> list[CompileCase]:
    """Hidden states of BERT-Large, a width with odd addresses, and ids."""
    cases = []
    for width, dtype, carrier in (
        (1024, "bf16", "i16"),
        (1023, "bf16", "i16"),
        (1, "int64", "i64"),
    ):
        if arch not in ("sm_80", "sm_90") and width != 1024:
            continue
        config = row_gather_config(width)
        aligned = {"x_ptr", "index_ptr", "y_ptr"} | ({"stride_xm", "N"} if width % 16 == 0 else set())
        signature = {"x_ptr": f"*{carrier}", "index_ptr": "*i64", "y_ptr": f"*{carrier}"}
        signature |= dict.fromkeys(("stride_xm", "num_rows", "M", "N", "fill"), "i32")
        cases.append(
            CompileCase(
                kernel=_gather_rows_kernel,
                label=f"width {width}",
                dtype=dtype,
                signature=signature,
                constexprs={"BLOCK_M": config.block_m, "BLOCK_N": config.block_n},
                num_warps=config.num_warps,
                num_stages=None,
                aligned=frozenset(aligned),
            )
        )
    return cases
