"""Cross-entropy of hidden @ weight.T + bias without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastbert.batch import IGNORE_INDEX

_CHUNK_BYTES = 16 * 2**20  # of one chunk's logits in the dtype of the loss
_MIN_CHUNK_ROWS = 256  # fewer make the products slow


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [P, H], weight [V, H], bias [V], labels [P] -> (loss_sum, correct, count), scalars.

    `loss_sum` is the sum of -log softmax(hidden @ weight.T + bias)[label], in fp32 (fp64 for fp64 input);
    `correct` and `count` are int64. Rows labelled IGNORE_INDEX take no part; if all are, the sum is 0 and so
    are the gradients. Under autocast the products run in autocast's dtype and the softmax in fp32. The
    gradients are made in the forward, chunk by chunk; differentiable once.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        compute_dtype = torch.get_autocast_dtype(device)
    else:
        compute_dtype = torch.promote_types(hidden.dtype, weight.dtype)
    # autograd is off inside a Function's forward, so who wants gradients is settled here
    grads = (
        torch.is_grad_enabled() and hidden.requires_grad,
        torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad),
    )
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, compute_dtype, grads)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        compute_dtype: torch.dtype,
        grads: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            loss_sum, correct, count, dhidden, dweight, dbias = _forward_by_chunks(
                hidden, weight, bias, labels, compute_dtype, grads
            )
        ctx.mark_non_differentiable(correct, count)
        ctx.save_for_backward(dhidden, dweight, dbias)
        return loss_sum, correct, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # out of place: a second backward over a retained graph sees the same saved gradients
        dhidden, dweight, dbias = (
            None if saved is None else saved * dloss.to(saved.dtype) for saved in ctx.saved_tensors
        )
        return dhidden, dweight, dbias, None, None, None


def _forward_by_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    compute_dtype: torch.dtype,
    grads: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    needs_dhidden, needs_dweight = grads
    loss_dtype = torch.promote_types(compute_dtype, torch.float32)
    num_rows, vocab_size = hidden.shape[0], weight.shape[0]
    chunk_rows = max(_MIN_CHUNK_ROWS, _CHUNK_BYTES // (vocab_size * loss_dtype.itemsize))

    is_counted = labels != IGNORE_INDEX
    targets = labels.masked_fill(~is_counted, 0)
    loss_sum = hidden.new_zeros((), dtype=loss_dtype)
    correct = labels.new_zeros((), dtype=torch.int64)
    dhidden = torch.empty_like(hidden) if needs_dhidden else None
    dweight = torch.zeros_like(weight, dtype=loss_dtype) if needs_dweight else None
    dbias = torch.zeros_like(bias, dtype=loss_dtype) if needs_dweight else None
    compute_weight, compute_bias = weight.to(compute_dtype), bias.to(compute_dtype)

    for start in range(0, num_rows, chunk_rows):
        rows = slice(start, start + chunk_rows)
        counted, target = is_counted[rows], targets[rows, None]
        compute_hidden = hidden[rows].to(compute_dtype)
        logits = torch.addmm(compute_bias, compute_hidden, compute_weight.T).to(loss_dtype)
        log_probs = logits.log_softmax(dim=-1)
        # out of place: torch.compile loses the gradient of a result that changes in place (torch 2.11)
        loss_sum = loss_sum - log_probs.gather(1, target).squeeze(1).masked_fill(~counted, 0.0).sum()
        correct += ((logits.argmax(dim=-1) == target.squeeze(1)) & counted).sum()
        if not (needs_dhidden or needs_dweight):
            continue
        dlogits = log_probs.exp_()
        dlogits.scatter_add_(1, target, dlogits.new_full((1, 1), -1.0).expand_as(target))
        dlogits.masked_fill_(~counted[:, None], 0.0)
        if dbias is not None:
            dbias += dlogits.sum(dim=0)
        dlogits = dlogits.to(compute_dtype)
        if dhidden is not None:
            dhidden[rows] = dlogits @ compute_weight
        if dweight is not None:
            if compute_dtype == loss_dtype:
                dweight.addmm_(dlogits.T, compute_hidden)
            else:
                dweight += dlogits.T @ compute_hidden
    count = is_counted.sum()
    if dweight is not None and dbias is not None:
        dweight, dbias = dweight.to(weight.dtype), dbias.to(bias.dtype)
    return loss_sum, correct, count, dhidden, dweight, dbias


def _upcast(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that are not IGNORE_INDEX (nan if there is none), in fp32 at least."""
    return F.cross_entropy(_upcast(logits), labels, ignore_index=IGNORE_INDEX)


def cross_entropy_parts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [N, C], labels [N] -> (sum of the losses, correct, count)."""
    loss_sum = F.cross_entropy(_upcast(logits), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss_sum, (logits.argmax(dim=-1) == labels).sum(), (labels != IGNORE_INDEX).sum()
