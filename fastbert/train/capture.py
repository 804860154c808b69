"""CUDA graphs: a function over tensors that keep their places, captured once and replayed for other values.

    inputs = StaticInputs([ids, cu_seqlens], device)
    graph = capture(lambda: model(*inputs.tensors), device)
    inputs.load([other_ids, other_cu_seqlens])     # from the host, without waiting for the device
    output = graph.replay()                        # the same tensors each time: clone what is to be kept

On any other device a replay is a plain call over the same tensors, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

WARM_UPS = 2  # runs before the capture: the first compiles and allocates, the second is as all others
ALIGNMENT = 256  # bytes: where torch's allocator would put a tensor


def has_graphs(device: torch.device) -> bool:
    """Whether this kind of device can replay graphs."""
    return device.type == "cuda"


class CannotCapture(Exception):
    """No graph can be made; the message is the reason, in one sentence without a full stop."""


class Captured(Generic[Result]):
    """What `capture` returns: `replay()` runs the function again and returns its result.

    The result of a graph is always the same object, whose tensors the replay overwrites.
    """

    def __init__(
        self, function: Callable[[], Result], graph: torch.cuda.CUDAGraph | None, result: Any
    ) -> None:
        self._function, self._graph, self._result = function, graph, result

    @property
    def is_graph(self) -> bool:
        """Whether a graph is replayed, and not the function called."""
        return self._graph is not None

    def replay(self) -> Result:
        """Run on the current stream; the host does not wait."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        result: Result = self._result
        return result


def capture(
    function: Callable[[], Result],
    device: torch.device,
    *,
    warm_up: Callable[[], object] | None = None,
    generators: Sequence[torch.Generator] = (),
    pool: Any = None,
) -> Captured[Result]:
    """Capture `function`, which reads and writes tensors that keep their places, as a CUDA graph.

    Args:
        function: the host must not wait for the device in it, and shapes must not depend on values. Other
            numbers of the host are those of the capture at every replay.
        device: where its tensors are; on any but CUDA nothing runs, and each replay is a call.
        warm_up: runs before the capture instead of `function`, for one that changes what must stay.
        generators: that `function` draws from, beside torch's own of the device; all of them draw new numbers
            at each replay, as calls of the function would, and the first replay the first ones.
        pool: a `torch.cuda.graph_pool_handle()` to share memory among graphs that never run at once.

    CannotCapture with the reason if it cannot be done; what the warm-up raises goes through.
    """
    if not has_graphs(device):
        return Captured(function, None, None)
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        sources = [torch.cuda.default_generators[torch.cuda.current_device()], *generators]
        with _kept_state(sources):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    (warm_up or function)()
            torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # only what this thread does can spoil the capture: other threads watch collectives, or pin memory
        with (
            _own_casts(),
            _refusals(sources),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            result = function()
    return Captured(function, graph, result)


@contextmanager
def _kept_state(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Put the generators back to where they were, whatever was drawn."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)


@contextmanager
def _own_casts() -> Iterator[None]:
    """An autocast around all this takes no weight that it has cast before into the graph, nor out of it."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _refusals(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """CannotCapture for what torch and CUDA say during a capture, with generators that can be used again."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    except RuntimeError as error:  # which torch.cuda.OutOfMemoryError and AcceleratorError are, too
        for generator, state in zip(generators, states):
            _renew(generator, state)
        raise CannotCapture(f"the capture failed: {_first_line(error)}") from error


def _renew(generator: torch.Generator, state: Tensor) -> None:
    # one that was in a capture that failed believes that it still is, and refuses to draw outside of one
    fresh = torch.Generator(generator.device)
    fresh.set_state(state)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _first_line(error: BaseException) -> str:
    """Of what went wrong first: the end of a capture that was spoilt is an error as well."""
    while error.__context__ is not None:
        error = error.__context__
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


class StaticInputs:
    """Tensors of fixed shapes and places on a device, for values that come from the host.

    `tensors` are parts of one block there. On CUDA values go through pinned memory, are copied by a stream of
    their own into one of two more blocks while the device still computes with the earlier ones, and from
    there into place when the current stream comes to it. Events keep the order; the host waits only if it is
    two loads ahead.
    """

    def __init__(self, examples: Sequence[Tensor], device: torch.device) -> None:
        self.device = device
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in examples]
        self._size = sum(_padded(tensor.nbytes) for tensor in examples)
        self._block = torch.zeros(self._size, dtype=torch.uint8, device=device)
        self.tensors = self._parts(self._block)
        self._ways = [_Way(self) for _ in range(2)] if has_graphs(device) else []
        self._stream = torch.cuda.Stream(device) if has_graphs(device) else None

    def _parts(self, block: Tensor) -> list[Tensor]:
        parts, start = [], 0
        for shape, dtype in self._shapes:
            size = shape.numel() * dtype.itemsize
            parts.append(block[start : start + size].view(dtype).view(shape))
            start += _padded(size)
        return parts

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these have the shapes and dtypes."""
        return [(tensor.shape, tensor.dtype) for tensor in tensors] == self._shapes

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Set all values, for what the current stream does from now on. ValueError for other shapes."""
        if not self.fits(tensors):
            wanted = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in self._shapes)
            got = ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors)
            raise ValueError(f"the inputs keep their shapes: wanted {wanted}, got {got}")
        if self._stream is None or any(tensor.is_cuda for tensor in tensors):
            for part, tensor in zip(self.tensors, tensors):
                part.copy_(tensor, non_blocking=True)
            return
        way = self._ways[0]
        self._ways.reverse()
        way.arrived.synchronize()  # of two loads ago: its pinned memory is free
        for part, tensor in zip(way.pinned_parts, tensors):
            part.copy_(tensor)
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(way.taken)
            way.block.copy_(way.pinned, non_blocking=True)
            way.arrived.record(self._stream)
        current.wait_event(way.arrived)
        self._block.copy_(way.block, non_blocking=True)
        way.taken.record(current)


class _Way:
    """From the host to the device: pinned memory, a block there, and how far the last load has come."""

    def __init__(self, inputs: StaticInputs) -> None:
        self.pinned = _pinned(inputs._size)
        self.pinned_parts = inputs._parts(self.pinned)
        self.block = torch.zeros_like(inputs._block)
        self.arrived, self.taken = torch.cuda.Event(), torch.cuda.Event()
        # the block's first values are written by the stream that allocates it
        self.taken.record(torch.cuda.current_stream(inputs.device))


def _pinned(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
