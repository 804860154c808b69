"""Sentence splitting: each rule with the split a reader would make."""

from __future__ import annotations

import pytest

from fastbert.data.sentences import ends_in_punctuation, join_wrapped, split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("He left. She stayed! Why? No one knows…  The end", 5),
        ('"Go away!" He went. (So did she.) Then what?! Nothing.', 5),
        ("Mr. Smith met Dr. Jones, e.g. at St. Mary vs. Inc. halls, etc. and so on.", 1),
        ("J. R. R. Tolkien wrote it. So did A. A. Milne.", 2),
        ("See Fig. 2 and No. 5 on p. 7. He said no. Then 1998. Later.", 4),
        ("3. Open the lid. b. Close it.", 2),
        ("It costs $3.50 at www.python.org/a.b in v2.0.1 of setup.py, 10.5% off.", 1),
        ("First line\nsecond line. third\n\n  \nfourth", 4),
        ("So am I. He is not.", 2),
    ],
    ids=["marks", "closing", "abbreviations", "initials", "numbers", "list", "inside", "lines", "pronoun"],
)
def test_english_counts(text: str, sentences: int) -> None:
    assert len(split_sentences(text)) == sentences


def test_english_pieces() -> None:
    text = (
        'Dr. Smith paid $3.50 for v2.0.1. "Really?" she said. 3. Do this. J. R. R. Tolkien, e.g., did…  End'
    )
    assert split_sentences(text) == [
        "Dr. Smith paid $3.50 for v2.0.1.",
        '"Really?"',
        "she said.",
        "3. Do this.",
        "J. R. R. Tolkien, e.g., did…",
        "End",
    ]


def test_chinese_and_japanese_need_no_space() -> None:
    assert split_sentences("今天很好。你好吗？我说：“好！”他走了。") == [
        "今天很好。",
        "你好吗？",
        "我说：“好！”",
        "他走了。",
    ]
    assert split_sentences("「元気ですか？」はい、元気です。圧力は3.5です") == [
        "「元気ですか？」",
        "はい、元気です。",
        "圧力は3.5です",
    ]


def test_korean_endings_without_a_space() -> None:
    assert split_sentences("그는 갔다.그리고 왔다. 정말요?네.") == [
        "그는 갔다.",
        "그리고 왔다.",
        "정말요?",
        "네.",
    ]
    assert split_sentences("비가 올까?아마 그렇죠.이상 없음.끝") == [
        "비가 올까?",
        "아마 그렇죠.",
        "이상 없음.",
        "끝",
    ]
    assert split_sentences("그는 말했다.“나는 간다.” 끝.") == ["그는 말했다.", "“나는 간다.”", "끝."]


def test_korean_quotation_goes_on_after_its_quote() -> None:
    # the quote closes before a particle, and opens after a sentence: only the second is a boundary
    assert split_sentences('그녀는 "갔다."라고 했다.') == ['그녀는 "갔다."라고 했다.']
    assert split_sentences('그는 말했다."나는 간다." 끝.') == ["그는 말했다.", '"나는 간다."', "끝."]


def test_korean_dots_that_end_nothing() -> None:
    assert split_sentences("버전 2.0은 naver.com에서 3.1절에 받는다.") == [
        "버전 2.0은 naver.com에서 3.1절에 받는다."
    ]


def test_nothing_gives_nothing() -> None:
    assert split_sentences("") == []
    assert split_sentences(" \n\t\n") == []


def test_no_character_but_blanks_is_lost() -> None:
    text = 'Mr. A. said "no." Then...  (maybe) 했다.그는 。。 끝!? “어?” v1.2 ... . !'
    assert "".join(split_sentences(text)).replace(" ", "") == text.replace(" ", "")


def test_join_wrapped() -> None:
    assert join_wrapped(["  one ", "two", "", "three"]) == "one two three"
    assert join_wrapped(["今天天气", "很好。"]) == "今天天气很好。"
    assert join_wrapped(["그는 집에", "갔다."]) == "그는 집에 갔다."


@pytest.mark.parametrize("line", ["End.", 'He said "yes!"', "(so?)", "좋다.", "好。」", "wait…  "])
def test_ends_in_punctuation(line: str) -> None:
    assert ends_in_punctuation(line)
    assert not ends_in_punctuation(line + " and")
