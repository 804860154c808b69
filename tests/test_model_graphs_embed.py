"""Texts -> vectors, and texts -> labels, on static buffers: the numbers of the plain path."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fastbert import BertConfig, BertForSequenceClassification
from fastbert.inference import BucketGraphs
from fastbert.ops import backend
from fastbert.sentence_encoder import POOLINGS, Dense, Normalize, SentenceEncoder, load_encoder
from fastbert.tasks.prediction import Computing, Predictor, read_record
from tests.minilm import TEXTS, minilm_folder
from tests.tiny_bert import tiny_folder, write_csv

# one text of a single word, Korean, longer than a size
ALL = [*TEXTS, "좋다", "good", "the film was great " * 9]


@pytest.fixture(autouse=True)
def _no_refusals() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", backend.EagerFallbackWarning)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def vectors(encoder: SentenceEncoder, texts: list[str], tokens_per_batch: int | None = None) -> np.ndarray:
    return np.concatenate(list(encoder.encode(texts, tokens_per_batch=tokens_per_batch)))


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling(folder, recorder, pooling):
    encoder = load_encoder(folder)
    encoder.poolings = (pooling,)
    expected = {budget: vectors(encoder, ALL, budget) for budget in (1, 70, 2048)}
    encoder.graphs = BucketGraphs(record=recorder)
    for budget, theirs in expected.items():
        assert_close(vectors(encoder, ALL, budget), theirs)
    assert len(encoder.graphs) >= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(folder, recorder, dtype):
    encoder = load_encoder(folder, dtype=dtype)
    expected = vectors(encoder, ALL)
    encoder.graphs = BucketGraphs(record=recorder)
    np.testing.assert_allclose(vectors(encoder, ALL), expected, atol=0.02)


def test_every_number_of_texts(folder, recorder):
    encoder = load_encoder(folder)
    texts = [TEXTS[i % len(TEXTS)] for i in range(20)]
    expected = vectors(encoder, texts)
    encoder.graphs = BucketGraphs(record=recorder)
    for count in (1, 2, 7, 8, 9, 20, 1):
        assert_close(vectors(encoder, texts[:count]), expected[:count])
    assert list(encoder.encode([])) == []


def test_what_makes_a_vector_may_change(folder, recorder):
    encoder = load_encoder(folder)
    encoder.graphs = BucketGraphs(record=recorder)
    seen = [vectors(encoder, ALL)]
    for change in (
        lambda: setattr(encoder, "poolings", ("mean", "cls")),
        lambda: setattr(encoder, "after", nn.Sequential(Normalize()).eval()),
        lambda: encoder.after.insert(0, Dense(64, 5, True, nn.Tanh()).eval()),
        lambda: encoder.model.load_state_dict({n: 2 * t for n, t in encoder.model.state_dict().items()}),
        lambda: setattr(encoder, "model", load_encoder(folder).model),
    ):
        change()
        ours, graphs = vectors(encoder, ALL), encoder.graphs
        encoder.graphs = None
        assert_close(ours, vectors(encoder, ALL))
        encoder.graphs = graphs
        assert ours.shape != seen[-1].shape or not np.allclose(ours, seen[-1])
        seen.append(ours)


def test_three_threads_share_an_encoder(folder, recorder):
    encoder = load_encoder(folder)
    parts = [ALL[0::3], ALL[1::3], ALL[2::3]]
    expected = [vectors(encoder, part) for part in parts]
    encoder.graphs = BucketGraphs(record=recorder)
    found: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}

    def work(index: int) -> None:
        found[index] = [vectors(encoder, parts[index]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, results in found.items():
        assert len(results) == 10
        for result in results:
            assert_close(result, expected[index])


def test_the_real_model(recorder):
    encoder = load_encoder(minilm_folder())
    expected = vectors(encoder, TEXTS)
    encoder.graphs = BucketGraphs(record=recorder)
    for _ in range(2):
        np.testing.assert_allclose(vectors(encoder, TEXTS), expected, atol=2e-6)


def test_only_a_gpu_has_graphs(folder):
    assert load_encoder(folder).graphs is None


# ---- predict


def test_predictions(tmp_path, recorder):
    model_folder = tiny_folder(tmp_path / "model", num_labels=3)
    config = BertConfig.from_pretrained(model_folder)
    BertForSequenceClassification(config).save_pretrained(model_folder)
    path = write_csv(tmp_path / "texts.csv", ["text"], [[text] for text in ALL if text])
    predictor = Predictor.load(read_record(model_folder, print), Computing(tokens_per_batch=100), print)
    expected = list(predictor.rows(path))
    bert = predictor.stepper.model.base_model
    assert bert.graphs is None  # as nowhere but on a GPU
    bert.graphs = BucketGraphs(record=recorder)
    for ours, theirs in zip(predictor.rows(path), expected, strict=True):
        assert ours["label"] == theirs["label"]
        assert ours["probabilities"] == pytest.approx(theirs["probabilities"], abs=2e-6)
    assert len(bert.graphs) > 1
