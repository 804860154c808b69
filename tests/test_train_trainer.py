"""One step at a time: division by global counts, bad steps, loss scaling, evaluation, precision."""

from __future__ import annotations

import copy
import dataclasses
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from fastbert import AdamW, BertConfig, BertForPreTraining, Lamb, LossParts, PackedBatch
from fastbert.batch import IGNORE_INDEX
from fastbert.data.loader import LoaderSettings, PackedLoader, Vocabulary, WindowBuilder
from fastbert.optim import parameter_groups
from fastbert.train.step import MIN_LOSS_SCALE
from fastbert.train.trainer import Totals, Trainer
from tests.documents import random_store

CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def make_batches(num: int, seed: int = 0) -> list[PackedBatch]:
    store = random_store(200, vocab_size=100, seed=seed)
    vocabulary = Vocabulary(cls=2, sep=3, mask=4, unk=1, ordinary=np.arange(10, 100))
    settings = LoaderSettings(seq_len=32, tokens_per_batch=128, seed=seed)
    return list(islice(PackedLoader(WindowBuilder(store, np.arange(200), vocabulary, settings)), num))


def make_trainer(dropout: float = 0.0, kind: type = Lamb, precision: str = "fp32") -> Trainer:
    torch.manual_seed(0)
    model = BertForPreTraining(
        BertConfig(**CONFIG, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )
    return Trainer(model, kind(parameter_groups(model, 0.01), lr=1e-3), lambda k: 1e-3, precision)


def gradients(trainer: Trainer, batches: list[Any]) -> list[torch.Tensor]:
    """What the optimizer is given by a step over `batches`."""
    seen: list[torch.Tensor] = []

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"])

    handle = trainer.optimizer.register_step_pre_hook(record)
    trainer.train_step(batches, Totals())
    handle.remove()
    return seen


class _Weighed(torch.nn.Module):
    """loss of a batch = w * (given sum), with a given count: case E-02 by hand."""

    config = BertConfig(**CONFIG)

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))

    def loss_parts(self, batch: PackedBatch) -> LossParts:
        count = (batch.masked_labels != IGNORE_INDEX).sum()
        zero = torch.zeros((), dtype=torch.int64)
        mean = float(batch.input_ids[0])
        return LossParts(self.w * mean * count, count, zero, self.w * 0.0, zero, zero)


def batch_of(mean: int, count: int) -> PackedBatch:
    labels = torch.full((10,), IGNORE_INDEX)
    labels[:count] = 7
    ids = torch.full((4,), mean)
    return PackedBatch(
        input_ids=ids,
        token_type_ids=ids * 0,
        position_ids=ids * 0,
        cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
        max_seqlen=4,
        masked_positions=torch.zeros(10, dtype=torch.int64),
        masked_labels=labels,
        next_sentence_labels=torch.full((1,), IGNORE_INDEX),
        num_tokens=4,
    )


def test_micro_batches_weigh_by_their_tokens() -> None:
    # A: 2 tokens of mean loss 4, B: 8 of mean 2 -> (8 + 16) / 10 = 2.4; the mean of means would be 3.0
    model = _Weighed()
    trainer = Trainer(model, AdamW(model.parameters(), lr=1e-3, max_grad_norm=None), lambda k: 1e-3)  # type: ignore[arg-type]
    totals = Totals()
    trainer.train_step([batch_of(4, 2), batch_of(2, 8)], totals)
    assert totals.metrics()["mlm_loss"] == pytest.approx(2.4, abs=1e-6)
    assert float(trainer.optimizer.grad_norm) == pytest.approx(2.4, abs=1e-6)


