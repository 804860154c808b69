"""`python -m fastbert.pretrain` as its users run it: artefacts, resume, interruption, agreement."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastbert import BertConfig, BertForPreTraining, PackedBatch, pretrain
from fastbert.fill_mask import fill_mask
from fastbert.fill_mask import main as fill_mask_main
from fastbert.pretrain import main
from fastbert.train.checkpoint import newest_intact, verify_checkpoint
from fastbert.train.loop import Pace

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["the", "a", "red", "old", "fox", "dog", "bird", "river", "sees", "likes", "crosses", "near", "then"]
TRAIN_KEYS = {
    *("step", "loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"),
    *("lr", "grad_norm", "tokens_per_s", "padding_avoided", "mfu"),
}
OPTIONS = [
    *(
        "corpus",
        "format",
        "tokenizer",
        "vocab-size",
        "size",
        "config",
        "seq-len",
        "steps",
        "tokens-per-batch",
    ),
    *("accumulate", "optimizer", "lr", "warmup", "schedule", "precision", "device", "seed", "workers"),
    *(
        "no-cuda-graph",
        "eval-every",
        "save-every",
        "keep-last",
        "output",
        "resume",
        "packed",
        "no-packed",
        "no-nsp",
    ),
    *("whole-word", "mask-on", "mask-prob", "phase"),
]


def write_corpus(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """Google's format: a sentence a line, a blank line between documents."""
    rng = random.Random(seed)
    lines = []
    for _ in range(documents):
        for _ in range(rng.randint(2, 8)):
            lines.append(" ".join(rng.choices(WORDS, k=rng.randint(4, 12))).capitalize() + ".")
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def options(tmp_path: Path, output: str, **changed: Any) -> list[str]:
    """A run of seconds: the tiny size on the small corpus."""
    values = {
        "corpus": write_corpus(tmp_path / "corpus.txt"),
        "output": tmp_path / output,
        "size": "tiny",
        "seq-len": 32,
        "tokens-per-batch": 128,
        "steps": 8,
        "log-every": 2,
        "eval-every": 4,
        "save-every": 4,
        "workers": 0,
        "vocab-size": 200,
        **changed,
    }
    return ["--packed", *(str(part) for name, value in values.items() for part in (f"--{name}", value))]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(tmp_path, "run", **{"keep-last": 1})) == 0
    run = tmp_path / "run"
    said = capsys.readouterr().out
    assert "unigram entropy" in said
    assert "ln V" in said
    assert f"python -m fastbert.fill_mask {run}" in said

    train = [row for row in rows(run) if "loss" in row]
    held_out = [row for row in rows(run) if "eval_loss" in row]
    assert [row["step"] for row in train] == [2, 4, 6, 8]
    assert [row["step"] for row in held_out] == [4, 8]
    assert all(set(row) == TRAIN_KEYS for row in train)
    assert set(held_out[0]) == {"step", "eval_mlm_perplexity"} | {
        f"eval_{name}" for name in ("loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
    }
    assert held_out[0]["eval_mlm_perplexity"] == pytest.approx(
        float(torch.tensor(held_out[0]["eval_mlm_loss"]).exp()), rel=1e-4
    )

    assert sorted(p.name for p in run.iterdir() if not p.name.startswith(("events.", "."))) == [
        "checkpoint-8",
        "config.toml",
        "last",
        "loss_curve.png",
        "metrics.jsonl",
    ]
    assert list(run.glob("events.out.tfevents.*"))
    assert (run / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    verify_checkpoint(run / "last")
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["model"]["size"] == "tiny"
    assert config["optimization"]["lr"] > 0  # worked out, so that the file says it all


def test_pace_by_hand() -> None:
    # two sequences of 5 and 3 tokens and 2 of filler; rows of 8 would have 16 slots, the batch has 10
    batch = PackedBatch(
        input_ids=torch.zeros(10, dtype=torch.int64),
        token_type_ids=torch.zeros(10, dtype=torch.int64),
        position_ids=torch.zeros(10, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 5, 8, 10, 10], dtype=torch.int32),
        max_seqlen=8,
        masked_positions=torch.zeros(3, dtype=torch.int64),
        masked_labels=torch.tensor([7, 9, -100]),
        next_sentence_labels=torch.tensor([1, 0, -100, -100]),
        num_tokens=8,
    )
    config = BertConfig(
        vocab_size=100, hidden_size=4, num_hidden_layers=2, num_attention_heads=1, intermediate_size=16
    )
    pace = Pace(seconds=2.0)
    pace.add(batch, batch.num_slots, 8, config)
    # linear 6 * 2 * (4 * 16 + 2 * 64) = 2304 a token; attention 12 * 2 * 4 * (25 + 9);
    # head 6 * 2 * (400 + 16)
    assert pace.flops == 8 * 2304 + 96 * 34 + 12 * 416
    assert pace.metrics(peak=1e6) == {
        "tokens_per_s": 4.0,
        "padding_avoided": 1 - 10 / 16,
        "mfu": pace.flops / 2 / 1e6,
    }


def test_the_saved_config_reproduces_the_run(tmp_path: Path) -> None:
    assert main(options(tmp_path, "one")) == 0
    assert main(["--config", str(tmp_path / "one" / "config.toml"), "--output", str(tmp_path / "two")]) == 0
    one, two = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


# the interrupted run stops in the middle of an epoch; dropout makes the random state matter
def optimizer_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of one rank, which writes one file."""
    (file,) = (checkpoint / "trainer_state" / "optimizer").iterdir()
    return load_file(file)


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_stopped_and_resumed_gives_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    settings = {"optimizer": optimizer, "dropout": 0.1, "steps": 12, "save-every": 6}
    assert main(options(tmp_path, "whole", **settings)) == 0
    assert main(options(tmp_path, "parts", **settings)) == 0
    parts = tmp_path / "parts"
    # as if the second half had never been: back to step 6, with rows and link of step 12 still there
    shutil.rmtree(parts / "checkpoint-12")
    assert main(options(tmp_path, "parts", **settings, workers=1)) == 0
    whole, resumed = (
        load_file(tmp_path / name / "checkpoint-12" / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    states = [optimizer_state(tmp_path / name / "checkpoint-12") for name in ("whole", "parts")]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    timing = {"tokens_per_s", "mfu"}
    for one, two in zip(rows(tmp_path / "whole"), rows(parts), strict=True):
        assert {k: v for k, v in one.items() if k not in timing} == {
            k: v for k, v in two.items() if k not in timing
        }


def test_bf16_weights_resume_to_the_same_bits_and_are_saved_in_fp32(tmp_path: Path) -> None:
    arguments = options(tmp_path, "run", precision="bf16", dropout=0.1)
    whole, parts = tmp_path / "whole", tmp_path / "run" / "checkpoint-8"
    assert main(arguments) == 0
    parts.rename(whole)  # as if the second half had never been
    assert main(arguments) == 0
    weights = load_file(whole / "model.safetensors")
    for name, weight in load_file(parts / "model.safetensors").items():
        assert weight.dtype == torch.float32 and torch.equal(weight, weights[name]), name
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())
    assert BertConfig.from_pretrained(parts).dtype == torch.float32
    state = optimizer_state(parts)
    assert {name.rpartition(".")[2] for name in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(value.dtype == torch.float32 for value in state.values())


def test_masks_of_the_device_are_the_same_after_a_resume(tmp_path: Path) -> None:
    settings = {"mask-on": "device", "steps": 4, "save-every": 2, "log-every": 1, "eval-every": 0}
    assert main(options(tmp_path, "whole", **settings)) == 0
    assert main(options(tmp_path, "parts", **settings)) == 0
    parts = tmp_path / "parts"
    assert tomllib.loads((parts / "config.toml").read_text())["data"]["mask_on"] == "device"
    shutil.rmtree(parts / "checkpoint-4")
    assert main(options(tmp_path, "parts", **settings)) == 0
    whole, resumed = (
        load_file(tmp_path / name / "checkpoint-4" / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    # padded rows too; and the loader's masks are others, of the same text
    assert main([*options(tmp_path, "padded", **settings), "--no-packed"]) == 0
    assert main(options(tmp_path, "loader", **settings | {"mask-on": "loader"})) == 0
    losses = [[row["mlm_loss"] for row in rows(tmp_path / name)] for name in ("whole", "padded", "loader")]
    for other in losses[1:]:
        assert len(other) == 4 and other != losses[0] and other == pytest.approx(losses[0], abs=0.5)


def test_a_finished_run_is_left_alone_and_more_steps_continue_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(tmp_path, "run")) == 0
    assert main(options(tmp_path, "run")) == 0
    assert "has finished its 8 steps: nothing to train" in capsys.readouterr().out
    before = (tmp_path / "run" / "config.toml").read_text()
    assert main(options(tmp_path, "run", lr=0.5)) == 0
    assert (tmp_path / "run" / "config.toml").read_text() == before
    assert main(options(tmp_path, "run", steps=12)) == 0
    said = capsys.readouterr().out
    assert "resumed from" in said
    assert "at step 8" in said
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == [2, 4, 6, 8, 10, 12]


def test_a_truncated_checkpoint_falls_back_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(tmp_path, "run")) == 0
    weights = tmp_path / "run" / "checkpoint-8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(options(tmp_path, "run")) == 0
    said = capsys.readouterr().out
    assert "checkpoint-8 is damaged (model.safetensors has 1000 bytes" in said
    assert "at step 4" in said
    verify_checkpoint(tmp_path / "run" / "checkpoint-8")
    # the damaged one does not count as one of those to keep
    kept = sorted(p.name for p in (tmp_path / "run").glob("*checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-8", "damaged-checkpoint-8"]


def test_resuming_from_an_older_checkpoint_needs_a_folder_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(tmp_path, "run")) == 0
    older = str(tmp_path / "run" / "checkpoint-4")
    assert main(options(tmp_path, "run", resume=older)) == 2
    assert "is not the newest checkpoint of" in capsys.readouterr().err
    assert main(options(tmp_path, "branch", resume=older)) == 0
    whole, branch = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("run", "branch"))
    assert all(torch.equal(whole[name], branch[name]) for name in whole)
    verify_checkpoint(tmp_path / "run" / "checkpoint-8")


def test_packed_and_padded_runs_agree(tmp_path: Path) -> None:
    assert main(options(tmp_path, "packed")) == 0
    assert main([*options(tmp_path, "padded"), "--no-packed"]) == 0
    for one, two in zip(rows(tmp_path / "packed"), rows(tmp_path / "padded"), strict=True):
        for name in one.keys() - {"tokens_per_s", "mfu", "padding_avoided"}:
            assert one[name] == pytest.approx(two[name], abs=2e-4), (one["step"], name)


def test_phase_2_takes_weights_and_moments_and_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = options(tmp_path, "one", accumulate=1)
    assert main([*one, "--phase", "1"]) == 0
    two = options(tmp_path, "two", **{"accumulate": 1, "seq-len": 64})
    assert main([*two, "--phase", "2", "--resume", str(tmp_path / "one")]) == 0
    assert "phase 2: weights and moments from" in capsys.readouterr().out
    first = [row for row in rows(tmp_path / "two") if "loss" in row]
    assert [row["step"] for row in first] == [2, 4, 6, 8]
    assert first[-1]["lr"] == 0.0  # the schedule of phase 2, not the end of phase 1's
    assert first[0]["lr"] > 0
    assert main([*options(tmp_path, "one", accumulate=1), "--phase", "2"]) == 2  # not into the same folder
    assert "choose another --output" in capsys.readouterr().err


def test_one_document_and_no_nsp(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text("\n".join("The old fox sees a red bird near the river." for _ in range(200)))
    command = [*options(tmp_path, "run", corpus=text, format="sentences"), "--no-nsp", "--whole-word"]
    assert main(command) == 0
    row = rows(tmp_path / "run")[0]
    assert row["nsp_loss"] == 0
    assert row["loss"] == row["mlm_loss"]


def test_transformers_loads_the_checkpoint_and_gives_our_loss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert main(options(tmp_path, "run")) == 0
    folder = tmp_path / "run" / "last"
    ours = BertForPreTraining.from_pretrained(folder)
    theirs = transformers.BertForPreTraining.from_pretrained(folder, attn_implementation="eager")
    torch.manual_seed(0)
    ids = torch.randint(5, ours.config.vocab_size, (3, 20))
    labels = torch.where(torch.rand(3, 20) < 0.2, ids, -100)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, 12:] = 0
    labels[1, 12:] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    batch["next_sentence_label"] = torch.tensor([0, 1, 0])
    assert ours(**batch).loss.item() == pytest.approx(theirs.eval()(**batch).loss.item(), abs=2e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("The old fox.").input_ids[0] == tokenizer.cls_token_id


def test_a_tokenizer_of_another_language_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(tmp_path, "english", steps=1)) == 0
    korean = tmp_path / "korean.txt"
    korean.write_text("늙은 여우가 강을 건넌다.\n작은 새가 노래한다.\n\n" * 30, encoding="utf-8")
    capsys.readouterr()
    tokenizer = tmp_path / "english" / "last"
    assert main(options(tmp_path, "korean", corpus=korean, tokenizer=tokenizer, steps=1)) == 0
    assert "% of the tokens are [UNK]: this tokenizer was made for other text" in capsys.readouterr().out


def test_fill_mask_answers_with_probabilities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(tmp_path, "run", steps=40, lr=5e-3)) == 0
    (answers,) = fill_mask(tmp_path / "run", "The old [MASK] sees a bird.", top_k=5)
    assert len(answers) == 5
    probabilities = [p for _, p in answers]
    assert probabilities == sorted(probabilities, reverse=True)
    assert 0 < sum(probabilities) <= 1
    capsys.readouterr()
    assert fill_mask_main([str(tmp_path / "run"), "A [MASK] and a [MASK].", "--top-k", "3"]) == 0
    said = capsys.readouterr().out
    assert "[MASK] 1" in said
    assert "[MASK] 2" in said
    assert fill_mask_main([str(tmp_path / "run"), "No gap here."]) == 2
    assert "has no [MASK]" in capsys.readouterr().err
    assert fill_mask_main([str(tmp_path / "nothing"), "A [MASK]."]) == 2
    assert "is no folder" in capsys.readouterr().err


def start(arguments: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "fastbert.pretrain", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own, which signals can be sent to
    )


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    pytest.fail("the run did not start")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: int, status: int) -> None:
    settings = {"steps": 100_000, "log-every": 1, "eval-every": 0, "save-every": 100_000, "workers": 1}
    arguments = options(tmp_path, "run", **settings)
    process = start(arguments)
    wait_for_step(process, tmp_path / "run", 3)
    os.killpg(process.pid, number)  # as Ctrl-C, `timeout` and job managers do: the worker gets it, too
    said = process.communicate(timeout=60)[0]
    assert process.returncode == status, said
    checkpoint = newest_intact(tmp_path / "run", pytest.fail)
    assert checkpoint is not None
    assert "finishing the step and saving" in said
    assert f"the same command continues from {checkpoint}" in said
    last_row = rows(tmp_path / "run")[-1]["step"]
    assert checkpoint.name == f"checkpoint-{last_row}"
    assert (tmp_path / "run" / "loss_curve.png").exists()


def test_a_run_without_a_finite_gradient_stops_and_keeps_its_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, bad_from = pretrain._model, 5

    def poisoned(*arguments: Any) -> BertForPreTraining:
        model: BertForPreTraining = make(*arguments)
        seen = iter(range(1, 1000))
        weight = model.bert.pooler.dense.weight  # type: ignore[union-attr]
        weight.register_hook(lambda grad: grad * (math.nan if next(seen) >= bad_from else 1.0))
        return model

    monkeypatch.setattr(pretrain, "_model", poisoned)
    monkeypatch.setattr("fastbert.train.loop.MAX_BAD_STEPS", 6)
    assert main(options(tmp_path, "run", **{"steps": 100, "save-every": 4, "eval-every": 0})) == 2
    said = capsys.readouterr()
    assert "2 steps since the last report had a gradient that is not finite" in said.out
    assert "error: the gradients of the last 6 steps were not finite: give a lower --lr" in said.err
    (batch,) = torch.load(tmp_path / "run" / "bad-batch-10-rank-0.pt")
    assert PackedBatch(**batch).num_sequences() > 0
    assert newest_intact(tmp_path / "run", pytest.fail) == tmp_path / "run" / "checkpoint-8"


def test_a_kill_leaves_the_last_checkpoint_loadable(tmp_path: Path) -> None:
    # saves at every step, so the kill is likely to meet a save
    settings = {"steps": 100_000, "log-every": 1, "eval-every": 0, "save-every": 1}
    process = start(options(tmp_path, "run", **settings))
    wait_for_step(process, tmp_path / "run", 12)
    process.kill()
    process.communicate()
    said: list[str] = []
    checkpoint = newest_intact(tmp_path / "run", said.append)
    assert checkpoint is not None
    assert not said
    step = int(checkpoint.name.split("-")[1])
    # and the same command goes on from there
    assert main(options(tmp_path, "run", **{**settings, "steps": step + 3, "save-every": 1000})) == 0
    assert rows(tmp_path / "run")[-1]["step"] == step + 3
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


def test_print_config_and_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--packed", "--size", "small", "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["model"]["size"] == "small"
    assert printed["data"]["seq_len"] == 128
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name in OPTIONS:
        assert f"--{name}" in text, name
    assert text.count("(default: ") >= 30


@pytest.mark.parametrize(
    ("corpus", "end"),
    [("pretrain_en/enwiki_AA_wiki_00.txt", "en"), ("pretrain_ko/kowiki_wiki_00.txt", "ko")],
)
def test_real_text_trains(tmp_path: Path, shared_data: Path, corpus: str, end: str) -> None:
    settings = {
        "corpus": shared_data / corpus,
        "steps": 30,
        "vocab-size": 8000,
        "seq-len": 64,
        "log-every": 10,
    }
    assert main(options(tmp_path, end, **settings, **{"tokens-per-batch": 512, "lr": 2e-2})) == 0
    train = [row["mlm_loss"] for row in rows(tmp_path / end) if "loss" in row]
    assert train[-1] < train[0] - 0.2
