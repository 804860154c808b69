"""The QKV projection's kernels against fp64 torch: forward, and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

import triton
from fastbert_kernels import linear, linear_dw, linear_dx
from fastbert_kernels.launch import (
    ARCHITECTURES,
    MAX_SHARED_BYTES,
    MatmulConfig,
    qkv_bwd_dw_configs,
    qkv_bwd_dw_splits,
    qkv_bwd_dx_configs,
    qkv_fwd_configs,
    rows_bucket,
)
from fastbert_kernels.linear import CUBLASLT, qkv_choice, qkv_fwd
from fastbert_kernels.linear_dw import qkv_bwd_dw, split_rows
from fastbert_kernels.linear_dx import qkv_bwd_dx

from tests.kernel_testing import (
    CAN_LAUNCH,
    DEVICE,
    DTYPES,
    assert_accurate,
    in_the_parent_only,
    run_interpreted,
)

# small tiles: several a matrix, and a group that is not full; then the same through tensor descriptors
POINTERS = MatmulConfig(16, 32, 16, group_m=2, num_warps=4, num_stages=2)
DESCRIPTORS = MatmulConfig(16, 32, 16, group_m=2, num_warps=4, num_stages=2, tma=True)

# (T, N, K): one element; one token of 26 x 4; odd everywhere; no power of two
ODD_SHAPES = [(1, 1, 1), (1, 33, 104), (37, 33, 65), (5, 100, 260)]
# one row less than a tile, a tile, and one row into the next; K ends inside a block, then at the end of one
BLOCK_SHAPES = [(15, 32, 40), (16, 64, 48), (17, 48, 16), (33, 40, 80)]
# every row aligned; N of one tile and of several; rows and K end inside a tile
ALIGNED_SHAPES = [(1, 32, 16), (33, 64, 48), (33, 96, 80)]
HALF_DTYPES = [torch.float16, torch.bfloat16]
# sums of 2,048, 1,536 and 1,024 positive products: rounded to fp16 on the way, they would stop growing
LONG_FORWARD, LONG_DX, LONG_DW = (16, 32, 2048), (16, 512, 32), (1024, 16, 32)


def amid_nan(x: Tensor, rows: bool = True) -> Tensor:
    """x with NaN before and after it (and, if `rows`, between its rows), where no kernel may look."""
    row = x.numel() // len(x) if rows and len(x) else x.numel()
    memory = torch.full((x.numel() // row if row else 0, row + 32), float("nan")).to(x.device, x.dtype)
    return memory[:, 16 : 16 + row].view(x.shape).copy_(x)


def alone(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy for torch, whose own bf16 product on CPU reads beyond the rows of a slice."""
    return x.clone(memory_format=torch.contiguous_format).to(dtype)


