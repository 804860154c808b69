"""Fine-tuning: the paper's tasks on any BERT, one small head each.

from fastbert.tasks import finetune, predict

result = finetune("classify", model="bert-base-uncased", train="reviews.csv", output="out", epochs=2)
for row in predict("out", "more.csv"):
    ...
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastbert.tasks.run import Result

__all__ = ["finetune", "predict"]


def finetune(
    task: str, *, model: str | Path, train: str | Path, output: str | Path, quiet: bool = True, **options: Any
) -> Result:
    """Fine-tune and score a model: `python -m fastbert.finetune` as a function.

    Keyword arguments are the command's options with underscores, those of the task included; `eval`, and
    each of `test`, are paths. Returns the output folder and its scores. With `quiet=False` it talks like the
    command. Raises UserError for bad input before anything is trained, TypeError for an unknown option.
    Deterministic on a CPU.
    """
    from dataclasses import replace

    from rich.console import Console

    from fastbert.tasks.registry import task_class
    from fastbert.tasks.run import collect_arguments
    from fastbert.tasks.settings import Files, Training, training_defaults
    from fastbert.tasks.sweep import Sweep, run_sweep

    call = ", ".join(f"{key}={value!r}" for key, value in options.items())
    call = f"finetune({task!r}, model={str(model)!r}, train={str(train)!r}, output={str(output)!r}, {call})"
    named = {"eval": Path(options.pop("eval"))} if options.get("eval") is not None else {}
    tests = tuple(Path(path) for path in options.pop("test", ()))
    overwrite = bool(options.pop("overwrite", False))
    files = Files(str(model), Path(train), Path(output), test=tests, overwrite=overwrite, **named)
    training = replace(training_defaults(task_class(task)), **collect_arguments(Training, options))
    sweep = Sweep(**collect_arguments(Sweep, options))
    options_class = task_class(task).options_class
    task_options = options_class(**collect_arguments(options_class, options))
    options.pop("eval", None)
    if options:
        raise TypeError(f"the task {task} has no option {', '.join(map(repr, options))}")
    return run_sweep(task, task_options, files, training, sweep, Console(quiet=quiet), call)


def predict(model: str | Path, file: str | Path, **options: Any) -> Iterator[dict[str, Any]]:
    """A row for each example of a file of any size, streamed: `python -m fastbert.predict` as a function.

    Keyword arguments are the command's options with underscores. Raises UserError for bad input, TypeError
    for an unknown option, both at once and not at the first row; a bad row is met when its turn comes.
    """
    import dataclasses

    from fastbert.tasks.prediction import Computing, Predictor, read_record
    from fastbert.tasks.run import collect_arguments

    def silent(message: str) -> None:
        pass

    record = read_record(model, silent)
    computing = Computing(**collect_arguments(Computing, options))
    changed = collect_arguments(type(record.options), options)
    if options:
        raise TypeError(f"the task {record.task} has no option {', '.join(map(repr, options))}")
    record.options = dataclasses.replace(record.options, **changed)
    return Predictor.load(record, computing, silent).rows(Path(file))
