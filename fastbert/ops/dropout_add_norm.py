"""LayerNorm(residual + dropout(x + bias)): what closes each half of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.ops import backend, philox
from fastbert.ops.qkv import is_plain

WIDTH_LIMIT = 8192  # of the Triton kernel

# elements of a mask that a CPU makes at a time: its intermediate words then stay in the cache
_CPU_PIECE = 1 << 18
_WIDE = (torch.float32, torch.float64)


def dense_dropout_add_norm(
    x: Tensor,
    dense: nn.Module,
    dropout: nn.Module,
    residual: Tensor,
    norm: nn.Module,
    fp32_out: bool = False,
) -> Tensor:
    """norm(dropout(dense(x)) + residual) for x [..., K] and residual [..., H] -> [..., H].

    One operation behind the product while dropout and norm are plain modules of torch; the bias of a plain
    dense is then the kernel's to add. A module that is more is called as the module it is.
    """
    if not (is_plain(dropout, nn.Dropout) and _is_affine(norm)):
        normed: Tensor = norm(dropout(dense(x)) + residual)
        return normed
    bias = None
    if is_plain(dense, nn.Linear) and _runs_kernel(residual):
        product, bias = F.linear(x, dense.weight), dense.bias  # type: ignore[arg-type]
    else:
        product = dense(x)
    return _normed(product, residual, norm, dropout.p if dropout.training else 0.0, bias, fp32_out)


def layer_norm(x: Tensor, norm: nn.Module) -> Tensor:
    """norm(x) for x [..., H]: `dropout_add_norm` of x alone, or the module if it is more than plain torch."""
    if _is_affine(norm):
        return _normed(x, None, norm)
    normed: Tensor = norm(x)
    return normed


def _normed(
    x: Tensor,
    residual: Tensor | None,
    norm: Any,
    dropout_p: Any = 0.0,
    bias: Any = None,
    fp32_out: bool = False,
) -> Tensor:
    return dropout_add_norm(
        x, residual, norm.weight, norm.bias, norm.eps, dropout_p, x_bias=bias, fp32_out=fp32_out
    )


def dropout_add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    x_bias: Tensor | None = None,
    fp32_out: bool = False,
) -> Tensor:
    """LayerNorm(residual + dropout(x + x_bias)) over the last axis of x [..., H] -> [..., H].

    In x's dtype, or in fp32 at least with `fp32_out`. residual has the shape of x, or is None; weight, bias
    and x_bias are [H]. Under autocast, too, everything between reading and writing is in fp32 at least, and
    each gradient has the dtype of its tensor: parameters and residual may be wider than x. Elements are
    dropped by a seed that is drawn from torch's generator of the device and by their place; the eager path
    and the Triton kernel drop the same. Deterministic. UserError for a forced backend that cannot run.
    """
    dropout_p = dropout_p if training else 0.0
    seed = philox.draw_seed(x.device) if dropout_p > 0.0 else None
    arguments = (x, residual, x_bias, weight, bias, eps, seed, dropout_p, fp32_out)
    return backend.call(
        _implementation(x),
        [t for t in (x, residual, x_bias, weight, bias) if t is not None],
        registered=lambda: _by_rows(_dropout_add_norm, *arguments),
        launch=lambda: _by_rows(_launch, *arguments),
        eager=lambda: _eager(*arguments),
    )


def _by_rows(
    norm: Callable[..., Any],
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *rest: Any,
) -> Tensor:
    width = x.shape[-1]
    tensors = [residual if residual is None else residual.reshape(-1, width), x_bias, weight, bias]
    # the kernel takes x's dtype and fp32 beside it, and a module in the dense's place may answer in any
    tensors = [t if t is None or t.dtype in (x.dtype, torch.float32) else t.float() for t in tensors]
    y: Tensor = norm(x.reshape(-1, width), *tensors, *rest)[0]
    return y.view(x.shape)


# ---- eager ------------------------------------------------------------------------------------------------


def dropout_noise(seed: Tensor, num_rows: int, num_cols: int, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies [rows, cols] by, 0 or 1 / (1 - p), for a seed int64 [1]: as the kernel does.

    One Philox call, of the counter (col // 8, low word of the row, high word, 0), serves 8 columns, with 16
    bits each: half col % 2 of word col % 8 // 2. The same for any num_rows and num_cols that hold an element.
    """
    threshold, scale = philox.dropout_threshold(dropout_p)
    noise = torch.empty((num_rows, num_cols), dtype=dtype, device=seed.device)
    key: tuple[Any, Any] = (seed & philox._WORD, (seed >> 32) & philox._WORD)
    piece = max(1, num_rows)
    if backend.host_may_read(seed):
        # torch is quicker with numbers than with tensors of one element
        key = (int(key[0]), int(key[1]))
        piece = max(1, _CPU_PIECE // max(1, num_cols))
    for start in range(0, num_rows, piece):
        part = noise[start : start + piece]
        part.copy_(_random_halves(key, start, *part.shape) >= threshold - 2 ** (philox.RANDOM_BITS - 1))
        part.mul_(scale)
    return noise


def _random_halves(key: tuple[Any, Any], first_row: int, num_rows: int, num_cols: int) -> Tensor:
    """int16 [rows, cols], uniform; on a device that the tensors of the key name, or the CPU."""
    device = getattr(key[0], "device", None)
    rows = torch.arange(first_row, first_row + num_rows, device=device)[:, None]
    groups = torch.arange((num_cols + 7) // 8, device=device)
    counter: tuple[Any, Any, Any, Any] = (groups, rows & philox._WORD, rows >> 32, 0)
    bits = torch.empty((num_rows, groups.shape[0], 4), dtype=torch.int32, device=device)
    for index, word in enumerate(philox.philox4x32(counter, key)):
        bits[:, :, index] = word ^ philox._SIGN_BITS
    return bits.view(torch.int16).flatten(1)[:, :num_cols]


def _eager(
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    seed: Tensor | None,
    dropout_p: float,
    fp32_out: bool,
) -> Tensor:
    backend.ran("dropout_add_norm", "eager")
    with backend.no_autocast(x.device):
        h = _sum(x, residual, x_bias, seed, dropout_p)
        y = _normalized(h, weight, bias, eps)
    return y if fp32_out or y.dtype == x.dtype else y.to(x.dtype)


def _sum(
    x: Tensor, residual: Tensor | None, x_bias: Tensor | None, seed: Tensor | None, dropout_p: float
) -> Tensor:
    """residual + dropout(x + x_bias) in fp32 at least: what is rounded comes behind the norm."""
    h = x if x.dtype in _WIDE else x.float()
    h = h if x_bias is None else h + x_bias
    if seed is not None:
        width = x.shape[-1]
        noise = dropout_noise(seed, x.shape[:-1].numel(), width, dropout_p, h.dtype)
        h = h * noise.view(x.shape)
    return h if residual is None else h + residual


def _normalized(h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if weight.dtype != h.dtype:
        weight, bias = weight.to(h.dtype), bias.to(h.dtype)
    return F.layer_norm(h, weight.shape, weight, bias, eps)


# ---- registration -----------------------------------------------------------------------------------------


@torch.library.custom_op("fastbert::dropout_add_norm", mutates_args=())
def _dropout_add_norm(
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    seed: Tensor | None,
    dropout_p: float,
    fp32_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [M, H] -> (y [M, H], mean [M], 1 / standard deviation [M])."""
    if _runs_kernel(x):
        return _launch(x, residual, x_bias, weight, bias, eps, seed, dropout_p, fp32_out)
    backend.ran("dropout_add_norm", "eager")
    with backend.no_autocast(x.device):
        h = _sum(x, residual, x_bias, seed, dropout_p)
        mean = h.mean(dim=1)
        rstd = ((h - mean[:, None]).square().mean(dim=1) + eps).rsqrt()
        y = _normalized(h, weight, bias, eps)
        return y if fp32_out else y.to(x.dtype), mean, rstd


@_dropout_add_norm.register_fake
def _(
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    seed: Tensor | None,
    dropout_p: float,
    fp32_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean, rstd = (x.new_empty(x.shape[0], dtype=dtype) for _ in range(2))
    return x.new_empty(x.shape, dtype=dtype if fp32_out else x.dtype), mean, rstd


@torch.library.custom_op("fastbert::dropout_add_norm_backward", mutates_args=())
def _dropout_add_norm_backward(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    dropout_p: float,
) -> list[Tensor]:
    """[dx, dweight, dbias], then dresidual unless it is dx, then dx_bias if there is one."""
    own_dresidual = _has_own_dresidual(x, residual, seed)
    if _runs_kernel(x):
        from fastbert_kernels.dropout_add_norm import dropout_add_norm_bwd

        backend.ran("dropout_add_norm_backward", "triton")
        dx, dresidual, dx_bias, dweight, dbias = dropout_add_norm_bwd(
            _rows(dy), _rows(x), None if residual is None else _rows(residual), x_bias, weight, mean, rstd,
            dropout_p, seed,
        )  # fmt: skip
        return [dx, dweight, dbias, *_present(dresidual if own_dresidual else None, dx_bias)]
    backend.ran("dropout_add_norm_backward", "eager")
    with backend.no_autocast(x.device):
        h = _sum(x, residual, x_bias, seed, dropout_p)
        xhat = (h - mean[:, None]) * rstd[:, None]
        dy = dy.to(h.dtype)
        dxhat = dy * weight
        dh = dxhat - dxhat.mean(dim=1, keepdim=True) - xhat * (dxhat * xhat).mean(dim=1, keepdim=True)
        dh = dh * rstd[:, None]
        dx = dh
        if seed is not None:
            dx = dh * dropout_noise(seed, x.shape[0], x.shape[1], dropout_p, dh.dtype)
        dresidual = dh.to(residual.dtype) if own_dresidual and residual is not None else None
        dx_bias = None if x_bias is None else dx.sum(dim=0).to(x_bias.dtype)
        dweight, dbias = (dy * xhat).sum(dim=0).to(weight.dtype), dy.sum(dim=0).to(weight.dtype)
        return [dx.to(x.dtype), dweight, dbias, *_present(dresidual, dx_bias)]


@_dropout_add_norm_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    dropout_p: float,
) -> list[Tensor]:
    dresidual = residual if _has_own_dresidual(x, residual, seed) else None
    others = [t.new_empty(t.shape) for t in (weight, weight, *_present(dresidual, x_bias))]
    return [x.new_empty(x.shape), *others]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, x_bias, weight, _, _, seed, ctx.dropout_p, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, residual, x_bias, weight, mean, rstd, seed)


def _backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, residual, x_bias, weight, mean, rstd, seed = ctx.saved_tensors
    dx, dweight, dbias, *others = _dropout_add_norm_backward(
        dy, x, residual, x_bias, weight, mean, rstd, seed, ctx.dropout_p
    )
    dx_bias = None if x_bias is None else others.pop()
    dresidual = None
    if residual is not None:
        dresidual = others.pop() if _has_own_dresidual(x, residual, seed) else dx
    return dx, dresidual, dx_bias, dweight, dbias, None, None, None, None


_dropout_add_norm.register_autograd(_backward, setup_context=_setup_context)


# ---- helpers ----------------------------------------------------------------------------------------------


def _launch(
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    seed: Tensor | None,
    dropout_p: float,
    fp32_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from fastbert_kernels.dropout_add_norm import dropout_add_norm_fwd

    backend.ran("dropout_add_norm", "triton")
    residual = None if residual is None else _rows(residual)
    return dropout_add_norm_fwd(_rows(x), residual, x_bias, weight, bias, eps, dropout_p, seed, fp32_out)


def _implementation(x: Tensor) -> str:
    beyond = ""
    if x.shape[-1] > WIDTH_LIMIT:
        beyond = f"a row is {x.shape[-1]} wide, and the Triton kernel takes at most {WIDTH_LIMIT}"
    return backend.implementation("dropout_add_norm", x, beyond_kernels=beyond)


def _runs_kernel(x: Tensor) -> bool:
    return _implementation(x) == "triton"


def _is_affine(norm: nn.Module) -> bool:
    return is_plain(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None


def _has_own_dresidual(x: Tensor, residual: Tensor | None, seed: Tensor | None) -> bool:
    """Whether the gradient of the residual is not that of x."""
    return residual is not None and (seed is not None or residual.dtype != x.dtype)


def _rows(x: Tensor) -> Tensor:
    """x, or a copy of it with adjacent columns."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