class Problem:
    """Inputs of all three operations, and what torch makes of them in fp64 and in their own dtype."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
        random: Callable[..., Tensor] = torch.randn,
        device: str = DEVICE,
    ) -> None:
        T, N, K = shape
        self.x = amid_nan(random(T, K).to(device, dtype))
        self.weights = [amid_nan((random(N, K) / K**0.5).to(device, dtype), rows=False) for _ in range(3)]
        self.biases = [amid_nan(random(N).to(device, dtype), rows=False) for _ in range(3)]
        self.dqkv = amid_nan(random(T, 3, N).to(device, dtype))

    def forward(self, dtype: torch.dtype) -> Tensor:
        x, *parameters = (alone(t, dtype) for t in (self.x, *self.weights, *self.biases))
        products = [F.linear(x, w, b) for w, b in zip(parameters[:3], parameters[3:])]
        return torch.stack(products, dim=1)

    def dx(self, dtype: torch.dtype) -> Tensor:
        return alone(self.dqkv, dtype).flatten(1) @ alone(torch.cat(self.weights), dtype)

    def dw(self, dtype: torch.dtype) -> list[Tensor]:
        parts = [alone(part, dtype) for part in self.dqkv.unbind(1)]
        return [part.T @ alone(self.x, dtype) for part in parts] + [part.sum(0) for part in parts]


def check_forward(launch: Callable[..., Tensor], p: Problem, config: MatmulConfig | None = None) -> None:
    y = launch(p.x, *p.weights, *p.biases, config=config)
    assert y.is_contiguous()
    assert_accurate(y, p.forward(p.x.dtype), p.forward(torch.float64))


def check_dx(launch: Callable[..., Tensor], p: Problem, config: MatmulConfig | None = None) -> None:
    dx = launch(p.dqkv, *p.weights, config=config)
    assert dx.is_contiguous()
    assert_accurate(dx, p.dx(p.x.dtype), p.dx(torch.float64))


def check_dw(
    launch: Callable[..., tuple[Tensor, ...]], p: Problem, config: MatmulConfig | None = None
) -> None:
    results = launch(p.dqkv, p.x, config=config)
    assert len(results) == 6
    for ours, plain, exact in zip(results, p.dw(p.x.dtype), p.dw(torch.float64)):
        assert ours.is_contiguous()
        assert_accurate(ours, plain, exact)


def check_all(p: Problem, config: MatmulConfig | None = None) -> None:
    check_forward(qkv_fwd, p, config)
    check_dx(qkv_bwd_dx, p, config)
    check_dw(qkv_bwd_dw, p, config)


def far_rows(memory: Tensor, start: int, x: Tensor, stride: int = 2**30) -> Tensor:
    """x's rows in `memory`, so far apart that the third begins at element 2^31 from the first."""
    far = memory[start:].as_strided(x.shape, (stride, *x.stride()[1:]))
    return far.copy_(x)


