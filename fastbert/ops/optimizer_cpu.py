"""An optimizer step on a CPU: LAMB and BERT's Adam through the fused kernel of torch.

`torch._fused_adamw_`, which `torch.optim.AdamW(fused=True)` calls, moves a weight and its moments in one
pass over memory. Whatever else must be done to a tensor is done to pieces of it while they are in the cache.
Gradients are read only: the kernel's own way to scale them would overwrite them. What is computed is written
out in `fastbert.ops.lamb`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from fastbert.ops.lamb import SumOverShards

CPU_PIECE = 1 << 18  # elements: 1 MiB a stream in fp32, half of it for each of two threads


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    *,
    grad_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    scratch: Tensor,
) -> None:
    """`fastbert.ops.lamb.adamw_`. `scratch` has the dtype of the weights, and at least CPU_PIECE elements."""
    counters = _counters(steps, bias_correction)
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    if _can_be_read(grads, params, grad_scale):
        _fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, counters, options)
        return
    for rows in _together(params, grads, exp_avgs, exp_avg_sqs, counters):
        for p, g, m, v, k in _batches(rows):
            _fused_adamw_(p, _scaled(g, grad_scale, _like(p, scratch)), m, v, k, options)


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    *,
    grad_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    adam_w_mode: bool,
    use_trust_ratio: bool,
    scratch: Tensor,
    sum_over_shards: SumOverShards | None = None,
) -> None:
    """`fastbert.ops.lamb.lamb_` with grad_averaging.

    `scratch` has the weights' dtype, and CPU_PIECE elements more than the largest of them, or than CPU_PIECE;
    with `sum_over_shards`, more than all of them together.
    """
    counters = _counters(steps, bias_correction)
    grad_scratch, update_scratch = scratch[:CPU_PIECE], scratch[CPU_PIECE:]
    # the kernel adds m / sqrt(v) to what it holds for a weight; the decay there, it leaves the update
    options = {"lr": -1.0, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": 0.0}

    def updates_of(rows: list[Row], updates: list[Tensor]) -> Tensor:
        """New moments, and updates; returns the norms of weights and updates, [2, len(rows)]."""
        norms: list[Tensor] = []
        for p, g, m, v, k, u in _batches([(*row, update) for row, update in zip(rows, updates)]):
            if weight_decay != 0 and not adam_w_mode:  # decay as a gradient, inside the moments
                g = _scaled(g, grad_scale, _like(p, grad_scratch))
                torch._foreach_add_(g, p, alpha=weight_decay)
            elif not _can_be_read(g, p, grad_scale):
                g = _scaled(g, grad_scale, _like(p, grad_scratch))
            if weight_decay != 0 and adam_w_mode:
                for weight, update in zip(p, u):
                    torch.mul(weight, weight_decay, out=update)
            else:
                torch._foreach_zero_(u)
            _fused_adamw_(u, g, m, v, k, options)
            if use_trust_ratio:
                norms.append(torch.stack(torch._foreach_norm([*p, *u])).view(2, len(p)))
        if not use_trust_ratio:
            return torch.zeros(2, len(rows))
        # many tensors were one batch, and one tensor may have been many
        return norms[0] if len(norms) == 1 else torch.cat(norms, 1).norm(dim=1, keepdim=True)

    def apply(rows: list[Row], updates: list[Tensor], norms: Tensor) -> None:
        ratios = torch.where((norms > 0).all(0), norms[0] / norms[1], 1.0).tolist()
        for row, update, ratio in zip(rows, updates, ratios):
            row[0].add_(update, alpha=-lr * ratio)

    groups = _together(params, grads, exp_avgs, exp_avg_sqs, counters)
    if sum_over_shards is None:
        for rows in groups:
            updates = _like([row[0] for row in rows], update_scratch)
            apply(rows, updates, updates_of(rows, updates))
        return
    # no weight can change before the squares of all ranks are known, which are sent in one go
    all_rows: list[Row] = []
    all_updates = _like(params, update_scratch)
    all_norms: list[Tensor] = []
    for rows in groups:
        first = len(all_rows)
        all_rows += rows
        all_norms.append(updates_of(rows, all_updates[first : len(all_rows)]))
    norms = torch.cat(all_norms, 1)
    if use_trust_ratio:
        norms = sum_over_shards(norms.square()).sqrt()
    apply(all_rows, all_updates, norms)


def _fused_adamw_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    counters: Sequence[Tensor],
    options: dict[str, float],
) -> None:
    arguments: dict[str, Any] = {**options, "amsgrad": False, "maximize": False}
    torch._fused_adamw_(
        list(weights), list(grads), list(exp_avgs), list(exp_avg_sqs), [], list(counters), **arguments
    )


def _counters(steps: Sequence[float], bias_correction: bool) -> Sequence[Tensor]:
    """The kernel corrects for the number of steps; after infinitely many there is nothing to correct."""
    return torch.tensor([step if bias_correction else math.inf for step in steps]).unbind()


def _can_be_read(grads: Sequence[Tensor], weights: Sequence[Tensor], scale: float) -> bool:
    """Whether the kernel can take these gradients as they are."""
    return scale == 1.0 and all(g.dtype == p.dtype and g.is_contiguous() for g, p in zip(grads, weights))


def _scaled(grads: Sequence[Tensor], scale: float, out: list[Tensor]) -> list[Tensor]:
    for grad, scaled in zip(grads, out):
        if grad.dtype == scaled.dtype:
            torch.mul(grad, scale, out=scaled)
        else:
            scaled.copy_(grad).mul_(scale)  # not rounded to the lower dtype
    return out


def _like(tensors: Sequence[Tensor], scratch: Tensor) -> list[Tensor]:
    """Memory of `scratch` in the shapes of these tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    return [part.view(t.shape) for part, t in zip(scratch[: sum(sizes)].split(sizes), tensors)]


# ---- what stays in the cache

Row = tuple[Tensor, ...]  # of a parameter: its weight, gradient, moments, and a counter of no dimension


def _together(*columns: Sequence[Tensor]) -> Iterator[list[Row]]:
    """Rows of small tensors, at most CPU_PIECE elements together, or the row of one that has more."""
    rows: list[Row] = []
    size = 0
    for row in zip(*columns):
        if rows and size + row[0].numel() > CPU_PIECE:
            yield rows
            rows, size = [], 0
        rows.append(row)
        size += row[0].numel()
    if rows:
        yield rows


def _batches(rows: Sequence[Row]) -> Iterator[list[list[Tensor]]]:
    """Rows of `_together` in pieces of at most CPU_PIECE elements -> their columns."""
    if len(rows) > 1 or rows[0][0].numel() <= CPU_PIECE:
        yield [list(column) for column in zip(*rows)]
        return
    columns = [repeat(x) if x.dim() == 0 else x.reshape(-1).split(CPU_PIECE) for x in rows[0]]
    for pieces in zip(*columns):
        yield [[piece] for piece in pieces]
