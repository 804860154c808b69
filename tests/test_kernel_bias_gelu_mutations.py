"""The tests of the bias + GELU kernels see each of these faults, written into a copy of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import bias_gelu

from tests.kernel_mutations import mutated, outcome
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted
from tests.test_kernel_bias_gelu import (
    check,
    check_between_nans,
    check_far_rows,
    check_several_tiles,
    inputs,
)


def erf(module: ModuleType) -> None:
    check(*inputs((5, 33), torch.float32), ours="none", theirs="none", module=module)


def tanh(module: ModuleType) -> None:
    check(*inputs((5, 33), torch.float32), ours="tanh", theirs="tanh", module=module)


def relu(module: ModuleType) -> None:
    check(*inputs((5, 33), torch.float32), ours="relu", theirs="relu", module=module)


def several_tiles(module: ModuleType) -> None:
    check_several_tiles(40, module)


class Mutation(NamedTuple):
    """A fault may read anywhere, but not write: a fork with a damaged heap does anything."""

    name: str
    old: str
    new: str
    check: Callable[[ModuleType], None]


ERF = "h * (0.5 * (1.0 + tl.erf(h * SQRT_1_2)))"
ERF_SLOPE = "0.5 * (1.0 + tl.erf(h * SQRT_1_2)) + h *"
MUTATIONS = [
    Mutation("the tanh form for the erf form", ERF, "h * _tanh_gate(h)[0]", erf),
    Mutation("the tanh form's gate in the gradient", ERF_SLOPE, "_tanh_gate(h)[0] + h *", erf),
    Mutation("a gradient without the density", ERF_SLOPE, "0.5 * (1.0 + tl.erf(h * SQRT_1_2)) + 0 *", erf),
    Mutation("no cubic term", "h + h * h * h * TANH_CUBIC", "h", tanh),
    Mutation("another cubic term in the gradient", "(3.0 * TANH_CUBIC)", "(2.0 * TANH_CUBIC)", tanh),
    Mutation(
        "relu passes all gradients", "return tl.where(h <= 0.0, 0.0, 1.0)", "return h * 0.0 + 1.0", relu
    ),
    Mutation("no bias in the forward", "act(x + bias, APPROXIMATE)", "act(x, APPROXIMATE)", erf),
    Mutation("no bias in the gradient", "_act_derivative(x + bias,", "_act_derivative(x,", erf),
    Mutation("dbias counted twice", "acc += dx", "acc += dx + dx", erf),
    Mutation("dbias of the last tile only", "acc += dx", "acc = dx", several_tiles),
    Mutation("dbias sums dy", "acc += dx", "acc += dy", erf),
    Mutation("a row of partial sums lost", "partial.sum(0)", "partial[1:].sum(0)", several_tiles),
    Mutation("a tile twice", "rows += BLOCK_M", "rows += 0", several_tiles),
    Mutation("a program's rows begin early", "pid_m * tiles_m * BLOCK_M", "pid_m * BLOCK_M", several_tiles),
    Mutation(
        "tail of the rows unmasked",
        "rows * stride_dym + cols[None, :], mask=mask",
        "rows * stride_dym + cols[None, :], mask=(cols < N)[None, :]",
        check_between_nans,
    ),
    Mutation(
        "the last columns forgotten",
        "num_tiles_n = tl.cdiv(N, BLOCK_N)\n    rows",
        "num_tiles_n = N // BLOCK_N\n    rows",
        several_tiles,
    ),
    Mutation(
        "rows in 32 bits",
        "(pid // num_tiles_n).to(tl.int64) * BLOCK_M",
        "(pid // num_tiles_n) * BLOCK_M",
        check_far_rows,
    ),
    Mutation(
        "rows in 32 bits in the gradient",
        "pid_m = (pid // num_tiles_n).to(tl.int64)",
        "pid_m = pid // num_tiles_n",
        check_far_rows,
    ),
]


@in_the_parent_only
def test_mutations_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestMutations")


class TestMutations:
    # forks, which a process with a GPU context must not
    __test__ = INTERPRETED

    @pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
    def test_is_caught(self, mutation: Mutation, tmp_path: Path) -> None:
        torch.manual_seed(0)
        copy = mutated(bias_gelu, mutation.old, mutation.new, tmp_path)
        assert outcome(lambda: mutation.check(copy)) != "passes"

    @pytest.mark.parametrize(
        "check", list(dict.fromkeys(m.check for m in MUTATIONS)), ids=lambda check: check.__name__
    )
    def test_unchanged_kernels_pass(self, check: Callable[[ModuleType], None]) -> None:
        assert outcome(lambda: check(bias_gelu)) == "passes"
