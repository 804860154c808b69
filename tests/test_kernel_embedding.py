"""Embedding kernels against fp64: rows, their norm and dropout, gradients of tables and norm, bad ids."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import embedding, gather_rows, table_grad
from fastbert_kernels.launch import LaunchConfig, run_sum_config

from fastbert.ops.dropout_add_norm import dropout_noise
from tests.kernel_testing import (
    CAN_LAUNCH,
    DEVICE,
    DTYPES,
    assert_accurate,
    in_the_parent_only,
    run_interpreted,
)
from tests.test_kernel_linear import Recorder

# (tokens, width): one narrow row; odd, less than a block; several tiles, a block and one column; BERT-Base,
# which is no power of two; wider than a tile
SHAPES = [(1, 8), (5, 33), (19, 65), (9, 768), (2, 1500)]
SEED = -6_510_615_555_426_900_571  # as torch draws them: all 64 bits
NAMES = ("dword", "dtype", "dposition", "dweight", "dnorm_bias")


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


def new_report() -> Tensor:
    """Where a GPU writes: memory of the host."""
    report = torch.full((3, 2), -1, dtype=torch.int64)
    return report if DEVICE == "cpu" else report.pin_memory()


class Problem:
    """Inputs, and what torch makes of them."""

    def __init__(
        self,
        num_tokens: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        *,
        sizes: tuple[int, int, int] = (11, 2, 7),
        norm_dtype: torch.dtype | None = None,
        dropout_p: float = 0.0,
        padding_idx: int | None = 1,
        eps: float = 1e-12,
        offset: float = 0.0,
    ) -> None:
        self.ids = [torch.randint(0, size, (num_tokens,)).to(DEVICE) for size in sizes]
        self.tables = [(torch.randn(size, width) + offset).to(DEVICE, dtype) for size in sizes]
        self.weight, self.norm_bias = (
            (torch.randn(width) + shift).to(DEVICE, norm_dtype or dtype) for shift in (1.0, 0.0)
        )
        self.dy = torch.randn(num_tokens, width).to(DEVICE, dtype)
        self.eps, self.dropout_p, self.padding_idx = eps, dropout_p, padding_idx
        self.seed = torch.tensor([SEED], device=DEVICE) if dropout_p else None
        self.report = new_report()

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.tables, self.weight, self.norm_bias]

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y in `dtype`, and the gradients in the order of NAMES, in plain torch."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in self.parameters]
        *tables, weight, norm_bias = leaves
        paddings = (self.padding_idx, None, None)
        rows = [F.embedding(i, t, padding) for i, t, padding in zip(self.ids, tables, paddings)]
        y = F.layer_norm(rows[0] + rows[1] + rows[2], weight.shape, weight, norm_bias, self.eps)
        if self.seed is not None:
            y = y * dropout_noise(self.seed, *y.shape, self.dropout_p, dtype)
        return y.detach(), torch.autograd.grad(y, leaves, self.dy.to(dtype))


def run(p: Problem, module: ModuleType = embedding) -> tuple[Tensor, ...]:
    """y, mean, rstd, and the gradients in the order of NAMES."""
    dropout = (p.dropout_p, p.seed)
    y, mean, rstd = module.embedding_fwd(p.ids, p.tables, p.weight, p.norm_bias, p.eps, p.report, *dropout)
    gradients = module.embedding_bwd(p.dy, p.ids, p.tables, p.weight, mean, rstd, p.padding_idx, *dropout)
    return y, mean, rstd, *gradients


def check(p: Problem, module: ModuleType = embedding) -> None:
    y, mean, rstd, *gradients = run(p, module)
    exact, exact_gradients = p.reference(torch.float64)
    plain_dtype = p.weight.dtype
    plain, plain_gradients = p.reference(plain_dtype)
    assert_accurate(y, plain.to(p.tables[0].dtype), exact)
    for name, given, ours, theirs, right in zip(
        NAMES, p.parameters, gradients, plain_gradients, exact_gradients, strict=True
    ):
        assert ours.dtype == given.dtype and ours.is_contiguous(), name
        assert_accurate(ours, theirs.to(given.dtype), right)
        assert not ours[~right.bool()].any(), name  # rows of no id, and the padding row
    assert mean.dtype == rstd.dtype == torch.float32 and mean.shape == rstd.shape == y.shape[:1]
    assert (p.report == -1).all()


def check_bad_ids(module: ModuleType = embedding) -> None:
    """Nothing is read for them, which the NaN around a table would show; their tokens are NaN, and said."""
    for which, outside in ((0, 11), (0, -1), (1, 2), (2, 2**62)):
        p = Problem(9, 40, dropout_p=0.5, padding_idx=None)
        around = torch.full((30, 40), float("nan"), device=DEVICE)
        around[10 : 10 + len(p.tables[which])] = p.tables[which]
        p.tables[which] = around[10 : 10 + len(p.tables[which])]
        good = run(p, module)[0]
        p.ids[which][4] = outside
        y, _, _, *gradients = run(p, module)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert y[4].isnan().all()
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert torch.equal(y[others], good[others]) and good.isfinite().all()
        expected = torch.full((3, 2), -1)
        expected[which] = torch.tensor([outside, len(p.tables[which])])
        assert torch.equal(p.report, expected)
        # every column's gradient is NaN, so no optimizer takes the step
        assert gradients[3].isnan().all()
        assert [tuple(g.shape) for g in gradients] == [tuple(t.shape) for t in p.parameters]


def check_far_rows(module: ModuleType = embedding) -> None:
    """Rows so far apart that the third begins at element 2^31, which 32 bits do not reach."""
    # the interpreter wraps 32-bit products as the GPU does. 4 GiB of address space, of which a CPU
    # commits the pages of a few short rows
    stride, N = 2**30, 40
    p = Problem(6, N, torch.float16, sizes=(3, 3, 3), padding_idx=None)
    p.ids[0][:3] = p.ids[1][3:] = torch.tensor([0, 1, 2])
    near = run(p)
    memory = torch.empty(2 * stride + 4 * N, dtype=torch.float16, device=DEVICE)
    far = [memory[i * N :].as_strided((3, N), (stride, 1)) for i in range(3)]
    p.tables = [t.copy_(s) for t, s in zip(far, p.tables)]
    p.dy[3:] = 0
    near = near[:3] + tuple(run(p, embedding))[3:]
    p.dy = memory[3 * N :].as_strided((3, N), (stride, 1)).copy_(p.dy[:3])
    p.ids = [i[:3] for i in p.ids]
    ours = run(p, module)
    for name, a, b in zip(("y", "mean", "rstd"), ours, near):
        assert torch.equal(a, b[:3]), name
    for name, a, b in zip(NAMES, ours[3:], near[3:]):
        torch.testing.assert_close(a, b, msg=name)


def check_constant_row(value: float, dtype: torch.dtype, module: ModuleType = embedding) -> None:
    """eps 1e-12 is 0 in fp16, and the squares of 768 times 300 pass its largest number."""
    p = Problem(2, 33, dtype)
    p.tables[0].fill_(value)
    p.tables[1].zero_()
    p.tables[2].zero_()
    y, mean, rstd, *_ = run(p, module)
    assert torch.equal(y, p.norm_bias.expand(2, 33))
    assert torch.equal(mean, p.tables[0][:2, 0].float())
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e6), rtol=1e-6, atol=0)


# ---- gradients of one table -------------------------------------------------------------------------------


def check_table(
    ids: list[int],
    num_rows: int,
    width: int = 9,
    dtype: torch.dtype = torch.float32,
    padding_idx: int | None = None,
    module: ModuleType = table_grad,
) -> Tensor:
    drows = torch.randn(len(ids), width).to(DEVICE, dtype)
    indices = torch.tensor(ids, device=DEVICE)
    ours = module.table_grad(indices, drows, num_rows, padding_idx)
    inside = (indices >= 0) & (indices < num_rows)
    padding = -1 if padding_idx is None else padding_idx
    one_hot = (
        F.one_hot(indices.clamp(0, num_rows - 1), num_rows).double()
        * (inside & (indices != padding))[:, None]
    )
    right = one_hot.T @ drows.double()
    assert ours.dtype == dtype and ours.shape == (num_rows, width)
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    # one rounding, of sums of fp32 terms
    size = (one_hot.T @ drows.double().abs()).amax().item()
    torch.testing.assert_close(ours.double(), right, atol=1e-6 * size + 1e-30, rtol=tolerance)
    assert not ours[~one_hot.any(0)].any()
    return ours


def small_tiles(module: ModuleType, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Tiles of four rows, and partial sums that are added up two by two."""
    config = LaunchConfig(block_m=1, block_n=8, tiles_m=4, num_warps=1)
    for name, value in (("run_sum_config", lambda M, N: config), ("JOIN_ROWS", 2), ("JOIN_COLS", 4)):
        if monkeypatch is None:
            setattr(module, name, value)
        else:
            monkeypatch.setattr(module, name, value)


