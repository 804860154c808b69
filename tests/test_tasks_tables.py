"""Tables as people have them: what is read, what is guessed, and what is said of a bad row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastbert.errors import UserError
from fastbert.tasks.classify import ClassifyOptions, ClassifyTask
from fastbert.tasks.tables import open_table
from fastbert.tasks.text import TextExample, TextOptions, read_texts


def texts(path: Path, required: bool = True, **options: Any) -> tuple[list[TextExample], str]:
    said: list[str] = []
    found = read_texts(path, TextOptions(**options), labels_required=required, say=said.append)
    return list(found), said[0]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8"))
    return path


def plain(examples: list[TextExample]) -> list[tuple[Any, ...]]:
    return [(e.text, e.pair, e.label, e.row) for e in examples]


def test_csv_with_quotes_commas_and_lines_in_a_field(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\r\n"so, ""fine""\nindeed",pos\r\n\r\nbad,neg\r\n')
    examples, said = texts(path)
    assert plain(examples) == [('so, "fine"\nindeed', None, "pos", 2), ("bad", None, "neg", 5)]
    assert "text 'text', label 'label'" in said and "a header" in said


def test_tsv_keeps_its_quotes_and_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", '\ufefflabel\tsentence\n1\t" he said\n0\t"so"\n')
    assert plain(texts(path)[0]) == [('" he said', None, "1", 2), ('"so"', None, "0", 3)]
    assert [e.text for e in texts(path, quotes="no")[0]] == ['" he said', '"so"']
    quoted = write(tmp_path / "b.tsv", 'label\tsentence\n1\t"a\tb ""c"""\n0\td e\n')
    assert [e.text for e in texts(quoted, quotes="yes")[0]] == ['a\tb "c"', "d e"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_jsonl_and_parquet(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"premise": "a b", "hypothesis": None, "label": 2},
        {"premise": "c", "hypothesis": "d", "label": 0},
    ]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    numbers = (1, 3) if suffix == "jsonl" else (1, 2)  # lines, or rows
    assert plain(texts(path)[0]) == [("a b", "", 2, numbers[0]), ("c", "d", 0, numbers[1])]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("a fine film\t1\nso bad it hurts\t0\n", "no header, text number 1, label number 2"),
        ("1\ta fine film\n0\tso bad it hurts\n", "no header, text number 2, label number 1"),
        ("Comment\tMood\na fine film\t1\nso bad it is\t0\n", "a header, text 'Comment', label 'Mood'"),
        ("9\tlong words here\tpos\n11\tshort ones there\tneg\n", "text number 2, label number 3"),
        ("one two three\tfour five six\t2.5\nseven eight\tten eleven twelve\t4\n", "number 1 + number 2"),
        ("question\tsentence\tlabel\nwho is it\tit is he\tentailment\n", "text 'question' + 'sentence'"),
        ("idx\tsentence1\tsentence2\tgold_label\n0\ta b\tc d\tx\n", "'sentence2', label 'gold_label'"),
    ],
)  # fmt: skip
def test_columns_are_guessed_and_said(tmp_path: Path, text: str, columns: str) -> None:
    assert columns in texts(write(tmp_path / "a.tsv", text))[1]


def test_a_header_of_unknown_names_is_told_from_its_rows(tmp_path: Path) -> None:
    rows = "".join(f"it is number {i} here,{'spam' if i % 2 else 'ham'}\n" for i in range(20))
    assert open_table(write(tmp_path / "a.csv", "Body text,Kind\n" + rows)).has_header
    assert not open_table(write(tmp_path / "b.csv", rows)).has_header


def test_long_label_names_are_no_texts(tmp_path: Path) -> None:
    names = ("entailment", "not_entailment")
    rows = "".join(f"{i}\tit is {i} here\tso {i} there\t{names[i % 2]}_of_some_length\n" for i in range(40))
    assert "text number 2 + number 3, label number 4" in texts(write(tmp_path / "a.tsv", rows))[1]


def test_columns_by_name_and_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,first,second,mark\n7,a,b,x\n8,c,d,y\n")
    examples, _ = texts(path, text="second", pair="2", label=("mark",))
    assert plain(examples) == [("b", "a", "x", 2), ("d", "c", "y", 3)]
    assert plain(texts(path, text="first", label=("4",))[0])[0] == ("a", None, "x", 2)