def test_accumulation_gives_the_gradient_of_one_big_batch() -> None:
    one, two = make_batches(2)
    both = PackedBatch(
        input_ids=torch.cat([one.input_ids, two.input_ids]),
        token_type_ids=torch.cat([one.token_type_ids, two.token_type_ids]),
        position_ids=torch.cat([one.position_ids, two.position_ids]),
        cu_seqlens=torch.cat([one.cu_seqlens, two.cu_seqlens[1:] + 128]),
        max_seqlen=32,
        masked_positions=torch.cat([one.masked_positions, two.masked_positions + 128]),
        masked_labels=torch.cat([one.masked_labels, two.masked_labels]),
        next_sentence_labels=torch.cat([one.next_sentence_labels, two.next_sentence_labels]),
        num_tokens=256,
    )
    for got, expected in zip(gradients(make_trainer(), [one, two]), gradients(make_trainer(), [both])):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_packed_and_padded_steps_agree() -> None:
    batches = make_batches(3)
    padded = [batch.padded() for batch in batches]
    one, two = Totals(), Totals()
    packed_trainer, padded_trainer = make_trainer(), make_trainer()
    for got, expected in zip(gradients(packed_trainer, batches), gradients(padded_trainer, padded)):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    packed_trainer.train_step(batches, one)
    padded_trainer.train_step(padded, two)
    assert one.metrics() == pytest.approx(two.metrics(), abs=2e-5)


def snapshot(trainer: Trainer) -> dict[str, Any]:
    return copy.deepcopy({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()})


def assert_unchanged(trainer: Trainer, before: dict[str, Any]) -> None:
    after = snapshot(trainer)
    for name, value in before["model"].items():
        assert torch.equal(value, after["model"][name]), name
    assert before["optimizer"]["state"].keys() == after["optimizer"]["state"].keys()
    for key, state in before["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, after["optimizer"]["state"][key][name]), (key, name)


@pytest.mark.parametrize("kind", [Lamb, AdamW])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_step_changes_nothing(kind: type, bad: float) -> None:
    trainer, batches = make_trainer(kind=kind), make_batches(3)
    trainer.train_step(batches[:1], Totals())
    before = snapshot(trainer)
    weight = trainer.model.bert.pooler.dense.weight
    handle = weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), bad))
    trainer.train_step(batches[1:2], Totals())
    handle.remove()
    assert_unchanged(trainer, before)
    assert (trainer.step, trainer.updates) == (2, 1)  # the schedule waits
    trainer.train_step(batches[2:], Totals())
    assert (trainer.step, trainer.updates) == (3, 2)
    assert not torch.equal(before["model"]["bert.pooler.dense.weight"], weight)


def test_loss_scaling_gives_the_same_step_and_has_a_floor() -> None:
    plain, scaled = make_trainer(), make_trainer()
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    batches = make_batches(2)
    for trainer in (plain, scaled):
        trainer.train_step(batches, Totals())
    assert float(scaled.optimizer.grad_norm) == pytest.approx(float(plain.optimizer.grad_norm), rel=1e-5)
    for one, two in zip(plain.model.parameters(), scaled.model.parameters()):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)

    before = snapshot(scaled)
    weight = scaled.model.bert.pooler.dense.weight
    handle = weight.register_hook(lambda grad: grad * float("inf"))
    scales = []
    for _ in range(5):
        scaled.train_step(batches, Totals())
        scales.append(scaled.scaler.get_scale())
    handle.remove()
    assert scales == [2.0, 1.0, MIN_LOSS_SCALE, MIN_LOSS_SCALE, MIN_LOSS_SCALE]
    assert_unchanged(scaled, before)
    assert scaled.updates == 1
    state = scaled.state_dict()
    other = make_trainer()
    other.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    other.load_state_dict(state)
    assert (other.step, other.updates, other.scaler.get_scale()) == (6, 1, 1.0)


