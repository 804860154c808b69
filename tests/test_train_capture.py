"""CUDA graphs of a training step: what is captured, in which order, and what replays compute.

A CPU has no graphs; `tests/op_tape.py` has stand-ins that record torch's operations and run them again.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastbert import AdamW, BertConfig, BertForPreTraining
from fastbert.batch import IGNORE_INDEX
from fastbert.data.device_masking import DeviceMasking
from fastbert.data.loader import LoaderSettings, PackedLoader, Vocabulary, WindowBuilder
from fastbert.ops import attention_eager, backend
from fastbert.ops.backend import EagerFallbackWarning
from fastbert.optim import parameter_groups
from fastbert.train.capture import WARM_UPS, CannotCapture, StaticInputs, capture
from fastbert.train.step import MICRO_BATCHES
from fastbert.train.trainer import Totals, Trainer
from tests.documents import random_store
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted
from tests.op_tape import FakeCuda, Tape, without_launches
from tests.packed_batches import make_batches as make_packed
from tests.test_train_trainer import CONFIG, make_batches

CPU = torch.device("cpu")
HOST_READS = (
    *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__"),
    *("nonzero", "cpu", "numpy", "equal"),
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class TestCapture:
    def test_a_replay_on_a_cpu_is_a_call(self) -> None:
        inputs = StaticInputs([torch.zeros(3)], CPU)
        graph = capture(lambda: inputs.tensors[0] * 2, CPU)
        assert not graph.is_graph
        inputs.load([torch.tensor([1.0, 2.0, 3.0])])
        assert graph.replay().tolist() == [2.0, 4.0, 6.0]
        inputs.load([torch.tensor([5.0, 5.0, 5.0])])
        assert graph.replay().tolist() == [10.0, 10.0, 10.0]

    def test_it_warms_up_on_a_stream_of_its_own_and_captures_there(self, cuda: FakeCuda) -> None:
        runs: list[str] = []

        def function() -> None:
            runs.append(cuda.streams[-1].name)

        graph = capture(function, CPU, pool="shared", generators=[torch.Generator()])
        assert graph.is_graph
        assert cuda.calls == [
            "stream0 waits for main",
            "main waits for stream0",
            "register a generator",
            "capture on stream0, thread_local, pool shared",
        ]
        # the fake capture runs where it is called; torch's runs on the stream that it is given
        assert runs == ["stream0"] * WARM_UPS + ["main"]
        graph.replay()
        assert cuda.calls[-1] == "replay on main" and len(runs) == WARM_UPS + 1

    def test_replays_compute_with_new_inputs_and_return_the_same_tensor(self, cuda: FakeCuda) -> None:
        inputs = StaticInputs([torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)], CPU)
        graph = capture(lambda: inputs.tensors[0].sum(dim=1) + inputs.tensors[1], CPU)
        inputs.load([torch.ones(2, 2), torch.tensor([10, 20])])
        first = graph.replay()
        assert first.tolist() == [12.0, 22.0]
        inputs.load([torch.full((2, 2), 3.0), torch.tensor([0, 1])])
        assert graph.replay() is first and first.tolist() == [6.0, 7.0]

    def test_random_numbers_are_those_of_calls(self, cuda: FakeCuda) -> None:
        own = torch.Generator().manual_seed(3)

        def function() -> tuple[Tensor, Tensor]:
            return torch.randint(2**62, (1,)), torch.rand(2, generator=own)

        torch.manual_seed(7)
        called = [function() for _ in range(3)]
        torch.manual_seed(7)
        own.manual_seed(3)
        kept = own.get_state()
        graph = capture(function, CPU, generators=[own])
        own.set_state(kept)  # the fake capture draws from it, which a real one does not
        for expected in called:
            for value, wanted in zip(graph.replay(), expected):
                assert torch.equal(value, wanted)

    def test_a_failing_capture_is_a_reason_in_one_sentence(self, cuda: FakeCuda) -> None:
        def function() -> None:
            torch.rand(1)
            if cuda.calls[-1].startswith("capture"):
                raise RuntimeError("operation not permitted when stream is capturing.\nCompile with ...")

        with pytest.raises(CannotCapture) as caught:
            capture(function, CPU)
        expected = "the capture failed: operation not permitted when stream is capturing"
        assert str(caught.value) == expected
        assert cuda.calls[-1] == "renew a generator"

    def test_an_error_of_the_warm_up_goes_through_and_nothing_was_drawn(self, cuda: FakeCuda) -> None:
        def function() -> None:
            torch.rand(1)
            raise IndexError("an id is outside its table")

        before = torch.get_rng_state()
        with pytest.raises(IndexError, match="outside its table"):
            capture(function, CPU)
        assert torch.equal(before, torch.get_rng_state())


class TestStaticInputs:
    EXAMPLES = (
        torch.arange(5),
        torch.tensor([True, False, True]),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(3, 2, dtype=torch.bfloat16),
        torch.zeros(()),
    )

    def test_they_keep_their_places_in_one_block(self) -> None:
        inputs = StaticInputs(self.EXAMPLES, CPU)
        places = [t.data_ptr() for t in inputs.tensors]
        values = [torch.arange(5) * 7, ~self.EXAMPLES[1], self.EXAMPLES[2], torch.rand(3, 2).bfloat16()]
        inputs.load([*values, torch.tensor(2.5)])
        assert [t.data_ptr() for t in inputs.tensors] == places
        assert len({t.untyped_storage().data_ptr() for t in inputs.tensors}) == 1
        for mine, given in zip(inputs.tensors, [*values, torch.tensor(2.5)]):
            assert mine.dtype == given.dtype and torch.equal(mine, given)

    def test_other_shapes_and_types_are_refused(self) -> None:
        inputs = StaticInputs([torch.zeros(2, dtype=torch.int64)], CPU)
        for other in (torch.zeros(3, dtype=torch.int64), torch.zeros(2)):
            assert not inputs.fits([other])
            with pytest.raises(ValueError, match=r"wanted \[2\] torch.int64, got \["):
                inputs.load([other])

    def test_two_ways_in_turn_and_the_host_waits_for_the_one_of_two_loads_ago(self, cuda: FakeCuda) -> None:
        inputs = StaticInputs([torch.zeros(2)], CPU)
        cuda.calls.clear()
        for load in range(3):
            inputs.load([torch.full((2,), float(load))])
            assert inputs.tensors[0].tolist() == [load, load]
        # event0 and event2 say that a block has arrived, event1 and event3 that it was taken
        one_way = [
            "the host waits for event0",
            "stream4 waits for event1",
            "stream4 records event0",
            "main waits for event0",
            "main records event1",
        ]
        other_way = [
            call.replace("event1", "event3").replace("event0", "event2").replace("event13", "event3")
            for call in one_way
        ]
        assert cuda.calls == one_way + other_way + one_way


def make_trainer(
    precision: str = "fp32",
    dropout: float = 0.1,
    device: str = "cpu",
    cuda_graph: bool | None = None,
    masking: Any = None,
    **config: Any,
) -> Trainer:
    torch.manual_seed(0)
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = BertForPreTraining(BertConfig(**{**CONFIG, **dropouts, **config})).to(device)
    optimizer = AdamW(parameter_groups(model, 0.01), lr=1e-3)
    return Trainer(model, optimizer, lambda k: 1e-3 * (1 + k), precision, masking, cuda_graph)


def reasons_of(trainer: Trainer, batches: list[Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in batches:
            trainer.train_step([batch], Totals())
    prefix = "the training step runs without a CUDA graph: "
    return [str(w.message).removeprefix(prefix) for w in said if w.category is EagerFallbackWarning]


class TestReasons:
    """Why steps are not captured, each said once; the steps run all the same."""

    def test_a_cpu(self) -> None:
        trainer = make_trainer(cuda_graph=True)
        assert reasons_of(trainer, make_batches(2)) == ["the model is on cpu"]
        assert trainer.graphed_step is not None and not trainer.graphed_step.is_graph
        assert make_trainer().graphed_step is None  # by default a CPU is not asked

    def test_padded_batches(self) -> None:
        padded = [batch.padded() for batch in make_batches(2)]
        reason = "padded batches have other shapes at each step: leave out --no-packed"
        trainer = make_trainer(cuda_graph=True)
        assert reasons_of(trainer, padded) == [reason] and trainer.step == trainer.updates == 2

    def test_hooks(self) -> None:
        def module(trainer: Trainer) -> None:
            trainer.model.bert.encoder.layer[1].register_forward_hook(lambda *_: None)

        def parameter(trainer: Trainer) -> None:
            trainer.model.bert.pooler.dense.weight.register_hook(lambda grad: grad)

        def optimizer(trainer: Trainer) -> None:
            trainer.optimizer.register_step_pre_hook(lambda *_: None)

        for hook, name in (
            (module, "bert.encoder.layer.1"),
            (parameter, "bert.pooler.dense.weight"),
            (optimizer, "AdamW"),
        ):
            trainer = make_trainer(cuda_graph=True)
            hook(trainer)
            expected = f"{name} has hooks, whose Python a graph would not run: remove them"
            assert reasons_of(trainer, make_batches(2)) == [expected]

    def test_activation_checkpointing_with_dropout(self) -> None:
        trainer = make_trainer(cuda_graph=True)
        trainer.model.gradient_checkpointing_enable()
        (reason,) = reasons_of(trainer, make_batches(2))
        assert reason.startswith("activation checkpointing with dropout")
        # and without dropout no random state is kept, which a capture would refuse
        trainer = make_trainer(cuda_graph=True, dropout=0.0)
        trainer.model.gradient_checkpointing_enable()
        assert reasons_of(trainer, make_batches(2)) == ["the model is on cpu"]
        assert trainer.model.bert.encoder.checkpoint_options["preserve_rng_state"] is False

    def test_a_capture_that_fails(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """The step then runs as it is, on the numbers of a step that nobody tried to capture."""
        without_launches(monkeypatch)
        batches, results = make_batches(3), []
        for cuda_graph in (False, True):
            trainer = make_trainer(cuda_graph=cuda_graph)
            real = trainer.model.loss_parts

            def spoilt(batch: Any, real: Any = real) -> Any:
                if cuda.calls and cuda.calls[-1].startswith("capture"):
                    raise RuntimeError("a kernel waits for the device")
                return real(batch)

            trainer.model.loss_parts = spoilt  # type: ignore[method-assign]
            torch.manual_seed(5)
            reasons = reasons_of(trainer, batches)
            expected = ["the capture failed: a kernel waits for the device"] if cuda_graph else []
            assert reasons == expected
            results.append(trainer)
        assert "replay on main" not in cuda.calls
        assert_same_state(*results)

    def test_the_eager_optimizer(self, cuda: FakeCuda) -> None:
        trainer = make_trainer(cuda_graph=True)
        with backend.use("eager"):
            reasons = reasons_of(trainer, make_batches(2))
        assert reasons == ["the eager optimizer reads the gradients' norm on the host"]
        assert cuda.calls == []


def assert_same_state(one: Trainer, other: Trainer) -> None:
    for (name, mine), theirs in zip(one.weights().items(), other.weights().values()):
        assert torch.equal(mine, theirs), name
    for mine, theirs in zip(one.optimizer.state.values(), other.optimizer.state.values()):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert one.state_dict() == other.state_dict()


class TestWholeSteps:
    @pytest.fixture(autouse=True)
    def as_on_a_gpu(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
        without_launches(monkeypatch)
        with warnings.catch_warnings():
            warnings.simplefilter("error", EagerFallbackWarning)
            yield

    @pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("bf16", 2), ("fp16", 1)])
    def test_replays_are_plain_steps(self, precision: str, accumulate: int, cuda: FakeCuda) -> None:
        """Bit for bit, with dropout, other batches, a rate that changes, and a step that must be skipped."""
        batches = make_batches(4 * accumulate)
        results = []
        for cuda_graph in (False, True):
            trainer = make_trainer(precision, cuda_graph=cuda_graph)
            weight = trainer.model.bert.pooler.dense.weight.detach()
            totals, norms = Totals(), []
            torch.manual_seed(5)
            for step in range(4):
                kept = weight[0, 0].clone()
                if step == 2:
                    weight[0, 0] = torch.nan
                trainer.train_step(batches[step * accumulate : (step + 1) * accumulate], totals)
                weight[0, 0] = torch.where(weight[0, 0].isnan(), kept, weight[0, 0])
                norms.append(float(trainer.optimizer.grad_norm))
            results.append((trainer, totals.sums(), norms, float(trainer.device_step.lr)))
        (plain, *theirs), (replayed, *ours) = results
        assert replayed.graphed_step is not None and replayed.graphed_step.is_graph
        assert cuda.calls.count("replay on main") == 4
        assert len(cuda.tapes) == 1 and len(cuda.tapes[0].entries) > 100
        assert repr(ours) == repr(theirs)  # nan is nan
        assert plain.updates == 3 and ours[1][2] != ours[1][2]
        assert ours[-1] == pytest.approx(1e-3 * (1 + 2), rel=1e-12)  # the rate waits for the skipped step
        assert_same_state(plain, replayed)

    def test_autocast_around_the_steps_casts_the_weights_anew_in_each(self, cuda: FakeCuda) -> None:
        """It keeps the weights that it has cast, but those of the warm-up are no part of a graph."""
        batches, results = make_batches(3), []
        for cuda_graph in (False, True):
            trainer, totals = make_trainer(cuda_graph=cuda_graph), Totals()
            torch.manual_seed(5)
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16):
                    trainer.train_step([batch], totals)
            results.append((trainer, totals.metrics()))
        (plain, theirs), (replayed, ours) = results
        assert ours == theirs
        assert_same_state(plain, replayed)

    def test_a_step_of_other_shapes_is_none_of_the_graph(self, cuda: FakeCuda) -> None:
        """It runs as it is, and the graph goes on afterwards, with the norm that is asked for."""
        batches, results = make_batches(5), []
        for cuda_graph in (False, True):
            trainer, norms = make_trainer("bf16", cuda_graph=cuda_graph), []
            torch.manual_seed(5)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EagerFallbackWarning)
                for chosen in (batches[:2], batches[2:3], batches[3:]):
                    trainer.train_step(chosen, Totals())
                    norms.append(float(trainer.optimizer.grad_norm))
            results.append((trainer, norms))
        (plain, theirs), (replayed, ours) = results
        assert cuda.calls.count("replay on main") == 2
        assert ours == theirs and len(set(ours)) == 3
        assert_same_state(plain, replayed)

    def test_masks_of_the_device_are_replayed_anew(self, cuda: FakeCuda) -> None:
        vocabulary = Vocabulary(cls=2, sep=3, mask=4, unk=1, ordinary=np.arange(10, 100))
        settings = LoaderSettings(seq_len=32, tokens_per_batch=128, seed=0)
        store = random_store(200, vocab_size=100)
        builder = WindowBuilder(store, np.arange(200), vocabulary, settings, masks=False)
        masking = DeviceMasking.of(settings, vocabulary, builder.shapes.num_predictions, CPU)
        batches = list(islice(PackedLoader(builder), 1)) * 3  # another mask each time

        sums = []
        for cuda_graph in (False, True):
            trainer, totals = make_trainer(cuda_graph=cuda_graph, masking=masking), Totals()
            torch.manual_seed(5)
            for batch in batches:
                trainer.train_step([batch], totals)
            sums.append(totals.sums())
            plain_masks = [masking(batch, step * MICRO_BATCHES) for step, batch in enumerate(batches)]
            asked = sum(int((batch.masked_labels != IGNORE_INDEX).sum()) for batch in plain_masks)
            assert totals.sums()["mlm_count"] == asked
        assert sums[0] == sums[1]

    def test_the_operations_depend_on_shapes_only(self, cuda: FakeCuda) -> None:
        """Recorded at the first step, and again two steps later with another batch: no number has changed."""
        trainer, batches = make_trainer("bf16", cuda_graph=True), make_batches(4)
        trainer.train_step(batches[:1], Totals())
        trainer.train_step(batches[1:2], Totals())
        assert trainer.graphed_step is not None
        trainer.graphed_step.forget()
        trainer.train_step(batches[3:], Totals())
        one, other = (tape.shape() for tape in cuda.tapes)
        assert len(one) == len(other)
        for mine, theirs in zip(one, other):
            assert mine == theirs

    @pytest.mark.parametrize("cuda_graph", [False, True])
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_the_host_reads_nothing_between_two_reports(self, precision: str, cuda_graph: bool) -> None:
        trainer, batches = make_trainer(precision, cuda_graph=cuda_graph), make_batches(4)
        assert_reads_nothing(trainer, batches)


def assert_reads_nothing(trainer: Trainer, batches: list[Any]) -> None:
    """No step after the first one looks at a tensor, neither by a method nor in an operation."""
    totals = Totals()
    trainer.train_step(batches[:1], totals)
    reads: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in HOST_READS:
            read = getattr(Tensor, name)

            def counted(self: Tensor, *args: Any, name: str = name, read: Any = read) -> Any:
                reads.append(name)
                return read(self, *args)

            patch.setattr(Tensor, name, counted)
        # a tape refuses reads that no method shows; within a replay it has refused them at the capture
        with Tape() if trainer.graphed_step is None else nullcontext():
            for batch in batches[1:]:
                trainer.train_step([batch], totals)
        assert reads == []
        assert totals.metrics()["loss"] > 0 and trainer.updates > 0
        assert "tolist" in reads and "__int__" in reads


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")
    run_interpreted(__file__)


class TestKernels:
    __test__ = INTERPRETED

    def test_the_host_reads_nothing_between_two_reports(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All of a step in kernels and operations of torch, from the masks to the update."""
        for module in (backend, attention_eager):
            monkeypatch.setattr(module, "host_may_read", lambda x: False)
        small = {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16}
        trainer = make_trainer("bf16", num_hidden_layers=1, **small)
        batches = [
            make_packed([9, 7], vocab_size=100, seed=seed, filler=4, empty_ends=2, unused_slots=3)[0]
            for seed in range(2)
        ]
        with backend.use("triton"):
            assert_reads_nothing(trainer, batches)
        assert set(backend.last_run().values()) == {"triton"}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_replays_steps_on_a_gpu(precision: str, accumulate: int) -> None:
    """The numbers of plain steps, and the host waits for none of them."""
    batches = make_batches(5 * accumulate)
    results = []
    for cuda_graph in (False, True):
        trainer = make_trainer(precision, cuda_graph=cuda_graph, device="cuda")
        totals = Totals()
        torch.manual_seed(5)
        trainer.train_step(batches[:accumulate], totals)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for first in range(accumulate, len(batches), accumulate):
                trainer.train_step(batches[first : first + accumulate], totals)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        results.append((trainer, totals.metrics()))
    (plain, theirs), (replayed, ours) = results
    assert replayed.graphed_step is not None and replayed.graphed_step.is_graph
    assert ours == pytest.approx(theirs, rel=1e-6)
    for (name, mine), wanted in zip(replayed.weights().items(), plain.weights().values()):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, msg=name)