def test_a_text_a_line_without_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a fine film, really\nso bad\n")
    assert plain(texts(path, required=False)[0]) == [
        ("a fine film, really", None, None, 1),
        ("so bad", None, None, 2),
    ]
    headed = write(tmp_path / "b.tsv", "index\tsentence\n0\ta b\n1\tc d\n")
    assert [e.text for e in texts(headed, required=False)[0]] == ["a b", "c d"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "text,label\n", "a header and no rows"),
        ("a.csv", "text,label\na,1\nb\n", "row 3 has 1 columns, the table has 2 ('text', 'label')"),
        ("a.csv", 'text,label\n"a" b,1\n', "row 2 is not well-formed"),
        ("a.csv", "text,label\na,1\nb,\n", "row 3 has no label (column 'label' is empty or NaN)"),
        ("a.csv", "text,label\na,\xff\n", "line 2 is not UTF-8 (its byte 3)"),
        ("a.csv", "x,y,z\n1,2,3\n2,1,3\n", "cannot tell which column"),
        ("a.jsonl", '{"text": "a", "label": 1}\n[1]\n', "line 2 is not a JSON object"),
        ("a.jsonl", '{"text": "a", "label": 1\n', "line 1 is no JSON"),
        ("a.jsonl", '{"text": {"b": 1}, "label": 1}\n', "row 1 holds a dict where text is expected"),
        ("a.parquet", "PAR1", "is not a readable parquet file"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        texts(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_column_lists_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,1\n")
    with pytest.raises(
        UserError, match="no column 'body', but 'text', 'label'; name one of them with --text"
    ):
        texts(path, text="body")
    with pytest.raises(UserError, match=r"cannot read .*: check the path"):
        texts(tmp_path / "none.csv")
    with pytest.raises(UserError, match="has no column of labels"):
        texts(write(tmp_path / "b.csv", "text\na b\nc d\n"))


# ---- published layouts

MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
MNLI = "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"


@pytest.mark.parametrize(
    ("glue", "text", "expected"),
    [
        ("cola", "gj04\t1\t\tWe won't buy.\n", ("We won't buy.", None, "acceptable")),
        ("sst2", "sentence\tlabel\nso good \t1\n", ("so good ", None, "positive")),
        ("sst2", "so good\t0\n", ("so good", None, "negative")),
        ("mrpc", MRPC + '1\t5\t6\t" A\tB\r\n', ('" A', "B", "equivalent")),
        ("qqp", QQP + "1\t2\t3\tA?\tB?\t0\n", ("A?", "B?", "not_duplicate")),
        ("mnli", MNLI + "0\tg\tA\tB\tneutral\tentailment\n", ("A", "B", "entailment")),
        ("qnli", "index\tquestion\tsentence\tlabel\n0\tA\tB\tnot_entailment\n", ("A", "B", "not_entailment")),
        ("rte", "2\tA.\tB.\tentailment\n", ("A.", "B.", "entailment")),
        ("wnli", "index\tsentence1\tsentence2\tlabel\n0\tA\tB\t1\n", ("A", "B", "entailment")),
        ("nsmc", "id\tdocument\tlabel\n1\t좋다, \"정말\"\t1\n", ('좋다, "정말"', None, "positive")),
        ("kornli", "sentence1\tsentence2\tgold_label\n가\t나\tneutral\n", ("가", "나", "neutral")),
    ],
)  # fmt: skip
def test_layouts(tmp_path: Path, glue: str, text: str, expected: tuple[Any, ...]) -> None:
    option = {"layout": glue} if glue in ("nsmc", "kornli") else {"glue": glue}
    task = ClassifyTask(ClassifyOptions(**option), lambda text: None)  # type: ignore[arg-type]
    (example,) = task.read(write(tmp_path / "a.tsv", text), labels_required=True)
    assert (example.text, example.pair, example.label) == expected


def test_a_label_that_the_layout_does_not_know(tmp_path: Path) -> None:
    task = ClassifyTask(ClassifyOptions(glue="sst2"), lambda text: None)
    path = write(tmp_path / "a.tsv", "sentence\tlabel\na\t1\nb\t2\n")
    with pytest.raises(UserError, match="row 3 has the label '2'; the labels of this data are '0', '1'"):
        list(task.read(path, labels_required=True))
    with pytest.raises(UserError, match="has 3 columns and no header"):
        list(task.read(write(tmp_path / "b.tsv", "a\tb\tc\n"), labels_required=True))