# the host asks the device for the updates at the end, or in between
@pytest.mark.parametrize("rates", [1024, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_schedule_waits_for_a_bad_step_without_the_host(
    precision: str, rates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastbert.train.trainer.RATES", rates)
    trainer, batches = make_trainer(precision=precision), make_batches(1)
    trainer.learning_rate = lambda k: 1e-3 * (k + 1)
    seen: list[float] = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(float(optimizer.param_groups[0]["lr"]))
    )
    for step in range(6):
        scale = float("inf") if step in (1, 2) else 1.0
        handle = trainer.model.bert.pooler.dense.weight.register_hook(lambda grad, scale=scale: grad * scale)
        trainer.train_step(batches, Totals())
        handle.remove()
    assert seen == pytest.approx([1e-3, 2e-3, 2e-3, 2e-3, 3e-3, 4e-3], rel=1e-12)
    assert (trainer.step, trainer.updates) == (6, 4)
    assert isinstance(trainer.optimizer.state_dict()["param_groups"][0]["lr"], float)
    trainer.load_state_dict(trainer.state_dict())
    trainer.train_step(batches, Totals())
    assert seen[-1] == pytest.approx(5e-3, rel=1e-12)


def test_evaluation_is_without_dropout_and_leaves_no_trace() -> None:
    trainer, batches = make_trainer(dropout=0.5), make_batches(4)
    trainer.model.train()
    random_state, before = torch.get_rng_state(), snapshot(trainer)
    first = trainer.evaluate(batches)
    assert first == trainer.evaluate(batches)
    assert trainer.model.training
    assert torch.equal(random_state, torch.get_rng_state())
    assert_unchanged(trainer, before)
    # the mean over all tokens, not the mean of the batches' means
    parts = [trainer.evaluate([batch]) for batch in batches]
    counts = [int((batch.masked_labels != IGNORE_INDEX).sum()) for batch in batches]
    mean = sum(row["mlm_loss"] * n for row, n in zip(parts, counts)) / sum(counts)
    assert first["mlm_loss"] == pytest.approx(mean, abs=1e-5)


def test_bf16_autocast_keeps_fp32_weights_and_a_close_loss() -> None:
    plain, autocast = make_trainer(), make_trainer(precision="bf16-autocast")
    batches = make_batches(2)
    one, two = Totals(), Totals()
    plain.train_step(batches, one)
    autocast.train_step(batches, two)
    assert two.metrics()["loss"] == pytest.approx(one.metrics()["loss"], abs=3e-2)
    for parameter in autocast.model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.isfinite().all()
    with pytest.raises(ValueError, match="'fp8' is not one of fp32, bf16, bf16-autocast, fp16"):
        make_trainer(precision="fp8")


def test_activation_checkpointing_changes_no_bit() -> None:
    plain, checkpointed = make_trainer(dropout=0.1), make_trainer(dropout=0.1)
    checkpointed.model.gradient_checkpointing_enable()
    batches = make_batches(2)
    grads = []
    for trainer in (plain, checkpointed):
        torch.manual_seed(3)
        grads.append(gradients(trainer, batches))
    for one, two in zip(*grads):
        assert torch.equal(one, two)


def test_without_nsp_labels_the_loss_is_the_mlm_loss() -> None:
    trainer, totals = make_trainer(), Totals()
    batch = make_batches(1)[0]
    batch.next_sentence_labels.fill_(IGNORE_INDEX)
    trainer.train_step([batch], totals)
    metrics = totals.metrics()
    assert metrics["nsp_loss"] == metrics["nsp_accuracy"] == 0.0
    assert metrics["loss"] == metrics["mlm_loss"] > 4


@pytest.mark.parametrize(
    ("field", "outside", "message"),
    [
        ("input_ids", 100, "input_ids holds 100, the table has vocab_size = 100 rows"),
        ("token_type_ids", 2, "token_type_ids holds 2, the table has type_vocab_size = 2 rows"),
        ("position_ids", 32, "position_ids holds 32, the table has max_position_embeddings = 32 rows"),
        ("masked_labels", -1, "masked_labels holds -1, the table has vocab_size = 100 rows"),
    ],
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_ids_outside_the_tables_are_named_before_the_batch_is_sent(
    packed: bool, field: str, outside: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tokenizer that has more pieces than the model, say; no GPU is asked."""
    trainer, batch = make_trainer(), make_batches(1)[0]
    if not packed and field == "position_ids":
        pytest.skip("rows count their positions themselves")
    values = getattr(batch, field).clone()
    values[1] = outside
    bad: Any = dataclasses.replace(batch, **{field: values})
    bad = bad if packed else bad.padded()
    monkeypatch.setattr(type(bad), "to", None)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(IndexError, match=message):
        trainer.train_step([batch if packed else batch.padded(), bad], Totals())
    with pytest.raises(IndexError, match=message):
        trainer.evaluate([bad])
    assert trainer.step == 0
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
