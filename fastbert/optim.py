"""The two optimizers BERT is trained with, their parameter groups and learning-rate schedules.

`Lamb` and `AdamW` clip by the global gradient norm themselves and refuse to take a step with a gradient that
is not finite, so that a training loop needs neither `clip_grad_norm_` nor a check of its own.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastbert.errors import UserError
from fastbert.ops import backend, optimizer_cpu
from fastbert.ops.lamb import KernelStep, SumOverShards, adamw_, global_norm, implementation, lamb_


class _ClippingOptimizer(torch.optim.Optimizer):
    """What Lamb and AdamW share: checks, state, global clipping and the refusal of bad gradients.

    On a GPU a step runs through Triton kernels, elsewhere in plain torch (`fastbert.ops.backend`). With
    kernels the host never waits, and a CUDA graph may capture a step that has run before; it reads a `lr`
    that is a tensor at every replay.

    Parameters may be sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`), all of them or none: the norms
    are those of the whole tensors, for which each step sends a few numbers. The state is that of the part
    that a rank holds.

    State of a parameter: `step` (0-dim fp32; on the CPU, or with the parameter where kernels run), `exp_avg`
    and `exp_avg_sq` (fp32; fp64 for an fp64 parameter) and, for a bf16 or fp16 parameter, `master`, the fp32
    weights it is rounded from.
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and skipping to step()
    _op: ClassVar[str]  # its name for the backend

    grad_norm: Tensor  # of the last step(), unscaled, before clipping; 0-dim

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        _check_hyper_parameters(defaults)
        super().__init__(params, defaults)
        self._reset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state dict of torch.optim.AdamW lacks some of our options
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        self._reset()

    def _reset(self) -> None:
        self.grad_norm = torch.zeros(())
        self._scratch: dict[torch.dtype, Tensor] = {}  # of a CPU
        self._kernel_step = KernelStep()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step met a gradient that is not finite. Waits for the device."""
        return not math.isfinite(float(self.grad_norm))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        merged = {**self.defaults, **param_group}
        _check_hyper_parameters(merged)
        if merged["max_grad_norm"] != self.defaults["max_grad_norm"]:
            raise UserError(
                f"max_grad_norm {merged['max_grad_norm']} differs from the optimizer's "
                f"{self.defaults['max_grad_norm']}: clipping is by one norm over all groups, so set it once"
            )
        params = param_group["params"]
        if not isinstance(params, set):  # torch refuses sets, whose order changes from run to run
            params = [params] if isinstance(params, Tensor) else list(params)
            tensors = [param[1] if isinstance(param, tuple) else param for param in params]
            if len({id(tensor) for tensor in tensors}) < len(tensors):
                raise UserError("a parameter is listed twice in one group: list tied weights once")
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.is_complex():
                    raise UserError(f"a parameter is {tensor.dtype}, but only real ones can be optimized")
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the moments stay fp32 whatever the parameter's dtype, and nothing is shared.

        Loads the state of a model in another precision, too. `master` weights go into a parameter that needs
        none itself; a bf16 or fp16 parameter without any in the state starts from its own values.
        """
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(keys, params):
            for name, value in state_dict["state"].get(key, {}).items():
                if name == "step":
                    self.state[param][name] = torch.tensor(float(value), dtype=torch.float32)
                elif name == "master" and param.dtype == _state_dtype(param):
                    param.detach().copy_(value)
                    del self.state[param][name]
                else:
                    self.state[param][name] = torch.empty(
                        value.shape, dtype=_state_dtype(param), device=param.device
                    ).copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """As in torch; the learning rate is a number, also where a tensor holds it."""
        state = super().state_dict()
        for group in state["param_groups"]:
            group["lr"] = float(group["lr"])
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, update, and set `grad_norm`; returns the closure's result.

        A gradient that is not finite skips the step: weights, moments and step counts keep their bits.
        Gradients are read only. Parameters without gradient are left alone. Deterministic.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()

        active = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        params = list(itertools.chain.from_iterable(active))
        if any(p.grad.is_sparse for p in params):
            raise UserError("a gradient is sparse, but only dense gradients are supported: use sparse=False")
        sum_over_shards = _sum_over_shards(params)
        chosen = implementation(self._op, [_local(p) for p in params])
        backend.ran(self._op, chosen)
        # GradScaler sets grad_scale around step() while the gradients are still scaled; what its found_inf
        # knows, the norm shows as well
        loss_scale = getattr(self, "grad_scale", None)
        if chosen == "triton":
            self._step_in_kernels(active, loss_scale, sum_over_shards)
        else:
            self._step_eagerly(active, loss_scale, sum_over_shards)
        return result

    def _step_in_kernels(
        self, active: list[list[Tensor]], loss_scale: Tensor | None, sum_over_shards: SumOverShards | None
    ) -> None:
        params = list(itertools.chain.from_iterable(active))
        states = [self._state_of(p, p.device) for p in params]
        # kernels walk through contiguous memory
        parts = [_local(p) for p in params]
        outputs = [part.contiguous() for part in parts]
        self.grad_norm = self._kernel_step(
            outputs,
            [state.get("master", output) for state, output in zip(states, outputs)],
            [_local(p.grad).contiguous() for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            [i for i, group_params in enumerate(active) for _ in group_params],
            options=[self._options(group) for group in self.param_groups],
            max_grad_norm=self.defaults["max_grad_norm"],
            loss_scale=loss_scale,
            sum_over_shards=sum_over_shards,
        )
        for part, output in zip(parts, outputs):
            if output is not part:
                part.copy_(output)

    def _step_eagerly(
        self, active: list[list[Tensor]], loss_scale: Tensor | None, sum_over_shards: SumOverShards | None
    ) -> None:
        norm = global_norm([_local(p.grad) for params in active for p in params])
        if sum_over_shards is not None:
            norm = sum_over_shards(norm.square()).sqrt()
        scale = torch.ones_like(norm) if loss_scale is None else loss_scale.to(norm)
        self.grad_norm = norm / scale
        norm_value, scale_value = torch.stack((self.grad_norm, scale)).tolist()  # the one host read
        if not math.isfinite(norm_value):
            return
        limit = self.defaults["max_grad_norm"]
        clip = limit / norm_value if limit and norm_value > limit else 1.0
        for group, params in zip(self.param_groups, active):
            self._step_group(group, params, clip / scale_value, sum_over_shards)

    def _step_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grad_scale: float,
        sum_over_shards: SumOverShards | None,
    ) -> None:
        if not params:
            return
        states = [self._state_of(param, torch.device("cpu")) for param in params]
        counters = [state["step"] for state in states]
        torch._foreach_add_(counters, 1.0)
        steps = torch.stack(counters).tolist()
        options = self._options(group)
        options["lr"] = float(options["lr"])
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, state in enumerate(states):
            kinds.setdefault((state["exp_avg"].device, state["exp_avg"].dtype), []).append(i)
        parts = [_local(param) for param in params]
        for (device, _), members in kinds.items():
            weights = [states[i].get("master", parts[i]).contiguous() for i in members]
            scratch = None
            if device.type == "cpu":
                scratch = self._scratch_for(weights, all_at_once=sum_over_shards is not None)
            self._update(
                weights,
                [_local(params[i].grad) for i in members],
                [states[i]["exp_avg"] for i in members],
                [states[i]["exp_avg_sq"] for i in members],
                [steps[i] for i in members],
                grad_scale=grad_scale,
                scratch=scratch,
                sum_over_shards=sum_over_shards,
                **options,
            )
            for i, weight in zip(members, weights):
                if weight is not parts[i]:
                    parts[i].copy_(weight)

    @abstractmethod
    def _update(
        self,
        *tensors: Any,
        scratch: Tensor | None,
        sum_over_shards: SumOverShards | None,
        **options: Any,
    ) -> None:
        """The mathematics over lists of tensors of one device and dtype; `scratch` for those of a CPU."""

    @abstractmethod
    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        """What the mathematics of `_update` takes of a group's options."""

    def _state_of(self, param: Tensor, step_device: torch.device) -> dict[str, Tensor]:
        state = self.state[param]
        part, dtype = _local(param).detach(), _state_dtype(param)
        if "step" in state:
            state["step"] = state["step"].to(step_device)
        else:
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
            state["exp_avg"] = torch.zeros(part.shape, dtype=dtype, device=part.device)
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        if part.dtype != dtype and "master" not in state:
            state["master"] = part.to(dtype, memory_format=torch.contiguous_format)
        return state

    def _scratch_for(self, weights: list[Tensor], all_at_once: bool) -> Tensor:
        # kept between steps: fresh memory of the size of an embedding table costs more than the arithmetic
        piece, dtype = optimizer_cpu.CPU_PIECE, weights[0].dtype
        numels = [weight.numel() for weight in weights]
        numel = piece + max(piece, sum(numels) if all_at_once else max(numels))
        if dtype not in self._scratch or self._scratch[dtype].numel() < numel:
            self._scratch[dtype] = torch.empty(numel, dtype=dtype)
        return self._scratch[dtype]


class Lamb(_ClippingOptimizer):
    """LAMB (You et al., arXiv 1904.00962) as NVIDIA's FusedLAMB computes it.

    Args:
        params: tensors or groups; a group may override every option but `max_grad_norm`.
        lr: learning rate, a number or a 0-dim tensor, default 1e-3.
        betas: decay of the two moments, default (0.9, 0.999).
        eps: added to the root of the second moment, default 1e-6.
        weight_decay: default 0.01. Where it is 0 there is no trust ratio.
        max_grad_norm: limit of the gradient norm over all groups, default 1.0; None or 0 disables clipping.
        bias_correction: correct the moments for their start at 0, default True.
        grad_averaging: the first moment takes (1 - beta1) of a gradient instead of all, default True.
        adam_w_mode: decay apart from the moments instead of as part of the gradient, default True.
        always_adapt: trust ratio also where weight_decay is 0 (NVLAMB), default False.

    bf16 and fp16 parameters get an fp32 master copy at their first step: load weights into the model before.
    """

    _op = "lamb"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        max_grad_norm: float | None = 1.0,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        adam_w_mode: bool = True,
        always_adapt: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "adam_w_mode": adam_w_mode,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults)

    def _update(
        self,
        *tensors: Any,
        scratch: Tensor | None,
        sum_over_shards: SumOverShards | None,
        **options: Any,
    ) -> None:
        if scratch is None or not options["grad_averaging"]:  # which torch's fused kernel always does
            lamb_(*tensors, sum_over_shards=sum_over_shards, **options)
        else:
            del options["grad_averaging"]
            optimizer_cpu.lamb_(*tensors, scratch=scratch, sum_over_shards=sum_over_shards, **options)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            **_common_options(group),
            "grad_averaging": group["grad_averaging"],
            "adam_w_mode": group["adam_w_mode"],
            "use_trust_ratio": group["weight_decay"] != 0 or group["always_adapt"],
        }


class AdamW(_ClippingOptimizer):
    """BERT's Adam: decoupled weight decay and clipping by the global norm (google-research/bert).

    Args:
        params: tensors or groups; a group may override every option but `max_grad_norm`.
        lr: learning rate, a number or a 0-dim tensor, default 1e-4.
        betas: decay of the two moments, default (0.9, 0.999).
        eps: added to the root of the second moment, default 1e-6.
        weight_decay: default 0.01.
        max_grad_norm: limit of the gradient norm over all groups, default 1.0; None or 0 disables clipping.
        bias_correction: correct the moments for their start at 0, default True; False is what BERT did.

    bf16 and fp16 parameters get an fp32 master copy at their first step: load weights into the model before.
    """

    _op = "adamw"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        max_grad_norm: float | None = 1.0,
        bias_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)

    def _update(
        self,
        *tensors: Any,
        scratch: Tensor | None,
        sum_over_shards: SumOverShards | None,
        **options: Any,
    ) -> None:
        if scratch is None:
            adamw_(*tensors, **options)
        else:
            optimizer_cpu.adamw_(*tensors, scratch=scratch, **options)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return _common_options(group)


def _common_options(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    names = ("lr", "eps", "weight_decay", "bias_correction")
    return {"beta1": beta1, "beta2": beta2, **{name: group[name] for name in names}}


def _local(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor (a DTensor), or the tensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _sum_over_shards(params: list[Any]) -> SumOverShards | None:
    """What adds up a tensor in place over the ranks that hold parts of these; None where all are whole."""
    layouts = {(p.device_mesh, p.placements) if hasattr(p, "to_local") else None for p in params}
    if layouts <= {None}:
        return None
    meshes = {layout[0] for layout in layouts if layout is not None}
    dims = {placement.is_shard() for layout in layouts if layout is not None for placement in layout[1]}
    if None in layouts or len(meshes) > 1 or next(iter(meshes)).ndim != 1 or dims != {True}:
        raise UserError(
            "the parameters are not all sharded over one dimension of the same ranks: shard the whole model "
            "by fully_shard over a mesh of one dimension"
        )
    import torch.distributed as dist

    group = next(iter(meshes)).get_group()

    def sum_(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor

    return sum_


def _state_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _check_hyper_parameters(options: dict[str, Any]) -> None:
    """Raise UserError for a value outside its limits; written so that NaN fails too."""
    if not 0 <= options["lr"] < math.inf:
        raise UserError(f"lr {options['lr']} must be 0 or more and finite")
    beta1, beta2 = options["betas"]
    for name, beta in (("first", beta1), ("second", beta2)):
        if not 0 <= beta < 1:
            raise UserError(f"the {name} beta {beta} must be at least 0 and below 1")
    if not 0 < options["eps"] < math.inf:
        raise UserError(f"eps {options['eps']} must be above 0 and finite")
    if not 0 <= options["weight_decay"] < math.inf:
        raise UserError(f"weight_decay {options['weight_decay']} must be 0 or more and finite")
    limit = options["max_grad_norm"]
    if limit is not None and not 0 <= limit < math.inf:
        raise UserError(f"max_grad_norm {limit} must be 0 or more and finite, or None for no clipping")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of a model's parameters: decayed, and (biases and LayerNorm) not decayed.

    Decided by the module that owns a parameter, never by its full name. A tied weight is listed once.
    """
    decayed: dict[int, Tensor] = {}
    undecayed: dict[int, Tensor] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            exempt = isinstance(module, nn.LayerNorm) or name.endswith("bias")
            (undecayed if exempt else decayed)[id(param)] = param
    return [
        {"params": list(decayed.values()), "weight_decay": weight_decay},
        {"params": list(undecayed.values()), "weight_decay": 0.0},
    ]


def _linear(k: int, peak: float, total: int, warmup: float) -> float:
    warmup_steps = round(warmup * total)
    if k < warmup_steps:
        return peak * k / warmup_steps
    return peak * (total - k) / (total - warmup_steps)


def _poly(k: int, peak: float, total: int, warmup: float) -> float:
    warmup_steps = round(warmup * total)
    step = k + 1
    if step <= warmup_steps:
        return peak * step / warmup_steps
    return peak * ((total - step) / (total - warmup_steps)) ** 0.5


def _google(k: int, peak: float, total: int, warmup: float) -> float:
    warmup_steps = round(warmup * total)
    return peak * k / warmup_steps if k < warmup_steps else peak * (1 - k / total)


def _nvidia(k: int, peak: float, total: int, warmup: float) -> float:
    progress = (k + 1) / total
    return peak * progress / warmup if progress < warmup else peak * (1 - progress) ** 0.5


def _constant(k: int, peak: float, total: int, warmup: float) -> float:
    warmup_steps = round(warmup * total)
    return peak * k / warmup_steps if k < warmup_steps else peak


_SCHEDULES: dict[str, Callable[[int, float, int, float], float]] = {
    "linear": _linear,
    "poly": _poly,
    "google": _google,
    "nvidia": _nvidia,
    "constant": _constant,
}
SCHEDULES = tuple(_SCHEDULES)


def learning_rate(schedule: str, k: int, *, peak: float, total: int, warmup: float) -> float:
    """Learning rate of the update after `k` updates, of `total`; `warmup` is a proportion of `total`.

    linear: up from 0, then straight down to 0 (Hugging Face's). poly: up, then down as a square root, 0 at
    the last update. google, nvidia: as in their BERT programs, with a drop at the end of the warm-up.
    constant: up, then `peak`. Past `total` every schedule stays where it ended.
    """
    if schedule not in _SCHEDULES:
        raise UserError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
    if total < 1:
        raise UserError(f"a schedule over {total} steps is empty: it needs at least 1")
    if k < 0:
        raise UserError(f"the number of updates done {k} must be 0 or more")
    if not 0 <= peak < math.inf:
        raise UserError(f"the peak learning rate {peak} must be 0 or more and finite")
    if not 0 <= warmup <= 1:
        raise UserError(f"warmup {warmup} must be a proportion of the steps, from 0 to 1")
    if k >= total and schedule != "constant":
        return 0.0
    return _SCHEDULES[schedule](k, peak, total, warmup)
