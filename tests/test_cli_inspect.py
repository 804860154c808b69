"""`python -m fastbert.inspect`: the numbers and words it shows are those of the data set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fastbert.data.tokenizer import train_tokenizer
from fastbert.inspect import instance_in_words, main, measure
from fastbert.pretrain import main as pretrain_main
from tests.test_cli_prepare import korean_corpus
from tests.test_cli_pretrain import options, write_corpus
from tests.test_data_shards import prepared


def window_of(
    ids: list[list[int]], ends: list[list[int]], masked: list[dict[int, int]]
) -> dict[str, torch.Tensor]:
    """A window of two batches of 16 tokens with room for three sequences and two predictions."""
    filled = [e + [16] * (4 - len(e)) for e in ends]
    return {
        "input_ids": torch.tensor(ids),
        "cu_seqlens": torch.tensor(filled),
        "num_tokens": torch.tensor([e[-1] for e in ends]),
        "masked_positions": torch.tensor([[*m, *[0] * (2 - len(m))] for m in masked]),
        "masked_labels": torch.tensor([[*m.values(), *[-100] * (2 - len(m))] for m in masked]),
        "next_sentence_labels": torch.tensor([[0, 1, -100], [1, -100, -100]]),
    }


def test_lengths_and_instances_of_a_window() -> None:
    tokenizer = train_tokenizer(["고양이 잔다"] * 5 + ["abcdef"] * 5)
    words = [tokenizer.token_to_id(word) for word in ("[CLS]", "고양이", "[SEP]", "잔다", "[SEP]", "[MASK]")]
    cls, cat, sep, sleeps, _, mask = words
    first = [cls, cat, sep, mask, sep] + [cls, cat, cat, sep, sleeps, sep] + [0] * 5
    second = [cls] + [cat] * 8 + [sep, sleeps, sep] + [0] * 4
    window = window_of([first, second], [[0, 5, 11], [0, 12]], [{3: sleeps, 6: sleeps}, {1: cat}])
    measured = measure(window, 12)
    assert sorted(measured.lengths) == [5, 6, 12]
    assert measured.padded_fill == pytest.approx(23 / 36)
    assert measured.packed_fill == pytest.approx(23 / 24)  # 12 | 6 + 5
    assert instance_in_words(window, 0, tokenizer) == (
        "B continues A, 5 tokens, 1 to guess: [CLS] 고양이 [SEP] [[MASK]→잔다] [SEP]"
    )
    assert instance_in_words(window, 1, tokenizer) == (
        "B is from another document, 6 tokens, 1 to guess: [CLS] [고양이→잔다] 고양이 [SEP] 잔다 [SEP]"
    )
    assert "[CLS] [고양이, kept] 고양이" in instance_in_words(window, 2, tokenizer)


def test_a_korean_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = prepared(tmp_path / "data", korean_corpus(tmp_path / "ko.txt"), held_out=0.2)
    pictures = tmp_path / "pictures"
    assert main([str(store.path), "--seq-len", "64", "--pictures", str(pictures), "--verify"]) == 0
    said = capsys.readouterr().out
    words = " ".join(said.split())
    assert f"{len(store)}, {store.num_held_out} of them held out" in words
    assert f"{store.num_tokens:,}, {store.num_tokens / 60:,.1f} a document" in words
    assert f"{store.num_shards} of {store.num_shards} shards are as the manifest says" in words
    assert re.search(
        r"mean \d\d\.\d; a row a sequence is \d\d\.\d % padding, packs are 9\d\.\d\d % full", words
    )
    assert len(re.findall(r"to guess: \[CLS\] ", words)) == 3
    assert "고양이" in said
    assert (pictures / "lengths.png").read_bytes()[:4] == b"\x89PNG"
    shard = store.path / store.index["path"][1].as_py()
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main([str(store.path), "--verify"]) == 1
    assert "the shard shards/000001-000.arrow of" in capsys.readouterr().out


def test_the_cache_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_main(options(tmp_path, "run", steps=1)) == 0
    (cache,) = (folder for folder in (tmp_path / "cache").iterdir() if (folder / "manifest.json").exists())
    assert main([str(cache), "--no-nsp", "--samples", "1"]) == 0
    assert "one segment" in capsys.readouterr().out


def test_what_is_no_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c.txt")
    assert main([str(tmp_path)]) == 2
    assert "holds no prepared data set" in capsys.readouterr().err
    assert main([str(tmp_path), "--seq-len", "4"]) == 2
    assert "--seq-len 4 is out of range" in capsys.readouterr().err
