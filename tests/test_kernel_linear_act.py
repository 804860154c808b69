"""The feed-forward product with its activation as epilogue, against fp64 torch; and faults that these see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import linear_act
from fastbert_kernels.bias_gelu import FORMS, bias_gelu_fwd
from fastbert_kernels.launch import ARCHITECTURES, MatmulConfig, linear_act_configs
from fastbert_kernels.linear_act import CUBLASLT, linear_act_choice, linear_act_fwd

from tests.kernel_mutations import mutated, outcome
from tests.kernel_testing import (
    CAN_LAUNCH,
    DEVICE,
    DTYPES,
    INTERPRETED,
    assert_accurate,
    in_the_parent_only,
    run_interpreted,
)
from tests.test_kernel_linear import DESCRIPTORS, POINTERS, alone, amid_nan, far_rows

# one element; odd everywhere; several tiles each way, their last ones not full; K ends inside a block
SHAPES = [(1, 1, 1), (5, 33, 7), (37, 70, 40)]
ALIGNED_SHAPES = [(1, 32, 16), (33, 80, 48)]


def act(h: Tensor, form: str) -> Tensor:
    return F.relu(h) if form == "relu" else F.gelu(h, approximate=form)


class Problem:
    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
        bias_dtype: torch.dtype | None = None,
    ) -> None:
        T, N, K = shape
        self.x = amid_nan((2 * torch.randn(T, K)).to(DEVICE, dtype))
        self.weight = amid_nan((torch.randn(N, K) / K**0.5).to(DEVICE, dtype), rows=False)
        self.bias = amid_nan(torch.randn(N).to(DEVICE, bias_dtype or dtype), rows=False)

    def right(self, dtype: torch.dtype, form: str) -> tuple[Tensor, Tensor]:
        x, weight = alone(self.x, dtype), alone(self.weight, dtype)
        h = F.linear(x, weight)
        # as torch does it: one product with the bias, rounded, then the activation
        return act(F.linear(x, weight, alone(self.bias, dtype)), form), h


def check(
    p: Problem, config: MatmulConfig | None = None, form: str = "none", module: ModuleType = linear_act
) -> None:
    y, h = module.linear_act_fwd(p.x, p.weight, p.bias, form, config=config)
    for ours, plain, exact in zip((y, h), p.right(p.x.dtype, form), p.right(torch.float64, form)):
        assert ours.is_contiguous()
        assert_accurate(ours, plain, exact)


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__, "")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_shape_has_a_configuration(arch: str, dtype: str, aligned: bool) -> None:
    configs = linear_act_configs(arch, dtype, 8192, aligned)
    assert configs and all(c.block_m * c.block_n <= 64 * 32 * c.num_warps for c in configs)
    has_descriptors = arch in ("sm_90", "sm_100") and dtype in ("fp16", "bf16") and aligned
    assert {c.tma for c in configs} == {has_descriptors}


def test_without_a_table_the_product_is_torchs() -> None:
    x, weight = torch.zeros(4, 16), torch.zeros(64, 16)
    assert linear_act_choice(x, weight) == CUBLASLT


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.fixture(autouse=True)
    def _seed(self) -> None:
        torch.manual_seed(0)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_pointers(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        check(Problem(shape, dtype), POINTERS)

    @pytest.mark.parametrize("shape", ALIGNED_SHAPES)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_descriptors(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        check(Problem(shape, dtype), DESCRIPTORS)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS, None], ids=["pointers", "tma", "rule"])
    def test_forms_beside_a_bias_in_fp32(self, form: str, config: MatmulConfig | None) -> None:
        check(Problem((17, 48, 32), torch.float16, torch.float32), config, form)

    @pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "tma"])
    def test_the_activation_is_of_the_product_that_is_saved(self, config: MatmulConfig) -> None:
        p = Problem((33, 64, 48), torch.float16)
        y, h = linear_act_fwd(p.x, p.weight, p.bias, config=config)
        assert h is not None and torch.equal(y, bias_gelu_fwd(h, p.bias))
        unsaved, nothing = linear_act_fwd(p.x, p.weight, p.bias, save=False, config=config)
        assert nothing is None and torch.equal(unsaved, y)

    def test_far_rows(self) -> None:
        check_far_rows()

    def test_no_rows(self) -> None:
        p = Problem((0, 7, 5))
        y, h = linear_act_fwd(p.x, p.weight, p.bias)
        assert h is not None and y.shape == h.shape == (0, 7)

    def test_what_is_refused(self) -> None:
        p = Problem((3, 7, 5))
        with pytest.raises(ValueError, match=r"weight must be \[7, 5\].*but is \[7, 4\]"):
            linear_act_fwd(p.x, p.weight[:, :4], p.bias)
        with pytest.raises(ValueError, match=r"bias must be \[7\]"):
            linear_act_fwd(p.x, p.weight, p.bias[:6])
        with pytest.raises(ValueError, match="approximate 'erf' is not one of none, tanh, relu"):
            linear_act_fwd(p.x, p.weight, p.bias, "erf")
        with pytest.raises(ValueError, match="do not fit tensor descriptors"):
            linear_act_fwd(p.x, p.weight, p.bias, config=DESCRIPTORS)


# ---- faults written into a copy of the kernels ------------------------------------------------------------


def check_far_rows(module: ModuleType = linear_act) -> None:
    p = Problem((3, 32, 48), torch.float16)
    near = linear_act_fwd(p.x, p.weight, p.bias)
    memory = torch.empty(2**31 + 256, dtype=torch.float16, device=DEVICE)
    far = module.linear_act_fwd(far_rows(memory, 0, p.x), p.weight, p.bias, config=POINTERS)
    for ours, right in zip(far, near):
        torch.testing.assert_close(ours, right, atol=1e-2, rtol=1e-2)


def pointers(module: ModuleType) -> None:
    check(Problem((37, 70, 40)), POINTERS, module=module)


def pointers_half(module: ModuleType) -> None:
    p = Problem((33, 64, 48), torch.float16)
    y, h = module.linear_act_fwd(p.x, p.weight, p.bias, config=POINTERS)
    assert torch.equal(y, bias_gelu_fwd(h, p.bias))


def tma(module: ModuleType) -> None:
    p = Problem((33, 80, 48), torch.float16)
    check(p, DESCRIPTORS, module=module)
    y, h = module.linear_act_fwd(p.x, p.weight, p.bias, config=DESCRIPTORS)
    assert torch.equal(y, bias_gelu_fwd(h, p.bias))


class Mutation(NamedTuple):
    """A fault may read anywhere, but not write: a fork with a damaged heap does anything."""

    name: str
    old: str
    new: str
    check: Callable[[ModuleType], None]


POINTER_ACT = "tl.store(y_ptr + places, act(h.to(tl.float32) + bias[None, :]"
TMA_ACT = "y = act(h.to(tl.float32) + bias[None, :]"
MUTATIONS = [
    Mutation("no bias", POINTER_ACT, "tl.store(y_ptr + places, act(h.to(tl.float32)", pointers),
    Mutation(
        "of the unrounded product",
        POINTER_ACT,
        "tl.store(y_ptr + places, act(acc + bias[None, :]",
        pointers_half,
    ),
    Mutation(
        "the bias is saved", "tl.store(h_ptr + places, h,", "tl.store(h_ptr + places, h + 1.0,", pointers
    ),
    Mutation("K's tail read", "x = tl.load(x_ptrs, mask=in_k, other=0.0)", "x = tl.load(x_ptrs)", pointers),
    Mutation("the first block again", "x_ptrs += BLOCK_K", "x_ptrs += 0", pointers),
    Mutation(
        "rows in 32 bits", "tile_m.to(tl.int64) * BLOCK_M", "tile_m * BLOCK_M", check_far_rows
    ),
    Mutation("no bias through descriptors", TMA_ACT, "y = act(h.to(tl.float32)", tma),
    Mutation("of the unrounded product through descriptors", TMA_ACT, "y = act(acc + bias[None, :]", tma),
    Mutation("another column's bias", "cols = first_col + tl.arange", "cols = tl.arange", tma),
    Mutation(
        "a tile left out",
        "num_tiles_n = tl.cdiv(N, BLOCK_N)\n    # flattened",
        "num_tiles_n = N // BLOCK_N\n    # flattened",
        tma,
    ),
]  # fmt: skip


class TestMutations:
    # forks, which a process with a GPU context must not
    __test__ = INTERPRETED

    @pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
    def test_is_caught(self, mutation: Mutation, tmp_path: Path) -> None:
        torch.manual_seed(0)
        copy = mutated(linear_act, mutation.old, mutation.new, tmp_path)
        assert outcome(lambda: mutation.check(copy)) != "passes"

    @pytest.mark.parametrize(
        "check", list(dict.fromkeys(m.check for m in MUTATIONS)), ids=lambda check: check.__name__
    )
    def test_unchanged_kernels_pass(self, check: Callable[[ModuleType], None]) -> None:
        torch.manual_seed(0)
        assert outcome(lambda: check(linear_act)) == "passes"
