"""A whole step: static buffers and flat gradients change no number, and bf16 weights lose no update."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastbert import AdamW, BertConfig, BertForPreTraining, Lamb, PackedBatch
from fastbert.batch import IGNORE_INDEX
from fastbert.ops.backend import EagerFallbackWarning
from fastbert.optim import parameter_groups
from fastbert.train import optimizer_state
from fastbert.train.distributed import Ranks
from fastbert.train.gradients import ALIGNMENT, FlatGradients, collect_in_fp32
from fastbert.train.trainer import Totals, Trainer
from tests.test_train_trainer import CONFIG, make_batches

FP32, BF16 = torch.float32, torch.bfloat16


def make_trainer(
    precision: str = "fp32",
    cuda_graph: bool = False,
    kind: type = Lamb,
    dropout: float = 0.1,
    lr: float = 1e-3,
) -> Trainer:
    torch.manual_seed(0)
    model = BertForPreTraining(
        BertConfig(**CONFIG, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )
    optimizer = kind(parameter_groups(model, 0.01), lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerFallbackWarning)
        return Trainer(model, optimizer, lambda k: lr * (1 + k % 3), precision, cuda_graph=cuda_graph)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """A CPU has no graphs, and every trainer that is asked for one says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without a CUDA graph: the model is on cpu")
        yield


def run(trainer: Trainer, batches: list[PackedBatch], accumulate: int) -> dict[str, float]:
    torch.manual_seed(5)  # of dropout
    totals = Totals()
    for first in range(0, len(batches), accumulate):
        trainer.train_step(batches[first : first + accumulate], totals)
    return totals.metrics()


def assert_same_state(one: Trainer, other: Trainer) -> None:
    for (name, mine), theirs in zip(one.model.state_dict().items(), other.model.state_dict().values()):
        assert torch.equal(mine, theirs), name
    mine, theirs = one.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for key, state in mine.items():
        assert state.keys() == theirs[key].keys()
        for name, value in state.items():
            assert value.dtype == theirs[key][name].dtype
            assert torch.equal(value, theirs[key][name]), (key, name)
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize("kind", [Lamb, AdamW])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_over_static_buffers_are_plain_steps(precision: str, accumulate: int, kind: type) -> None:
    """With dropout, a rate that changes, and batches of which none is like another: bit for bit."""
    plain, static = make_trainer(precision, kind=kind), make_trainer(precision, cuda_graph=True, kind=kind)
    batches = make_batches(6)
    assert run(plain, batches, accumulate) == run(static, batches, accumulate)
    assert static.graphed_step is not None and static.graphed_step._graph is not None
    assert plain.device_step.gradients is None and static.device_step.gradients is not None
    assert_same_state(plain, static)
    assert torch.equal(plain.optimizer.grad_norm, static.optimizer.grad_norm)
    assert float(plain.optimizer.param_groups[0]["lr"]) == float(static.optimizer.param_groups[0]["lr"]) > 0


def test_frozen_parameters_and_recomputed_layers_change_nothing_of_that() -> None:
    trainers = [make_trainer("bf16", cuda_graph=static, dropout=0.0) for static in (False, True)]
    batches = make_batches(4)
    for trainer in trainers:
        frozen = trainer.model.bert.embeddings.requires_grad_(False)
        before = copy.deepcopy(frozen.state_dict())
        trainer.model.gradient_checkpointing_enable()
        run(trainer, batches, 2)
        assert all(torch.equal(before[name], weight) for name, weight in frozen.state_dict().items())
    assert trainers[1].graphed_step is not None and trainers[1].graphed_step._graph is not None
    assert_same_state(*trainers)


def test_other_shapes_run_as_they_are_and_are_named_once() -> None:
    plain, static = make_trainer(), make_trainer(cuda_graph=True)
    batches = make_batches(6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for trainer in (plain, static):
            torch.manual_seed(5)
            for chosen in (batches[:1], batches[1:3], batches[3:4], batches[4:6]):
                trainer.train_step(chosen, Totals())
    reasons = [str(w.message).split(": ", 1)[1] for w in said if w.category is EagerFallbackWarning]
    assert reasons == ["the model is on cpu", "this batch has other shapes than the first one"]
    assert_same_state(plain, static)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rehearsal_changes_nothing_but_the_random_state(precision: str) -> None:
    trainer, batches = make_trainer(precision, cuda_graph=True), make_batches(3)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(2):  # before the first step, and after it
        before = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()["state"]))
        step, counts = trainer.device_step, trainer.state_dict()
        last = [tensor.clone() for tensor in (step.lr, step.losses, step.grad_norm)]
        trainer.model.train()
        trainer._prepare_learning_rates()
        trainer.device_step.rehearse(batches[2])
        trainer._new_steps += 1
        assert trainer.state_dict() == counts
        assert all(map(torch.equal, last, (step.lr, step.losses, step.grad_norm)))
        assert all(torch.equal(before[0][name], w) for name, w in trainer.model.state_dict().items())
        after = trainer.optimizer.state_dict()["state"]
        for key, state in before[1].items():
            assert all(torch.equal(value, after[key][name]) for name, value in state.items())
        assert all(not buffer.any() for buffer in trainer.device_step.gradients.buffers)
        assert int(trainer.device_step.number) == trainer.step * 2**20
        trainer.train_step(batches[number : number + 1], Totals())
    assert trainer.updates == 2


