"""Steps, batches and runs: the numbers of transformers, of one big batch, and of a run without a break."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastbert.errors import UserError
from fastbert.tasks import finetune, pictures
from fastbert.tasks.classify import ClassifyOptions, ClassifyTask
from fastbert.tasks.models import source_tokenizer
from fastbert.tasks.settings import Training
from fastbert.tasks.task import Feature
from fastbert.tasks.training import (
    Progress,
    Stepper,
    collate,
    epoch_order,
    layered_groups,
    split_by_tokens,
    units_of,
)
from tests.tiny_bert import review_files, tiny_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def still_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without dropout."""
    return tiny_folder(
        tmp_path_factory.mktemp("still"),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return review_files(tmp_path_factory.mktemp("data"))


def started(folder: Path, train: Path, **training: Any) -> tuple[Stepper, list[Feature]]:
    task = ClassifyTask(ClassifyOptions(), lambda text: None)
    examples = list(task.read(train, labels_required=True))
    task.prepare(examples, examples)
    torch.manual_seed(0)
    model = task.build_model(str(folder))
    features = task.features(examples, source_tokenizer(folder), 64)
    return Stepper(task, model, Training(**training), CPU, total_steps=50), features


# ---- batches


def feature(length: int, example: int = 0) -> Feature:
    return Feature(list(range(length)), [0] * length, None, example)


def test_units_are_divided_by_tokens() -> None:
    features = [feature(n) for n in (5, 3, 9, 2, 2, 30)]
    units = units_of(features, together=False)
    assert split_by_tokens(units, features, 10, False) == [[0, 1], [2], [3, 4], [5]]
    assert split_by_tokens(units, features, 10, True) == [[0, 1], [2], [3, 4], [5]]
    assert split_by_tokens(units, features, 12, False) == [[0, 1], [2, 3], [4], [5]]
    assert split_by_tokens(units, features, 12, True) == [[0, 1], [2], [3, 4], [5]]


def test_features_of_an_example_stay_together() -> None:
    features = [feature(4, 0), feature(4, 0), feature(4, 0), feature(4, 1), feature(4, 2), feature(4, 2)]
    units = units_of(features, together=True)
    assert units == [[0, 1, 2], [3], [4, 5]]
    assert split_by_tokens(units, features, 8, False) == [[0, 1, 2], [3], [4, 5]]
    assert split_by_tokens(units, features, 12, False) == [[0, 1, 2], [3, 4, 5]]


def test_a_packed_batch_of_features() -> None:
    batch = collate([Feature([2, 7, 3], [0, 0, 1]), Feature([2, 3], [0, 0])])
    assert batch.input_ids.tolist() == [2, 7, 3, 2, 3]
    assert batch.token_type_ids.tolist() == [0, 0, 1, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5] and batch.max_seqlen == 3 and batch.num_tokens == 5


def test_every_example_once_an_epoch() -> None:
    first, second = epoch_order(50, 1, 0), epoch_order(50, 1, 1)
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert first == epoch_order(50, 1, 0) != epoch_order(50, 2, 0)


# ---- steps


@pytest.mark.parametrize(
    "change", [{"tokens_per_batch": 40}, {"padded": True}, {"padded": True, "tokens_per_batch": 60}]
)
def test_neither_budget_nor_padding_changes_a_step(
    still_folder: Path, files: tuple[Path, Path], change: dict[str, Any]
) -> None:
    weights = []
    for options in ({}, change):
        stepper, features = started(still_folder, files[0], clip=0.0, **options)
        units = units_of(features, together=False)[:16]
        losses = [stepper.train_step(features, units).item() for _ in range(3)]
        weights.append((losses, stepper.model.state_dict()))
    (losses, one), (other_losses, other) = weights
    assert other_losses == pytest.approx(losses, abs=1e-5)
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=2e-5)


