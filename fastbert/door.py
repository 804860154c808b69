"""A batch on its way into an encoder, and its results on their way out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import ops
from fastbert.layers import Layout
from fastbert.ops import PaddedLayout


@dataclass
class Tokens:
    """The kept tokens of a batch end to end, before the embeddings."""

    ids: Tensor | None  # [T]
    types: Tensor  # [T]
    positions: Tensor  # [T]
    embeds: Tensor | None  # [T, H], in the place of ids
    cu_seqlens: Tensor
    max_seqlen: int
    shape: tuple[int, int] | None = None  # as in Door
    indices: Tensor | None = None


@dataclass
class Door:
    """A batch on its way in: embedded, laid out, and with the way back to the caller's shape."""

    embedded: Tensor  # [T, H] or [B, S, H]
    layout: Layout
    shape: tuple[int, int] | None  # the caller's [B, S]; None for a PackedBatch
    indices: Tensor | None  # [T] kept tokens in the flattened B*S axis, if some are left out

    def to_caller(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Rows that lie like `embedded` -> [B, S, ...], `fill` at padding, or [T, ...] for a PackedBatch."""
        if self.shape is None or isinstance(self.layout, PaddedLayout):
            return rows
        return ops.pad_rows(rows, self.indices, *self.shape, fill=fill)

    def has_unknown_size(self) -> bool:
        """Whether torch.compile traces a graph for any number of kept tokens."""
        return self.indices is not None and torch.compiler.is_compiling()

    def first_rows(self) -> Tensor | None:
        """[B]: the row of each sequence's first token, any for one that has none.

        None where every position is computed, and where there is or may be no token at all.
        """
        if isinstance(self.layout, PaddedLayout) or self.has_unknown_size() or self.embedded.shape[0] == 0:
            return None
        return self.layout.cu_seqlens[:-1].long().clamp(max=self.embedded.shape[0] - 1)

    def first_tokens(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """[B, H]: each sequence's first token, 0 for a sequence that has none.

        `rows` are `first_rows`, if `hidden` is only these.
        """
        if isinstance(self.layout, PaddedLayout):
            return hidden[:, 0]
        cu_seqlens = self.layout.cu_seqlens
        if rows is None:
            if self.has_unknown_size():
                hidden = F.pad(hidden, (0, 0, 0, 1))  # so that there is a row in any case
            elif hidden.shape[0] == 0:
                return hidden.new_zeros(cu_seqlens.shape[0] - 1, hidden.shape[1])
            hidden = hidden.index_select(0, cu_seqlens[:-1].long().clamp(max=hidden.shape[0] - 1))
        is_empty = cu_seqlens.diff() == 0
        return hidden.masked_fill(is_empty[:, None], 0.0)


@dataclass
class Encoded:
    """What the heads get."""

    hidden: Tensor  # lies like door.embedded; of a head that reads `pooled` alone perhaps only first tokens
    pooled: Tensor | None  # [B, H]
    hidden_states: tuple[Tensor, ...] | None  # in the caller's shape
    attentions: tuple[Tensor, ...] | None
    door: Door
