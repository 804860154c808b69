"""bias + GELU kernels against fp64 torch, forward and backward."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import bias_gelu
from fastbert_kernels.bias_gelu import FORMS, bias_gelu_bwd, bias_gelu_fwd
from fastbert_kernels.launch import LaunchConfig

from tests.kernel_testing import (
    CAN_LAUNCH,
    DEVICE,
    DTYPES,
    assert_accurate,
    in_the_parent_only,
    run_interpreted,
)

# one element; odd; BERT-Base hidden; exact multiples of the tiles; no power of two; many rows of few columns
SIZES = [(1, 1), (3, 33), (37, 768), (64, 1024), (5, 1500), (97, 7)]


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


def reference(x: Tensor, bias: Tensor, form: str) -> Tensor:
    return F.relu(x + bias) if form == "relu" else F.gelu(x + bias, approximate=form)


def reference_grads(dy: Tensor, x: Tensor, bias: Tensor, form: str) -> tuple[Tensor, Tensor]:
    x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
    return torch.autograd.grad(reference(x, bias, form), (x, bias), dy)


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, bias, dy; x is wide enough to reach both flat ends of the activation."""
    M, N = shape
    x, bias, dy = 3 * torch.randn(M, N), torch.randn(N), torch.randn(M, N)
    return x.to(DEVICE, dtype), bias.to(DEVICE, dtype), dy.to(DEVICE, dtype)


def check(
    x: Tensor, bias: Tensor, dy: Tensor, *, ours: str, theirs: str, module: ModuleType = bias_gelu
) -> None:
    """Form `ours` of the kernels against form `theirs` of torch."""
    exact = [t.double() for t in (dy, x, bias)]
    plain = reference(x, bias, theirs).to(x.dtype)
    assert_accurate(module.bias_gelu_fwd(x, bias, ours), plain, reference(exact[1], exact[2], theirs))
    results = zip(
        module.bias_gelu_bwd(dy, x, bias, ours),
        reference_grads(dy, x, bias, theirs),
        reference_grads(*exact, theirs),
    )
    for mine, plain, right in results:
        assert_accurate(mine, plain, right)


def check_several_tiles(num_rows: int, module: ModuleType = bias_gelu) -> None:
    module.column_sum_config = lambda M, N: LaunchConfig(8, 64, tiles_m=3)  # type: ignore[attr-defined]
    check(*inputs((num_rows, 100), torch.float32), ours="none", theirs="none", module=module)


def check_between_nans(module: ModuleType = bias_gelu) -> None:
    """Whatever lies behind the last row and the last column has no part."""
    x, bias, dy = inputs((5, 40), torch.float32)
    x, dy = (torch.full((90, 100), float("nan"), device=DEVICE)[:5, :40].copy_(t) for t in (x, dy))
    check(x, bias, dy, ours="none", theirs="none", module=module)


