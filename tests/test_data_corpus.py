"""Corpora: what each reader makes of a file, how formats are recognised, what is refused."""

from __future__ import annotations

import gzip
import json
import re
import time
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastbert.data import readers
from fastbert.data.corpus import open_corpus
from fastbert.errors import UserError


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def documents(path: str, format: str = "auto", text_column: str | None = None) -> list[list[str]]:
    return list(open_corpus([path], format=format, text_column=text_column).documents())


# ---- formats


def test_sentences_a_line_each_and_blank_lines_between_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "One. Still one.\nTwo.\n \n\n\nThree.\r\n\r\nFour.\n")
    assert documents(path) == [["One. Still one.", "Two."], ["Three."], ["Four."]]
    assert open_corpus([path]).description == "a: 1 file, 0.0 MB, sentences"


def test_prose_joins_wrapped_lines_and_ends_documents_at_two_blank_lines(tmp_path: Path) -> None:
    text = (
        "It was a dark\nand stormy night. The\nrain fell.\n\nNobody\nwas out.\n\n\nNext day the\nsun shone.\n"
    )
    assert documents(write(tmp_path / "a.txt", text)) == [
        ["It was a dark and stormy night.", "The rain fell.", "Nobody was out."],
        ["Next day the sun shone."],
    ]


def test_prose_long_lines_are_paragraphs(tmp_path: Path) -> None:
    first, second = "This is a sentence. " * 20, "So is this one. " * 20
    got = documents(write(tmp_path / "a.txt", f"{first}\n{second}\n"))
    assert got == [["This is a sentence."] * 20 + ["So is this one."] * 20]
    assert open_corpus([str(tmp_path / "a.txt")]).description.endswith("prose")


def test_prose_book_loses_licence_contents_and_title_page(tmp_path: Path) -> None:
    text = (
        "\ufeffThe Project Gutenberg EBook of Whales\n\nYou may copy it.\n\n\n"
        "*** START OF THIS PROJECT GUTENBERG EBOOK WHALES\nAND MORE ***\n\n\n\nProduced by Someone\n\n\n\n"
        "CONTENTS\n\nCHAPTER 1. Loomings.\n\nCHAPTER 2. The Bag.\n\n\n"
        "CHAPTER 1. Loomings.\n\nCall me Ishmael. Some years\nago I sailed.\n\n\n"
        "  A song of the sea,\n  of the sea.\n\n\n"
        "And on we went.\n\n\nCHAPTER 2. The Bag.\n\nI stuffed a shirt.\n\n\n"
        "End of Project Gutenberg's Whales\n\n*** END OF THIS PROJECT GUTENBERG EBOOK ***\nLicence text.\n"
    )
    assert documents(write(tmp_path / "a.txt", text.replace("\n", "\r\n"))) == [
        [
            "CHAPTER 1.",
            "Loomings.",
            "Call me Ishmael.",
            "Some years ago I sailed.",
            "A song of the sea, of the sea.",
            "And on we went.",
        ],
        ["CHAPTER 2.", "The Bag.", "I stuffed a shirt."],
    ]


def test_prose_without_gaps_is_cut_into_runs_at_paragraphs(tmp_path: Path) -> None:
    paragraph = "word " * 299 + "end.\n"  # 300 words: 7 paragraphs reach 2,000
    got = documents(write(tmp_path / "a.txt", "\n".join([paragraph] * 16)), format="prose")
    assert [len(document) for document in got] == [7, 7, 2]


def test_wikiextractor(tmp_path: Path) -> None:
    text = (
        '<doc id="1" url="u" title="Ant">\nAnt\n\nAnts live. They work.\nHistory.\n</doc>\n'
        '<doc id="2" url="u" title="Bee">\nBee\n\nBees fly.\n\n</doc>\n'
    )
    assert documents(write(tmp_path / "wiki_00", text)) == [
        ["Ant", "Ants live.", "They work.", "History."],
        ["Bee", "Bees fly."],
    ]


def test_wikitext_titles_stand_between_blank_lines(tmp_path: Path) -> None:
    text = (
        " \n = Ant <unk> = \n \n Ants <unk> . They work . \n \n = = Life = = \n \n"
        " Long k \n = 1 / s and x = \n end \n"
        " \n = Bee = \n \n Bees fly . \n \n"
    )
    assert documents(write(tmp_path / "wiki.txt", text)) == [
        ["Ant <unk>", "Ants <unk> .", "They work .", "Life", "Long k", "1 / s and x", "end"],
        ["Bee", "Bees fly ."],
    ]


def test_jsonl_rows_are_documents_and_null_is_none(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "text": "A cat. A dog."},
        {"id": 2, "text": None},
        {"id": 3, "text": "새\u2028줄 \ud800."},
    ]
    path = write(tmp_path / "a.jsonl", "".join(f"{json.dumps(row)}\n\n" for row in rows))
    assert documents(path) == [["A cat.", "A dog."], ["새", "줄 \ufffd."]]


