"""`python -m fastbert.fill_mask` on model folders of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers

from fastbert import UserError
from fastbert.data.tokenizer import save_tokenizer, train_tokenizer
from fastbert.fill_mask import fill_mask, main
from tests.minilm import TEXTS
from tests.small_models import hf_config, spread_weights

TEXT = "A [MASK] of wolves, 서울의 [MASK]."


def model_folder(folder: Path, model_class: str) -> Path:
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=300)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(hf_config(vocab_size=tokenizer.get_vocab_size()))
    spread_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.mark.parametrize("model_class", ["BertForMaskedLM", "BertForPreTraining"])
def test_answers_equal_transformers(tmp_path, recwarn, model_class):
    folder = model_folder(tmp_path, model_class)
    answers = fill_mask(folder, TEXT, top_k=4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXT, return_tensors="pt")
    theirs = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = theirs(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id]
    assert len(answers) == len(logits) == 2
    for answer, row in zip(answers, logits):
        best = row.softmax(dim=-1).topk(4)
        assert [piece for piece, _ in answer] == tokenizer.convert_ids_to_tokens(best.indices.tolist())
        assert [p for _, p in answer] == pytest.approx(best.values.tolist(), abs=2e-5)
    assert not [w for w in recwarn if "initialised" in str(w.message)]


def test_the_command_shows_a_table_for_each_gap(tmp_path, capsys):
    assert main([str(model_folder(tmp_path, "BertForMaskedLM")), TEXT, "--top-k", "2"]) == 0
    said = capsys.readouterr().out
    assert "[MASK] 1" in said and "[MASK] 2" in said
    assert said.count(" %") == 4


def test_a_hub_id(tmp_path, monkeypatch):
    folder = model_folder(tmp_path, "BertForMaskedLM")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(folder))
    assert fill_mask("someone/model", TEXT) == fill_mask(folder, TEXT)


def test_an_encoder_without_the_head_is_refused(tmp_path, capsys):
    folder = model_folder(tmp_path, "BertModel")
    with pytest.raises(UserError, match=r"no head that guesses words \(it lacks cls\.predictions\."):
        fill_mask(folder, TEXT)
    capsys.readouterr()
    assert main([str(folder), TEXT]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("No gap.", [], r"has no \[MASK\]; put one"),
        ("[MASK] " + "a " * 70, [], r"has \d+ tokens, and the model takes 64; shorten it"),
        (TEXT, ["--top-k", "0"], r"--top-k 0 is out of range"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, text, options, says):
    folder = model_folder(tmp_path, "BertForMaskedLM")
    capsys.readouterr()
    assert main([str(folder), text, *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(says, said), said
