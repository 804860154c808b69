"""The tests of the optimizer kernels see each of these faults, written into a copy of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import lamb

from tests.kernel_mutations import mutated, outcome
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted
from tests.test_kernel_lamb import (
    ADAMW,
    BF16,
    BLOCK,
    LAMB,
    OPTIONS,
    TILE,
    UNDECAYED,
    Problem,
    check,
    check_bad_step,
    check_norm_in_few_programs,
    check_offsets_beyond_32_bits,
    check_parts,
)


def step(module: ModuleType) -> None:
    check(Problem([5, 70, BLOCK + 1], options=OPTIONS["two-groups"]), module)


def adamw(module: ModuleType) -> None:
    check(Problem([5, 70, BLOCK + 1], options=[ADAMW, UNDECAYED]), module)


def l2(module: ModuleType) -> None:
    check(Problem([5, 70], options=OPTIONS["l2"]), module)


def scaled(module: ModuleType) -> None:
    check(Problem([5, 70], loss_scale=1024.0), module)


def unclipped(module: ModuleType) -> None:
    check(Problem([5, 70], grad_size=1e-3), module)


def no_limit(module: ModuleType) -> None:
    check(Problem([5, 70], max_grad_norm=None), module)


def low_precision(module: ModuleType) -> None:
    check(Problem([5, BLOCK + 1], BF16, BF16), module)


def small_weights(module: ModuleType) -> None:
    """Trust ratios far below 1, and updates that the weights' rounding does not hide."""
    check(Problem([50, 7], options=[LAMB, UNDECAYED], weight_size=1e-3), module)


def zero_weights(module: ModuleType) -> None:
    check(Problem([20], weight_size=0.0, num_steps=1), module)


def large_weights(module: ModuleType) -> None:
    """Trust ratios far above 10."""
    check(Problem([50, 7], weight_size=1e3), module)


def long(module: ModuleType) -> None:
    check(Problem([TILE + 5, 2 * TILE], num_steps=1), module)


def three_groups(module: ModuleType) -> None:
    check(Problem([5, 70, 9, 3], options=OPTIONS["three-groups"]), module)


def few_programs(module: ModuleType) -> None:
    check_norm_in_few_programs(module)


def far_away(module: ModuleType) -> None:
    check_offsets_beyond_32_bits(module)


def parts(module: ModuleType) -> None:
    check_parts(module)


def two_types(module: ModuleType) -> None:
    """The second launch of the norm has its own partial sums."""
    p, other = Problem([5, 70]), Problem([9, 33], BF16, BF16, grad_size=5.0)
    p.params += other.params
    p.groups += other.groups
    for name, column in other.columns.items():
        p.columns[name] += column
    for grads, more in zip(p.grads, other.grads):
        grads += more
    check(p, module)


def bad_step(module: ModuleType) -> None:
    check_bad_step(float("inf"), module)
    check_bad_step(float("nan"), module)


def bad_adamw_step(module: ModuleType) -> None:
    check_bad_step(float("inf"), module, [ADAMW])
    check_bad_step(float("nan"), module, [ADAMW])


class Mutation(NamedTuple):
    name: str
    old: str
    new: str
    check: Callable[[ModuleType], None]


