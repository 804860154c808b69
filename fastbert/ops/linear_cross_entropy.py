"""Cross-entropy of hidden @ weight.T + bias without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastbert.batch import IGNORE_INDEX
from fastbert.ops import backend

_CHUNK_BYTES = 16 * 2**20  # of one chunk's logits in the dtype of the loss, in the eager path
_MIN_CHUNK_ROWS = 256  # fewer make the products slow

# whether the gradients of hidden, weight and bias are wanted
Needs = tuple[bool, bool, bool]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [P, H], weight [V, H], bias [V], labels [P] int64 -> (loss_sum, correct, count), scalars.

    `loss_sum` is the sum of F.cross_entropy(hidden @ weight.T + bias, labels) with this `label_smoothing`
    (from 0 to 1), in fp32 (fp64 for fp64 input); `correct` and `count` are int64, without gradients. Rows
    labelled `ignore_index` take no part; if all are, the sum is 0 and so are the gradients. Under autocast
    the products run in autocast's dtype, unless a tensor is fp64, and the softmax in fp32; gradients have the
    dtypes of their tensors. Differentiable once. Deterministic as far as torch's products are.

    The Triton path takes columns of the vocabulary at a time and saves one number a row; beside inputs and
    gradients it holds an eighth of the logits, or 8 MiB. The eager path takes rows at a time and, but for
    torch.compile, makes the gradients in the forward: two buffers of 16 MiB or 256 rows of fp32 logits; in
    16 bits also a copy of weight, and the gradient of weight in fp32.

    ValueError for shapes that do not fit and a `label_smoothing` out of range. IndexError for a label outside
    of [0, V) on a CPU; on a GPU, where looking would wait for the device, the Triton path's loss and
    gradients are NaN and torch's own check stops the eager one. UserError for a forced backend that cannot
    run.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden must be [P, H] and labels [P], but they are {list(hidden.shape)} and "
            f"{list(labels.shape)}: flatten the leading axes of both"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"label_smoothing {label_smoothing} is not between 0 and 1, the share of all classes: 0 is none"
        )
    hidden = hidden.to(_compute_dtype(hidden, weight))
    arguments = (hidden, weight, bias, labels.contiguous(), ignore_index, float(label_smoothing))
    loss_sum, correct, count, *_ = backend.call(
        _implementation(hidden),
        (hidden, weight, bias),
        registered=lambda: _linear_cross_entropy(*arguments),
        launch=lambda: _launch(*arguments),
        eager=lambda: _eager(*arguments),
    )
    return loss_sum, correct, count


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    autocast = backend.autocast_dtype(hidden.device)
    return dtype if autocast is None or dtype == torch.float64 else autocast


def _implementation(hidden: Tensor) -> str:
    return backend.implementation("linear_cross_entropy", hidden)


# ---- eager: rows at a time --------------------------------------------------------------------------------


def _eager(hidden: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    # autograd is off inside a Function's forward, so who wants gradients is settled here
    needs = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight, bias))
    return _GradientsInForward.apply(hidden, weight, bias, *rest, needs)


class _GradientsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        loss_sum, correct, count, _, gradients = _by_row_chunks(*arguments)
        ctx.mark_non_differentiable(correct, count)
        ctx.save_for_backward(*gradients)
        return loss_sum, correct, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # out of place: a second backward over a retained graph sees the same saved gradients
        return *_scaled(ctx.saved_tensors, dloss), None, None, None, None


def _scaled(gradients: Any, dloss: Tensor) -> list[Tensor | None]:
    return [None if x is None else x * dloss.to(x.dtype) for x in gradients]


def _by_row_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor | None]]:
    """(loss_sum, correct, count, log of the sum of each row's exponentials, gradients of the sum)."""
    backend.ran("linear_cross_entropy", "eager")
    compute_dtype, loss_dtype = hidden.dtype, torch.promote_types(hidden.dtype, torch.float32)
    num_rows, vocab_size = hidden.shape[0], weight.shape[0]
    chunk_rows = max(_MIN_CHUNK_ROWS, _CHUNK_BYTES // (vocab_size * loss_dtype.itemsize))
    on_label, on_all = 1.0 - label_smoothing, label_smoothing / vocab_size

    _check_labels(labels, vocab_size, ignore_index)
    is_counted = labels != ignore_index
    targets = labels.masked_fill(~is_counted, 0)
    loss_sum = hidden.new_zeros((), dtype=loss_dtype)
    correct = labels.new_zeros((), dtype=torch.int64)
    lse = hidden.new_empty(num_rows, dtype=loss_dtype)
    dhidden = torch.empty_like(hidden) if needs[0] else None
    dweight = torch.zeros_like(weight, dtype=loss_dtype) if needs[1] else None
    dbias = torch.zeros_like(bias, dtype=loss_dtype) if needs[2] else None
    compute_weight, compute_bias = weight.to(compute_dtype), bias.to(compute_dtype)

    with backend.no_autocast(hidden.device):
        for start in range(0, num_rows, chunk_rows):
            rows = slice(start, start + chunk_rows)
            counted, target = is_counted[rows], targets[rows, None]
            logits = torch.addmm(compute_bias, hidden[rows], compute_weight.T).to(loss_dtype)
            log_probs = logits.log_softmax(dim=-1)
            best = logits.argmax(dim=-1, keepdim=True)
            correct += ((best == target).squeeze(1) & counted).sum()
            lse[rows] = (logits.gather(1, best) - log_probs.gather(1, best)).squeeze(1)
            losses = -on_label * log_probs.gather(1, target).squeeze(1)
            if label_smoothing > 0.0:
                losses -= on_all * log_probs.sum(dim=-1)
            loss_sum += losses.masked_fill(~counted, 0.0).sum()
            if any(needs):
                dlogits = log_probs.exp_()
                dlogits.scatter_add_(1, target, dlogits.new_full((1, 1), -on_label).expand_as(target))
                if label_smoothing > 0.0:
                    dlogits -= on_all
                dlogits.masked_fill_(~counted[:, None], 0.0)
                if dbias is not None:
                    dbias += dlogits.sum(dim=0)
                dlogits = dlogits.to(compute_dtype)
                if dhidden is not None:
                    dhidden[rows] = dlogits @ compute_weight
                if dweight is not None and compute_dtype == loss_dtype:
                    dweight.addmm_(dlogits.T, hidden[rows])
                elif dweight is not None:
                    dweight += dlogits.T @ hidden[rows]
                del dlogits
            del logits, log_probs  # they would live on beside those of the next chunk
    dweight = None if dweight is None else dweight.to(weight.dtype)
    dbias = None if dbias is None else dbias.to(bias.dtype)
    return loss_sum, correct, is_counted.sum(), lse, [dhidden, dweight, dbias]


def _check_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """IndexError for a label that is no row of weight; only where looking waits for no device."""
    if not backend.host_may_read(labels):
        return
    labels = labels[labels != ignore_index]
    if labels.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(labels))
    if low < 0 or high >= vocab_size:
        raise IndexError(
            f"labels holds {low if low < 0 else high}, but weight has vocab_size = {vocab_size} rows "
            f"(0..{vocab_size - 1}): mark rows that take no part with ignore_index, {ignore_index} here"
        )


# ---- registration -----------------------------------------------------------------------------------------


@torch.library.custom_op("fastbert::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss_sum, correct, count, log of the sum of each row's exponentials [P])."""
    arguments = (hidden, weight, bias, labels, ignore_index, label_smoothing)
    if _implementation(hidden) == "triton":
        return _launch(*arguments)
    return _by_row_chunks(*arguments, needs=(False, False, False))[:4]


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    correct, count = (labels.new_empty((), dtype=torch.int64) for _ in range(2))
    return hidden.new_empty((), dtype=dtype), correct, count, hidden.new_empty(hidden.shape[0], dtype=dtype)


@torch.library.custom_op("fastbert::linear_cross_entropy_backward", mutates_args=())
def _linear_cross_entropy_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    needs: list[bool],
) -> list[Tensor]:
    """Those of dhidden, dweight and dbias that are needed."""
    wanted = (needs[0], needs[1], needs[2])
    gradients: list[Tensor | None] | tuple[Tensor | None, ...]
    if _implementation(hidden) == "triton":
        from fastbert_kernels.cross_entropy import linear_cross_entropy_bwd

        backend.ran("linear_cross_entropy_backward", "triton")
        with backend.no_autocast(hidden.device):
            gradients = linear_cross_entropy_bwd(
                dloss, hidden, weight, bias, labels, lse, ignore_index, label_smoothing, wanted
            )
    else:
        *_, gradients = _by_row_chunks(hidden, weight, bias, labels, ignore_index, label_smoothing, wanted)
        backend.ran("linear_cross_entropy_backward", "eager")
        gradients = _scaled(gradients, dloss)
    return [x for x in gradients if x is not None]


@_linear_cross_entropy_backward.register_fake
def _(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    needs: list[bool],
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, is_needed in zip((hidden, weight, bias), needs) if is_needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, ctx.ignore_index, ctx.label_smoothing = inputs
    _, correct, count, lse = output
    ctx.mark_non_differentiable(correct, count, lse)
    ctx.save_for_backward(hidden, weight, bias, labels, lse)


def _backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    gradients = _linear_cross_entropy_backward(
        dloss, *ctx.saved_tensors, ctx.ignore_index, ctx.label_smoothing, needs
    )
    ready = iter(gradients)
    return *(next(ready) if is_needed else None for is_needed in needs), None, None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


def _launch(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from fastbert_kernels.cross_entropy import linear_cross_entropy_fwd

    backend.ran("linear_cross_entropy", "triton")
    _check_labels(labels, weight.shape[0], ignore_index)
    with backend.no_autocast(hidden.device):
        return linear_cross_entropy_fwd(hidden, weight, bias, labels, ignore_index, label_smoothing)


# ---- logits that somebody holds ---------------------------------------------------------------------------


def _upcast(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that are not IGNORE_INDEX (nan if there is none), in fp32 at least.

    Leaves the logits as they are, in the backward pass, too.
    """
    return F.cross_entropy(_upcast(logits), labels, ignore_index=IGNORE_INDEX)


def cross_entropy_parts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [N, C], labels [N] -> (sum of the losses, correct, count); leaves the logits as they are."""
    loss_sum = F.cross_entropy(_upcast(logits), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss_sum, (logits.argmax(dim=-1) == labels).sum(), (labels != IGNORE_INDEX).sum()
