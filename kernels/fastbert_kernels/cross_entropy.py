"""Cross-entropy of hidden @ weight.T + bias over a large vocabulary, without ever holding all logits.

The products are torch's, into a buffer for the logits of some columns of the vocabulary at a time; everything
between them is one pass over that buffer. The forward pass keeps five numbers a row, the backward pass makes
each buffer of logits again and turns it into its gradient in place.

Why columns and why again, for P = 1,200 rows, V = 30,522, H = 1,024 in bf16: chunks of rows would have to
add up dweight in fp32, V * H * 8 = 250 MB of traffic a chunk, or 58 us at 4.3 TB/s, times at least 8 chunks.
Making the logits again is 2 * P * V * H = 75 GFLOP, or 95 us at 790 TFLOP/s, once. In chunks of columns
dweight is written once, from one product over all rows. dhidden is what is added up over the chunks instead,
in fp32: P * H * 12 = 15 MB a chunk, 3.4 us.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.launch import CompileCase, check_can_launch, device_guard

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# temporaries may take this share of the logits, or FLOOR_BYTES where that is more: chunks of small problems
# would cost more to launch than to compute
LOGITS_SHARE = 8
FLOOR_BYTES = 8 * 2**20
# a chunk starts where tensor cores like rows of a matrix to start
COLUMN_MULTIPLE = 64

STATISTICS_BLOCK = (
    2048  # columns of a row that a program looks at at once: two 16-byte loads of bf16 a thread
)
LOSS_BLOCK = 1024
# a tile of the gradient and how many of them, one below another, share a row of partial sums for dbias: these
# are then a thirty-second of the 16-bit logits
TILE_ROWS = 16
TILE_COLS = 128
TILES = 4


# what changes with the batch or the chunk is not specialised on: being 1 or a multiple of 16 would compile
# another kernel. N is: a mask at a multiple of 16 leaves loads of 16 bytes, and only a last chunk is odd
@triton.jit(do_not_specialize=["M", "first_col"])
def _logit_statistics_kernel(
    logits_ptr,  # [M, N] the columns first_col and up of all logits, without their bias
    bias_ptr,  # [N] of these columns
    labels_ptr,  # [M] int64
    state_ptr,  # [4, M] fp32: maximum, sum of exponentials below it, logit of the label, sum of logits
    best_ptr,  # [M] int32: the first column with the maximum
    stride_lm,
    M,
    N,
    first_col,
    SMOOTHED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # the first chunk finds nothing in the state
    is_later = first_col > 0
    maximum = tl.load(state_ptr + row, mask=is_later, other=float("-inf"))
    total = tl.load(state_ptr + M + row, mask=is_later, other=0.0)
    best = tl.load(best_ptr + row, mask=is_later, other=0)
    logit_sum = 0.0
    if SMOOTHED:
        logit_sum = tl.load(state_ptr + 3 * M + row, mask=is_later, other=0.0)
    logits_row = logits_ptr + row * stride_lm
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = tl.load(logits_row + cols, mask=mask, other=0.0).to(tl.float32)
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if SMOOTHED:
            logit_sum += tl.sum(x, axis=0)  # 0 where masked
        x = tl.where(mask, x, float("-inf"))
        tile_maximum = tl.max(x, axis=0)
        tile_best = tl.min(tl.where(x == tile_maximum, cols, N), axis=0)
        best = tl.where(tile_maximum > maximum, first_col + tile_best, best)
        new_maximum = tl.maximum(maximum, tile_maximum)
        # a vocabulary may be closed by a bias of -inf, and -inf - -inf is no number
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift), axis=0)
        maximum = new_maximum
    tl.store(state_ptr + row, maximum)
    tl.store(state_ptr + M + row, total)
    tl.store(best_ptr + row, best)
    if SMOOTHED:
        tl.store(state_ptr + 3 * M + row, logit_sum)
    # one chunk holds the label; nothing is read or written for a label that is in none
    label = tl.load(labels_ptr + row) - first_col
    is_here = (label >= 0) & (label < N)
    label_logit = tl.load(logits_row + label, mask=is_here, other=0.0).to(tl.float32)
    label_logit += tl.load(bias_ptr + label, mask=is_here, other=0.0).to(tl.float32)
    tl.store(state_ptr + 2 * M + row, label_logit, mask=is_here)


@triton.jit(do_not_specialize=["M", "V", "ignore_index"])
def _sum_losses_kernel(
    state_ptr,  # [4, M] fp32
    best_ptr,  # [M] int32
    labels_ptr,  # [M] int64
    lse_ptr,  # [M] fp32
    loss_sum_ptr,  # fp32
    correct_ptr,  # int64
    count_ptr,  # int64
    M,
    V,
    ignore_index,
    on_label,
    on_all,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, which looks at all rows: the order of the sum depends on nothing."""
    loss_sum = tl.zeros([BLOCK], tl.float32)
    correct = tl.zeros([BLOCK], tl.int64)
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = rows < M
        label = tl.load(labels_ptr + rows, mask=mask, other=ignore_index)
        counted = mask & (label != ignore_index)
        has_logit = counted & (label >= 0) & (label < V)
        maximum = tl.load(state_ptr + rows, mask=mask, other=0.0)
        total = tl.load(state_ptr + M + rows, mask=mask, other=1.0)
        lse = maximum + tl.log(total)
        # a label beyond the vocabulary: loss and gradients are NaN, where a GPU cannot raise an error
        lse = tl.where(counted & (has_logit == 0), float("nan"), lse)
        tl.store(lse_ptr + rows, lse, mask=mask)
        loss = lse - on_label * tl.load(state_ptr + 2 * M + rows, mask=has_logit, other=0.0)
        if SMOOTHED:
            loss -= on_all * tl.load(state_ptr + 3 * M + rows, mask=mask, other=0.0)
        loss_sum += tl.where(counted, loss, 0.0)
        best = tl.load(best_ptr + rows, mask=mask, other=0)
        correct += (counted & (best == label)).to(tl.int64)
        count += counted.to(tl.int64)
    tl.store(loss_sum_ptr, tl.sum(loss_sum, axis=0))
    tl.store(correct_ptr, tl.sum(correct, axis=0))
    tl.store(count_ptr, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["M", "first_col", "ignore_index"])
