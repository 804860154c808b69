"""What the model is fed: a packed batch of whole sequences, or the same sequences padded.

`PackedBatch` lays sequences end to end in one token axis and marks them with `cu_seqlens`
(flash-attention's varlen layout), so no pad token exists. Its shapes depend only on the loader's settings:
what a batch leaves of its token budget is filler that no loss reads, and `cu_seqlens` ends in repeated
values, that is, in sequences of length zero.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a label that takes no part in a loss, as in torch.nn.functional.cross_entropy

_Batch = TypeVar("_Batch", "PackedBatch", "PaddedBatch")


def _to(batch: _Batch, device: torch.device | str, non_blocking: bool) -> _Batch:
    tensors: dict[str, Any] = {
        field.name: getattr(batch, field.name).to(device, non_blocking=non_blocking)
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), Tensor)
    }
    return replace(batch, **tensors)


@dataclass(frozen=True)
class PackedBatch:
    """Whole sequences end to end.

    T is the token budget, B the number of sequence slots, P the number of prediction slots. Filler tokens are
    sequences of their own (of at most `max_seqlen` tokens, so that their positions stay inside the table)
    whose `next_sentence_labels` are IGNORE_INDEX; unused prediction slots point at position 0 with label
    IGNORE_INDEX.
    """

    input_ids: Tensor  # [T] int64
    token_type_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restart at 0 in each sequence
    cu_seqlens: Tensor  # [B+1] int32, starts with 0, never decreases
    max_seqlen: int
    masked_positions: Tensor  # [P] int64, into the token axis
    masked_labels: Tensor  # [P] int64
    next_sentence_labels: Tensor  # [B] int64: 0 = B follows A, 1 = B is from another document
    num_tokens: int  # tokens that are not filler

    @property
    def num_slots(self) -> int:
        """Token positions the model computes, filler included."""
        return self.input_ids.numel()

    def num_sequences(self) -> int:
        """Sequences that are not filler (reads the tensor: call it before the batch goes to a GPU)."""
        starts, ends = self.cu_seqlens[:-1], self.cu_seqlens[1:]
        return int(((ends > starts) & (starts < self.num_tokens)).sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        return _to(self, device, non_blocking)

    def padded(self) -> PaddedBatch:
        """The same sequences, masks and labels as rows padded to the longest; filler is dropped.

        Shapes depend on the content, so this is for the CPU side of a loader.
        """
        rows = self.num_sequences()
        starts = self.cu_seqlens[:rows].long()
        seqlens = (self.cu_seqlens[1 : rows + 1] - self.cu_seqlens[:rows]).long()
        longest = int(seqlens.max()) if rows else 0
        attention_mask = torch.arange(longest) < seqlens[:, None]
        slots = attention_mask.flatten().nonzero().squeeze(1)  # [num_tokens] -> place in the B*S axis

        def spread(values: Tensor) -> Tensor:
            return (
                values.new_zeros(rows * longest)
                .index_copy_(0, slots, values[: self.num_tokens])
                .view(rows, longest)
            )

        asked = self.masked_labels != IGNORE_INDEX
        assert bool((starts == torch.cumsum(seqlens, 0) - seqlens).all()), "sequences must lie end to end"
        return PaddedBatch(
            input_ids=spread(self.input_ids),
            token_type_ids=spread(self.token_type_ids),
            attention_mask=attention_mask,
            masked_positions=slots[self.masked_positions[asked]],
            masked_labels=self.masked_labels[asked],
            next_sentence_labels=self.next_sentence_labels[:rows],
            num_tokens=self.num_tokens,
        )


@dataclass(frozen=True)
class PaddedBatch:
    """The sequences of a PackedBatch as rows, padded to `[B, S]`: the textbook form, for comparison."""

    input_ids: Tensor  # [B, S] int64
    token_type_ids: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] bool, True = token
    masked_positions: Tensor  # [P] int64, into the flattened B*S axis
    masked_labels: Tensor  # [P] int64
    next_sentence_labels: Tensor  # [B] int64
    num_tokens: int

    @property
    def num_slots(self) -> int:
        """Token positions the model computes, padding included."""
        return self.input_ids.numel()

    def num_sequences(self) -> int:
        """Rows."""
        return self.input_ids.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PaddedBatch:
        return _to(self, device, non_blocking)
