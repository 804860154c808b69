"""One optimizer step over the parameters of a BERT, clipping included on every side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.task import Check, Roof, Task, near
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining
from fastbert.optim import AdamW, Lamb

OPTIONS = {"lr": 1e-4, "eps": 1e-6, "weight_decay": 0.01}
LAMB_BYTES = 44  # of an fp32 parameter: `kernels/README.md` counts them
# of the change of the weights, which are 200 times as large and rounded to fp32
TOLERANCE = 1e-3


def parameters_of(size: str, vocab_size: int, device: torch.device) -> list[nn.Parameter]:
    with torch.device("meta"):
        shapes = [
            p.shape for p in BertForPreTraining(BertConfig.named(size, vocab_size=vocab_size)).parameters()
        ]
    params = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = 1e-3 * torch.randn(p.shape, device=device)
    return params


Step = Callable[[list[nn.Parameter]], Callable[[], object]]


def torch_adamw(**kind: bool) -> Step:
    def make(params: list[nn.Parameter]) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(params, **OPTIONS, **kind)

        def step() -> None:
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        return step

    return make


def after_a_step(make: Step, params: list[nn.Parameter]) -> list[Tensor]:
    """What the weights have become, as a change of theirs; `params` stay as they are."""
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    for copy, p in zip(copies, params):
        copy.grad = None if p.grad is None else p.grad.clone()
    make(copies)()
    return [copy.detach() - p.detach() for copy, p in zip(copies, params)]


def lamb_by_the_paper(params: list[nn.Parameter]) -> list[Tensor]:
    """The change of a first step in fp64 (You et al., arXiv 1904.00962, algorithm 2), clipped to 1."""
    gradients = [p.grad.double() for p in params if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    changes = []
    for p, g in zip(params, gradients):
        g = g / norm.clamp(min=1.0)
        # both moments corrected for their start at 0: g and its square
        update = g / (g.abs() + OPTIONS["eps"]) + OPTIONS["weight_decay"] * p.double()
        changes.append(-OPTIONS["lr"] * p.double().norm() / update.norm() * update)
    return changes


# 5.5 M and 29 M parameters
@pytest.mark.parametrize(("size", "vocab_size", "rounds"), [("mini", 8192, 15), ("small", 30522, 7)])
def test_step(
    size: str,
    vocab_size: int,
    rounds: int,
    device: torch.device,
    roof: Roof,
    in_turns: Callable[..., None],
) -> None:
    params = parameters_of(size, vocab_size, device)
    norm: Tensor = nn.utils.get_total_norm(p.grad for p in params if p.grad is not None)
    assert norm > 1, "clipping must be active"
    num_parameters = sum(p.numel() for p in params)
    task = Task(
        num_parameters, "parameter", bytes=LAMB_BYTES * num_parameters, roof=roof,
        notes={"parameters": num_parameters},
    )  # fmt: skip
    lamb = near(lamb_by_the_paper(params), TOLERANCE)
    adamw = near(after_a_step(torch_adamw(fused=True), params), TOLERANCE)
    sides: dict[str, tuple[Step, Check]] = {
        "fastbert Lamb": (lambda params: Lamb(params, **OPTIONS).step, lamb),
        "fastbert AdamW": (lambda params: AdamW(params, **OPTIONS).step, adamw),
        "torch AdamW fused": (torch_adamw(fused=True), adamw),
        "torch AdamW foreach": (torch_adamw(foreach=True), adamw),
        "apex FusedLAMB": (lambda params: peers.fused_lamb([{"params": params}], **OPTIONS).step, lamb),
    }
    # the sides share weights and gradients: what a step does to them does not change its time
    for name, (make, check) in sides.items():
        task.admit(
            name, lambda make=make: make(params), check, lambda make=make: lambda: after_a_step(make, params)
        )
    in_turns(task, rounds=rounds)