def test_jsonl_whose_first_text_is_null(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": None}, {"id": "b", "text": "둘째 글이다."}]
    path = write(tmp_path / "a.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    assert documents(path) == [["둘째 글이다."]]


def test_a_picture_in_a_corpus_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "c" / "a.txt", "글이다.\n")
    write(tmp_path / "c" / "b.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0")
    with pytest.raises(UserError, match=r"b\.png is no text .*: remove it .* glob such as 'corpus/\*\.txt'"):
        open_corpus([str(tmp_path / "c")])
    assert documents(str(tmp_path / "c" / "*.txt")) == [["글이다."]]


def test_compressed_text_and_addresses(tmp_path: Path) -> None:
    write(tmp_path / "c" / "b.txt", "둘째 글이다.\n")
    write(tmp_path / "c" / "a.txt.gz", gzip.compress("첫째 글이다.\n".encode()))
    write(tmp_path / "c" / ".hidden" / "x.txt", "숨은 글이다.\n")
    expected = [["첫째 글이다."], ["둘째 글이다."]]
    assert documents(str(tmp_path / "c")) == expected
    assert documents(f"file://{tmp_path}/c") == expected
    assert documents(f"file://{tmp_path}/c/*.txt") == expected[1:]
    assert documents(f"file://{tmp_path}/c/a.txt.gz") == expected[:1]
    with pytest.raises(UserError, match=r"the corpus address file://.*/\*.md holds no files"):
        open_corpus([f"file://{tmp_path}/c/*.md"])
    with pytest.raises(UserError, match=r"cannot read file://.*/no.txt \(.*\)"):
        open_corpus([f"file://{tmp_path}/no.txt"])


def test_jsonl_line_separators_inside_strings_end_no_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one\u2028two"}\n')
    assert documents(path) == [["one", "two"]]


def test_parquet_streams_row_groups(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    texts = [f"Row {i} here. Done." for i in range(2500)]
    pq.write_table(pa.table({"n": list(range(2500)), "content": texts}), path, row_group_size=700)
    assert documents(path) == [[f"Row {i} here.", "Done."] for i in range(2500)]


def test_text_column_is_guessed_or_named(tmp_path: Path) -> None:
    only = write(tmp_path / "a.jsonl", '{"n": 1, "review": "Fine film."}\n')
    assert documents(only) == [["Fine film."]]
    known = write(tmp_path / "b.jsonl", '{"title": "T.", "body": "B."}\n')
    assert documents(known) == [["B."]]
    assert documents(known, text_column="title") == [["T."]]
    unclear = write(tmp_path / "c.jsonl", '{"left": "L.", "right": "R."}\n')
    with pytest.raises(UserError, match=r"c\.jsonl is the text: name one of 'left', 'right'"):
        open_corpus([unclear])
    with pytest.raises(UserError, match="no column 'text': its columns are 'title', 'body'"):
        open_corpus([known], text_column="text")


def test_shared_files_are_recognised(shared_data: Path) -> None:
    expected = {
        "pretrain_en/bert_sample_text.txt": ("sentences", 3),
        "pretrain_en/gutenberg_moby_dick_2701-0.txt": ("prose", 139),
        "pretrain_en/tinyshakespeare_input.txt": ("prose", 83),
        "pretrain_en/wikitext2_valid.txt": ("wikitext", 60),
        "pretrain_en/wikitext2_test.txt": ("wikitext", 60),
        "pretrain_en/enwiki_AA_wiki_00.txt": ("wikiextractor", 37),
        "pretrain_en/enwiki_AB_wiki_00.txt": ("wikiextractor", 66),
        "pretrain_ko/kowiki_wiki_00.txt": ("wikiextractor", 154),
        "pretrain_zh/zhwiki_wiki_00.jsonl": ("jsonl", 64),
    }
    for name, (format, count) in expected.items():
        corpus = open_corpus([str(shared_data / name)])
        found = list(corpus.documents())
        assert (corpus.description.split()[-1], len(found)) == (format, count), name
        assert all(sentence.strip() for document in found for sentence in document)


def test_shared_book_keeps_its_135_chapters_and_no_licence(shared_data: Path) -> None:
    found = documents(str(shared_data / "pretrain_en/gutenberg_moby_dick_2701-0.txt"))
    assert sum(document[0].startswith("CHAPTER ") for document in found) == 135
    assert not any("Gutenberg-tm" in sentence for document in found for sentence in document)


# ---- files, names, fingerprints


def test_folders_globs_and_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.txt", "c.txt", ".hidden/x.txt", "a/.hidden.txt"):
        write(tmp_path / name, f"Text of {Path(name).stem}.\n")
    first = [document[0] for document in open_corpus([str(tmp_path)]).documents()]
    assert first == ["Text of 1.", "Text of 2.", "Text of c."]
    globbed = open_corpus([str(tmp_path / "*" / "*.txt"), str(tmp_path / "a")])  # the second adds nothing new
    assert [document[0] for document in globbed.documents()] == ["Text of 1.", "Text of 2."]
    assert globbed.name == "1-and-1-more"
    assert open_corpus([str(tmp_path / "c.txt")]).name == "c"
    assert open_corpus([str(tmp_path / "a")]).name == "a"


def test_documents_can_be_read_again(tmp_path: Path) -> None:
    corpus = open_corpus([write(tmp_path / "a.txt", "One.\n\nTwo.\n")])
    assert list(corpus.documents()) == list(corpus.documents()) == [["One."], ["Two."]]


def test_fingerprint_is_of_content_and_format_not_of_place(tmp_path: Path) -> None:
    one = open_corpus([write(tmp_path / "a.txt", "One.\nTwo.\n")])
    same = open_corpus([write(tmp_path / "deep/b.txt", "One.\nTwo.\n")])
    other = open_corpus([write(tmp_path / "c.txt", "One.\nTwo!\n")])
    prose = open_corpus([str(tmp_path / "a.txt")], format="prose")
    prints = [corpus.fingerprint() for corpus in (one, same, other, prose)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert re.fullmatch("[0-9a-f]{64}", prints[0])


def test_bom_and_decomposed_hangul(tmp_path: Path) -> None:
    text = "한국어 글. 각하는 값."
    composed = documents(write(tmp_path / "nfc.txt", f"\ufeff{text}\n"))
    decomposed = documents(write(tmp_path / "nfd.txt", unicodedata.normalize("NFD", f"{text}\n")))
    assert composed == decomposed == [["한국어 글.", "각하는 값."]]
    row = {"text": unicodedata.normalize("NFD", "값이다.")}
    assert documents(write(tmp_path / "nfd.jsonl", json.dumps(row) + "\n")) == [["값이다."]]


# ---- refusals


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n\t\n", "is empty"),
        ("글.".encode("utf-16"), r"is UTF-16 text.*iconv -f UTF-16 -t UTF-8"),
        (b"Good line.\nBad \xff byte.\n", "byte 15 cannot be decoded.*iconv"),
        (b'<doc id="1">\n\n</doc>\n', "holds no sentence when read as wikiextractor"),
        (b'{"text": "a"}\n{"text": \n', r"line 2 is not valid JSON"),
        (b'{"text": "a"}\n[1]\n', "line 2 is not a JSON object"),
        (b'{"text": "a"}\n{"txt": "a"}\n', "line 2 has no column 'text' but 'txt'"),
        (b'{"text": "a"}\n{"text": 5}\n', "line 2 holds a int where text is expected"),
        (b'[\n{"text": "a"}]\n', "line 1 is not valid JSON"),
        (b"PAR1 and then nothing of the kind", "not a readable parquet file"),
    ],
    ids=[
        "empty",
        "blank",
        "utf16",
        "bytes",
        "no-text",
        "json",
        "array",
        "column",
        "number",
        "list",
        "parquet",
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path / "bad", content)
    with pytest.raises(UserError, match=message) as caught:
        documents(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_undecodable_bytes_far_into_a_file_have_their_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 64)
    good = "가나다 라마바.\n".encode() * 50
    # the lead byte of a three-byte character at the end of a line, blocks later
    path = write(tmp_path / "a.txt", good + "가".encode()[:2] + b"\n" + good)
    with pytest.raises(UserError, match=f"byte {len(good)} cannot"):
        documents(path)


def test_bad_paths_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.txt does not exist"):
        open_corpus([str(tmp_path / "nothing.txt")])
    with pytest.raises(UserError, match=r"glob .*\*\.txt matches no files"):
        open_corpus([str(tmp_path / "*.txt")])
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/.hidden", "Text.")
    with pytest.raises(UserError, match=r"folder .*folder holds no files"):
        open_corpus([str(tmp_path / "folder")])
    with pytest.raises(UserError, match="name at least one"):
        open_corpus([])
    with pytest.raises(UserError, match="unknown format 'txt': choose one of auto, sentences"):
        open_corpus(None, format="txt")
    text = write(tmp_path / "a.txt", "Some text.\n")
    with pytest.raises(UserError, match="not a readable parquet file"):
        open_corpus([text], format="parquet")
    Path(text).chmod(0)
    try:
        Path(text).read_bytes()
    except PermissionError:
        with pytest.raises(UserError, match=r"cannot read .*Permission denied"):
            open_corpus([text])


# ---- the built-in corpus


def test_python_docs() -> None:
    started = time.perf_counter()
    corpus = open_corpus(None)
    found = list(corpus.documents())
    elapsed = time.perf_counter() - started
    num_bytes = sum(len(sentence.encode()) + 1 for document in found for sentence in document)
    assert corpus.name == "python-docs"
    assert f"{len(found):,} documents" in corpus.description
    assert 1.5e6 < num_bytes < 3e6
    assert 3_500 < len(found) < 7_000
    assert len({tuple(document) for document in found}) > 0.99 * len(found)
    assert elapsed < 60  # a few seconds, on a machine that does much else
    assert corpus.fingerprint() == open_corpus(None).fingerprint()
    # a topic, joined over its line breaks
    assert found[0][:2] == [
        'The "assert" statement',
        "Assert statements are a convenient way to insert debugging assertions into a program:",
    ]
    assert any(
        "Return the string obtained by replacing" in sentence for document in found for sentence in document
    )
