"""Inference on a padded batch, as a user of transformers.BertModel has it: ids and an attention mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.reference import ReferenceBert
from benchmarks.workloads import VOCAB_SIZE, typical_batch, wikipedia_512
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining


def test_encode_at_wikipedia_512(benchmark: BenchmarkFixture, in_turns: Callable[..., None]) -> None:
    transformers = pytest.importorskip("transformers")
    config = BertConfig.named("mini", vocab_size=VOCAB_SIZE)
    ours = BertForPreTraining(config).eval()
    reference = ReferenceBert(config).eval()
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**config.to_diff_dict())).eval()
    for other in (reference, theirs):
        other.load_state_dict(ours.state_dict())

    batch = typical_batch(wikipedia_512(tokens_per_batch=4096)).padded()
    ids, types, mask = batch.input_ids, batch.token_type_ids, batch.attention_mask
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "fastbert": lambda: ours.bert(ids, mask, types).last_hidden_state,
        "reference": lambda: reference.bert(ids, types, mask),
        "transformers": lambda: theirs.bert(ids, mask, types).last_hidden_state,
    }
    with torch.inference_mode():
        expected = sides["reference"]()[mask]
        for side in sides.values():
            torch.testing.assert_close(side()[mask], expected, rtol=0, atol=2e-5)
        benchmark.extra_info |= {"tokens": batch.num_tokens, "padded_slots": batch.num_slots}
        in_turns(sides, rounds=5, amount=batch.num_tokens, unit="tokens")
