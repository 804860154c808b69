"""Between rows padded to [B, S] and kept tokens end to end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops import backend


def unpad_indices(keep: Tensor) -> tuple[Tensor, Tensor]:
    """keep [B, S] bool -> (indices [T] int64 into the flattened B*S axis, cu_seqlens [B+1] int32).

    Reads the number of kept tokens from the device once; torch.compile takes it as a size that it does not
    know.
    """
    return _unpad_indices(keep) if torch.compiler.is_compiling() else _indices_eagerly(keep)


def _indices_eagerly(keep: Tensor) -> tuple[Tensor, Tensor]:
    seqlens = keep.sum(dim=-1, dtype=torch.int32)
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return keep.flatten().nonzero().squeeze(-1), cu_seqlens


def unpad_rows(x: Tensor, indices: Tensor | None) -> Tensor:
    """x [B, S, ...] of any dtype -> its rows at `indices` of the flattened B*S axis: [T, ...].

    indices [T] int64 without repeats, or None for all rows: then a view where x allows. The gradient is
    `pad_rows`, with zeros: no two rows are ever added. Deterministic.
    """
    slots = x.flatten(0, 1)
    if indices is None:
        return slots
    return backend.call(
        _implementation("unpad_rows", slots),
        (slots,),
        registered=lambda: _unpad_rows(slots, indices),
        launch=lambda: _gathered("unpad_rows", slots, indices),
        eager=lambda: _unpad_eagerly(slots, indices),
    )


def pad_rows(rows: Tensor, indices: Tensor | None, batch_size: int, seqlen: int, fill: float = 0.0) -> Tensor:
    """rows [T, ...] of any dtype -> [batch_size, seqlen, ...], `fill` where no row goes.

    Row t goes to slot indices[t] of the flattened axis; indices [T] int64 without repeats, or None if rows
    are all slots: then a view. Rows and fill are written in one pass. The gradient is `unpad_rows`.
    Deterministic.
    """
    if indices is not None:
        num_slots, given = batch_size * seqlen, rows
        rows = backend.call(
            _implementation("pad_rows", given),
            (given,),
            registered=lambda: _pad_rows(given, indices, num_slots, fill),
            launch=lambda: _pad_launch(given, indices, num_slots, fill),
            eager=lambda: _pad_eagerly(given, indices, num_slots, fill),
        )
    return rows.view(batch_size, seqlen, *rows.shape[1:])


def kept_tokens(
    mask: Tensor | None, batch_size: int, seqlen: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """(indices of the kept tokens or None for all, cu_seqlens)."""
    if mask is not None:
        indices, cu_seqlens = unpad_indices(mask)
        # a compiled graph is for any number of tokens
        if torch.compiler.is_compiling() or indices.shape[0] != batch_size * seqlen:
            return indices, cu_seqlens
    return None, torch.arange(0, (batch_size + 1) * seqlen, seqlen, dtype=torch.int32, device=device)


def check_mask(mask: Tensor | None, batch_size: int, seqlen: int, num_heads: int) -> Tensor | None:
    """None, [B, S] bool, or [B or 1, heads or 1, S or 1, S] bool or additive float; else ValueError."""
    if mask is None:
        return None
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        if shape != (batch_size, seqlen):
            raise ValueError(f"attention_mask has shape {shape}, the input is ({batch_size}, {seqlen})")
        return mask != 0
    if mask.dim() == 3:
        if shape != (batch_size, seqlen, seqlen):
            raise ValueError(
                f"attention_mask has shape {shape}, three axes must be ({batch_size}, {seqlen}, {seqlen})"
            )
        return (mask != 0)[:, None]
    if mask.dim() != 4:
        raise ValueError(f"attention_mask has {mask.dim()} axes, it may have 2, 3 or 4")
    allowed = ((1, batch_size), (1, num_heads), (1, seqlen), (seqlen,))
    if any(size not in sizes for size, sizes in zip(shape, allowed)):
        raise ValueError(
            f"attention_mask has shape {shape}, four axes must broadcast to "
            f"({batch_size}, {num_heads}, {seqlen}, {seqlen})"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"a 4-D attention_mask must be bool (True = keep) or additive float, got {mask.dtype}: "
            "integers could mean either"
        )
    return mask


# ---- registration -----------------------------------------------------------------------------------------


@torch.library.custom_op("fastbert::unpad_rows", mutates_args=())
def _unpad_rows(slots: Tensor, indices: Tensor) -> Tensor:
    """slots [N, ...], indices [T] -> [T, ...]."""
    if _implementation("unpad_rows", slots) == "triton":
        return _gathered("unpad_rows", slots, indices)
    return _unpad_eagerly(slots, indices)


@_unpad_rows.register_fake
def _(slots: Tensor, indices: Tensor) -> Tensor:
    return slots.new_empty(indices.shape[0], *slots.shape[1:])


@torch.library.custom_op("fastbert::pad_rows", mutates_args=())
def _pad_rows(rows: Tensor, indices: Tensor, num_slots: int, fill: float) -> Tensor:
    """rows [T, ...], indices [T] -> [num_slots, ...]."""
    if _implementation("pad_rows", rows) == "triton":
        return _pad_launch(rows, indices, num_slots, fill)
    return _pad_eagerly(rows, indices, num_slots, fill)


@_pad_rows.register_fake
def _(rows: Tensor, indices: Tensor, num_slots: int, fill: float) -> Tensor:
    return rows.new_empty(num_slots, *rows.shape[1:])


@torch.library.custom_op("fastbert::unpad_indices", mutates_args=())
def _unpad_indices(keep: Tensor) -> tuple[Tensor, Tensor]:
    """As `unpad_indices`."""
    return _indices_eagerly(keep)


@_unpad_indices.register_fake
def _(keep: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens = torch.library.get_ctx().new_dynamic_size()
    indices = keep.new_empty(num_tokens, dtype=torch.int64)
    return indices, keep.new_empty(keep.shape[0] + 1, dtype=torch.int32)


def _unpad_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    slots, indices = inputs
    ctx.num_slots = slots.shape[0]
    ctx.save_for_backward(indices)


def _unpad_backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None]:
    (indices,) = ctx.saved_tensors
    return _pad_rows(drows, indices, ctx.num_slots, 0.0), None


def _pad_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _pad_backward(ctx: Any, dslots: Tensor) -> tuple[Tensor, None, None, None]:
    (indices,) = ctx.saved_tensors
    return _unpad_rows(dslots, indices), None, None, None


_unpad_rows.register_autograd(_unpad_backward, setup_context=_unpad_context)
_pad_rows.register_autograd(_pad_backward, setup_context=_pad_context)


# ---- implementations --------------------------------------------------------------------------------------


def _unpad_eagerly(slots: Tensor, indices: Tensor) -> Tensor:
    backend.ran("unpad_rows", "eager")
    return slots.index_select(0, indices)


def _pad_eagerly(rows: Tensor, indices: Tensor, num_slots: int, fill: float) -> Tensor:
    backend.ran("pad_rows", "eager")
    return rows.new_full((num_slots, *rows.shape[1:]), fill).index_copy(0, indices, rows)


def _pad_launch(rows: Tensor, indices: Tensor, num_slots: int, fill: float) -> Tensor:
    from fastbert_kernels.gather_rows import inverse_index

    return _gathered("pad_rows", rows, inverse_index(indices, num_slots), fill)


def _gathered(op: str, x: Tensor, index: Tensor, fill: float = 0.0) -> Tensor:
    """[num_rows, ...] -> [len(index), ...] through the kernel."""
    from fastbert_kernels.gather_rows import gather_rows

    backend.ran(op, "triton")
    matrix = x.reshape(x.shape[0], x.shape[1:].numel())
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    return gather_rows(matrix, index.contiguous(), fill).view(index.shape[0], *x.shape[1:])


def _implementation(op: str, x: Tensor) -> str:
    beyond = ""
    if x.element_size() > 8:
        beyond = f"the Triton kernel moves elements of up to 8 bytes, not {x.dtype}"
    return backend.implementation(op, x, beyond_kernels=beyond, any_dtype=True)
