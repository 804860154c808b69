"""Attention inside each sequence: end to end in one token axis, or padded with a mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastbert.ops import attention_eager, backend, philox


@dataclass(frozen=True)
class SequenceLayout:
    """Where the sequences of a token axis lie; made once per forward, read by every layer.

    Sequence i owns the rows cu_seqlens[i] .. cu_seqlens[i+1]-1. Repeated values are sequences of length zero.
    Rows from cu_seqlens[-1] on belong to no sequence: their attention output is 0.
    """

    cu_seqlens: Tensor  # [B+1] int32
    max_seqlen: int  # no sequence is longer
    total_tokens: int  # rows of the token axis
    schedule: Tensor | None = None  # [tiles, 4] int32: the kernels' work list, where kernels may run

    @classmethod
    def build(cls, cu_seqlens: Tensor, max_seqlen: int, total_tokens: int) -> SequenceLayout:
        """Never reads a length on the host."""
        schedule = None
        if backend.kernels_expected(cu_seqlens.device):
            from fastbert_kernels.attention import attention_schedule

            schedule = attention_schedule(cu_seqlens, total_tokens, max_seqlen)
        return cls(cu_seqlens, max_seqlen, total_tokens, schedule)

    @cached_property
    def runs(self) -> list[attention_eager.Run]:
        """The runs of sequences of one length, for eager attention on a CPU."""
        return attention_eager.equal_runs(self.cu_seqlens)


@dataclass(frozen=True)
class PaddedLayout:
    """The attention mask of a padded batch; made once per forward, read by every layer.

    A query that may see no key at all gets attention output 0.
    """

    rows: SequenceLayout  # every row of the batch is a sequence of the flattened token axis
    key_mask: Tensor | None  # [B*S] bool, True = keep: which keys any query sees
    mask: Tensor | None  # any other mask: bool or additive float, broadcastable to [B, heads, S, S]

    @classmethod
    def build(cls, mask: Tensor | None, batch_size: int, seqlen: int, device: torch.device) -> PaddedLayout:
        """mask: None, [B, S] bool with True = keep, or four axes of bool or additive float (-inf = drop)."""
        cu_seqlens = torch.arange(0, (batch_size + 1) * seqlen, seqlen, dtype=torch.int32, device=device)
        rows = SequenceLayout.build(cu_seqlens, seqlen, batch_size * seqlen)
        if mask is None:
            return cls(rows, None, None)
        if mask.dim() == 4 and mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
            mask = mask[:, 0, 0].expand(batch_size, seqlen)
        if mask.dim() == 2:
            return cls(rows, mask.reshape(-1), None)
        return cls(rows, None, mask)


def varlen_attention(
    qkv: Tensor, layout: SequenceLayout, dropout_p: float = 0.0, key_mask: Tensor | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence: qkv [T, 3, heads, D] -> [T, heads, D].

    `key_mask` [T] bool leaves out the keys that are False; a sequence without a key gives 0.
    Rows that no sequence owns give 0, and a gradient of 0, whatever they hold. `dropout_p` drops
    probabilities by a seed that is drawn from torch's generator of the device; the eager path and the Triton
    kernel drop the same. Computes in qkv's dtype, under autocast too, with scores and softmax in fp32 at
    least. Deterministic, except for flash-attn, which is so under torch.use_deterministic_algorithms.
    UserError for a forced backend that cannot run. Source: FlashAttention-2 (Dao, 2023).
    """
    return _attend(qkv, layout, key_mask, dropout_p)


def padded_attention(
    qkv: Tensor, layout: PaddedLayout, dropout_p: float = 0.0, need_probabilities: bool = False
) -> tuple[Tensor, Tensor | None]:
    """qkv [B, S, 3, heads, D] -> (context [B, S, heads, D], probabilities [B, heads, S, S] or None).

    As `varlen_attention`. A mask that is additive or depends on the query runs eagerly, and so do
    probabilities, which are those after dropout, as transformers returns them.
    """
    batch_size, seqlen, _, num_heads, head_dim = qkv.shape
    if layout.mask is None and not need_probabilities:
        context = _attend(qkv.flatten(0, 1), layout.rows, layout.key_mask, dropout_p)
        return context.view(batch_size, seqlen, num_heads, head_dim), None
    beyond = (
        "probabilities are wanted" if need_probabilities else "the mask is additive or depends on the query"
    )
    backend.implementation("attention", qkv, head_dim, beyond_kernels=beyond)
    backend.ran("attention", "eager")
    mask = layout.mask
    if layout.key_mask is not None:
        mask = layout.key_mask.view(batch_size, 1, 1, seqlen)
    dropout = None
    if dropout_p > 0.0:
        dropout = attention_eager.Dropout(philox.draw_seed(qkv.device), dropout_p)
    with backend.no_autocast(qkv.device):
        return attention_eager.padded(qkv, mask, dropout, need_probabilities)


