"""Stand-ins for a CUDA graph on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_HOST_READS = ("_local_scalar_dense", "nonzero", "item", "equal", "masked_select")


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in _HOST_READS, f"{name} waits for the device, which a CUDA graph cannot"
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        # the memory, not the object: parameters may get another
        self.steps.append((function, *(tree_map(_alias, x) for x in (args, kwargs, output))))
        return output


def _alias(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


@dataclass
class Recorded:
    run: Callable[[], None]
    results: tuple[Tensor, ...]

    def replay(self) -> tuple[Tensor, ...]:
        self.run()
        return self.results


def record_operators(run: Callable[[], tuple[Tensor, ...]], device: Any, *, pool: Any) -> Any:
    """`run` as the operators that it called.

    A replay calls no Python of the model, and reads the memory that was recorded. An operator that waits for
    the device is an AssertionError.
    """
    with _Recorder() as recorder:
        results = run()

    def again() -> None:
        for function, args, kwargs, output in recorder.steps:
            fresh = function(*args, **kwargs)
            for old, new in zip(_tensors(output), _tensors(fresh)):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return Recorded(again, results)


def record_calls(run: Callable[[], tuple[Tensor, ...]], device: Any, *, pool: Any) -> Any:
    """`run` itself, with results that stay where they are."""
    results = run()

    def again() -> None:
        for result, value in zip(results, run()):
            result.copy_(value)

    return Recorded(again, results)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, Tensor)]