def check_far_rows(module: ModuleType = bias_gelu) -> None:
    # row 2 starts at element 2^31, and the interpreter wraps 32-bit products as the GPU does. 4 GiB of
    # address space, of which a CPU commits the pages of six short rows
    stride, N = 2**30, 40
    memory = torch.empty(2 * stride + 2 * N, dtype=torch.float16, device=DEVICE)
    far_x, far_dy = (memory[start:].as_strided((3, N), (stride, 1)) for start in (0, N))
    x, bias, dy = inputs((3, N), torch.float16)
    far_x.copy_(x)
    far_dy.copy_(dy)
    assert torch.equal(module.bias_gelu_fwd(far_x, bias), bias_gelu_fwd(x, bias))
    for far, near in zip(module.bias_gelu_bwd(far_dy, far_x, bias), bias_gelu_bwd(dy, x, bias)):
        assert torch.equal(far, near)


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SIZES, ids=str)
    def test_bias_gelu_matches_reference(self, shape: tuple[int, int], dtype: torch.dtype, form: str) -> None:
        x, bias, dy = inputs(shape, dtype)
        check(x, bias, dy, ours=form, theirs=form)

    @pytest.mark.parametrize(("ours", "theirs"), [("tanh", "none"), ("none", "tanh"), ("relu", "none")])
    def test_the_check_sees_another_form(self, ours: str, theirs: str) -> None:
        with pytest.raises(AssertionError, match="max error"):
            check(*inputs((37, 768), torch.float32), ours=ours, theirs=theirs)

    @pytest.mark.parametrize(
        ("form", "values"),
        [
            ("none", [0.84134475, 2.69063917, -0.00936083, -0.15426877]),
            ("tanh", [0.84119199, 2.69111241, -0.00888759, -0.15428599]),
            ("relu", [1.0, 2.7, 0.0, 0.0]),
        ],
    )
    def test_known_values(self, form: str, values: list[float]) -> None:
        # the forms differ by 4.73e-4 at most, at |x| = 2.699: a tolerance of 1e-3 would not tell them apart
        x = torch.tensor([[1.0, 2.7, -2.7, -0.5]], device=DEVICE)
        y = bias_gelu_fwd(x - 0.25, torch.full((4,), 0.25, device=DEVICE), form)
        torch.testing.assert_close(y, torch.tensor([values], device=DEVICE), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("form", FORMS)
    def test_derivative_by_finite_differences(self, form: str) -> None:
        x = torch.tensor([[-9.0, -2.7, -0.7517, -0.1, 0.1, 1.0, 2.7, 9.0]], device=DEVICE)
        bias = torch.zeros(8, device=DEVICE)
        dx, _ = bias_gelu_bwd(torch.ones_like(x), x, bias, form)
        h = 1e-4
        wide = x.double()
        slope = (reference(wide + h, bias.double(), form) - reference(wide - h, bias.double(), form)) / (
            2 * h
        )
        torch.testing.assert_close(dx.double(), slope, rtol=0, atol=1e-6)

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("num_rows", [1, 24, 25, 47, 100])
    # one row; exactly one program; one row into the next; one row short of two; the last program almost empty
    def test_several_tiles_a_program(self, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bias_gelu, "column_sum_config", bias_gelu.column_sum_config)  # comes back
        check_several_tiles(num_rows)

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_fp32_bias_beside_half_x(self, dtype: torch.dtype, form: str) -> None:
        """What autocast gives: y and dx in x's dtype, dbias in fp32."""
        x, _, dy = inputs((37, 100), dtype)
        check(x, torch.randn(100).to(DEVICE), dy, ours=form, theirs=form)

    @pytest.mark.usefixtures("nan_filled")
    def test_strided_rows(self) -> None:
        x, bias, dy = inputs((37, 130), torch.float32)
        wide_x, wide_dy = torch.full((37, 400), 1e4, device=DEVICE), torch.full((37, 260), 1e4, device=DEVICE)
        strided_x, strided_dy = wide_x[:, 200:330], wide_dy[:, 1:131]
        strided_x.copy_(x)
        strided_dy.copy_(dy)
        assert torch.equal(bias_gelu_fwd(strided_x, bias), bias_gelu_fwd(x, bias))
        for strided, packed in zip(bias_gelu_bwd(strided_dy, strided_x, bias), bias_gelu_bwd(dy, x, bias)):
            assert strided.is_contiguous() and torch.equal(strided, packed)
        # stride 0: one row seen 37 times
        repeated = x[:1].expand(37, 130)
        assert torch.equal(bias_gelu_fwd(repeated, bias), bias_gelu_fwd(repeated.contiguous(), bias))

    @pytest.mark.parametrize("shape", [(0, 33), (3, 0), (0, 0)], ids=str)
    def test_empty(self, shape: tuple[int, int]) -> None:
        x, bias, dy = inputs(shape, torch.float16)
        assert bias_gelu_fwd(x, bias).shape == shape
        dx, dbias = bias_gelu_bwd(dy, x, bias)
        assert dx.shape == shape
        assert torch.equal(dbias, torch.zeros_like(bias)) and dbias.dtype == torch.float16

    @pytest.mark.parametrize("form", FORMS)
    def test_far_ends_are_finite_and_nan_stays(self, form: str) -> None:
        x = torch.tensor([[-6e4, -30.0, 0.0, 30.0, 6e4, float("nan")]], device=DEVICE)
        bias = torch.zeros(6, device=DEVICE)
        y = bias_gelu_fwd(x, bias, form)[0]
        assert y[:5].tolist() == [0.0, 0.0, 0.0, 30.0, 60_000.0] and y[5].isnan()
        dx, dbias = bias_gelu_bwd(torch.ones_like(x), x, bias, form)
        assert dx[0, [0, 1, 3, 4]].tolist() == [0.0, 0.0, 1.0, 1.0]
        assert torch.equal(dx[0, :5], dbias[:5])

    def test_bias_gelu_is_deterministic(self) -> None:
        x, bias, dy = inputs((150, 200), torch.float16)
        first = [bias_gelu_fwd(x, bias), *bias_gelu_bwd(dy, x, bias)]
        for _ in range(3):
            again = [bias_gelu_fwd(x, bias), *bias_gelu_bwd(dy, x, bias)]
            assert all(torch.equal(a, b) for a, b in zip(first, again))

    def test_inputs_are_left_alone(self) -> None:
        tensors = inputs((5, 40), torch.float32)
        before = [t.clone() for t in tensors]
        x, bias, dy = tensors
        bias_gelu_fwd(x, bias)
        bias_gelu_bwd(dy, x, bias)
        assert all(torch.equal(t, b) for t, b in zip(tensors, before))

    def test_row_offsets_beyond_32_bits(self) -> None:
        check_far_rows()

    def test_what_lies_behind_the_matrix_has_no_part(self) -> None:
        check_between_nans()

    def test_bad_input_is_one_clear_error(self) -> None:
        x, bias, dy = inputs((4, 6), torch.float32)
        for message, call in [
            ("approximate 'erf' is not one of none, tanh, relu", lambda: bias_gelu_fwd(x, bias, "erf")),
            (r"x must be \[M, N\], but has shape \(2, 2, 6\)", lambda: bias_gelu_fwd(x.view(2, 2, 6), bias)),
            ("x must be float32, float16 or bfloat16", lambda: bias_gelu_fwd(x.double(), bias.double())),
            ("x must have adjacent columns, .* stride 6", lambda: bias_gelu_fwd(x.t(), bias[:4])),
            (r"bias must be \[6\] torch.float32 .* is \[5\]", lambda: bias_gelu_fwd(x, bias[:5])),
            (r"bias must be .* is \[6\] torch.float16", lambda: bias_gelu_fwd(x, bias.half())),
            (
                r"bias must be \[6\] torch.float16 or torch.float32 .* torch.bfloat16",
                lambda: bias_gelu_fwd(x.half(), bias.bfloat16()),
            ),
            ("bias must be contiguous, .* stride 2", lambda: bias_gelu_fwd(x, bias.repeat(2)[::2])),
            (r"dy must be like x, .* is \(3, 6\)", lambda: bias_gelu_bwd(dy[:3], x, bias)),
            ("dy must be like x, .* torch.bfloat16", lambda: bias_gelu_bwd(dy.bfloat16(), x, bias)),
            ("dy must have adjacent columns", lambda: bias_gelu_bwd(dy[:1, :1].expand(4, 6), x, bias)),
        ]:
            with pytest.raises(ValueError, match=message):
                call()
