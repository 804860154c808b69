"""What a fine-tuning run leaves for people: progress, learning curve, model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from fastbert.tasks import pictures
from fastbert.train.report import RunReport

PIPELINES = {  # task -> transformers' name for it
    "classify": "text-classification",
    "regress": "text-classification",
    "squad": "question-answering",
    "tag": "token-classification",
    "choice": "multiple-choice",
}


class FinetuneReport(RunReport):
    """metrics.jsonl, TensorBoard events, a progress bar on a terminal, learning_curve.png."""

    def __init__(self, run_dir: Path, console: Console, total_steps: int, resumed: int, metric: str) -> None:
        super().__init__(run_dir, console, total_steps, resumed, {})
        self.metric = metric

    def summary(self, row: dict[str, Any], prefix: str = "") -> str:
        if prefix:
            names = [key for key in row if key.startswith(prefix)]
            return "  ".join(f"{name.removeprefix(prefix)} {row[name]:.4f}" for name in names)
        return f"loss {row['loss']:.4f}  lr {row['lr']:.2e}"

    def draw(self) -> None:
        pictures.learning_curve(self.run_dir / "learning_curve.png", self.rows, self.metric)


def write_card(
    folder: Path,
    *,
    task: str,
    source: str,
    data: dict[str, tuple[Path, int]],
    labels: list[str],
    scores: dict[str, float],
    command: str,
    notes: list[str],
) -> None:
    """README.md: what the model is, what it was trained on, its scores, and the command that made it.

    `data` is use -> (file, examples); `notes` are further lines about the training.
    """
    lines = ["---", "tags:", "- bert", f"- {task}"]
    if task in PIPELINES:
        lines += [f"pipeline_tag: {PIPELINES[task]}"]
    lines += ["---", "", f"# {folder.resolve().name}", ""]
    lines += [f"`{source}`, fine-tuned by fastbert for the task `{task}`.", ""]
    lines += ["| data | file | examples |", "|---|---|---|"]
    lines += [f"| {use} | {path.name} | {count:,} |" for use, (path, count) in data.items()]
    if labels:
        lines += ["", "Labels: " + ", ".join(f"`{label}`" for label in labels)]
    lines += ["", "| score | value |", "|---|---|"]
    lines += [f"| {name} | {value:.4f} |" for name, value in scores.items()]
    lines += ["", *notes, "", "```bash", command, "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
