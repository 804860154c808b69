"""CUDA graphs on a CPU: a tape of torch operations, and the parts of torch.cuda that make and replay graphs.

As a graph does, the tape holds operations with the tensors and numbers of its recording, and a replay runs
them again on the same memory; what a recording changed is put back, for a capture computes nothing. So a
function whose replays give what calls give reads no number of the host that changes, and no tensor that
moves. Every call on the stand-ins is written down, for tests of their order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fastbert import optim
from fastbert.ops import attention_eager, backend
from fastbert.ops.lamb import KernelStep
from fastbert.train import capture, graphed

# what makes the host wait, where tensors are on a GPU
HOST_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")


class Tape(TorchDispatchMode):
    """Records what runs inside; `replay` runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> a tensor of it, its first values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert name not in HOST_READS, f"the host reads the device: {name}"
        for value, argument in zip(args, func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.keep(*(value if isinstance(value, list) else [value]))
        result = func(*args, **kwargs)
        self.entries.append((func, args, kwargs, result))
        return result

    def keep(self, *tensors: Tensor) -> None:
        """Remember the values before they change for the first time."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._before:
                whole = torch.tensor([], dtype=torch.uint8).set_(storage)
                self._before[storage.data_ptr()] = whole, whole.clone()

    def put_back(self) -> None:
        for tensor, before in self._before.values():
            tensor.copy_(before)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # the tape is of what an autocast has made of the operations
    def replay(self) -> None:
        for func, args, kwargs, recorded in self.entries:
            again = func(*args, **kwargs)
            for place, value in zip(tree_flatten(recorded)[0], tree_flatten(again)[0]):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)

    def shape(self) -> list[Any]:
        """The operations, with the shapes of their tensors and all other arguments."""

        def described(value: Any) -> Any:
            return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value

        return [
            (str(func), [described(value) for value in tree_flatten((args, kwargs))[0]])
            for func, args, kwargs, _ in self.entries
            if func.namespace != "profiler"  # the marks that torch sets around an optimizer's step
        ]


@torch.no_grad()
def step_in_torch(
    self: KernelStep,
    *tensors: Any,
    options: Any,
    max_grad_norm: float,
    loss_scale: Tensor | None,
    sum_over_shards: None,
) -> Tensor:
    """AdamW's step as the kernels take it, in operations of torch: the host reads nothing."""
    grads = tensors[2]
    scale = torch.ones(()) if loss_scale is None else loss_scale
    norm = torch.stack([grad.float().square().sum() for grad in grads]).sum().sqrt() / scale
    is_fine = norm.isfinite()
    factor = max_grad_norm / norm.clamp(min=max_grad_norm) / scale
    for param, weight, grad, exp_avg, exp_avg_sq, step, group in zip(*tensors):
        o = options[group]
        step.add_(is_fine)
        grad = grad.float() * factor
        first = exp_avg * o["beta1"] + grad * (1 - o["beta1"])
        second = exp_avg_sq * o["beta2"] + grad.square() * (1 - o["beta2"])
        update = first / (1 - o["beta1"] ** step) / ((second / (1 - o["beta2"] ** step)).sqrt() + o["eps"])
        new = weight - o["lr"] * (update + o["weight_decay"] * weight)
        for old, value in ((exp_avg, first), (exp_avg_sq, second), (weight, new)):
            old.copy_(torch.where(is_fine, value, old))
        param.copy_(weight)
    return norm


class FakeCuda:
    """Stand-ins for torch.cuda, on CPU tensors; `calls` is what was asked of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.tapes: list[Tape] = []
        self.streams = [FakeStream(self, "main")]
        cuda = self

        class Event:
            def __init__(self) -> None:
                self.name = f"event{next(cuda._numbers)}"

            def record(self, stream: FakeStream) -> None:
                cuda.calls.append(f"{stream.name} records {self.name}")

            def synchronize(self) -> None:
                cuda.calls.append(f"the host waits for {self.name}")

        class CUDAGraph:
            def replay(self) -> None:
                cuda.calls.append(f"replay on {cuda.streams[-1].name}")
                self.tape.replay()

            def register_generator_state(self, generator: Any) -> None:
                cuda.calls.append("register a generator")

        @contextmanager
        def graph(graph: Any, pool: Any, stream: FakeStream, capture_error_mode: str) -> Any:
            cuda.calls.append(f"capture on {stream.name}, {capture_error_mode}, pool {pool}")
            random, graph.tape = torch.get_rng_state(), Tape()
            with graph.tape:
                try:
                    yield
                except Exception:
                    # what torch says when it ends such a capture, in place of what spoilt it
                    raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
            graph.tape.put_back()
            torch.set_rng_state(random)
            cuda.tapes.append(graph.tape)

        @contextmanager
        def on_stream(stream: FakeStream) -> Any:
            cuda.streams.append(stream)
            yield
            cuda.streams.pop()

        @contextmanager
        def on_device(device: Any) -> Any:
            yield

        self._numbers = iter(range(1000))
        for name, stand_in in {
            "Stream": lambda device: FakeStream(self, f"stream{next(self._numbers)}"),
            "Event": Event,
            "CUDAGraph": CUDAGraph,
            "graph": graph,
            "stream": on_stream,
            "device": on_device,
            "current_stream": lambda device=None: self.streams[-1],
            "current_device": lambda: 0,
            "default_generators": [torch.default_generator],
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(capture, "has_graphs", lambda device: True)
        patch.setattr(capture, "_pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
        patch.setattr(capture, "_renew", lambda generator, state: self.calls.append("renew a generator"))
        # operations treat CPU tensors as a GPU's, which the host had better not look at
        for module in (backend, attention_eager):
            patch.setattr(module, "host_may_read", lambda x: False)


def without_launches(patch: pytest.MonkeyPatch) -> None:
    """Let the optimizers go the way of the kernels, whose launches no tape would see."""
    for module in (optim, graphed):
        patch.setattr(module, "implementation", lambda op, params: "triton")
    patch.setattr(KernelStep, "__call__", step_in_torch)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self.cuda.calls.append(f"{self.name} waits for {event.name}")
