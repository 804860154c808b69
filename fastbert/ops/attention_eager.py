"""Attention in plain torch: what runs on a CPU, and the reference that the kernels are compared with.

There are two forms of it. `by_runs`, `in_one_group` and `padded` are differentiable and use torch's own
attention where nothing is dropped. `attention_reference` and its backward write every formula out, and take
nothing from autograd: they are the bodies of the registered operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops import philox

# scores that the reference holds at a time on a CPU: 16 MiB in fp32
_PIECE = 1 << 22


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of one length."""

    start: int  # first token row
    count: int
    length: int


@dataclass(frozen=True)
class Dropout:
    seed: Tensor  # int64 [1]
    p: float

    def drop(self, x: Tensor, major: Tensor) -> Tensor:
        """Drop and scale elements of x [N, heads, S, S]; `major` [N]: the first token row of each."""
        _, scale = philox.dropout_threshold(self.p)
        keep = philox.dropout_keep(self.seed, major, x.shape[1], x.shape[2], x.shape[3], self.p)
        return x * keep.to(x.dtype).mul_(scale)  # one pass over x here, and one in autograd's backward


def host_may_read(x: Tensor) -> bool:
    """Whether looking at x's values costs no device synchronisation."""
    return x.device.type == "cpu"


def equal_runs(cu_seqlens: Tensor) -> list[Run]:
    """Reads the lengths on the host, where it may."""
    runs: list[Run] = []
    start = 0
    for length in cu_seqlens.diff().tolist():
        if length == 0:
            continue
        if runs and runs[-1].length == length:
            runs[-1] = Run(runs[-1].start, runs[-1].count + 1, length)
        else:
            runs.append(Run(start, 1, length))
        start += length
    return runs


# ---- differentiable ---------------------------------------------------------------------------------------


