"""Every task against transformers: the same losses for 50 steps, and the same scores from file to file.

The other side is the loop of `python -m benchmarks.scores`: transformers' model with transformers' own loss,
torch's AdamW, transformers' schedule. Dropout is off, so both sides have to agree in every step.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import scores
from benchmarks.rows import read_rows
from fastbert.tasks.models import source_tokenizer
from fastbert.tasks.settings import Training
from fastbert.tasks.training import Stepper, epoch_order, units_of
from tests.tiny_bert import BAD, FILLER, GOOD, reviews, tiny_folder, write_csv

STEPS = 50
SLOTS = {"squad": 1}  # transformers' loss of a span counts pads as places of an answer: rows without any
LR = 3e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large weights, so that losses move; no dropout."""
    return tiny_folder(
        tmp_path_factory.mktemp("still"),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )


# ---- small data of each task


def classify_file(folder: Path, seed: int) -> Path:
    return write_csv(folder / f"{seed}.csv", ["text", "label"], reviews(64, seed))


def regress_file(folder: Path, seed: int) -> Path:
    """Pairs of reviews; the number says how many labels are good."""
    pairs = zip(reviews(64, seed), reviews(64, seed + 100))
    rows = [(a, b, (x == "pos") + (y == "pos") / 2) for (a, x), (b, y) in pairs]
    return write_csv(folder / f"{seed}.csv", ["sentence1", "sentence2", "score"], rows)


def choice_file(folder: Path, seed: int) -> Path:
    """Of three endings the one with good words is right."""
    rng = random.Random(seed)
    rows = []
    for _ in range(48):
        endings = [" ".join(rng.choices(BAD, k=rng.randint(1, 4))) for _ in range(3)]
        label = rng.randrange(3)
        endings[label] = " ".join(rng.choices(GOOD, k=rng.randint(1, 4)))
        rows.append((" ".join(rng.choices(FILLER, k=rng.randint(1, 8))), *endings, label))
    return write_csv(folder / f"{seed}.csv", ["context", "ending0", "ending1", "ending2", "label"], rows)


def tag_file(folder: Path, seed: int) -> Path:
    """Good words are persons, bad words places; long words are of several pieces."""
    rng = random.Random(seed)
    lines = []
    for _ in range(48):
        for word in rng.choices([*GOOD, *BAD, *FILLER, "unbelievable", "x9"], k=rng.randint(1, 12)):
            tag = "B-per" if word in GOOD else "B-loc" if word in BAD else "O"
            lines.append(f"{word}\t{tag}")
        lines.append("")
    path = folder / f"{seed}.conll"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def squad_file(folder: Path, seed: int) -> Path:
    """Where does a good word stand? In every third document none does; some are read in several windows."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(30):
        words = rng.choices([*BAD, *FILLER], k=rng.randint(1, 36))
        answers: list[dict[str, Any]] = []
        if number % 3:
            place, word = rng.randrange(len(words)), rng.choice(GOOD)
            words[place] = word
            answers = [{"text": word, "answer_start": len(" ".join([*words[:place], ""]))}]
        rows.append(
            {"id": str(number), "question": "good it was", "context": " ".join(words), "answers": answers}
        )
    path = folder / f"{seed}.json"
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return path


MAKERS: dict[str, Callable[[Path, int], Path]] = {
    "classify": classify_file,
    "regress": regress_file,
    "choice": choice_file,
    "tag": tag_file,
    "squad": squad_file,
}
METRICS = {"classify": "accuracy", "regress": "pearson", "choice": "accuracy", "tag": "f1", "squad": "3_f1"}
SCORED_BY = {"classify": "sklearn", "regress": "scipy", "tag": "seqeval"}


def data_set(name: str, made: Path, **settings: Any) -> scores.DataSet:
    """Training, evaluation and test files of a task."""
    if name in SCORED_BY:
        pytest.importorskip(SCORED_BY[name])
    train, evaluation, test = (MAKERS[name](made, seed) for seed in (1, 2, 3))
    options = {"doc_stride": 8} if name == "squad" else {}
    files = {"train": train, "eval": evaluation, "test": (test,)}
    return scores.DataSet(
        name, METRICS[name], lambda data, work: files, 3, options, max_length=32, lr=LR, **settings
    )


# ---- what must agree


@pytest.mark.parametrize("name", MAKERS)
def test_fifty_losses_of_transformers(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same data, batches, weights and hyper-parameters: the same loss in each of 50 steps to 1e-4."""
    monkeypatch.setattr(scores, "SLOTS", SLOTS.get(name, scores.SLOTS))
    data = data_set(name, tmp_path)
    task, examples = scores.read(data, data.files(tmp_path, tmp_path), seed=0)
    torch.manual_seed(0)
    model = task.build_model(str(folder))
    features = task.features(examples["train"], source_tokenizer(folder), data.max_length)
    plain = scores.Plain(task, model, LR, STEPS)
    stepper = Stepper(task, model, Training(lr=LR), torch.device("cpu"), STEPS)
    units = units_of(features, task.keeps_examples_together)
    if name in ("squad", "tag"):  # some are read in windows, or in parts
        assert len(features) > len(examples["train"])
    ours, theirs = [], []
    for step in range(STEPS):
        chosen = [units[i] for i in epoch_order(len(units), 0, step)[: 6 if name == "squad" else 16]]
        ours.append(stepper.train_step(features, chosen).item())
        theirs.append(plain.train_step(features, chosen))
    assert np.mean(theirs[:5]) - np.mean(theirs[-5:]) > 0.1  # it learns something
    assert np.abs(np.array(ours) - np.array(theirs)).max() < 1e-4


