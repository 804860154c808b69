"""Rows of an optimizer step over a model's parameters: bf16 weights with fp32 masters, and fp32 weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.timing import OURS, Case, Task
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining
from fastbert.optim import AdamW, Lamb, parameter_groups

# bytes of a parameter: kernels/README.md counts them
BYTES = {
    (Lamb, torch.bfloat16): 42,
    (Lamb, torch.float32): 44,
    (AdamW, torch.bfloat16): 30,
    (AdamW, torch.float32): 32,
}
# ms on an H200 with fp32 gradients at BERT-Large
LAMB_TARGET_MS = 4.5


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
    target = amount / (LAMB_TARGET_MS / 1e3) if is_target else None
    task = Task(amount, "gb", floor=setting.peak_gb, target=target)
    task.notes = {"parameters": num_parameters}

    def ours() -> Callable[[], object]:
        return optimizer_class(parameter_groups(model, 0.01), lr=1e-4).step

    task.admit(OURS, ours)
    if optimizer_class is AdamW:
        # without masters, clipping and the refusal of a bad step
        groups = parameter_groups(model, 0.01)
        task.admit("torch fused AdamW", lambda: torch.optim.AdamW(groups, lr=1e-4, fused=True).step)
    else:
        task.admit("apex FusedLAMB", lambda: _apex(parameter_groups(model, 0.01)))
    return task


def _apex(groups: list[dict[str, object]]) -> Callable[[], object]:
    from apex.optimizers import FusedLAMB  # NVIDIA's; another package has the name apex

    step: Callable[[], object] = FusedLAMB(groups, lr=1e-4, max_grad_norm=1.0).step
    return step
