"""Random sequences as a PackedBatch and as the PaddedBatch of the same sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastbert.batch import IGNORE_INDEX, PackedBatch, PaddedBatch


def make_batches(
    seqlens: Sequence[int],
    *,
    vocab_size: int,
    seed: int = 0,
    mask_share: float = 0.15,
    filler: int = 0,
    empty_ends: int = 0,
    unused_slots: int = 0,
    pad_to: int | None = None,
) -> tuple[PackedBatch, PaddedBatch]:
    """Sequences of the given lengths with random ids, segments, labels and next-sentence labels.

    `filler` tokens follow as sequences that no loss reads, cut to the longest length; `empty_ends` repeats of
    the last cu_seqlens value and `unused_slots` prediction slots (position 0, IGNORE_INDEX) come after them.
    The PaddedBatch holds the same sequences, masked tokens and labels, padded to `pad_to` with id 0.
    """
    generator = torch.Generator().manual_seed(seed)
    max_seqlen = max(seqlens)
    fillers = [min(max_seqlen, filler - start) for start in range(0, filler, max_seqlen)]
    total = sum(seqlens) + sum(fillers)
    starts = torch.tensor([0, *seqlens, *fillers]).cumsum(0)
    all_lengths = torch.tensor([*seqlens, *fillers])
    position_ids = torch.arange(total) - torch.repeat_interleave(starts[:-1], all_lengths)
    # ids 0..4 are the special tokens, 0 is the pad
    token_type_ids = (position_ids >= torch.repeat_interleave(all_lengths // 2, all_lengths)).long()
    num_real = sum(seqlens)
    input_ids = torch.zeros(total, dtype=torch.long)
    input_ids[:num_real] = torch.randint(5, vocab_size, (num_real,), generator=generator)

    num_masked = max(1, round(mask_share * num_real))
    masked_positions = torch.randperm(num_real, generator=generator)[:num_masked].sort().values
    masked_labels = torch.randint(5, vocab_size, (num_masked,), generator=generator)
    next_sentence = torch.randint(0, 2, (len(seqlens),), generator=generator)
    packed = PackedBatch(
        input_ids=input_ids,
        token_type_ids=token_type_ids,
        position_ids=position_ids,
        cu_seqlens=torch.cat([starts, starts[-1:].repeat(empty_ends)]).int(),
        max_seqlen=max_seqlen,
        masked_positions=torch.cat([masked_positions, torch.zeros(unused_slots, dtype=torch.long)]),
        masked_labels=torch.cat([masked_labels, torch.full((unused_slots,), IGNORE_INDEX)]),
        next_sentence_labels=torch.cat(
            [next_sentence, torch.full((len(fillers) + empty_ends,), IGNORE_INDEX)]
        ),
        num_tokens=num_real,
    )

    width = pad_to or max_seqlen
    rows = torch.repeat_interleave(torch.arange(len(seqlens)), torch.tensor(seqlens))
    slots = rows * width + position_ids[:num_real]
    padded_ids, padded_types = (torch.zeros(len(seqlens) * width, dtype=torch.long) for _ in range(2))
    padded_ids[slots] = input_ids[:num_real]
    padded_types[slots] = token_type_ids[:num_real]
    attention_mask = torch.zeros(len(seqlens) * width, dtype=torch.bool)
    attention_mask[slots] = True
    shape = (len(seqlens), width)
    padded = PaddedBatch(
        input_ids=padded_ids.view(shape),
        token_type_ids=padded_types.view(shape),
        attention_mask=attention_mask.view(shape),
        masked_positions=slots[masked_positions],
        masked_labels=masked_labels,
        next_sentence_labels=next_sentence,
        num_tokens=num_real,
    )
    return packed, padded


def dense_labels(batch: PaddedBatch) -> torch.Tensor:
    """Labels [B, S] with IGNORE_INDEX elsewhere, as transformers takes them."""
    labels = torch.full_like(batch.input_ids, IGNORE_INDEX)
    labels.view(-1)[batch.masked_positions] = batch.masked_labels
    return labels
