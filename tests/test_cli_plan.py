"""`python -m fastbert.plan`: every figure against one worked by hand, and what each is said to come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.test_scaling import saved_bytes
from fastbert import BertConfig, BertForPreTraining
from fastbert.errors import UserError
from fastbert.plan import ACTIVATIONS, Settings, check_fit, main, plan, rows_of
from tests.packed_batches import make_batches

LARGE = Settings(gpus=16, gpu="h100", model="large", corpus_tokens=1e9, epochs=3, accumulate=2)


def test_each_figure_by_hand() -> None:
    """BERT-Large on two nodes of H100: 336 M parameters, 65.3 TFLOP a micro-batch of 32,768 tokens at 512."""
    made = plan(LARGE, [])
    assert made["parameters"] == 336_226_108  # 334 M of the encoder, as published, and the heads
    linear = 6 * 24 * (4 * 1024**2 + 2 * 1024 * 4096) * 32768
    attention = 12 * 24 * 1024 * 512 * 32768
    head = 6 * 0.15 * 32768 * (1024 * 30522 + 1024**2)
    flops = linear + attention + head
    assert made["FLOPs of a micro-batch"] == pytest.approx(flops, rel=1e-12)
    assert made["computing"] == pytest.approx(2 * flops / (0.5 * 989e12), rel=1e-12)
    assert made["LAMB"] == pytest.approx(40 * 336_226_108 / (0.8 * 3350e9), rel=1e-12)
    assert made["link"] == 0.8 * 50e9  # 400 Gbit/s
    assert made["communication"] == pytest.approx(2 * 15 / 16 * 4 * 336_226_108 / 40e9, rel=1e-12)
    waiting = made["communication"] - 2 / 3 * made["computing"] / 2
    assert waiting < 0 and made["of it waited for"] == 0
    assert made["step"] == pytest.approx(made["computing"] + made["LAMB"], rel=1e-12)
    assert made["scaling efficiency"] == 1
    assert made["tokens a second"] == pytest.approx(2 * 16 * 32768 / made["step"], rel=1e-12)
    assert made["total"] == pytest.approx(3e9 / made["tokens a second"], rel=1e-12)
    assert made["weights, gradients, moments"] == 16 * 336_226_108
    assert made["activations"] == pytest.approx(2 * ACTIVATIONS * 1024 * 24 * 32768, rel=1e-12)
    assert made["logits of masked tokens"] == pytest.approx(8 * 0.15 * 32768 * 30522, rel=1e-12)


def test_a_slow_network_is_waited_for() -> None:
    made = plan(Settings(gpus=16, gpu="h100", model="large", network_gbit=10), [])
    communication = 2 * 15 / 16 * 4 * 336_226_108 / (0.8 * 1.25e9)
    waiting = communication - 2 / 3 * made["computing"]
    assert made["of it waited for"] == pytest.approx(waiting, rel=1e-12)
    busy = made["computing"] + made["LAMB"]
    assert made["scaling efficiency"] == pytest.approx(busy / (busy + waiting), rel=1e-12)
    within = plan(Settings(gpus=8, gpu="h100", model="large", network_gbit=10), [])
    assert within["link"] == 0.8 * 450e9 and within["of it waited for"] == 0
    assert plan(Settings(gpus=1), [])["communication"] == 0


def test_checkpointing_computes_more_and_keeps_less() -> None:
    plain, less = (plan(Settings(activation_checkpointing=flag), []) for flag in (False, True))
    assert less["computing"] == pytest.approx(4 / 3 * plain["computing"], rel=1e-12)
    share = (1 + ACTIVATIONS / 12) / ACTIVATIONS
    assert less["activations"] == pytest.approx(share * plain["activations"], rel=1e-12)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_sharded_model_sends_more_and_holds_less(accumulate: int) -> None:
    settings: dict[str, Any] = {"gpus": 8, "gpu": "h100", "model": "large", "network_gbit": 10}
    settings["accumulate"] = accumulate
    whole, sharded = (plan(Settings(**settings, shard=flag), []) for flag in (False, True))
    layer = 4 * (1024**2 + 1024) + 2 * 4096 * 1024 + 4096 + 1024 + 4 * 1024
    rest = 336_226_108 - 24 * layer
    sent = 7 / 8 * (accumulate * 2 * (2 * 24 * layer + rest) + 4 * 336_226_108)
    assert sharded["communication"] == pytest.approx(sent / (0.8 * 450e9), rel=1e-12)
    assert sharded["of it waited for"] == 0
    slow = plan(Settings(**settings | {"gpus": 16}, shard=True), [])
    sent *= 15 / 16 * 8 / 7
    assert slow["of it waited for"] == pytest.approx(sent / (0.8 * 1.25e9) - slow["computing"], rel=1e-12)
    assert sharded["LAMB"] == pytest.approx(whole["LAMB"] / 8, rel=1e-12)
    assert sharded["weights, gradients, moments"] == 2 * 336_226_108
    gathered = 8 * (2 * layer + rest) + (4 * 336_226_108 if accumulate > 1 else 0)
    assert sharded["whole weights"] == pytest.approx(gathered, rel=1e-12)
    assert whole["memory of a rank"] - sharded["memory of a rank"] == pytest.approx(
        14 * 336_226_108 - gathered, rel=1e-9
    )


def measured(name: str, **figures: object) -> dict[str, object]:
    return {"name": name, "host_kind": "cpu-x86_64-2cores", "commit": "abc", **figures}


def test_rows_are_used_and_named() -> None:
    step = {"host_kind": "gpu-nvidia-h200", "size": "large", "mfu": {"fastbert": 0.625, "transformers": 0.3}}
    rows = [
        measured("test_training_step[wikipedia-512]", **step),
        measured("test_training_step[equal-512]", **step | {"host_kind": "gpu-nvidia-h100"}),
        measured("test_scaling[layers-4]", saved_bytes=0, tokens_per_s=100, median_s=1.0),
        measured(
            "test_scaling[layers-8]",
            saved_bytes=4 * 4 * (12 * 256 * 100 + 3 * 256 * 256),
            tokens_per_s=100,
            median_s=1.0,
        ),
    ]
    made = plan(Settings(gpu="h200", model="large"), rows)
    sources = {figure.name: (figure.source, figure.how) for figure in made.figures}
    assert made["share of the peak"] == 0.625
    assert sources["share of the peak"] == ("measured", "test_training_step[wikipedia-512] at abc")
    assert made["activations"] == pytest.approx(2 * 12 * 1024 * 24 * 32768, rel=1e-12)
    assert sources["activations"][0] == "assumed" and "12.0 elements" in sources["activations"][1]
    assert "at abc in fp32 on a CPU" in sources["activations"][1]
    other = {figure.name: figure.source for figure in plan(Settings(gpu="h200", model="base"), rows).figures}
    assert other["share of the peak"] == "assumed"  # that row is of another size
    given = plan(Settings(gpu="h200", model="large", utilisation=0.4), rows)
    assert given["share of the peak"] == 0.4
    assert {figure.source for figure in given.figures} == {"computed", "assumed"}
    assert {figure.source for figure in made.figures} == {"measured", "computed", "assumed"}


def test_a_layer_keeps_what_the_constant_says() -> None:
    """Counted here in fp32 without dropout: what each layer and token more adds."""
    width = 128

    def kept(layers: int, tokens: int) -> int:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=100,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=4 * width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = BertForPreTraining(config)
        batch = make_batches([128] * (tokens // 128), vocab_size=100)[0]

        def loss() -> torch.Tensor:
            parts = model.loss_parts(batch)
            return parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count

        return saved_bytes(model, loss)

    of_two_layers = [kept(4, tokens) - kept(2, tokens) for tokens in (256, 512)]
    elements = (of_two_layers[1] - of_two_layers[0]) / 4 / (2 * 256 * width)
    assert elements == pytest.approx(ACTIVATIONS, rel=0.01)
    joined = of_two_layers[0] - (of_two_layers[1] - of_two_layers[0])
    assert joined == pytest.approx(2 * 4 * 3 * width * width, rel=0.02)  # weights of query, key and value


def test_activations_are_what_the_benchmarks_rows_say() -> None:
    """The constant for an installed package is that of the committed rows, to a hundredth."""
    rows = rows_of(Path(__file__).parents[1] / "benchmarks" / "results")
    made = plan(Settings(), rows)
    figure = next(figure for figure in made.figures if figure.name == "activations")
    assert "counted at" in figure.how
    assert made["activations"] == pytest.approx(plan(Settings(), [])["activations"], rel=0.01)
    assert rows_of(Path(__file__).parent / "nowhere") == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (Settings(gpus=0), "--gpus 0 is out of range; give at least 1"),
        (
            Settings(seq_len=64, tokens_per_batch=32),
            "--tokens-per-batch 32 is out of range; give at least 64",
        ),
        (Settings(epochs=0), "--epochs 0 is out of range; give more than 0"),
        (Settings(corpus_tokens=-1), "--corpus-tokens -1 is out of range"),
        (Settings(network_gbit=float("nan")), "--network-gbit nan is out of range"),
        (Settings(utilisation=1.5), "--utilisation 1.5 is out of range; give a share above 0, at most 1"),
    ],
)
def test_bad_settings(settings: Settings, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan(settings, [])


def test_what_does_not_fit_is_said_beside_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "large", "--gpu", "a10g", "--gpus", "2", "--json"]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    figures = {figure["name"]: figure["value"] for figure in json.loads(out)}
    assert f"a rank needs {figures['memory of a rank'] / 1e9:.1f} GB, " in err
    assert f"{figures['memory of a rank'] / 1e9 - 21.6:.1f} GB more than the 21.6 GB that a a10g has" in err
    assert "lower --tokens-per-batch" in err and "try --activation-checkpointing or --shard" in err
    check_fit(Settings(), plan(Settings(), []))


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "8", "--gpu", "h200", "--model", "large", "--corpus-tokens", "3.3e9"]) == 0
    out = capsys.readouterr().out
    assert "336,226,108" in out and "assumed" in out and "computed" in out
