"""Rows between padded batches and kept tokens: values, gradients, dtypes, and the kernel behind both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from fastbert import ops
from fastbert.modeling import BertModel
from fastbert.ops import backend
from fastbert.ops.padding import _pad_rows, _unpad_rows
from tests.kernel_testing import CAN_LAUNCH, DEVICE, INTERPRETED, in_the_parent_only, run_interpreted
from tests.small_models import small_config

B, S = 3, 5
# every second; some; none; all; only the last
KEEPS = {
    "every second": torch.arange(B * S) % 2 == 0,
    "an empty sequence": torch.tensor([1, 1, 0, 0, 0] + [0] * 5 + [1, 1, 1, 0, 1]).bool(),
    "nothing": torch.zeros(B * S, dtype=torch.bool),
    "everything": torch.ones(B * S, dtype=torch.bool),
    "the last": torch.arange(B * S) == B * S - 1,
}
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip

keeps = pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)


@in_the_parent_only
def test_the_kernel_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestKernels")


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float64).to(
            device, dtype
        )
    return torch.randint(0, 2 if dtype == torch.bool else 200, shape).to(device, dtype)


def registered_unpad(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return _unpad_rows(x.flatten(0, 1), indices)


def registered_pad(
    rows: torch.Tensor, indices: torch.Tensor, B: int, S: int, fill: float = 0.0
) -> torch.Tensor:
    return _pad_rows(rows, indices, B * S, fill).view(B, S, *rows.shape[1:])


def check(
    keep: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, unpad: Any, pad: Any, device: str = DEVICE
) -> None:
    """Against boolean indexing, which is torch's own and another way."""
    keep = keep.to(device)
    indices = keep.nonzero().squeeze(1)
    x = random((B, S, *shape), dtype, device)
    rows = unpad(x, indices)
    assert rows.dtype == dtype and torch.equal(rows, x.flatten(0, 1)[keep])
    for fill in (0.0, 1.0):
        padded = pad(rows, indices, B, S, fill)
        right = torch.full_like(x.flatten(0, 1), fill)
        right[keep] = rows
        assert padded.dtype == dtype and torch.equal(padded.flatten(0, 1), right)


def check_gradients(keep: torch.Tensor, unpad: Any, pad: Any, device: str = DEVICE) -> None:
    keep = keep.to(device)
    indices = keep.nonzero().squeeze(1)
    x = random((B, S, 4), torch.float32, device).requires_grad_()
    rows = unpad(x, indices)
    drows = torch.randn_like(rows)
    (dx,) = torch.autograd.grad(rows, x, drows)
    right = torch.zeros(B * S, 4, device=device)
    right[keep] = drows
    assert torch.equal(dx.flatten(0, 1), right)
    rows = rows.detach().requires_grad_()
    padded = pad(rows, indices, B, S, -7.0)
    dpadded = torch.randn_like(padded)
    (drows,) = torch.autograd.grad(padded, rows, dpadded)
    assert torch.equal(drows, dpadded.flatten(0, 1)[keep])


both = pytest.mark.parametrize(
    ("unpad", "pad"),
    [(ops.unpad_rows, ops.pad_rows), (registered_unpad, registered_pad)],
    ids=["public", "operator"],
)
eager = pytest.mark.skipif(INTERPRETED, reason="the interpreter runs the kernel")


@eager
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@both
def test_values(unpad: Any, pad: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for keep in KEEPS.values():
        check(keep, shape, dtype, unpad, pad, "cpu")


@eager
@keeps
@both
def test_each_is_the_gradient_of_the_other(unpad: Any, pad: Any, keep: torch.Tensor) -> None:
    check_gradients(keep, unpad, pad, "cpu")


def test_everything_kept_is_a_view() -> None:
    x = torch.randn(B, S, 4)
    rows = ops.unpad_rows(x, None)
    assert rows.data_ptr() == x.data_ptr() and rows.shape == (B * S, 4)
    padded = ops.pad_rows(rows, None, B, S)
    assert padded.data_ptr() == x.data_ptr() and torch.equal(padded, x)


def test_kept_tokens_name_all_rows_as_none() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]]).bool()
    indices, cu_seqlens = ops.kept_tokens(mask, 3, 3, torch.device("cpu"))
    assert indices is not None
    assert (indices.tolist(), cu_seqlens.tolist()) == ([0, 1, 6, 8], [0, 2, 2, 4])
    for everything in (None, mask | True):
        indices, cu_seqlens = ops.kept_tokens(everything, 3, 3, torch.device("cpu"))
        assert (indices, cu_seqlens.tolist()) == (None, [0, 3, 6, 9])


@eager
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_are_registered_as_they_should_be(dtype: torch.dtype) -> None:
    indices = torch.tensor([1, 4, 5])
    opcheck(_unpad_rows, (torch.randn(7, 4).to(dtype).requires_grad_(), indices))
    opcheck(_pad_rows, (torch.randn(3, 2, 4).to(dtype).requires_grad_(), indices, 7, -1.5))
    opcheck(_unpad_rows, (torch.arange(7), indices))