def _attend(qkv: Tensor, layout: SequenceLayout, key_mask: Tensor | None, dropout_p: float) -> Tensor:
    chosen = backend.implementation("attention", qkv, qkv.shape[-1], key_mask=key_mask is not None)
    if chosen == "flash_attn":
        return _flash_attention(qkv, layout, dropout_p)
    seed = philox.draw_seed(qkv.device) if dropout_p > 0.0 else None
    arguments = (qkv, layout.cu_seqlens, layout.schedule, layout.max_seqlen, key_mask, seed, dropout_p)

    def eager() -> Tensor:
        backend.ran("attention", "eager")
        dropout = None if seed is None else attention_eager.Dropout(seed, dropout_p)
        with backend.no_autocast(qkv.device):
            if attention_eager.host_may_read(layout.cu_seqlens):
                return attention_eager.by_runs(qkv, layout.runs, key_mask, dropout)
            return attention_eager.in_one_group(qkv, layout.cu_seqlens, layout.max_seqlen, key_mask, dropout)

    return backend.call(
        chosen,
        (qkv,),
        registered=lambda: _attention(*arguments)[0],
        launch=lambda: _launch(*arguments)[0],
        eager=eager,
    )


# ---- registration -----------------------------------------------------------------------------------------

# One implementation that asks the backend, not one for each dispatch key: what runs is not the device's
# affair alone. The interpreter runs the kernel on CPU tensors, and a forced choice must hold on every device.


@torch.library.custom_op("fastbert::attention", mutates_args=())
def _attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    schedule: Tensor | None,
    max_seqlen: int,
    key_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """(out [T, heads, D], lse [heads, T])."""
    if _runs_kernel(qkv, key_mask):
        return _launch(qkv, cu_seqlens, schedule, max_seqlen, key_mask, seed, dropout_p)
    backend.ran("attention", "eager")
    dropout = None if seed is None else attention_eager.Dropout(seed, dropout_p)
    with backend.no_autocast(qkv.device):
        return attention_eager.attention_reference(qkv, cu_seqlens, max_seqlen, key_mask, dropout)


@_attention.register_fake
def _(
    qkv: Tensor,
    cu_seqlens: Tensor,
    schedule: Tensor | None,
    max_seqlen: int,
    key_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    total_tokens, _, num_heads, head_dim = qkv.shape
    lse_dtype = torch.promote_types(qkv.dtype, torch.float32)
    out = qkv.new_empty((total_tokens, num_heads, head_dim))
    return out, qkv.new_empty((num_heads, total_tokens), dtype=lse_dtype)


@torch.library.custom_op("fastbert::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    schedule: Tensor | None,
    max_seqlen: int,
    key_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """dqkv [T, 3, heads, D]."""
    if _runs_kernel(qkv, key_mask):
        from fastbert_kernels.attention_bwd import attention_bwd

        backend.ran("attention_backward", "triton")
        return attention_bwd(
            dout.contiguous(), *qkv.unbind(1), out, lse,
            _schedule(qkv, cu_seqlens, schedule, max_seqlen), max_seqlen,
            key_mask=key_mask, seed=seed, dropout_p=dropout_p,
        )  # fmt: skip
    backend.ran("attention_backward", "eager")
    dropout = None if seed is None else attention_eager.Dropout(seed, dropout_p)
    with backend.no_autocast(qkv.device):
        return attention_eager.attention_backward_reference(
            dout, qkv, out, lse, cu_seqlens, max_seqlen, key_mask, dropout
        )


@_attention_backward.register_fake
def _(dout: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, cu_seqlens, schedule, ctx.max_seqlen, key_mask, seed, ctx.dropout_p = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(qkv, *output, cu_seqlens, schedule, key_mask, seed)


def _backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    qkv, out, lse, cu_seqlens, schedule, key_mask, seed = ctx.saved_tensors
    dqkv = _attention_backward(
        dout, qkv, out, lse, cu_seqlens, schedule, ctx.max_seqlen, key_mask, seed, ctx.dropout_p
    )
    return dqkv, None, None, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


# ---- other implementations --------------------------------------------------------------------------------


def _runs_kernel(qkv: Tensor, key_mask: Tensor | None) -> bool:
    return backend.implementation("attention", qkv, qkv.shape[-1], key_mask=key_mask is not None) == "triton"


def _launch(
    qkv: Tensor,
    cu_seqlens: Tensor,
    schedule: Tensor | None,
    max_seqlen: int,
    key_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    from fastbert_kernels.attention import attention_fwd

    backend.ran("attention", "triton")
    return attention_fwd(
        *qkv.unbind(1), _schedule(qkv, cu_seqlens, schedule, max_seqlen), max_seqlen,
        key_mask=key_mask, seed=seed, dropout_p=dropout_p,
    )  # fmt: skip


def _schedule(qkv: Tensor, cu_seqlens: Tensor, schedule: Tensor | None, max_seqlen: int) -> Tensor:
    if schedule is not None:
        return schedule
    # a layout that was made while another backend was chosen
    from fastbert_kernels.attention import attention_schedule

    return attention_schedule(cu_seqlens, qkv.shape[0], max_seqlen)


def _flash_attention(qkv: Tensor, layout: SequenceLayout, dropout_p: float) -> Tensor:
    """flash-attn's kernel, with its own dropout and autograd; it leaves rows without a sequence undefined."""
    from flash_attn import flash_attn_varlen_qkvpacked_func

    backend.ran("attention", "flash_attn")
    cu_seqlens = layout.cu_seqlens
    is_unowned = (torch.arange(layout.total_tokens, device=qkv.device) >= cu_seqlens[-1])[:, None, None]
    out = flash_attn_varlen_qkvpacked_func(
        qkv.masked_fill(is_unowned[:, None], 0.0),
        cu_seqlens,
        layout.max_seqlen,
        dropout_p=dropout_p,
        softmax_scale=qkv.shape[-1] ** -0.5,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out.masked_fill(is_unowned, 0.0)
