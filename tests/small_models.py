"""Small models of ours and of transformers with the same weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def small_config(**overrides: Any) -> BertConfig:
    return BertConfig(**{**SMALL, **overrides})


def hf_config(attn_implementation: str = "sdpa", **overrides: Any) -> transformers.BertConfig:
    config = transformers.BertConfig(**{**SMALL, **overrides})
    config._attn_implementation = attn_implementation
    return config


def spread_weights(model: torch.nn.Module, scale: float = 3.0) -> None:
    """Make weights large enough, and biases and norms uneven, so that every parameter matters."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(scale)


def model_pair(
    dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa", **overrides: Any
) -> tuple[BertForPreTraining, transformers.BertForPreTraining]:
    """(ours, transformers') in training mode with equal weights."""
    theirs = transformers.BertForPreTraining(hf_config(attn_implementation, **overrides))
    spread_weights(theirs)
    ours = BertForPreTraining(small_config(**overrides))
    ours.load_state_dict(theirs.state_dict())
    return ours.to(dtype).train(), theirs.to(dtype).train()


def gradient_gap(ours: torch.nn.Module, theirs: torch.nn.Module) -> float:
    """Largest difference between the gradients of parameters of one name, which must be the same names."""
    our_parameters, their_parameters = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert our_parameters.keys() == their_parameters.keys()
    gaps = []
    for name, parameter in our_parameters.items():
        expected = their_parameters[name].grad
        if expected is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None, name
        gaps.append((parameter.grad - expected).abs().max().item())
    return max(gaps)