@eager
def test_gradients_of_gradients() -> None:
    indices = torch.tensor([1, 4, 5])
    x, rows = torch.randn(7, 2).double().requires_grad_(), torch.randn(3, 2).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: _unpad_rows(x, indices).square(), x)
    assert torch.autograd.gradgradcheck(lambda rows: _pad_rows(rows, indices, 7, 2.0).square(), rows)


@eager
def test_compiled_in_full() -> None:
    torch.compiler.reset()
    indices = torch.tensor([0, 2, 7, 14])
    x = torch.randn(B, S, 4, requires_grad=True)

    def there_and_back(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return ops.pad_rows(ops.unpad_rows(x, indices) * 2, indices, B, S, -1.0)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    results = []
    for function in (there_and_back, compiled):
        y = function(x, indices)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)
    torch.compiler.reset()


@eager
def test_the_model_unpads_and_pads_with_them() -> None:
    model = BertModel(small_config()).eval()
    ids = torch.randint(5, 211, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    embeds = torch.randn(2, 6, 64, requires_grad=True)
    backend._last_run.clear()
    hidden = model(ids, mask).last_hidden_state
    assert backend.last_run().keys() >= {"unpad_rows", "pad_rows"}
    assert not hidden[0, 4:].any()
    hidden = model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
    (gradient,) = torch.autograd.grad(hidden.square().sum() + hidden.sum(), embeds)
    assert not gradient[0, 4:].any() and gradient[0, :4].any(1).all() and gradient[1].any(1).all()
    backend._last_run.clear()
    model(ids, torch.ones_like(ids))
    assert not backend.last_run().keys() & {"unpad_rows", "pad_rows"}


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("shape", [(), (7,), (2, 3), (0,)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_values(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        backend._last_run.clear()
        for keep in KEEPS.values():
            check(keep, shape, dtype, ops.unpad_rows, ops.pad_rows)
        assert backend.last_run() == {"unpad_rows": "triton", "pad_rows": "triton"}

    @pytest.mark.usefixtures("nan_filled")
    @keeps
    @both
    def test_each_is_the_gradient_of_the_other(self, unpad: Any, pad: Any, keep: torch.Tensor) -> None:
        check_gradients(keep, unpad, pad)
        assert set(backend.last_run().values()) == {"triton"}

    @pytest.mark.usefixtures("nan_filled")
    def test_several_tiles_and_strided_rows(self) -> None:
        wide = torch.randn(90, 1400, device=DEVICE)
        x = wide[:, 3:1303]
        indices = torch.randperm(90, device=DEVICE)[:41]  # in any order
        rows = _unpad_rows(x, indices)
        assert rows.is_contiguous() and torch.equal(rows, x[indices])
        assert torch.equal(_unpad_rows(wide.T, indices), wide.T[indices])
        right = torch.full_like(x, torch.finfo(torch.float32).min)
        right[indices] = rows
        assert torch.equal(_pad_rows(rows, indices, 90, torch.finfo(torch.float32).min), right)

    def test_bits_are_copied(self) -> None:
        x = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45], device=DEVICE)[:, None]
        moved = _unpad_rows(x, torch.tensor([3, 1, 0], device=DEVICE))
        assert moved.view(torch.int32).tolist() == x.view(torch.int32)[[3, 1, 0]].tolist()

    def test_an_index_without_a_row_reads_nothing(self) -> None:
        from fastbert_kernels.gather_rows import gather_rows

        memory = torch.full((9, 3), float("nan"), device=DEVICE)
        memory[2:5] = 1.0
        index = torch.tensor([0, 3, -1, 2, 2**40], device=DEVICE)
        assert gather_rows(memory[2:5], index, 7.0)[:, 0].tolist() == [1.0, 7.0, 7.0, 1.0, 7.0]

    def test_row_offsets_beyond_32_bits(self) -> None:
        # 4 GiB of address space, of which a CPU commits the pages of three short rows
        stride = 2**30
        memory = torch.empty(2 * stride + 40, dtype=torch.float16, device=DEVICE)
        x = memory.as_strided((3, 40), (stride, 1)).copy_(torch.randn(3, 40))
        index = torch.tensor([2, 0, 1], device=DEVICE)
        assert torch.equal(_unpad_rows(x, index), torch.stack([x[2], x[0], x[1]]))

    def test_bad_input_is_one_clear_error(self) -> None:
        from fastbert_kernels.gather_rows import gather_rows

        x, index = torch.zeros(4, 6, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
        for message, arguments in [
            ("x and index must be .* torch.int32", (x, index.int())),
            (r"x and index must be .* \[24\]", (x.flatten(), index)),
            ("x must have adjacent columns, but has column stride 4", (x.view(6, 4).T, index)),
            ("x has elements of 16 bytes, torch.complex128", (x.to(torch.complex128), index)),
        ]:
            with pytest.raises(ValueError, match=message):
                gather_rows(*arguments)

    def test_elements_of_16_bytes_run_eagerly_and_say_so(self) -> None:
        backend._said.clear()
        x = torch.randn(2, 3, 4, dtype=torch.complex128, device=DEVICE)
        indices = torch.tensor([1, 5], device=DEVICE)
        with pytest.warns(backend.EagerFallbackWarning, match="unpad_rows runs on eager: .* up to 8 bytes"):
            assert torch.equal(ops.unpad_rows(x, indices), x.flatten(0, 1)[indices])
        backend._said.clear()
