"""Graphs of inference through the kernels: on a GPU real ones; elsewhere, in Triton's interpreter, calls on
the same static buffers, with the same filler and empty slots.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert.batch import PackedBatch
from fastbert.inference import BucketGraphs
from fastbert.modeling import BertModel
from fastbert.ops import backend
from fastbert.train.capture import capture
from tests.kernel_testing import CAN_LAUNCH, DEVICE, in_the_parent_only, run_interpreted
from tests.recorded_operators import record_calls
from tests.test_model_kernels import batches, tiny_model

ON_GPU = DEVICE == "cuda"
ATOL = {torch.float32: 2e-4 if ON_GPU else 2e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
# a batch, another one of its size, one whose sequences are too long for it, one of too many tokens
SHAPES = [[33, 1, 7], [20, 30], [3, 66], [40, 40, 30, 9]] if ON_GPU else [[33, 1, 7], [20, 30]]


def graphed(dtype: torch.dtype = torch.float32) -> BertModel:
    layers = 2 if ON_GPU else 1
    model = tiny_model(dtype, max_position_embeddings=80, num_hidden_layers=layers).bert.eval()
    model.graphs = BucketGraphs(record=capture if ON_GPU else record_calls)
    return model


def check(model: BertModel, batch: PackedBatch) -> None:
    with torch.inference_mode():
        ours = model(batch)
        graphs, model.graphs = model.graphs, None
        theirs = model(batch)
        model.graphs = graphs
    for x, y in zip(ours.to_tuple(), theirs.to_tuple()):
        torch.testing.assert_close(x, y, atol=ATOL[x.dtype], rtol=0)


@in_the_parent_only
def test_graphs_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestGraphs")


class TestGraphs:
    __test__ = CAN_LAUNCH

    @pytest.fixture(autouse=True)
    def _at_once_through_the_kernels(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(BucketGraphs, "_comes_again", lambda self, key: True)
        with backend.use("triton"), warnings.catch_warnings():
            warnings.simplefilter("error", backend.EagerFallbackWarning)
            yield

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16][: 3 if ON_GPU else 1])
    def test_every_size(self, dtype: torch.dtype) -> None:
        model = graphed(dtype)
        for seqlens in SHAPES:
            check(model, batches(seqlens)[0])
        assert model.graphs is not None and len(model.graphs) == len(SHAPES) - 1
        check(model, batches([7, 12], filler=9, empty_ends=2)[0])

    @pytest.mark.gpu  # elsewhere tests/test_model_graphs.py does it quicker
    def test_changed_weights(self) -> None:
        model, batch = graphed(), batches([33, 1, 7])[0]
        check(model, batch)
        with torch.no_grad():
            model.encoder.layer[0].output.dense.weight.mul_(2)
        check(model, batch)
        check(model.half(), batch)

    @pytest.mark.gpu
    def test_threads_with_streams_of_their_own(self) -> None:
        errors: list[Exception] = []
        model = graphed()
        shapes = [[33, 1, 7], [20, 30], [30, 20]]

        def work(seqlens: list[int]) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    batch = batches(seqlens)[0]
                    for _ in range(20):
                        right = expected[seqlens[0]]
                        torch.testing.assert_close(outputs(batch), right, atol=ATOL[right.dtype], rtol=0)
            except Exception as error:
                errors.append(error)

        def outputs(batch: PackedBatch) -> torch.Tensor:
            with torch.inference_mode():
                return model(batch).last_hidden_state.clone()

        graphs, model.graphs = model.graphs, None
        expected = {seqlens[0]: outputs(batches(seqlens)[0]) for seqlens in shapes}
        torch.accelerator.synchronize()
        model.graphs = graphs
        threads = [threading.Thread(target=work, args=(seqlens,)) for seqlens in shapes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