@pytest.mark.parametrize("name", MAKERS)
def test_scores_from_file_to_file(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of `finetune` and the loop over transformers' model end at the same scores of each file."""
    monkeypatch.setattr(scores, "SLOTS", SLOTS.get(name, scores.SLOTS))
    data = data_set(name, tmp_path, limit=40 if name == "classify" else None)
    found = {}
    for engine, run in scores.RUN.items():
        work = tmp_path / engine
        work.mkdir()
        found[engine] = run(data, folder, data.files(tmp_path, work), 3, work)
        assert not list(work.iterdir())
    ours, theirs = found["fastbert"], found["transformers"]
    assert ours.keys() == theirs.keys() and data.metric in ours
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, abs=1e-3), key


def test_rows_are_made_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command runs every data set for a seed before the next seed, and leaves out what has a row."""
    monkeypatch.setattr(scores, "DATA_SETS", {n: data_set(n, tmp_path) for n in ("choice", "squad")})
    monkeypatch.setattr(scores, "RUN", dict.fromkeys(scores.ENGINES, invented))
    file = tmp_path / "rows.jsonl"
    command = ["--data", str(tmp_path), "--model", str(folder), "--rows", str(file), "--seeds", "1", "2"]
    assert scores.main([*command, "--tasks", "squad", "--engine", "transformers"]) == 0
    assert scores.main(command) == 0
    assert scores.main(command) == 0
    rows = read_rows(file)
    made = ["squad-1-transformers", "squad-2-transformers"]
    for seed in (1, 2):
        made += [f"choice-{seed}-fastbert", f"choice-{seed}-transformers", f"squad-{seed}-fastbert"]
    assert [row["name"] for row in rows] == [f"scores[{name}]" for name in made]
    (row,) = [row for row in rows if row["name"] == "scores[choice-2-fastbert]"]
    assert (row["score"], row["metric"], row["seed"], row["engine"]) == (0.25, "accuracy", 2, "fastbert")
    assert (row["train_examples"], row["scored_examples"], row["epochs"]) == (48, 48, 3)
    features = 3 * 48  # three endings an example
    assert row["tokens"] > 3 * 5 * features and row["commit"] and row["torch"] == torch.__version__
    command = "--data DATA --model MODEL --tasks choice --seeds 2 --engine fastbert"
    assert row["command"] == f"python -m benchmarks.scores {command}"
    assert capsys.readouterr().out.count("accuracy 0.2500 in ") == 4


def invented(data: scores.DataSet, model: Path, files: Any, seed: int, work: Path) -> dict[str, float]:
    assert all(path.is_file() for path in (files["train"], files["eval"], *files["test"]))
    return {data.metric: 0.25}


def test_real_files_and_a_random_model(folder: Path, shared_data: Path, tmp_path: Path) -> None:
    """The published files are read whole, SQuAD's articles are apart, and a random model is a new one."""
    counts = {"sst2": (6920, 872), "cola": (8551, 1043), "rte": (2490, 277), "stsb": (5749, 1500)}
    for name, (train, scored) in counts.items():
        data = dataclasses.replace(scores.DATA_SETS[name], limit=None)
        pytest.importorskip(SCORED_BY[data.task])
        _, examples = scores.read(data, data.files(shared_data, tmp_path), seed=1)
        assert (len(examples["train"]), len(examples["eval"])) == (train, scored), name
    _, examples = scores.read(scores.DATA_SETS["squad"], scores._squad(shared_data, tmp_path), seed=1)
    contexts = [{example.context for example in part} for part in examples.values()]
    assert [len(part) for part in examples.values()] == [4449, 300, 300]
    assert not contexts[0] & contexts[1] and not contexts[0] & contexts[2] and not contexts[1] & contexts[2]
    answerable = [sum(bool(example.answers) for example in part) for part in examples.values()]
    assert all(0.3 < count / len(part) < 0.7 for count, part in zip(answerable, examples.values()))
    one, other = (scores.random_model(folder, seed, tmp_path / f"m{seed}") for seed in (1, 2))
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, one, other)]
    assert len(set(weights)) == 3 and len(weights[0]) == len(weights[1])
    again = scores.random_model(folder, 1, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == weights[1]
    assert source_tokenizer(one).get_vocab() == source_tokenizer(folder).get_vocab()
