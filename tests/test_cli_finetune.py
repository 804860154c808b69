"""`python -m fastbert.finetune`: a new user's way from a file of two columns, and what bad input gets."""

from __future__ import annotations

import csv
import json
import shutil
import warnings
from pathlib import Path

import pytest

from fastbert.finetune import main
from fastbert.heads import BertForSequenceClassification, BertForTokenClassification
from fastbert.tasks import run
from tests.tiny_bert import review_files, tiny_folder, write_csv


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return review_files(tmp_path_factory.mktemp("data"))


def test_a_file_of_two_columns_in_one_command(
    folder: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model then runs in transformers with its label names."""
    import transformers

    output = tmp_path / "out"
    arguments = ["classify", "--model", str(folder), "--train", str(files[0]), "--eval", str(files[1])]
    arguments += ["--output", str(output), "--lr", "1e-2", "--batch-size", "16"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "a header, text 'text', label 'label'" in printed
    scores = json.loads((output / "scores.json").read_text(encoding="utf-8"))
    assert scores["accuracy"] > 0.9
    last = printed.splitlines()[-len(scores) :]
    assert last == [f"{name} {value:.6f}" for name, value in scores.items()]
    card = (output / "README.md").read_text(encoding="utf-8")
    assert f"python -m fastbert.finetune classify --model {folder}" in card

    pipeline = transformers.pipeline("text-classification", str(output), device="cpu")
    rows = [
        json.loads(line) for line in (output / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    texts = ["good film great music good", "awful awful bad story"]
    assert [answer["label"] for answer in pipeline(texts)] == ["pos", "neg"]
    with files[1].open(encoding="utf-8", newline="") as file:
        first = next(iter(csv.DictReader(file)))
    (answer,) = pipeline([first["text"]])
    assert rows[0]["label"] == answer["label"] and rows[0]["row"] == 2
    assert rows[0]["probabilities"][answer["label"]] == pytest.approx(answer["score"], abs=1e-5)


def test_regression_from_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("good " * n, "bad " * (6 - n), n) for n in range(1, 6)] * 4
    train = write_csv(tmp_path / "a.csv", ["sentence1", "sentence2", "score"], rows)
    arguments = ["regress", "--model", str(folder), "--train", str(train), "--eval", str(train)]
    arguments += ["--output", str(tmp_path / "out"), "--lr", "1e-2", "--epochs", "6", "--batch-size", "10"]
    assert main(arguments) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines()[-3:])
    assert set(printed) == {"pearson", "spearman", "mse"} and float(printed["pearson"]) > 0.5


def test_help_lists_tasks_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "tasks: classify, regress" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["regress", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--glue" in text and "--layer-decay" in text and "--class-weights" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "translate"}, "'translate' is not a task; the tasks are classify, regress"),
        ({"--model": "nowhere"}, "nowhere is no folder"),
        ({"--train": "none.csv"}, "cannot read none.csv"),
        ({"--epochs": "0"}, "--epochs 0 is out of range; give a value at least 1"),
        ({"--lr": "nan"}, "--lr nan is out of range"),
        ({"--max-length": "65"}, "--max-length 65 is out of range; the model takes 64 tokens"),
        ({"--device": "warp"}, "--device warp cannot be used here"),
        ({"--precision": "fp16"}, "--precision fp16 needs a GPU"),
        ({"--text": "body"}, "has no column 'body', but 'text', 'label'"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path,
    files: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str],
    message: str,
) -> None:
    options = {"--model": str(folder), "--train": str(files[0]), "--eval": str(files[1])}
    options |= {"--output": str(tmp_path / "out"), **change}
    task = options.pop("task", "classify")
    assert main([task, *(word for pair in options.items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train", "", "is empty"),
        ("train", "text,label\na,pos\nb\n", "row 3 has 1 columns"),
        ("train", "text,label\na,pos\nb\xff,neg\n", "line 3 is not UTF-8"),
        ("eval", "text,label\na,pos\nb,meh\n", "row 3 has the label 'meh', which the training file does not"),
        ("eval", "text,label\n", "holds a header and no rows"),
        ("test", "text,label\na,meh\n", "row 2 has the label 'meh'"),
        ("tokenizer", "", "holds neither a tokenizer.json nor a vocab.txt"),
    ],
)  # fmt: skip
def test_bad_data_is_met_before_training(
    folder: Path,
    files: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
    message: str,
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_bytes(content.encode("latin-1"))
    model = folder
    if name == "tokenizer":
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_bytes((folder / "config.json").read_bytes())
    train = bad if name == "train" else files[0]
    evaluation = bad if name == "eval" else files[1]
    arguments = ["classify", "--model", str(model), "--train", str(train), "--eval", str(evaluation)]
    arguments += ["--output", str(tmp_path / "out"), *(["--test", str(bad)] if name == "test" else [])]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert "step 1" not in captured.out and not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", ["squad", "classify", "tag"])
def test_what_does_not_fit_is_met_before_training(
    folder: Path,
    files: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
) -> None:
    """An answer that is not in its context; a head with another number of labels, of texts and of words."""
    model = folder
    if task == "squad":
        answer = {"text": "bad", "answer_start": 0}
        train = tmp_path / "train.json"
        row = {"id": "7", "question": "good", "context": "the film", "answers": [answer]}
        train.write_text(json.dumps([row]), encoding="utf-8")
        message = "question '7': the answer 'bad' is not at character 0 of its context, where 'the' stands"
    else:
        pytest.importorskip("sklearn" if task == "classify" else "seqeval")
        heads = {"classify": BertForSequenceClassification, "tag": BertForTokenClassification}
        model = tmp_path / "model"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the head is new
            heads[task].from_pretrained(folder, num_labels=5).save_pretrained(model)
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            shutil.copy(folder / name, model)
        train = files[0]
        if task == "tag":
            train = tmp_path / "train.conll"
            train.write_text("good\tB-per\nfilm\tO\n", encoding="utf-8")
        message = "has 5 labels (LABEL_0, LABEL_1, LABEL_2, LABEL_3, LABEL_4), and the data has "
        message += (
            "3 (O, B-per, I-per); give --new-head" if task == "tag" else "2 (neg, pos); give --new-head"
        )
    output = tmp_path / "out"
    arguments = [task, "--model", str(model), "--train", str(train), "--eval", str(train)]
    assert main([*arguments, "--output", str(output)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert "step 1" not in captured.out and not (output / "model.safetensors").exists()


def test_few_steps_are_said(
    folder: Path,
    files: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("sklearn")
    arguments = ["classify", "--model", str(folder), "--train", str(files[0]), "--eval", str(files[1])]
    arguments += ["--epochs", "1"]
    hint = "3 steps are few to learn from: try more --epochs or a smaller --batch-size"  # 96 examples
    assert main([*arguments, "--output", str(tmp_path / "a")]) == 0
    assert hint in capsys.readouterr().out
    monkeypatch.setattr(run, "FEW_STEPS", 3)
    assert main([*arguments, "--output", str(tmp_path / "b")]) == 0
    assert "few to learn from" not in capsys.readouterr().out


def test_another_model_in_the_output_folder_is_not_touched(
    folder: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "model.safetensors").read_bytes()
    arguments = ["classify", "--model", str(folder), "--train", str(files[0]), "--output", str(folder)]
    assert main(arguments) == 2
    assert "holds a model that no fine-tuning run wrote" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == before
