"""dropout(LayerNorm(word row + type row + position row)), what a BERT begins with, and its gradients.

A program holds whole rows in registers: it fetches the three rows of each token, adds and normalises them,
and writes once. Nothing is saved but the ids and 8 bytes a row (mean and 1 / standard deviation): the
backward pass fetches the rows again, and writes the gradient of their sum, from which `table_grad.py` makes
those of the tables.

An id outside its table reads nothing: its token becomes NaN, in every column and so in the loss, and the
launcher's `report` gets the id and the limit. The report lies in the host's memory, where the host can look
without waiting for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.dropout_add_norm import (
    DTYPES,
    SUM_COLS,
    SUM_ROWS,
    WIDTH_LIMIT,
    _sum_partials_kernel,
    _tile,
    _vector,
    keep_in_rows,
    row_statistics,
)
from fastbert_kernels.launch import (
    CompileCase,
    LaunchConfig,
    check_can_launch,
    device_guard,
    row_norm_bwd_config,
    row_norm_fwd_config,
)
from fastbert_kernels.philox import dropout_threshold
from fastbert_kernels.table_grad import table_grad

ID_DTYPES = (torch.int64, torch.int32)
# the tables in the order of a report's rows
TABLES = ("word", "type", "position")


@triton.jit
def _load_ids(ids_ptr, rows, M, num_rows):
    """(ids [BLOCK_M] int64, whether each names a row of its table); 0, which does, beyond the last token."""
    ids = tl.load(ids_ptr + rows, mask=rows < M, other=0).to(tl.int64)
    return ids, (ids >= 0) & (ids < num_rows)


@triton.jit
def _add_rows(h, table_ptr, ids, known, stride, cols, mask):
    """h plus the rows that `ids` name; NaN for an id that names none, which reads nothing."""
    rows = tl.load(
        table_ptr + ids[:, None] * stride + cols[None, :], mask=mask & known[:, None], other=0.0
    ).to(tl.float32)
    return tl.where(mask & (known[:, None] == 0), float("nan"), h + rows)


@triton.jit
def _load_sum(
    input_ids_ptr, type_ids_ptr, position_ids_ptr, word_ptr, type_ptr, position_ptr,
    stride_word, stride_type, stride_position, num_words, num_types, num_positions,
    rows, cols, mask, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of each token's three rows in fp32, the same in both passes; 0 where masked."""
    h = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    words, known = _load_ids(input_ids_ptr, rows, M, num_words)
    h = _add_rows(h, word_ptr, words, known, stride_word, cols, mask)
    types, known = _load_ids(type_ids_ptr, rows, M, num_types)
    h = _add_rows(h, type_ptr, types, known, stride_type, cols, mask)
    positions, known = _load_ids(position_ids_ptr, rows, M, num_positions)
    return _add_rows(h, position_ptr, positions, known, stride_position, cols, mask)


@triton.jit
def _report(report_ptr, ids_ptr, rows, M, num_rows):
    """Tells of an id outside its table, of any of them if there are several: (id, limit)."""
    ids, known = _load_ids(ids_ptr, rows, M, num_rows)
    here = report_ptr + rows * 0
    tl.store(here, ids, mask=known == 0)
    tl.store(here + 1, ids * 0 + num_rows, mask=known == 0)


