"""`python -m fastbert.predict`: a row for each example of a file of any size."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from fastbert.config import BertConfig
from fastbert.heads import BertForSequenceClassification
from fastbert.predict import main
from fastbert.tasks import predict, prediction
from fastbert.tasks.models import source_tokenizer
from tests.tiny_bert import reviews, tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that no run of ours wrote."""
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    torch.manual_seed(0)
    config = BertConfig.from_pretrained(folder, num_labels=3)
    body = BertForSequenceClassification(config)
    body.config.id2label = {0: "a", 1: "b", 2: "c"}
    body.save_pretrained(folder)
    return folder


def write_texts(path: Path, count: int) -> list[str]:
    texts = [text for text, _ in reviews(count, 5)]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return texts


def expected(model: Path, texts: list[str]) -> torch.Tensor:
    network = BertForSequenceClassification.from_pretrained(model)
    tokenizer = source_tokenizer(model)
    rows = [network(torch.tensor([tokenizer.encode(text).ids])).logits for text in texts]
    return torch.cat(rows).softmax(dim=-1).detach()


def test_rows_are_those_of_each_text_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "CHUNK", 7)  # more than one chunk, the last one short
    texts = write_texts(tmp_path / "a.txt", 23)
    rows = list(predict(model, tmp_path / "a.txt", tokens_per_batch=40))
    assert [row["row"] for row in rows] == list(range(1, 24))
    probabilities = torch.tensor([[row["probabilities"][name] for name in "abc"] for row in rows])
    torch.testing.assert_close(probabilities, expected(model, texts), atol=2e-6, rtol=1e-5)
    assert [row["label"] for row in rows] == ["abc"[i] for i in probabilities.argmax(dim=1)]


def test_a_file_is_streamed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come before the rest of the file is read: a bad row far behind does not hide them."""
    monkeypatch.setattr(prediction, "CHUNK", 8)
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "good film\n" * 1020 + "a,b\n", encoding="utf-8")
    rows = predict(model, path)
    assert next(rows)["row"] == 2
    with pytest.raises(ValueError, match="row 1022 has 2 columns"):
        list(rows)


def test_to_stdout_and_to_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_texts(tmp_path / "a.txt", 5)
    assert main([str(model), str(tmp_path / "a.txt")]) == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert len(rows) == len(texts) and "5 rows in" in printed.err
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        output = tmp_path / f"out{suffix}"
        assert main([str(model), str(tmp_path / "a.txt"), "--output", str(output)]) == 0
        with output.open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file, delimiter=delimiter))
        assert [row["label"] for row in table] == [row["label"] for row in rows]
        assert float(table[0]["probabilities.b"]) == rows[0]["probabilities"]["b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "out.xml"], "--output out.xml has none of the suffixes .jsonl, .tsv, .csv"),
        (["--output", "none/out.tsv"], "cannot write none/out.tsv"),
        (["--max-length", "100"], "--max-length 100 is out of range; the model takes 3 to 64 tokens"),
        (["--text", "body"], "has no column 'body', but '1'"),
        (["--tokens-per-batch", "-1"], "--tokens-per-batch -1 is out of range"),
    ],
)
def test_bad_options(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "a.txt", 3)
    assert main([str(model), "a.txt", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_left_of_a_file_that_failed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "a.csv", tmp_path / "out.tsv"
    path.write_text("text\ngood\na,b\n", encoding="utf-8")
    assert main([str(model), str(path), "--output", str(output)]) == 2
    assert "row 3 has 2 columns" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_model_without_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path / "model")
    assert main([str(folder), "a.txt"]) == 2
    assert "holds no model with a task's head; fine-tune it first" in capsys.readouterr().err
    with pytest.raises(TypeError, match="has no option 'colour'"):
        list(predict(headed(folder), "a.txt", colour=1))


def headed(folder: Path) -> Path:
    BertForSequenceClassification(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder
