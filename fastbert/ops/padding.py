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


def pad_rows(rows: Tensor, indices: Tensor | None, batch_size: int, seqlen: int) -> Tensor:
    """rows [T, ...] -> [batch_size, seqlen, ...], exactly 0 where no row belongs; a view if indices is None."""
    if indices is not None:
        slots = rows.new_zeros(batch_size * seqlen, *rows.shape[1:])
        rows = slots.index_copy(0, indices, rows)
    return rows.view(batch_size, seqlen, *rows.shape[1:])
