"""bf16 weights that are rounded from fp32 ones, which the optimizer keeps: its `master` weights.

Checkpoints hold the fp32 weights and moments, whatever the precision: a run can go on in another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def lower_weights(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Make the weights of an fp32 model `dtype`, with master weights that have lost nothing."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["master"] = param.detach().to(torch.float32, copy=True)
    model.to(dtype)


def full_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The model's state dict in fp32: master weights where there are some. Tied weights share storage."""
    weights = model.state_dict()
    full: dict[Tensor, Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param not in full:
            master = optimizer.state[param].get("master") if param in optimizer.state else None
            full[param] = param.detach().float() if master is None else master
        weights[name] = full[param]
    return weights


def load_full_weights(model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor]) -> None:
    """The other way round; load the optimizer's state before."""
    model.load_state_dict(weights)
    for name, param in model.named_parameters():
        if param.dtype in (torch.bfloat16, torch.float16):
            optimizer.state[param]["master"] = weights[name].to(param.device, torch.float32, copy=True)


def state_without_masters(optimizer: Any) -> dict[str, Any]:
    """The optimizer's state dict without the weights, which a checkpoint has already."""
    state: dict[str, Any] = optimizer.state_dict()
    state["state"] = {
        key: {name: value for name, value in values.items() if name != "master"}
        for key, values in state["state"].items()
    }
    return state
