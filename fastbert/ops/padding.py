"""Between rows padded to [B, S] and kept tokens end to end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unpad_indices(keep: Tensor) -> tuple[Tensor, Tensor]:
    """keep [B, S] bool -> (indices [T] int64 into the flattened B*S axis, cu_seqlens [B+1] int32).

    Reads the number of kept tokens from the device once.
    """
    seqlens = keep.sum(dim=-1, dtype=torch.int32)
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return keep.flatten().nonzero().squeeze(-1), cu_seqlens


def pad_rows(rows: Tensor, indices: Tensor | None, batch_size: int, seqlen: int, fill: float = 0.0) -> Tensor:
    """rows [T, ...] -> [batch_size, seqlen, ...], `fill` where no row goes; a view without indices."""
    if indices is not None:
        slots = rows.new_full((batch_size * seqlen, *rows.shape[1:]), fill)
        rows = slots.index_copy(0, indices, rows)
    return rows.view(batch_size, seqlen, *rows.shape[1:])


def kept_tokens(
    mask: Tensor | None, batch_size: int, seqlen: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """(indices of the kept tokens or None for all, cu_seqlens)."""
    if mask is not None:
        indices, cu_seqlens = unpad_indices(mask)
        if indices.shape[0] != batch_size * seqlen:
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