def check_offsets_beyond_32_bits(
    forward: Callable[..., Tensor] = qkv_fwd,
    dx: Callable[..., Tensor] = qkv_bwd_dx,
    dw: Callable[..., tuple[Tensor, ...]] = qkv_bwd_dw,
    config: MatmulConfig = POINTERS,
) -> None:
    # the interpreter wraps 32-bit products as the GPU does. 4 GiB of address space, of which a CPU commits
    # the pages of six short rows
    p = Problem((3, 32, 48), torch.float16)
    memory = torch.empty(2**31 + 256, dtype=torch.float16, device=DEVICE)
    x, dqkv = far_rows(memory, 0, p.x), far_rows(memory, 64, p.dqkv)
    near = (qkv_fwd(p.x, *p.weights, *p.biases), qkv_bwd_dx(p.dqkv, *p.weights), *qkv_bwd_dw(p.dqkv, p.x))
    far = (
        forward(x, *p.weights, *p.biases, config=config),
        dx(dqkv, *p.weights, config=config),
        *dw(dqkv, x, config=config),
    )
    for ours, right in zip(far, near):
        torch.testing.assert_close(ours, right)


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
    def test_odd_shapes_match_reference(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        check_all(Problem(shape, dtype))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
    def test_ends_of_tiles_match_reference(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        check_all(Problem(shape, dtype), POINTERS)

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
    @pytest.mark.parametrize("shape", ALIGNED_SHAPES, ids=str)
    def test_descriptors_match_reference(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        check_all(Problem(shape, dtype), DESCRIPTORS)

    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
    def test_descriptors_and_pointers_agree(self, dtype: torch.dtype) -> None:
        p = Problem((33, 64, 48), dtype)
        results = [
            (
                qkv_fwd(p.x, *p.weights, *p.biases, config=config),
                qkv_bwd_dx(p.dqkv, *p.weights, config=config),
                *qkv_bwd_dw(p.dqkv, p.x, config=config),
            )
            for config in (POINTERS, DESCRIPTORS)
        ]
        for pointers, descriptors in zip(*results):
            torch.testing.assert_close(descriptors, pointers)

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
    @pytest.mark.parametrize("num_rows", [64, 65, 130, 200])
    # one split after all; the last split has one row; two rows; three full splits and a short one
    def test_split_rows_match_reference(
        self, num_rows: int, config: MatmulConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(linear_dw, "qkv_bwd_dw_splits", lambda T, N, K: 4)
        for dtype in DTYPES:
            if dtype != torch.float32 or not config.tma:
                check_dw(qkv_bwd_dw, Problem((num_rows, 48, 32), dtype), config)

    @pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
    def test_long_sums_are_in_fp32(self, config: MatmulConfig) -> None:
        check_forward(qkv_fwd, Problem(LONG_FORWARD, torch.float16, torch.rand), config)
        check_dx(qkv_bwd_dx, Problem(LONG_DX, torch.float16, torch.rand), config)
        check_dw(qkv_bwd_dw, Problem(LONG_DW, torch.float16, torch.rand), config)

    def test_default_configurations_of_a_model(self) -> None:
        # MiniLM's width, as the launcher chooses: EVEN ends, full groups
        check_all(Problem((130, 384, 384), torch.float16))

    def test_known_values(self) -> None:
        x = torch.tensor([[1.0, 2.0]], device=DEVICE)
        wq = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=DEVICE)
        wk, wv = wq * 10, wq.flip(1)
        bq, bk, bv = (torch.full((2,), b, device=DEVICE) for b in (0.5, 0.25, 0.0))
        y = qkv_fwd(x, wq, wk, wv, bq, bk, bv)
        assert y.tolist() == [[[1.5, 2.5], [10.25, 20.25], [2.0, 1.0]]]
        dqkv = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [3.0, 5.0]]], device=DEVICE)
        assert qkv_bwd_dx(dqkv, wq, wk, wv).tolist() == [[1.0 + 5.0, 10.0 + 3.0]]
        dwq, dwk, dwv, dbq, dbk, dbv = qkv_bwd_dw(dqkv, x)
        assert dwq.tolist() == [[1.0, 2.0], [0.0, 0.0]] and dbq.tolist() == [1.0, 0.0]
        assert dwk.tolist() == [[0.0, 0.0], [1.0, 2.0]] and dbk.tolist() == [0.0, 1.0]
        assert dwv.tolist() == [[3.0, 6.0], [5.0, 10.0]] and dbv.tolist() == [3.0, 5.0]

    @pytest.mark.parametrize("config", [None, DESCRIPTORS], ids=["default", "descriptors"])
    def test_strided_rows(self, config: MatmulConfig | None) -> None:
        p = Problem((37, 32, 48), torch.float16)
        wide_x = torch.full((37, 160), 1e4, dtype=torch.float16, device=DEVICE)
        wide_dqkv = torch.full((37, 160), 1e4, dtype=torch.float16, device=DEVICE)
        x = wide_x[:, 64:112].copy_(p.x)
        dqkv = wide_dqkv[:, 16:112].unflatten(1, (3, 32)).copy_(p.dqkv)
        pairs = [
            (qkv_fwd(t, *p.weights, *p.biases, config=config) for t in (x, p.x)),
            (qkv_bwd_dx(t, *p.weights, config=config) for t in (dqkv, p.dqkv)),
            *zip(qkv_bwd_dw(dqkv, x, config=config), qkv_bwd_dw(p.dqkv, p.x, config=config)),
        ]
        for strided, packed in pairs:
            assert torch.equal(strided, packed)
        # stride 0: one row seen 37 times; descriptors refuse it
        repeated = p.x[:1].expand(37, 48)
        assert torch.equal(
            qkv_fwd(repeated, *p.weights, *p.biases), qkv_fwd(repeated.contiguous(), *p.weights, *p.biases)
        )

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_no_rows(self, dtype: torch.dtype) -> None:
        p = Problem((0, 33, 20), dtype)
        assert qkv_fwd(p.x, *p.weights, *p.biases).shape == (0, 3, 33)
        assert qkv_bwd_dx(p.dqkv, *p.weights).shape == (0, 20)
        dw = qkv_bwd_dw(p.dqkv, p.x)
        assert [tuple(t.shape) for t in dw] == [(33, 20)] * 3 + [(33,)] * 3
        assert all(t.dtype == dtype and not t.any() for t in dw)

    def test_a_row_depends_on_itself_only(self) -> None:
        p = Problem((40, 33, 65))
        y, dx = qkv_fwd(p.x, *p.weights, *p.biases), qkv_bwd_dx(p.dqkv, *p.weights)
        p.x[7], p.dqkv[7] = float("nan"), float("inf")
        others = torch.arange(40, device=DEVICE) != 7
        assert torch.equal(qkv_fwd(p.x, *p.weights, *p.biases)[others], y[others])
        assert torch.equal(qkv_bwd_dx(p.dqkv, *p.weights)[others], dx[others])

    def test_the_projection_is_deterministic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linear_dw, "qkv_bwd_dw_splits", lambda T, N, K: 3)
        p = Problem((150, 40, 70), torch.float16)
        runs = [
            (
                qkv_fwd(p.x, *p.weights, *p.biases),
                qkv_bwd_dx(p.dqkv, *p.weights),
                *qkv_bwd_dw(p.dqkv, p.x),
            )
            for _ in range(3)
        ]
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], run))

    def test_inputs_are_left_alone(self) -> None:
        p = Problem((5, 40, 24))
        tensors = [p.x, p.dqkv, *p.weights, *p.biases]
        before = [t.clone() for t in tensors]
        check_all(p)
        assert all(torch.equal(t, b) for t, b in zip(tensors, before))

    @pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
    def test_row_offsets_beyond_32_bits(self, config: MatmulConfig) -> None:
        check_offsets_beyond_32_bits(config=config)

    def test_bad_input_is_one_clear_error(self) -> None:
        p = Problem((4, 6, 8))
        x, dqkv, (wq, wk, wv), (bq, bk, bv) = p.x, p.dqkv, p.weights, p.biases
        apart = dqkv.transpose(0, 1).contiguous().transpose(0, 1)
        half = [t.half() for t in (x, wq, wk, wv, bq, bk, bv)]
        for message, call in [
            (r"x must be \[T, K\] .* \(2, 2, 8\)", lambda: qkv_fwd(x.view(2, 2, 8), wq, wk, wv, bq, bk, bv)),
            (r"x must be \[T, K\] with K > 0", lambda: qkv_fwd(x[:, :0], wq, wk, wv, bq, bk, bv)),
            ("x must be float32, .*float64", lambda: qkv_fwd(x.double(), wq, wk, wv, bq, bk, bv)),
            ("x must have adjacent columns, .* stride 4", lambda: qkv_fwd(x.T, wq, wk, wv, bq, bk, bv)),
            (r"wq must be \[N, K\] .* \(6,\)", lambda: qkv_fwd(x, wq[:, 0], wk, wv, bq, bk, bv)),
            (r"wk must be \[6, 8\] .* is \[5, 8\]", lambda: qkv_fwd(x, wq, wk[:5], wv, bq, bk, bv)),
            (r"wv must be \[6, 8\] .* is \[6, 7\]", lambda: qkv_fwd(x, wq, wk, wv[:, :7], bq, bk, bv)),
            ("wv must be .* torch.float16", lambda: qkv_fwd(x, wq, wk, wv.half(), bq, bk, bv)),
            ("wq must be contiguous", lambda: qkv_fwd(x, wq.T.contiguous().T, wk, wv, bq, bk, bv)),
            (r"bk must be \[6\] .* is \[5\]", lambda: qkv_fwd(x, wq, wk, wv, bq, bk[:5], bv)),
            ("bv must be contiguous", lambda: qkv_fwd(x, wq, wk, wv, bq, bk, bv.repeat(2)[::2])),
            (r"shape \(4, 8\).* descriptor, .* without tma", lambda: qkv_fwd(*half, config=DESCRIPTORS)),
            (r"dqkv must be \[T, 3, N\] .* \(4, 18\)", lambda: qkv_bwd_dx(dqkv.flatten(1), wq, wk, wv)),
            ("dqkv must be float32, .*float64", lambda: qkv_bwd_dx(dqkv.double(), wq, wk, wv)),
            ("each row of dqkv must be contiguous", lambda: qkv_bwd_dx(apart, wq, wk, wv)),
            (r"wq must be \[6, K\] to fit dqkv", lambda: qkv_bwd_dx(dqkv, wq[:5], wk, wv)),
            (r"wk must be \[6, 8\]", lambda: qkv_bwd_dx(dqkv, wq, wk[:, 1:], wv)),
            (r"x must be \[4, K\] .* is \[3, 8\]", lambda: qkv_bwd_dw(dqkv, x[:3])),
            ("x must be .* torch.bfloat16", lambda: qkv_bwd_dw(dqkv, x.bfloat16())),
        ]:
            with pytest.raises(ValueError, match=message):
                call()

    def test_descriptors_refuse_a_tile_across_two_projections(self) -> None:
        p = Problem((4, 48, 16), torch.float16)
        with pytest.raises(ValueError, match="48 output features are not a multiple of the 32"):
            qkv_fwd(p.x, *p.weights, *p.biases, config=DESCRIPTORS)


