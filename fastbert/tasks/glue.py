"""Published data sets by name: where their files keep texts and labels, and how they are scored.

GLUE (Wang et al., arXiv 1804.07461) in its own TSV files, NSMC, and KorNLI / KorSTS (Ham et al., arXiv
2004.03289). Their files are tab-separated without quoting; some have a header, some do not, and some lost it
when they were split, so each layout knows the columns by name and by place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GlueName = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
LayoutName = Literal["nsmc", "kornli", "korsts"]


@dataclass(frozen=True)
class Layout:
    text: tuple[str, int]  # name, and place in a file without a header
    pair: tuple[str, int] | None
    label: tuple[str, int]
    metrics: tuple[str, ...]  # the first one chooses the best model
    labels: dict[str, str] = field(default_factory=dict)  # as in the file -> name; empty = a number
    width: int = 0  # columns of a file without a header

    @property
    def is_regression(self) -> bool:
        return not self.labels


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_TWO = _same("entailment", "not_entailment")

LAYOUTS: dict[str, Layout] = {
    "cola": Layout(
        ("sentence", 3), None, ("label", 1), ("matthews",), {"0": "unacceptable", "1": "acceptable"}, 4
    ),
    "sst2": Layout(("sentence", 0), None, ("label", 1), ("accuracy",), {"0": "negative", "1": "positive"}, 2),
    "mrpc": Layout(
        ("#1 String", 3),
        ("#2 String", 4),
        ("Quality", 0),
        ("f1", "accuracy"),
        {"0": "not_equivalent", "1": "equivalent"},
        5,
    ),
    "stsb": Layout(("sentence1", 7), ("sentence2", 8), ("score", 9), ("pearson", "spearman"), width=10),
    "qqp": Layout(
        ("question1", 3),
        ("question2", 4),
        ("is_duplicate", 5),
        ("f1", "accuracy"),
        {"0": "not_duplicate", "1": "duplicate"},
        6,
    ),
    "mnli": Layout(
        ("sentence1", 8),
        ("sentence2", 9),
        ("gold_label", -1),  # the files of train, matched and mismatched have 12 and 16 columns
        ("accuracy",),
        _same("entailment", "neutral", "contradiction"),
    ),
    "qnli": Layout(("question", 1), ("sentence", 2), ("label", 3), ("accuracy",), _TWO, 4),
    "rte": Layout(("sentence1", 1), ("sentence2", 2), ("label", 3), ("accuracy",), _TWO, 4),
    "wnli": Layout(
        ("sentence1", 1),
        ("sentence2", 2),
        ("label", 3),
        ("accuracy",),
        {"0": "not_entailment", "1": "entailment"},
        4,
    ),
    "nsmc": Layout(("document", 1), None, ("label", 2), ("accuracy",), {"0": "negative", "1": "positive"}, 3),
    "kornli": Layout(
        ("sentence1", 0),
        ("sentence2", 1),
        ("gold_label", 2),
        ("accuracy",),
        _same("entailment", "neutral", "contradiction"),
        3,
    ),
    "korsts": Layout(("sentence1", 5), ("sentence2", 6), ("score", 4), ("pearson", "spearman"), width=7),
}
