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


def full_weights(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True) -> dict[str, Tensor]:
    """The model's state dict in fp32: master weights where there are some. Tied weights share storage.

    A sharded model is put together weight by weight, which all ranks have to do, on the host of those that
    `keep` it; the others get an empty dict.
    """
    weights = model.state_dict()
    full: dict[Tensor, Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param not in full:
            whole: Any = param.detach()
            if hasattr(whole, "full_tensor"):
                whole = whole.full_tensor()
                whole = whole.cpu() if keep else whole.new_empty(0)
            master = optimizer.state[param].get("master") if param in optimizer.state else None
            full[param] = whole.float() if master is None else master
        weights[name] = full[param]
    return weights if keep else {}


def load_full_weights(model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor]) -> None:
    """The other way round; load the optimizer's state before."""
    state: dict[str, Any] = dict(weights)
    for name, value in model.state_dict().items():
        if name in state and hasattr(value, "placements"):
            state[name] = _part_of(state[name], value)
    model.load_state_dict(state)
    for name, param in model.named_parameters():
        if param.dtype in (torch.bfloat16, torch.float16):
            optimizer.state[param]["master"] = weights[name].to(param.device, torch.float32, copy=True)


def _part_of(whole: Tensor, like: Any) -> Tensor:
    """A whole tensor, sharded as `like` is: each rank takes its own part."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