# ---- rules and launches: no kernel runs -------------------------------------------------------------------


def cpu_problem(shape: tuple[int, int, int], dtype: torch.dtype) -> Problem:
    return Problem(shape, dtype, device="cpu")


RULES = {
    "qkv_fwd": lambda *kind: qkv_fwd_configs(*kind[:3], 768, kind[3]),
    "qkv_bwd_dx": lambda *kind: qkv_bwd_dx_configs(*kind[:3], 768, kind[3]),
    "qkv_bwd_dw": qkv_bwd_dw_configs,
}


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", RULES)
def test_candidates_are_different_and_can_run(op: str, arch: str, dtype: str, aligned: bool) -> None:
    for num_rows in (128, 8192):
        configs = RULES[op](arch, dtype, num_rows, aligned)
        assert configs and len(set(map(str, configs))) == len(configs)
        for c in configs:
            assert all(triton.next_power_of_2(size) == size for size in (c.block_m, c.block_n, c.block_k))
            # a split of dW's rows begins at a block
            assert linear_dw.SPLIT_ROWS_MULTIPLE % c.block_k == 0
            operands = (c.block_m + c.block_n) * c.block_k * (2 if dtype in ("fp16", "bf16") else 4)
            assert operands * (c.num_stages - 1) <= MAX_SHARED_BYTES[arch]
            assert c.tma == (arch in ("sm_90", "sm_100") and dtype in ("fp16", "bf16") and aligned)


