"""The gradient of a table from those of the rows that were looked up in it, without atomics.

The ids are sorted, so that the rows that one id got lie side by side: a run. Programs take tiles of equally
many sorted rows, whatever the runs are, so an id that every token has keeps no program busy while the others
wait. A run that lies in one tile goes straight to its row of the table. One that crosses tiles leaves a
partial sum in each, and a second kernel adds those in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.launch import CompileCase, check_can_launch, device_guard, run_sum_config

# a tile of partial sums, in the kernel that adds them up
JOIN_ROWS = 64
JOIN_COLS = 64
# rows that are fetched together
AHEAD: tl.constexpr = tl.constexpr(4)
NOWHERE: tl.constexpr = tl.constexpr(-1)  # no id


@triton.jit
def _id_at(ids_ptr, row, M):
    return tl.load(ids_ptr + row, mask=(row >= 0) & (row < M), other=NOWHERE)


@triton.jit
def _has_row(id, num_rows, padding_idx):
    """Whether an id gets a gradient. One outside the table does not, and nothing is written for it."""
    return (id >= 0) & (id < num_rows) & (id != padding_idx)


@triton.jit
def _load_row(id, order_ptr, drow_ptr, stride, row, M, num_rows, padding_idx, cols, in_row):
    source = tl.load(order_ptr + row, mask=row < M, other=0)
    mask = in_row & _has_row(id, num_rows, padding_idx)
    return tl.load(drow_ptr + source * stride + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _close_run(
    acc, id, next_id, id_before, is_last, dtable_ptr, partial_ptr, N, num_rows, padding_idx, cols, in_row
):  # fmt: skip
    """Writes acc where a run ends with this row, or the tile does; acc for the next row."""
    if (id != next_id) | is_last:
        mask = in_row & _has_row(id, num_rows, padding_idx)
        if id == id_before:  # it began in an earlier tile
            tl.store(partial_ptr + cols, acc, mask=mask)
        elif id != next_id:
            tl.store(dtable_ptr + id * N + cols, acc, mask=mask)
        else:  # it goes on in the next tile
            tl.store(partial_ptr + N + cols, acc, mask=mask)
        acc = tl.zeros_like(acc)
    return acc


# what changes with the batch is not specialised on: being 1 or a multiple of 16 would compile another kernel
@triton.jit(do_not_specialize=["M", "tile_rows", "num_rows", "padding_idx"])
def _sum_runs_kernel(
    ids_ptr,  # [M] sorted
    order_ptr,  # [M] int64: where each lay before
    drow_ptr,  # [M, N]
    dtable_ptr,  # [num_rows, N], zeros, contiguous
    partial_ptr,  # [tiles, 2, N] fp32, contiguous: of a run from the tile before, of one that goes on
    stride_drm,
    M,
    N,
    tile_rows,
    num_rows,
    padding_idx,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = cols < N
    first = tile * tile_rows
    last = tl.minimum(first + tile_rows, M) - 1
    id_before = _id_at(ids_ptr, first - 1, M)
    own_partial_ptr = partial_ptr + tile * 2 * N
    acc = tl.zeros([BLOCK_N], tl.float32)
    id0 = _id_at(ids_ptr, first, M)
    for row in range(first, last + 1, AHEAD):  # rows behind the last have no id, and so no row of the table
        id1, id2 = _id_at(ids_ptr, row + 1, M), _id_at(ids_ptr, row + 2, M)
        id3, id4 = _id_at(ids_ptr, row + 3, M), _id_at(ids_ptr, row + 4, M)
        # all loads before the first store, behind which no compiler may move them
        row0 = _load_row(id0, order_ptr, drow_ptr, stride_drm, row, M, num_rows, padding_idx, cols, in_row)
        row1 = _load_row(
            id1, order_ptr, drow_ptr, stride_drm, row + 1, M, num_rows, padding_idx, cols, in_row
        )
        row2 = _load_row(
            id2, order_ptr, drow_ptr, stride_drm, row + 2, M, num_rows, padding_idx, cols, in_row
        )
        row3 = _load_row(
            id3, order_ptr, drow_ptr, stride_drm, row + 3, M, num_rows, padding_idx, cols, in_row
        )
        acc = _close_run(
            acc + row0, id0, id1, id_before, row == last, dtable_ptr, own_partial_ptr, N, num_rows,
            padding_idx, cols, in_row,
        )  # fmt: skip
        acc = _close_run(
            acc + row1, id1, id2, id_before, row + 1 == last, dtable_ptr, own_partial_ptr, N, num_rows,
            padding_idx, cols, in_row,
        )  # fmt: skip
        acc = _close_run(
            acc + row2, id2, id3, id_before, row + 2 == last, dtable_ptr, own_partial_ptr, N, num_rows,
            padding_idx, cols, in_row,
        )  # fmt: skip
        acc = _close_run(
            acc + row3, id3, id4, id_before, row + 3 == last, dtable_ptr, own_partial_ptr, N, num_rows,
            padding_idx, cols, in_row,
        )  # fmt: skip
        id0 = id4


@triton.jit(do_not_specialize=["M", "tile_rows", "num_tiles", "num_rows", "padding_idx"])
def _join_runs_kernel(
    ids_ptr,  # [M] sorted
    dtable_ptr,  # [num_rows, N]
    partial_ptr,  # [tiles, 2, N] fp32
    M,
    N,
    tile_rows,
    num_tiles,
    num_rows,
    padding_idx,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = cols < N
    here = _id_at(ids_ptr, (tile + 1) * tile_rows - 1, M)
    goes_on = here == _id_at(ids_ptr, (tile + 1) * tile_rows, M)
    began_here = here != _id_at(ids_ptr, tile * tile_rows - 1, M)
    if goes_on & began_here & _has_row(here, num_rows, padding_idx):
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        next_tile = tile + 1
        while goes_on:
            tiles = next_tile + tl.arange(0, BLOCK_M)
            # the run reaches a tile if its first row has the id
            reached = (tiles < num_tiles) & (_id_at(ids_ptr, tiles * tile_rows, M) == here)
            acc += tl.load(
                partial_ptr + tiles[:, None] * 2 * N + cols[None, :],
                mask=reached[:, None] & in_row[None, :],
                other=0.0,
            )
            next_tile += BLOCK_M
            goes_on = _id_at(ids_ptr, next_tile * tile_rows, M) == here
        begin = tl.load(partial_ptr + (tile * 2 + 1) * N + cols, mask=in_row, other=0.0)
        tl.store(dtable_ptr + here * N + cols, begin + tl.sum(acc, axis=0), mask=in_row)


def table_grad(ids: Tensor, drows: Tensor, num_rows: int, padding_idx: int | None = None) -> Tensor:
    """Row i of the result is the sum of the rows of drows [M, N] whose id is i: [num_rows, N].

    ids [M], integers; drows in fp32, fp16 or bf16, whose dtype the result has, of any width, its rows may be
    strided. Sums are fp32, in an order that the shape and the ids decide: two runs give the same bits. Rows
    that no id names are exactly 0, and so is row padding_idx; an id outside [0, num_rows) counts nowhere.
    The ids are sorted by torch, stably, which does not wait for the device. ValueError for what does not fit.
    """
    if ids.dim() != 1 or drows.dim() != 2 or ids.shape[0] != drows.shape[0]:
        raise ValueError(
            f"ids and drows must be [M] and [M, N], but are {list(ids.shape)} and {list(drows.shape)}"
        )
    if drows.shape[1] > 1 and drows.stride(1) != 1:
        raise ValueError(f"drows must have adjacent columns, but has column stride {drows.stride(1)}")
    check_can_launch(_sum_runs_kernel, drows)
    M, N = drows.shape
    dtable = torch.zeros((num_rows, N), dtype=drows.dtype, device=drows.device)
    if drows.numel() == 0 or num_rows == 0:
        return dtable
    config = run_sum_config(M, N)
    num_tiles, padding = config.num_row_programs(M), -1 if padding_idx is None else padding_idx
    with device_guard(drows):
        sorted_ids, order = torch.sort(ids, stable=True)
        partial = torch.empty((num_tiles, 2, N), dtype=torch.float32, device=drows.device)
        _sum_runs_kernel[(num_tiles, triton.cdiv(N, config.block_n))](
            sorted_ids, order, drows, dtable, partial, drows.stride(0), M, N, config.rows_per_program,
            num_rows, padding, BLOCK_N=config.block_n, num_warps=config.num_warps,
        )  # fmt: skip
        _join_runs_kernel[(num_tiles, triton.cdiv(N, JOIN_COLS))](
            sorted_ids, dtable, partial, M, N, config.rows_per_program, num_tiles, num_rows, padding,
            BLOCK_M=JOIN_ROWS, BLOCK_N=JOIN_COLS,
        )  # fmt: skip
    return dtable


# ---- what is compiled -------------------------------------------------------------------------------------


def compile_cases(arch: str) -> list[CompileCase]:
    """Of BERT-Large's tables, and of a width with odd addresses."""
    cases = []
    for width, dtype in ((1024, "bf16"), (1024, "fp32"), (1023, "bf16")):
        if arch not in ("sm_80", "sm_90") and (width, dtype) != (1024, "bf16"):
            continue
        config = run_sum_config(16384, width)
        cases.append(
            _case(_sum_runs_kernel, width, dtype, {"BLOCK_N": config.block_n}, num_warps=config.num_warps)
        )
        join = {"BLOCK_M": JOIN_ROWS, "BLOCK_N": JOIN_COLS}
        cases.append(_case(_join_runs_kernel, width, dtype, join, num_warps=4))
    return cases


def _case(
    kernel: triton.JITFunction, width: int, dtype: str, constants: dict[str, int], num_warps: int
) -> CompileCase:
    types = {"ids_ptr": "*i64", "order_ptr": "*i64", "partial_ptr": "*fp32"}
    run_time = [name for name in kernel.arg_names if name not in constants]
    aligned = {name for name in run_time if name.endswith("_ptr")}
    if width % 16 == 0:
        aligned |= {"N", "stride_drm"} & set(run_time)
    return CompileCase(
        kernel=kernel,
        label=f"width {width}",
        dtype=dtype,
        signature={n: types.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in run_time},
        constexprs=dict(constants),
        num_warps=num_warps,
        num_stages=None,
        aligned=frozenset(aligned),
    )
