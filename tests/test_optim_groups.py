"""parameter_groups: exactly the biases and LayerNorms are exempt from decay (case F-04)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastbert
from fastbert.optim import Lamb, parameter_groups


def base_model(library: str) -> nn.Module:
    with torch.device("meta"):
        if library == "fastbert":
            return fastbert.BertForPreTraining(fastbert.BertConfig())
        transformers = pytest.importorskip("transformers")
        return transformers.BertForPreTraining(transformers.BertConfig())


@pytest.mark.parametrize("library", ["fastbert", "transformers"])
def test_base_has_128_exempt_and_78_decayed_tensors(library: str) -> None:
    model = base_model(library)
    decayed, exempt = parameter_groups(model, 0.01)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.01, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed_names = sorted(names[id(p)] for p in decayed["params"])
    exempt_names = sorted(names[id(p)] for p in exempt["params"])
    assert (len(decayed_names), len(exempt_names)) == (78, 128)
    assert set(decayed_names) | set(exempt_names) == set(names.values())

    layer_norms = [name for name in exempt_names if "LayerNorm" in name]
    assert len(layer_norms) == 26 * 2
    assert sum(name.endswith("bias") and "LayerNorm" not in name for name in exempt_names) == 76
    outside_layers = [name for name in decayed_names if ".layer." not in name]
    assert outside_layers == [
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight",
        "bert.embeddings.word_embeddings.weight",
        "bert.pooler.dense.weight",
        "cls.predictions.transform.dense.weight",
        "cls.seq_relationship.weight",
    ]


def test_the_decision_does_not_depend_on_names() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias_of_opinion = nn.Linear(3, 3)  # a matrix whose full name says bias
            self.norm = nn.LayerNorm(3)  # not called LayerNorm
            self.gamma = nn.Parameter(torch.ones(3))

    model = Model()
    decayed, exempt = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model.gamma), id(model.bias_of_opinion.weight)]
    assert {id(p) for p in exempt["params"]} == {
        id(model.bias_of_opinion.bias),
        id(model.norm.weight),
        id(model.norm.bias),
    }


def test_a_tied_weight_is_listed_and_stepped_once() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(6, 4), "decoder": nn.Linear(4, 6, bias=False)})
    model["decoder"].weight = model["table"].weight
    groups = parameter_groups(model, 0.01)
    assert [len(group["params"]) for group in groups] == [1, 0]
    optimizer = Lamb(groups, lr=0.1)
    before = model["table"].weight.detach().clone()
    model["decoder"](model["table"](torch.tensor([0, 1]))).square().sum().backward()
    optimizer.step()
    moved = (model["table"].weight - before).norm() / before.norm()
    assert moved.item() == pytest.approx(0.1, rel=1e-5)