# lines that stand in two kernels are told apart by what follows them
NORM = "_sum(partial_ptr, num_partials)"
GROUP = "group_ptr = options_ptr + tl.load(row_ptr + GROUP) * NUM_OPTIONS\n"
FIRST = "        if tile == tl.load(row_ptr + FIRST_TILE):\n"
GRAD_DECAY = "tl.where(grad_decay == 0.0, 0.0, p * grad_decay)"
RATIO = "tl.where(adapts, p_norm, a), tl.where(adapts, u_norm, 1.0)"
CLIPS = "(max_grad_norm > 0.0) & (norm > max_grad_norm)"
GOOD = "    if norm < INFINITY:"
REST, OTHER = "if whole < count:\n", "if whole > count:\n"
WHOLE = "        whole = count // BLOCK * BLOCK\n"
COUNT = "        count = tl.minimum(tl.load(row_ptr + NUMEL) - start, TILE).to(tl.int32)\n" + WHOLE
START = "start = number.to(tl.int64) * TILE\n" + COUNT
SHORT_START = "start = (number * TILE).to(tl.int64)\n" + COUNT
MUTATIONS = [
    # corrections
    Mutation("no first correction", "return (root / c1)", "return (root + c1 * 0.0)", step),
    Mutation("no second correction", "root = tl.sqrt(1.0 - ", "root = tl.sqrt(1.0 - 0.0 * ", step),
    Mutation(
        "no correction", "return (root / c1).to(tl.float32), root.to",
        "return (root * 0.0 + 1.0).to(tl.float32), (root * 0.0 + 1.0).to", adamw,
    ),
    Mutation(
        "corrections in fp32", "tl.exp(step * tl.load(group_ptr + LOG_BETA2))",
        "tl.exp((step * tl.load(group_ptr + LOG_BETA2)).to(tl.float32))", small_weights,
    ),
    Mutation("step not counted in", "(group_ptr, step)\n", "(group_ptr, step - 0.5)\n", adamw),
    Mutation("step not counted in", "+ tensor) + 1.0)\n        eps", "+ tensor) + 0.5)\n        eps", step),
    # ratio
    Mutation("ratio clipped", "rate = ratio *", "rate = tl.minimum(ratio, 10.0) *", large_weights),
    Mutation(
        "ratio turned over", RATIO, "tl.where(adapts, u_norm, a), tl.where(adapts, p_norm, 1.0)",
        small_weights,
    ),
    Mutation("ratio not wanted", "(_option(group_ptr, TRUST_RATIO) > 0.0) &", "", step),
    Mutation("ratio of weights of 0", "& (p_norm > 0.0) &", "&", zero_weights),
    Mutation("1 instead of a correction", RATIO, RATIO.replace("p_norm, a", "p_norm, 1.0"), step),
    Mutation("norm without a root", "u_norm = tl.sqrt_rn(", "u_norm = (", step),
    Mutation(
        "norm of the wrong tensor", "sums_ptr = squares_ptr + tl.load(row_ptr + FIRST_TILE)",
        "sums_ptr = squares_ptr", step,
    ),
    Mutation("norm of one tile", "_sum(sums_ptr, num_tiles)", "tl.load(sums_ptr)", long),
    Mutation("norm of the moments", "return p * p, u * u", "return m * m, u * u", step),
    # moments
    Mutation("gradient not averaged", "beta1 + g * grad_share", "beta1 + g", step),
    Mutation("gradient not squared", "g * g * square_share", "g * square_share", step),
    Mutation("first moment kept", "_store(exp_avg_ptr, offsets, count, m, MASKED)", "pass", step),
    Mutation("second moment kept", "_store(exp_avg_sq_ptr, offsets, count, v, MASKED)", "pass", step),
    Mutation("eps left out", "+ eps) + tl", "+ eps * 0.0) + tl", unclipped),
    # decay and groups
    Mutation("no decay", "tl.where(decay == 0.0, 0.0, p * decay)", "0.0", step),
    Mutation("no decay in the moments", " + " + GRAD_DECAY, "", l2),
    Mutation("decay clipped", "scale + " + GRAD_DECAY, "scale + scale * " + GRAD_DECAY, l2),
    Mutation(
        "decay not corrected", "decay = tl.div_rn(_option(group_ptr, DECAY), a)\n        rate",
        "decay = _option(group_ptr, DECAY)\n        rate", adamw,
    ),
    Mutation("first group", GROUP + "    loss", "group_ptr = options_ptr\n    loss", three_groups),
    Mutation(
        "decay of the wrong group", GROUP + "    loss_scale",
        GROUP.replace("tl.load(row_ptr + GROUP)", "(1 - tl.load(row_ptr + GROUP))") + "    loss_scale", adamw,
    ),
    Mutation("first group", GROUP + "    if", "group_ptr = options_ptr\n    if", step),
    # clipping
    Mutation("norm of one tensor", NORM, "tl.load(partial_ptr + tile)", step),
    Mutation(
        "norm of a group", f"norm = tl.div_rn(tl.sqrt_rn({NORM}), loss_scale)",
        "total = 0.0\n"
        "    for i in range(num_partials):\n"
        "        other = tl.load(table_ptr + tl.load(tiles_ptr + i * 2) * NUM_FIELDS + GROUP)\n"
        "        total += tl.where(other == tl.load(row_ptr + GROUP), tl.load(partial_ptr + i), 0.0)\n"
        "    norm = tl.div_rn(tl.sqrt_rn(total), loss_scale)", step,
    ),
    Mutation("norm of one type", "partial.numel(), launch", "num_programs[0], launch", two_types),
    Mutation("types mixed up", "sum(num_programs[:i]),", "0,", two_types),
    Mutation("a limit of 0", CLIPS, "norm > max_grad_norm", no_limit),
    Mutation("always clipped", CLIPS, "max_grad_norm > 0.0", unclipped),
    Mutation("never clipped", CLIPS, "max_grad_norm < 0.0", step),
    Mutation("not unscaled", "scale = tl.div_rn(clip, loss_scale)", "scale = clip", scaled),
    Mutation("scaled norm", f"tl.div_rn(tl.sqrt_rn({NORM}), loss_scale)", f"tl.sqrt_rn({NORM})", scaled),
    # bad steps, counts
    Mutation("moments of a bad step", GOOD, "    if tile >= 0:", bad_step),
    Mutation("moments of a step of NaN", GOOD, "    if norm != INFINITY:", bad_step),
    Mutation("weights of a bad step", "if tl.load(norm_ptr) < INFINITY:", "if tile >= 0:", bad_step),
    Mutation("a bad step of AdamW", GOOD, "    if tile >= 0:", bad_adamw_step),
    Mutation(
        "a bad step counted", GOOD,
        "    tl.store(_step_at(row_ptr), tl.load(steps_ptr + tensor) + 1.0)\n" + GOOD, bad_step,
    ),
    Mutation("not counted", "tl.store(_step_at(row_ptr), step)", "pass", step),
    Mutation(
        "counted by another tile", FIRST + "            tl.store(_step",
        FIRST.replace("==", "<") + "            tl.store(_step", step,
    ),
    # tiles and tails
    Mutation(
        "tail loaded unmasked", "tl.load(pointer + offsets, mask=offsets < count, other=0.0)\n    else",
        "tl.load(pointer + offsets)\n    else", step,
    ),
    Mutation("tail stored unmasked", "element_ty), mask=offsets < count)", "element_ty))", step),
    Mutation("tail left out", REST + "            sums", OTHER + "            sums", step),
    Mutation("tail left out", REST + "            p_squares", OTHER + "            p_squares", step),
    Mutation("tail left out", REST + "            _apply", OTHER + "            _apply", step),
    Mutation(
        "one tile a program", "range(pid, num_tiles, tl.num_programs(0))", "range(pid, pid + 1)", few_programs
    ),
    Mutation(
        "blocks left out", "range(0, whole, BLOCK):\n            sums",
        "range(0, BLOCK, BLOCK):\n            sums", long,
    ),
    Mutation("parameters not written", "    if PARAM_DTYPE != tl.float32:", "    if MASKED:", low_precision),
    Mutation("weights not written", "    if APPLY:\n        _", "    if APPLY and MASKED:\n        _", adamw),
    # parts of tensors
    Mutation("norm of a part", "sum_over_shards(partial.sum(0, keepdim=True))", "partial", parts),
    Mutation("ratio of a part", "= sum_over_shards(sums)", "= sums", parts),
    Mutation("sums of the weights only", "_sum(first_ptr + total_tiles", "_sum(first_ptr", parts),
    Mutation(
        "sums of the wrong part", "first_ptr = squares_ptr + tl.load(row_ptr + FIRST_TILE)",
        "first_ptr = squares_ptr", parts,
    ),
    Mutation("other tiles added again", "squares.zero_()[:", "squares[:", parts),
    # more than 2^31 elements
    Mutation("32-bit offsets", START + "        grad", SHORT_START + "        grad", far_away),
    Mutation("32-bit offsets", START + "        lanes", SHORT_START + "        lanes", far_away),
    Mutation(
        "32-bit offsets", "tl.load(tiles_ptr + tile * 2 + 1).to(tl.int64) * TILE",
        "(tl.load(tiles_ptr + tile * 2 + 1) * TILE).to(tl.int64)", far_away,
    ),
    Mutation(
        "32-bit lengths", COUNT + "        grad_ptr",
        COUNT.replace("NUMEL)", "NUMEL).to(tl.int32)") + "        grad_ptr", far_away,
    ),
]  # fmt: skip


@in_the_parent_only
def test_mutations_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestMutations")


class TestMutations:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
    def test_mutation_is_seen(self, mutation: Mutation, tmp_path: Path) -> None:
        module = mutated(lamb, mutation.old, mutation.new, tmp_path)
        assert outcome(lambda: mutation.check(module)) != "passes"

    def test_an_unchanged_copy_passes(self, tmp_path: Path) -> None:
        copy = mutated(lamb, MUTATIONS[0].old, MUTATIONS[0].old, tmp_path)
        for check_copy in dict.fromkeys(mutation.check for mutation in MUTATIONS):
            assert outcome(lambda check_copy=check_copy: check_copy(copy)) == "passes", check_copy.__name__
