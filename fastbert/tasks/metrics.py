"""Scores of classification and regression, computed by scikit-learn and scipy (the extra `tasks`)."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastbert.errors import UserError

CLASSIFICATION = ("accuracy", "f1", "f1_macro", "matthews")
MULTI_LABEL = ("f1_micro", "f1_macro", "accuracy")
REGRESSION = ("pearson", "spearman", "mse")


def require(*modules: str) -> None:
    """UserError with the pip command, unless these modules can be imported; imports nothing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"this task's scores need {', '.join(missing)}, which is not installed: "
            'pip install "fastbert-triton[tasks]", or in a clone pip install -e ".[tasks]"'
        )


def classification_scores(
    labels: Sequence[int], predicted: Sequence[int], num_labels: int
) -> dict[str, float]:
    """accuracy, f1_macro and Matthews correlation; of two labels also f1, that of the second one."""
    metrics: Any = importlib.import_module("sklearn.metrics")
    truth, guess = np.asarray(labels), np.asarray(predicted)
    scores = {"accuracy": float((truth == guess).mean())}
    if num_labels == 2:
        scores["f1"] = float(metrics.f1_score(truth, guess, zero_division=0))
    scores["f1_macro"] = float(
        metrics.f1_score(truth, guess, labels=range(num_labels), average="macro", zero_division=0)
    )
    scores["matthews"] = float(metrics.matthews_corrcoef(truth, guess))
    return scores


def multi_label_scores(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """[N, C] of 0 and 1: f1_micro, f1_macro, and accuracy, the share of rows right in every label."""
    metrics: Any = importlib.import_module("sklearn.metrics")
    return {
        "f1_micro": float(metrics.f1_score(labels, predicted, average="micro", zero_division=0)),
        "f1_macro": float(metrics.f1_score(labels, predicted, average="macro", zero_division=0)),
        "accuracy": float((labels == predicted).all(axis=1).mean()),
    }


def regression_scores(targets: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """Pearson and Spearman correlation (0 where either side is constant) and mean squared error."""
    stats: Any = importlib.import_module("scipy.stats")
    truth, guess = np.asarray(targets, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    scores = {"pearson": 0.0, "spearman": 0.0, "mse": float(((truth - guess) ** 2).mean())}
    if len(truth) > 1 and np.ptp(truth) > 0 and np.ptp(guess) > 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nearly constant input
            scores["pearson"] = float(stats.pearsonr(truth, guess).statistic)
            scores["spearman"] = float(stats.spearmanr(truth, guess).statistic)
    return scores
