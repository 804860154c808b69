"""act(x @ weight.T + bias): the first half of the feed-forward block, and the activations by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops import backend


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

# what the kernel computes, by its names for the forms
_FORMS: dict[Callable[[Tensor], Tensor], str] = {F.gelu: "none", _gelu_tanh: "tanh", F.relu: "relu"}
_FUNCTIONS = {form: function for function, form in _FORMS.items()}


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
    """act(x @ weight.T + bias) for x [..., K], weight [N, K], bias [N] -> [..., N].

    Where kernels run, "gelu" in both forms and "relu" are theirs: a product without the bias, then one pass
    that adds it and applies the activation; only the product is saved for the backward pass. Anything else
    is plain torch. Under autocast the product's dtype is autocast's and gradients have the parameters'.
    Deterministic. ValueError for an unknown name, UserError for a forced backend that cannot run.
    """
    act = activation(hidden_act)
    form = _FORMS.get(act)
    if form is None or bias is None:
        return act(F.linear(x, weight, bias))
    chosen = backend.implementation("bias_gelu", x)
    if chosen != "triton" and not torch.compiler.is_compiling():
        backend.ran("bias_gelu", "eager")
        return act(F.linear(x, weight, bias))  # torch's product adds the bias for nothing
    return bias_gelu(F.linear(x, weight), bias, form)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """act(x + bias) for x [..., N], bias [N] -> [..., N] in x's dtype; maths in fp32 at least.

    `approximate` is "none" (GELU, exact erf form), "tanh" (GELU, tanh form) or "relu". bias may be fp32
    beside 16-bit x. Only x and bias are saved for the backward pass. Deterministic. ValueError for another
    form, UserError for a forced backend that cannot run.
    """
    if approximate not in _FUNCTIONS:
        raise ValueError(f"approximate {approximate!r} is not one of {', '.join(_FUNCTIONS)}")
    return backend.call(
        backend.implementation("bias_gelu", x),
        (x, bias),
        registered=lambda: _bias_gelu(x.reshape(-1, x.shape[-1]), bias, approximate).view(x.shape),
        launch=lambda: _launch(x.reshape(-1, x.shape[-1]), bias, approximate).view(x.shape),
        eager=lambda: _eager(x, bias, approximate),
    )


# ---- registration -----------------------------------------------------------------------------------------


@torch.library.custom_op("fastbert::bias_gelu", mutates_args=())
def _bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """x [M, N], bias [N] -> [M, N]."""
    if backend.implementation("bias_gelu", x) == "triton":
        return _launch(x, bias, approximate)
    return _eager(x, bias, approximate)


@_bias_gelu.register_fake
def _(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fastbert::bias_gelu_backward", mutates_args=())
def _bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """dy, x [M, N], bias [N] -> dx [M, N], dbias [N]."""
    if backend.implementation("bias_gelu", x) == "triton":
        from fastbert_kernels.bias_gelu import bias_gelu_bwd

        backend.ran("bias_gelu_backward", "triton")
        return bias_gelu_bwd(_rows(dy), _rows(x), bias, approximate)
    backend.ran("bias_gelu_backward", "eager")
    with backend.no_autocast(x.device):
        h = _widened(x) + bias
        dy = dy.to(h.dtype)
        if approximate == "relu":
            dx = dy.masked_fill(h <= 0, 0.0)
        else:
            dx = torch.ops.aten.gelu_backward(dy, h, approximate=approximate)
        return dx.to(x.dtype), dx.sum(dim=0).to(bias.dtype)


@_bias_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    dx, dbias = _bias_gelu_backward(dy, *ctx.saved_tensors, ctx.approximate)
    return dx, dbias, None


_bias_gelu.register_autograd(_backward, setup_context=_setup_context)


# ---- implementations --------------------------------------------------------------------------------------


def _eager(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    backend.ran("bias_gelu", "eager")
    with backend.no_autocast(x.device):
        return _FUNCTIONS[approximate](_widened(x) + bias).to(x.dtype)


def _launch(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    from fastbert_kernels.bias_gelu import bias_gelu_fwd

    backend.ran("bias_gelu", "triton")
    return bias_gelu_fwd(_rows(x), bias, approximate)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor) -> Tensor:
    """x, or a copy of it with adjacent columns."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
