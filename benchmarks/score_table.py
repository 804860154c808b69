"""The table of scores in the READMEs, from the rows of `python -m benchmarks.scores`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.rows import Row

# data set -> its name, in English and Korean
NAMES = {
    "sst2": ("SST-2", "SST-2"),
    "sst2-whole": ("SST-2, the whole training file", "SST-2, 학습 파일 전체"),
    "cola": ("CoLA", "CoLA"),
    "rte": ("RTE", "RTE"),
    "stsb": ("STS-B", "STS-B"),
    "wnut17": ("WNUT-17", "WNUT-17"),
    "squad": ("SQuAD 2.0, articles it has not seen", "SQuAD 2.0, 본 적 없는 문서"),
    "figqa": ("Fig-QA", "Fig-QA"),
    "nsmc": ("NSMC, Korean model pre-trained here", "NSMC, 여기서 사전 학습한 한국어 모델"),
    "nsmc-random": ("NSMC, the same size from random weights", "NSMC, 같은 크기의 무작위 가중치"),
}
METRICS = {
    "accuracy": ("accuracy", "정확도"),
    "matthews": ("Matthews", "Matthews"),
    "pearson": ("Pearson", "Pearson"),
    "f1": ("entity F1", "개체 F1"),
    "test_f1": ("F1", "F1"),
}
ENGINES = ("fastbert", "transformers")


def score_table(rows: dict[str, Row], language: int) -> str:
    """Mean and deviation over the seeds that both engines have; what no seed of both has is left out."""
    head = (
        ("data", "training examples × epochs, scored", "metric", *ENGINES, "seeds"),
        ("데이터", "학습 예제 × 에폭, 채점", "지표", *ENGINES, "시드 수"),
    )[language]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|---|"]
    for data, names in NAMES.items():
        pairs = paired(rows, data)
        if not pairs:
            continue
        row = pairs[0][0]
        amounts = f"{row['train_examples']:,} × {row['epochs']}, {row['scored_examples']:,}"
        scores = [in_percent([pair[side] for pair in pairs]) for side in range(2)]
        cells = (names[language], amounts, METRICS[row["metric"]][language], *map(spread, scores))
        lines.append(f"| {' | '.join(cells)} | {len(pairs)} |")
    return "\n".join(lines) + "\n"


def paired(rows: dict[str, Row], data: str) -> list[tuple[Row, Row]]:
    """(fastbert's row, transformers' row) of each seed that has both, by seed."""
    found = [row for row in rows.values() if row.get("engine") in ENGINES and row["data"] == data]
    by_run = {(row["seed"], row["engine"]): row for row in found}
    seeds = sorted({seed for seed, _ in by_run})
    pairs = [tuple(by_run.get((seed, engine)) for engine in ENGINES) for seed in seeds]
    return [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]


def in_percent(rows: Sequence[Row]) -> list[float]:
    """The scores times 100; SQuAD's are in percent as they come."""
    return [row["score"] * (1 if row["metric"] == "test_f1" else 100) for row in rows]


def spread(scores: Sequence[float]) -> str:
    """Mean ± standard deviation (of a sample), or the one score."""
    if len(scores) == 1:
        return f"{scores[0]:.1f}"
    return f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"
