"""Stand-ins for a CUDA graph on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from tests.op_tape import Tape


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
    with Tape() as tape:
        results = run()
    # the memory, not the object: a parameter may get another
    tape.entries = [(entry[0], *(tree_map(_alias, part) for part in entry[1:])) for entry in tape.entries]
    return Recorded(tape.replay, results)


def _alias(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def record_calls(run: Callable[[], tuple[Tensor, ...]], device: Any, *, pool: Any) -> Any:
    """`run` itself, with results that stay where they are."""
    results = run()

    def again() -> None:
        for result, value in zip(results, run()):
            result.copy_(value)

    return Recorded(again, results)
