"""What counts as a sudden rise of the loss, and what a run says and records of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fastbert.train.report import RunReport
from fastbert.train.spikes import FEWEST, WINDOW, SpikeWatch


def told(losses: list[float | None]) -> list[int]:
    """Where a spike begins."""
    watch = SpikeWatch()
    return [at for at, loss in enumerate(losses) if watch.add(loss) is not None]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_spike(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0.0, 0.1, 1000)
    assert told((5.0 + noise).tolist()) == []
    falling = 4.0 + 6.0 * np.exp(-np.arange(1000) / 100)
    assert told((falling + noise).tolist()) == []


def test_a_falling_or_constant_loss_is_no_spike() -> None:
    assert told(np.linspace(10.0, 1.0, 300).tolist()) == []
    assert told([3.0] * 100 + [3.05] * 100) == []  # by less than two hundredths


def test_a_rise_is_told_once_and_again_after_it_came_back() -> None:
    noise = np.random.default_rng(1).normal(0.0, 0.02, 200).tolist()
    losses = [3.0 + value for value in noise]
    losses[60:64] = [4.0, 4.2, 3.9, 3.8]
    losses[150] = 5.0
    assert told(losses) == [60, 150]


def test_a_loss_that_stays_high_is_the_usual_one_then() -> None:
    losses = [3.0] * 100 + [5.0] * 100 + [7.0]
    assert told(losses) == [100, 200]


def test_the_first_reports_and_those_without_a_loss_say_nothing() -> None:
    assert told([3.0] * (FEWEST - 1) + [9.0]) == []
    assert told([3.0] * FEWEST + [9.0]) == [FEWEST]
    assert told([3.0] * 40 + [float("nan"), None, float("inf")] + [9.0]) == [43]


def test_usual_is_the_median_of_the_window() -> None:
    watch = SpikeWatch()
    for loss in [100.0] * 50 + [3.0] * (WINDOW // 2 - 1) + [2.0] * (WINDOW // 2 + 1):
        watch.add(loss)
    assert watch.add(50.0) == 2.0


def row(step: int, loss: float) -> dict[str, float]:
    figures = {"loss": loss, "mlm_loss": loss, "mlm_accuracy": 0.1, "nsp_loss": 0.0, "lr": 1e-3}
    return {"step": step, **figures, "tokens_per_s": 1.0, "padding_avoided": 0.5}


def test_a_run_says_it_records_it_and_remembers_what_was_usual_before_it_was_resumed(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as file:
        console = Console(file=file, width=300)
        report = RunReport(tmp_path, console, 100, 0, {})
        for step in range(1, 31):
            report.log(row(step, 3.0))
        report.close()
        report = RunReport(tmp_path, console, 100, 20, {})  # rows after step 20 are made again
        report.log(row(21, 4.5))
        report.log(row(22, 4.5))
        report.close()
    warnings = [line for line in (tmp_path / "said").read_text().splitlines() if "warning" in line]
    assert warnings == [
        "warning: at step 21 the loss rose to 4.500 from about 3.000, at a learning rate of 0.001: if it "
        "does not come back, continue from an earlier checkpoint (--resume) with a lower --lr"
    ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, 23))
    assert [r["usual_loss"] for r in rows if "usual_loss" in r] == [3.0]
