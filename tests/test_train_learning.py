"""Case G-03: only learning shows a fault in the wiring of data, mask, positions or heads."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from fastbert import AdamW, BertConfig, BertForPreTraining
from fastbert.data.loader import LoaderSettings, PackedLoader, Vocabulary, WindowBuilder
from fastbert.optim import learning_rate, parameter_groups
from fastbert.train.trainer import Totals, Trainer
from tests.documents import ListStore

STEPS, TOKENS = 600, 50
SPECIALS = 5


def chains(num: int) -> ListStore:
    """Documents that walk a permutation of 50 tokens: a sentence of 7 and one of 8 that goes on from it."""
    rng = np.random.default_rng(0)
    successor = rng.permutation(TOKENS)
    documents = []
    for _ in range(num):
        token, walk = int(rng.integers(TOKENS)), []
        for _ in range(15):
            walk.append(SPECIALS + token)
            token = int(successor[token])
        documents.append([walk[:7], walk[7:]])
    return ListStore(documents)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_permutation_chains_are_learned(packed: bool) -> None:
    torch.manual_seed(0)
    store = chains(4000)
    vocabulary = Vocabulary(cls=2, sep=3, mask=4, unk=1, ordinary=np.arange(SPECIALS, SPECIALS + TOKENS))
    settings = LoaderSettings(seq_len=18, tokens_per_batch=32 * 18, seed=1)
    loader = PackedLoader(WindowBuilder(store, np.arange(len(store)), vocabulary, settings))
    config = BertConfig(
        vocab_size=SPECIALS + TOKENS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=18,
    )
    model = BertForPreTraining(config)
    trainer = Trainer(
        model,
        AdamW(parameter_groups(model, 0.01), lr=2e-3),
        lambda k: learning_rate("linear", k, peak=2e-3, total=STEPS, warmup=0.1),
    )
    losses = []
    for batch in islice(loader, STEPS):
        totals = Totals()
        trainer.train_step([batch if packed else batch.padded()], totals)
        losses.append(totals.metrics())
    first, last = losses[0], losses[-20:]
    assert first["mlm_loss"] == pytest.approx(np.log(SPECIALS + TOKENS), abs=0.2)
    assert first["nsp_loss"] == pytest.approx(np.log(2), abs=0.1)
    mlm, nsp = (float(np.mean([row[name] for row in last])) for name in ("mlm_loss", "nsp_loss"))
    assert mlm < 1.6, f"stuck at {mlm:.2f}: above 3 the wiring is broken"
    assert nsp < 0.5
