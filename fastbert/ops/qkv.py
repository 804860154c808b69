"""Query, key and value in one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.ops import backend


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

    One product while all three are plain `nn.Linear`s; otherwise each is called as the module it is. The
    product is torch's on the stacked weights (cuBLASLt on a GPU), or a Triton kernel that reads the three
    weights where they are: the kernel where its measured table says that it is faster for that GPU and shape,
    where it was forced, and in Triton's interpreter. Under autocast it computes in autocast's dtype, as
    `nn.Linear` does, and gradients have the parameters' dtypes. Deterministic.
    """
    if all(is_plain(module, nn.Linear) and module.bias is not None for module in (query, key, value)):
        weights, biases = zip(*((m.weight, m.bias) for m in (query, key, value)))
        qkv = _project(x, *weights, *biases)
    else:
        qkv = torch.cat([query(x), key(x), value(x)], dim=-1)
    return qkv.view(*x.shape[:-1], 3, num_heads, qkv.shape[-1] // (3 * num_heads))


def stack_qkv(query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
    """Lay the three weights, and the three biases, one behind the other in memory, for inference.

    The parameters stay the objects that they are, and whatever changes them is seen: only `qkv_projection`
    without gradients finds them stacked, and saves the copy that it makes of them otherwise, which is a
    quarter of the time of a single short text on a CPU. Converting the modules undoes it. For a model that is
    only run: some writers of files refuse parameters that share their storage.
    """
    for name in ("weight", "bias"):
        parameters = [getattr(module, name) for module in (query, key, value)]
        stacked = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, stacked.chunk(3)):
            parameter.data = part


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat(parts), without a copy if they lie so in memory and nothing wants their gradient."""
    if torch.is_grad_enabled() or not _are_adjacent(parts):
        return torch.cat(list(parts))
    first = parts[0]
    return first.as_strided((len(parts) * first.shape[0], *first.shape[1:]), first.stride())


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    if first.device.type not in ("cpu", "cuda") or torch.compiler.is_compiling():
        return False
    storage = first.untyped_storage().data_ptr()
    return all(
        part.is_contiguous()
        and part.shape == first.shape
        and part.untyped_storage().data_ptr() == storage
        and part.storage_offset() == first.storage_offset() + index * first.numel()
        for index, part in enumerate(parts)
    )


def _project(x: Tensor, *parameters: Tensor) -> Tensor:
    """x [..., K] and wq, wk, wv [N, K], bq, bk, bv [N] -> [..., 3N]."""
    dtype = backend.autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        x, *parameters = (t.to(dtype) for t in (x, *parameters))  # type: ignore[assignment]
    rows = x.reshape(-1, x.shape[-1])
    chosen, config = _choose("qkv_fwd", rows, *parameters[:3])

    def eager() -> Tensor:
        backend.ran("qkv_projection", chosen)
        return F.linear(x, _stacked(parameters[:3]), _stacked(parameters[3:]))

    return backend.call(
        chosen,
        (x, *parameters),
        registered=lambda: _qkv_projection(rows, *parameters).unflatten(0, x.shape[:-1]),
        launch=lambda: _launch(config, rows, *parameters).unflatten(0, x.shape[:-1]),
        eager=eager,
    )


def _choose(op: str, *tensors: Tensor) -> tuple[str, Any]:
    """("triton", its configuration or None for its own choice), ("eager", None) or ("cublaslt", None).

    "cublaslt" is the eager product where the kernel could run but was not measured to be faster.
    """
    chosen = backend.implementation("qkv_projection", tensors[0])
    if chosen != "triton" or tensors[0].device.type == "cpu" or backend.is_forced("triton"):
        return chosen, None
    from fastbert_kernels.linear import CUBLASLT, qkv_choice

    choice = qkv_choice(op, *tensors)
    return ("cublaslt", None) if choice == CUBLASLT else ("triton", choice)


# ---- registration -----------------------------------------------------------------------------------------


@torch.library.custom_op("fastbert::qkv_projection", mutates_args=())
def _qkv_projection(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bq: Tensor, bk: Tensor, bv: Tensor
) -> Tensor:
    """x [T, K], wq, wk, wv [N, K], bq, bk, bv [N] -> [T, 3N]."""
    chosen, config = _choose("qkv_fwd", x, wq, wk, wv)
    if chosen == "triton":
        return _launch(config, x, wq, wk, wv, bq, bk, bv)
    backend.ran("qkv_projection", chosen)
    with backend.no_autocast(x.device):
        return F.linear(x, torch.cat([wq, wk, wv]), torch.cat([bq, bk, bv]))


@_qkv_projection.register_fake
def _(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bq: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], 3 * wq.shape[0]))


# Two operators, one for each launch, so that frozen weights or frozen embeddings save theirs.


@torch.library.custom_op("fastbert::qkv_projection_backward_x", mutates_args=())
def _qkv_projection_backward_x(dqkv: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """dqkv [T, 3N] -> dx [T, K]."""
    parts = dqkv.contiguous().view(-1, 3, wq.shape[0])
    chosen, config = _choose("qkv_bwd_dx", parts, wq, wk, wv)
    backend.ran("qkv_projection_backward_x", chosen)
    if chosen == "triton":
        from fastbert_kernels.linear_dx import qkv_bwd_dx

        return qkv_bwd_dx(parts, wq, wk, wv, config)
    with backend.no_autocast(dqkv.device):
        return dqkv @ torch.cat([wq, wk, wv])


@_qkv_projection_backward_x.register_fake
def _(dqkv: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    return dqkv.new_empty((dqkv.shape[0], wq.shape[1]))


@torch.library.custom_op("fastbert::qkv_projection_backward_w", mutates_args=())
def _qkv_projection_backward_w(
    dqkv: Tensor, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dqkv [T, 3N], x [T, K] -> dwq, dwk, dwv [N, K], dbq, dbk, dbv [N]."""
    parts = dqkv.contiguous().view(-1, 3, dqkv.shape[1] // 3)
    chosen, config = _choose("qkv_bwd_dw", parts, x)
    backend.ran("qkv_projection_backward_w", chosen)
    if chosen == "triton":
        from fastbert_kernels.linear_dw import qkv_bwd_dw

        return qkv_bwd_dw(parts, x, config)
    with backend.no_autocast(x.device):
        dwq, dwk, dwv = (part.T @ x for part in parts.unbind(1))
        # one sum each: results of an operator may not share memory
        dbq, dbk, dbv = (part.sum(dim=0) for part in parts.unbind(1))
    return dwq, dwk, dwv, dbq, dbk, dbv


@_qkv_projection_backward_w.register_fake
def _(dqkv: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    size = dqkv.shape[1] // 3
    dw = [x.new_empty((size, x.shape[1])) for _ in range(3)]
    db = [x.new_empty(size) for _ in range(3)]
    return dw[0], dw[1], dw[2], db[0], db[1], db[2]


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, wq, wk, wv, *_ = inputs
    ctx.save_for_backward(x, wq, wk, wv)


def _backward(ctx: Any, dqkv: Tensor) -> tuple[Tensor | None, ...]:
    x, *weights = ctx.saved_tensors
    dx = _qkv_projection_backward_x(dqkv, *weights) if ctx.needs_input_grad[0] else None
    if any(ctx.needs_input_grad[1:]):
        return dx, *_qkv_projection_backward_w(dqkv, x)
    return (dx, *[None] * 6)


_qkv_projection.register_autograd(_backward, setup_context=_setup_context)


def _launch(config: Any, x: Tensor, *parameters: Tensor) -> Tensor:
    from fastbert_kernels.linear import qkv_fwd

    backend.ran("qkv_projection", "triton")
    return qkv_fwd(x, *parameters, config=config).flatten(1)
