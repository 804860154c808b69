"""Query, key and value in one product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the function behind `module` is the same as calling the module.

    False for a subclass (LoRA, quantised, parametrized), with any hook, or with a replaced `forward`.
    """
    return (
        type(module) is kind
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
    )


def qkv_projection(x: Tensor, query: nn.Module, key: nn.Module, value: nn.Module, num_heads: int) -> Tensor:
    """x [..., hidden] -> [..., 3, num_heads, head_dim].

    One product on the stacked weights while all three are plain `nn.Linear`s; otherwise each is called as
    the module it is.
    """
    if all(is_plain(module, nn.Linear) and module.bias is not None for module in (query, key, value)):
        weight = torch.cat([query.weight, key.weight, value.weight])  # type: ignore[list-item]
        bias = torch.cat([query.bias, key.bias, value.bias])  # type: ignore[list-item]
        qkv = F.linear(x, weight, bias)
    else:
        qkv = torch.cat([query(x), key(x), value(x)], dim=-1)
    return qkv.view(*x.shape[:-1], 3, num_heads, qkv.shape[-1] // (3 * num_heads))
