"""What a layer keeps for its backward pass, counted on tensors without memory through its operators."""

from __future__ import annotations

import pytest
import torch

from fastbert.config import BertConfig
from fastbert.layers import BertLayer
from fastbert.ops import SequenceLayout, backend

T, HIDDEN, HEADS = 4096, 1024, 16
# bytes of a token and unit of hidden size that a layer may keep in bf16; nothing else is kept
BUDGET = 34


@pytest.fixture
def kernels_on_meta(monkeypatch):
    """Tensors on "meta" stand for ones on a GPU: operators only say what they return."""
    monkeypatch.setattr(backend, "implementation", lambda *args, **kwargs: "triton")
    monkeypatch.setattr(backend, "kernels_expected", lambda device: True)
    with backend.use("triton"), torch.device("meta"):
        yield


def saved_by_a_layer() -> tuple[list[torch.Tensor], torch.Tensor]:
    """(each tensor kept for the backward pass, once, without the parameters; the input)."""
    config = BertConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=4 * HIDDEN)
    layer = BertLayer(config).to(torch.bfloat16).train()
    hidden = torch.empty(T, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    layout = SequenceLayout.build(torch.zeros(33, dtype=torch.int32), 512, T)
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, layout).sum()
    parameters = {p.untyped_storage()._cdata for p in layer.parameters()}
    return [t for storage, t in saved.items() if storage not in parameters], hidden


@pytest.mark.usefixtures("kernels_on_meta")
def test_a_layer_keeps_what_its_budget_allows():
    saved, hidden = saved_by_a_layer()
    kept = {}
    for tensor in saved:
        kind = (tuple(tensor.shape), tensor.dtype)
        kept[kind] = kept.get(kind, 0) + 1
    matrices = {shape: n for (shape, dtype), n in kept.items() if dtype == torch.bfloat16}
    assert matrices == {
        # the input, the attention's output, its product, the first norm, the feed-forward block's product:
        # the other half of what a norm adds up is one of these
        (T, HIDDEN): 5,
        (T, 3, HEADS, HIDDEN // HEADS): 1,  # query, key, value
        (T, 4 * HIDDEN): 2,  # before and behind the activation
    }
    statistics = sum(t.nbytes for t in saved if t.dtype == torch.float32)
    assert statistics == 4 * T * HEADS + 2 * 2 * 4 * T  # lse; mean and rstd of two norms
    total = sum(t.nbytes for t in saved)
    assert 32 * T * HIDDEN < total <= BUDGET * T * HIDDEN
    assert any(t.untyped_storage()._cdata == hidden.untyped_storage()._cdata for t in saved)
