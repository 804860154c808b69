"""The tests of the linear + cross-entropy kernels see each of these faults, written into a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import cross_entropy

from tests.kernel_mutations import mutated, outcome
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted
from tests.test_kernel_cross_entropy import (
    Problem,
    check,
    check_chunks,
    check_closed_words,
    check_far_rows,
    check_ignored_label_that_is_a_word,
    check_ignored_rows_hold_anything,
    check_known_values,
    check_label_beyond_the_vocabulary,
    check_large_logits,
    check_many_rows,
    check_ties,
    small_chunks,
)


def smoothed(module: ModuleType) -> None:
    check_chunks(module, label_smoothing=0.1)


def mixed(module: ModuleType) -> None:
    with small_chunks(module):
        check(Problem((5, 150, 8), torch.float16, other=torch.float32), module)


def half(module: ModuleType) -> None:
    with small_chunks(module):
        check(Problem((5, 150, 8), torch.float16), module)


class Mutation(NamedTuple):
    """A fault may read anywhere, but not write: a fork with a damaged heap does anything."""

    name: str
    old: str
    new: str
    check: Callable[[ModuleType], None]


MUTATIONS = [
    Mutation(
        "unused lanes in the sum", '        x = tl.where(mask, x, float("-inf"))\n', "", check_closed_words
    ),
    Mutation(
        "the maximum not subtracted",
        'shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)',
        "shift = 0.0",
        check_large_logits,
    ),
    Mutation(
        "the old sum not scaled down",
        "total = total * tl.exp(maximum - shift) + ",
        "total = total + ",
        check_chunks,
    ),
    Mutation(
        "-inf less -inf",
        'shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)',
        "shift = new_maximum",
        check_closed_words,
    ),
    Mutation("every chunk begins anew", "is_later = first_col > 0", "is_later = first_col < 0", check_chunks),
    Mutation("the last of equal logits", "tile_maximum > maximum", "tile_maximum >= maximum", check_ties),
    Mutation(
        "the last of equal logits in a block",
        "tl.min(tl.where(x == tile_maximum, cols, N), axis=0)",
        "tl.max(tl.where(x == tile_maximum, cols, -1), axis=0)",
        check_ties,
    ),
    Mutation("the column within its chunk", "first_col + tile_best", "tile_best", check_ties),
    Mutation(
        "the label within another chunk",
        "label = tl.load(labels_ptr + row) - first_col\n    is_here",
        "label = tl.load(labels_ptr + row)\n    is_here",
        check_chunks,
    ),
    Mutation(
        "the label's logit without its bias",
        "    label_logit += tl.load(bias_ptr + label",
        "    label_logit += 0.0 * tl.load(bias_ptr + label",
        check_known_values,
    ),
    Mutation(
        "the bias forgotten in the backward pass",
        "x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + bias[None, :]",
        "x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)",
        check_known_values,
    ),
    Mutation(
        "the smoothing forgotten in the loss",
        "            loss -= on_all *",
        "            loss -= 0.0 *",
        smoothed,
    ),
    Mutation(
        "the smoothing forgotten in the gradient", "on_label, 0.0) + on_all", "on_label, 0.0)", smoothed
    ),
    Mutation(
        "the label's whole share when smoothed",
        "ignore_index, 1.0 - label_smoothing, label_smoothing / V,",
        "ignore_index, 1.0, label_smoothing / V,",
        smoothed,
    ),
    Mutation(
        "the logits of the last chunk only",
        "        logit_sum = tl.load(state_ptr + 3 * M + row, mask=is_later, other=0.0)",
        "        logit_sum = 0.0",
        smoothed,
    ),
    Mutation(
        "ignore index 0 taken for -100",
        "counted = mask & (label != ignore_index)",
        "counted = mask & (label != -100)",
        check_ignored_label_that_is_a_word,
    ),
    Mutation(
        "ignore index 0 taken for -100 in the backward pass",
        "mask & (label != ignore_index)[:, None]",
        "mask & (label != -100)[:, None]",
        check_ignored_label_that_is_a_word,
    ),
    Mutation(
        "ignored rows by multiplication",
        "tl.where(mask & (label != ignore_index)[:, None], dlogits, 0.0)",
        "tl.where(mask, dlogits, 0.0) * (label != ignore_index)[:, None].to(tl.float32)",
        check_ignored_rows_hold_anything,
    ),
    Mutation("dloss forgotten", "- target) * dloss", "- target)", check_known_values),
    Mutation("correct among the ignored", "(counted & (best == label))", "(best == label)", check_ties),
    Mutation(
        "a label beyond the vocabulary is none",
        "counted & (has_logit == 0)",
        "mask & (count < 0)",
        check_label_beyond_the_vocabulary,
    ),
    Mutation(
        "a row of partial sums lost",
        "torch.sum(partial, dim=0",
        "torch.sum(partial[: max(1, len(partial) - 1)], dim=0",
        check_many_rows,
    ),
    Mutation(
        "only the last tile in the partial sums", "dbias += dlogits", "dbias = dlogits", check_many_rows
    ),
    Mutation(
        "the sum over chunks in 16 bits lost", "dhidden_sum += torch.mm(", "dhidden_sum = torch.mm(", half
    ),
    Mutation("dhidden of the last chunk only", "beta=1.0 if part.start else 0.0", "beta=0.0", check_chunks),
    Mutation(
        "the weights of the first chunk for all",
        ".copy_(weight)",
        ".copy_(self.weight[: part.stop - start])",
        mixed,
    ),
    Mutation(
        "the weights of the user overwritten",
        "if dweight is not None and chunks.cast is None:",
        "if dweight is None:",
        check_chunks,
    ),
    Mutation(
        "rows in 32 bits", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", check_far_rows
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
        copy = mutated(cross_entropy, mutation.old, mutation.new, tmp_path)
        assert outcome(lambda: mutation.check(copy)) != "passes"

    @pytest.mark.parametrize(
        "check", list(dict.fromkeys(m.check for m in MUTATIONS)), ids=lambda check: check.__name__
    )
    def test_unchanged_kernels_pass(self, check: Callable[[ModuleType], None]) -> None:
        assert outcome(lambda: check(cross_entropy)) == "passes"
