"""The tensor mathematics of an optimizer step: LAMB and BERT's Adam over lists of tensors.

`KernelStep` is a whole step through the Triton kernels. The rest is plain torch: each function updates
weights and moments in place, never touches a gradient, and runs on the tensors' device without a host read.
On a CPU `fastbert.ops.optimizer_cpu` computes the same faster.

`grad_scale` multiplies every gradient (clipping and loss unscaling in one number); it is folded into the
moments' coefficients instead of making scaled copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.ops import backend

# adds up a tensor in place over the ranks that hold the parts of sharded tensors
SumOverShards = Callable[[Tensor], Tensor]

NORM_PIECE = 1 << 16  # elements: an fp32 sum over an embedding table is 1e-3 off on a CPU, over this 1e-7


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all tensors together -> 0-dim, fp32 (fp64 if any is), on the first one's device."""
    if not tensors:
        return torch.zeros(())
    device = tensors[0].device
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    pieces: list[Tensor] = []
    for tensor in (t.contiguous() for t in tensors):  # the order of a sum does not depend on the layout
        is_long = tensor.device.type == "cpu" and tensor.numel() > NORM_PIECE
        pieces += tensor.view(-1).split(NORM_PIECE) if is_long else [tensor]
    norms = torch._foreach_norm(pieces, dtype=dtype)
    return torch.stack([norm.to(device) for norm in norms]).norm()


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
    sum_over_shards: SumOverShards | None = None,
) -> None:
    """One LAMB step in place (You et al., arXiv 1904.00962, with the trust ratio of NVIDIA's FusedLAMB).

    u = (m/c1) / (sqrt(v/c2) + eps) + weight_decay * p;  p -= lr * (||p|| / ||u||) * u, per tensor.
    The ratio is 1 when it is switched off or either norm is 0. `steps` count this step. Weights and moments
    are of one dtype; gradients may be of a lower one. `sum_over_shards`: the tensors are parts of others,
    whose norms count; their squares are added up in one go, until when all updates are kept.
    """
    rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, steps))
    for together in [[row] for row in rows] if sum_over_shards is None else [rows]:
        updates, corrections = [], []
        for p, g, m, v, step in together:
            a, b = _corrections(beta1, beta2, step, bias_correction)
            scale = grad_scale
            if weight_decay != 0 and not adam_w_mode:  # decay as a gradient, inside the moments
                g, scale = torch.mul(p, weight_decay).add_(g, alpha=grad_scale), 1.0
            beta3 = 1 - beta1 if grad_averaging else 1.0
            _update_moments(g, m, v, beta1=beta1, beta2=beta2, beta3=beta3, scale=scale)
            update = m / torch.sqrt(v).add_(b * eps)
            if weight_decay != 0 and adam_w_mode:
                update.add_(p, alpha=weight_decay / a)
            updates.append(update)
            corrections.append(a)
        weights = [row[0] for row in together]
        # each is now the update divided by a, which the trust ratio takes out again
        ratios = torch.stack([p.new_tensor(a) for p, a in zip(weights, corrections)])
        if use_trust_ratio:
            norms = torch.stack([global_norm([x]) for x in (*weights, *updates)]).view(2, -1)
            if sum_over_shards is not None:
                norms = sum_over_shards(norms.square()).sqrt()
            ratios = torch.where((norms > 0).all(0), norms[0] / norms[1], ratios)
        for p, update, ratio in zip(weights, updates, ratios):
            p.addcmul_(update, ratio.to(p.dtype), value=-lr)


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
) -> None:
    """One Adam step with decoupled decay in place, as BERT was trained (google-research/bert).

    p -= lr * ((m/c1) / (sqrt(v/c2) + eps) + weight_decay * p). Arguments as in `lamb_`.
    """
    for p, g, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps):
        a, b = _corrections(beta1, beta2, step, bias_correction)
        _update_moments(g, m, v, beta1=beta1, beta2=beta2, beta3=1 - beta1, scale=grad_scale)
        if weight_decay != 0:
            p.mul_(1 - lr * weight_decay)
        p.addcdiv_(m, torch.sqrt(v).add_(b * eps), value=-lr * a)


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
        sum_over_shards: SumOverShards | None = None,
    ) -> Tensor:
        """One step in place -> the norm of all gradients, unscaled and before clipping, 0-dim fp32.

        `tensors` are the fields of `fastbert_kernels.tensor_table.StepTensors`, `options` those of each
        group as `lamb_` takes them; `loss_scale` is what the gradients are multiplied by, `sum_over_shards`
        as there. A gradient that is not finite changes nothing else. Deterministic, and the host reads
        nothing.
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
            sum_over_shards=sum_over_shards,
        )
