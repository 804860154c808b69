"""accelerate() inside SentenceTransformer and CrossEncoder: the same embeddings and scores."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fastbert.data.tokenizer import save_tokenizer, train_tokenizer
from fastbert.integrations import accelerate
from tests.minilm import TEXTS, minilm_folder
from tests.small_models import hf_config, spread_weights

sentence_transformers = pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a tokenizer, as transformers stores them."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=300)
    torch.manual_seed(0)
    model = transformers.BertModel(hf_config(vocab_size=tokenizer.get_vocab_size()))
    spread_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def sentence_transformer(folder: Path, pooling: str = "mean") -> Any:
    modules = sentence_transformers.sentence_transformer.modules
    transformer = sentence_transformers.base.modules.Transformer(str(folder), max_seq_length=48)
    return sentence_transformers.SentenceTransformer(
        modules=[transformer, modules.Pooling(64, pooling), sentence_transformers.base.modules.Normalize()],
        device="cpu",
    )


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_embeddings_are_equal(folder, side, pooling):
    theirs = sentence_transformer(folder, pooling)
    theirs.tokenizer.padding_side = side
    ours = copy.deepcopy(theirs)
    assert len(accelerate(ours).accelerated) == 1
    for batch_size in (1, 3, 256):
        x, y = (model.encode(TEXTS * 3, batch_size=batch_size) for model in (ours, theirs))
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=0)
    assert x.std() > 0.01


def test_token_embeddings_are_equal(folder):
    theirs = sentence_transformer(folder)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    options = {"output_value": "token_embeddings", "batch_size": 4}
    for x, y in zip(ours.encode(TEXTS, **options), theirs.encode(TEXTS, **options), strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def test_saved_models_are_plain_and_equal(folder, tmp_path):
    model = sentence_transformer(folder)
    expected = model.encode(TEXTS)
    handle = accelerate(model)
    model.save_pretrained(str(tmp_path))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(loaded.encode(TEXTS), expected, atol=2e-5, rtol=0)
    handle.restore()
    assert np.array_equal(model.encode(TEXTS), expected)


def test_cross_encoder_scores_are_equal(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the classifier is new, and says so
        theirs = sentence_transformers.CrossEncoder(str(folder), num_labels=1, device="cpu")
    ours = copy.deepcopy(theirs)
    assert len(accelerate(ours).accelerated) == 1
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    x, y = (model.predict(pairs, batch_size=4) for model in (ours, theirs))
    np.testing.assert_allclose(x, y, atol=2e-5, rtol=0)
    assert len(set(np.round(y, 6))) > 1


def test_minilm_embeddings_are_equal():
    theirs = sentence_transformers.SentenceTransformer(str(minilm_folder()), device="cpu")
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    for batch_size in (1, 256):
        x, y = (model.encode(TEXTS, batch_size=batch_size) for model in (ours, theirs))
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=0)
