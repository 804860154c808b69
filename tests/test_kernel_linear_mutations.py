"""The tests of the QKV projection's kernels see each of these faults, written into a copy of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import linear, linear_dw, linear_dx

from tests.kernel_mutations import mutated, outcome
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted
from tests.test_kernel_linear import (
    DESCRIPTORS,
    LONG_DW,
    LONG_DX,
    LONG_FORWARD,
    POINTERS,
    Problem,
    check_dw,
    check_dx,
    check_forward,
    check_offsets_beyond_32_bits,
)


def forward(module: ModuleType) -> None:
    check_forward(module.qkv_fwd, Problem((33, 40, 40)), POINTERS)


def forward_descriptors(module: ModuleType) -> None:
    check_forward(module.qkv_fwd, Problem((33, 64, 48), torch.float16), DESCRIPTORS)


def forward_far_rows(module: ModuleType) -> None:
    check_offsets_beyond_32_bits(forward=module.qkv_fwd)


def forward_long_sums(module: ModuleType) -> None:
    check_forward(module.qkv_fwd, Problem(LONG_FORWARD, torch.float16, torch.rand), DESCRIPTORS)


def dx(module: ModuleType) -> None:
    check_dx(module.qkv_bwd_dx, Problem((33, 40, 40)), POINTERS)


def dx_descriptors(module: ModuleType) -> None:
    check_dx(module.qkv_bwd_dx, Problem((33, 64, 48), torch.float16), DESCRIPTORS)


def dx_far_rows(module: ModuleType) -> None:
    check_offsets_beyond_32_bits(dx=module.qkv_bwd_dx)


def dx_long_sums(module: ModuleType) -> None:
    check_dx(module.qkv_bwd_dx, Problem(LONG_DX, torch.float16, torch.rand), DESCRIPTORS)


def dw(module: ModuleType) -> None:
    for dtype in (torch.float32, torch.float16):
        check_dw(module.qkv_bwd_dw, Problem((33, 40, 40), dtype), POINTERS)


def dw_long_sums(module: ModuleType) -> None:
    check_dw(module.qkv_bwd_dw, Problem(LONG_DW, torch.float16, torch.rand), POINTERS)


def dw_in_splits(module: ModuleType) -> None:
    module.qkv_bwd_dw_splits = lambda T, N, K: 3
    for config in (POINTERS, DESCRIPTORS):
        check_dw(module.qkv_bwd_dw, Problem((150, 48, 32), torch.float16), config)


def dw_far_rows(module: ModuleType) -> None:
    check_offsets_beyond_32_bits(dw=module.qkv_bwd_dw)


class Mutation(NamedTuple):
    name: str
    module: ModuleType
    old: str
    new: str
    check: Callable[[ModuleType], None]


MUTATIONS = [
    Mutation("bias dropped", linear, "tl.store(y_ptrs, acc + bias[None, :]", "tl.store(y_ptrs, acc", forward),
    Mutation(
        "bias dropped", linear, "(acc + bias[None, :]).to(y_desc.dtype)", "acc.to(y_desc.dtype)",
        forward_descriptors,
    ),
    Mutation("tail of K unmasked", linear, "w_ptrs, mask=in_k, other=0.0", "w_ptrs", forward),
    Mutation("tail of K unmasked", linear, "x_ptrs, mask=in_k, other=0.0", "x_ptrs", forward),
    Mutation(
        "last block of K left out", linear, "for k in range(0, K, BLOCK_K):\n        if",
        "for k in range(0, K - K % BLOCK_K, BLOCK_K):\n        if", forward,
    ),
    Mutation(
        "the key's weight for the value", linear, "select(which, wq_ptr, wk_ptr, wv_ptr)",
        "select(which, wq_ptr, wk_ptr, wk_ptr)", forward,
    ),
    Mutation(
        "the key's weight for the value", linear, "w_desc = wv_desc", "w_desc = wk_desc", forward_descriptors
    ),
    Mutation(
        "the query's bias for the key", linear, "b_ptr = select(which, bq_ptr, bk_ptr, bv_ptr)\n\n",
        "b_ptr = select(which, bq_ptr, bq_ptr, bv_ptr)\n\n", forward,
    ),
    Mutation(
        "sums in the low precision", linear, "            acc = dot(x, w.T, acc, \"ieee\")",
        "            acc = dot(x, w.T, acc, \"ieee\").to(x.dtype).to(tl.float32)", forward_long_sums,
    ),
    Mutation(
        "32-bit row offsets", linear, "rows = tile_m.to(tl.int64) * BLOCK_M", "rows = tile_m * BLOCK_M",
        forward_far_rows,
    ),
    Mutation("store beyond the columns", linear, "[:, None] & (cols < N)[None, :])", "[:, None])", forward),
    Mutation(
        "the last tile left out", linear, "num_tiles = num_tiles_m * num_tiles_n * 3",
        "num_tiles = num_tiles_m * num_tiles_n * 3 - 1", forward_descriptors,
    ),
    Mutation(
        "the query's weight for the key", linear_dx, "select(which, wq_ptr, wk_ptr, wv_ptr)",
        "select(which, wq_ptr, wq_ptr, wv_ptr)", dx,
    ),
    Mutation(
        "the query's weight for the key", linear_dx, "w_desc = wk_desc", "w_desc = wq_desc", dx_descriptors
    ),
    Mutation(
        "tail of N unmasked", linear_dx, "mask=in_n[:, None] & in_cols", "mask=in_cols", dx,
    ),
    Mutation(
        "two of three projections", linear_dx, "range(3 * steps):\n        which",
        "range(2 * steps):\n        which", dx,
    ),
    Mutation(
        "sums in the low precision", linear_dx, "            acc = dot(dy, w, acc, \"ieee\")",
        "            acc = dot(dy, w, acc, \"ieee\").to(dy.dtype).to(tl.float32)", dx_long_sums,
    ),
    Mutation(
        "32-bit row offsets", linear_dx, "rows = tile_m.to(tl.int64) * BLOCK_M", "rows = tile_m * BLOCK_M",
        dx_far_rows,
    ),
    Mutation(
        "the key's gradient for the value", linear_dw, "ts[:, None] * stride_dt + (which * N + features)",
        "ts[:, None] * stride_dt + (tl.minimum(which, 1) * N + features)", dw,
    ),
    Mutation("tail of T unmasked", linear_dw, "=in_t & in_features[None, :]", "=in_features[None, :]", dw),
    Mutation(
        "sums in the low precision", linear_dw, "acc = dot(dy.T, x, acc, INPUT_PRECISION)",
        "acc = dot(dy.T, x, acc, INPUT_PRECISION).to(dy.dtype).to(tl.float32)", dw_long_sums,
    ),
    Mutation("db counted twice", linear_dw, "db += tl.sum(dy, axis=0)", "db += 2 * tl.sum(dy, axis=0)", dw),
    Mutation(
        "db counted once a column of ones", linear_dw, "tl.where(first, db, 0.0)", "db", dw,
    ),
    Mutation("db not written", linear_dw, "if tile_n == 0:  # one", "if tile_n == 5:  # one", dw),
    Mutation("a split left out", linear_dw, "range(num_splits)", "range(num_splits - 1)", dw_in_splits),
    Mutation(
        "splits that overlap", linear_dw, "tl.minimum(T - start, rows_per_split).to", "(T - start).to",
        dw_in_splits,
    ),
    Mutation(
        "splits that overlap", linear_dw, "end = tl.minimum(T, start + rows_per_split)", "end = T",
        dw_in_splits,
    ),
    Mutation(
        "32-bit row offsets", linear_dw, "split = tl.program_id(1).to(tl.int64)", "split = tl.program_id(1)",
        dw_far_rows,
    ),
]  # fmt: skip


@in_the_parent_only
def test_mutations_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestMutations")


class TestMutations:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.module.__name__}: {m.name}")
    def test_mutation_is_seen(self, mutation: Mutation, tmp_path: Path) -> None:
        module = mutated(mutation.module, mutation.old, mutation.new, tmp_path)
        assert outcome(lambda: mutation.check(module)) != "passes"

    @pytest.mark.parametrize("module", [linear, linear_dx, linear_dw], ids=lambda m: m.__name__)
    def test_an_unchanged_copy_passes(self, module: ModuleType, tmp_path: Path) -> None:
        same = next(m for m in MUTATIONS if m.module is module)
        copy = mutated(module, same.old, same.old, tmp_path)
        for check in dict.fromkeys(m.check for m in MUTATIONS if m.module is module):
            assert outcome(lambda check=check: check(copy)) == "passes", check.__name__

    def test_a_mutation_that_is_out_of_date_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(AssertionError, match="0 times, not once"):
            mutated(linear, "no such line", "", tmp_path)

    def test_a_mutation_that_does_not_run_is_an_error(self, tmp_path: Path) -> None:
        module = mutated(linear_dx, "acc = dot(dy, w, acc, INPUT_PRECISION)", "acc = nonsense", tmp_path)
        with pytest.raises(RuntimeError, match="does not run"):
            outcome(lambda: dx(module))
