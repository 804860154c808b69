"""Attention inside each sequence: end to end in one token axis, or padded with a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SequenceLayout:
    """Where the sequences of a token axis lie; made once per forward, read by every layer.

    Sequence i owns the rows cu_seqlens[i] .. cu_seqlens[i+1]-1. Repeated values are sequences of length zero.
    Rows from cu_seqlens[-1] on belong to no sequence: their attention output is 0.
    """

    cu_seqlens: Tensor  # [B+1] int32
    max_seqlen: int  # no sequence is longer
    total_tokens: int  # rows of the token axis
    # CPU only: (number of sequences, length) of each run of neighbours of equal length, in order
    runs: tuple[tuple[int, int], ...] | None

    @classmethod
    def build(cls, cu_seqlens: Tensor, max_seqlen: int, total_tokens: int) -> SequenceLayout:
        """Looks at the lengths on the host if cu_seqlens is a CPU tensor; never synchronises a device."""
        runs = _equal_runs(cu_seqlens) if cu_seqlens.device.type == "cpu" else None
        return cls(cu_seqlens, max_seqlen, total_tokens, runs)


@dataclass(frozen=True)
class PaddedLayout:
    """The attention mask of a padded batch; made once per forward, read by every layer.

    A query that may see no key at all gets attention output 0.
    """

    mask: Tensor | None  # bool (True = keep) or additive float, broadcastable to [B, heads, S, S]
    no_keys: Tensor | None  # bool, broadcastable to [B, heads, S, 1]: queries without any key

    @classmethod
    def build(cls, mask: Tensor | None) -> PaddedLayout:
        """mask: None, bool with True = keep, or additive float (-inf = drop)."""
        if mask is None:
            return cls(None, None)
        if mask.dtype == torch.bool:
            no_keys = ~mask.any(dim=-1, keepdim=True)
            return cls(mask | no_keys, no_keys)
        no_keys = (mask == float("-inf")).all(dim=-1, keepdim=True)
        return cls(mask.masked_fill(no_keys, 0.0), no_keys)


def _equal_runs(cu_seqlens: Tensor) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for length in cu_seqlens.diff().tolist():
        if length == 0:
            continue
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return tuple(runs)


def varlen_attention(qkv: Tensor, layout: SequenceLayout, dropout_p: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence: qkv [T, 3, heads, D] -> [T, heads, D].

    Rows that no sequence owns give 0, and a gradient of 0. `dropout_p` drops probabilities.
    """
    if layout.runs is not None:
        return _attention_by_runs(qkv, layout.runs, dropout_p)
    return _attention_in_one_group(qkv, layout, dropout_p)


def _attention_by_runs(qkv: Tensor, runs: tuple[tuple[int, int], ...], dropout_p: float) -> Tensor:
    """One attention call for each run of sequences of one length; every run is a view."""
    owned = [count * length for count, length in runs]
    *parts, unowned = qkv.split([*owned, qkv.shape[0] - sum(owned)])
    outputs = []
    for part, (count, length) in zip(parts, runs):
        q, k, v = part.view(count, length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
        outputs.append(context.transpose(1, 2).reshape(count * length, *qkv.shape[2:]))
    if unowned.shape[0] or not outputs:
        # by selection: zero in value and in gradient, whatever the rows hold
        everywhere = torch.ones((), dtype=torch.bool, device=qkv.device)
        outputs.append(unowned[:, 0].masked_fill(everywhere, 0.0))
    return torch.cat(outputs) if len(outputs) != 1 else outputs[0]


def _attention_in_one_group(qkv: Tensor, layout: SequenceLayout, dropout_p: float) -> Tensor:
    """All sequences padded to max_seqlen; tensor arithmetic only, so that the host reads nothing."""
    cu_seqlens = layout.cu_seqlens.long()
    starts, seqlens = cu_seqlens[:-1, None], cu_seqlens.diff()[:, None]
    offsets = torch.arange(layout.max_seqlen, device=qkv.device)
    # a padding slot repeats the sequence's own last token, so that nothing of a neighbour is ever read
    slots = starts + torch.minimum(offsets, (seqlens - 1).clamp(min=0))
    slots = slots.clamp(max=layout.total_tokens - 1)
    keep = (offsets < seqlens) | (seqlens == 0)

    tokens = torch.arange(layout.total_tokens, device=qkv.device)
    sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    is_owned = sequence < seqlens.shape[0]
    sequence = sequence.clamp(max=seqlens.shape[0] - 1)
    back = torch.where(is_owned, sequence * layout.max_seqlen + tokens - cu_seqlens[sequence], 0)

    q, k, v = qkv[slots].permute(2, 0, 3, 1, 4)
    context = F.scaled_dot_product_attention(q, k, v, keep[:, None, None, :], dropout_p=dropout_p)
    context = context.transpose(1, 2).flatten(0, 1)[back]
    return torch.where(is_owned[:, None, None], context, 0.0)


def padded_attention(
    qkv: Tensor, layout: PaddedLayout, dropout_p: float = 0.0, need_probabilities: bool = False
) -> tuple[Tensor, Tensor | None]:
    """qkv [B, S, 3, heads, D] -> (context [B, S, heads, D], probabilities [B, heads, S, S] or None).

    Probabilities are those after dropout, as transformers returns them. Scores, mask and softmax are at least
    fp32 when probabilities are asked for; else torch's attention does the same in one call.
    """
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    if need_probabilities:
        probabilities = attention_probabilities(q, k, layout)
        probabilities = F.dropout(probabilities, dropout_p).to(v.dtype)
        context = probabilities @ v
    else:
        probabilities, mask = None, layout.mask
        if mask is not None and mask.dtype != torch.bool:
            # the least fp32 number is -inf in half precision, and a row of -inf has no softmax
            mask = mask.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
        context = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout_p)
        if layout.no_keys is not None:
            context = context.masked_fill(layout.no_keys, 0.0)
    return context.transpose(1, 2), probabilities


def attention_probabilities(q: Tensor, k: Tensor, layout: PaddedLayout) -> Tensor:
    """softmax(q k^T / sqrt(D)) of q, k [B, heads, S, D] under the layout's mask; fp32, or fp64 for fp64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(dtype) * q.shape[-1] ** -0.5
    if layout.mask is not None:
        # selection, not a large constant: nothing can overflow in any dtype
        if layout.mask.dtype == torch.bool:
            scores = scores.masked_fill(~layout.mask, float("-inf"))
        else:
            scores = scores + layout.mask.to(dtype)
    probabilities = scores.softmax(dim=-1)
    return probabilities if layout.no_keys is None else probabilities.masked_fill(layout.no_keys, 0.0)
