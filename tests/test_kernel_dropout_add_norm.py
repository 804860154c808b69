"""dropout + residual + LayerNorm kernels against fp64: output, statistics, gradients, dropout masks."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import dropout_add_norm
from fastbert_kernels.dropout_add_norm import dropout_add_norm_bwd, dropout_add_norm_fwd
from fastbert_kernels.launch import LaunchConfig, row_norm_bwd_config, row_norm_fwd_config

from fastbert.ops.dropout_add_norm import dropout_noise
from tests.kernel_testing import (
    CAN_LAUNCH,
    DEVICE,
    DTYPES,
    assert_accurate,
    in_the_parent_only,
    run_interpreted,
)

# one narrow row; odd, less than a block; several tiles, a block and one column; MiniLM; BERT-Base, which is
# no power of two; BERT-Large; wider than a tile
SHAPES = [(1, 8), (5, 33), (67, 65), (7, 384), (9, 768), (3, 1024), (2, 1500), (2, 2100)]
SEED = -6_510_615_555_426_900_571  # as torch draws them: all 64 bits
NAMES = ("dx", "dresidual", "dbias", "dweight", "dnorm_bias")


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


class Problem:
    """Inputs, and what torch makes of them. `other` is the dtype of the residual and the parameters."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        *,
        other: torch.dtype | None = None,
        has_residual: bool = True,
        has_bias: bool = True,
        dropout_p: float = 0.0,
        eps: float = 1e-12,
        offset: float = 0.5,
    ) -> None:
        M, N = shape
        other = other or dtype
        self.x, self.dy = ((torch.randn(M, N) + shift).to(DEVICE, dtype) for shift in (offset, 0.0))
        self.residual = torch.randn(M, N).to(DEVICE, other) if has_residual else None
        self.bias = torch.randn(N).to(DEVICE, other) if has_bias else None
        self.weight, self.norm_bias = ((torch.randn(N) + shift).to(DEVICE, other) for shift in (1.0, 0.0))
        self.eps, self.dropout_p = eps, dropout_p
        self.seed = torch.tensor([SEED], device=DEVICE) if dropout_p else None

    @property
    def inputs(self) -> list[Tensor | None]:
        return [self.x, self.residual, self.bias, self.weight, self.norm_bias]

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor | None]]:
        """y in `dtype`, and the gradients in the order of NAMES, in plain torch."""
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in self.inputs]
        x, residual, bias, weight, norm_bias = leaves
        assert x is not None and weight is not None
        h = x if bias is None else x + bias
        if self.seed is not None:
            h = h * dropout_noise(self.seed, *x.shape, self.dropout_p, dtype)
        h = h if residual is None else h + residual
        y = F.layer_norm(h, weight.shape, weight, norm_bias, self.eps)
        wanted = [leaf for leaf in leaves if leaf is not None]
        gradients = iter(torch.autograd.grad(y, wanted, self.dy.to(dtype)))
        return y.detach(), [None if leaf is None else next(gradients) for leaf in leaves]