def test_the_losses_of_transformers(still_folder: Path, files: tuple[Path, Path]) -> None:
    """50 steps of the same batches, weights and hyper-parameters: the same losses to 1e-4."""
    import transformers

    stepper, features = started(still_folder, files[0], lr=3e-4, warmup=0.1)
    theirs = transformers.BertForSequenceClassification(
        transformers.BertConfig.from_pretrained(still_folder, num_labels=2)
    ).train()
    theirs.load_state_dict(stepper.model.state_dict())
    decayed = [p for n, p in theirs.named_parameters() if not n.endswith("bias") and "LayerNorm" not in n]
    spared = [p for n, p in theirs.named_parameters() if n.endswith("bias") or "LayerNorm" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": spared, "weight_decay": 0.0}],
        lr=3e-4,
        eps=1e-6,
    )
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 5, 50)
    units = units_of(features, together=False)
    ours, expected = [], []
    for step in range(50):
        order = epoch_order(len(units), 0, step)[:16]
        ours.append(stepper.train_step(features, [units[i] for i in order]).item())
        rows = [features[i] for i in order]
        longest = max(len(f.input_ids) for f in rows)
        ids = torch.tensor([f.input_ids + [0] * (longest - len(f.input_ids)) for f in rows])
        loss = theirs(
            ids, attention_mask=(ids != 0).long(), labels=torch.tensor([f.target for f in rows])
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert expected[0] - min(expected) > 0.1  # it learns something
    assert np.abs(np.array(ours) - np.array(expected)).max() < 1e-4


def test_outputs_come_back_in_their_order(still_folder: Path, files: tuple[Path, Path]) -> None:
    stepper, features = started(still_folder, files[0], tokens_per_batch=50)
    found = stepper.outputs(features)
    with torch.no_grad():
        for index in (0, 5, 17, len(features) - 1):
            alone = stepper.model.eval()(collate([features[index]])).logits[0].numpy()
            np.testing.assert_allclose(found[index], alone, atol=1e-5)


def test_the_evaluation_loss_is_the_mean_over_batches(still_folder: Path, files: tuple[Path, Path]) -> None:
    stepper, features = started(still_folder, files[0], tokens_per_batch=50)
    with torch.no_grad():
        alone = [
            stepper.model.eval()(collate([f]), labels=torch.tensor([f.target])).loss.item() for f in features
        ]
    assert stepper.loss(features) == pytest.approx(np.mean(alone), rel=1e-5)


def test_the_learning_curve_shows_both_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: drawn.append(figure))
    rows = [
        {"step": 1, "loss": 0.7},
        {"step": 2, "loss": 0.5},
        {"step": 2, "eval_loss": 0.6, "eval_f1": 0.8},
    ]
    pictures.learning_curve(tmp_path / "curve.png", rows, "f1")
    losses, scores = drawn[0].axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in losses.lines}
    assert lines == {"training": ([1, 2], [0.7, 0.5]), "evaluation": ([2], [0.6])}
    assert list(scores.lines[0].get_ydata()) == [0.8]


# ---- which parameters, at which rate


def test_layers_learn_at_their_share(still_folder: Path, files: tuple[Path, Path]) -> None:
    stepper, features = started(still_folder, files[0], layer_decay=0.5, warmup=0.0, lr=1e-3)
    model: Any = stepper.model
    shares = {id(p): group["lr_share"] for group in stepper.optimizer.param_groups for p in group["params"]}
    assert len(shares) == len(list(model.parameters()))
    assert shares[id(model.classifier.weight)] == shares[id(model.bert.pooler.dense.bias)] == 1.0
    assert shares[id(model.bert.encoder.layer[1].output.dense.weight)] == 0.5
    assert shares[id(model.bert.encoder.layer[0].output.LayerNorm.weight)] == 0.25
    assert shares[id(model.bert.embeddings.word_embeddings.weight)] == 0.125
    stepper.train_step(features, units_of(features, False)[:4])
    rates = {group["lr_share"]: group["lr"] for group in stepper.optimizer.param_groups}
    assert rates == pytest.approx({1.0: 1e-3, 0.5: 5e-4, 0.25: 2.5e-4, 0.125: 1.25e-4})
    assert len(layered_groups(model, 0.01, 1.0)) == 2


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({"freeze": "embeddings"}, {"layer.0", "layer.1", "pooler", "classifier"}),
        ({"freeze_layers": 1}, {"layer.1", "pooler", "classifier"}),
        ({"freeze": "body"}, {"classifier"}),
        ({}, {"embeddings", "layer.0", "layer.1", "pooler", "classifier"}),
    ],
)
def test_frozen_parts_do_not_move(
    folder: Path, files: tuple[Path, Path], options: dict[str, Any], moved: set[str]
) -> None:
    stepper, features = started(folder, files[0], warmup=0.0, **options)
    before = {name: value.clone() for name, value in stepper.model.state_dict().items()}
    stepper.train_step(features, units_of(features, False)[:8])
    changed = {
        name for name, value in stepper.model.state_dict().items() if not torch.equal(value, before[name])
    }
    parts = ("embeddings", "layer.0", "layer.1", "pooler", "classifier")
    assert {part for part in parts if any(part in name for name in changed)} == moved


def test_more_frozen_layers_than_there_are(folder: Path, files: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="--freeze-layers 3 is out of range; the model has 2 layers"):
        started(folder, files[0], freeze_layers=3)


# ---- runs


def run(folder: Path, files: tuple[Path, Path], output: Path, **options: Any) -> Any:
    defaults = {"epochs": 3, "lr": 1e-2, "batch_size": 16, "log_every": 1}
    return finetune(
        "classify", model=folder, train=files[0], eval=files[1], output=output, **{**defaults, **options}
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole(folder: Path, files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a break."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    result = run(folder, files, output, test=[files[1]])
    assert result.scores["accuracy"] > 0.9  # the data is easy
    assert result.scores["dev_accuracy"] == result.scores["accuracy"]
    return output


def test_a_run_leaves_what_it_promises(whole: Path, files: tuple[Path, Path]) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "finetune.json", "scores.json"}
    assert names >= {"README.md", "predictions.jsonl", "metrics.jsonl", "learning_curve.png"}
    assert names >= {"confusion_matrix.png", "pr_curve.png"}
    assert not any(name.startswith("checkpoint") for name in names) and "last" not in names
    scores = json.loads((whole / "scores.json").read_text(encoding="utf-8"))
    rows = [
        json.loads(line) for line in (whole / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == 48 and scores["accuracy"] == pytest.approx(
        sum(row["label"] == row["expected"] for row in rows) / 48
    )
    evaluations = [row for row in rows_of(whole) if "eval_accuracy" in row]
    best = max(row["eval_accuracy"] for row in evaluations)
    assert all(0 < row["eval_loss"] < 1 for row in evaluations) and "loss" not in scores
    assert scores["accuracy"] == pytest.approx(best)
    card = (whole / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-classification" in card and "| training | train.csv | 96 |" in card
    assert f"| accuracy | {scores['accuracy']:.4f} |" in card and "finetune('classify'" in card


@pytest.mark.parametrize("stop_at", [3, 12])
def test_an_interrupted_run_continues_to_the_same_bits(
    whole: Path,
    folder: Path,
    files: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_at: int,
) -> None:
    step = Stepper.train_step

    def interrupt(self: Stepper, *arguments: Any) -> torch.Tensor:
        loss = step(self, *arguments)
        if self.step == stop_at:  # 12 = the end of an epoch
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    monkeypatch.setattr(Stepper, "train_step", interrupt)
    output = tmp_path / "broken"
    result = run(folder, files, output, test=[files[1]])
    assert result.status == 130 and (output / f"checkpoint-{stop_at}").is_dir()
    monkeypatch.setattr(Stepper, "train_step", step)
    torch.manual_seed(99)  # nothing of this process must matter
    result = run(folder, files, output, test=[files[1]])
    assert result.scores == json.loads((whole / "scores.json").read_text(encoding="utf-8"))
    ours, expected = weights_of(output), weights_of(whole)
    assert ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in ours)
    assert [row["loss"] for row in rows_of(output) if "loss" in row] == [
        row["loss"] for row in rows_of(whole) if "loss" in row
    ]


def test_a_finished_run_is_not_run_again(whole: Path, folder: Path, files: tuple[Path, Path]) -> None:
    before = (whole / "model.safetensors").stat().st_mtime_ns
    result = run(folder, files, whole, test=[files[1]])
    assert result.scores["accuracy"] > 0.9 and (whole / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"other options \(lr is 0.01 there, 0.001 is asked for\)"):
        run(folder, files, whole, lr=1e-3)


def test_a_file_is_the_same_by_any_path(
    whole: Path, folder: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (whole / "model.safetensors").stat().st_mtime_ns
    monkeypatch.chdir(files[0].parent)
    short = (Path(files[0].name), Path(f"./{files[1].name}"))
    run(folder, short, whole, test=[files[1]])
    assert (whole / "model.safetensors").stat().st_mtime_ns == before
    record = json.loads((whole / "finetune.json").read_text(encoding="utf-8"))
    assert record["files"]["train"] == str(files[0].resolve())
    record["files"] |= {"train": short[0].name, "eval": str(short[1])}  # as earlier versions wrote them
    (whole / "finetune.json").write_text(json.dumps(record), encoding="utf-8")
    run(folder, files, whole, test=[files[1]])
    assert (whole / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="other options"):
        run(folder, (files[1], files[1]), whole)


def test_early_stopping_and_the_best_step(
    folder: Path, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.5, 0.7, 0.6, 0.7, 0.9])
    monkeypatch.setattr(ClassifyTask, "score", lambda *_: {"accuracy": next(scores, 0.7)})
    result = run(folder, files, tmp_path / "a", epochs=2, eval_every=2, patience=2)
    evaluated = [row["eval_accuracy"] for row in rows_of(tmp_path / "a") if "eval_accuracy" in row]
    assert evaluated == [0.5, 0.7, 0.6, 0.7]  # two without a better one
    assert "step 4 of 8, the best by accuracy" in (tmp_path / "a" / "README.md").read_text(encoding="utf-8")
    assert result.status == 0


def test_progress_counts_evaluations_without_a_gain() -> None:
    progress = Progress(step=1)
    assert [progress.update(score) for score in (0.1, 0.3, 0.3, 0.2, 0.4)] == [True, True, False, False, True]
    assert progress.without_gain == 0 and progress.best_score == 0.4


def test_held_out_examples_and_a_sample(folder: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    options = {"model": folder, "train": files[0], "epochs": 1, "max_train_examples": 20}
    finetune("classify", output=tmp_path / "a", **options)  # type: ignore[arg-type]
    card = (tmp_path / "a" / "README.md").read_text(encoding="utf-8")
    assert "| training | train.csv | 20 |" in card
    assert "| evaluation | train.csv (held out) | 9 |" in card  # a tenth of 96


def test_bf16_learns_too(folder: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    result = run(folder, files, tmp_path / "a", precision="bf16", epochs=2)
    assert result.scores["accuracy"] > 0.8
    assert weights_of(tmp_path / "a")["classifier.weight"].dtype == torch.float32


def test_a_loss_that_is_no_number_ends_the_run(
    folder: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the loss is not a number at step"):
        run(folder, files, tmp_path / "a", lr=1e30, clip=0.0)


# ---- sweeps


def test_a_sweep_keeps_the_best_run(
    folder: Path, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = {"sweep": True, "sweep_lr": (1e-2, 1e-5), "sweep_batch_size": (16,), "sweep_epochs": (1,)}
    output = tmp_path / "out"
    result = run(folder, files, output, max_train_examples=64, seeds=(1, 2), **grid)
    record = json.loads((output / "sweep.json").read_text(encoding="utf-8"))
    scores = {f"lr{r['lr']:g}-batch16-epochs1-seed{r['seed']}": r["score"] for r in record["runs"]}
    assert len(scores) == 4 and record["best"] == max(scores, key=lambda name: scores[name])
    assert result.folder == output and result.scores["accuracy"] == max(scores.values())
    best = output / "runs" / record["best"]
    assert (output / "model.safetensors").read_bytes() == (best / "model.safetensors").read_bytes()
    assert len(list(output.glob("runs/*/model.safetensors"))) == 1
    assert len(list(output.glob("runs/*/scores.json"))) == 4

    def fail(*_: Any) -> None:
        raise AssertionError("a finished run is run again")

    monkeypatch.setattr(Stepper, "train_step", fail)
    again = run(folder, files, output, max_train_examples=64, seeds=(1, 2), **grid)
    assert again.scores == result.scores


def test_options_of_a_sweep_need_a_sweep(folder: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--seeds need --sweep"):
        run(folder, files, tmp_path, seeds=(1, 2))
    with pytest.raises(UserError, match="a value is given twice"):
        run(folder, files, tmp_path, sweep=True, seeds=(1, 1))
