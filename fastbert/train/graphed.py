"""A training step as one CUDA graph, where that is possible; its inputs come while the last one runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn

from fastbert.batch import PackedBatch
from fastbert.ops.backend import EagerFallbackWarning
from fastbert.ops.lamb import implementation
from fastbert.train import capture
from fastbert.train.capture import CannotCapture, Captured, StaticInputs
from fastbert.train.step import Batch, TrainingStep


class GraphedStep:
    """Runs a TrainingStep over batches from the host: replayed as a graph, or called where none can be.

    The first step captures. Why there is no graph is said once, as a warning. On a CPU each step is a call
    over the same static tensors that a graph would read.
    """

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self._said: set[str] = set()
        self.forget()
        step.optimizer.register_load_state_dict_post_hook(lambda _: self.forget())  # its tensors are new ones

    def forget(self) -> None:
        """Capture again at the next step: tensors that the graph reads or writes have been replaced."""
        self._inputs: StaticInputs | None = None
        self._batches: list[Batch] = []
        self._graph: Captured[None] | None = None
        self._is_settled = False

    @property
    def is_graph(self) -> bool:
        """Whether steps are replayed as a CUDA graph."""
        return self._graph is not None and self._graph.is_graph

    def __call__(self, batches: Sequence[Batch]) -> None:
        """One step over micro-batches on the host."""
        if self.step.prepare(len(batches)):
            self.forget()
        if not self._is_settled:
            self._settle(batches)
        if self._graph is not None and not self._fits(batches):
            self._say("this batch has other shapes than the first one")
        if self._graph is None or not self._fits(batches):
            self.step([batch.to(self.step.device, non_blocking=True) for batch in batches])
            return
        assert self._inputs is not None
        self._inputs.load(_tensors(batches))
        self._graph.replay()

    def _settle(self, batches: Sequence[Batch]) -> None:
        """Capture, or find out why not."""
        self._is_settled = True
        reason = obstacle(self.step, batches)
        if reason:
            self._say(reason)
            return
        inputs = StaticInputs(_tensors(batches), self.step.device)
        static = _like(batches, inputs.tensors)
        inputs.load(_tensors(batches))
        try:
            graph = capture.capture(
                lambda: self.step(static), self.step.device, warm_up=lambda: self.step.rehearse(static[0])
            )
        except CannotCapture as error:
            self._say(str(error))
            return
        if not graph.is_graph:
            self._say(f"the model is on {self.step.device.type}")
        self._inputs, self._batches, self._graph = inputs, static, graph

    def _fits(self, batches: Sequence[Batch]) -> bool:
        assert self._inputs is not None
        lengths = [getattr(batch, "max_seqlen", None) for batch in batches]
        wanted = [getattr(batch, "max_seqlen", None) for batch in self._batches]
        return lengths == wanted and self._inputs.fits(_tensors(batches))

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(
                f"the training step runs without a CUDA graph: {reason}", EagerFallbackWarning, stacklevel=4
            )


def _tensors(batches: Sequence[Batch]) -> list[Tensor]:
    values = [getattr(batch, field.name) for batch in batches for field in fields(batch)]
    return [value for value in values if isinstance(value, Tensor)]


def _like(batches: Sequence[Batch], tensors: Sequence[Tensor]) -> list[Batch]:
    """The batches with other tensors."""
    remaining = iter(tensors)
    made: list[Batch] = []
    for batch in batches:
        names = [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
        values: dict[str, Any] = {name: next(remaining) for name in names}
        # how many tokens are real is the host's affair, and differs from batch to batch
        made.append(replace(batch, num_tokens=batch.num_slots, **values))
    return made


def obstacle(step: TrainingStep, batches: Sequence[Batch]) -> str:
    """Why these steps cannot be replayed, or ""."""
    if not all(isinstance(batch, PackedBatch) for batch in batches):
        return "padded batches have other shapes at each step: leave out --no-packed"
    if not step.ranks.alone:
        return "several ranks add up their gradients while the backward pass goes on"
    optimizer, params = step.optimizer, [p for p in step.params if p.requires_grad]
    if capture.has_graphs(step.device) and implementation(optimizer._op, params) != "triton":
        return "the eager optimizer reads the gradients' norm on the host"
    hooked = _hooked(step.model, optimizer)
    if hooked:
        return f"{hooked} has hooks, whose Python a graph would not run: remove them"
    return _recomputation(step.model)


def _hooked(model: nn.Module, optimizer: Any) -> str:
    """What runs somebody's Python in each step."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, module in model.named_modules():
        if any(getattr(module, kind, None) for kind in kinds):
            return name or type(module).__name__
    for name, param in model.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            return name
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return type(optimizer).__name__
    return ""


def _recomputation(model: nn.Module) -> str:
    """What activation checkpointing has against a graph. Without dropout it need not keep random states."""
    encoder: Any = getattr(getattr(model, "bert", None), "encoder", None)
    if encoder is None or not encoder.checkpoint_every:
        return ""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return "activation checkpointing with dropout puts random states back from the host: --dropout 0"
    if encoder.checkpoint_options.get("preserve_rng_state", True):
        encoder.checkpoint_options = {**encoder.checkpoint_options, "preserve_rng_state": False}
    return ""
