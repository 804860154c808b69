"""learning_rate: the published numbers of each schedule, the two phases of BERT-large, and bad values."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from fastbert.errors import UserError
from fastbert.optim import SCHEDULES, learning_rate

VECTORS = json.loads((Path(__file__).parent / "vectors" / "pretraining_vectors.json").read_text())["lr"]
PUBLISHED = {
    "google_T100_W10_base1": ("google", 1.0, 100, 0.1),
    "hf_linear_T100_W10_base1": ("linear", 1.0, 100, 0.1),
    "nvidia_poly_T100_wp0.1_base1": ("nvidia", 1.0, 100, 0.1),
    "nvidia_phase1_T7038_wp0.2843_base6e-3": ("nvidia", 6e-3, 7038, 0.2843),
    "nvidia_phase2_T1563_wp0.128_base4e-3": ("nvidia", 4e-3, 1563, 0.128),
}


def test_every_published_schedule_is_tested() -> None:
    assert set(PUBLISHED) == set(VECTORS)


@pytest.mark.parametrize(
    ("name", "k"), [(name, int(k)) for name, values in VECTORS.items() for k in values if k.isdigit()]
)
def test_schedule_matches_the_published_vectors(name: str, k: int) -> None:
    schedule, peak, total, warmup = PUBLISHED[name]
    ours = learning_rate(schedule, k, peak=peak, total=total, warmup=warmup)
    assert ours == pytest.approx(VECTORS[name][str(k)], rel=1e-12, abs=1e-16)


def phase(number: int, step: int) -> float:
    """The rate of update number `step` (from 1) in BERT-large's two phases; case F-05."""
    options = {1: (6e-3, 7038, 0.2843), 2: (4e-3, 1563, 0.128)}[number]
    return learning_rate("poly", step - 1, peak=options[0], total=options[1], warmup=options[2])


def test_poly_in_the_two_phases_of_bert_large() -> None:
    assert phase(1, 1) == pytest.approx(6e-3 / 2001)
    assert phase(1, 1000) == pytest.approx(6e-3 * 1000 / 2001)
    assert phase(1, 1000) == pytest.approx(3.0e-3, rel=1e-3)
    assert phase(1, 2001) == 6e-3
    assert phase(1, 7038) == 0.0
    assert phase(2, 1) == pytest.approx(2e-5)
    assert phase(2, 200) == 4e-3
    assert phase(2, 1563) == 0.0
    assert all(phase(2, step) > 0 for step in range(1, 1563))


# warm-up of a tenth, none, all
@pytest.mark.parametrize("warmup", [0.1, 0.0, 1.0])
@pytest.mark.parametrize("schedule", ["linear", "poly", "constant"])
def test_continuous_schedules_rise_to_the_peak_and_never_jump(schedule: str, warmup: float) -> None:
    total = 1000
    rates = [learning_rate(schedule, k, peak=1.0, total=total, warmup=warmup) for k in range(total)]
    turn = rates.index(max(rates))
    assert rates[: turn + 1] == sorted(rates[: turn + 1])
    assert rates[turn:] == sorted(rates[turn:], reverse=True)
    assert max(rates) == pytest.approx(1.0, abs=2e-3)
    assert min(rates) >= 0
    # a square root falls by 1/sqrt(n) at its very end
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) <= (0.05 if schedule == "poly" else 0.011)


def test_after_the_last_step_the_rate_stays() -> None:
    for schedule in SCHEDULES:
        end = 1.0 if schedule == "constant" else 0.0
        for k in (10, 11, 1000):
            assert learning_rate(schedule, k, peak=1.0, total=10, warmup=0.2) == end


def test_one_step_in_all() -> None:
    for schedule in SCHEDULES:
        for warmup in (0.0, 0.3, 1.0):
            assert 0 <= learning_rate(schedule, 0, peak=1.0, total=1, warmup=warmup) <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "cosine"}, "'cosine' is not one of linear, poly, google, nvidia, constant"),
        ({"total": 0}, "over 0 steps"),
        ({"k": -1}, "-1 must be 0 or more"),
        ({"peak": -1.0}, "-1.0 must be 0 or more"),
        ({"peak": float("nan")}, "nan must be 0 or more"),
        ({"warmup": 1.5}, "warmup 1.5 must be a proportion"),
        ({"warmup": -0.1}, "warmup -0.1 must be a proportion"),
    ],
)
def test_bad_values_are_refused(change: dict, message: str) -> None:
    values = {"schedule": "linear", "k": 0, "peak": 1.0, "total": 10, "warmup": 0.1, **change}
    with pytest.raises(UserError, match=message):
        learning_rate(values.pop("schedule"), values.pop("k"), **values)
