"""`python -m benchmarks.scores --data DIR --model DIR`: what fine-tuning reaches, here and in transformers.

For each data set and seed the same model is fine-tuned twice: through `fastbert.tasks.finetune`, and by a
plain loop over transformers' own model, with the same examples in the same batches, the same first weights of
the head and the same hyper-parameters. Dropout is on, so its masks differ, and scores agree as those of two
seeds do. It is the model after the last step that is scored: nothing is chosen on the evaluation file, but
for SQuAD's threshold, which is chosen on one file and scored on another.

A finished run appends a row to `results/scores-MACHINE.jsonl`, and runs that have one are left out, so the
command can be stopped and typed again. Seeds are the outer loop: what is finished is a whole table. On a
machine that does other work as well the seconds of a row say little, and no table shows them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.environment import of_cpu
from benchmarks.rows import RESULTS, Row, read_rows
from fastbert.config import BertConfig
from fastbert.data.tokenizer import load_tokenizer, save_tokenizer
from fastbert.modeling import BertForPreTraining
from fastbert.pretrained import PretrainedModel
from fastbert.tasks import finetune
from fastbert.tasks.models import source_folder, source_tokenizer
from fastbert.tasks.registry import task_class
from fastbert.tasks.task import Feature, Task
from fastbert.tasks.training import epoch_order, split_by_tokens, units_of

ENGINES = ("fastbert", "transformers")
NEVER = 10**9  # steps between evaluations: only the last step is evaluated
BATCH = 32  # examples a step
SLOTS = 2048  # tokens and pads that transformers computes at once
HELD_OUT_ARTICLES = 4  # of SQuAD's 16: two to choose the threshold, two to score
SQUAD_SCORED = 300  # questions of two articles at most, evenly spread

Files = dict[str, Any]  # train, eval, and test: a tuple


@dataclass(frozen=True)
class DataSet:
    """A task's files, and the recipe it is learned by."""

    task: str
    metric: str  # of the scores
    files: Callable[[Path, Path], Files]  # (folder of the data, folder for what is made of it) -> files
    epochs: int
    options: dict[str, Any] = field(default_factory=dict)  # of the task
    limit: int | None = None  # training examples, a sample by the seed
    max_length: int = 128
    lr: float = 1e-4
    model: str = "english"  # which of the models; "korean-random" has the size of "korean"


# ---- files


def _whole(name: str, *parts: str) -> Callable[[Path, Path], Files]:
    """GLUE's training file from the parts that it was cut into, and its dev.tsv."""

    def files(data: Path, work: Path) -> Files:
        texts = [(data / name / part).read_text(encoding="utf-8") for part in parts]
        lines = [line for text in texts for line in text.split("\n")]
        path = work / f"{name}.tsv"
        kept = [line for line in lines if line and not line.startswith("index\t")]  # no header
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        return {"train": path, "eval": data / name / "dev.tsv"}

    return files