def test_loading_a_state_goes_on_with_the_new_tensors() -> None:
    """A graph would go on with the moments that it has captured."""
    plain, static = make_trainer(), make_trainer(cuda_graph=True)
    batches = make_batches(6)
    for trainer in (plain, static):
        run(trainer, batches[:3], 1)
        state = copy.deepcopy((trainer.optimizer.state_dict(), trainer.state_dict()))
        run(trainer, batches[3:], 1)
        trainer.optimizer.load_state_dict(state[0])
        trainer.load_state_dict(state[1])
        if trainer is static:
            assert trainer.graphed_step is not None and trainer.graphed_step._graph is None
        run(trainer, batches[3:], 1)
    assert_same_state(plain, static)
    assert static.graphed_step is not None
    for change in (
        lambda: static.load_weights(static.weights()),
        lambda: setattr(static, "scaler", torch.amp.GradScaler("cpu", enabled=False)),
    ):
        assert static.graphed_step._graph is not None
        change()
        assert static.graphed_step._graph is None
        run(static, batches[:1], 1)


def test_learning_rates_are_worked_out_ahead_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports ask for the updates; the table is filled anew then, before its end makes a step ask."""
    monkeypatch.setattr("fastbert.train.trainer.RATES", 8)
    trainer, batch = make_trainer(), make_batches(1)
    asked: list[int] = []
    trainer.learning_rate = lambda k: asked.append(k) or 1e-3 * (k + 1)  # type: ignore[func-returns-value]
    monkeypatch.setattr(trainer, "_ask_for_updates", None)
    for step in range(12):
        trainer.train_step(batch, Totals())
        assert float(trainer.device_step.lr) == pytest.approx(1e-3 * (step + 1), rel=1e-12)
        if step in (2, 5, 8):
            with monkeypatch.context() as report:
                report.delattr(trainer, "_ask_for_updates")
                assert trainer.updates == step + 1
    assert asked == [*range(8), *range(6, 14)]


class TestFlatGradients:
    def test_they_lie_in_the_order_of_the_parameters_at_lines_of_the_cache(self) -> None:
        one, two = nn.Parameter(torch.zeros(5, 7)), nn.Parameter(torch.zeros(40, dtype=BF16))
        frozen, three = nn.Parameter(torch.zeros(3), requires_grad=False), nn.Parameter(torch.zeros(()))
        gradients = FlatGradients([one, two, frozen, one, three])
        gradients.attach()
        assert [(b.dtype, b.numel()) for b in gradients.buffers] == [(FP32, 64 + 32), (BF16, 64)]
        assert one.grad.data_ptr() == gradients.buffers[0].data_ptr()
        assert three.grad.data_ptr() == one.grad.data_ptr() + 2 * ALIGNMENT
        assert frozen.grad is None
        (one.sum() + two.sum() * 2 + three * 3).backward()
        one.sum().backward()
        assert gradients.buffers[0].tolist() == [2.0] * 35 + [0.0] * 29 + [3.0] + [0.0] * 31
        assert gradients.buffers[1].tolist() == [2.0] * 40 + [0.0] * 24
        gradients.zero()
        assert not any(buffer.any() for buffer in gradients.buffers)

    def test_a_parameter_without_gradient_is_left_alone(self) -> None:
        """As in torch: neither decayed nor counted, and again with the others when it gets one."""
        used, unused = (nn.Parameter(torch.ones(4)) for _ in range(2))
        twins = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        flat = FlatGradients([used, unused])
        ours, theirs = AdamW([used, unused], lr=0.1), AdamW(twins, lr=0.1)
        for step in range(4):
            flat.attach()
            (used.sum() + (unused.sum() * 0 if step == 2 else 0)).backward()
            (twins[0].sum() + (twins[1].sum() * 0 if step == 2 else 0)).backward()
            with flat.of_the_step():
                assert (unused.grad is None) == (step != 2)
                ours.step()
            flat.zero()
            theirs.step()
            theirs.zero_grad()
            assert used.grad is None and unused.grad is None
        assert torch.equal(used, twins[0]) and torch.equal(unused, twins[1])
        assert ours.state[unused]["step"] == 1 and ours.state[used]["step"] == 4
        assert float(unused.detach()[0]) == pytest.approx(1 - 0.1 * 0.01)  # decayed once

    def test_every_parameter_of_the_model_gets_one_in_each_step(self) -> None:
        """So a step without any next-sentence label decays the pooler, as it always did."""
        for cuda_graph in (False, True):
            trainer, batch = make_trainer(cuda_graph=cuda_graph), make_batches(1)[0]
            batch.next_sentence_labels.fill_(IGNORE_INDEX)
            before = trainer.model.bert.pooler.dense.weight.detach().clone()
            trainer.train_step([batch], Totals())
            assert len(trainer.optimizer.state) == len(list(trainer.model.parameters()))
            assert not torch.equal(before, trainer.model.bert.pooler.dense.weight)

    @pytest.mark.parametrize("flat", [False, True])
    def test_many_micro_batches_add_up_in_fp32(self, flat: bool) -> None:
        """512 times 2**-9 is 1; a sum in bf16 stops at 0.5, for what is added is half a unit there."""
        p = nn.Parameter(torch.zeros(3, dtype=BF16))
        collect_in_fp32([p])
        if flat:
            gradients = FlatGradients([p])
            gradients.attach()
        for _ in range(512):
            (p.sum() * 2**-9).backward()
        assert p.grad.dtype == FP32
        assert p.grad.tolist() == [1.0] * 3


class TestBf16Weights:
    def test_it_follows_fp32_and_the_model_is_what_it_was_rounded_from(self) -> None:
        losses = {}
        batches = make_batches(1) * 30
        for precision in ("fp32", "bf16"):
            trainer = make_trainer(precision, dropout=0.0, lr=2e-3)
            history = [run(trainer, [batch], 1)["loss"] for batch in batches]
            losses[precision] = torch.tensor(history)
        assert losses["fp32"][-1] < losses["fp32"][0] - 0.4
        assert (losses["bf16"] - losses["fp32"]).abs().max() < 0.05
        assert all(p.dtype == BF16 for p in trainer.model.parameters())
        for name, weight in trainer.weights().items():
            assert weight.dtype == FP32
            assert torch.equal(weight.to(BF16), trainer.model.state_dict()[name]), name
        for state in trainer.optimizer.state.values():
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == state["master"].dtype == FP32

    def test_the_first_master_weights_are_those_before_the_rounding(self) -> None:
        exact, lowered = make_trainer("fp32"), make_trainer("bf16")
        for name, weight in exact.model.state_dict().items():
            assert torch.equal(lowered.weights()[name], weight), name

    def test_updates_too_small_for_bf16_add_up(self) -> None:
        """A weight of 1 moves by 1e-4 a step: 39 of them are half a unit of bf16 there."""
        trainer = make_trainer("bf16", kind=AdamW, dropout=0.0, lr=1e-4)
        trainer.learning_rate = lambda k: 1e-4
        norm = trainer.model.bert.encoder.layer[0].output.LayerNorm.weight
        batch = make_batches(1)
        run(trainer, batch, 1)
        assert torch.equal(norm, torch.ones_like(norm))
        assert (trainer.optimizer.state[norm]["master"] != 1).all()
        run(trainer, batch * 79, 1)
        assert (norm != 1).float().mean() > 0.5

    @pytest.mark.parametrize("before", ["fp32", "bf16", "bf16-autocast"])
    @pytest.mark.parametrize("after", ["fp32", "bf16"])
    def test_a_run_goes_on_exactly_also_in_another_precision(
        self, tmp_path: Path, before: str, after: str
    ) -> None:
        batches = make_batches(6)
        whole = make_trainer(before)
        run(whole, batches[:3], 1)
        optimizer_state.write(
            tmp_path / "state", optimizer_state.host_copy(whole.model, whole.optimizer, Ranks()), Ranks()
        )
        weights, state = copy.deepcopy((whole.weights(), whole.state_dict()))
        resumed = make_trainer(after)
        optimizer_state.load(tmp_path / "state", resumed.model, resumed.optimizer, Ranks())
        resumed.load_weights(weights)
        resumed.load_state_dict(state)
        for name, weight in resumed.weights().items():
            assert torch.equal(weight, weights[name]), name
        for trainer in (whole, resumed):
            run(trainer, batches[3:], 1)
        if before == after:
            assert_same_state(whole, resumed)
        else:
            for name, weight in resumed.weights().items():
                torch.testing.assert_close(weight, whole.weights()[name], atol=2e-3, rtol=0.1)