def run(
    p: Problem, module: ModuleType = dropout_add_norm
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """y, mean, rstd, gradients."""
    dropout = (p.dropout_p, p.seed)
    y, mean, rstd = module.dropout_add_norm_fwd(
        p.x, p.residual, p.bias, p.weight, p.norm_bias, p.eps, *dropout
    )
    gradients = module.dropout_add_norm_bwd(p.dy, p.x, p.residual, p.bias, p.weight, mean, rstd, *dropout)
    return y, mean, rstd, list(gradients)


def check(p: Problem, module: ModuleType = dropout_add_norm) -> None:
    y, mean, rstd, gradients = run(p, module)
    exact, exact_gradients = p.reference(torch.float64)
    # parameters wider than x: then plain torch is fp32 with one rounding at the end, as under autocast
    plain_dtype = p.weight.dtype
    plain, plain_gradients = p.reference(plain_dtype)
    assert_accurate(y, plain.to(p.x.dtype), exact)
    for name, given, ours, theirs, right in zip(
        NAMES, p.inputs, gradients, plain_gradients, exact_gradients, strict=True
    ):
        assert (ours is None) == (given is None), name
        if ours is not None and theirs is not None and right is not None and given is not None:
            assert ours.dtype == given.dtype and ours.is_contiguous(), name
            assert_accurate(ours, theirs.to(given.dtype), right)
    assert mean.dtype == rstd.dtype == torch.float32 and mean.shape == rstd.shape == p.x.shape[:1]


def check_far_rows(module: ModuleType = dropout_add_norm) -> None:
    """Rows so far apart that the third begins at element 2^31, which 32 bits do not reach."""
    # the interpreter wraps 32-bit products as the GPU does. 4 GiB of address space, of which a CPU
    # commits the pages of a few short rows
    stride = 2**30
    for N in (40, 2100):  # all rows in one tile; a program for each
        p = Problem((3, N), torch.float16)
        near = run(p)
        memory = torch.empty(2 * stride + 3 * N, dtype=torch.float16, device=DEVICE)
        far = [memory[i * N :].as_strided((3, N), (stride, 1)) for i in range(3)]
        assert p.residual is not None
        p.x, p.residual, p.dy = (t.copy_(s) for t, s in zip(far, (p.x, p.residual, p.dy)))
        ours = run(p, module)
        for a, b in zip([*ours[:3], *ours[3]], [*near[:3], *near[3]]):
            assert torch.equal(a, b)


def check_between_nans(module: ModuleType = dropout_add_norm) -> None:
    """Whatever lies behind the last row has no part."""
    p = Problem((5, 40), dropout_p=0.3)
    p.x, p.dy = (torch.full((70, 40), float("nan"), device=DEVICE)[:5].copy_(t) for t in (p.x, p.dy))
    check(p, module)


def check_constant_row(
    value: float, width: int, dtype: torch.dtype, module: ModuleType = dropout_add_norm
) -> None:
    """eps 1e-12 is 0 in fp16, and the squares of 768 times 300 pass its largest number."""
    p = Problem((2, width), dtype, has_residual=False, has_bias=False)
    p.x.fill_(value)
    y, mean, rstd, (dx, *_) = run(p, module)
    assert torch.equal(y, p.norm_bias.expand(2, width))
    assert torch.equal(mean, p.x[:, 0].float())
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e6), rtol=1e-6, atol=0)
    # 1e6 times a gradient of order 1 is beyond fp16's largest number
    assert dx is not None and not dx.isnan().any()