# of tiles of four rows: runs inside, at the edges, across one edge, over whole tiles, to the very end
RUNS = {
    "different": list(range(11)),
    "one": [2] * 19,
    "one tile": [2] * 4,
    "a tile each": [0] * 4 + [1] * 4 + [2] * 4,
    "across an edge": [0, 0, 0, 1, 1, 2, 2, 2, 3],
    "whole tiles and back": [0] + [1] * 12 + [2] * 3 + [4],
    "two that cross in one tile": [0] * 6 + [1] * 6,
    "ends with a tile": [0] * 3 + [1] * 9,
    "shuffled": [3, 0, 3, 3, 1, 3, 3, 0, 3, 3, 3, 5, 3],
    "padding and strangers": [-3, 0, 1, 1, 1, 1, 1, 1, 7, 7, 7, 7, 7, 2**40, 2, 2],
}


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 4096, 32_768, 32_769, 2**20])
@pytest.mark.parametrize("num_cols", [1, 8, 65, 768, 1024, 1500, 8192])
def test_tiles_of_runs_are_bounded_and_whole(num_rows: int, num_cols: int) -> None:
    config = run_sum_config(num_rows, num_cols)
    tiles = config.num_row_programs(num_rows)
    assert (tiles - 1) * config.rows_per_program < num_rows <= tiles * config.rows_per_program
    assert tiles <= 1024 and config.rows_per_program >= 32 and config.rows_per_program % 4 == 0
    assert config.block_n <= 1024 and 1 <= config.num_warps <= 4
    # another number of rows compiles nothing: only tiles_m differs, which is a run-time argument
    assert (config.block_n, config.num_warps) == (
        run_sum_config(1, num_cols).block_n, run_sum_config(1, num_cols).num_warps,
    )  # fmt: skip


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        check(Problem(*shape, dtype, dropout_p=0.3))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference_without_dropout(self, shape: tuple[int, int]) -> None:
        check(Problem(*shape))

    @pytest.mark.usefixtures("nan_filled")
    def test_the_widest_rows(self) -> None:
        check(Problem(2, 8192, torch.float16, dropout_p=0.3))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_fp32_norm_beside_half_tables(self, dtype: torch.dtype) -> None:
        check(Problem(9, 100, dtype, norm_dtype=torch.float32, dropout_p=0.3))

    @pytest.mark.usefixtures("nan_filled")
    def test_several_tiles_a_program_and_many_programs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(embedding, "row_norm_bwd_config", lambda M, N: LaunchConfig(2, 64, tiles_m=3))
        monkeypatch.setattr(embedding, "SUM_ROWS", 2)
        small_tiles(table_grad, monkeypatch)
        for num_tokens in (6, 7, 25):
            check(Problem(num_tokens, 12, dropout_p=0.3))

    def test_strided_tables_and_gradients_and_32_bit_ids(self) -> None:
        p = Problem(13, 50, dropout_p=0.2)
        packed = run(p)
        wide = [torch.full((len(t), 70), 1e4, device=DEVICE)[:, 3:53].copy_(t) for t in p.tables]
        p.tables = wide
        p.dy = torch.full((13, 90), 1e4, device=DEVICE)[:, 8:58].copy_(p.dy)
        p.ids = [i.int() for i in p.ids]
        for a, b in zip(run(p), packed):
            assert a.is_contiguous() and torch.equal(a, b)

    @pytest.mark.parametrize("shape", [(0, 33), (3, 0), (0, 0)], ids=str)
    @pytest.mark.parametrize("dropout_p", [0.0, 0.3])
    def test_empty(self, shape: tuple[int, int], dropout_p: float) -> None:
        p = Problem(*shape, torch.float16, dropout_p=dropout_p)
        y, mean, rstd, *gradients = run(p)
        assert y.shape == shape and mean.shape == rstd.shape == shape[:1]
        for given, gradient in zip(p.parameters, gradients, strict=True):
            assert torch.equal(gradient, torch.zeros_like(given))

    # ---- numbers

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("value", [300.0, 0.1])
    def test_a_constant_row_gives_exactly_the_bias(self, value: float, dtype: torch.dtype) -> None:
        check_constant_row(value, dtype)

    def test_the_variance_is_taken_about_the_mean(self) -> None:
        p = Problem(4, 100, offset=1365.0)
        _, mean, rstd, *_ = run(p)
        exact = sum(t[i].double() for i, t in zip(p.ids, p.tables))
        assert isinstance(exact, Tensor)
        torch.testing.assert_close(mean.double(), exact.mean(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(rstd.double(), exact.var(1, correction=0).rsqrt(), rtol=1e-3, atol=0)

    def test_eps_of_the_config_counts(self) -> None:
        for eps in (1e-5, 1.0):
            check(Problem(5, 33, eps=eps))

    def test_worked_by_hand(self) -> None:
        p = Problem(1, 2, sizes=(2, 1, 1), padding_idx=None)
        tables = ([[9.0, 9.0], [1.0, 3.0]], [[0.5, 0.5]], [[-0.5, 1.5]])
        p.ids = [torch.tensor([i], device=DEVICE) for i in (1, 0, 0)]
        p.tables = [torch.tensor(t, device=DEVICE) for t in tables]
        p.weight, p.norm_bias = (torch.tensor(v, device=DEVICE) for v in ([2.0, 3.0], [10.0, 20.0]))
        p.dy, p.eps = torch.tensor([[1.0, 10.0]], device=DEVICE), 0.0
        # h = 1, 5: mean 3, variance 4
        y, mean, rstd, dword, _, _, dweight, dnorm_bias = run(p)
        assert (y.tolist(), mean.tolist(), rstd.tolist()) == ([[8.0, 23.0]], [3.0], [0.5])
        # dxhat = 2, 30: mean 16, mean of dxhat * xhat = 14; both elements cancel
        assert dword.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert dweight.tolist() == [-1.0, 10.0] and dnorm_bias.tolist() == [1.0, 10.0]

    def test_ids_outside_their_tables_read_nothing_and_are_reported(self) -> None:
        check_bad_ids()

    def test_an_id_may_be_reported_from_any_tile(self) -> None:
        p = Problem(70, 20)
        p.ids[0][69] = 11
        p.ids[1][0] = 5
        run(p)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert p.report.tolist() == [[11, 11], [5, 2], [-1, -1]]

    # ---- dropout

    def test_the_dropout_masks_of_forward_and_backward(self) -> None:
        p = Problem(20, 200, dropout_p=0.3)
        p.norm_bias.fill_(1e3)  # no element of y is 0 by itself
        y, _, _, *gradients = run(p)
        assert p.seed is not None
        right = dropout_noise(p.seed, 20, 200, 0.3, torch.float32) > 0
        assert torch.equal(y != 0, right)
        # 4,000 elements: four standard deviations of the share
        assert abs((y == 0).float().mean() - 0.3) < 0.029
        # the gradient of the norm's bias sums dy over what was kept
        kept = (p.dy.double() * right).sum(0) / 0.7
        torch.testing.assert_close(gradients[4].double(), kept, atol=1e-4, rtol=1e-5)

    # ---- runs of equal ids

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("padding_idx", [None, 1])
    @pytest.mark.parametrize("ids", RUNS.values(), ids=RUNS)
    def test_runs(self, ids: list[int], padding_idx: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        small_tiles(table_grad, monkeypatch)
        check_table(ids, max(i for i in ids if i < 100) + 2, padding_idx=padding_idx)

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_runs_of_halves(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        small_tiles(table_grad, monkeypatch)
        check_table(RUNS["shuffled"], 7, dtype=dtype)

    @pytest.mark.usefixtures("nan_filled")
    def test_random_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small_tiles(table_grad, monkeypatch)
        generator = torch.Generator().manual_seed(1)
        for num_rows in (2, 6, 30):
            ids = torch.randint(0, num_rows, (33,), generator=generator).tolist()
            check_table(ids, num_rows)

    @pytest.mark.usefixtures("nan_filled")
    def test_tiles_as_they_are_launched(self) -> None:
        check_table([0] * 40 + [3] * 30 + [1] * 5, 5, width=70)

    def test_a_sum_of_many_is_rounded_once(self) -> None:
        # 1024 + 4 is 1024 in bf16: one by one, the sum would not grow
        drows = torch.full((65, 8), 4.0, dtype=torch.bfloat16, device=DEVICE)
        drows[0] = 1024.0
        ids = torch.zeros(65, dtype=torch.long, device=DEVICE)
        assert table_grad.table_grad(ids, drows, 2)[0].tolist() == [1280.0] * 8

    def test_nan_stays_with_its_id(self) -> None:
        drows = torch.ones(9, 8, device=DEVICE)
        drows[4] = float("nan")
        ids = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2], device=DEVICE)
        grad = table_grad.table_grad(ids, drows, 4)
        assert grad[1].isnan().all() and grad[[0, 2]].eq(3).all() and grad[3].eq(0).all()

    # ---- the launchers

    def test_is_deterministic_and_leaves_inputs_alone(self) -> None:
        p = Problem(40, 40, torch.float16, dropout_p=0.1)
        tensors = [*p.ids, *p.parameters, p.dy]
        before = [t.clone() for t in tensors]
        first = run(p)
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(first, run(p)))
        assert all(torch.equal(t, b) for t, b in zip(tensors, before))

    def test_row_offsets_beyond_32_bits(self) -> None:
        check_far_rows()

    def test_bad_input_is_one_clear_error(self) -> None:
        p = Problem(4, 6, dropout_p=0.5)
        words, types, positions = p.tables
        mean = torch.zeros(4, device=DEVICE)
        wide = [torch.zeros(2, 8193, device=DEVICE)] * 3

        def forward(**changed: object) -> None:
            q = {"ids": p.ids, "tables": p.tables, "weight": p.weight, "norm_bias": p.norm_bias}
            q |= {"eps": 1e-12, "report": p.report} | changed
            embedding.embedding_fwd(**q)  # type: ignore[arg-type]

        def backward(dy: Tensor = p.dy, mean: Tensor = mean, rstd: Tensor = mean) -> None:
            embedding.embedding_bwd(dy, p.ids, p.tables, p.weight, mean, rstd)  # type: ignore[arg-type]

        for message, call in [
            (
                r"the type table must be \[rows, 6\] torch.float32 as the word table, but is \[2, 5\]",
                lambda: forward(tables=[words, types[:, :5], positions]),
            ),
            (
                "the position table must be .* torch.float16",
                lambda: forward(tables=[words, types, positions.half()]),
            ),
            (
                "the tables must be float32, float16 or bfloat16",
                lambda: forward(tables=[t.double() for t in p.tables]),
            ),
            (
                "the word table must have adjacent columns",
                lambda: forward(tables=[words.T.contiguous().T, *p.tables[1:]]),
            ),
            (
                "a row is 8193 wide, and the kernel's limit is 8192: use the eager path",
                lambda: forward(tables=wide),
            ),
            (
                r"type ids must be \[M\] int64 or int32, .* \[3\]",
                lambda: forward(ids=[p.ids[0], p.ids[1][:3], p.ids[2]]),
            ),
            ("word ids must be .* torch.float32", lambda: forward(ids=[p.ids[0].float(), *p.ids[1:]])),
            ("word ids must be contiguous", lambda: forward(ids=[p.ids[0].repeat(2)[::2], *p.ids[1:]])),
            (r"weight must be \[6\] torch.float32 to fit", lambda: forward(weight=p.weight[:5])),
            (
                "norm_bias must be contiguous, .* stride 2",
                lambda: forward(norm_bias=p.norm_bias.repeat(2)[::2]),
            ),
            ("norm_bias must be .* is .6. torch.float16", lambda: forward(norm_bias=p.norm_bias.half())),
            (
                "the parameters of the norm must have one dtype",
                lambda: forward(
                    tables=[t.half() for t in p.tables], weight=p.weight, norm_bias=p.norm_bias.half()
                ),
            ),
            (r"report must be \[3, 2\] torch.int64", lambda: forward(report=p.report[:2])),
            ("dropout_p 1.5 is not a probability", lambda: forward(dropout_p=1.5, seed=p.seed)),
            ("dropout needs a seed, an int64 tensor of one element .* None", lambda: forward(dropout_p=0.1)),
            (r"dy must be \(4, 6\) torch.float32 .* is \(3, 6\)", lambda: backward(p.dy[:3])),
            ("dy must have adjacent columns", lambda: backward(p.dy[:, :1].expand(4, 6))),
            (r"mean must be the forward's, \[4\] .* is \[3\]", lambda: backward(mean=mean[:3])),
            ("rstd must be the forward's, .* torch.float16", lambda: backward(rstd=mean.half())),
            (
                r"ids and drows must be \[M\] and \[M, N\]",
                lambda: table_grad.table_grad(p.ids[0][:3], p.dy, 4),
            ),
            (
                "drows must have adjacent columns, but has column stride 4",
                lambda: table_grad.table_grad(p.ids[0], p.dy.T.contiguous().T, 4),
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                call()


@in_the_parent_only
def test_everything_is_launched_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one GPU can show of two: every launch is under the guard."""
    recorder = Recorder()
    for module, kernels in (
        (embedding, ["_embedding_fwd_kernel", "_embedding_bwd_kernel", "_sum_partials_kernel"]),
        (table_grad, ["_sum_runs_kernel", "_join_runs_kernel"]),
        (gather_rows, ["_gather_rows_kernel"]),
    ):
        for name in ("device_guard", *kernels):
            monkeypatch.setattr(module, name, recorder)
        monkeypatch.setattr(module, "check_can_launch", lambda kernel, x: None)
    ids = (torch.zeros(3, dtype=torch.int64),) * 3
    tables = (torch.zeros(2, 8),) * 3
    report, vector = torch.full((3, 2), -1), torch.zeros(8)
    embedding.embedding_fwd(ids, tables, vector, vector, 1e-12, report)
    embedding.embedding_bwd(torch.zeros(3, 8), ids, tables, vector, torch.zeros(3), torch.zeros(3))
    gather_rows.gather_rows(torch.zeros(3, 8), ids[0])
    assert [depth for depth, _ in recorder.launches] == [1] * (1 + 2 + 3 * 2 + 1) and recorder.depth == 0