def test_few_rows_get_small_tiles_first() -> None:
    few, many = (qkv_fwd_configs("sm_90", "bf16", rows, 768, True) for rows in (512, 8192))
    assert set(few) == set(many)
    assert few[0] == min(many, key=lambda c: c.block_m * c.block_n) and many[0].block_m == 128


def test_a_descriptor_tile_stays_within_a_projection() -> None:
    # 384 is no multiple of 256, 320 none of 128, 720 none of 64: then pointers
    assert {c.block_n for c in qkv_fwd_configs("sm_90", "bf16", 8192, 384, True)} == {64, 128}
    assert {c.block_n for c in qkv_fwd_configs("sm_90", "bf16", 8192, 320, True)} == {64}
    assert not any(c.tma for c in qkv_fwd_configs("sm_90", "bf16", 8192, 720, True))
    assert not any(c.tma for c in qkv_bwd_dx_configs("sm_90", "bf16", 8192, 720, True))


def test_rows_of_dw_are_split_where_tiles_are_few() -> None:
    assert qkv_bwd_dw_splits(16_384, 1024, 1024) == 2  # 192 tiles
    assert qkv_bwd_dw_splits(16_384, 768, 768) == 3  # 108
    assert qkv_bwd_dw_splits(16_384, 384, 384) == 8  # 27, and 2048 rows a split
    assert qkv_bwd_dw_splits(4096, 384, 384) == 2
    assert qkv_bwd_dw_splits(2047, 384, 384) == 1
    assert qkv_bwd_dw_splits(2**20, 4096, 4096) == 1


@pytest.mark.parametrize("num_rows", [1, 63, 64, 4095, 4096, 4097, 16_384, 99_999])
def test_splits_cover_the_rows_and_none_is_empty(num_rows: int) -> None:
    for width in (64, 384, 768, 1024):
        splits, rows = split_rows(num_rows, width, width)
        assert rows % linear_dw.SPLIT_ROWS_MULTIPLE == 0
        assert (splits - 1) * rows < num_rows <= splits * rows


