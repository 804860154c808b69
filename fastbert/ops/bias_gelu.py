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

    Where kernels run, "gelu" in both forms and "relu" are theirs: the product without the bias, then bias and
    activation, either behind torch's product in one pass or inside a Triton product that writes both; the
    latter where its measured table says that it is faster for that GPU and shape, where it was forced, and in
    Triton's interpreter. Of the results only the product is saved for the backward pass. Anything else is
    plain torch. Under autocast the product has autocast's dtype, and gradients have the parameters'.
    Deterministic. ValueError for an unknown name, UserError for a forced backend that cannot run.
    """
    act = activation(hidden_act)
    form = _FORMS.get(act)
    if form is None or bias is None:
        return act(F.linear(x, weight, bias))
    dtype = backend.autocast_dtype(x.device)
    given = (x, weight)
    if dtype is not None and x.dtype != torch.float64:
        x, weight = x.to(dtype), weight.to(dtype)
    rows = x.reshape(-1, x.shape[-1])
    chosen, config = _choose(rows, weight)

    def eager() -> Tensor:
        backend.ran("linear_act", "eager")
        return _activated(F.linear(*given, bias), form)  # torch's product adds the bias for nothing

    saves = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias))
    return backend.call(
        "eager" if chosen == "eager" else "triton",
        (x, weight, bias),
        registered=lambda: _linear_act(rows, weight, bias, form, saves)[0].unflatten(0, x.shape[:-1]),
        launch=lambda: _compute(chosen, config, rows, weight, bias, form, False)[0].unflatten(
            0, x.shape[:-1]
        ),
        eager=eager,
    )


def _activated(product: Tensor, form: str) -> Tensor:
    """The activation of a product that nobody else holds, in its place if no gradient needs the product.

    On a CPU a second result of that size costs more than the activation: fresh pages at every call.
    """
    if product.requires_grad:
        return _FUNCTIONS[form](product)
    if form == "relu":
        return product.relu_()
    return torch.ops.aten.gelu_(product, approximate=form)


def _choose(x: Tensor, weight: Tensor) -> tuple[str, Any]:
    """("triton", its configuration or None for its own choice), ("cublaslt", None) or ("eager", None).

    "cublaslt" is torch's product with the bias_gelu kernel behind it.
    """
    chosen = backend.implementation("linear_act", x)
    if chosen != "triton" or x.device.type == "cpu" or backend.is_forced("triton"):
        return chosen, None
    from fastbert_kernels.linear_act import CUBLASLT, linear_act_choice

    choice = linear_act_choice(x, weight)
    return ("cublaslt", None) if choice == CUBLASLT else ("triton", choice)


def _compute(
    chosen: str, config: Any, x: Tensor, weight: Tensor, bias: Tensor, form: str, save: bool
) -> tuple[Tensor, Tensor | None]:
    """(act(h + bias), h = x @ weight.T, which may be None without `save`)."""
    backend.ran("linear_act", chosen)
    if chosen == "triton":
        from fastbert_kernels.linear_act import linear_act_fwd

        return linear_act_fwd(_rows(x), weight.contiguous(), bias, form, save, config)
    with backend.no_autocast(x.device):
        h = F.linear(x, weight)
    if chosen == "eager":
        return _eager_act(h, bias, form), h
    from fastbert_kernels.bias_gelu import bias_gelu_fwd

    return bias_gelu_fwd(h, bias, form), h


# ---- registration -----------------------------------------------------------------------------------------


@torch.library.custom_op("fastbert::linear_act", mutates_args=())
def _linear_act(
    x: Tensor, weight: Tensor, bias: Tensor, approximate: str, save: bool
) -> tuple[Tensor, Tensor]:
    """x [M, K], weight [N, K], bias [N] -> (y [M, N], x @ weight.T [M, N], or [0] without `save`)."""
    y, h = _compute(*_choose(x, weight), x, weight, bias, approximate, save)
    return y, h if save and h is not None else x.new_empty(0)


@_linear_act.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, approximate: str, save: bool) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if save else 0)


@torch.library.custom_op("fastbert::linear_act_backward", mutates_args=())
def _linear_act_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    h: Tensor,
    approximate: str,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, h [M, N] -> (dx [M, K] or [0], dweight [N, K] or [0], dbias [N])."""
    dh, dbias = _act_backward(dy, h, bias, approximate)
    with backend.no_autocast(x.device):
        dx = dh @ weight if wants_x else x.new_empty(0)
        dweight = dh.T @ x if wants_weight else x.new_empty(0)
    return dx, dweight, dbias


@_linear_act_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    h: Tensor,
    approximate: str,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(x.shape if wants_x else 0)
    return dx, weight.new_empty(weight.shape if wants_weight else 0), bias.new_empty(bias.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.approximate, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    dx, dweight, dbias = _linear_act_backward(dy, *ctx.saved_tensors, ctx.approximate, wants_x, wants_weight)
    return (
        dx if wants_x else None,
        dweight if wants_weight else None,
        dbias if wants_bias else None,
        None,
        None,
    )


_linear_act.register_autograd(_backward, setup_context=_setup_context)


# ---- bias and activation behind the product ---------------------------------------------------------------


def _eager_act(h: Tensor, bias: Tensor, approximate: str) -> Tensor:
    with backend.no_autocast(h.device):
        return _FUNCTIONS[approximate](_widened(h) + bias).to(h.dtype)


def _act_backward(dy: Tensor, h: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """dy, h [M, N], bias [N] -> (gradients of h [M, N], and of bias [N], each in its dtype)."""
    if backend.implementation("linear_act", h) == "triton":
        from fastbert_kernels.bias_gelu import bias_gelu_bwd

        backend.ran("linear_act_backward", "triton")
        return bias_gelu_bwd(_rows(dy), h, bias, approximate)
    backend.ran("linear_act_backward", "eager")
    with backend.no_autocast(h.device):
        pre_activation = _widened(h) + bias
        dy = dy.to(pre_activation.dtype)
        if approximate == "relu":
            dh = dy.masked_fill(pre_activation <= 0, 0.0)
        else:
            dh = torch.ops.aten.gelu_backward(dy, pre_activation, approximate=approximate)
        return dh.to(h.dtype), dh.sum(dim=0).to(bias.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor) -> Tensor:
    """x, or a copy of it with adjacent columns."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
