"""A fine-tuning run from files to files: check everything, train, keep the best, score it, write it down."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer

from fastbert.data.tokenizer import save_tokenizer
from fastbert.errors import UserError
from fastbert.pretrained import PretrainedModel
from fastbert.tasks.models import source_folder, source_tokenizer
from fastbert.tasks.registry import task_class
from fastbert.tasks.report import FinetuneReport, write_card
from fastbert.tasks.settings import Files, Training, check
from fastbert.tasks.task import Say, Task
from fastbert.tasks.training import Loop, Progress, Stepper, units_of, write_json
from fastbert.train import checkpoint as ckpt
from fastbert.train.loop import Interruption

RECORD = "finetune.json"  # in an output folder: the run's task, options and state
FEW_STEPS = 50  # a new head has hardly moved after fewer
HELD_OUT = 10  # one of so many training examples, where no evaluation file is given
_WITHOUT_EFFECT = ("device", "log_every")  # training options that do not decide what comes out


@dataclass
class Result:
    folder: Path
    scores: dict[str, float]
    main_metric: str
    status: int = 0  # exit status: 128 + signal for an interrupted run


@dataclass
class _Data:
    train: list[Any]
    evaluation: list[Any]
    tests: dict[str, list[Any]]  # file name without suffix -> examples


def run_finetune(
    name: str, options: Any, files: Files, training: Training, console: Console, command: str
) -> Result:
    """Fine-tune as the options say. Raises UserError for bad input before anything is trained.

    Deterministic on a CPU: an interrupted run that is continued gives the bits of one that was not.
    """

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    check(training)
    device = torch_device(training.device)
    if training.precision == "fp16" and device.type == "cpu":
        raise UserError("--precision fp16 needs a GPU; use fp32 or bf16 on a CPU")
    task = task_class(name)(options, say)
    source = source_folder(files.model, say)
    tokenizer = source_tokenizer(source)
    data = _read(task, files, training, say)
    ckpt.make_run_dir(files.output)
    with ckpt.exclusive(files.output):
        record = _record(name, options, files, training)
        finished = _open_output(files, record, task.main_metric, say)
        if finished is not None:
            return finished
        return _train(task, source, tokenizer, data, files, training, device, record, console, command)


def _train(
    task: Task,
    source: Path,
    tokenizer: Tokenizer,
    data: _Data,
    files: Files,
    training: Training,
    device: torch.device,
    record: dict[str, Any],
    console: Console,
    command: str,
) -> Result:
    run_dir = files.output
    torch.manual_seed(training.seed)
    model = task.build_model(str(source)).to(device)
    max_length = _max_length(task, model, training)
    features = task.features(data.train, tokenizer, max_length)
    held_out = task.features(data.evaluation, tokenizer, max_length)
    units = len(units_of(features, task.keeps_examples_together))
    total_steps = training.epochs * -(-units // training.batch_size)
    stepper = Stepper(task, model, training, device, total_steps)
    ckpt.require_space(run_dir, 7 * 4 * model.num_parameters())  # best, checkpoint, and the one in the making
    record["max_length"] = max_length

    def save_model(folder: Path) -> None:
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, folder, model_max_length=max_length)

    def evaluate() -> dict[str, float]:
        predictions = task.predictions(data.evaluation, held_out, stepper.outputs(held_out))
        return {"loss": stepper.loss(held_out)} | task.score(data.evaluation, predictions)

    checkpoint = ckpt.newest_intact(run_dir, lambda text: console.print(text, markup=False, soft_wrap=True))
    write_json(run_dir / RECORD, record)
    loop = Loop(stepper, features, evaluate, save_model, None, run_dir)
    if checkpoint is not None:
        loop.resume(checkpoint)
    loop.report = report = FinetuneReport(run_dir, console, total_steps, stepper.step, task.main_metric)
    if checkpoint is not None:
        report.say(f"resumed from {checkpoint} at step {stepper.step}")
    report.say(_plan(task, model, data, training, stepper, features))
    if total_steps < FEW_STEPS:
        report.say(f"{total_steps} steps are few to learn from: try more --epochs or a smaller --batch-size")
    with Interruption() as interruption:
        try:
            loop.run(lambda: interruption.signal is not None)
            report.draw()
        finally:
            report.close()
    if interruption.signal is not None and stepper.step < total_steps:
        report.say(f"stopped after step {stepper.step} of {total_steps}; the same command continues")
        return Result(run_dir, {}, task.main_metric, 128 + interruption.signal)
    scores = _score_best(task, stepper, tokenizer, data, max_length, run_dir)
    _write_down(task, files, data, training, loop.progress, scores, record, command)
    return Result(run_dir, scores, task.main_metric)


def torch_device(name: str | None) -> torch.device:
    """The named device, or a GPU where there is one; UserError for one that cannot be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used here ({reason}); try cpu") from error