# what changes with the batch is not specialised on: being 1 or a multiple of 16 would compile another kernel
@triton.jit(do_not_specialize=["M", "num_words", "num_types", "num_positions", "threshold"])
def _embedding_fwd_kernel(
    input_ids_ptr,  # [M]
    type_ids_ptr,  # [M]
    position_ids_ptr,  # [M]
    word_ptr,  # [num_words, N]
    type_ptr,  # [num_types, N]
    position_ptr,  # [num_positions, N]
    weight_ptr,  # [N]
    norm_bias_ptr,  # [N]
    seed_ptr,  # [1] int64
    y_ptr,  # [M, N]
    mean_ptr,  # [M] fp32
    rstd_ptr,  # [M] fp32
    report_ptr,  # [3, 2] int64
    stride_word,
    stride_type,
    stride_position,
    stride_ym,
    M,
    N,
    num_words,
    num_types,
    num_positions,
    eps,
    threshold,
    dropout_scale,
    HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    in_row = cols < N
    mask = (rows < M)[:, None] & in_row[None, :]
    h = _load_sum(
        input_ids_ptr, type_ids_ptr, position_ids_ptr, word_ptr, type_ptr, position_ptr,
        stride_word, stride_type, stride_position, num_words, num_types, num_positions,
        rows, cols, mask, M, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    mean, rstd = row_statistics(h, mask, N, eps)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)

    weight = _vector(weight_ptr, cols, in_row)
    norm_bias = _vector(norm_bias_ptr, cols, in_row)
    y = (h - mean[:, None]) * rstd[:, None] * weight[None, :] + norm_bias[None, :]
    if HAS_DROPOUT:
        keep = keep_in_rows(tl.load(seed_ptr), rows, threshold, BLOCK_M, BLOCK_N)
        y *= tl.where(keep, dropout_scale, 0.0)  # NaN is not dropped, as in torch: it must be seen
    tl.store(_tile(y_ptr, first_row, stride_ym, BLOCK_M, BLOCK_N), y, mask=mask)
    _report(report_ptr, input_ids_ptr, rows, M, num_words)
    _report(report_ptr + 2, type_ids_ptr, rows, M, num_types)
    _report(report_ptr + 4, position_ids_ptr, rows, M, num_positions)


@triton.jit(do_not_specialize=["M", "num_words", "num_types", "num_positions", "tiles_m", "threshold"])
def _embedding_bwd_kernel(
    dy_ptr,  # [M, N]
    input_ids_ptr,  # [M]
    type_ids_ptr,  # [M]
    position_ids_ptr,  # [M]
    word_ptr,  # [num_words, N]
    type_ptr,  # [num_types, N]
    position_ptr,  # [num_positions, N]
    weight_ptr,  # [N]
    mean_ptr,  # [M] fp32
    rstd_ptr,  # [M] fp32
    seed_ptr,  # [1] int64
    dsum_ptr,  # [M, N]
    partial_ptr,  # [programs, 2, N] fp32, contiguous
    stride_dym,
    stride_word,
    stride_type,
    stride_position,
    stride_dsm,
    M,
    N,
    num_words,
    num_types,
    num_positions,
    tiles_m,
    threshold,
    dropout_scale,
    HAS_DROPOUT: tl.constexpr,
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
    weight = _vector(weight_ptr, cols, in_row)
    dweight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dnorm_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(0, tiles_m, num_stages=NUM_STAGES):
        first_row = (pid * tiles_m + tile) * BLOCK_M
        rows = first_row + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & in_row[None, :]
        h = _load_sum(
            input_ids_ptr, type_ids_ptr, position_ids_ptr, word_ptr, type_ptr, position_ptr,
            stride_word, stride_type, stride_position, num_words, num_types, num_positions,
            rows, cols, mask, M, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        xhat = (h - mean[:, None]) * rstd[:, None]
        dy = tl.load(_tile(dy_ptr, first_row, stride_dym, BLOCK_M, BLOCK_N), mask=mask, other=0.0)
        dy = dy.to(tl.float32)
        if HAS_DROPOUT:
            keep = keep_in_rows(seed, rows, threshold, BLOCK_M, BLOCK_N)
            dy = tl.where(keep, dy * dropout_scale, 0.0)
        dnorm_bias += dy  # 0 where masked, and so are all terms of the other sum
        dweight += dy * xhat
        if LEAN:
            weight = _vector(weight_ptr, cols, in_row)
        dxhat = dy * weight[None, :]
        mean_dxhat = tl.sum(dxhat, axis=1) / N
        mean_product = tl.sum(dxhat * xhat, axis=1) / N
        dsum = (dxhat - mean_dxhat[:, None] - xhat * mean_product[:, None]) * rstd[:, None]
        tl.store(_tile(dsum_ptr, first_row, stride_dsm, BLOCK_M, BLOCK_N), dsum, mask=mask)
    partial_row = partial_ptr + pid * 2 * N + cols
    tl.store(partial_row, tl.sum(dweight, axis=0), mask=in_row)
    tl.store(partial_row + N, tl.sum(dnorm_bias, axis=0), mask=in_row)


def embedding_fwd(
    ids: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    report: Tensor,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dropout(LayerNorm(sum of three rows)) -> (y [M, N] contiguous, mean [M] fp32, rstd [M] fp32).

    ids and tables: of words, types and positions. ids [M] int64 or int32; tables [rows, N] of one dtype out
    of fp32, fp16 and bf16, N up to 8,192, whose rows may be strided; y has that dtype. weight and norm_bias
    [N], of one dtype, the tables' or fp32. M and N may be 0. Everything between loading and storing is fp32,
    eps included. With dropout_p > 0, `seed` is an int64 tensor of one element on the tables' device; an
    element's fate depends on the seed and its place in y, as in `dropout_add_norm_fwd`.

    An id outside its table reads no memory. Its row of y is NaN, dropout or not, and its table's row of
    `report` (int64 [3, 2], of words, types and positions, in memory that the device reaches: pinned, for a
    GPU) becomes (id, rows of the table); of several such ids, any. Otherwise the report is not touched.
    Deterministic. ValueError for what does not fit together.
    """
    _check(ids, tables, {"weight": weight, "norm_bias": norm_bias}, dropout_p, seed)
    if report.shape != (3, 2) or report.dtype != torch.int64 or not report.is_contiguous():
        raise ValueError(f"report must be [3, 2] torch.int64, but is {list(report.shape)} {report.dtype}")
    words, M, N = tables[0], ids[0].shape[0], tables[0].shape[1]
    y = torch.empty((M, N), dtype=words.dtype, device=words.device)
    mean, rstd = (torch.empty(M, dtype=torch.float32, device=words.device) for _ in range(2))
    if y.numel() == 0:
        return y, mean.zero_(), rstd.zero_()
    config = row_norm_fwd_config(N)
    threshold, scale = dropout_threshold(dropout_p)
    with device_guard(words):
        _embedding_fwd_kernel[(config.num_row_programs(M),)](
            *ids, *tables, weight, norm_bias, words if seed is None else seed, y, mean, rstd, report,
            *(table.stride(0) for table in tables), y.stride(0),
            M, N, *(table.shape[0] for table in tables), eps, threshold, scale,
            HAS_DROPOUT=dropout_p > 0.0,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
        )  # fmt: skip
    return y, mean, rstd


def embedding_bwd(
    dy: Tensor,
    ids: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    padding_idx: int | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `embedding_fwd`: (dword, dtype, dposition, dweight, dnorm_bias), each as its tensor.

    dy [M, N] in y's dtype, its rows may be strided; the rest as in the forward, which gave mean and rstd.
    Rows of a table that no id names are exactly 0, and so is the word row `padding_idx`. The gradient of the
    sum of a token's rows is rounded to the tables' dtype once; all sums are fp32: for the norm partial sums,
    a row of them for each program, which a second kernel adds in order; for the tables see `table_grad`. No
    atomics, so two runs give the same bits. M = 0 gives zeros. ValueError as in the forward.
    """
    _check(ids, tables, {"weight": weight}, dropout_p, seed)
    words, M, N = tables[0], ids[0].shape[0], tables[0].shape[1]
    if dy.shape != (M, N) or dy.dtype != words.dtype or dy.device != words.device:
        raise ValueError(
            f"dy must be {(M, N)} {words.dtype} on {words.device} to fit ids and tables, "
            f"but is {tuple(dy.shape)} {dy.dtype} on {dy.device}"
        )
    _check_adjacent("dy", dy)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if statistic.shape != (M,) or statistic.dtype != torch.float32:
            raise ValueError(
                f"{name} must be the forward's, [{M}] torch.float32, "
                f"but is {list(statistic.shape)} {statistic.dtype}"
            )
    dweight, dnorm_bias = (torch.empty(N, dtype=weight.dtype, device=words.device) for _ in range(2))
    dsum = torch.empty((M, N), dtype=words.dtype, device=words.device)
    if dsum.numel() == 0:
        return *(torch.zeros_like(table) for table in tables), dweight.zero_(), dnorm_bias.zero_()  # type: ignore[return-value]
    config = row_norm_bwd_config(M, N)
    num_partials = config.num_row_programs(M)
    partial = torch.empty((num_partials, 2, N), dtype=torch.float32, device=words.device)
    threshold, scale = dropout_threshold(dropout_p)
    with device_guard(words):
        _embedding_bwd_kernel[(num_partials,)](
            dy, *ids, *tables, weight, mean, rstd, words if seed is None else seed, dsum, partial,
            dy.stride(0), *(table.stride(0) for table in tables), dsum.stride(0),
            M, N, *(table.shape[0] for table in tables), config.tiles_m, threshold, scale,
            HAS_DROPOUT=dropout_p > 0.0, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            NUM_STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
        _sum_partials_kernel[(triton.cdiv(N, SUM_COLS), 2)](
            partial, dweight, dnorm_bias, dweight, num_partials, N,
            SUMS=2, BLOCK_M=SUM_ROWS, BLOCK_N=SUM_COLS,
        )  # fmt: skip
    dword, dtype, dposition = (
        table_grad(indices, dsum, table.shape[0], padding)
        for indices, table, padding in zip(ids, tables, (padding_idx, None, None))
    )
    return dword, dtype, dposition, dweight, dnorm_bias


def _check(
    ids: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    parameters: dict[str, Tensor],
    dropout_p: float,
    seed: Tensor | None,
) -> None:
    words = tables[0]
    for name, table in zip(TABLES, tables):
        if table.dim() != 2 or table.shape[1] != words.shape[-1] or table.dtype != words.dtype:
            raise ValueError(
                f"the {name} table must be [rows, {words.shape[-1]}] {words.dtype} as the word table, "
                f"but is {list(table.shape)} {table.dtype}"
            )
        if table.dtype not in DTYPES:
            raise ValueError(f"the tables must be float32, float16 or bfloat16, but are {table.dtype}")
        _check_adjacent(f"the {name} table", table)
    if words.shape[1] > WIDTH_LIMIT:
        raise ValueError(
            f"a row is {words.shape[1]} wide, and the kernel's limit is {WIDTH_LIMIT}: use the eager path"
        )
    for name, indices in zip(TABLES, ids):
        if indices.shape != ids[0].shape or indices.dim() != 1 or indices.dtype not in ID_DTYPES:
            raise ValueError(
                f"{name} ids must be [M] int64 or int32, as many as word ids, "
                f"but are {list(indices.shape)} {indices.dtype}"
            )
        if indices.shape[0] > 1 and indices.stride(0) != 1:
            raise ValueError(f"{name} ids must be contiguous, but have stride {indices.stride(0)}")
    allowed = dict.fromkeys((words.dtype, torch.float32))
    dtypes = " or ".join(str(dtype) for dtype in allowed)
    for name, vector in parameters.items():
        if vector.shape != words.shape[1:] or vector.dtype not in allowed:
            raise ValueError(
                f"{name} must be [{words.shape[1]}] {dtypes} to fit the tables, "
                f"but is {list(vector.shape)} {vector.dtype}"
            )
        if vector.shape[0] > 1 and vector.stride(0) != 1:
            raise ValueError(f"{name} must be contiguous, but has stride {vector.stride(0)}")
    if len({vector.dtype for vector in parameters.values()}) > 1:
        given = " and ".join(f"{name} {vector.dtype}" for name, vector in parameters.items())
        raise ValueError(f"the parameters of the norm must have one dtype, but are {given}")
    for tensor in (*tables, *ids, *parameters.values()):
        if tensor.device != words.device:
            raise ValueError(f"ids, tables and norm must be on one device: {tensor.device}, {words.device}")
    dropout_threshold(dropout_p)
    if dropout_p > 0.0 and (
        seed is None or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != words.device
    ):
        given = "None" if seed is None else f"{tuple(seed.shape)} {seed.dtype} on {seed.device}"
        raise ValueError(
            f"dropout needs a seed, an int64 tensor of one element on {words.device}, not {given}"
        )
    check_can_launch(_embedding_fwd_kernel, words)


def _check_adjacent(name: str, x: Tensor) -> None:
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(
            f"{name} must have adjacent columns, but has column stride {x.stride(1)}: call .contiguous()"
        )


# ---- what is compiled -------------------------------------------------------------------------------------


def compile_cases(arch: str) -> list[CompileCase]:
    """BERT's forms, and those that take most registers; the rarer ones where a spill fails the report."""
    M = 16384
    cases = []
    # BERT-Large, without dropout, in fp32 (as under autocast); the widest; one with odd addresses
    for width, dtype, form in (
        (1024, "bf16", "dropout"),
        (1024, "bf16", ""),
        (1024, "fp32", "dropout"),
        (8192, "bf16", "dropout"),
        (8192, "fp32", "dropout"),
        (1023, "bf16", "dropout"),
    ):
        if arch not in ("sm_80", "sm_90") and (width, dtype, form) not in (
            (1024, "bf16", "dropout"),
            (8192, "fp32", "dropout"),
        ):
            continue
        for kernel, config in (
            (_embedding_fwd_kernel, row_norm_fwd_config(width)),
            (_embedding_bwd_kernel, row_norm_bwd_config(M, width)),
        ):
            cases.append(_case(kernel, config, width, dtype, form))
    return cases


def _case(kernel: Any, config: LaunchConfig, width: int, dtype: str, form: str) -> CompileCase:
    types = dict.fromkeys(
        ("input_ids_ptr", "type_ids_ptr", "position_ids_ptr", "seed_ptr", "report_ptr"), "*i64"
    )
    types |= dict.fromkeys(("mean_ptr", "rstd_ptr", "partial_ptr"), "*fp32")
    types |= {"eps": "fp32", "dropout_scale": "fp32"}
    run_time = [name for name in kernel.arg_names if not name.isupper() or len(name) == 1]
    constants = {
        "HAS_DROPOUT": "dropout" in form,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
    }
    aligned = {name for name in run_time if name.endswith("_ptr")}
    if width % 16 == 0:
        aligned |= {name for name in run_time if name == "N" or name.startswith("stride")}
    return CompileCase(
        kernel=kernel,
        label=", ".join([f"width {width}", *form.split()]),
        dtype=dtype,
        signature={n: types.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in run_time},
        constexprs={name: value for name, value in constants.items() if name in kernel.arg_names},
        num_warps=config.num_warps,
        num_stages=None,
        aligned=frozenset(aligned),
    )