def _squad(data: Path, work: Path) -> Files:
    """Articles to train on, to choose the threshold on, and to score.

    XQuAD has some of the same contexts, so it can be none of these.
    """
    articles = json.loads((data / "squad/cs224n_dev-v2.0.json").read_text(encoding="utf-8"))["data"]
    parts = {
        "train": (articles[:-HELD_OUT_ARTICLES], NEVER),
        "threshold": (articles[-HELD_OUT_ARTICLES:-2], SQUAD_SCORED),
        "test": (articles[-2:], SQUAD_SCORED),
    }
    paths = {}
    for name, (chosen, limit) in parts.items():
        rows = [
            {"context": paragraph["context"], **question}
            for article in chosen
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
        kept = np.linspace(0, len(rows) - 1, min(limit, len(rows))).astype(int)
        paths[name] = work / f"{name}.json"
        paths[name].write_text(json.dumps([rows[i] for i in kept]), encoding="utf-8")
    return {"train": paths["train"], "eval": paths["threshold"], "test": (paths["test"],)}


def _files(train: str, evaluation: str) -> Callable[[Path, Path], Files]:
    return lambda data, work: {"train": data / train, "eval": data / evaluation}


_NSMC = _files("nsmc/ratings_train.first20000.txt", "nsmc/ratings_test.first5000.txt")

SAMPLE = 1_000  # of the larger sets: five seeds of them all, in both engines, fit hours of two cores

_SST2 = DataSet("classify", "accuracy", _files("sst2/train.tsv", "sst2/dev.tsv"), 3, {"glue": "sst2"})

DATA_SETS: dict[str, DataSet] = {  # in the order in which they run
    "sst2": replace(_SST2, limit=SAMPLE),
    "cola": DataSet(
        "classify", "matthews", _whole("cola", "train.tsv", "val.tsv"), 3, {"glue": "cola"}, SAMPLE
    ),
    "figqa": DataSet("choice", "accuracy", _files("figqa/train.csv", "figqa/dev.csv"), 3, {}, SAMPLE),
    "wnut17": DataSet(
        "tag", "f1", _files("wnut17/wnut17train.conll", "wnut17/emerging.test.annotated"), 3, {}, SAMPLE
    ),
    "stsb": DataSet(
        "regress", "pearson", _files("stsb/stsb-en-train.csv", "stsb/stsb-en-dev.csv"), 3, {}, SAMPLE
    ),
    "rte": DataSet("classify", "accuracy", _whole("rte", "train.tsv", "val.tsv"), 3, {"glue": "rte"}, SAMPLE),
    "nsmc": DataSet(
        "classify", "accuracy", _NSMC, 1, {"layout": "nsmc"}, limit=10_000, lr=2e-4, model="korean"
    ),
    "nsmc-random": DataSet(
        "classify", "accuracy", _NSMC, 1, {"layout": "nsmc"}, limit=10_000, lr=2e-4, model="korean-random"
    ),
    "sst2-whole": _SST2,
    "squad": DataSet("squad", "test_f1", _squad, 3, max_length=384),
}


# ---- the models that are fine-tuned


def random_model(like: Path, seed: int, target: Path) -> Path:
    """A model folder with the config and the tokenizer of another one, and new weights."""
    torch.manual_seed(seed)
    BertForPreTraining(BertConfig.from_pretrained(like)).save_pretrained(target)
    save_tokenizer(load_tokenizer(like), target, model_max_length=512)
    return target


# ---- fastbert


def with_fastbert(data: DataSet, model: Path, files: Files, seed: int, work: Path) -> dict[str, float]:
    output = work / "run"
    result = finetune(
        data.task,
        model=model,
        output=output,
        seed=seed,
        epochs=data.epochs,
        batch_size=BATCH,
        lr=data.lr,
        max_length=data.max_length,
        max_train_examples=data.limit,
        eval_every=NEVER,
        **files,
        **data.options,
    )
    shutil.rmtree(output)
    return result.scores


# ---- transformers


class Plain:
    """A plain fine-tuning loop over transformers' model, on the features of a task.

    The rows of a step are computed in parts of at most `SLOTS` tokens, shorter ones first; with their losses
    weighted by what they count for, this is the gradient of the whole step.
    """

    def __init__(self, task: Task, ours: PretrainedModel, lr: float, steps: int) -> None:
        import transformers

        theirs: Any = getattr(transformers, type(ours).__name__)
        self.task = task
        self.model = theirs(transformers.BertConfig.from_dict(ours.config.to_dict()))
        self.model.load_state_dict(ours.state_dict())
        is_spared = {n: n.endswith("bias") or "LayerNorm" in n for n, _ in self.model.named_parameters()}
        groups = [
            {
                "params": [p for n, p in self.model.named_parameters() if is_spared[n] == spared],
                "weight_decay": 0.0 if spared else 0.01,
            }
            for spared in (False, True)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, eps=1e-6, fused=True)
        warmup = round(0.1 * steps)
        self.schedule = transformers.get_linear_schedule_with_warmup(self.optimizer, warmup, steps)

    def train_step(self, features: Sequence[Feature], units: list[list[int]]) -> float:
        """One update over these units of the features; returns the mean loss."""
        self.model.train()
        units = sorted(units, key=lambda unit: max(len(features[i].input_ids) for i in unit))
        count = self.task.count([features[i] for unit in units for i in unit])
        total = 0.0
        for part in split_by_tokens(units, features, SLOTS, padded=True):
            chosen = [features[i] for i in part]
            inputs = self.inputs(chosen)
            loss = self.model(**inputs, **self.labels(chosen, inputs["input_ids"])).loss
            loss = loss * (self.task.count(chosen) / count)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return total

    @torch.no_grad()
    def outputs(self, features: Sequence[Feature]) -> list[np.ndarray]:
        """What the task's predictions are made of, for each feature, in their order."""
        self.model.eval()
        units = units_of(features, self.task.keeps_examples_together)
        units.sort(key=lambda unit: max(len(features[i].input_ids) for i in unit))
        found: list[Any] = [None] * len(features)
        for part in split_by_tokens(units, features, SLOTS, padded=True):
            chosen = [features[i] for i in part]
            for i, output in zip(part, self._rows(self.model(**self.inputs(chosen)), chosen)):
                found[i] = output
        return found

    # what differs between the heads

    def inputs(self, features: Sequence[Feature]) -> dict[str, Tensor]:
        """[rows, longest], and of a choice [examples, endings, longest]: each has the same number of them."""
        lengths = torch.tensor([len(f.input_ids) for f in features])
        ids, types = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
            for rows in ([f.input_ids for f in features], [f.token_type_ids for f in features])
        )
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        named = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        if self.task.name == "choice":
            return {k: v.unflatten(0, (-1, self._endings(features))) for k, v in named.items()}
        return named

    def _endings(self, features: Sequence[Feature]) -> int:
        return len(units_of(features, True)[0])

    def labels(self, features: Sequence[Feature], ids: Tensor) -> dict[str, Tensor]:
        targets = [f.target for f in features]
        if self.task.name == "squad":
            starts, ends = torch.tensor(targets).unbind(1)
            return {"start_positions": starts, "end_positions": ends}
        if self.task.name == "tag":
            labels = torch.full_like(ids, -100)
            for row, f in zip(labels, features):
                row[torch.from_numpy(f.first_pieces)] = torch.tensor(f.target)  # type: ignore[attr-defined]
            return {"labels": labels}
        if self.task.name == "choice":
            targets = targets[:: self._endings(features)]
        return {"labels": torch.tensor(targets)}

    def _rows(self, output: Any, features: Sequence[Feature]) -> list[np.ndarray]:
        if self.task.name == "squad":
            logits = torch.stack([output.start_logits, output.end_logits], dim=-1).numpy()
            return [row[: len(f.input_ids)] for row, f in zip(logits, features)]
        logits = output.logits.numpy()
        if self.task.name == "tag":
            return [row[f.first_pieces] for row, f in zip(logits, features)]  # type: ignore[attr-defined]
        return list(logits.reshape(-1) if self.task.name == "choice" else logits)


