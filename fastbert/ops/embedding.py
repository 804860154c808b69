"""word + token type + position embeddings, with the bounds checked before anything is read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def check_ids(name: str, ids: Tensor, limit_name: str, limit: int) -> None:
    """IndexError naming both numbers if an id is outside [0, limit).

    Only where looking costs no device synchronisation, that is on CPU; CUDA lookups assert on the device.
    """
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= limit:
        outside = low if low < 0 else high
        raise IndexError(
            f"{name} holds {outside}, the table has {limit_name} = {limit} rows (0..{limit - 1})"
        )


def embed(
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    word_weight: Tensor,
    type_weight: Tensor,
    position_weight: Tensor,
    padding_idx: int | None = None,
) -> Tensor:
    """Sum of the three lookups for ids [...] and tables [V, H], [types, H], [positions, H] -> [..., H].

    The word row `padding_idx` gets no gradient. IndexError, naming both numbers, for an id outside its table.
    """
    check_ids("input_ids", input_ids, "vocab_size", word_weight.shape[0])
    check_ids("token_type_ids", token_type_ids, "type_vocab_size", type_weight.shape[0])
    check_ids("position_ids", position_ids, "max_position_embeddings", position_weight.shape[0])
    words = F.embedding(input_ids, word_weight, padding_idx)
    return words + F.embedding(token_type_ids, type_weight) + F.embedding(position_ids, position_weight)