def test_the_default_is_the_library_and_the_key_holds_no_batch() -> None:
    p = cpu_problem((5, 64, 64), torch.bfloat16)
    for op, tensors in [
        ("qkv_fwd", (p.x, *p.weights)), ("qkv_bwd_dx", (p.dqkv, *p.weights)), ("qkv_bwd_dw", (p.dqkv, p.x)),
    ]:  # fmt: skip
        assert qkv_choice(op, *tensors) == CUBLASLT
        assert linear.candidates(op, *tensors)[0] == "bf16 128 rows 64 to 3x64"
    unaligned = linear.candidates("qkv_bwd_dw", p.dqkv, p.x[:, 1:])[0]
    assert unaligned == "bf16 128 rows 63 to 3x64 unaligned"
    assert [rows_bucket(T) for T in (1, 128, 129, 8192, 8193)] == [128, 128, 256, 8192, 16_384]


@in_the_parent_only
@pytest.mark.parametrize("module", [linear, linear_dx, linear_dw], ids=lambda m: m.__name__)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compile_cases_are_what_is_launched(arch: str, module: object) -> None:
    cases = module.compile_cases(arch)  # type: ignore[attr-defined]
    assert {case.dtype for case in cases} == {"fp32", "fp16", "bf16"}
    assert len({(case.kernel.__name__, case.label) for case in cases}) == len(cases) < 25
    for case in cases:
        assert sorted([*case.signature, *case.constexprs]) == sorted(case.kernel.arg_names)
        unspecialised = {p.name for p in case.kernel.params if p.do_not_specialize}
        batch = {"T", "rows_per_split", "num_splits"} & case.signature.keys()
        assert batch and unspecialised == batch and not batch & case.aligned


@pytest.mark.parametrize("module", [linear, linear_dx, linear_dw], ids=lambda m: m.__name__)
def test_tuning_cases_have_the_keys_of_launches(module: object) -> None:
    cases = module.tuning_cases("sm_90")  # type: ignore[attr-defined]
    assert len({case.key for case in cases}) == len(cases) > 0
    for case in cases:
        assert case.candidates[0] == CUBLASLT and case.flops > 0
        assert all(isinstance(c, MatmulConfig) for c in case.candidates[1:])
    assert "bf16 8192 rows 768 to 3x768" in {case.key for case in cases}


@in_the_parent_only
def test_cpu_tensors_are_refused_with_the_remedy() -> None:
    p = cpu_problem((5, 64, 64), torch.bfloat16)
    for call in (
        lambda: qkv_fwd(p.x, *p.weights, *p.biases),
        lambda: qkv_bwd_dx(p.dqkv, *p.weights),
        lambda: qkv_bwd_dw(p.dqkv, p.x),
    ):
        with pytest.raises(ValueError, match=r"x is on cpu, .* TRITON_INTERPRET=1"):
            call()


class Recorder:
    """In a kernel's place: what it was launched with, and whether the tensor's device was current."""

    def __init__(self) -> None:
        self.depth = 0
        self.launches: list[tuple[int, dict[str, object]]] = []

    def __call__(self, x: Tensor) -> Recorder:
        return self

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.launches.append((self.depth, options))


@pytest.fixture
def matmul_precision() -> Iterator[Callable[[str], None]]:
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("allowed", "precision"), [("highest", "ieee"), ("high", "tf32")])
@pytest.mark.parametrize(
    ("module", "kernel"),
    [(linear, "_qkv_fwd_kernel"), (linear_dx, "_qkv_bwd_dx_kernel"), (linear_dw, "_qkv_bwd_dw_kernel")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_launches_are_guarded_and_follow_torchs_precision(
    module: object,
    kernel: str,
    allowed: str,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
    matmul_precision: Callable[[str], None],
) -> None:
    matmul_precision(allowed)
    recorder = Recorder()
    monkeypatch.setattr(module, "device_guard", recorder)
    monkeypatch.setattr(module, kernel, recorder)
    monkeypatch.setattr(module, "check_can_launch", lambda kernel, x: None)
    p = cpu_problem((5, 64, 64), torch.float32)
    if module is linear:
        qkv_fwd(p.x, *p.weights, *p.biases)
    elif module is linear_dx:
        qkv_bwd_dx(p.dqkv, *p.weights)
    else:
        qkv_bwd_dw(p.dqkv, p.x)
    ((depth, options),) = recorder.launches
    assert depth == 1 and recorder.depth == 0
    assert options["INPUT_PRECISION"] == precision