def _dlogits_kernel(
    logits_ptr,  # [M, N] as above; their gradient takes their place
    bias_ptr,  # [N]
    labels_ptr,  # [M] int64
    lse_ptr,  # [M] fp32
    dloss_ptr,  # [1] fp32
    partial_ptr,  # [programs along the rows, N] fp32, contiguous
    stride_lm,
    M,
    N,
    first_col,
    ignore_index,
    on_label,
    on_all,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_M: tl.constexpr,
):
    pid_m = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = cols < N
    bias = tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    dloss = tl.load(dloss_ptr)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(TILES_M):
        rows = (pid_m * TILES_M + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & in_row[None, :]
        label = tl.load(labels_ptr + rows, mask=rows < M, other=ignore_index)
        lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0)
        pointers = logits_ptr + rows[:, None] * stride_lm + cols[None, :]
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        target = tl.where(cols[None, :] == (label - first_col)[:, None], on_label, 0.0) + on_all
        dlogits = (tl.exp(x - lse[:, None]) - target) * dloss
        # by selection: what an ignored row holds may be no number
        dlogits = tl.where(mask & (label != ignore_index)[:, None], dlogits, 0.0)
        tl.store(pointers, dlogits, mask=mask)
        dbias += dlogits
    tl.store(partial_ptr + pid_m * N + cols, tl.sum(dbias, axis=0), mask=in_row)


# ---- launching --------------------------------------------------------------------------------------------


