"""The tables that a step's kernels read: what is in them, and when they are copied to the device."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels.lamb import GroupOptions, optimizer_step
from fastbert_kernels.launch import optimizer_config
from fastbert_kernels.tensor_table import DeviceCopy, StepCache, StepTensors, make_layout

from tests.kernel_testing import INTERPRETED

CONFIG = optimizer_config()
TILE = CONFIG.tile
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A device called "meta" to copy to, and whether its stream is being captured."""
    answer = [False]
    empty_like = torch.empty_like
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answer[0])
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self.clone())
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory: empty_like(x))
    return answer


META = torch.device("meta")


def test_a_table_is_copied_when_it_changes(capturing: list[bool]) -> None:
    mirror, table = DeviceCopy(), torch.arange(4)
    first = mirror.of(table, META)
    assert first.device == META
    assert mirror.of(table, META) is first
    assert mirror.of(table.clone(), META) is first
    assert mirror.of(table + 1, META) is not first
    assert mirror.of(table, torch.device("cpu")) is table


def test_a_graph_copies_a_changed_table_itself(capturing: list[bool]) -> None:
    mirror, table = DeviceCopy(), torch.arange(4)
    first = mirror.of(table, META)
    capturing[0] = True
    assert mirror.of(table, META) is first
    in_graph = mirror.of(table + 1, META)
    assert in_graph is not first
    # what a replay reads: nobody writes it again, and it lives as long as the optimizer
    pinned = next(t for t in mirror._captured if t.device.type == "cpu")
    assert pinned.tolist() == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="run one step with the same parameters outside of a graph"):
        mirror.of(table + 2, META)
    capturing[0] = False
    # the copy in the graph is not there before a replay
    outside = mirror.of(table + 1, META)
    assert outside is not in_graph and outside is not first
    assert pinned.tolist() == [1, 2, 3, 4]


def test_tiles_cover_every_element_once() -> None:
    sizes = [0, 1, TILE, TILE + 1, 3 * TILE - 1]
    columns = [[torch.zeros(size) for size in sizes] for _ in range(5)]
    columns[0][1] = columns[0][1].bfloat16()
    columns[2][1] = columns[2][1].bfloat16()
    layout = make_layout(StepTensors(*columns, [torch.zeros(()) for _ in sizes], [0, 1, 0, 1, 1]))
    assert [(n.param_dtype, n.first_tile, n.num_tiles) for n in layout.launches] == [
        (FP32, 0, 7),
        (BF16, 7, 1),
    ]
    assert layout.tiles.tolist() == [[0, 0], [2, 0], [3, 0], [3, 1], [4, 0], [4, 1], [4, 2], [1, 0]]
    assert layout.tiles.dtype == torch.int32
    first_tiles = {0: 0, 1: 7, 2: 1, 3: 2, 4: 4}
    for number, row in enumerate(layout.table.tolist()):
        addresses = [column[number].data_ptr() for column in columns]
        num_tiles = max(1, -(-sizes[number] // TILE))
        assert row[0] == sizes[number] and row[7] == (0, 1, 0, 1, 1)[number]
        assert row[1:6] == [addresses[1], addresses[0], *addresses[2:]]
        assert row[8:] == [first_tiles[number], num_tiles]


def test_a_tensor_at_an_odd_address_is_not_loaded_16_bytes_at_a_time() -> None:
    room = torch.zeros(40)
    for begin, aligned in ((0, True), (4, True), (1, False), (2, False)):
        grad = room[begin : begin + 8]
        columns = [[torch.zeros(8)] for _ in range(5)]
        columns[2] = [grad]
        layout = make_layout(StepTensors(*columns, [torch.zeros(())], [0]))
        assert layout.launches[0].aligned == (aligned and room.data_ptr() % 16 == 0)


def test_without_a_gpu_kernels_refuse_tensors_on_a_cpu() -> None:
    if INTERPRETED:
        pytest.skip("the interpreter takes them")
    columns = [[torch.zeros(8)] for _ in range(5)]
    options = GroupOptions(0.1, 0.9, 0.999, 1e-6, 0.0, True)
    with pytest.raises(ValueError, match=re.escape("x is on cpu, but Triton kernels run on a GPU")):
        optimizer_step(StepTensors(*columns, [torch.zeros(())], [0]), [options], StepCache())


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.tile = 1  # type: ignore[misc]
    assert CONFIG.tile % CONFIG.block == 0 and CONFIG.tile % CONFIG.norm_block == 0
