"""What a person sees of a run: progress, metrics.jsonl, TensorBoard events, loss curve, final table."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fastbert.train.spikes import SpikeWatch
from fastbert.train.step import PRECISIONS

# Dense bf16 tensor-core peaks, TFLOP/s, from the vendors' data sheets.
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A10G": 70.0,
    "MI300X": 1307.0,
}


def peak_flops(device: torch.device, precision: str) -> float:
    """FLOP/s that `mfu` is a share of.

    A data-sheet figure for known GPUs in half precision, else this machine's own rate of a large matrix
    product, measured here in a fraction of a second.
    """
    if device.type == "cuda" and precision != "fp32":
        name = torch.cuda.get_device_name(device)
        for key, tflops in PEAK_TFLOPS.items():
            if key in name:
                return tflops * 1e12
    dtype = PRECISIONS[precision]
    size = 1024 if device.type == "cpu" else 8192
    x = torch.ones(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(4):
        started = time.perf_counter()
        x @ x
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


class _BarAndLine(Progress):
    """The bar on one line of the terminal, the numbers on the next."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.line)


class RunReport:
    """Writes a run's records and talks to its user.

    Args:
        run_dir: where metrics.jsonl, events and loss_curve.png go.
        total_steps: for the progress bar.
        resumed_step: rows of later steps in an earlier metrics.jsonl are dropped: they are made again.
        references: name -> loss drawn as a horizontal line ("ln V", "unigram entropy").
    """

    def __init__(
        self,
        run_dir: Path,
        console: Console,
        total_steps: int,
        resumed_step: int,
        references: dict[str, float],
    ) -> None:
        from tensorboardX import SummaryWriter

        self.run_dir, self.console, self.references = run_dir, console, references
        self.rows = self._keep_rows(resumed_step)
        self._spikes = SpikeWatch()
        for row in self.rows:
            if "loss" in row:
                self._spikes.add(row["loss"])
        self._metrics = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = SummaryWriter(
            logdir=str(run_dir), purge_step=resumed_step + 1 if resumed_step else None
        )
        self._started, self._first_step, self._total = time.perf_counter(), resumed_step, total_steps
        self._progress: _BarAndLine | None = None
        if console.is_terminal:
            self._progress = _BarAndLine(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("eta"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=resumed_step)
            self._progress.start()

    def _keep_rows(self, last_step: int) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # the line a kill cut short
                continue
            if row["step"] <= last_step:
                rows.append(row)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(partial, path)
        return rows

    def say(self, text: str) -> None:
        """One line, above the progress bar where there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def log(self, row: dict[str, Any]) -> None:
        """A training row or, with `eval_` keys, an evaluation row.

        A training row in which the loss rises suddenly gets `usual_loss`, what it was before, and is told.
        """
        usual = self._spikes.add(row["loss"]) if "loss" in row else None
        if usual is not None:
            row = row | {"usual_loss": usual}
            self.say(
                f"warning: at step {row['step']} the loss rose to {row['loss']:.3f} from about {usual:.3f}, "
                f"at a learning rate of {row['lr']:.3g}: if it does not come back, continue from an earlier "
                "checkpoint (--resume) with a lower --lr"
            )
        self.rows.append(row)
        # null, since NaN and Infinity are no JSON
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
        self._metrics.write(json.dumps(finite) + "\n")
        self._metrics.flush()
        for key, value in row.items():
            if key != "step":
                name = key.replace("eval_", "eval/", 1) if key.startswith("eval_") else f"train/{key}"
                self._events.add_scalar(name, value, row["step"])
        self._events.flush()
        if any(key.startswith("eval_") for key in row):
            self.say(f"step {row['step']}: held-out {self.summary(row, 'eval_')}")
        elif self._progress is not None:
            self._progress.line = self.summary(row)
            self._progress.update(self._task, completed=row["step"])
        else:
            eta = (time.perf_counter() - self._started) / (row["step"] - self._first_step)
            left = timedelta(seconds=round(eta * (self._total - row["step"])))  # may be days
            self.say(f"step {row['step']}/{self._total}  {self.summary(row)}  eta {left}")

    def summary(self, row: dict[str, Any], prefix: str = "") -> str:
        """A row in words; the keys of an evaluation's have a prefix."""
        return _summary(row, prefix) + ("" if prefix else _pace(row))

    def draw(self) -> None:
        """loss_curve.png from all rows."""
        import matplotlib

        matplotlib.use("Agg", force=False)
        from matplotlib.figure import Figure

        train = [row for row in self.rows if "loss" in row]
        held_out = [row for row in self.rows if "eval_loss" in row]
        if not train:
            return
        figure = Figure(figsize=(9, 4), layout="constrained")
        losses, accuracies = figure.subplots(1, 2)
        for rows, prefix, name, style in (
            (train, "", "training", "-"),
            (held_out, "eval_", "held out", "o-"),
        ):
            steps = [row["step"] for row in rows]
            losses.plot(steps, [row[f"{prefix}mlm_loss"] for row in rows], style, label=f"MLM, {name}")
            accuracies.plot(
                steps, [row[f"{prefix}mlm_accuracy"] for row in rows], style, label=f"MLM, {name}"
            )
            accuracies.plot(
                steps, [row[f"{prefix}nsp_accuracy"] for row in rows], style, label=f"NSP, {name}"
            )
        for (name, value), style in zip(self.references.items(), (":", "--")):
            losses.axhline(value, color="grey", linestyle=style, label=f"{name} = {value:.2f}")
        losses.set(xlabel="step", ylabel="nats a masked token", title="masked-LM loss")
        accuracies.set(xlabel="step", ylim=(0, 1), title="accuracy")
        for axes in (losses, accuracies):
            axes.legend(fontsize=8)
            axes.grid(alpha=0.3)
        partial = self.run_dir / ".loss_curve.png"
        figure.savefig(partial, dpi=110, format="png")
        os.replace(partial, self.run_dir / "loss_curve.png")

    def final_table(self, entries: dict[str, str]) -> None:
        self.stop_progress()
        table = Table(show_header=False, title="done")
        for name, value in entries.items():
            table.add_row(name, value)
        self.console.print(table)

    def stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def close(self) -> None:
        self.stop_progress()
        self._metrics.close()
        self._events.close()


class NoReport(RunReport):
    """Of a rank that leaves records and words to rank 0."""

    def __init__(self, *_: Any) -> None: ...

    def say(self, text: str) -> None: ...

    def advance(self, step: int) -> None: ...

    def log(self, row: dict[str, Any]) -> None: ...

    def draw(self) -> None: ...

    def final_table(self, entries: dict[str, str]) -> None: ...

    def close(self) -> None: ...


def _summary(row: dict[str, Any], prefix: str = "") -> str:
    text = (
        f"loss {row[prefix + 'loss']:.3f}  mlm {row[prefix + 'mlm_loss']:.3f} "
        f"({100 * row[prefix + 'mlm_accuracy']:.1f} %)"
    )
    if row[prefix + "nsp_loss"]:
        text += f"  nsp {row[prefix + 'nsp_loss']:.3f} ({100 * row[prefix + 'nsp_accuracy']:.1f} %)"
    if prefix:
        text += f"  perplexity {row['eval_mlm_perplexity']:.1f}"
    return text


def _pace(row: dict[str, Any]) -> str:
    return f"  {row['tokens_per_s']:,.0f} tokens/s  padding avoided {100 * row['padding_avoided']:.0f} %"
