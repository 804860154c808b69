"""Pictures of a fine-tuning run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_LABELS = 40  # of a confusion matrix with its numbers written in


def _figure(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> Path:
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, dpi=110, format="png")
    os.replace(partial, path)
    return path


def learning_curve(path: Path, rows: Sequence[dict[str, Any]], metric: str) -> Path | None:
    """Loss of training and evaluation by step, and the evaluation's score where there were evaluations."""
    train = [row for row in rows if "loss" in row]
    held_out = [row for row in rows if "eval_loss" in row]
    scored = [row for row in rows if f"eval_{metric}" in row]
    if not train:
        return None
    figure = _figure(9, 4)
    losses, scores = figure.subplots(1, 2)
    losses.plot([row["step"] for row in train], [row["loss"] for row in train], label="training")
    if held_out:
        steps = [row["step"] for row in held_out]
        losses.plot(steps, [row["eval_loss"] for row in held_out], "o-", label="evaluation")
    losses.legend()
    losses.set(xlabel="step", ylabel="loss", title="loss")
    scores.plot([row["step"] for row in scored], [row[f"eval_{metric}"] for row in scored], "o-")
    scores.set(xlabel="step", title=f"{metric} on the evaluation file")
    for axes in (losses, scores):
        axes.grid(alpha=0.3)
    return _save(figure, path)


def confusion_matrix(path: Path, truth: np.ndarray, guess: np.ndarray, labels: Sequence[str]) -> Path:
    """Rows are the expected labels, columns the predicted ones, each row as shares."""
    count = len(labels)
    matrix = np.zeros((count, count), dtype=np.int64)
    np.add.at(matrix, (truth, guess), 1)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    size = min(3.5 + 0.45 * count, 16)
    figure = _figure(size + 1, size)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, shrink=0.8)
    axes.set(xlabel="predicted", ylabel="expected", xticks=range(count), yticks=range(count))
    shown = [label if len(label) <= 18 else label[:17] + "…" for label in labels]
    axes.set_xticklabels(shown, rotation=45, ha="right")
    axes.set_yticklabels(shown)
    if count <= MAX_LABELS:
        for row, column in np.ndindex(count, count):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=color)
    return _save(figure, path)


def pr_curve(path: Path, truth: np.ndarray, scores: np.ndarray, label: str) -> Path:
    """Precision against recall of one label at every threshold."""
    order = np.argsort(-scores, kind="stable")
    hits, sorted_scores = np.cumsum(truth[order]), scores[order]
    last = np.r_[np.flatnonzero(np.diff(sorted_scores)), len(scores) - 1]  # ties share a threshold
    recall, precision = hits[last] / truth.sum(), hits[last] / (last + 1)
    figure = _figure(5, 4)
    axes = figure.subplots()
    axes.step(np.r_[0, recall], np.r_[precision[0], precision], where="pre")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02), title=f"label {label}")
    axes.grid(alpha=0.3)
    return _save(figure, path)
