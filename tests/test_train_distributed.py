"""Several ranks give the numbers of one: losses, gradients, weights, skipped steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastbert.optim import AdamW
from fastbert.train import distributed
from fastbert.train.distributed import Ranks
from tests.training_ranks import STEPS, run_rank, trained, trainer, with_a_bad_gradient


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What ranks found, of 4 and of 2; one group of processes of each number."""
    folder = tmp_path_factory.mktemp("ranks")
    for world_size in (2, 4):
        mp.spawn(run_rank, args=(world_size, str(folder)), nprocs=world_size)
    return {
        world_size: [torch.load(folder / f"rank{rank}of{world_size}.pt") for rank in range(world_size)]
        for world_size in (2, 4)
    }


def assert_equal_runs(got: dict[str, Any], expected: dict[str, Any], relative: float) -> None:
    for step, (row, wanted) in enumerate(zip(got["rows"], expected["rows"], strict=True)):
        assert row == pytest.approx(wanted, rel=relative), step
    assert got["evaluation"] == pytest.approx(expected["evaluation"], rel=relative)
    for name, weight in expected["weights"].items():
        # no loss depends on a bias of all keys: its gradient is what rounding leaves, and a step its sign
        scale = 1.0 if name.endswith("key.bias") else weight.norm()
        error = (got["weights"][name] - weight).norm() / scale
        print(name, error)
        assert error <= relative, (name, error)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_give_the_numbers_of_one(found: dict[int, list[dict[str, Any]]], world_size: int) -> None:
    one = trained(Ranks())
    assert len({row["loss"] for row in one["rows"]}) == STEPS
    for rank in found[world_size]:
        assert_equal_runs(rank["fp32"], one, 1e-6)
        for name, weight in found[world_size][0]["fp32"]["weights"].items():
            assert torch.equal(weight, rank["fp32"]["weights"][name]), name


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_hold_parts_give_the_numbers_of_one(
    found: dict[int, list[dict[str, Any]]], world_size: int
) -> None:
    one = trained(Ranks())
    first, *others = (rank["sharded fp32"] for rank in found[world_size])
    assert_equal_runs(first, one, 1e-6)
    for other in others:
        assert other["rows"] == first["rows"] and other["evaluation"] == first["evaluation"]
        assert other["weights"] == {}  # put together on rank 0 only


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("name", "options"), [("sharded fp64", {"checkpointing": True}), ("sharded adamw", {"kind": AdamW})]
)
def test_parts_in_fp64_are_equal_to_the_last_digits(
    found: dict[int, list[dict[str, Any]]], world_size: int, name: str, options: dict[str, Any]
) -> None:
    one = trained(Ranks(), steps=6, dtype=torch.float64, **options)
    assert_equal_runs(found[world_size][0][name], one, 1e-12)


@pytest.mark.parametrize("world_size", [2, 4])
def test_parts_in_bf16_are_as_near_to_fp32_as_one_rank_is(
    found: dict[int, list[dict[str, Any]]], world_size: int
) -> None:
    """bf16 products of fp32 parts: what is saved is fp32, and has what bf16 would lose."""
    exact, one = trained(Ranks(), steps=6), trained(Ranks(), steps=6, precision="bf16")
    ours = found[world_size][0]["sharded bf16"]

    def error(run: dict[str, Any]) -> float:
        flat = [torch.cat([w.flatten() for w in r["weights"].values()]) for r in (run, exact)]
        return float((flat[0] - flat[1]).norm())

    assert 0 < error(ours) <= 2 * error(one)
    for row, wanted in zip(ours["rows"], exact["rows"], strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=2e-3)
    weight = ours["weights"]["bert.pooler.dense.weight"]
    assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["to parts", "to whole", "parts"])
def test_a_run_moves_between_whole_weights_and_parts(
    found: dict[int, list[dict[str, Any]]], world_size: int, name: str
) -> None:
    one, moved = trained(Ranks())["weights"], found[world_size][0]["moved"][name]
    for key, weight in one.items():
        scale = 1.0 if key.endswith("key.bias") else weight.norm()
        assert (moved[key] - weight).norm() / scale <= 1e-6, key
    if name == "parts":  # the same layout: the same bits
        whole = found[world_size][0]["sharded fp32"]["weights"]
        assert all(torch.equal(weight, whole[key]) for key, weight in moved.items())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_holds_its_share(found: dict[int, list[dict[str, Any]]], world_size: int) -> None:
    whole = sum(p.numel() for p in trainer(Ranks()).model.parameters())
    weights = [rank["elements"][0] for rank in found[world_size]]
    moments = [rank["elements"][1] for rank in found[world_size]]
    assert sum(weights) == whole and sum(moments) == 2 * whole
    assert max(weights) <= 1.05 * whole / world_size and max(moments) <= 2.1 * whole / world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_in_fp64_with_checkpointing_they_are_equal_to_the_last_digits(
    found: dict[int, list[dict[str, Any]]], world_size: int
) -> None:
    one = trained(Ranks(), steps=6, dtype=torch.float64, checkpointing=True)
    for rank in found[world_size]:
        assert_equal_runs(rank["fp64"], one, 1e-12)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_hear_of_a_signal_after_the_same_step(
    found: dict[int, list[dict[str, Any]]], world_size: int
) -> None:
    # one step later, or at once where the step waits for the device
    for rank in found[world_size]:
        assert rank["votes"] == [None, None, None, 15, None, None, None, 2, None]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["bad", "sharded bad", "sharded bad fp16"])
def test_a_bad_gradient_of_one_rank_is_skipped_by_all(
    found: dict[int, list[dict[str, Any]]], world_size: int, name: str
) -> None:
    for rank in found[world_size]:
        updates = [updates for updates, _ in rank[name]["seen"]]
        assert updates == [1, 1, 2]
        first, second, third = (weight for _, weight in rank[name]["seen"])
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert torch.equal(third, found[world_size][0][name]["seen"][-1][1])
        assert rank[name]["scale"] == (2.0**15 if "fp16" in name else None)  # halved once, by all
    assert [updates for updates, _ in with_a_bad_gradient(Ranks(), 0)["seen"]] == [1, 1, 2]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_starts_that_follow_each_other_meet_in_the_same_one(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """A rank that is at the next start while rank 0 still looks for answers does not enter the old one."""
    monkeypatch.setattr(distributed, "MEETING_S", 5.0)
    store, starts = dist.HashStore(), 8

    def attempts(rank: int) -> list[str]:
        found = [distributed._of_this_attempt(store, rank, world_size) for _ in range(starts)]
        for number, part in enumerate(found):
            part.set(f"{number}/{rank}", "")
        return found

    with ThreadPoolExecutor(world_size) as pool:
        parts = list(pool.map(attempts, range(world_size)))
    for number, part in enumerate(parts[0]):
        assert part.check([f"{number}/{rank}" for rank in range(world_size)])
