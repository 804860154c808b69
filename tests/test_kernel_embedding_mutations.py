"""The tests of the embedding kernels see each of these faults, written into a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import embedding, table_grad

from tests.kernel_mutations import mutated, outcome
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted
from tests.test_kernel_embedding import (
    RUNS,
    Problem,
    check,
    check_bad_ids,
    check_constant_row,
    check_far_rows,
    check_table,
    small_tiles,
)


def plain(module: ModuleType) -> None:
    check(Problem(9, 33), module)


def dropped(module: ModuleType) -> None:
    check(Problem(9, 100, dropout_p=0.5), module)


def constant(module: ModuleType) -> None:
    check_constant_row(0.1, torch.float16, module)


def padding(module: ModuleType) -> None:
    check_table(RUNS["whole tiles and back"], 6, padding_idx=1, module=module)


def runs(module: ModuleType) -> None:
    small_tiles(module)
    empty = torch.empty
    # in a fork of its own: fresh memory is often 0, which would hide a partial sum that nobody wrote
    setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(1e4))  # noqa: B010
    for name in ("whole tiles and back", "two that cross in one tile", "shuffled"):
        check_table(RUNS[name], 7, module=module)


class Mutation(NamedTuple):
    """A fault may read anywhere, but not write: a fork with a damaged heap does anything."""

    name: str
    old: str
    new: str
    check: Callable[[ModuleType], None]


ROWS = [
    Mutation("types forgotten", "h = _add_rows(h, type_ptr,", "_add_rows(h, type_ptr,", plain),
    Mutation(
        "positions by the ids of types",
        "positions, known = _load_ids(position_ids_ptr",
        "positions, known = _load_ids(type_ids_ptr",
        plain,
    ),
    Mutation("ids that are too large are read", "(ids >= 0) & (ids < num_rows)", "ids >= 0", check_bad_ids),
    Mutation("negative ids are read", "(ids >= 0) & (ids < num_rows)", "ids < num_rows", check_bad_ids),
    Mutation("an unknown id is row 0", 'float("nan"), h + rows', "h, h + rows", check_bad_ids),
    Mutation("nothing is reported", "tl.store(here, ids, mask=known == 0)", "pass", check_bad_ids),
    Mutation(
        "the limit of another table",
        "position_ids_ptr, rows, M, num_positions)\n\n\n",
        "position_ids_ptr, rows, M, num_types)\n\n\n",
        check_bad_ids,
    ),
    Mutation(
        "ids in 32 bits",
        ".to(tl.int64)\n    return ids, (ids",
        ".to(tl.int32)\n    return ids, (ids",
        check_far_rows,
    ),
    Mutation(
        "eps in fp16",
        "for table in tables), eps, threshold",
        "for table in tables), torch.tensor(eps).half().item(), threshold",
        constant,
    ),
    Mutation("no bias of the norm", " + norm_bias[None, :]", "", plain),
    Mutation(
        "no scaling of what is kept",
        "tl.where(keep, dropout_scale, 0.0)  #",
        "tl.where(keep, 1.0, 0.0)  #",
        dropped,
    ),
    Mutation("no dropout", "y *= tl.where(keep, dropout_scale, 0.0)", "y *= 1.0", dropped),
    Mutation("dropout not replayed", "dy = tl.where(keep, dy * dropout_scale, 0.0)", "dy = dy", dropped),
    Mutation(
        "the mask of other rows",
        "keep = keep_in_rows(seed, rows, threshold",
        "keep = keep_in_rows(seed, rows + 1, threshold",
        dropped,
    ),
    Mutation("the mean of dxhat forgotten", "(dxhat - mean_dxhat[:, None] - ", "(dxhat - ", plain),
    Mutation("the mean of the product forgotten", " - xhat * mean_product[:, None]", "", plain),
    Mutation("dweight without the statistics", "dweight += dy * xhat", "dweight += dy * h", plain),
    Mutation("no weight of the norm", "dxhat = dy * weight[None, :]", "dxhat = dy", plain),
    Mutation(
        "sums exchanged",
        "partial, dweight, dnorm_bias, dweight,",
        "partial, dnorm_bias, dweight, dweight,",
        plain,
    ),
    Mutation("padding of another table", "(padding_idx, None, None)", "(None, None, padding_idx)", plain),
]
RUN_SUMS = [
    Mutation("the padding row gets a gradient", " & (id != padding_idx)", "", padding),
    Mutation(
        "rows of the sorted order",
        "source = tl.load(order_ptr + row, mask=row < M, other=0)",
        "source = row",
        runs,
    ),
    Mutation("a run is cut at each row", "if (id != next_id) | is_last:", "if id == id:", runs),
    Mutation("a sum goes on into the next run", "        acc = tl.zeros_like(acc)\n", "", runs),
    Mutation(
        "a run from the tile before starts anew",
        "if id == id_before:",
        "if (id == id_before) & is_last:",
        runs,
    ),
    Mutation(
        "tiles overlap",
        "for row in range(first, last + 1, AHEAD):",
        "for row in range(tl.maximum(first - 4, 0), last + 1, AHEAD):",
        runs,
    ),
    Mutation("the last row of a tile is lost", "acc + row3, id3", "acc, id3", runs),
    Mutation("the beginning of a run is lost", "begin + tl.sum(acc, axis=0)", "tl.sum(acc, axis=0)", runs),
    Mutation("the end of a run is lost", "begin + tl.sum(acc, axis=0)", "begin", runs),
    Mutation("only the first partial sums", "        while goes_on:", "        for _ in range(1):", runs),
    Mutation("partial sums of other runs", " & (_id_at(ids_ptr, tiles * tile_rows, M) == here)", "", runs),
    Mutation("every tile of a run begins it", "if goes_on & began_here &", "if goes_on &", runs),
    Mutation(
        "sums in fp16", "mask=mask, other=0.0).to(tl.float32)", "mask=mask, other=0.0).to(tl.float16)", runs
    ),
]


@in_the_parent_only
def test_mutations_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestMutations")


class TestMutations:
    # forks, which a process with a GPU context must not
    __test__ = INTERPRETED

    @pytest.mark.parametrize(
        ("original", "mutation"),
        [(embedding, m) for m in ROWS] + [(table_grad, m) for m in RUN_SUMS],
        ids=lambda value: value.name if isinstance(value, Mutation) else "",
    )
    def test_is_caught(self, original: ModuleType, mutation: Mutation, tmp_path: Path) -> None:
        torch.manual_seed(0)
        copy = mutated(original, mutation.old, mutation.new, tmp_path)
        assert outcome(lambda: mutation.check(copy)) != "passes"

    @pytest.mark.parametrize(
        ("original", "check"),
        [(embedding, c) for c in dict.fromkeys(m.check for m in ROWS)]
        + [(table_grad, c) for c in dict.fromkeys(m.check for m in RUN_SUMS)],
        ids=lambda value: "" if isinstance(value, ModuleType) else value.__name__,
    )
    def test_unchanged_kernels_pass(self, original: ModuleType, check: Callable[[ModuleType], None]) -> None:
        assert outcome(lambda: check(original)) == "passes"