def vocabulary_chunk(
    num_rows: int, vocab_size: int, element_size: int, column_bytes: int, other_bytes: int
) -> int:
    """Columns of the vocabulary at a time: a multiple of 64, in chunks as equal as that allows.

    With `column_bytes` a column and `other_bytes` beside them the temporaries stay within an eighth of the
    logits, or FLOOR_BYTES. A third of that is the chunk's in any case: where the others leave less (in 16
    bits if the vocabulary is smaller than 24 times the width), ever smaller chunks would not help.
    """
    budget = max(num_rows * vocab_size * element_size // LOGITS_SHARE, FLOOR_BYTES)
    columns = max(budget - other_bytes, budget // 3) // max(1, column_bytes)
    columns = max(1, columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    equal = triton.cdiv(vocab_size, triton.cdiv(vocab_size, columns))
    return triton.cdiv(equal, COLUMN_MULTIPLE) * COLUMN_MULTIPLE


class _Logits:
    """The logits of one chunk of the vocabulary after the other, without their bias, in one buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, column_bytes: int = 0, other_bytes: int = 0) -> None:
        """`column_bytes` and `other_bytes` of what the caller holds beside this."""
        self.hidden, self.weight = hidden, weight
        (num_rows, width), self.vocab_size = hidden.shape, weight.shape[0]
        is_cast = weight.dtype != hidden.dtype
        column_bytes += hidden.element_size() * (num_rows + (width if is_cast else 0))
        self.chunk = vocabulary_chunk(
            num_rows, self.vocab_size, hidden.element_size(), column_bytes, other_bytes
        )
        options = {"dtype": hidden.dtype, "device": hidden.device}
        self.buffer = torch.empty((num_rows, self.chunk), **options)
        self.cast = torch.empty((min(self.chunk, self.vocab_size), width), **options) if is_cast else None

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(which columns of the vocabulary, their logits [P, columns], their weights in hidden's dtype)."""
        for start in range(0, self.vocab_size, self.chunk):
            part = slice(start, min(start + self.chunk, self.vocab_size))
            weight = self.weight[part]
            if self.cast is not None:
                weight = self.cast[: part.stop - start].copy_(weight)
            # rows of the last chunk, too, start at multiples of 64
            logits = self.buffer[:, : part.stop - start]
            torch.mm(self.hidden, weight.T, out=logits)
            yield part, logits, weight


def linear_cross_entropy_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [P, H], weight [V, H], bias [V], labels [P] -> (loss_sum, correct, count, lse [P]).

    loss_sum (fp32) is the sum over the rows whose label is not `ignore_index` of
    -(1 - s) log p[label] - s / V * sum(log p), p = softmax(hidden @ weight.T + bias), s = `label_smoothing`;
    correct and count (int64) are those rows whose largest logit, the first of equal ones, is the label's, and
    all of them. lse (fp32) is the log of the sum of a row's exponentials. hidden in fp32, fp16 or bf16;
    weight and bias in any of them: the products run in hidden's dtype, everything else in fp32. labels int64.
    P may be 0, and V any number from 1. A label that is outside of [0, V) and not `ignore_index` makes
    loss_sum, and the gradients, NaN; nothing is read for it.

    Temporaries stay within an eighth of the logits in hidden's dtype, or 8 MiB. Deterministic as far as
    torch's products are: no atomics, one order of each sum. ValueError for anything else.
    """
    _check(hidden, weight, bias, labels, label_smoothing)
    M, V = hidden.shape[0], weight.shape[0]
    state = torch.empty((4, M), dtype=torch.float32, device=hidden.device)
    best = torch.empty(M, dtype=torch.int32, device=hidden.device)
    lse = torch.empty(M, dtype=torch.float32, device=hidden.device)
    loss_sum = torch.empty((), dtype=torch.float32, device=hidden.device)
    correct, count = (torch.empty((), dtype=torch.int64, device=hidden.device) for _ in range(2))
    if M == 0:
        return loss_sum.zero_(), correct.zero_(), count.zero_(), lse
    is_smoothed = label_smoothing > 0.0
    with device_guard(hidden):
        for part, logits, _ in _Logits(hidden, weight, other_bytes=state.nbytes + best.nbytes):
            _logit_statistics_kernel[(M,)](
                logits, bias[part], labels, state, best, logits.stride(0), M, logits.shape[1], part.start,
                SMOOTHED=is_smoothed, BLOCK_N=STATISTICS_BLOCK,
            )  # fmt: skip
        _sum_losses_kernel[(1,)](
            state, best, labels, lse, loss_sum, correct, count, M, V, ignore_index,
            1.0 - label_smoothing, label_smoothing / V, SMOOTHED=is_smoothed, BLOCK=LOSS_BLOCK,
        )  # fmt: skip
    return loss_sum, correct, count, lse


def linear_cross_entropy_bwd(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    lse: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of loss_sum times `dloss`, a scalar: (dhidden, dweight, dbias), each in its tensor's dtype.

    lse is the forward's; `needs` says which are wanted: the others are None, and their products are not made.
    The gradient of the logits is rounded to hidden's dtype for the products; dbias sums it unrounded, in
    fp32: partial sums of 64 rows, then one sum over them. dweight is one product over all rows. dhidden adds
    up one product a chunk, in fp32, which takes P * H * 4 bytes where hidden is 16-bit. Bounds, determinism
    and errors as in the forward.
    """
    _check(hidden, weight, bias, labels, label_smoothing)
    if dloss.numel() != 1 or lse.shape != labels.shape or lse.dtype != torch.float32:
        raise ValueError(
            f"dloss must be a scalar and lse the forward's, [{labels.shape[0]}] torch.float32, "
            f"but they are {list(dloss.shape)} and {list(lse.shape)} {lse.dtype}"
        )
    needs_dhidden, needs_dweight, needs_dbias = needs
    (M, H), V = hidden.shape, weight.shape[0]
    dhidden = torch.empty((M, H), dtype=hidden.dtype, device=hidden.device) if needs_dhidden else None
    dweight = torch.empty((V, H), dtype=weight.dtype, device=hidden.device) if needs_dweight else None
    dbias = torch.empty(V, dtype=torch.float32, device=hidden.device) if needs_dbias else None
    if M == 0:
        return (
            dhidden,
            None if dweight is None else dweight.zero_(),
            None if dbias is None else dbias.zero_().to(bias.dtype),
        )
    # one number each: the kernel reads it where it is
    dloss = dloss.to(torch.float32).reshape(1)
    dhidden_sum = None
    if dhidden is not None and hidden.dtype != torch.float32:
        dhidden_sum = torch.zeros((M, H), dtype=torch.float32, device=hidden.device)
    row_programs = triton.cdiv(M, TILE_ROWS * TILES)
    held = [dhidden_sum, None if bias.dtype == torch.float32 else dbias]
    chunks = _Logits(
        hidden,
        weight,
        column_bytes=4 * row_programs,
        other_bytes=sum(x.nbytes for x in held if x is not None),
    )
    partials = torch.empty(row_programs * chunks.chunk, dtype=torch.float32, device=hidden.device)
    with device_guard(hidden):
        for part, logits, chunk_weight in chunks:
            N = logits.shape[1]
            partial = partials[: row_programs * N].view(row_programs, N)
            _dlogits_kernel[(row_programs, triton.cdiv(N, TILE_COLS))](
                logits, bias[part], labels, lse, dloss, partial, logits.stride(0), M, N, part.start,
                ignore_index, 1.0 - label_smoothing, label_smoothing / V,
                BLOCK_M=TILE_ROWS, BLOCK_N=TILE_COLS, TILES_M=TILES,
            )  # fmt: skip
            dlogits = logits
            if dbias is not None:
                torch.sum(partial, dim=0, out=dbias[part])
            if dhidden is not None and dhidden_sum is None:
                dhidden.addmm_(dlogits, chunk_weight, beta=1.0 if part.start else 0.0)
            elif dhidden is not None and dhidden_sum is not None:
                dhidden_sum += torch.mm(dlogits, chunk_weight, out=dhidden)
            if dweight is not None and chunks.cast is None:
                torch.mm(dlogits.T, hidden, out=dweight[part])
            elif dweight is not None:
                # the chunk's weights have done their work: their buffer takes the product
                dweight[part].copy_(torch.mm(dlogits.T, hidden, out=chunk_weight))
    if dhidden is not None and dhidden_sum is not None:
        dhidden.copy_(dhidden_sum)
    return dhidden, dweight, None if dbias is None else dbias.to(bias.dtype)


def _check(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, label_smoothing: float) -> None:
    if hidden.dim() != 2:
        raise ValueError(f"hidden must be [P, H], but has shape {tuple(hidden.shape)}: call .reshape(-1, H)")
    width = hidden.shape[1]
    if weight.dim() != 2 or weight.shape[1] != width or not weight.shape[0]:
        raise ValueError(
            f"weight must be [V, {width}] with V from 1 to fit hidden, but is {list(weight.shape)}"
        )
    if bias.shape != weight.shape[:1] or (bias.shape[0] > 1 and bias.stride(0) != 1):
        raise ValueError(
            f"bias must be [{weight.shape[0]}] and contiguous, "
            f"but is {list(bias.shape)} with strides {list(bias.stride())}"
        )
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor.dtype not in DTYPES or tensor.device != hidden.device:
            raise ValueError(
                f"{name} must be float32, float16 or bfloat16 on {hidden.device}, "
                f"but is {tensor.dtype} on {tensor.device}"
            )
    if (
        labels.shape != hidden.shape[:1]
        or labels.dtype != torch.int64
        or labels.device != hidden.device
        or not labels.is_contiguous()
    ):
        raise ValueError(
            f"labels must be [{hidden.shape[0]}] torch.int64 on {hidden.device} and contiguous, "
            f"but are {list(labels.shape)} {labels.dtype} on {labels.device}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing {label_smoothing} is not between 0 and 1")
    check_can_launch(_dlogits_kernel, hidden)


# ---- what is compiled -------------------------------------------------------------------------------------


def compile_cases(arch: str) -> list[CompileCase]:
    """BERT's forms, and the others where a spill fails: no size of a problem is part of a kernel."""
    cases = []
    for dtype, bias, is_smoothed in (
        ("bf16", "bf16", False), ("bf16", "fp32", False), ("bf16", "bf16", True), ("fp16", "fp16", False),
        ("fp32", "fp32", False),
    ):  # fmt: skip
        if arch not in ("sm_80", "sm_90") and (dtype, bias) != ("bf16", "bf16"):
            continue
        pointers = {"logits_ptr": f"*{dtype}", "bias_ptr": f"*{bias}", "labels_ptr": "*i64"}
        statistics = pointers | {"state_ptr": "*fp32", "best_ptr": "*i32"}
        statistics |= dict.fromkeys(("stride_lm", "M", "N", "first_col"), "i32")
        smoothed = {"SMOOTHED": is_smoothed}
        label = ("smoothed" if is_smoothed else "plain") + ("" if bias == dtype else f", bias {bias}")
        aligned = frozenset({*statistics} - {"M", "first_col"})
        cases.append(
            CompileCase(
                _logit_statistics_kernel, label, dtype, statistics, smoothed | {"BLOCK_N": STATISTICS_BLOCK},
                num_warps=4, num_stages=None, aligned=aligned,
            )
        )  # fmt: skip
        if is_smoothed:
            continue  # in the gradient smoothing is a number
        gradient = pointers | dict.fromkeys(("lse_ptr", "dloss_ptr", "partial_ptr"), "*fp32")
        gradient |= dict.fromkeys(("stride_lm", "M", "N", "first_col", "ignore_index"), "i32")
        gradient |= dict.fromkeys(("on_label", "on_all"), "fp32")
        tiles = {"BLOCK_M": TILE_ROWS, "BLOCK_N": TILE_COLS, "TILES_M": TILES}
        aligned = frozenset({name for name in gradient if name.endswith("_ptr")} | {"stride_lm", "N"})
        cases.append(
            CompileCase(
                _dlogits_kernel, label, dtype, gradient, tiles, num_warps=4, num_stages=None, aligned=aligned
            )
        )
    sums = {"state_ptr": "*fp32", "best_ptr": "*i32", "labels_ptr": "*i64", "lse_ptr": "*fp32"}
    sums |= {"loss_sum_ptr": "*fp32", "correct_ptr": "*i64", "count_ptr": "*i64"}
    aligned = frozenset(sums)
    sums |= dict.fromkeys(("M", "V", "ignore_index"), "i32") | dict.fromkeys(("on_label", "on_all"), "fp32")
    cases.append(
        CompileCase(
            _sum_losses_kernel, "smoothed", "fp32", sums, {"SMOOTHED": True, "BLOCK": LOSS_BLOCK},
            num_warps=4, num_stages=None, aligned=aligned,
        )
    )  # fmt: skip
    return cases
