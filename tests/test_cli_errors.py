"""Bad input to `python -m fastbert.pretrain`: one sentence, status 2, nothing trained."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from fastbert import BertForPreTraining, LossParts
from fastbert.data.tokenizer import load_tokenizer, save_tokenizer
from fastbert.fill_mask import main as fill_mask_main
from fastbert.pretrain import main
from fastbert.train import checkpoint as ckpt
from fastbert.train.report import RunReport
from tests.test_cli_pretrain import options, write_corpus


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command writes to stderr."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "step 1" not in captured.out
    return captured.err.strip()


# option, value, what the sentence says
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("seq-len", 7, r"--seq-len 7 is below 8; give at least 8"),
        ("seq-len", 513, r"--seq-len 513 is above the 512 positions of the model; give at most 512"),
        (
            "tokens-per-batch",
            31,
            r"--tokens-per-batch 31 is below --seq-len 32: no whole sequence fits; raise",
        ),
        ("mask-prob", 0, r"--mask-prob 0.0 is out of range; give a value between 0 and 1"),
        ("mask-prob", 1.5, r"--mask-prob 1.5 is out of range"),
        ("dropout", 1, r"--dropout 1.0 is out of range; give a value at least 0 and below 1"),
        ("warmup", -0.1, r"--warmup -0.1 is out of range"),
        ("lr", "nan", r"--lr nan is out of range; give a value above 0"),
        ("steps", 0, r"--steps 0 is out of range; give a value at least 1"),
        ("accumulate", 0, r"--accumulate 0 is out of range"),
        ("keep-last", 0, r"--keep-last 0 is out of range"),
        ("save-every", 0, r"--save-every 0 is out of range"),
        ("workers", -1, r"--workers -1 is out of range; give a value from 0 to 256"),
        ("max-predictions", 0, r"--max-predictions 0 is out of range"),
        ("vocab-size", 20, r"--vocab-size 20 is out of range; give a value at least 100"),
        ("precision", "fp16", r"--precision fp16 needs a GPU; use fp32 or bf16 on a CPU"),
        ("device", "nonsense", r"--device nonsense cannot be used here \(.*\); try cpu"),
        ("resume", "no-such-folder", r"--resume no-such-folder is neither auto, never nor a folder"),
    ],
)
def test_option_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: Any, says: str
) -> None:
    said = refused(options(tmp_path, "run", **{option: value}), capsys)
    assert re.search(says, said), said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shard"], "--shard splits the weights among several ranks, and this run has one: start it with"),
        (["--shard", "--compile"], "hooks that --compile does not know: leave out one of the two"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert says in refused([*options(tmp_path, "run"), *arguments], capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments", [["--size", "huge"], ["--steps", "many"], ["--no-such-option"], ["--optimizer", "sgd"]]
)
def test_unknown_options_and_values(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert arguments[-1].lstrip("-") in said.err + said.out


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[data\n", r"is not TOML \("),
        ("[nothing]\nx = 1\n", r"\[nothing\] is not one of \[data\], \[model\], \[optimization\], \[run\]"),
        ("[data]\nsequence = 1\n", r"data.sequence is not an option; see --print-config"),
        ("[optimization]\nsteps = 'many'\n", r"optimization.steps = 'many' is not a value of --steps"),
        ("[model]\nsize = 3\n", r"model.size = 3 is not a value of --size"),
    ],
)
def test_config_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], toml: str, says: str) -> None:
    file = tmp_path / "options.toml"
    file.write_text(toml)
    assert re.search(says, refused(["--config", str(file)], capsys))


def test_whole_words_are_not_masked_on_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([*options(tmp_path, "run", **{"mask-on": "device"}), "--whole-word"], capsys)
    assert "--mask-on device masks single pieces, not the words of --whole-word: leave out one" in said


def test_a_config_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read (No such file" in refused(["--config", str(tmp_path / "none.toml")], capsys)
    assert "--config needs the path" in refused(["--config"], capsys)


def _missing(folder: Path) -> Path:
    return folder / "no.txt"


def _empty(folder: Path) -> Path:
    (folder / "empty.txt").write_text("")
    return folder / "empty.txt"


def _undecodable(folder: Path) -> Path:
    # 20 bytes of text, then a byte that is not UTF-8
    (folder / "latin.txt").write_bytes(b"A small first line.\ncaf\xe9 is not UTF-8.\n")
    return folder / "latin.txt"


def _only_blank(folder: Path) -> Path:
    (folder / "blank.txt").write_text("\n \n\t\n\n")
    return folder / "blank.txt"


def _one_document(folder: Path) -> Path:
    (folder / "one.txt").write_text("\n".join(["The fox sees a bird."] * 50))
    return folder / "one.txt"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_missing, r"no\.txt"),
        (_empty, r"empty\.txt"),
        (_undecodable, r"latin\.txt.*\b23\b.*UTF-8"),
        (_only_blank, r"blank\.txt"),
        (_one_document, r"the corpus has 1 document, and next-sentence prediction .* train with --no-nsp"),
    ],
)
def test_corpora(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Path], says: str
) -> None:
    said = refused(options(tmp_path, "run", corpus=make(tmp_path), format="sentences"), capsys)
    assert re.search(says, said), said
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_vocabulary_larger_than_the_embedding_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(tmp_path, "run")) == 0
    folder = tmp_path / "model"
    shutil.copytree(tmp_path / "run" / "last", folder)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["longer"])
    save_tokenizer(tokenizer, folder)
    capsys.readouterr()
    assert fill_mask_main([str(folder), "A [MASK]."]) == 2
    assert f"has {rows + 1} ids, but the embedding table has {rows} rows" in capsys.readouterr().err


def test_a_tokenizer_whose_ids_have_gaps_gets_a_large_enough_table(tmp_path: Path) -> None:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "the": 9}
    Tokenizer(WordPiece(vocabulary, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert main(options(tmp_path, "run", tokenizer=tmp_path / "tokenizer.json", steps=1)) == 0
    assert json.loads((tmp_path / "run" / "last" / "config.json").read_text())["vocab_size"] == 10


def test_a_tokenizer_without_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    assert "[MASK]" in refused(options(tmp_path, "run", tokenizer=tmp_path / "vocab.txt"), capsys)


def test_run_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    said = refused(options(tmp_path, "file/run"), capsys)
    assert re.search(r"file/run cannot be written \(.*\); choose another --output", said)

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(ckpt.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    said = refused(options(tmp_path, "full"), capsys)
    assert re.search(r"full has 0\.00 GB free, and its checkpoints need \d\.\d\d GB; free some space", said)


def test_a_disk_that_fills_up_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, saved = torch.save, []

    def save(value: Any, path: Path) -> None:
        saved.append(path)
        if len(saved) > 1:  # the first checkpoint fits
            raise OSError(28, "No space left on device")
        real(value, path)

    monkeypatch.setattr(torch, "save", save)
    assert main(options(tmp_path, "run")) == 2
    assert "checkpoint-8 could not be written: the disk is full" in capsys.readouterr().err
    ckpt.verify_checkpoint(tmp_path / "run" / "checkpoint-4")
    monkeypatch.setattr(torch, "save", real)
    assert main(options(tmp_path, "run")) == 0
    ckpt.verify_checkpoint(tmp_path / "run" / "checkpoint-8")


def test_a_disk_that_fills_up_between_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunReport.log

    def full_at_step_6(report: RunReport, row: dict[str, Any]) -> None:
        if row["step"] == 6:
            raise OSError(28, "No space left on device")
        log(report, row)

    monkeypatch.setattr(RunReport, "log", full_at_step_6)
    assert main(options(tmp_path, "run")) == 2
    assert "error: the disk is full: free some space" in capsys.readouterr().err
    monkeypatch.setattr(RunReport, "log", log)
    assert main(options(tmp_path, "run")) == 0
    assert "at step 4" in capsys.readouterr().out


def test_a_bad_step_is_said_and_written_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BertForPreTraining.loss_parts
    calls: list[int] = []

    def overflow_once(model: BertForPreTraining, batch: Any) -> LossParts:
        calls.append(1)
        parts = real(model, batch)
        return dataclasses.replace(parts, mlm_sum=parts.mlm_sum * float("inf")) if len(calls) == 4 else parts

    monkeypatch.setattr(BertForPreTraining, "loss_parts", overflow_once)
    assert main(options(tmp_path, "run", **{"eval-every": 0})) == 0
    said = "step 4: one step since the last report had a gradient that is not finite and changed nothing"
    assert said in " ".join(capsys.readouterr().out.split())
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert rows[1]["step"] == 4
    assert rows[1]["loss"] is None
    assert rows[3]["loss"] > 0


def test_resuming_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(tmp_path, "run")) == 0
    said = refused(options(tmp_path, "run", size="mini"), capsys)
    assert re.search(r"trained with num_hidden_layers 2, but 4 is asked for; choose another --output", said)
    assert "was trained with --optimizer lamb, but adamw" in refused(
        options(tmp_path, "run", optimizer="adamw"), capsys
    )
    assert "holds checkpoint-8; choose another --output" in refused(
        options(tmp_path, "run", resume="never"), capsys
    )
    other = write_corpus(tmp_path / "other.txt", documents=30, seed=9)
    assert main(options(tmp_path, "other", corpus=other, **{"vocab-size": 150})) == 0
    tokenizer = tmp_path / "other" / "last"
    assert "is not the tokenizer of" in refused(options(tmp_path, "run", tokenizer=tokenizer), capsys)

    # other data: allowed, said, and read from its beginning
    capsys.readouterr()
    assert main(options(tmp_path, "run", steps=10, corpus=other)) == 0
    assert "the data changed (corpus): it is read from its beginning" in capsys.readouterr().out

    for checkpoint in (tmp_path / "run").glob("checkpoint-*"):
        manifest = checkpoint / ckpt.STATE_DIR / "manifest.json"
        manifest.write_text(json.dumps({"gone": {"size": 1, "sha256": ""}}))
    assert "no checkpoint of" in refused(options(tmp_path, "run", steps=12), capsys)