def check_variance_about_the_mean(module: ModuleType = dropout_add_norm) -> None:
    """Mean square less square of the mean would lose every digit of it."""
    p = Problem((4, 100), offset=4096.0, has_residual=False, has_bias=False)
    _, mean, rstd, _ = run(p, module)
    exact = p.x.double()
    torch.testing.assert_close(mean.double(), exact.mean(1), rtol=1e-7, atol=0)
    right = exact.var(1, correction=0).add(1e-12).rsqrt()
    torch.testing.assert_close(rstd.double(), right, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_cols", [1, 8, 64, 65, 384, 768, 1024, 1500, 2048, 4096, 4097, 8192])
@pytest.mark.parametrize("num_rows", [1, 7, 4096, 32_768, 2**20])
def test_configs_hold_whole_rows_and_keep_partial_sums_few(num_rows: int, num_cols: int) -> None:
    for config in (row_norm_fwd_config(num_cols), row_norm_bwd_config(num_rows, num_cols)):
        for size in (config.block_m, config.block_n, config.num_warps):
            assert size > 0 and size & (size - 1) == 0
        assert num_cols <= config.block_n < max(2 * num_cols, 128)
        assert 8 * 32 * config.num_warps <= config.block_m * config.block_n <= 16 * 32 * config.num_warps
        assert config.num_warps <= 16
    programs = config.num_row_programs(num_rows)
    assert (programs - 1) * config.rows_per_program < num_rows <= programs * config.rows_per_program
    assert programs <= 512
    # another number of rows compiles nothing: only tiles_m differs, which is a run-time argument
    assert row_norm_bwd_config(1, num_cols) == dataclasses.replace(config, tiles_m=4)


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dropout_p", [0.0, 0.3])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape: tuple[int, int], dropout_p: float, dtype: torch.dtype) -> None:
        check(Problem(shape, dtype, dropout_p=dropout_p))

    @pytest.mark.usefixtures("nan_filled")
    def test_the_widest_rows(self) -> None:
        check(Problem((2, 8192), torch.float16, dropout_p=0.3))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dropout_p", [0.0, 0.3])
    @pytest.mark.parametrize("has_bias", [True, False], ids=["bias", ""])
    @pytest.mark.parametrize("has_residual", [True, False], ids=["residual", ""])
    def test_forms(self, has_residual: bool, has_bias: bool, dropout_p: float) -> None:
        check(Problem((9, 100), has_residual=has_residual, has_bias=has_bias, dropout_p=dropout_p))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dropout_p", [0.0, 0.3])
    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_fp32_parameters_and_residual_beside_half_x(self, dtype: torch.dtype, dropout_p: float) -> None:
        """What autocast gives: y and dx in x's dtype, the other gradients in fp32."""
        check(Problem((9, 100), dtype, other=torch.float32, dropout_p=dropout_p))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_fp32_out(self, dtype: torch.dtype) -> None:
        """The last layer's, under autocast: y is not rounded, and dy is fp32."""
        p = Problem((9, 100), dtype, other=torch.float32, dropout_p=0.3)
        p.dy = torch.randn(9, 100).to(DEVICE)
        exact, exact_gradients = p.reference(torch.float64)
        plain, plain_gradients = p.reference(torch.float32)
        y, mean, rstd = dropout_add_norm_fwd(*p.inputs, p.eps, p.dropout_p, p.seed, fp32_out=True)  # type: ignore[arg-type]
        assert_accurate(y, plain, exact)
        gradients = dropout_add_norm_bwd(
            p.dy, p.x, p.residual, p.bias, p.weight, mean, rstd, p.dropout_p, p.seed
        )
        for given, ours, theirs, right in zip(p.inputs, gradients, plain_gradients, exact_gradients):
            assert ours is not None and theirs is not None and right is not None and given is not None
            assert_accurate(ours, theirs.to(given.dtype), right)

    def test_half_x_and_residual_beside_fp32_parameters(self) -> None:
        p = Problem((9, 100), torch.bfloat16, other=torch.float32)
        assert p.residual is not None
        p.residual = p.residual.bfloat16()
        check(p)
        # no dropout and one dtype: the gradient of the residual is that of x, not a copy
        dx, dresidual, *_ = run(p)[3]
        assert dx is dresidual

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("num_rows", [1, 5, 6, 7, 11, 12, 200])
    # one row; one short of a program, exactly one, one more; likewise two; more programs than one sum reads
    def test_several_tiles_a_program(self, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        config = LaunchConfig(2, 128, tiles_m=3, num_stages=3)
        monkeypatch.setattr(dropout_add_norm, "row_norm_bwd_config", lambda M, N: config)
        monkeypatch.setattr(dropout_add_norm, "SUM_ROWS", 16)
        check(Problem((num_rows, 100), dropout_p=0.3))

    @pytest.mark.usefixtures("nan_filled")
    def test_strided_rows(self) -> None:
        p = Problem((13, 130), dropout_p=0.2)
        packed = run(p)
        wide = [torch.full((13, 400 + 8 * i), 1e4, device=DEVICE)[:, 1 + i : 131 + i] for i in range(3)]
        assert p.residual is not None
        p.x, p.residual, p.dy = (t.copy_(s) for t, s in zip(wide, (p.x, p.residual, p.dy)))
        strided = run(p)
        for a, b in zip([*strided[:3], *strided[3]], [*packed[:3], *packed[3]]):
            assert a.is_contiguous() and torch.equal(a, b)
        # stride 0, as the gradient of a sum has
        p.dy = p.dy[:1].expand(13, 130)
        check(p)

    @pytest.mark.parametrize("shape", [(0, 33), (3, 0), (0, 0)], ids=str)
    @pytest.mark.parametrize("dropout_p", [0.0, 0.3])
    def test_empty(self, shape: tuple[int, int], dropout_p: float) -> None:
        p = Problem(shape, torch.float16, dropout_p=dropout_p)
        y, mean, rstd, gradients = run(p)
        assert y.shape == shape and mean.shape == rstd.shape == shape[:1]
        for given, gradient in zip(p.inputs, gradients):
            assert gradient is not None and given is not None
            assert torch.equal(gradient, torch.zeros_like(given))

    # ---- numbers

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("width", [1, 8, 33, 768, 1500])
    @pytest.mark.parametrize("value", [3.0, 300.0, 0.1, -7e-5])
    def test_a_constant_row_gives_exactly_the_bias(
        self, value: float, width: int, dtype: torch.dtype
    ) -> None:
        check_constant_row(value, width, dtype)

    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_large_rows_in_half(self, dtype: torch.dtype) -> None:
        p = Problem((3, 768), dtype, has_residual=False, has_bias=False)
        p.x.copy_(300 + torch.arange(768, device=DEVICE) % 2)
        y, mean, _, _ = run(p)
        exact, _ = p.reference(torch.float64)
        assert_accurate(y, exact.to(dtype), exact)
        torch.testing.assert_close(mean, p.x.double().mean(1).float(), rtol=1e-6, atol=0)

    def test_the_variance_is_taken_about_the_mean(self) -> None:
        check_variance_about_the_mean()

    def test_eps_of_the_config_counts(self) -> None:
        for eps in (1e-12, 1e-5, 1.0):
            check(Problem((5, 33), eps=eps))
        p = Problem((5, 33), eps=1.0)
        right = p.reference(torch.float64)[0]
        p.eps = 1e-5
        assert (run(p)[0] - right).abs().max() > 0.05

    def test_worked_by_hand(self) -> None:
        # h = 1, 3 + 2 = 1, 5: mean 3, variance 4
        x, residual = torch.tensor([[1.0, 3.0]], device=DEVICE), torch.tensor([[0.5, 2.5]], device=DEVICE)
        bias = torch.tensor([-0.5, -0.5], device=DEVICE)
        weight, norm_bias = (torch.tensor(v, device=DEVICE) for v in ([2.0, 3.0], [10.0, 20.0]))
        y, mean, rstd = dropout_add_norm_fwd(x, residual, bias, weight, norm_bias, 0.0)
        assert (y.tolist(), mean.tolist(), rstd.tolist()) == ([[8.0, 23.0]], [3.0], [0.5])
        dy = torch.tensor([[1.0, 10.0]], device=DEVICE)
        dx, dresidual, dbias, dweight, dnorm_bias = dropout_add_norm_bwd(
            dy, x, residual, bias, weight, mean, rstd
        )
        # dxhat = 2, 30: mean 16, mean of dxhat * xhat = (-2 + 30) / 2 = 14; both elements cancel
        assert dx.tolist() == [[0.0, 0.0]] and dresidual is dx and dbias is not None
        assert dbias.tolist() == [0.0, 0.0]
        assert dweight.tolist() == [-1.0, 10.0] and dnorm_bias.tolist() == [1.0, 10.0]

    def test_nan_stays_in_its_row(self) -> None:
        p = Problem((4, 33))
        p.x[1, 7] = float("nan")
        y = run(p)[0]
        assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()

    # ---- dropout

    @staticmethod
    def exported_masks(
        shape: tuple[int, int], dropout_p: float, seed: int, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """What elements are multiplied by in the forward and in the backward of the kernels."""
        M, N = shape
        # x @ one-hot rows cannot be seen through a norm: a huge residual in one more column makes it linear
        x, residual = (torch.zeros(M, N + 1, dtype=dtype, device=DEVICE) for _ in range(2))
        x[:, :N] = 1.0
        residual[:, N] = 1.0
        weight, norm_bias = torch.ones(N + 1, device=DEVICE, dtype=dtype), torch.zeros(N + 1, device=DEVICE)
        at = torch.tensor([seed], device=DEVICE)
        y, mean, rstd = dropout_add_norm_fwd(
            x, residual, None, weight, norm_bias.to(dtype), 1e-12, dropout_p, at
        )
        forward = y.float() / rstd[:, None] + mean[:, None]  # the sum
        dy = torch.randn(M, N + 1, device=DEVICE).to(dtype)
        dx, dresidual, *_ = dropout_add_norm_bwd(dy, x, residual, None, weight, mean, rstd, dropout_p, at)
        assert dresidual is not None
        backward = dx.float() / dresidual.float()
        return forward[:, :N], backward[:, :N]

    def test_the_dropout_masks_of_forward_and_backward(self) -> None:
        shape = (130, 1000)  # 130,000 elements: four standard deviations of the share are 0.0033
        forward, backward = self.exported_masks(shape, 0.1, SEED)
        kept = forward > 0.5
        assert abs((~kept).float().mean() - 0.1) < 0.004
        assert torch.equal(kept, backward > 0.5)
        for mask in (forward, backward):
            torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / 0.9), rtol=0, atol=2e-5)
            torch.testing.assert_close(mask[~kept], torch.zeros_like(mask[~kept]), rtol=0, atol=2e-5)
        # the one that torch arithmetic makes, and another seed's
        seeds = [torch.tensor([seed], device=DEVICE) for seed in (SEED, SEED + 1, SEED + 2**32)]
        right, other, upper = (dropout_noise(seed, *shape, 0.1, torch.float32) > 0 for seed in seeds)
        assert torch.equal(kept, right)
        # equal in 0.81 + 0.01 of all places: seeds, rows, columns and the words of a call are independent
        pairs = [(kept, other), (kept, upper), (kept[1:], kept[:-1])]
        pairs += [(kept[:, lag:], kept[:, :-lag]) for lag in range(1, 9)]
        for a, b in pairs:
            assert abs((a == b).float().mean() - 0.82) < 0.01

    def test_an_elements_fate_depends_on_its_place_only(self) -> None:
        seed = torch.tensor([SEED], device=DEVICE)
        large = dropout_noise(seed, 70, 1000, 0.5, torch.float32)
        for rows, cols in ((70, 17), (3, 1000), (1, 1), (70, 65)):
            forward, _ = self.exported_masks((rows, cols), 0.5, SEED)
            assert torch.equal(forward > 0.5, large[:rows, :cols] > 0)

    @pytest.mark.parametrize("dropout_p", [0.5, 1.0])
    def test_shares(self, dropout_p: float) -> None:
        p = Problem((40, 200), dropout_p=dropout_p)
        check(p)
        assert p.seed is not None and p.residual is not None
        noise = dropout_noise(p.seed, 40, 200, dropout_p, torch.float32)
        assert abs((noise == 0).float().mean() - dropout_p) < 0.03
        if dropout_p == 1.0:
            alone = dropout_add_norm_fwd(p.residual, None, None, p.weight, p.norm_bias, p.eps)[0]
            assert torch.equal(run(p)[0], alone)

    # ---- the launchers

    @pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
    def test_is_deterministic_and_leaves_inputs_alone(self, dtype: torch.dtype) -> None:
        p = Problem((50, 100), dtype, dropout_p=0.1)
        tensors = [t for t in (*p.inputs, p.dy, p.seed) if t is not None]
        before = [t.clone() for t in tensors]
        first = run(p)
        for _ in range(3):
            again = run(p)
            assert all(torch.equal(a, b) for a, b in zip([*first[:3], *first[3]], [*again[:3], *again[3]]))
        assert all(torch.equal(t, b) for t, b in zip(tensors, before))

    def test_what_lies_behind_the_last_row_has_no_part(self) -> None:
        check_between_nans()

    def test_row_offsets_beyond_32_bits(self) -> None:
        check_far_rows()

    def test_bad_input_is_one_clear_error(self) -> None:
        p = Problem((4, 6))
        x, residual, bias, weight, norm_bias = p.inputs
        assert x is not None and residual is not None and bias is not None and weight is not None
        assert norm_bias is not None
        wide = torch.zeros(2, 8193, device=DEVICE)
        seed = torch.tensor([1], device=DEVICE)
        mean = torch.zeros(4, device=DEVICE)

        def forward(
            x: Tensor = x,
            residual: Tensor | None = residual,
            bias: Tensor | None = bias,
            weight: Tensor = weight,
            norm_bias: Tensor = norm_bias,
            *dropout: object,
        ) -> None:
            dropout_add_norm_fwd(x, residual, bias, weight, norm_bias, 1e-12, *dropout)  # type: ignore[arg-type]

        def backward(dy: Tensor = p.dy, mean: Tensor = mean, rstd: Tensor = mean) -> None:
            dropout_add_norm_bwd(dy, x, residual, bias, weight, mean, rstd)

        for message, call in [
            (r"x must be \[M, N\], but has shape \(2, 2, 6\)", lambda: forward(x.view(2, 2, 6))),
            ("x must be float32, float16 or bfloat16", lambda: forward(x.double())),
            ("x must have adjacent columns, .* stride 6", lambda: forward(x.t())),
            ("x is 8193 wide, and the kernel's limit is 8192: use the eager path", lambda: forward(wide)),
            (
                r"residual must be \(4, 6\) torch.float32 .* is \(3, 6\)",
                lambda: forward(residual=residual[:3]),
            ),
            ("residual must be .* is .* torch.bfloat16", lambda: forward(residual=residual.bfloat16())),
            ("residual must have adjacent", lambda: forward(residual=residual[:, :1].expand(4, 6))),
            (
                r"residual must be \(4, 6\) torch.bfloat16 or torch.float32 .* torch.float16",
                lambda: forward(x.bfloat16(), residual.half()),
            ),
            (r"bias must be \[6\] torch.float32 .* is \[5\]", lambda: forward(bias=bias[:5])),
            (r"weight must be .* is \[6\] torch.float16", lambda: forward(weight=weight.half())),
            (
                "norm_bias must be contiguous, .* stride 2",
                lambda: forward(norm_bias=norm_bias.repeat(2)[::2]),
            ),
            (
                "the parameters of the norm must have one dtype, but are weight torch.float32 and norm_bias",
                lambda: forward(x.half(), norm_bias=norm_bias.half()),
            ),
            (
                "dropout_p 1.5 is not a probability",
                lambda: forward(x, None, None, weight, norm_bias, 1.5, seed),
            ),
            (
                "dropout needs a seed, an int64 tensor of one element .* None",
                lambda: forward(x, None, None, weight, norm_bias, 0.1),
            ),
            (
                "dropout needs a seed, .* torch.int32",
                lambda: forward(x, None, None, weight, norm_bias, 0.1, seed.int()),
            ),
            (r"dy must be \(4, 6\) torch.float32 .* is \(3, 6\)", lambda: backward(p.dy[:3])),
            ("dy must be .* torch.bfloat16", lambda: backward(p.dy.bfloat16())),
            ("dy must have adjacent columns", lambda: backward(p.dy[:, :1].expand(4, 6))),
            (r"mean must be the forward's, \[4\] .* is \[3\]", lambda: backward(mean=mean[:3])),
            (r"rstd must be the forward's, .* torch.float16", lambda: backward(rstd=mean.half())),
        ]:
            with pytest.raises(ValueError, match=message):
                call()
