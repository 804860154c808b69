"""`--sweep`: every combination of learning rate, batch size, epochs and seed; the best is kept."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from fastbert.errors import UserError
from fastbert.tasks.run import Result, run_finetune
from fastbert.tasks.settings import Files, Training, shown
from fastbert.tasks.training import write_json

# the paper's grid (arXiv 1810.04805, appendix A.3)
_LEARNING_RATES, _BATCH_SIZES, _EPOCHS = (5e-5, 3e-5, 2e-5), (16, 32), (2, 3, 4)


def _values(default: str, kind: str) -> Any:
    return shown(default, f"{kind} [{kind} ...]")


@dataclass
class Sweep:
    sweep: bool = False
    """Try all combinations of the options below, and keep the best model."""
    sweep_lr: Annotated[tuple[float, ...], _values("5e-5 3e-5 2e-5", "FLOAT")] = ()
    """Peak learning rates to try."""
    sweep_batch_size: Annotated[tuple[int, ...], _values("16 32", "INT")] = ()
    """Examples a step to try."""
    sweep_epochs: Annotated[tuple[int, ...], _values("2 3 4", "INT")] = ()
    """Numbers of epochs to try."""
    seeds: Annotated[tuple[int, ...], _values("that of --seed", "INT")] = ()
    """Seeds to try each combination with."""


@dataclass
class _Run:
    lr: float
    batch_size: int
    epochs: int
    seed: int
    score: float = 0.0

    @property
    def name(self) -> str:
        return f"lr{self.lr:g}-batch{self.batch_size}-epochs{self.epochs}-seed{self.seed}"

    @property
    def setting(self) -> tuple[float, int, int]:
        return self.lr, self.batch_size, self.epochs


def run_sweep(
    name: str,
    options: Any,
    files: Files,
    training: Training,
    sweep: Sweep,
    console: Console,
    command: str,
) -> Result:
    """Fine-tune once, or with `sweep.sweep` once for each combination, each in `runs/` of the output folder.

    The output folder gets the run with the best main metric on the evaluation file (the first of equals), and
    sweep.json all of them; of the others only the weights are deleted. Finished runs are not run again.
    """
    given = (sweep.sweep_lr, sweep.sweep_batch_size, sweep.sweep_epochs, sweep.seeds)
    if not sweep.sweep:
        if any(given):
            raise UserError("--sweep-lr, --sweep-batch-size, --sweep-epochs and --seeds need --sweep")
        return run_finetune(name, options, files, training, console, command)
    runs = [
        _Run(*values)
        for values in itertools.product(
            sweep.sweep_lr or _LEARNING_RATES,
            sweep.sweep_batch_size or _BATCH_SIZES,
            sweep.sweep_epochs or _EPOCHS,
            sweep.seeds or (training.seed,),
        )
    ]
    if len({run.name for run in runs}) < len(runs):
        raise UserError("--sweep: a value is given twice; give each once")
    best: tuple[_Run, Result] | None = None
    for number, run in enumerate(runs, start=1):
        console.print(f"run {number} of {len(runs)}: {run.name}", highlight=False, soft_wrap=True)
        folder = files.output / "runs" / run.name
        settings = dataclasses.replace(
            training, lr=run.lr, batch_size=run.batch_size, epochs=run.epochs, seed=run.seed
        )
        here = dataclasses.replace(files, output=folder)
        result = run_finetune(name, dataclasses.replace(options), here, settings, console, command)
        if result.status:
            return result
        run.score = result.scores[result.main_metric]
        if best is None or run.score > best[0].score:
            loser = best[1].folder if best else None
            best = (run, result)
        else:
            loser = folder
        if loser is not None:
            (loser / "model.safetensors").unlink(missing_ok=True)
    assert best is not None
    chosen, result = best
    _publish(result.folder, files.output, chosen, runs, result.main_metric)
    _print_table(console, runs, chosen, result.main_metric)
    return dataclasses.replace(result, folder=files.output)


def _publish(source: Path, output: Path, chosen: _Run, runs: list[_Run], metric: str) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith((".", "events.")):
            shutil.copy2(path, output / path.name)
    with (output / "README.md").open("a", encoding="utf-8") as card:
        card.write(f"\nThe best by {metric} of {len(runs)} runs: {chosen.name}. See sweep.json.\n")
    write_json(
        output / "sweep.json", {"metric": metric, "best": chosen.name, "runs": [vars(r) for r in runs]}
    )


def _print_table(console: Console, runs: list[_Run], chosen: _Run, metric: str) -> None:
    """A row for each combination, best mean first."""
    table = Table("lr", "batch", "epochs", f"{metric}, mean", "deviation", "best", "seeds")
    settings: dict[tuple[float, int, int], list[float]] = {}
    for run in runs:
        settings.setdefault(run.setting, []).append(run.score)
    for setting, scores in sorted(settings.items(), key=lambda item: -statistics.mean(item[1])):
        lr, batch_size, epochs = setting
        deviation = f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
        table.add_row(
            f"{lr:g}",
            str(batch_size),
            str(epochs),
            f"{statistics.mean(scores):.4f}",
            deviation,
            f"{max(scores):.4f}" + (" *" if setting == chosen.setting else ""),
            str(len(scores)),
        )
    console.print(table)
