"""Multiple choice: published layouts, any number of endings, the loss of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastbert.errors import UserError
from fastbert.finetune import main
from fastbert.tasks import predict
from fastbert.tasks.choice import ChoiceExample, ChoiceOptions, ChoiceTask
from fastbert.tasks.models import source_tokenizer
from fastbert.tasks.settings import Training
from fastbert.tasks.training import Stepper, collate, units_of
from tests.tiny_bert import BAD, GOOD, tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(
        tmp_path_factory.mktemp("tiny"), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def read(path: Path, required: bool = True, **options: Any) -> list[ChoiceExample]:
    return list(ChoiceTask(ChoiceOptions(**options), lambda text: None).read(path, labels_required=required))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


SWAG = "id,startphrase,sent1,sent2,ending0,ending1,ending2,ending3,label\n"
COSMOS = "id,context,question,answer0,answer1,label\n"
CSQA = {
    "answerKey": "B",
    "question": {
        "stem": "Where?",
        "choices": [
            {"label": "A", "text": "here"},
            {"label": "B", "text": "there"},
            {"label": "C", "text": "no"},
        ],
    },
}


@pytest.mark.parametrize(
    ("name", "text", "context", "endings", "label"),
    [
        ("a.csv", SWAG + '1,A. B,A.,B,"w, w",x,y,z,2\n', "A.", ["B w, w", "B x", "B y", "B z"], 2),
        ("a.csv", "startphrase,ending1,ending2,labels\nA,x,y,1\nB,x,y,0\n", "A", ["x", "y"], 1),
        ("a.csv", COSMOS + "1,A,Q,x,y,0\n", "A", ["Q x", "Q y"], 0),
        ("a.csv", "context,option1,option2,answer\nA,x,y,2\nB,x,y,1\n", "A", ["x", "y"], 1),
        ("a.csv", "question,answer_a,answer_b,answer_c,label\nA,x,y,,B\n", "A", ["x", "y"], 1),
        ("a.jsonl", json.dumps(CSQA), "Where?", ["here", "there", "no"], 1),
        ("a.jsonl", '{"goal": "A", "sol1": "x", "sol2": "y", "label": 0}\n', "A", ["x", "y"], 0),
    ],
)
def test_layouts(tmp_path: Path, name: str, text: str, context: str, endings: list[str], label: int) -> None:
    example = read(write(tmp_path / name, text))[0]
    assert (example.context, example.endings, example.label) == (context, endings, label)
    assert read(tmp_path / name, required=False)[0].label is None


def test_columns_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "q,p,one,two,right\nA,B,x,y,two\n")
    options = {"context": "q", "second": "p", "endings": ("one", "two"), "label": "right"}
    (example,) = read(path, **options)
    assert (example.context, example.endings, example.label) == ("A", ["B x", "B y"], 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SWAG + "1,A,B,C,w,x,y,z,4\n", "row 2 has the label '4', which is none of its 4 endings"),
        (SWAG + "1,A,B,C,w,,,,0\n", "row 2 has 1 endings, and it needs at least two"),
        ("context,label\nA,0\n", "cannot tell which columns"),
        ("x,ending0,ending1,label\nA,b,c,0\n", "cannot tell what comes before the endings"),
        ("context,ending0,ending1\nA,b,c\n", "has no column of the right ending"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(write(tmp_path / "a.csv", text))
    assert message in str(caught.value)


def test_a_question_that_is_none(tmp_path: Path) -> None:
    lines = json.dumps(CSQA) + '\n{"answerKey": "A", "question": {"stem": "Who?"}}\n'
    with pytest.raises(UserError, match="row 2 is no question with a stem and choices"):
        read(write(tmp_path / "a.jsonl", lines))


def mixed(tmp_path: Path) -> Path:
    """Examples of two to four endings."""
    lines = ["context,ending0,ending1,ending2,ending3,label"]
    lines += ["the film,good,bad,,,1", "a story,dull,x,y,z,3", "it was,fine,y,good,,2", "music,bad,good,,,0"]
    return write(tmp_path / "a.csv", "\n".join(lines) + "\n")


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_that_of_transformers_for_each_example(
    folder: Path, tmp_path: Path, padded: bool
) -> None:
    import transformers

    task = ChoiceTask(ChoiceOptions(), lambda text: None)
    examples = list(task.read(mixed(tmp_path), labels_required=True))
    torch.manual_seed(0)
    model: Any = task.build_model(str(folder)).eval()
    torch.nn.init.normal_(model.classifier.weight)
    theirs = transformers.BertForMultipleChoice(transformers.BertConfig.from_pretrained(folder)).eval()
    theirs.load_state_dict(model.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    features = task.features(examples, source_tokenizer(folder), 64)
    if padded:
        model.set_attn_implementation("eager")
    batch: Any = collate(features).padded() if padded else collate(features)
    with torch.no_grad():
        loss = task.loss(model, batch, features)
        expected = torch.zeros(())
        for example in examples:
            contexts = [example.context] * len(example.endings)
            encoded = tokenizer(contexts, example.endings, padding=True, return_tensors="pt")
            label = torch.tensor([example.label])
            expected += theirs(**{k: v[None] for k, v in encoded.items()}, labels=label).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert task.count(features) == 4


def test_a_step_keeps_endings_together_whatever_the_budget(folder: Path, tmp_path: Path) -> None:
    results = []
    for budget in (1000, 12):
        task = ChoiceTask(ChoiceOptions(), lambda text: None)
        examples = list(task.read(mixed(tmp_path), labels_required=True))
        torch.manual_seed(0)
        model = task.build_model(str(folder))
        features = task.features(examples, source_tokenizer(folder), 64)
        stepper = Stepper(task, model, Training(tokens_per_batch=budget), torch.device("cpu"), 1)
        results.append(stepper.train_step(features, units_of(features, True)).item())
        predictions = task.predictions(examples, features, stepper.outputs(features))
        assert [len(p) for p in predictions] == [2, 4, 3, 2]
        assert all(np.isclose(p.sum(), 1) for p in predictions)
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_from_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["context,ending0,ending1,label"]
    for index in range(60):
        pair = [GOOD[index % 3], BAD[index % 2]]
        label = index // 2 % 2  # the good one is right
        lines.append(f"the film,{pair[label]},{pair[1 - label]},{label}")
    path = write(tmp_path / "a.csv", "\n".join(lines) + "\n")
    output = tmp_path / "out"
    arguments = ["choice", "--model", str(folder), "--train", str(path), "--eval", str(path)]
    arguments += ["--output", str(output), "--lr", "1e-2", "--batch-size", "10"]
    assert main(arguments) == 0
    name, accuracy = capsys.readouterr().out.splitlines()[-1].split()
    assert name == "accuracy" and float(accuracy) > 0.9
    rows = list(predict(output, path))
    assert len(rows) == 60 and rows[0]["ending"] == "good" and rows[0]["row"] == 2
