"""Classification and regression: losses and scores by hand, label names, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastbert.errors import UserError
from fastbert.heads import BertForSequenceClassification
from fastbert.tasks import metrics
from fastbert.tasks.classify import ClassifyOptions, ClassifyTask
from fastbert.tasks.models import source_tokenizer
from fastbert.tasks.regress import RegressOptions, RegressTask
from fastbert.tasks.training import collate
from tests.tiny_bert import tiny_folder, write_csv


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(
        tmp_path_factory.mktemp("tiny"), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def prepared(folder: Path, path: Path, **options: Any) -> tuple[ClassifyTask, Any, list[Any], list[Any]]:
    """(task, model in eval mode, examples, features) of a file."""
    task = ClassifyTask(ClassifyOptions(**options), silent)
    examples = list(task.read(path, labels_required=True))
    task.prepare(examples, examples)
    model = task.build_model(str(folder)).eval()
    return task, model, examples, task.features(examples, source_tokenizer(folder), 64)


ROWS = [("good film", "pos"), ("bad", "neg"), ("a dull story", "neg"), ("awful music", "neg")]


def test_features_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    import transformers

    path = write_csv(
        tmp_path / "a.csv", ["text", "label"], [*ROWS, ("[SEP] " + "x y " * 50, "pos"), ("", "neg")]
    )
    _, _, examples, features = prepared(folder, path)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for example, feature in zip(examples, features):
        encoded = theirs(example.text, truncation=True, max_length=64)
        assert feature.input_ids == encoded["input_ids"]
        assert feature.token_type_ids == encoded["token_type_ids"]


def test_pairs_are_cut_as_in_transformers(folder: Path, tmp_path: Path) -> None:
    import transformers

    rows = [("good " * 50, "bad film", "1"), ("a", "film " * 80, "0"), ("the " * 60, "was " * 60, "0")]
    path = write_csv(tmp_path / "a.csv", ["sentence1", "sentence2", "label"], rows)
    _, _, examples, features = prepared(folder, path)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for example, feature in zip(examples, features):
        encoded = theirs(example.text, example.pair, truncation=True, max_length=64)
        assert feature.input_ids == encoded["input_ids"]
        assert feature.token_type_ids == encoded["token_type_ids"]


def test_cut_texts_are_said_once(folder: Path, tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "a.csv", ["text", "label"], [*ROWS, ("good " * 63, "pos"), ("bad " * 62, "neg")]
    )
    said: list[str] = []
    task = ClassifyTask(ClassifyOptions(), said.append)
    examples = list(task.read(path, labels_required=True))
    said.clear()
    for _ in range(2):
        task.features(examples, source_tokenizer(folder), 64)
    assert said == ["1 of the first 6 sequences have more than 64 tokens: their rest is not read"]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_with_class_weights_and_smoothing(folder: Path, tmp_path: Path, smoothing: float) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ROWS)
    task, model, _, features = prepared(folder, path, class_weights="balanced", label_smoothing=smoothing)
    batch = collate(features)
    with torch.no_grad():
        logits = model(batch).logits.double()
        mean = task.loss(model, batch, features).item() / task.count(features)
    # 4 rows, 2 labels: neg weighs 4 / (2 * 3), pos 4 / (2 * 1)
    expected = torch.nn.functional.cross_entropy(
        logits,
        torch.tensor([1, 0, 0, 0]),
        weight=torch.tensor([2 / 3, 2.0], dtype=torch.float64),
        label_smoothing=smoothing,
    )
    assert mean == pytest.approx(expected.item(), rel=1e-5)
    assert task.count(features) == pytest.approx(4.0)


def test_several_labels_a_text(folder: Path, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], [("good", "a;b"), ("bad", ""), ("fine", "b")])
    # an empty cell is no missing label here: it is a text without any
    task, model, examples, features = prepared(folder, path, separator=";")
    assert [e.label for e in examples] == [["a", "b"], [], ["b"]]
    assert [f.target for f in features] == [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    assert model.config.problem_type == "multi_label_classification"
    batch = collate(features)
    with torch.no_grad():
        logits = model(batch).logits
        mean = task.loss(model, batch, features).item() / task.count(features)
    targets = torch.tensor([f.target for f in features])
    assert mean == pytest.approx(
        torch.nn.functional.binary_cross_entropy_with_logits(logits, targets).item(), rel=1e-5
    )
    outputs = [np.array([3.0, 0.1]), np.array([-1.0, -2.0]), np.array([0.2, -0.1])]
    predictions = task.predictions(examples, features, outputs)
    assert [p.chosen for p in predictions] == [[0, 1], [], [0]]
    # true positives 2, false positives 1, false negatives 1
    scores = task.score(examples, predictions)
    assert scores["f1_micro"] == pytest.approx(4 / 6)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert task.row(examples[0], predictions[0])["label"] == ["a", "b"]


def test_labels_in_columns_and_in_lists(folder: Path, tmp_path: Path) -> None:
    table = write_csv(tmp_path / "a.csv", ["text", "toxic", "rude"], [("good", "0", "0"), ("bad", "1", "1")])
    task, _, examples, _ = prepared(folder, table, label=("toxic", "rude"))
    assert task.labels == ["toxic", "rude"] and [e.label for e in examples] == [[], ["toxic", "rude"]]
    lines = tmp_path / "b.jsonl"
    lines.write_text(
        '{"text": "good", "labels": []}\n{"text": "bad", "labels": ["x", "y"]}\n', encoding="utf-8"
    )
    task, _, examples, _ = prepared(folder, lines)
    assert task.labels == ["x", "y"] and task.main_metric == "f1_micro"
    wrong = write_csv(tmp_path / "c.csv", ["text", "toxic", "rude"], [("good", "0", "2")])
    with pytest.raises(UserError, match="row 2: '2' is neither 0 nor 1"):
        prepared(folder, wrong, label=("toxic", "rude"))


# ---- scores by hand


def test_classification_scores() -> None:
    # positives: 2 found of 3, 1 of 5 negatives taken for one
    labels, guess = [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0]
    scores = metrics.classification_scores(labels, guess, 2)
    assert scores["accuracy"] == pytest.approx(6 / 8)
    assert scores["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert scores["f1_macro"] == pytest.approx((4 / 6 + 8 / 10) / 2)
    assert scores["matthews"] == pytest.approx((2 * 4 - 1 * 1) / math.sqrt(3 * 3 * 5 * 5))
    constant = metrics.classification_scores([0, 1], [1, 1], 2)
    assert constant["matthews"] == 0 and constant["accuracy"] == 0.5


def test_regression_scores() -> None:
    scores = metrics.regression_scores([1, 2, 3, 4], [1, 3, 2, 10])
    # means 2.5 and 4; products 4.5 + 0.5 - 1 + 9 = 13; squares 5 and 50
    assert scores["pearson"] == pytest.approx(13 / math.sqrt(250))
    assert scores["spearman"] == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert scores["mse"] == pytest.approx((0 + 1 + 1 + 36) / 4)
    assert metrics.regression_scores([1, 2], [3, 3])["pearson"] == 0


def test_scores_of_a_layout_are_those_it_is_known_for(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("s\t1\t\tgood\ns\t0\t*\tbad\n", encoding="utf-8")
    task, _, examples, features = prepared(folder, path, glue="cola")
    predictions = task.predictions(examples, features, [np.array([0.0, 1.0]), np.array([1.0, 0.0])])
    assert task.score(examples, predictions) == {"matthews": 1.0} and task.main_metric == "matthews"


# ---- what is refused


def test_an_unknown_label_in_the_evaluation_file(folder: Path, tmp_path: Path) -> None:
    task = ClassifyTask(ClassifyOptions(), silent)
    train = list(task.read(write_csv(tmp_path / "a.csv", ["text", "label"], ROWS), labels_required=True))
    path = write_csv(tmp_path / "b.csv", ["text", "label"], [("fine", "pos"), ("so so", "neutral")])
    with pytest.raises(
        UserError, match=r"b.csv row 3 has the label 'neutral', which the training file does not"
    ):
        task.prepare(train, list(task.read(path, labels_required=True)))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([("good", "1"), ("bad", "1")], {}, "has the one label '1'"),
        ([(f"w{i}", f"id {i}") for i in range(120)], {}, "has 120 different labels in 120 rows"),
        ([("a", "x"), ("b", "y"), ("c", "z")], {"metric": "f1"}, "--metric f1 is for two labels"),
        ([("a", "x"), ("b", "y")], {"metric": "f1_micro"}, "--metric f1_micro does not fit"),
        ([("a", "x"), ("b", "y")], {"separator": ";", "label_smoothing": 0.1}, "are for one label a text"),
        ([("a", "x"), ("b", "y")], {"label_smoothing": 1.0}, "--label-smoothing 1.0 is out of range"),
        ([("a", "x"), ("b", "y")], {"separator": ";", "threshold": 0.0}, "--threshold 0.0 is out of range"),
        ([("a", "x"), ("b", "y")], {"glue": "stsb"}, "stsb has scores, not labels: use the task regress"),
        ([("a", "x"), ("b", "y")], {"glue": "sst2", "layout": "nsmc"}, "both name a layout"),
    ],
)
def test_options_and_labels_that_do_not_fit(
    folder: Path, tmp_path: Path, rows: list[Any], options: dict[str, Any], message: str
) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], rows)
    with pytest.raises(UserError) as caught:
        prepared(folder, path, **options)
    assert message in str(caught.value)


def test_a_head_that_exists_is_kept_if_it_fits(folder: Path, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ROWS)
    _, model, _, _ = prepared(folder, path)
    assert model.config.id2label == {0: "neg", 1: "pos"}
    model.config.id2label, model.config.label2id = {0: "pos", 1: "neg"}, {"pos": 0, "neg": 1}
    model.save_pretrained(tmp_path / "headed")
    shutil.copy(folder / "tokenizer.json", tmp_path / "headed")
    again, kept, _, features = prepared(tmp_path / "headed", path, class_weights="balanced")
    assert again.labels == ["pos", "neg"] and [f.target for f in features] == [0, 1, 1, 1]
    assert torch.equal(kept.classifier.weight, model.classifier.weight)
    assert again.weights is not None
    assert torch.allclose(again.weights, torch.tensor([2.0, 2 / 3]))
    other = write_csv(tmp_path / "b.csv", ["text", "label"], [("a", "x"), ("b", "y"), ("c", "z")])
    with pytest.raises(
        UserError, match=r"has 2 labels \(pos, neg\), and the data has 3 \(x, y, z\); give --new-head"
    ):
        prepared(tmp_path / "headed", other)
    _, fresh, _, _ = prepared(tmp_path / "headed", other, new_head=True)
    assert fresh.classifier.weight.shape == (3, 32)
    body = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(fresh.state_dict()[body], model.state_dict()[body])
    _, same_size, _, _ = prepared(tmp_path / "headed", path, new_head=True)
    assert not torch.equal(same_size.classifier.weight, model.classifier.weight)


def test_a_number_for_a_text(folder: Path, tmp_path: Path) -> None:
    rows = [("good", "film", "5.0"), ("bad", "story", "1e-1")]
    path = write_csv(tmp_path / "a.csv", ["sentence1", "sentence2", "score"], rows)
    task = RegressTask(RegressOptions(), silent)
    examples = list(task.read(path, labels_required=True))
    assert [e.label for e in examples] == [5.0, 0.1]
    task.prepare(examples, examples)
    model: Any = task.build_model(str(folder)).eval()
    assert isinstance(model, BertForSequenceClassification) and model.config.problem_type == "regression"
    features = task.features(examples, source_tokenizer(folder), 64)
    batch = collate(features)
    with torch.no_grad():
        logits = model(batch).logits.squeeze(1)
        loss = task.loss(model, batch, features).item()
    assert loss == pytest.approx(((logits - torch.tensor([5.0, 0.1])) ** 2).sum().item(), rel=1e-5)
    assert task.count(features) == 2
    for bad in ("nan", "inf", "four"):
        wrong = write_csv(tmp_path / "b.csv", ["sentence", "score"], [("good", "1"), ("bad", bad)])
        with pytest.raises(UserError, match=f"row 3 has the target '{bad}', which is no finite number"):
            list(task.read(wrong, labels_required=True))
    with pytest.raises(UserError, match="sst2 has labels, not scores: use the task classify"):
        RegressTask(RegressOptions(glue="sst2"), silent)


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r'need sklearn, which is not installed: pip install "fastbert-triton\[tasks\]"'
    ):
        metrics.require("sklearn")


def test_a_folder_without_a_tokenizer_or_of_another_kind(folder: Path, tmp_path: Path) -> None:
    from fastbert.tasks.models import source_folder

    (tmp_path / "config.json").write_text(
        (folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"holds neither a tokenizer\.json nor a vocab\.txt"):
        source_tokenizer(tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="holds a model of type 'gpt2'; only BERT runs here"):
        source_folder(tmp_path, silent)
