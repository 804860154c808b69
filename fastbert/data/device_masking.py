"""Masked-LM targets chosen on the device, in the distribution of `masking`: the loader then sends plain text.

Tensor arithmetic with static shapes: nothing waits for the device, and a CUDA graph may capture it. Random
numbers are Philox's at (seed, number of the batch, place in it), so the same batch is masked alike on every
device and after a resume; nothing is kept between batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.batch import IGNORE_INDEX, PackedBatch, PaddedBatch
from fastbert.data.loader import LoaderSettings, Vocabulary
from fastbert.data.masking import KEEP_SHARE, MASK_SHARE, num_to_predict
from fastbert.ops.philox import philox4x32

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class DeviceMasking:
    """Masks batches that a loader built with `masks=False`.

    What differs from the loader's masks: special tokens are known by their ids, so one that stands in the
    text itself is not asked either; sequences that do not begin with [CLS] are filler; words are not kept
    whole.
    """

    vocabulary: Vocabulary
    mask_prob: float
    max_predictions: int | None
    num_predictions: int  # P: slots of a batch, the loader's `Shapes.num_predictions`, which none exceeds
    seed: int
    ordinary: Tensor  # the vocabulary's, on the device

    @classmethod
    def of(
        cls, settings: LoaderSettings, vocabulary: Vocabulary, num_predictions: int, device: torch.device
    ) -> DeviceMasking:
        """As the loader of these settings would. ValueError for whole words, whose limits ids do not tell."""
        if settings.whole_word:
            raise ValueError("whole words are masked by the loader: the device sees ids, not words")
        ordinary = torch.from_numpy(vocabulary.ordinary).to(device)
        return cls(
            vocabulary, settings.mask_prob, settings.max_predictions, num_predictions, settings.seed, ordinary
        )

    def __call__(self, batch: PackedBatch | PaddedBatch, number: int | Tensor) -> PackedBatch | PaddedBatch:
        """The batch, on the device already, with input_ids masked, masked_positions and masked_labels [P].

        `number`, an integer or int64 [1] on the device, tells batches of a run apart: the same number gives
        the same masks. Unused slots have position 0 and IGNORE_INDEX. Deterministic.
        """
        ids = batch.input_ids.flatten()
        if isinstance(batch, PackedBatch):
            cu_seqlens = batch.cu_seqlens
            lengths = cu_seqlens.diff()
            candidate = torch.ones_like(ids, dtype=torch.bool)
        else:
            rows, width = batch.input_ids.shape
            cu_seqlens = torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, device=ids.device)
            lengths = batch.attention_mask.sum(dim=1)
            candidate = batch.attention_mask.flatten()
        v = self.vocabulary
        for special in (v.cls, v.sep, v.mask, v.unk):
            candidate = candidate & (ids != special)
        if not isinstance(number, Tensor):
            number = torch.full((1,), number, device=ids.device)
        key = (number, torch.full((1,), self.seed, device=ids.device))
        seen, positions, labels = mask_tokens(
            ids, cu_seqlens, candidate, self._wanted(ids, cu_seqlens, lengths), *key,
            num_predictions=self.num_predictions, mask_id=v.mask, ordinary=self.ordinary,
        )  # fmt: skip
        return replace(
            batch, input_ids=seen.view_as(batch.input_ids), masked_positions=positions, masked_labels=labels
        )

    def _wanted(self, ids: Tensor, cu_seqlens: Tensor, lengths: Tensor) -> Tensor:
        """Targets of each sequence, int64 [B]: `masking.num_to_predict`, and none for filler."""
        wanted = (lengths.double() * self.mask_prob).round().clamp(min=1).long()
        if self.max_predictions is not None:
            wanted = wanted.clamp(max=self.max_predictions)
        first = ids[cu_seqlens[:-1].long().clamp(max=ids.shape[0] - 1)]
        return wanted.masked_fill((first != self.vocabulary.cls) | (lengths == 0), 0)

    def num_asked(self, seqlens: np.ndarray) -> int:
        """Tokens that batches of such sequences ask for, where there are candidates enough."""
        return int(num_to_predict(seqlens, self.mask_prob, self.max_predictions).sum())


def mask_tokens(
    input_ids: Tensor,
    cu_seqlens: Tensor,
    candidate: Tensor,
    wanted: Tensor,
    number: Tensor,
    seed: Tensor,
    *,
    num_predictions: int,
    mask_id: int,
    ordinary: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(what the model sees [T], masked_positions [P] ascending, masked_labels [P]), all int64.

    Args:
        input_ids: [T] int64, sequences end to end.
        cu_seqlens: [B+1] int32, where they begin and end.
        candidate: [T] bool, tokens that may be asked.
        wanted: [B] int64, targets of each; fewer are chosen where there are fewer candidates.
        number, seed: [1] int64 each, on the device: what the random numbers depend on, beside the place.
        num_predictions: P; targets beyond it are left out, those at the end.
        ordinary: [..] int64, ids that a random replacement may take.

    Unused slots have position 0 and IGNORE_INDEX. 80 % of the targets are shown as mask_id, 10 % as an
    ordinary id, 10 % as they are. Shapes depend on shapes only.
    """
    num_tokens, last = input_ids.shape[0], cu_seqlens.shape[0] - 2
    place = torch.arange(num_tokens, device=input_ids.device)
    words = philox4x32(
        (place, number & _WORD, (number >> 32) & _WORD, number & 0), (seed & _WORD, (seed >> 32) & _WORD)
    )
    order_bits, share_bits, id_bits = (word & _WORD for word in words[:3])

    # a random order inside each sequence, with those that may not be asked behind the others. Sequences stay
    # where they are, so slot t of the order belongs to the sequence of token t
    sequence = torch.searchsorted(cu_seqlens[1:], place.int(), right=True)
    candidate = candidate & (sequence <= last)
    sequence = sequence.clamp(max=last)
    order = ((sequence << 33) | ((~candidate).long() << 32) | order_bits).argsort(stable=True)
    rank = place - cu_seqlens[sequence]
    chosen = (rank < wanted[sequence]) & candidate[order]

    # the chosen places in ascending order, and behind them num_tokens, which is none
    places = torch.where(chosen, order, num_tokens).sort().values[:num_predictions]
    places = F.pad(places, (0, num_predictions - places.shape[0]), value=num_tokens)
    is_used = places < num_tokens
    positions = places.masked_fill(~is_used, 0)

    original, share = input_ids[positions], share_bits[positions]
    drawn = ordinary[(id_bits[positions] * ordinary.shape[0]) >> 32]
    is_masked = share < int(MASK_SHARE * 2**32)
    is_drawn = share >= int((MASK_SHARE + (1 - MASK_SHARE) * KEEP_SHARE) * 2**32)
    shown = torch.where(is_drawn, drawn, original).masked_fill(is_masked, mask_id)
    # unused slots, all of them at position 0, write what stands there
    seen = input_ids.index_copy(0, positions, torch.where(is_used, shown, input_ids[:1]))
    return seen, positions, original.masked_fill(~is_used, IGNORE_INDEX)
