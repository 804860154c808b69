"""The tests of the dropout + residual + LayerNorm kernels see each of these faults, written into a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import dropout_add_norm
from fastbert_kernels.launch import LaunchConfig

from tests.kernel_mutations import mutated, outcome
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted
from tests.test_kernel_dropout_add_norm import (
    Problem,
    check,
    check_between_nans,
    check_constant_row,
    check_far_rows,
    check_variance_about_the_mean,
)


def plain(module: ModuleType) -> None:
    check(Problem((9, 33)), module)


def dropped(module: ModuleType) -> None:
    check(Problem((9, 100), dropout_p=0.5), module)


def mixed(module: ModuleType) -> None:
    check(Problem((9, 33), torch.float16, other=torch.float32), module)


def many_programs(module: ModuleType) -> None:
    module.row_norm_bwd_config = lambda M, N: LaunchConfig(2, 64, tiles_m=1)  # type: ignore[attr-defined]
    module.SUM_ROWS = 2  # type: ignore[attr-defined]
    check(Problem((9, 33), dropout_p=0.5), module)


def widest(module: ModuleType) -> None:
    check(Problem((2, 4100), dropout_p=0.5), module)


def constant(module: ModuleType) -> None:
    check_constant_row(0.1, 33, torch.float32, module)


class Mutation(NamedTuple):
    """A fault may read anywhere, but not write: a fork with a damaged heap does anything."""

    name: str
    old: str
    new: str
    check: Callable[[ModuleType], None]


SAME = (
    "keep = keep_in_rows(seed, rows, threshold, BLOCK_M, BLOCK_N) if HAS_DROPOUT else mask\n        if LEAN"
)
MUTATIONS = [
    Mutation(
        "unused lanes in the variance",
        "distance = tl.where(mask, h - rough_mean[:, None], 0.0)",
        "distance = h - rough_mean[:, None]",
        plain,
    ),
    Mutation(
        "one-pass variance",
        "variance = tl.sum(distance * distance, axis=1) / N - correction * correction",
        "variance = tl.sum(h * h, axis=1) / N - rough_mean * rough_mean",
        check_variance_about_the_mean,
    ),
    Mutation("mean left as rounded", "mean = rough_mean + correction", "mean = rough_mean", constant),
    Mutation(
        "eps in fp16", "M, N, eps, threshold", "M, N, torch.tensor(eps).half().item(), threshold", constant
    ),
    Mutation("no eps", "variance, 0.0) + eps)", "variance, 0.0))", constant),
    Mutation(
        "width of the block",
        "tl.sum(distance * distance, axis=1) / N",
        "tl.sum(distance * distance, axis=1) / h.shape[1]",
        plain,
    ),
    Mutation(
        "the bias of x forgotten",
        "    if HAS_BIAS:\n        h += bias",
        "    if False:\n        h += bias",
        plain,
    ),
    Mutation("no scaling of what is kept", "keep, h * dropout_scale", "keep, h", dropped),
    Mutation(
        "no scaling of its gradient",
        "tl.where(keep, dh * dropout_scale, 0.0)",
        "tl.where(keep, dh, 0.0)",
        dropped,
    ),
    Mutation("dropout not replayed", "tl.where(keep, dh * dropout_scale, 0.0)", "dh", dropped),
    Mutation("the mask of another row", SAME, SAME.replace("rows,", "rows - first_row,"), many_programs),
    Mutation(
        "the mask of another seed", "keep_in_rows(tl.load(seed_ptr), rows", "keep_in_rows(0, rows", widest
    ),
    Mutation("halves of a word swapped", "(16 - half * 16)", "(half * 16)", dropped),
    Mutation(
        "the words of a call swapped",
        "tl.where(number == 2, w2, w3)",
        "tl.where(number == 2, w3, w2)",
        dropped,
    ),
    Mutation("the gradient of the residual missing", "        if OWN_DRESIDUAL:", "        if False:", mixed),
    Mutation(
        "the residual's gradient is dropped, too",
        "stride_dxm, BLOCK_M, BLOCK_N), dh",
        "stride_dxm, BLOCK_M, BLOCK_N), dx",
        dropped,
    ),
    Mutation("the bias sums what was dropped", "dbias += dx", "dbias += dh", dropped),
    Mutation("the mean of dxhat forgotten", "(dxhat - mean_dxhat[:, None] - ", "(dxhat - ", plain),
    Mutation("the mean of the product forgotten", " - xhat * mean_product[:, None]", "", plain),
    Mutation("dweight without the statistics", "dweight += dy * xhat", "dweight += dy * h", plain),
    Mutation(
        "a row of partial sums lost",
        "(start + rows < num_partials)",
        "(start + rows < num_partials - 1)",
        many_programs,
    ),
    Mutation(
        "only the first rows of partial sums",
        "acc += tl.load(partial_ptr",
        "acc = tl.load(partial_ptr",
        many_programs,
    ),
    Mutation("sums exchanged", "which) * N", "(which + 1) % SUMS) * N", plain),
    Mutation(
        "the tail of the rows unmasked",
        "stride_dym, BLOCK_M, BLOCK_N), mask=mask",
        "stride_dym, BLOCK_M, BLOCK_N), mask=in_row[None, :]",
        check_between_nans,
    ),
    Mutation(
        "rows of a tile in 32 bits",
        "tl.arange(0, BLOCK_M).to(tl.int64)",
        "tl.arange(0, BLOCK_M)",
        check_far_rows,
    ),
    Mutation(
        "first row in 32 bits",
        "x_ptr + first_row * stride",
        "x_ptr + first_row.to(tl.int32) * stride",
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
        copy = mutated(dropout_add_norm, mutation.old, mutation.new, tmp_path)
        assert outcome(lambda: mutation.check(copy)) != "passes"

    @pytest.mark.parametrize(
        "check", list(dict.fromkeys(m.check for m in MUTATIONS)), ids=lambda check: check.__name__
    )
    def test_unchanged_kernels_pass(self, check: Callable[[ModuleType], None]) -> None:
        assert outcome(lambda: check(dropout_add_norm)) == "passes"