# ---- before


def _read(task: Task, files: Files, training: Training, say: Say) -> _Data:
    """All examples, checked; a held-out part of the training file where no evaluation file is given."""
    train = list(task.read(files.train, labels_required=True))
    rng = np.random.default_rng(training.seed)
    if files.eval is not None:
        evaluation = list(task.read(files.eval, labels_required=True))
        known = train
    else:
        known = train  # a label may be so rare that all of its rows are held out
        if len(train) < 2:
            raise UserError(f"{files.train} has {len(train)} examples; give at least 2, or an --eval file")
        chosen = set(rng.permutation(len(train))[: max(1, len(train) // HELD_OUT)].tolist())
        evaluation = [example for index, example in enumerate(train) if index in chosen]
        train = [example for index, example in enumerate(train) if index not in chosen]
        say(f"no --eval: {len(evaluation):,} of the training examples are held out to choose the best model")
    tests = {path.stem: list(task.read(path, labels_required=True)) for path in files.test}
    if len(tests) < len(files.test):
        raise UserError("two --test files have the same name; rename one, their scores are told apart by it")
    for path, examples in [(files.train, train), (files.eval, evaluation), *zip(files.test, tests.values())]:
        if not examples:
            raise UserError(f"{path} is empty; give a file with at least one example")
    task.prepare(known, evaluation + [example for examples in tests.values() for example in examples])
    limit = training.max_train_examples
    if limit is not None and limit < len(train):
        say(f"training on a random sample of {limit:,} of {len(train):,} examples")
        train = [train[index] for index in sorted(rng.permutation(len(train))[:limit].tolist())]
    return _Data(train, evaluation, tests)


def _record(name: str, options: Any, files: Files, training: Training) -> dict[str, Any]:
    """What a run folder says of its run: everything that decides what comes out."""
    given = _places({"model": files.model, "train": files.train, "eval": files.eval})
    values = {key: v for key, v in dataclasses.asdict(training).items() if key not in _WITHOUT_EFFECT}
    plain: dict[str, Any] = json.loads(
        json.dumps({"task": name, "options": dataclasses.asdict(options), "files": given, "training": values})
    )
    return plain


def _places(files: dict[str, Any]) -> dict[str, str | None]:
    """Files and folders by their absolute paths; a hub id, or nothing, as it is."""
    return {
        name: str(Path(place).resolve()) if place and Path(place).exists() else place and str(place)
        for name, place in files.items()
    }


def _open_output(files: Files, record: dict[str, Any], main_metric: str, say: Say) -> Result | None:
    """Make the folder ready: the result of a run that is finished, None for one to begin or to continue."""
    run_dir = files.output
    ckpt.remove_leftovers(run_dir)
    if files.overwrite:
        _clear(run_dir)
        return None
    try:
        old = json.loads((run_dir / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if any((run_dir / name).exists() for name in ("config.json", "model.safetensors")):
            raise UserError(
                f"{run_dir} holds a model that no fine-tuning run wrote; choose another --output"
            ) from None
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir / RECORD} cannot be read ({error}); choose another --output") from error
    if isinstance(old.get("files"), dict):
        old["files"] = _places(old["files"])  # earlier versions kept the paths that were typed
    for group in ("task", "options", "files", "training"):
        if old.get(group) != record[group]:
            raise UserError(
                f"{run_dir} holds a run with other options ({_difference(old.get(group), record[group])}); "
                "choose another --output, or start anew with --overwrite"
            )
    scores_file = run_dir / "scores.json"
    if not scores_file.is_file():
        return None
    say(f"{run_dir} holds this run, finished; --overwrite runs it again")
    return Result(run_dir, json.loads(scores_file.read_text(encoding="utf-8")), main_metric)


def _difference(old: Any, new: Any) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"{old} there, {new} asked for"
    name = next(key for key in {**old, **new} if old.get(key) != new.get(key))
    return f"{name} is {old.get(name)} there, {new.get(name)} is asked for"


def _clear(run_dir: Path) -> None:
    """Remove what a run writes, and nothing else."""
    for checkpoint in ckpt.list_checkpoints(run_dir):
        shutil.rmtree(checkpoint)
    patterns = (
        "*.json",
        "*.jsonl",
        "*.conll",
        "*.png",
        "*.safetensors",
        "vocab.txt",
        "README.md",
        "events.*",
        "last",
    )
    for pattern in patterns:
        for path in run_dir.glob(pattern):
            path.unlink()


def _max_length(task: Task, model: PretrainedModel, training: Training) -> int:
    limit = int(model.config.max_position_embeddings)
    if training.max_length is None:
        return min(task.default_max_length, limit)
    if training.max_length > limit:
        raise UserError(f"--max-length {training.max_length} is out of range; the model takes {limit} tokens")
    return training.max_length


def _plan(
    task: Task,
    model: PretrainedModel,
    data: _Data,
    training: Training,
    stepper: Stepper,
    features: Sequence[Any],
) -> str:
    tokens = sum(len(feature.input_ids) for feature in features)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return (
        f"{task.name}: {len(data.train):,} training examples ({tokens / len(features):.1f} tokens a sequence)"
        f", {len(data.evaluation):,} to evaluate; {stepper.total_steps:,} steps of {training.batch_size}, "
        f"{trained / 1e6:.1f} M parameters at {training.lr:g}, {stepper.precision} on {stepper.device}, "
        f"{'padded' if training.padded else 'packed'}"
    )


# ---- after


def _score_best(
    task: Task, stepper: Stepper, tokenizer: Tokenizer, data: _Data, max_length: int, run_dir: Path
) -> dict[str, float]:
    """The best model's scores on every file, its predictions and pictures of the evaluation file."""
    model = stepper.model
    best = type(model).from_pretrained(run_dir, dtype=torch.float32)
    model.load_state_dict(best.state_dict())

    def predict(examples: list[Any]) -> list[Any]:
        features = task.features(examples, tokenizer, max_length)
        return task.predictions(examples, features, stepper.outputs(features))

    predictions = predict(data.evaluation)
    scores = task.score(data.evaluation, predictions)
    task.write_predictions(run_dir, data.evaluation, predictions)
    task.draw(run_dir, data.evaluation, predictions)
    for name, examples in data.tests.items():
        test_scores = task.score(examples, predict(examples))
        scores |= {f"{name}_{key}": value for key, value in test_scores.items()}
    return scores


def _write_down(
    task: Task,
    files: Files,
    data: _Data,
    training: Training,
    progress: Progress,
    scores: dict[str, float],
    record: dict[str, Any],
    command: str,
) -> None:
    run_dir = files.output
    uses = {"training": (files.train, len(data.train))}
    if files.eval is None:
        uses["evaluation"] = (files.train.with_name(f"{files.train.name} (held out)"), len(data.evaluation))
    else:
        uses["evaluation"] = (files.eval, len(data.evaluation))
    for path, examples in zip(files.test, data.tests.values()):
        uses[f"test ({path.stem})"] = (path, len(examples))
    notes = [
        f"Epochs: {training.epochs}; {training.batch_size} examples a step; AdamW with bias correction at "
        f"{training.lr:g} (warm-up {training.warmup:g}, then linear to 0), seed {training.seed}. "
        f"The model is that of step {progress.best_step} of {progress.step}, the best by {task.main_metric}."
    ]
    write_card(
        run_dir,
        task=task.name,
        source=str(files.model),
        data=uses,
        labels=list(getattr(task, "labels", [])),
        scores=scores,
        command=command,
        notes=notes,
    )
    for checkpoint in ckpt.list_checkpoints(run_dir):
        shutil.rmtree(checkpoint)
    (run_dir / "last").unlink(missing_ok=True)
    write_json(run_dir / "scores.json", scores)  # last: it says that the run is finished


def collect_arguments(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of a dataclass out of keyword arguments."""
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: values.pop(name) for name in names if name in values}
