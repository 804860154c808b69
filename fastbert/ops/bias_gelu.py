"""act(x @ weight.T + bias): the first half of the feed-forward block, and the activations by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


# "gelu" is the exact erf form; every other GELU name means the tanh form, as in transformers
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
    "mish": F.mish,
}


def activation(hidden_act: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of a config's `hidden_act`, which may be a function already. Unknown name: ValueError."""
    if callable(hidden_act):
        return hidden_act
    if hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act {hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[hidden_act]


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, hidden_act: str | Callable[[Tensor], Tensor]
) -> Tensor:
    """act(x @ weight.T + bias) for x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return activation(hidden_act)(F.linear(x, weight, bias))
