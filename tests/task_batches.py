"""Features of a task as one packed batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastbert.batch import PackedBatch
from fastbert.tasks.task import Feature


def packed_batch(features: Sequence[Feature]) -> PackedBatch:
    lengths = torch.tensor([len(feature.input_ids) for feature in features])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(lengths.sum())
    nothing = torch.zeros(0, dtype=torch.long)
    return PackedBatch(
        input_ids=torch.tensor([i for feature in features for i in feature.input_ids]),
        token_type_ids=torch.tensor([i for feature in features for i in feature.token_type_ids]),
        position_ids=torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], lengths),
        cu_seqlens=cu_seqlens.int(),
        max_seqlen=int(lengths.max()),
        masked_positions=nothing,
        masked_labels=nothing,
        next_sentence_labels=torch.zeros(len(features), dtype=torch.long),
        num_tokens=total,
    )