def by_runs(qkv: Tensor, runs: list[Run], key_mask: Tensor | None, dropout: Dropout | None) -> Tensor:
    """qkv [T, 3, heads, D] -> [T, heads, D]: one attention call for each run; every run is a view."""
    sizes = [run.count * run.length for run in runs]
    num_unowned = qkv.shape[0] - sum(sizes)
    if num_unowned or not sizes:
        sizes.append(num_unowned)
    # the gradient of a split is a copy: none for a single run
    parts = qkv.split(sizes) if len(sizes) > 1 else (qkv,)
    outputs = []
    for part, run in zip(parts, runs):
        q, k, v = part.view(run.count, run.length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
        mask = None
        if key_mask is not None:
            keep = key_mask[run.start : run.start + part.shape[0]]
            mask = keep.view(run.count, 1, 1, run.length)
        context = _context(q, k, v, mask, dropout, run.start)
        outputs.append(context.transpose(1, 2).reshape(part.shape[0], *qkv.shape[2:]))
    if len(parts) > len(runs):
        # by selection: zero in value and in gradient, whatever the rows hold
        everywhere = torch.ones((), dtype=torch.bool, device=qkv.device)
        outputs.append(parts[-1][:, 0].masked_fill(everywhere, 0.0))
    return torch.cat(outputs) if len(outputs) != 1 else outputs[0]


def in_one_group(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, key_mask: Tensor | None, dropout: Dropout | None
) -> Tensor:
    """As `by_runs`, all sequences padded to max_seqlen: tensor arithmetic only, the host reads nothing."""
    if qkv.shape[0] == 0:
        return qkv[:, 0]
    group = _one_group(cu_seqlens, max_seqlen, qkv.shape[0])
    q, k, v = group.gather(qkv).permute(2, 0, 3, 1, 4)
    context = _context(q, k, v, group.mask(key_mask), dropout, group.rows[:, 0])
    out = qkv.new_zeros(qkv.shape[0] + 1, *qkv.shape[2:])
    return out.index_put((group.places,), context.transpose(1, 2))[:-1]


def padded(
    qkv: Tensor, mask: Tensor | None, dropout: Dropout | None, need_probabilities: bool
) -> tuple[Tensor, Tensor | None]:
    """qkv [B, S, 3, heads, D] -> (context [B, S, heads, D], probabilities [B, heads, S, S] or None)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    if not need_probabilities:
        return _context(q, k, v, mask, dropout, 0).transpose(1, 2), None
    probabilities = attention_probabilities(q, k, mask)
    if dropout is not None:
        probabilities = dropout.drop(probabilities, _majors(q, 0))
    probabilities = probabilities.to(v.dtype)
    return (probabilities @ v).transpose(1, 2), probabilities


def attention_probabilities(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) of q, k [B, heads, S, D] under a mask; fp32, or fp64 for fp64.

    mask: bool (True = keep) or additive float, broadcastable to [B, heads, S, S]. Queries without any key
    give 0.
    """
    mask, no_keys = _with_a_key(mask)
    probabilities = _scores(q, k, mask).softmax(dim=-1)
    return probabilities if no_keys is None else probabilities.masked_fill(no_keys, 0.0)


def _context(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: Dropout | None, start: int | Tensor
) -> Tensor:
    """q, k, v [N, heads, S, D] -> [N, heads, S, D]; `start`: first token row of the first one, or of each."""
    mask, no_keys = _with_a_key(mask)
    if dropout is not None:
        probabilities = dropout.drop(_scores(q, k, mask).softmax(dim=-1), _majors(q, start))
        context = probabilities.to(v.dtype) @ v
    else:
        if mask is not None and mask.dtype != torch.bool:
            # the least fp32 number is -inf in half precision, and a row of -inf has no softmax
            mask = mask.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
        context = F.scaled_dot_product_attention(q, k, v, mask)
    return context if no_keys is None else context.masked_fill(no_keys, 0.0)


def _majors(q: Tensor, start: int | Tensor) -> Tensor:
    """[N]: the token row where each sequence of q [N, heads, S, D] begins."""
    if isinstance(start, Tensor):
        return start
    return start + torch.arange(q.shape[0], device=q.device) * q.shape[2]


# ---- written out ------------------------------------------------------------------------------------------


def attention_reference(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, key_mask: Tensor | None, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    """qkv [T, 3, heads, D] -> (out [T, heads, D], lse [heads, T]); both 0 in rows without a key.

    Scores, softmax and lse, the natural logarithm of its denominator, are fp32, or fp64 for fp64.
    """
    total_tokens, _, num_heads, head_dim = qkv.shape
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    out = qkv.new_zeros(total_tokens + 1, num_heads, head_dim)
    lse = qkv.new_zeros(total_tokens + 1, num_heads, dtype=dtype)
    for group in _groups(cu_seqlens, max_seqlen, total_tokens, num_heads):
        q, k, v = group.gather(qkv).to(dtype).permute(2, 0, 3, 1, 4)
        mask, no_keys = _with_a_key(group.mask(key_mask))
        scores = _scores(q, k, mask)
        group_lse = scores.logsumexp(dim=-1, keepdim=True)
        probabilities = (scores - group_lse).exp()
        if dropout is not None:
            probabilities = dropout.drop(probabilities, group.rows[:, 0])
        context = probabilities @ v
        if no_keys is not None:
            context, group_lse = context.masked_fill(no_keys, 0.0), group_lse.masked_fill(no_keys, 0.0)
        out[group.places] = context.transpose(1, 2).to(out.dtype)
        lse[group.places] = group_lse.squeeze(-1).transpose(1, 2)
    return out[:-1], lse[:-1].T.contiguous()


def attention_backward_reference(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    key_mask: Tensor | None,
    dropout: Dropout | None,
) -> Tensor:
    """dqkv [T, 3, heads, D] from what `attention_reference` took and gave, and dout [T, heads, D]."""
    total_tokens, _, num_heads, head_dim = qkv.shape
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    scale = head_dim**-0.5
    dqkv = qkv.new_zeros(total_tokens + 1, *qkv.shape[1:])
    for group in _groups(cu_seqlens, max_seqlen, total_tokens, num_heads):
        q, k, v = group.gather(qkv).to(dtype).permute(2, 0, 3, 1, 4)
        do, o = (group.gather(x).to(dtype).transpose(1, 2) for x in (dout, out))
        mask, no_keys = _with_a_key(group.mask(key_mask))
        group_lse = group.gather(lse.T).transpose(1, 2).unsqueeze(-1)
        probabilities = (_scores(q, k, mask) - group_lse).exp()
        if no_keys is not None:
            probabilities = probabilities.masked_fill(no_keys, 0.0)
        dropped, dprobabilities = probabilities, do @ v.transpose(-1, -2)
        if dropout is not None:
            dropped, dprobabilities = (dropout.drop(x, group.rows[:, 0]) for x in (dropped, dprobabilities))
        # rowsum(dP * P) = rowsum(dO * O), with dropout too
        delta = (do * o).sum(dim=-1, keepdim=True)
        dscores = probabilities * (dprobabilities - delta) * scale
        gradients = (dscores @ k, dscores.transpose(-1, -2) @ q, dropped.transpose(-1, -2) @ do)
        dqkv[group.places] = torch.stack(gradients).permute(1, 3, 0, 2, 4).to(dqkv.dtype)
    return dqkv[:-1]


@dataclass(frozen=True)
class _Group:
    """Sequences as rows of one length."""

    rows: Tensor  # [N, S] int64: the token row of each slot
    places: Tensor  # [N, S] int64: where results go; slots that are no token have a place of their own
    is_token: Tensor | None  # [N, S] bool; None: all of them

    def gather(self, x: Tensor) -> Tensor:
        """x [T, ...] -> [N, S, ...], 0 in slots that are no token."""
        x = x[self.rows]
        if self.is_token is None:
            return x
        return x.masked_fill(~self.is_token.view(*self.is_token.shape, *[1] * (x.dim() - 2)), 0.0)

    def mask(self, key_mask: Tensor | None) -> Tensor | None:
        """[N, 1, 1, S] bool, True = a key that may be seen, or None for all."""
        keep = self.is_token
        if key_mask is not None:
            keep = key_mask[self.rows] if keep is None else keep & key_mask[self.rows]
        return None if keep is None else keep[:, None, None, :]


def _groups(cu_seqlens: Tensor, max_seqlen: int, total_tokens: int, num_heads: int) -> Iterator[_Group]:
    """By length, in pieces that a CPU's cache likes; in one padded group where the host must not read."""
    if total_tokens == 0:
        return
    if not host_may_read(cu_seqlens):
        yield _one_group(cu_seqlens, max_seqlen, total_tokens)
        return
    for run in equal_runs(cu_seqlens):
        rows = run.start + torch.arange(run.count * run.length).view(run.count, run.length)
        for piece in rows.split(max(1, _PIECE // (num_heads * run.length**2))):
            yield _Group(piece, piece, None)


def _one_group(cu_seqlens: Tensor, max_seqlen: int, total_tokens: int) -> _Group:
    starts, seqlens = cu_seqlens[:-1, None].long(), cu_seqlens.diff()[:, None]
    offsets = torch.arange(max_seqlen, device=cu_seqlens.device)
    is_token = offsets < seqlens
    rows = starts + offsets
    return _Group(torch.where(is_token, rows, 0), torch.where(is_token, rows, total_tokens), is_token)


# ---- scores and masks -------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """q k^T / sqrt(D) + mask for q, k [N, heads, S, D], in fp32, or fp64 for fp64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    # q is smaller than the scores
    scores = (q.to(dtype) * q.shape[-1] ** -0.5) @ k.to(dtype).transpose(-1, -2)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        # -inf, not a large constant: nothing can overflow in any dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
    return scores.add_(mask)


def _with_a_key(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(a mask in which every query has a key, the queries that had none), so that no softmax is NaN."""
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        no_keys = ~mask.any(dim=-1, keepdim=True)
        return mask | no_keys, no_keys
    no_keys = (mask == float("-inf")).all(dim=-1, keepdim=True)
    return mask.masked_fill(no_keys, 0.0), no_keys
