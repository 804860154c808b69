"""A fine-tuned model and a file of any size -> a row for each example, streamed."""

from __future__ import annotations

import csv
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from tokenizers import Tokenizer

from fastbert.errors import UserError
from fastbert.inference import use_cuda_graphs
from fastbert.tasks.models import source_config, source_folder, source_tokenizer
from fastbert.tasks.registry import TASKS, task_class
from fastbert.tasks.run import RECORD, torch_device
from fastbert.tasks.settings import Training, shown
from fastbert.tasks.task import Say, Task
from fastbert.tasks.training import Stepper

CHUNK = 2048  # examples that are sorted by length and computed together
FORMATS = (".jsonl", ".tsv", ".csv")
_BY_CLASS = {  # what a model that no run of ours wrote can do
    "BertForSequenceClassification": "classify",
    "BertForMultipleChoice": "choice",
    "BertForQuestionAnswering": "squad",
    "BertForTokenClassification": "tag",
    "BertLstmForTokenClassification": "features",
}


@dataclass
class Computing:
    max_length: Annotated[int | None, shown("as in training", "INT")] = None
    """Tokens of a sequence at most."""
    tokens_per_batch: Annotated[int, shown("4096 on a CPU, 32768 on a GPU", "INT")] = 0
    """Tokens that are computed at once."""
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, shown("fp32 on a CPU, bf16 on a GPU", "{fp32,bf16,fp16}")
    ] = None
    """Arithmetic of the matrix products."""
    device: Annotated[str | None, shown("cuda where there is one, else cpu", "STR")] = None
    """Where to compute."""


@dataclass
class Record:
    """What a model folder says of its task."""

    folder: Path
    task: str
    options: Any  # of the task's options_class, as in training
    max_length: int | None


def read_record(model: str | Path, say: Say) -> Record:
    """Task and options of a fine-tuned folder, or of any BERT with a task's head by its class.

    Raises UserError for a model without such a head.
    """
    folder = source_folder(model, say)
    path = folder / RECORD
    if path.is_file():
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            name, values = record["task"], record["options"]
            max_length = record["max_length"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not the record of a fine-tuning run ({error!r})") from error
    else:
        config = source_config(folder)
        names = [_BY_CLASS[c] for c in config.get("architectures") or [] if c in _BY_CLASS]
        if not names:
            raise UserError(f"{folder} holds no model with a task's head; fine-tune it first")
        name, values, max_length = names[0], {}, None
        if name == "classify" and config.get("problem_type") == "regression":
            name = "regress"
    if name not in TASKS:
        raise UserError(f"{folder} is of the task {name!r}; the tasks here are {', '.join(TASKS)}")
    options = task_class(name).options_class
    known = {field.name for field in fields(options)}
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in known}
    return Record(folder, name, options(**given), max_length)


@dataclass
class Predictor:
    """A loaded model; `rows` may be called again and again."""

    task: Task
    stepper: Stepper
    tokenizer: Tokenizer
    max_length: int

    @classmethod
    def load(cls, record: Record, computing: Computing, say: Say) -> Predictor:
        task = task_class(record.task)(record.options, say)
        model = task.load_model(str(record.folder))
        limit = int(model.config.max_position_embeddings)
        length = computing.max_length or record.max_length or task.default_max_length
        if computing.max_length is not None and not 3 <= length <= limit:
            raise UserError(f"--max-length {length} is out of range; the model takes 3 to {limit} tokens")
        if computing.tokens_per_batch < 0:
            raise UserError(
                f"--tokens-per-batch {computing.tokens_per_batch} is out of range; give at least 1"
            )
        device = torch_device(computing.device)
        if computing.precision == "fp16" and device.type == "cpu":
            raise UserError("--precision fp16 needs a GPU; use fp32 or bf16 on a CPU")
        settings = Training(tokens_per_batch=computing.tokens_per_batch, precision=computing.precision)
        stepper = Stepper(task, model.to(device), settings, device, total_steps=1)
        if device.type == "cuda":
            use_cuda_graphs(model)
        return cls(task, stepper, source_tokenizer(record.folder), min(length, limit))

    def rows(self, path: Path) -> Iterator[dict[str, Any]]:
        """A row for each example of the file, in order, `CHUNK` examples in memory at a time."""
        examples = self.task.read(path, labels_required=False)
        for chunk in iter(lambda: list(itertools.islice(examples, CHUNK)), []):
            features = self.task.features(chunk, self.tokenizer, self.max_length)
            predictions = self.task.predictions(chunk, features, self.stepper.outputs(features))
            for example, prediction in zip(chunk, predictions):
                yield self.task.row(example, prediction)


# ---- files


class RowWriter:
    """Rows as JSONL, or as CSV or TSV by the suffix; a file is complete or absent, "-" is stdout."""

    def __init__(self, output: str) -> None:
        self.path = None if output == "-" else Path(output)
        suffix = ".jsonl" if self.path is None else self.path.suffix
        if suffix not in FORMATS:
            raise UserError(f"--output {output} has none of the suffixes {', '.join(FORMATS)}; give it one")
        self.file: TextIO = sys.stdout
        if self.path is not None:
            self.partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            try:
                self.file = self.partial.open("w", encoding="utf-8", newline="")
            except OSError as error:
                raise UserError(
                    f"cannot write {output} ({error.strerror}): choose another --output"
                ) from error
        self.table: Any = None
        if suffix != ".jsonl":
            delimiter = "\t" if suffix == ".tsv" else ","
            self.table = csv.writer(self.file, delimiter=delimiter, lineterminator="\n")
        self.num_rows = 0

    def write(self, row: dict[str, Any]) -> None:
        if self.table is None:
            self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
        else:
            flat = _flat(row)
            if not self.num_rows:
                self.table.writerow(flat)
            self.table.writerow(flat.values())
        self.num_rows += 1

    def finish(self) -> None:
        self.file.flush()
        if self.path is not None:
            self.file.close()
            self.partial.replace(self.path)

    def abandon(self) -> None:
        if self.path is not None:
            self.file.close()
            self.partial.unlink(missing_ok=True)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """One value a column: an object's entries become columns of their own, a list its JSON."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": v for name, v in value.items()}
        else:
            flat[key] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return flat
