"""The tests of the attention kernels see each of these faults, written into a copy of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import attention, attention_bwd

from tests.kernel_mutations import mutated, outcome
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted
from tests.test_kernel_attention import Problem, check, check_far_rows, far_below_zero


def mixed(forward: ModuleType, backward: ModuleType) -> None:
    check(Problem([37, 0, 5], 26), forward=forward, backward=backward)


def masked_keys(forward: ModuleType, backward: ModuleType) -> None:
    p = Problem([4, 40], 16, key_mask=True, unowned=0)
    assert p.key_mask is not None
    p.key_mask[4:36], p.key_mask[36] = False, True  # the first block of keys has none
    check(p, forward=forward, backward=backward)


def dropped(forward: ModuleType, backward: ModuleType) -> None:
    check(Problem([37, 5], 16, dropout_p=0.5), forward=forward, backward=backward)


def no_key_there(forward: ModuleType, backward: ModuleType) -> None:
    check(far_below_zero(), forward=forward, backward=backward)


class Mutation(NamedTuple):
    name: str
    module: ModuleType
    old: str
    new: str
    check: Callable[[ModuleType, ModuleType], None]


FORWARD = [
    (
        "key mask dropped",
        "if HAS_KEY_MASK:\n            keep_key",
        "if False:\n            keep_key",
        masked_keys,
    ),
    ("tail of the keys unmasked", "elif not ALL:\n            qk =", "elif False:\n            qk =", mixed),
    ("a block without keys gives NaN", "if HAS_KEY_MASK else m_new", "if False else m_new", masked_keys),
    ("scale of the padded width", "T, H, D**-0.5,", "T, H, head_dim_block(D)**-0.5,", mixed),
    ("no scaling of what is kept", "acc * (dropout_scale / l_safe)", "acc * (1.0 / l_safe)", dropped),
    (
        "the denominator counts what is kept",
        "        p = exp_scaled(qk, m_ref[:, None], softmax_scale, q.dtype == tl.float32)\n",
        "        p = exp_scaled(qk, m_ref[:, None], softmax_scale, q.dtype == tl.float32)\n"
        "        p = tl.where(dropout_keep(seed, query, start_n, bos, head, threshold, "
        "BLOCK_M, BLOCK_N, False), p, 0.0)\n",
        dropped,
    ),
    ("no rescaling of the sum", "l_i = l_i * alpha + tl.sum(p, 1)", "l_i = l_i + tl.sum(p, 1)", mixed),
    ("no rescaling of the output", "v, acc * alpha[:, None], PRECISION", "v, acc, PRECISION", mixed),
    (
        "rows that no sequence owns are left",
        "has_key[:, None], acc *",
        "has_key[:, None] | True, acc /",
        mixed,
    ),
    ("head offset forgotten", " + head.to(tl.int64) * stride_h", "", mixed),
    (
        "rows in 32 bits",
        "return x_ptr + row.to(tl.int64) * stride_t",
        "return x_ptr + row * stride_t",
        check_far_rows,
    ),
    ("lse of the maximum only", "m_i * softmax_scale + tl.log(l_safe)", "m_i * softmax_scale", mixed),
]
BACKWARD = [
    (
        "dropout not replayed for dq",
        "dp = tl.where(keep, dp * dropout_scale, 0.0)",
        "dp = dp * 1.0",
        dropped,
    ),
    (
        "dropout not replayed for dv",
        "dropped_t = tl.where(keep, p_t * dropout_scale, 0.0)",
        "dropped_t = p_t",
        dropped,
    ),
    (
        "dropout not replayed for dk",
        "dp_t = tl.where(keep, dp_t * dropout_scale, 0.0)",
        "dp_t = dp_t * 1.0",
        dropped,
    ),
    (
        "the mask of another place",
        "dropout_keep(seed, start_m, key, bos, head, threshold, BLOCK_M, BLOCK_N, True)",
        "dropout_keep(seed, key, start_m, bos, head, threshold, BLOCK_M, BLOCK_N, True)",
        dropped,
    ),
    (
        "tail of the keys unmasked",
        "elif not ALL:\n            p =",
        "elif False:\n            p =",
        no_key_there,
    ),
    (
        "tail of the queries unmasked",
        "load_block(dout_base, seqlen - start_m,",
        "load_block(dout_base, BLOCK_M,",
        mixed,
    ),
    (
        "key mask dropped for dq",
        "if HAS_KEY_MASK:\n            keep_key",
        "if False:\n            keep_key",
        masked_keys,
    ),
    (
        "key mask dropped for dk",
        "p_t = tl.where(keep_key[:, None], p_t, 0.0)",
        "p_t = p_t * 1.0",
        masked_keys,
    ),
    ("dk without the scale", "dk * softmax_scale", "dk", mixed),
    ("dq without the scale", "dq * softmax_scale", "dq", mixed),
    ("delta forgotten", "ds = p * (dp - delta[:, None])", "ds = p * dp", mixed),
    ("statistics of another head", "head.to(tl.int64) * total_tokens + bos", "bos.to(tl.int64)", mixed),
    (
        "queries of the last block twice",
        "q_base = row_start(q_ptr, bos + full, head, stride_qt, stride_qh)",
        "q_base = row_start(q_ptr, bos, head, stride_qt, stride_qh)",
        mixed,
    ),
]
MUTATIONS = [
    *(Mutation(name, attention, *rest) for name, *rest in FORWARD),
    *(Mutation(name, attention_bwd, *rest) for name, *rest in BACKWARD),
]


@in_the_parent_only
def test_mutations_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestMutations")


class TestMutations:
    # forks, which a process with a GPU context must not
    __test__ = INTERPRETED

    @pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.module.__name__[17:]}: {m.name}")
    def test_is_caught(self, mutation: Mutation, tmp_path: Path) -> None:
        torch.manual_seed(0)
        copy = mutated(mutation.module, mutation.old, mutation.new, tmp_path)
        if mutation.module is attention:
            assert outcome(lambda: mutation.check(copy, attention_bwd)) != "passes"
        else:
            assert outcome(lambda: mutation.check(attention, copy)) != "passes"

    @pytest.mark.parametrize(
        "check", [mixed, masked_keys, dropped, no_key_there, check_far_rows], ids=lambda check: check.__name__
    )
    def test_unchanged_kernels_pass(self, check: Callable[[ModuleType, ModuleType], None]) -> None:
        assert outcome(lambda: check(attention, attention_bwd)) == "passes"
