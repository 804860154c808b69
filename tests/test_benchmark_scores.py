"""The table of scores, on invented rows."""

from __future__ import annotations

from typing import Any

from benchmarks import tables
from benchmarks.score_table import paired, score_table


def row(data: str, seed: int, engine: str, score: float, metric: str = "accuracy") -> dict[str, Any]:
    name = f"scores[{data}-{seed}-{engine}]"
    made = {"name": name, "data": data, "seed": seed, "engine": engine, "score": score, "metric": metric}
    return made | {"train_examples": 6920, "scored_examples": 872, "epochs": 2}


def by_name(*rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


def test_mean_and_deviation_over_the_seeds_of_both_engines() -> None:
    rows = by_name(
        row("sst2", 1, "fastbert", 0.90),
        row("sst2", 2, "fastbert", 0.92),
        row("sst2", 3, "fastbert", 0.10),  # the other engine has no such seed yet
        row("sst2", 2, "transformers", 0.91),
        row("sst2", 1, "transformers", 0.88),
        row("squad", 4, "fastbert", 51.26, "test_f1"),
        row("squad", 4, "transformers", 51.04, "test_f1"),
        row("rte", 1, "fastbert", 0.6),
        {"name": "test_step", "median_s": 1.0},
    )
    assert [[side["seed"] for side in pair] for pair in paired(rows, "sst2")] == [[1, 1], [2, 2]]
    english = score_table(rows, 0).splitlines()
    assert english[2:] == [
        "| SST-2 | 6,920 × 2, 872 | accuracy | 91.0 ± 1.4 | 89.5 ± 2.1 | 2 |",
        "| SQuAD 2.0, articles it has not seen | 6,920 × 2, 872 | F1 | 51.3 | 51.0 | 1 |",
    ]
    korean = score_table(rows, 1).splitlines()
    assert korean[0].startswith("| 데이터 |") and korean[2].startswith("| SST-2 | 6,920 × 2, 872 | 정확도 |")


def test_the_table_stands_on_a_page() -> None:
    page = "a\n<!-- rows scores -->\nold\n<!-- end of rows -->\nb\n"
    rows = by_name(
        row("cola", 1, "fastbert", 0.4, "matthews"), row("cola", 1, "transformers", 0.41, "matthews")
    )
    made = tables.with_tables(page, rows, 0)
    assert "| CoLA | 6,920 × 2, 872 | Matthews | 40.0 | 41.0 | 1 |" in made and "old" not in made
