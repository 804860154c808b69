"""Tagging: files and schemes, words and pieces, long sentences, entity scores, learning; a frozen body."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from fastbert import finetune as finetune_command
from fastbert.batch import IGNORE_INDEX
from fastbert.data.tokenizer import load_tokenizer
from fastbert.errors import UserError
from fastbert.heads import BertForSequenceClassification, BertForTokenClassification
from fastbert.tasks import finetune, pictures, predict
from fastbert.tasks.features import BertLstmForTokenClassification, FeatureTask
from fastbert.tasks.settings import training_defaults
from fastbert.tasks.tag import (
    Sentence,
    TagOptions,
    TagTask,
    Words,
    columns,
    entity_scores,
    parts_of,
    word_pieces,
)
from tests.small_models import small_config, spread_weights
from tests.task_batches import packed_batch
from tests.tiny_bert import tiny_folder

needs_seqeval = pytest.mark.skipif(
    importlib.util.find_spec("seqeval") is None, reason="entities are scored with seqeval (extra tasks)"
)
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] ann bob went to rome ##s par ##is . - 서울 ##에 갔 ##다"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS.split()), encoding="utf-8")
    return load_tokenizer(tmp_path / "vocab.txt", cased=True)


def task(**options: Any) -> TagTask:
    return TagTask(TagOptions(**options), lambda message: None)


def sentence(words: str, tags: str | None = None) -> Sentence:
    split = tuple(words.split())
    rows = split if tags is None else tuple(map("\t".join, zip(split, tags.split())))
    return Sentence(
        split, None if tags is None else tuple(tags.split()), rows, "file", range(1, len(split) + 1)
    )


def write(folder: Path, text: str, name: str = "file.conll") -> Path:
    (folder / name).write_bytes(text.encode())
    return folder / name


def read(
    path: Path, labels_required: bool = True, **options: Any
) -> list[tuple[list[str], list[str] | None]]:
    found = task(**options).read(path, labels_required=labels_required)
    return [(list(s.words), None if s.tags is None else list(s.tags)) for s in found]


# reading


@pytest.mark.parametrize(
    "text",
    [
        "Ann\tB-per\nwent\tO\n\nRome\tB-loc\n",
        "Ann B-per\nwent O\n\nRome B-loc",  # no line end behind the last
        "-DOCSTART- -X- -X- O\n\nAnn N X B-per\nwent V Y O\n\n\n-DOCSTART- -X- O O\n\nRome N X B-loc\n",
        "\ufeffAnn\tB-per\r\nwent\tO\r\n\t\r\nRome\tB-loc\t\r\n \t \r\n",
        "Ann B-per\nwent O\n-DOCSTART- -X- O O\nRome B-loc\n",
    ],
)
def test_reads_columns(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    expected = [(["Ann", "went"], ["B-per", "O"]), (["Rome"], ["B-loc"])]
    assert read(path) == expected
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    for found in task().read(path, labels_required=True):
        for word, line in zip(found.words, found.lines):
            assert lines[line - 1].startswith(word)


def test_words_may_hold_what_elsewhere_separates() -> None:
    assert columns("New York\tB-loc") == ["New York", "B-loc"]
    assert columns("\u200b\tO") == ["\u200b", "O"]
    assert columns("\tO") == ["", "O"]
    assert columns("a\u00a0b  O ") == ["a\u00a0b", "O"]


def test_line_separators_inside_a_word(tmp_path: Path) -> None:
    assert read(write(tmp_path, "a\u2028b\tO\nc\x85d\tO\n")) == [(["a\u2028b", "c\x85d"], ["O", "O"])]


def test_reads_chosen_columns_and_unlabelled_words(tmp_path: Path) -> None:
    path = write(tmp_path, "1\tAnn\tB-per\tO\n2\twent\tO\tO\n")
    assert read(path, word_column=1, tag_column=2) == [(["Ann", "went"], ["B-per", "O"])]
    assert read(write(tmp_path, "Ann\nwent\n\nRome\n"), False) == [(["Ann", "went"], None), (["Rome"], None)]


def test_reads_json_lines(tmp_path: Path) -> None:
    rows = [
        {"tokens": ["Ann", "New York"], "tags": ["B-per", "B-loc"]},
        {"words": ["went"], "ner": ["O"]},
        {"tokens": [], "tags": []},
    ]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n", "file.jsonl")
    expected = [(["Ann", "New York"], ["B-per", "B-loc"]), (["went"], ["O"]), ([], [])]
    assert read(path) == expected
    assert read(write(tmp_path, '{"tokens": ["Ann"]}', "file.jsonl"), False) == [(["Ann"], None)]


def test_reads_klues_lines_without_its_comments(tmp_path: Path) -> None:
    text = (
        "## klue-ner-v1_dev_00000-nsmc\t<서울:LC> 가\n서\tB-LC\n울\tI-LC\n \tO\n가\tO\n\n"
        "## klue-ner-v1_dev_00001-nsmc\t## 나\n##\tO\n나\tO\n"
    )
    path = write(tmp_path, text, "klue.tsv")
    assert read(path) == [(["서", "울", " ", "가"], ["B-LC", "I-LC", "O", "O"]), (["##", "나"], ["O", "O"])]
    assert [list(s.lines) for s in task().read(path, labels_required=True)] == [[2, 3, 4, 5], [8, 9]]
    assert read(write(tmp_path, "## O\na O\n")) == [(["##", "a"], ["O", "O"])]  # a word, no comment


def test_numbers_of_json_lines_are_the_labels_and_it_is_said_once(tmp_path: Path) -> None:
    rows = [{"tokens": ["Ann", "went"], "ner_tags": [10, 2]}, {"tokens": ["Rome"], "ner_tags": [0]}]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)), "file.jsonl")
    said: list[str] = []
    asked = TagTask(TagOptions(), said.append)
    sentences = list(asked.read(path, labels_required=True))
    assert [s.tags for s in sentences] == [("10", "2"), ("0",)]
    assert len(said) == 1 and "ner_tags" in said[0] and "numbers without names" in said[0]
    asked.prepare(sentences, [])
    assert asked.labels == ["0", "2", "10"] and asked.main_metric == "accuracy"


NAMES = {"names": ["O", "B-per", "I-per"], "_type": "ClassLabel"}


@pytest.mark.parametrize(
    "feature",
    [{"feature": NAMES, "_type": "Sequence"}, {"feature": NAMES, "_type": "List"}, [NAMES]],
)
def test_numbers_of_parquet_take_the_names_that_datasets_wrote(tmp_path: Path, feature: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    info = {"info": {"features": {"tokens": {"feature": {"dtype": "string"}}, "ner_tags": feature}}}
    table = pyarrow.table({"tokens": [["Ann", "Lee"], ["went"], []], "ner_tags": [[1, 2], [0], []]})
    path = tmp_path / "file.parquet"
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), path)
    expected = [(["Ann", "Lee"], ["B-per", "I-per"]), (["went"], ["O"]), ([], [])]
    assert read(path) == expected
    parquet.write_table(table, path)  # without names
    assert read(path)[0] == (["Ann", "Lee"], ["1", "2"])
    bad = pyarrow.table({"tokens": [["Ann"]], "ner_tags": [[3]]})
    parquet.write_table(bad.replace_schema_metadata({"huggingface": json.dumps(info)}), path)
    with pytest.raises(UserError, match="row 1: the tag 3 has no name; the file has 3"):
        read(path)
    with pytest.raises(UserError, match="not a readable parquet file"):
        read(write(tmp_path, "no parquet", "other.parquet"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.conll", "", "holds no sentence"),
        ("f.conll", "-DOCSTART- O\n\n", "holds no sentence"),
        (
            "f.conll",
            "Ann O\n\nAnn O\nwent\n",
            "line 4: 'went' has 1 column; each line needs a word and its tag",
        ),
        ("f.jsonl", "[1", "line 1 is not a JSON object"),
        ("f.jsonl", '{"text": "Ann"}', r"line 1 has no list of words: name it 'tokens' \(it holds 'text'\)"),
        ("f.jsonl", '\n{"tokens": ["Ann"]}', "line 2 has no list of tags"),
        ("f.jsonl", '{"tokens": ["Ann"], "tags": ["O", "O"]}', "1 words and 2 tags"),
        (
            "f.jsonl",
            '{"tokens": ["Ann"], "tags": [0.5]}',
            "'tags' is .0.5.; give a list of texts or of whole",
        ),
        ("f.jsonl", '{"tokens": ["Ann", "b"], "tags": [0, "O"]}', "give a list of texts or of whole numbers"),
        ("f.jsonl", '{"tokens": [1], "tags": [0]}', "'tokens' is .1.; give a list of texts$"),
        ("f.jsonl", '{"tokens": "Ann", "tags": ["O"]}', "'tokens' is Ann"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(write(tmp_path, text, name))


def test_columns_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 1: 'Ann O' has 2 columns, and column 3 is asked for"):
        read(write(tmp_path, "Ann O\n"), tag_column=3)
    with pytest.raises(UserError, match="line 2: 'went' has 1 column; each line"):
        read(write(tmp_path, "Ann O\nwent\n"), labels_required=False)
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path / "absent.conll")


# schemes


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-a I-a O B-a", "B-a I-a O B-a"),  # BIO
        ("I-a I-a B-a I-b O I-a", "B-a I-a B-a B-b O B-a"),  # IOB1
        ("I-a O I-b I-b", "B-a O B-b I-b"),  # IO
        ("B-a I-a E-a S-b O", "B-a I-a E-a S-b O"),  # BIOES
        ("B-a I-a L-a U-b O", "B-a I-a E-a S-b O"),  # BILOU
        ("NN VB I", "NN VB I"),  # no entities
    ],
)
def test_schemes(tmp_path: Path, tags: str, expected: str) -> None:
    path = write(tmp_path, "".join(f"w {tag}\n" for tag in tags.split()))
    assert read(path)[0][1] == expected.split()


@needs_seqeval
def test_labels_are_every_letter_of_every_type() -> None:
    asked = task()
    asked.prepare([sentence("a b c", "B-per O B-loc")], [sentence("a", "I-per")])
    assert asked.labels == ["O", "B-loc", "I-loc", "B-per", "I-per"]
    assert asked.main_metric == "f1"
    asked.prepare([sentence("a b", "S-per O")], [])
    assert asked.labels == ["O", "B-per", "I-per", "E-per", "S-per"]


def test_tags_that_are_no_entities() -> None:
    asked = task()
    asked.prepare([sentence("a b", "VB NN")], [])
    assert (asked.labels, asked.main_metric) == (["NN", "VB"], "accuracy")
    assert asked.score([sentence("a b", "VB NN"), sentence("a", "NN")], [["VB", "VB"], ["NN"]]) == {
        "accuracy": 2 / 3
    }


@needs_seqeval
def test_unknown_and_mixed_tags_are_refused() -> None:
    train = [sentence("a b", "B-per O")]
    with pytest.raises(UserError, match="file, line 2: the tag 'B-loc' of 'b' does not occur in the train"):
        task().prepare(train, [sentence("a b", "O B-loc")])
    with pytest.raises(UserError, match="file, line 1: the tag 'B_loc' of 'x' is no entity tag as 'B-per'"):
        task().prepare([*train, sentence("x", "B_loc")], [])
    with pytest.raises(UserError, match="the training file has no words"):
        task().prepare([Sentence((), (), (), "file", [])], [])


# words and pieces


def test_pieces_of_words(tokenizer: Tokenizer) -> None:
    ids = tokenizer.get_vocab()
    words = ["anns", "", "\u200b", "paris-rome", "서울에", "東"]
    expected = [
        ["ann", "##s"],
        ["[UNK]"],
        ["[UNK]"],
        ["par", "##is", "-", "rome"],
        ["서울", "##에"],
        ["[UNK]"],
    ]
    found = word_pieces(words, tokenizer, ids["[UNK]"])
    assert found == [[ids[piece] for piece in pieces] for pieces in expected]
    assert word_pieces([], tokenizer, 1) == []


@pytest.mark.parametrize(
    ("lengths", "limit", "expected"),
    [
        ([], 4, [(0, 0)]),
        ([2, 2], 4, [(0, 2)]),
        ([1] * 10, 4, [(0, 4), (4, 8), (8, 10)]),
        ([1] * 9, 4, [(0, 3), (3, 6), (6, 9)]),  # about equal: a last part of one word would know nothing
        ([3, 3, 3], 4, [(0, 1), (1, 2), (2, 3)]),
        ([4, 4], 4, [(0, 1), (1, 2)]),
    ],
)
def test_parts_of_long_sentences(lengths: list[int], limit: int, expected: list[tuple[int, int]]) -> None:
    assert parts_of(lengths, limit) == expected


def test_labels_stand_at_first_pieces(tokenizer: Tokenizer) -> None:
    asked = task()
    asked.labels = ["O", "B-a", "I-a"]
    (feature,) = asked.features([sentence("anns \u200b paris went", "B-a I-a O B-a")], tokenizer, 16)
    assert isinstance(feature, Words)
    ids = tokenizer.get_vocab()
    pieces = ["[CLS]", "ann", "##s", "[UNK]", "par", "##is", "went", "[SEP]"]
    assert feature.input_ids == [ids[piece] for piece in pieces]
    assert feature.first_pieces.tolist() == [1, 3, 4, 6]
    assert feature.target == [1, 2, 0, 1]
    (unlabelled,) = asked.features([sentence("ann")], tokenizer, 16)
    (foreign,) = asked.features([sentence("ann", "B-other")], tokenizer, 16)
    assert unlabelled.target is None and foreign.target is None
    with pytest.raises(UserError, match="--max-length 2 leaves no room"):
        asked.features([sentence("ann")], tokenizer, 2)


def test_long_sentences_are_split_and_rejoined(tokenizer: Tokenizer) -> None:
    asked = task()
    asked.labels = [str(number) for number in range(20)]
    words = " ".join(["anns", "bob", "paris-rome", "went", "to"] * 4)
    examples = [
        sentence("bob", "7"),
        sentence(words, " ".join(str(number) for number in range(20))),
        Sentence((), (), (), "file", []),
    ]
    features = asked.features(examples, tokenizer, max_length=8)
    assert max(len(feature.input_ids) for feature in features) <= 8 and len(features) > 5
    outputs = [np.eye(20, dtype=np.float32)[feature.target] for feature in features]
    predictions = asked.predictions(examples, features, outputs)
    assert predictions == [["7"], [str(number) for number in range(20)], []]
    # a word that is longer than the limit keeps its first pieces
    (feature,) = asked.features([sentence("paris-rome", "1")], tokenizer, max_length=4)
    assert len(feature.input_ids) == 4 and feature.target == [1]


# the model


def test_loss_is_that_of_the_model_in_both_layouts(tokenizer: Tokenizer) -> None:
    asked = task()
    asked.labels = ["O", "B-a", "I-a"]
    examples = [
        sentence("anns went to paris", "B-a O O I-a"),
        sentence("bob", "B-a"),
        Sentence((), (), (), "f", []),
    ]
    features = asked.features(examples, tokenizer, 16)
    assert asked.count(features) == 5.0
    model = BertForTokenClassification(small_config(num_labels=3)).double()
    spread_weights(model)
    batch = packed_batch(features)
    labels = torch.full_like(batch.input_ids, IGNORE_INDEX)
    labels[[1, 3, 4, 5, 9]] = torch.tensor([1, 0, 0, 2, 1])  # [CLS] ann ##s went to par ##is [SEP] [CLS] bob
    expected = model(batch, labels=labels).loss.item() * 5
    for layout in (batch, batch.padded()):
        assert asked.loss(model, layout, features).item() == pytest.approx(expected, rel=1e-6)
        outputs = asked.outputs(model, layout, features)
        assert [row.shape for row in outputs] == [(4, 3), (1, 3), (0, 3)]
    asked.loss(model, batch, features).backward()
    assert model.classifier.weight.grad is not None and bool(model.classifier.weight.grad.any())


@needs_seqeval
def test_a_head_that_exists_is_kept_where_its_labels_fit(tmp_path: Path) -> None:
    names = ["B-loc", "B-per", "I-loc", "I-per", "O", "B-org", "I-org"]
    config = small_config(id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
    old = BertForTokenClassification(config)
    old.save_pretrained(tmp_path / "old")

    def build(train: list[Sentence], **options: Any) -> tuple[TagTask, Any]:
        asked = task(**options)
        asked.prepare(train, [])
        return asked, asked.build_model(str(tmp_path / "old"))

    asked, model = build(EXAMPLES)
    assert asked.labels == names and model.config.id2label == dict(enumerate(names))
    assert torch.equal(model.classifier.weight, old.classifier.weight)
    asked, model = build(EXAMPLES, new_head=True)
    assert asked.labels == ["O", "B-loc", "I-loc", "B-per", "I-per"]
    assert model.classifier.weight.shape == (5, 64) and model.config.id2label[1] == "B-loc"
    with pytest.raises(UserError, match=r"has 7 labels .* and the data has 3 .* give --new-head"):
        build([sentence("a", "B-food")])
    # the head of another task is none for this one
    BertForSequenceClassification(small_config(num_labels=5)).save_pretrained(tmp_path / "old")
    asked, model = build(EXAMPLES)
    assert not torch.equal(model.classifier.weight, torch.zeros(5, 64)) and len(asked.labels) == 5
    with pytest.raises(UserError, match="has no BertForTokenClassification head; fine-tune it first"):
        task().load_model(str(tmp_path / "old"))


def train(asked: TagTask, model: Any, features: list[Any], *, steps: int, lr: float) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    batch = packed_batch(features)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        (asked.loss(model, batch, features) / asked.count(features)).backward()
        optimizer.step()
    model.eval()


EXAMPLES = [
    sentence("ann went to rome .", "B-per O O B-loc O"),
    sentence("bob went to paris rome .", "B-per O O B-loc I-loc O"),
    sentence("서울에 갔다", "B-loc O"),
    sentence("ann bob \u200b went", "B-per I-per I-per O"),
]


@needs_seqeval
def test_learns_entities_and_writes_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = task()
    asked.prepare(EXAMPLES, EXAMPLES)
    features = asked.features(EXAMPLES, tokenizer, 32)
    model = BertForTokenClassification(small_config(num_labels=len(asked.labels)))
    train(asked, model, features, steps=30, lr=3e-3)
    predictions = asked.predictions(
        EXAMPLES, features, asked.outputs(model, packed_batch(features), features)
    )
    assert predictions == [list(example.tags or ()) for example in EXAMPLES]
    assert asked.score(EXAMPLES, predictions) == {
        "accuracy": 1.0,
        "precision": 1.0,
        "recall": 1.0,
        "f1": 1.0,
        "f1_loc": 1.0,
        "f1_per": 1.0,
    }
    path = asked.write_predictions(tmp_path, EXAMPLES, predictions)
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines[:6] == ["ann\tB-per\tB-per", "went\tO\tO", "to\tO\tO", "rome\tB-loc\tB-loc", ".\tO\tO", ""]
    assert read(path, tag_column=1) == read(path) == [(list(e.words), list(e.tags or ())) for e in EXAMPLES]
    assert asked.row(EXAMPLES[2], predictions[2]) == {"tokens": ["서울에", "갔다"], "tags": ["B-loc", "O"]}


def test_written_columns_keep_the_separator_of_the_file(tmp_path: Path) -> None:
    spaced = Sentence(("a", "b"), ("O", "O"), ("a X O", "b Y O"), "f", range(1, 3))
    single = Sentence(("a",), None, ("a",), "f", range(1, 2))
    path = task().write_predictions(tmp_path, [spaced, single], [["O", "B-x"], ["O"]])
    assert path.read_text() == "a X O O\nb Y O B-x\n\na\tO\n\n"


# scores


@needs_seqeval
def test_entity_scores_by_hand() -> None:
    """4 entities, 4 found, 1 of them right: the others have another type, another end, another place."""
    golds = [["B-per", "I-per", "O", "B-loc", "O"], ["B-per", "B-per", "O", "O", "O"]]
    found = [["B-per", "I-per", "O", "B-per", "O"], ["B-per", "I-per", "O", "O", "B-loc"]]
    # right is the first. "B-per B-per" are two entities, found as one of two words. per: 1 of 3 found, of 3
    scores = entity_scores(golds, found)
    assert scores == pytest.approx(
        {"precision": 1 / 4, "recall": 1 / 4, "f1": 1 / 4, "f1_per": 1 / 3, "f1_loc": 0.0}
    )
    # BIOES and an entity that begins with I- are the same entities
    assert entity_scores([["B-a", "E-a", "S-b"]], [["I-a", "I-a", "B-b"]])["f1"] == 1.0


@needs_seqeval
def test_entity_scores_where_there_are_none() -> None:
    nothing = {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert entity_scores([["O", "O"]], [["O", "O"]]) == nothing
    assert entity_scores([["B-a"]], [["O"]]) == {**nothing, "f1_a": 0.0}
    assert entity_scores([["O"]], [["B-a"]]) == {**nothing, "f1_a": 0.0}


def test_the_confusion_matrix_is_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "confusion_matrix", lambda *arguments: drawn.append(arguments))
    asked = task()
    asked.labels = ["O", "B-loc", "I-loc", "B-per", "I-per"]
    examples = [sentence("a b", "B-per O"), sentence("c", "I-loc")]
    asked.draw(Path("out"), examples, [["I-per", "B-loc"], ["O"]])
    ((path, truth, guess, kinds),) = drawn
    assert (path, kinds) == (Path("out/confusion_matrix.png"), ["O", "loc", "per"])
    assert (truth.tolist(), guess.tolist()) == ([2, 0, 1], [2, 1, 0])


# features


class SmallLstm(BertLstmForTokenClassification):
    lstm_size = 24


class SmallFeatureTask(FeatureTask):
    model_class = SmallLstm


def feature_task() -> FeatureTask:
    return SmallFeatureTask(TagOptions(), lambda message: None)


def lstm_model(num_labels: int, **overrides: Any) -> BertLstmForTokenClassification:
    return SmallLstm(small_config(**{"num_hidden_layers": 5, "num_labels": num_labels, **overrides}))


def test_features_are_the_last_four_layers_at_first_pieces(tokenizer: Tokenizer) -> None:
    asked = feature_task()
    asked.labels = ["O", "B-a"]
    features = asked.features([sentence("anns went", "B-a O"), sentence("paris", "B-a")], tokenizer, 16)
    model = lstm_model(2, hidden_dropout_prob=0.5).train()
    seen = []
    model.lstm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    batch = packed_batch(features)
    asked.loss(model, batch, features).backward()
    with torch.no_grad():
        layers = model.bert.eval()(batch, output_hidden_states=True).hidden_states
    expected = torch.cat(layers[-4:], dim=-1)[[1, 3, 6]]  # [CLS] ann ##s went [SEP] [CLS] par
    found = torch.cat([features[0].hidden, features[1].hidden])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert seen[0].data.shape == (3, 4 * 64)
    # the body is asked once, and is not trained
    model.bert.register_forward_pre_hook(lambda *_: pytest.fail("the body ran again"))
    asked.loss(model, batch, features)
    assert all(parameter.grad is None for parameter in model.bert.parameters())
    assert all(bool(parameter.grad.any()) for parameter in model.lstm.parameters())


def test_a_sentence_does_not_see_its_neighbours(tokenizer: Tokenizer) -> None:
    asked = feature_task()
    asked.labels = ["O", "B-a"]
    model = lstm_model(2).eval()
    examples = [sentence("anns went to rome"), Sentence((), None, (), "f", []), sentence("paris")]
    together = asked.features(examples, tokenizer, 16)
    outputs = asked.outputs(model, packed_batch(together), together)
    padded = asked.features(examples, tokenizer, 16)
    others = asked.outputs(model, packed_batch(padded).padded(), padded)
    for example, row, other in zip(examples, outputs, others):
        (feature,) = asked.features([example], tokenizer, 16)
        (alone,) = asked.outputs(model, packed_batch([feature]), [feature])
        np.testing.assert_allclose(row, alone, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row, other, rtol=1e-5, atol=1e-6)
    assert [row.shape for row in outputs] == [(4, 2), (0, 2), (1, 2)]


@needs_seqeval
def test_features_learn_and_are_loaded_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = feature_task()
    asked.prepare(EXAMPLES, EXAMPLES)
    body = BertForTokenClassification(small_config(num_hidden_layers=4))
    body.save_pretrained(tmp_path / "body")
    tokenizer.save(str(tmp_path / "body" / "tokenizer.json"))
    model = asked.build_model(str(tmp_path / "body"))
    assert isinstance(model, BertLstmForTokenClassification)
    assert model.config.id2label[1] == asked.labels[1]
    assert 0 < model.lstm.weight_ih_l0.abs().max() <= 24**-0.5
    features = asked.features(EXAMPLES, tokenizer, 32)
    train(asked, model, features, steps=30, lr=1e-2)
    for name, parameter in body.bert.named_parameters():
        torch.testing.assert_close(parameter, model.bert.get_parameter(name), rtol=0, atol=0)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save(str(tmp_path / "saved" / "tokenizer.json"))
    again = feature_task()
    loaded = again.load_model(str(tmp_path / "saved"))
    assert again.labels == asked.labels and loaded.config.architectures == ["SmallLstm"]
    fresh = again.features(EXAMPLES, tokenizer, 32)
    predictions = again.predictions(EXAMPLES, fresh, again.outputs(loaded, packed_batch(fresh), fresh))
    assert predictions == [list(example.tags or ()) for example in EXAMPLES]


def test_a_shallow_body_is_refused_and_the_size_is_the_papers() -> None:
    with pytest.raises(UserError, match="the last 4 layers, and the model has 2"):
        BertLstmForTokenClassification(small_config())
    with torch.device("meta"):
        lstm = BertLstmForTokenClassification(small_config(num_hidden_layers=4)).lstm
    assert (lstm.input_size, lstm.hidden_size, lstm.num_layers, lstm.bidirectional) == (256, 768, 2, True)


@needs_seqeval
def test_real_files_are_read(shared_data: Path) -> None:
    asked, folder = task(), shared_data / "wnut17"
    counts = {}
    files = {}
    for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"):
        files[name] = list(asked.read(folder / name, labels_required=True))
        counts[name] = (len(files[name]), sum(len(s.words) for s in files[name]))
    assert list(counts.values()) == [(3394, 62730), (1009, 15733), (1287, 23394)]
    asked.prepare(
        files["wnut17train.conll"], [*files["emerging.dev.conll"], *files["emerging.test.annotated"]]
    )
    assert len(asked.labels) == 13


def test_a_new_head_alone_learns_at_a_rate_of_its_own() -> None:
    assert (training_defaults(TagTask).lr, training_defaults(FeatureTask).lr) == (5e-5, 1e-3)
    files = ["--model", "m", "--train", "t", "--output", "o"]
    assert finetune_command._parse("features", files).training.lr == 1e-3
    assert finetune_command._parse("features", [*files, "--lr", "3e-4"]).training.lr == 3e-4
    assert finetune_command._parse("tag", files).training.lr == 5e-5


@needs_seqeval
@pytest.mark.parametrize(("name", "lr"), [("tag", 2e-3), ("features", 1e-2)])
def test_from_file_to_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lr: float) -> None:
    """A run learns its six sentences, scores them, and the saved folder tags words without tags."""
    monkeypatch.setattr(BertLstmForTokenClassification, "lstm_size", 24)
    body = tiny_folder(tmp_path / "body", num_hidden_layers=4)
    text = "the\tO\ngood\tB-per\nfilm\tI-per\n\nbad\tB-loc\nmusic\tO\n\n좋다\tB-per\n\u200b\tO\n\n"
    train, words = (
        write(tmp_path, text * 2, "train.conll"),
        write(tmp_path, "bad\nmusic\n\n\n좋다\n", "words.txt"),
    )
    out = tmp_path / "out"
    options = {"epochs": 30, "batch_size": 6, "lr": lr, "warmup": 0.0, "eval_every": 30}
    result = finetune(name, model=body, train=train, eval=train, output=out, **options)
    assert (result.main_metric, result.scores["f1"], result.scores["f1_loc"]) == ("f1", 1.0, 1.0)
    assert (out / "predictions.conll").read_text(encoding="utf-8").split("\n")[:2] == [
        "the\tO\tO",
        "good\tB-per\tB-per",
    ]
    assert (out / "confusion_matrix.png").stat().st_size > 1000
    expected = [{"tokens": ["bad", "music"], "tags": ["B-loc", "O"]}, {"tokens": ["좋다"], "tags": ["B-per"]}]
    assert list(predict(out, words)) == expected
