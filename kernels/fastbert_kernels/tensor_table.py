"""Where the tensors of an optimizer step are, for kernels that walk through all of them in one launch.

A row of a table of addresses tells where each tensor is, an entry of a list of tiles which piece of which
tensor a program takes. Both lie on the device and are made again only when a tensor has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.launch import optimizer_config

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# bytes that a thread loads at once where every address allows it
ALIGNMENT = 16

# the fields of a row, int64
NUM_FIELDS: tl.constexpr = tl.constexpr(10)
NUMEL: tl.constexpr = tl.constexpr(0)
WEIGHT: tl.constexpr = tl.constexpr(1)  # the address of the fp32 weights, and so on
PARAM: tl.constexpr = tl.constexpr(2)
GRAD: tl.constexpr = tl.constexpr(3)
EXP_AVG: tl.constexpr = tl.constexpr(4)
EXP_AVG_SQ: tl.constexpr = tl.constexpr(5)
STEP: tl.constexpr = tl.constexpr(6)
GROUP: tl.constexpr = tl.constexpr(7)
FIRST_TILE: tl.constexpr = tl.constexpr(8)
NUM_TILES: tl.constexpr = tl.constexpr(9)


class StepTensors(NamedTuple):
    """What a step reads and writes: six lists of one length, and the group that each parameter is in.

    All contiguous and on one device. `weights[i]` is `params[i]` itself where that is fp32.
    """

    params: Sequence[Tensor]  # fp32, fp16 or bf16
    weights: Sequence[Tensor]  # fp32, what the parameters are rounded from
    grads: Sequence[Tensor]  # fp32, fp16 or bf16
    exp_avgs: Sequence[Tensor]  # fp32
    exp_avg_sqs: Sequence[Tensor]  # fp32
    steps: Sequence[Tensor]  # fp32, 0-dim
    groups: Sequence[int]


class Launch(NamedTuple):
    """The tiles of those tensors that one compiled kernel can walk through."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    aligned: bool  # every address is a multiple of ALIGNMENT
    first_tile: int
    num_tiles: int


class Layout(NamedTuple):
    launches: tuple[Launch, ...]
    table: Tensor  # [tensors, NUM_FIELDS] int64
    tiles: Tensor  # [tiles, 2] int32: number of the tensor, number of the tile in it


class StepCache:
    """What all steps of one optimizer share: the tables on the device, made again when they change.

    A CUDA graph may capture a step if one ran outside of a graph since the last capture. What the graph
    reads is written by nothing else, and lives as long as this object.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._on_host = Layout((), torch.empty(0), torch.empty(0))
        self._table, self._tiles = DeviceCopy(), DeviceCopy()
        self.options, self.one = DeviceCopy(), DeviceCopy()

    def layout(self, tensors: StepTensors) -> Layout:
        """The launches and tables of a step. ValueError for a tensor that no kernel can take."""
        addresses = [[t.data_ptr() for t in column] for column in tensors[:6]]
        dtypes = [[t.dtype for t in column] for column in (tensors.params, tensors.grads)]
        key = (addresses, dtypes, [p.numel() for p in tensors.params], list(tensors.groups))
        if key != self._key:
            self._on_host, self._key = make_layout(tensors), key
        launches, table, tiles = self._on_host
        device = tensors.params[0].device
        return Layout(launches, self._table.of(table, device), self._tiles.of(tiles, device))


class DeviceCopy:
    """The newest copy of a host tensor on a device, made without waiting for the device."""

    def __init__(self) -> None:
        self._source: Tensor | None = None
        self._copy: Tensor | None = None
        self._pinned: Tensor | None = None  # for the copy that a CUDA graph makes
        self._captured: list[Tensor] = []  # what graphs read: nothing else would keep it

    def of(self, source: Tensor, device: torch.device) -> Tensor:
        """`source` on the device, copied if it differs from the last one. On a CPU it is `source` itself."""
        if device.type == "cpu":
            return source
        capturing = torch.cuda.is_current_stream_capturing()
        copy = self._copy
        if copy is None or copy.device != device or not self._is_copied(source):
            copy = self._copy_in_graph(source, device) if capturing else self._copy_now(source, device)
        if capturing:
            self._captured.append(copy)
        return copy

    def _is_copied(self, source: Tensor) -> bool:
        last = self._source
        return source is last or (last is not None and torch.equal(source, last))

    def _copy_now(self, source: Tensor, device: torch.device) -> Tensor:
        # pinned memory of its own for each copy: the host may be several steps ahead of the device
        self._source, self._copy = source, source.pin_memory().to(device, non_blocking=True)
        if self._pinned is None or self._pinned.shape != source.shape:
            self._pinned = torch.empty_like(source, pin_memory=True)
        return self._copy

    def _copy_in_graph(self, source: Tensor, device: torch.device) -> Tensor:
        # made when the graph is replayed, so no step outside of it may take it for the newest copy. Pinned
        # memory cannot be allocated during a capture
        pinned, self._pinned = self._pinned, None
        if pinned is None or pinned.shape != source.shape:
            raise RuntimeError(
                "a CUDA graph captures an optimizer step that has not run yet: before each capture, run one "
                "step with the same parameters outside of a graph"
            )
        self._captured.append(pinned.copy_(source))
        return pinned.to(device, non_blocking=True)


def make_layout(tensors: StepTensors) -> Layout:
    """The launches, and table and tiles on the host. ValueError for a tensor that no kernel can take."""
    _check(tensors)
    tile = optimizer_config().tile
    members: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, (param, weight, grad, exp_avg, exp_avg_sq) in enumerate(zip(*tensors[:5])):
        addresses = (t.data_ptr() for t in (param, weight, grad, exp_avg, exp_avg_sq))
        aligned = all(address % ALIGNMENT == 0 for address in addresses)
        members.setdefault((param.dtype, grad.dtype, aligned), []).append(i)

    numels = [param.numel() for param in tensors.params]
    # an empty tensor has a tile, too, for its step count
    num_tiles = [max(1, triton.cdiv(numel, tile)) for numel in numels]
    first_tiles, launches, total = [0] * len(numels), [], 0
    for kind, numbers in members.items():
        first = total
        for i in numbers:
            first_tiles[i] = total
            total += num_tiles[i]
        launches.append(Launch(*kind, first_tile=first, num_tiles=total - first))

    columns = (tensors.weights, tensors.params, tensors.grads)
    columns += (tensors.exp_avgs, tensors.exp_avg_sqs, tensors.steps)
    addresses = [[t.data_ptr() for t in column] for column in columns]
    fields = [numels, *addresses, list(tensors.groups), first_tiles, num_tiles]
    order = torch.tensor([i for numbers in members.values() for i in numbers])
    owner = order.repeat_interleave(torch.tensor(num_tiles)[order])
    number = torch.arange(total) - torch.tensor(first_tiles)[owner]
    return Layout(
        tuple(launches),
        torch.tensor(fields, dtype=torch.int64).T.contiguous(),
        torch.stack([owner, number], dim=1).to(torch.int32),
    )


def _check(tensors: StepTensors) -> None:
    device, fp32 = tensors.params[0].device, (torch.float32,)
    for name, column, dtypes in zip(
        StepTensors._fields, tensors[:6], (DTYPES, fp32, DTYPES, fp32, fp32, fp32)
    ):
        for i, (t, param) in enumerate(zip(column, tensors.params, strict=True)):
            numel = 1 if name == "steps" else param.numel()
            if t.dtype not in dtypes or t.device != device or t.numel() != numel or not t.is_contiguous():
                names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise ValueError(
                    f"{name}[{i}] must be {numel} contiguous elements of {names} on {device}, but is "
                    f"{list(t.shape)} of {t.dtype} with strides {list(t.stride())} on {t.device}"
                )
