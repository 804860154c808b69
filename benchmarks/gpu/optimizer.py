"""Rows of an optimizer step over a model's parameters: bf16 weights with fp32 masters, and fp32 weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks import peers, targets
from benchmarks.gpu.setting import Setting
from benchmarks.task import OURS, Call, Case, Task, near
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining
from fastbert.ops import backend
from fastbert.optim import AdamW, Lamb, parameter_groups

# bytes of a parameter: kernels/README.md counts them
BYTES = {
    (Lamb, torch.bfloat16): 42,
    (Lamb, torch.float32): 44,
    (AdamW, torch.bfloat16): 30,
    (AdamW, torch.float32): 32,
}
LR = 1e-4
# of weights after a step, relative to their norm: the update is a thousandth of them
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def optimizer_cases(setting: Setting) -> Iterator[Case]:
    fields = setting.sizes.models[-1]
    for optimizer_class in (Lamb, AdamW):
        for dtype in (torch.bfloat16, torch.float32):
            kind = str(dtype).removeprefix("torch.")
            yield Case(
                f"{optimizer_class.__name__.lower()}[{fields['num_hidden_layers']} layers of "
                f"{fields['hidden_size']}, {kind}]",
                functools.partial(_step, optimizer_class, dtype, fields, setting),
            )


def _step(optimizer_class: type, dtype: torch.dtype, fields: dict[str, int], setting: Setting) -> Task:
    with torch.device("meta"):
        model = BertForPreTraining(BertConfig(**fields))
    model = model.to_empty(device=setting.device).to(dtype)
    generator = torch.Generator(setting.device).manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02, generator=generator)
        parameter.grad = torch.randn_like(parameter) * 1e-3
    num_parameters = sum(p.numel() for p in model.parameters())
    amount = BYTES[optimizer_class, dtype] * num_parameters / 1e9
    is_target = setting.has_targets and optimizer_class is Lamb and dtype == torch.bfloat16
    target = amount / (targets.LAMB_MS / 1e3) if is_target else None
    task = Task(amount, "gb", floor=setting.peak_gb, target=target)
    task.notes = {"parameters": num_parameters}

    ours = functools.partial(_ours, optimizer_class)
    start = _copy(model)  # what is timed changes the weights
    expected = _weights_after(functools.partial(_eagerly, optimizer_class), start)
    check = near(expected, TOLERANCE[dtype])
    sides: dict[str, Callable[[nn.Module], Call]] = {OURS: ours}
    if optimizer_class is AdamW:
        # without masters and the refusal of a bad step
        sides["torch fused AdamW"] = _torchs
    else:
        sides["apex FusedLAMB"] = lambda model: peers.fused_lamb(parameter_groups(model, 0.01), lr=LR).step
    for name, step_of in sides.items():
        task.admit(
            name,
            functools.partial(step_of, model),
            check,
            lambda step_of=step_of: lambda: _weights_after(step_of, start),
        )
    return task


def _copy(model: nn.Module) -> nn.Module:
    """With gradients."""
    other = copy.deepcopy(model)
    for parameter, given in zip(other.parameters(), model.parameters()):
        parameter.grad = None if given.grad is None else given.grad.clone()
    return other


def _weights_after(step_of: Callable[[nn.Module], Call], start: nn.Module) -> tuple[Tensor, ...]:
    """The parameters after one step from those of `start`, which stays as it is."""
    model = _copy(start)
    step_of(model)()
    return tuple(parameter.detach() for parameter in model.parameters())


def _ours(optimizer_class: type, model: nn.Module) -> Call:
    step: Call = optimizer_class(parameter_groups(model, 0.01), lr=LR).step
    return step


def _eagerly(optimizer_class: type, model: nn.Module) -> Call:
    step = _ours(optimizer_class, model)

    def run() -> None:
        with backend.use("eager"):
            step()

    return run


def _torchs(model: nn.Module) -> Call:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=LR, eps=1e-6, fused=True)

    def run() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return run