def with_transformers(data: DataSet, model: Path, files: Files, seed: int, work: Path) -> dict[str, float]:
    task, examples = read(data, files, seed)
    torch.manual_seed(seed)
    ours = task.build_model(str(model))
    tokenizer = source_tokenizer(source_folder(str(model), silent))
    features = task.features(examples["train"], tokenizer, data.max_length)
    units = units_of(features, task.keeps_examples_together)
    steps = -(-len(units) // BATCH)
    plain = Plain(task, ours, data.lr, data.epochs * steps)
    for epoch in range(data.epochs):
        order = epoch_order(len(units), seed, epoch)
        for at in range(0, len(order), BATCH):
            plain.train_step(features, [units[i] for i in order[at : at + BATCH]])
    scores: dict[str, float] = {}
    for name, part in examples.items():
        if name != "train":
            features = task.features(part, tokenizer, data.max_length)
            found = task.score(part, task.predictions(part, features, plain.outputs(features)))
            scores |= found if name == "eval" else {f"{name}_{key}": value for key, value in found.items()}
    return scores


def silent(text: str) -> None:
    pass


def read(data: DataSet, files: Files, seed: int) -> tuple[Task, dict[str, list[Any]]]:
    """The task, prepared, and its examples: train (the sample), eval, and the test files by their names."""
    chosen = task_class(data.task)
    task = chosen(chosen.options_class(**data.options), silent)
    paths = {"train": files["train"], "eval": files["eval"], **{p.stem: p for p in files.get("test", ())}}
    examples = {name: list(task.read(path, labels_required=True)) for name, path in paths.items()}
    task.prepare(examples["train"], [e for name, part in examples.items() if name != "train" for e in part])
    if data.limit is not None:  # the sample that `finetune` takes
        order = np.random.default_rng(seed).permutation(len(examples["train"]))
        examples["train"] = [examples["train"][i] for i in sorted(order[: data.limit].tolist())]
    return task, examples


RUN = {"fastbert": with_fastbert, "transformers": with_transformers}


# ---- rows


def row_name(data: str, seed: int, engine: str) -> str:
    return f"scores[{data}-{seed}-{engine}]"


def measured(name: str, seed: int, engine: str, models: dict[str, Path], folder: Path) -> Row:
    """Fine-tune and score once."""
    data = DATA_SETS[name]
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        files = data.files(folder, work)
        if data.model == "korean-random":
            model = random_model(source_folder(models["korean"], silent), seed, work / "model")
        else:
            model = models[data.model]
        started = time.perf_counter()
        scores = RUN[engine](data, model, files, seed, work)
        seconds = time.perf_counter() - started
        task, examples = read(data, files, seed)
        tokenizer = source_tokenizer(source_folder(str(model), silent))
        features = task.features(examples["train"], tokenizer, data.max_length)
    return {
        "name": row_name(name, seed, engine),
        "data": name,
        "seed": seed,
        "engine": engine,
        "metric": data.metric,
        "score": scores[data.metric],
        "scores": scores,
        "train_examples": len(examples["train"]),
        "scored_examples": len(list(examples.values())[-1]),
        "tokens": data.epochs * sum(len(f.input_ids) for f in features),
        "epochs": data.epochs,
        "lr": data.lr,
        "max_length": data.max_length,
        "seconds": round(seconds, 1),
        "command": command_of(name, seed, engine),
    }


def command_of(name: str, seed: int, engine: str) -> str:
    """The command that makes one row, but for where the data lies."""
    folders = "--data DATA --model MODEL"
    if DATA_SETS[name].model != "english":
        folders += " --korean-model KOREAN"
    return f"python -m benchmarks.scores {folders} --tasks {name} --seeds {seed} --engine {engine}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scores", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets' folders")
    parser.add_argument("--model", type=Path, required=True, help="English model folder")
    parser.add_argument("--korean-model", type=Path, help="model folder or run for nsmc; left out without it")
    parser.add_argument("--tasks", nargs="+", choices=list(DATA_SETS), default=list(DATA_SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--engine", choices=[*ENGINES, "both"], default="both")
    parser.add_argument("--rows", type=Path, help="file of the rows (default: scores-MACHINE.jsonl)")
    options = parser.parse_args(arguments)
    environment = of_cpu()
    file = options.rows or RESULTS / f"scores-{environment['host_kind']}.jsonl"
    models = {"english": options.model}
    if options.korean_model:
        models["korean"] = options.korean_model
    tasks = [t for t in options.tasks if DATA_SETS[t].model.removesuffix("-random") in models]
    engines = ENGINES if options.engine == "both" else (options.engine,)
    for name, seed, engine in [(t, s, e) for s in options.seeds for t in tasks for e in engines]:
        known = {row["name"] for row in read_rows(file)} if file.exists() else set()
        if row_name(name, seed, engine) in known:
            continue
        row = measured(name, seed, engine, models, options.data) | environment
        with file.open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(row) + "\n")
        print(f"{row['name']}: {row['metric']} {row['score']:.4f} in {row['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
