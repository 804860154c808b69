"""The tensor mathematics of an optimizer step: LAMB and BERT's Adam over lists of tensors.

`KernelStep` is a whole step through the Triton kernels. The rest is the eager step: each function updates
weights and moments in place, never touches a gradient, and runs on the tensors' device without a host read.
On a CPU a tensor is worked through in pieces that stay in the cache, so that a chain of elementwise
operations crosses main memory once.

`grad_scale` multiplies every gradient (clipping and loss unscaling in one number); it is folded into the
moments' coefficients instead of making scaled copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.ops import backend

CPU_PIECE = 1 << 18  # elements: 1 MiB a stream in fp32, half of it for each of two threads


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching views of equally shaped tensors: flat and cache-sized for large ones on a CPU, else whole."""
    if tensors[0].device.type != "cpu" or tensors[0].numel() <= CPU_PIECE:
        return iter(
            (tensors,)
        )  # most of a small model's tensors: cutting would cost more than the arithmetic
    return zip(*(tensor.reshape(-1).split(CPU_PIECE) for tensor in tensors))


def _dot(x: Tensor) -> Tensor:
    # on a CPU, half the time of vector_norm; and fp32 sums over pieces are accurate, where one sum over an
    # embedding table is 1e-3 off
    flat = x.reshape(-1)
    return torch.dot(flat, flat)


def _root_of_sum(squares: list[Tensor]) -> Tensor:
    return (squares[0] if len(squares) == 1 else torch.stack(squares).sum()).sqrt()


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all tensors together -> 0-dim, fp32 (fp64 if any is), on the first one's device."""
    if not tensors:
        return torch.zeros(())
    device = tensors[0].device
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    squares = [_dot(piece.to(dtype)).to(device) for tensor in tensors for (piece,) in _pieces(tensor)]
    return torch.stack(squares).sum().sqrt()


def _update_moments(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    beta3: float,
    scale: float,
) -> None:
    exp_avg.mul_(beta1).add_(grad, alpha=beta3 * scale)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=(1 - beta2) * scale * scale)


def _corrections(beta1: float, beta2: float, step: float, bias_correction: bool) -> tuple[float, float]:
    """(a, b) with (m/c1) / (sqrt(v/c2) + eps) = a * m / (sqrt(v) + b * eps)."""
    if not bias_correction:
        return 1.0, 1.0
    root = (1 - beta2**step) ** 0.5
    return root / (1 - beta1**step), root


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    *,
    grad_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    grad_averaging: bool,
    adam_w_mode: bool,
    use_trust_ratio: bool,
    scratch: Tensor,
) -> None:
    """One LAMB step in place (You et al., arXiv 1904.00962, with the trust ratio of NVIDIA's FusedLAMB).

    u = (m/c1) / (sqrt(v/c2) + eps) + weight_decay * p;  p -= lr * (||p|| / ||u||) * u, per tensor.
    The ratio is 1 when it is switched off or either norm is 0. `steps` count this step. Weights and moments
    are contiguous and of one dtype; gradients may be of a lower one. `scratch` is of that dtype and device
    and holds at least as many elements as the largest parameter.
    """
    for param, grad, exp_avg, exp_avg_sq, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps):
        a, b = _corrections(beta1, beta2, step, bias_correction)
        update = scratch[: param.numel()].view(param.shape)
        param_squares, update_squares = [], []
        for p, g, m, v, u in _pieces(param, grad, exp_avg, exp_avg_sq, update):
            scale = grad_scale
            if weight_decay != 0 and not adam_w_mode:  # decay as a gradient, inside the moments
                g, scale = torch.mul(p, weight_decay, out=u).add_(g, alpha=grad_scale), 1.0
            beta3 = 1 - beta1 if grad_averaging else 1.0
            _update_moments(g, m, v, beta1=beta1, beta2=beta2, beta3=beta3, scale=scale)
            torch.sqrt(v, out=u).add_(b * eps)
            torch.div(m, u, out=u)
            if weight_decay != 0 and adam_w_mode:
                u.add_(p, alpha=weight_decay / a)
            # u is now the update divided by a, which the trust ratio takes out again
            if use_trust_ratio:
                param_squares.append(_dot(p))
                update_squares.append(_dot(u))
        if use_trust_ratio and param_squares:
            param_norm, update_norm = _root_of_sum(param_squares), _root_of_sum(update_squares)
            ratio = torch.where((param_norm > 0) & (update_norm > 0), param_norm / update_norm, a)
        else:
            ratio = param.new_tensor(a)
        for p, u in _pieces(param, update):
            p.addcmul_(u, ratio, value=-lr)


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    *,
    grad_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    scratch: Tensor,
) -> None:
    """One Adam step with decoupled decay in place, as BERT was trained (google-research/bert).

    p -= lr * ((m/c1) / (sqrt(v/c2) + eps) + weight_decay * p). Arguments as in `lamb_`.
    """
    for param, grad, exp_avg, exp_avg_sq, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps):
        a, b = _corrections(beta1, beta2, step, bias_correction)
        for p, g, m, v in _pieces(param, grad, exp_avg, exp_avg_sq):
            _update_moments(g, m, v, beta1=beta1, beta2=beta2, beta3=1 - beta1, scale=grad_scale)
            denominator = torch.sqrt(v, out=scratch[: v.numel()].view(v.shape)).add_(b * eps)
            if weight_decay != 0:
                p.mul_(1 - lr * weight_decay)
            p.addcdiv_(m, denominator, value=-lr * a)


# ---- through the kernels ----------------------------------------------------------------------------------


def implementation(op: str, params: Sequence[Tensor]) -> str:
    """What a step of `op` ("lamb" or "adamw") over all of `params` runs on: "eager" or "triton".

    One answer for all, because one norm clips all. UserError for a forced implementation that cannot run.
    """
    if not params:
        return "eager"
    # the one that the kernels could not take, if there is one
    x = next((p for p in params if p.dtype not in backend.KERNEL_DTYPES), params[0])
    devices = {str(p.device) for p in params}
    several = f"the parameters are on {len(devices)} devices" if len(devices) > 1 else ""
    return backend.implementation(op, x, beyond_kernels=several)


class KernelStep:
    """One optimizer's steps through the kernels, which keep their tables of addresses from step to step."""

    def __init__(self) -> None:
        self._cache: Any = None

    def __call__(
        self,
        *tensors: Sequence[Any],
        options: Sequence[dict[str, Any]],
        max_grad_norm: float | None,
        loss_scale: Tensor | None,
    ) -> Tensor:
        """One step in place -> the norm of all gradients, unscaled and before clipping, 0-dim fp32.

        `tensors` are the fields of `fastbert_kernels.tensor_table.StepTensors`, `options` those of each
        group as `lamb_` takes them; `loss_scale` is what the gradients are multiplied by. A gradient that is
        not finite changes nothing else. Deterministic, and the host reads nothing.
        """
        from fastbert_kernels.lamb import GroupOptions, optimizer_step
        from fastbert_kernels.tensor_table import StepCache, StepTensors

        self._cache = self._cache or StepCache()
        step = StepTensors(*tensors)
        return optimizer_step(
            step,
            [GroupOptions(**group) for group in options],
            self._cache,
            max_grad_norm=max_grad_norm,
            loss_scale=None if loss_scale is None else loss_scale.to(step.params[0].device, torch.float32),
        )
