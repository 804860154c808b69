"""Tokenizers: BERT's published behaviour on a hand-made vocabulary, training, agreement with transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fastbert.data.corpus import open_corpus
from fastbert.data.tokenizer import (
    MIN_PIECE_COUNT,
    SPECIAL_TOKENS,
    SpecialIds,
    load_tokenizer,
    ordinary_ids,
    save_tokenizer,
    special_ids,
    tokenizer_fingerprint,
    train_tokenizer,
    vocabulary_size,
)
from fastbert.errors import UserError

WORDS = [
    *(
        "[",
        "]",
        "naive",
        "cafe",
        "hello",
        "user",
        "said",
        "mask",
        "and",
        "sep",
        "done",
        "un",
        "una",
        "x",
        "a",
    ),
    *("中", "文", ".", ",", "##ffa", "##ble", "##world", "##y", "##x", "##a"),
]
KOREAN = ["한국어 문장을 읽고 값을 각각 적는다.", "뷁은 드문 글자다.", "값이 크다."] * 6
ENGLISH = ["The cat sat on the mat, and the Naïve cat ran.", "A dog at the café."] * 6


def write_vocab(path: Path, tokens: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path


@pytest.fixture
def vocab_file(tmp_path: Path) -> Path:
    return write_vocab(tmp_path / "hand/vocab.txt", [*SPECIAL_TOKENS, "[unused0]", *WORDS])


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


# ---- a vocabulary brought along


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Naïve CAFÉ", "naive cafe"),
        ("hello\x00world\ufffd", "hello ##world"),
        ("hello\u00a0and\r\n\tdone", "hello and done"),
        ("x\u200by\u200d", "x ##y"),
        ("中文x中", "中 文 x 中"),
        ("x\uf059y", "x ##y"),  # private use: dropped (Google's own code makes [UNK] of it)
        ("x" * 100, "x " + "##x " * 99),
        ("x" * 101, "[UNK]"),
        ("x" * 99 + "\u0301\u0301x", "x " + "##x " * 99),  # counted after accents are stripped
        ("", ""),
        ("unaffable", "una ##ffa ##ble"),
        ("user said [MASK] and [SEP] done", "user said [ mask ] and [ sep ] done"),
    ],
)
def test_uncased_vocabulary_splits_like_bert(vocab_file: Path, text: str, expected: str) -> None:
    assert pieces(load_tokenizer(vocab_file), text) == expected.split()


def test_cased_vocabulary_keeps_accents_and_case(vocab_file: Path) -> None:
    tokenizer = load_tokenizer(vocab_file, cased=True)
    assert pieces(tokenizer, "naïve Cafe cafe") == ["[UNK]", "[UNK]", "cafe"]


def test_configuration_beside_a_vocabulary_counts(vocab_file: Path) -> None:
    config = vocab_file.parent / "tokenizer_config.json"
    config.write_text(json.dumps({"do_lower_case": False}))
    assert pieces(load_tokenizer(vocab_file.parent), "Cafe cafe") == ["[UNK]", "cafe"]
    config.write_text(json.dumps({"do_lower_case": True, "strip_accents": False}))
    assert pieces(load_tokenizer(vocab_file.parent), "CAFE café") == ["cafe", "[UNK]"]


def test_pair_has_special_tokens_and_segments(vocab_file: Path) -> None:
    encoding = load_tokenizer(vocab_file).encode("hello", "user done")
    assert encoding.tokens == ["[CLS]", "hello", "[SEP]", "user", "done", "[SEP]"]
    assert encoding.type_ids == [0, 0, 0, 1, 1, 1]


def test_duplicate_and_empty_lines_keep_the_numbering(tmp_path: Path) -> None:
    tokens = [*SPECIAL_TOKENS, "cat", "dog", "cat", "", "hen"]
    tokenizer = load_tokenizer(write_vocab(tmp_path / "vocab.txt", tokens))
    assert tokenizer.encode("cat dog hen", add_special_tokens=False).ids == [7, 6, 9]
    assert vocabulary_size(tokenizer) == 10
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved/vocab.txt").encode("cat hen", add_special_tokens=False).ids == [
        7,
        9,
    ]


def test_a_vocabulary_with_its_own_prefix(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocab(tmp_path / "vocab.txt", [*SPECIAL_TOKENS, "hel", "@@lo"]))
    assert pieces(tokenizer, "hello") == ["hel", "@@lo"]


def test_special_and_ordinary_ids(vocab_file: Path) -> None:
    tokenizer = load_tokenizer(vocab_file)
    assert special_ids(tokenizer) == SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    assert ordinary_ids(tokenizer).tolist() == list(range(6, 6 + len(WORDS)))
    assert ordinary_ids(tokenizer).dtype.name == "int64"


def test_special_tokens_by_other_names(tmp_path: Path) -> None:
    names = {"pad": "<nil>", "unk": "<unk>", "cls": "<go>", "sep": "<end>", "mask": "<hide>"}
    write_vocab(tmp_path / "vocab.txt", ["cat", *names.values()])
    config = {f"{role}_token": {"content": name} if role == "mask" else name for role, name in names.items()}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert special_ids(tokenizer) == SpecialIds(pad=1, unk=2, cls=3, sep=4, mask=5)
    assert ordinary_ids(tokenizer).tolist() == [0]
    save_tokenizer(tokenizer, tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert special_ids(saved) == special_ids(tokenizer)
    assert saved.encode("cat dog").ids == [3, 0, 2, 4]


def test_truncation_and_padding_of_a_file_are_switched_off(vocab_file: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(vocab_file)
    plain = tokenizer_fingerprint(tokenizer)
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert len(loaded.encode("hello " * 6).ids) == 8
    assert len(loaded.encode("hello " * 1000).ids) == 1002
    assert tokenizer_fingerprint(loaded) == plain


@pytest.mark.parametrize("missing", SPECIAL_TOKENS)
def test_a_missing_special_token_is_named(tmp_path: Path, missing: str) -> None:
    tokens = [token for token in SPECIAL_TOKENS if token != missing] + ["cat"]
    with pytest.raises(UserError, match=rf"no \[{missing[1:-1]}\] token"):
        load_tokenizer(write_vocab(tmp_path / "vocab.txt", tokens))


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"neither a tokenizer\.json nor a vocab\.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(b"cat\n\xff\n")
    with pytest.raises(UserError, match="cannot read the vocabulary"):
        load_tokenizer(tmp_path / "vocab.txt")


# ---- training


def test_trained_vocabulary_starts_with_the_special_tokens() -> None:
    tokenizer = train_tokenizer(ENGLISH)
    assert special_ids(tokenizer) == SpecialIds(0, 1, 2, 3, 4)
    assert tokenizer.encode("the cat").tokens == ["[CLS]", "the", "cat", "[SEP]"]
    assert pieces(tokenizer, "the [MASK] cat")[1:-1] != ["[MASK]"]
    assert 4 not in tokenizer.encode("the [MASK] cat").ids


def test_pieces_are_learned_from_the_minimum_count_on() -> None:
    filler = ["q w e r t y"]
    often = train_tokenizer([*filler, *["yt"] * MIN_PIECE_COUNT])
    seldom = train_tokenizer([*filler, *["yt"] * (MIN_PIECE_COUNT - 1)])
    assert pieces(often, "yt") == ["yt"]
    assert pieces(seldom, "yt") == ["y", "##t"]


def test_case_and_accents() -> None:
    uncased, cased = train_tokenizer(ENGLISH), train_tokenizer(ENGLISH, cased=True)
    assert uncased.encode("THE Naïve").ids == uncased.encode("the naïve").ids
    assert uncased.encode("naïve").ids != uncased.encode("naive").ids
    assert cased.encode("The").ids != cased.encode("the").ids


def test_every_character_has_both_forms() -> None:
    tokenizer = train_tokenizer(["zebra quick", "中文"])
    # z was seen at word starts only and k at word ends only; digits were not seen at all
    assert pieces(tokenizer, "kzz 7z7 #") == ["k", "##z", "##z", "7", "##z", "##7", "#"]
    assert "##中" not in tokenizer.get_vocab()  # stands alone always


def test_korean_text_decodes_to_itself() -> None:
    tokenizer = train_tokenizer(KOREAN)
    for text in [*KOREAN[:3], "꿰뚫는 별빛, 쩝!"]:  # the last holds syllables that the corpus lacks
        ids = tokenizer.encode(text).ids
        assert 1 not in ids
        assert tokenizer.decode(ids).replace(" .", ".").replace(" ,", ",").replace(" !", "!") == text


def test_vocabulary_size_is_kept_and_characters_go_first() -> None:
    full = train_tokenizer(ENGLISH)
    smaller = train_tokenizer(ENGLISH, vocab_size=vocabulary_size(full) - 5)
    assert vocabulary_size(smaller) == vocabulary_size(full) - 5
    learned = sorted(full.get_vocab(), key=full.get_vocab().__getitem__)
    assert sorted(smaller.get_vocab(), key=smaller.get_vocab().__getitem__) == learned[:-5]
    characters = sum(len(token.removeprefix("##")) == 1 for token in full.get_vocab())
    with pytest.raises(UserError, match=rf"size 20 is too small.* are {characters + 5} entries"):
        train_tokenizer(ENGLISH, vocab_size=20)
    with pytest.raises(UserError, match="no text to train"):
        train_tokenizer([])


def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    # many ties: each word stands as often as the others
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
    text = [" ".join(words)] * MIN_PIECE_COUNT
    code = (
        "import json, sys; from fastbert.data.tokenizer import *; "
        "print(tokenizer_fingerprint(train_tokenizer(json.load(sys.stdin), vocab_size=300)))"
    )
    root = Path(__file__).resolve().parents[1]
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(text),
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    prints.add(f"{tokenizer_fingerprint(train_tokenizer(reversed(text), vocab_size=300))}\n")
    assert len(prints) == 1


@pytest.mark.parametrize("name", ["pretrain_ko", "pretrain_zh"])
@pytest.mark.parametrize("held_out", [0, 4])  # every fifth document, from this one on
def test_held_out_text_has_next_to_no_unknown_tokens(shared_data: Path, name: str, held_out: int) -> None:
    documents = list(open_corpus([str(shared_data / name)]).documents())
    train = [text for i, document in enumerate(documents) if i % 5 != held_out for text in document]
    test = [text for document in documents[held_out::5] for text in document]
    tokenizer = train_tokenizer(train)
    ids = [i for encoding in tokenizer.encode_batch(test, add_special_tokens=False) for i in encoding.ids]
    assert len(ids) > 20_000
    assert ids.count(special_ids(tokenizer).unk) / len(ids) <= 0.005


def test_built_in_corpus_supports_about_eight_thousand_pieces() -> None:
    tokenizer = train_tokenizer(text for document in open_corpus(None).documents() for text in document)
    assert 6_500 < vocabulary_size(tokenizer) < 9_500


# ---- transformers


STRANGE = [
    "",
    "naïve Café ÀÉÎÕÜ İstanbul ΑΣ ﬁ",
    "뷁 각하 값이다. ㅋㅋㅋ",
    "中文漢字テスト日本語 한글mixed文字abc",
    "😀👩‍👩‍👧 emoji",
    "a\u200bb\u00a0c\td\x00e\ufffd",
    "x" * 100,
    "x" * 101,
    "don't (stop) [it]! ##ing $3.50 <unk>",
]


@pytest.mark.parametrize("cased", [False, True], ids=["uncased", "cased"])
def test_transformers_gives_the_same_ids(tmp_path: Path, cased: bool) -> None:
    transformers = pytest.importorskip("transformers")
    texts = [*ENGLISH, *KOREAN, *STRANGE]
    assert_transformers_agrees(transformers, train_tokenizer(texts, cased=cased), texts, tmp_path)


def test_transformers_gives_the_same_ids_on_wikipedia(shared_data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    corpus = open_corpus([str(shared_data / "pretrain_ko"), str(shared_data / "pretrain_zh")])
    texts = [text for document in corpus.documents() for text in document]
    assert_transformers_agrees(transformers, train_tokenizer(texts), texts[::7], tmp_path)


def assert_transformers_agrees(
    transformers: object, tokenizer: Tokenizer, texts: list[str], folder: Path
) -> None:
    save_tokenizer(tokenizer, folder, model_max_length=384)
    expected = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    pair = tokenizer.encode("안녕 hello", "世界")
    for kind in ("AutoTokenizer", "BertTokenizerFast"):
        theirs = getattr(transformers, kind).from_pretrained(folder)
        assert theirs(texts)["input_ids"] == expected, kind
        both = theirs("안녕 hello", "世界")
        assert (both["input_ids"], both["token_type_ids"]) == (pair.ids, pair.type_ids)
        assert (theirs.model_max_length, theirs.mask_token_id) == (384, special_ids(tokenizer).mask)
        assert len(theirs) == vocabulary_size(tokenizer)
    for path in (folder, folder / "tokenizer.json", folder / "vocab.txt"):
        assert tokenizer_fingerprint(load_tokenizer(path)) == tokenizer_fingerprint(tokenizer)
