"""Passes on static buffers, by size: the numbers of the plain path, whatever changes in between.

On a CPU a recorded pass is a call on the static buffers, or the list of its operators, which sees as little
as a CUDA graph of what changed since, and fails on one that would wait for a GPU.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastbert import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    PackedBatch,
    inference,
)
from fastbert.inference import (
    Bucket,
    BucketGraphs,
    sequence_bucket,
    token_bucket,
    use_cuda_graphs,
)
from fastbert.ops import backend
from fastbert.train import capture as train_capture
from fastbert.train.capture import CannotCapture, capture
from tests.op_tape import FakeCuda
from tests.packed_batches import make_batches
from tests.recorded_operators import record_calls
from tests.small_models import small_config, spread_weights

COMES_AGAIN = BucketGraphs._comes_again


def small_bert(**options: Any) -> BertModel:
    model = BertModel(small_config(), **options)
    spread_weights(model)
    return model.eval()


@pytest.fixture
def static(recorder: Any) -> Callable[..., Any]:
    """(model, **options) -> the model, whose BERTs now compute on static buffers."""

    def convert(model: Any, **options: Any) -> Any:
        for bert in use_cuda_graphs(model).models:
            bert.graphs = BucketGraphs(record=recorder, **options)
        return model

    return convert


def graphs_of(model: Any) -> BucketGraphs:
    graphs: BucketGraphs = getattr(model, "bert", model).graphs
    return graphs


def packed(*seqlens: int, seed: int = 0, **options: Any) -> PackedBatch:
    return make_batches(seqlens, vocab_size=211, seed=seed, **options)[0]


def plain(model: Any, *inputs: Any, **named: Any) -> Any:
    """The outputs without static buffers."""
    bert = getattr(model, "bert", model)
    graphs, bert.graphs = bert.graphs, None
    try:
        return model(*inputs, **named)
    finally:
        bert.graphs = graphs


def assert_same(ours: Any, theirs: Any, atol: float = 2e-6) -> None:
    assert ours.keys() == theirs.keys()
    for x, y in zip(ours.to_tuple(), theirs.to_tuple()):
        torch.testing.assert_close(x, y, atol=atol, rtol=2e-6)


@pytest.fixture(autouse=True)
def _at_once_and_without_refusals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(BucketGraphs, "_comes_again", lambda self, key: True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", backend.EagerFallbackWarning)
        yield


# ---- sizes


def test_four_sizes_to_a_doubling():
    assert [token_bucket(n) for n in (0, 1, 64, 65, 80, 81, 97, 112, 113, 128, 129, 161, 16_384)] == [
        64, 64, 64, 80, 80, 96, 112, 112, 128, 128, 160, 192, 16_384,
    ]  # fmt: skip
    assert [sequence_bucket(n) for n in (0, 1, 8, 9, 16, 17, 1000)] == [8, 8, 8, 16, 16, 32, 1024]


def test_what_filler_costs():
    shares = [1 - n / token_bucket(n) for n in range(65, 16_385)]
    assert max(shares) == pytest.approx(1 / 5, abs=0.01)
    # of batches whose sizes are spread evenly over every doubling
    weights = [1 / n for n in range(65, 16_385)]
    mean = sum(s * w for s, w in zip(shares, weights)) / sum(weights)
    assert mean == pytest.approx(0.08, abs=0.005)
    assert len({token_bucket(n) for n in range(16_385)}) == 33


def test_two_kinds_of_longest_sequences():
    assert Bucket.of(70, 3, 64, 512) == Bucket(80, 8, 64)
    assert Bucket.of(70, 3, 65, 512) == Bucket(80, 8, 512)
    assert Bucket.of(20, 3, 20, 40) == Bucket(64, 8, 40)


# ---- values


def test_the_bits_of_a_plain_pass_on_a_filled_batch(static):
    """What is left between the two is the height of the matrix products."""
    model = static(small_bert())
    batch = packed(7, 1, 30, 12)
    filler = torch.zeros(64 - 50, dtype=torch.long)
    filled = PackedBatch(
        *(torch.cat([x, filler]) for x in (batch.input_ids, batch.token_type_ids, batch.position_ids)),
        torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:].repeat(4)]),
        64, filler[:0], filler[:0], filler[:0], 50,
    )  # fmt: skip
    ours, theirs = model(batch), plain(model, filled)
    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state[:50])
    assert torch.equal(ours.pooler_output, theirs.pooler_output[:4])
    assert ours.pooler_output.shape[0] == 4


# one token, one slot short of a size, a size, one more, several sizes on, more sequences than the least slots
SIZES = ((1,), (2,), (33, 30), (32, 32), (64, 1), (50, 50, 29), (1,) * 9, (64,) * 5, (3, 60) * 4)


@pytest.mark.parametrize("pooler", [True, False])
def test_every_size(static, pooler):
    model = static(small_bert(add_pooling_layer=pooler))
    for seqlens in (*SIZES, *reversed(SIZES)):
        batch = packed(*seqlens)
        assert_same(model(batch), plain(model, batch))
    # (64, 8, 64), (80, …), (160, …), (64, 16, …), (320, …), (256, …): a second batch records nothing
    assert len(graphs_of(model)) == 6


def test_filler_and_empty_slots_of_the_caller(static):
    model = static(small_bert())
    batch = packed(7, 12, filler=15, empty_ends=3)
    assert_same(model(batch), plain(model, batch))


@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_padded_rows(static, side):
    model = static(small_bert())
    mask = torch.arange(20) < torch.tensor([[20], [3], [1], [0]])
    if side == "left":
        mask = mask.flip(1)
    elif side == "both":
        mask = torch.arange(20) % 3 != 1
        mask = mask.expand(4, 20)
    inputs = {
        "input_ids": torch.randint(5, 211, (4, 20)),
        "attention_mask": mask.long(),
        "token_type_ids": (torch.arange(20) > 9).long().expand(4, 20),
    }
    assert_same(model(**inputs), plain(model, **inputs))
    assert_same(model(inputs["input_ids"]), plain(model, inputs["input_ids"]))
    everything_masked = {**inputs, "attention_mask": torch.zeros(4, 20)}
    assert_same(model(**everything_masked), plain(model, **everything_masked))
    assert len(graphs_of(model)) == 2


@pytest.mark.parametrize("head", [BertForSequenceClassification, BertForQuestionAnswering])
def test_heads(static, head):
    model = head(small_config())
    spread_weights(model)
    static(model.eval())
    for inputs in (packed(7, 12), packed(64, 3)):
        assert_same(model(inputs), plain(model, inputs))
    ids, mask = torch.randint(5, 211, (3, 9)), torch.arange(9) < torch.tensor([[9], [2], [5]])
    assert_same(model(ids, mask), plain(model, ids, mask))
    assert len(graphs_of(model)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(static, dtype):
    model = static(small_bert())
    batch = packed(7, 12)
    outside = model(batch)
    with torch.autocast("cpu", dtype):
        ours, theirs = model(batch), plain(model, batch)
    assert_same(ours, theirs, atol=0.05)
    assert (ours.last_hidden_state - outside.last_hidden_state).abs().max() > 1e-4
    assert torch.equal(model(batch).last_hidden_state, outside.last_hidden_state)
    assert len(graphs_of(model)) == 2


def test_another_backend_is_another_recording(static):
    model = static(small_bert())
    batch = packed(7, 12)
    first = model(batch)
    with backend.use("eager"):
        assert torch.equal(model(batch).last_hidden_state, first.last_hidden_state)
    assert len(graphs_of(model)) == 2


def test_results_are_the_callers(static):
    model = static(small_bert())
    first = model(packed(7, 12))
    kept = copy.deepcopy(first)
    model(packed(10, 9, seed=1))
    for x, y in zip(first.to_tuple(), kept.to_tuple()):
        assert torch.equal(x, y)


def test_a_token_of_an_earlier_batch_is_gone():
    """A bad id must not stay behind as filler."""
    model = small_bert()
    model.graphs = BucketGraphs(record=record_calls)
    batch = packed(30, 30)
    with pytest.raises(IndexError, match="input_ids holds 999"):
        model(PackedBatch(**{**vars(batch), "input_ids": batch.input_ids.clone().fill_(999)}))
    assert_same(model(packed(7)), plain(model, packed(7)))


def test_no_graph_for_other_calls(static):
    model = static(small_bert(), max_tokens=128)
    batch, ids = packed(7, 12), torch.randint(5, 211, (2, 6))
    for inputs, named in (
        ((batch,), {"output_hidden_states": True}),
        ((ids,), {"output_attentions": True}),
        ((), {"inputs_embeds": torch.randn(2, 6, 64)}),
        ((packed(64, 64, 1),), {}),
    ):
        ours, theirs = model(*inputs, **named), plain(model, *inputs, **named)
        assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
    assert len(graphs_of(model)) == 0
    model(packed(64, 64))
    assert len(graphs_of(model)) == 1


# ---- nothing stale


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replace_a_module(model: BertModel) -> None:
    old = model.encoder.layer[1].attention.self.value
    new = Doubled(64, 64)
    new.load_state_dict(old.state_dict())
    model.encoder.layer[1].attention.self.value = new


def other_weights() -> dict[str, Tensor]:
    return BertModel(small_config()).state_dict()


CHANGES: dict[str, Callable[[BertModel], Any]] = {
    "load_state_dict": lambda m: m.load_state_dict(BertModel(small_config()).state_dict()),
    "load_state_dict(assign)": lambda m: m.load_state_dict(
        BertModel(small_config()).state_dict(), assign=True
    ),
    "in place": lambda m: m.encoder.layer[0].output.dense.weight.mul_(2),
    "data": lambda m: setattr(m.pooler.dense.weight, "data", torch.randn(64, 64)),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "another module": replace_a_module,
    "another class": lambda m: setattr(m.encoder.layer[0].intermediate.dense, "__class__", Doubled),
    "fewer layers": lambda m: setattr(m.encoder, "layer", m.encoder.layer[:1]),
    "no pooler": lambda m: setattr(m, "pooler", None),
    "more words": lambda m: m.resize_token_embeddings(300),
    "another forward": lambda m: setattr(m.pooler, "forward", lambda x: x + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(static, name):
    model, batch = small_bert(), packed(7, 12)
    static(model)
    before = model(batch)
    torch.manual_seed(3)
    CHANGES[name](model)
    after, expected = model(batch), plain(model, batch)
    assert_same(after, expected, atol=0.05 if name == "bfloat16" else 2e-6)
    if name not in ("more words", "no pooler", "double"):
        assert not torch.equal(before.last_hidden_state, after.last_hidden_state) or not torch.equal(
            before.pooler_output, after.pooler_output
        )


def test_training_in_between(static):
    model = static(BertModel(small_config(hidden_dropout_prob=0.5)).eval())
    batch = packed(7, 12)
    before = model(batch).last_hidden_state
    model.train()
    with torch.enable_grad():
        torch.manual_seed(1)
        ours = model(batch).last_hidden_state
        torch.manual_seed(1)
        assert torch.equal(ours, plain(model, batch).last_hidden_state)
        assert ours.requires_grad
        ours.square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    after = model(batch)
    assert_same(after, plain(model, batch))
    assert not torch.equal(after.last_hidden_state, before)
    assert len(graphs_of(model)) == 1


def test_one_module_in_training_mode_counts(static):
    """Monte-Carlo dropout: a model in eval mode, its dropouts not."""
    model = static(BertModel(small_config(hidden_dropout_prob=0.5)).eval())
    model.encoder.layer[1].output.dropout.train()
    assert not torch.equal(model(packed(7)).last_hidden_state, model(packed(7)).last_hidden_state)


def test_hooks_are_called(static):
    model, seen = static(small_bert()), []
    model(packed(7))
    handle = model.encoder.layer[1].register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(backend.EagerFallbackWarning, match="a module has hooks"):
        model(packed(7))
    model(packed(8))  # said once
    assert len(seen) == 2
    handle.remove()
    assert_same(model(packed(7)), plain(model, packed(7)))


def test_gradients_are_not_lost(static):
    model = static(small_bert())
    with torch.enable_grad(), pytest.warns(backend.EagerFallbackWarning, match="gradients are wanted"):
        assert model(packed(7)).last_hidden_state.requires_grad
    assert len(graphs_of(model)) == 0


def test_copies_and_pickles_have_their_own_recordings(static):
    model = static(small_bert(), max_tokens=256)
    model(packed(7))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(graphs_of(other)) == 0 and graphs_of(other).max_tokens == 256
        other.embeddings.LayerNorm.bias.add_(1)
        assert_same(other(packed(7)), plain(other, packed(7)))
        assert not torch.equal(other(packed(7)).last_hidden_state, model(packed(7)).last_hidden_state)


def test_restore():
    model = small_bert()
    handle = use_cuda_graphs(model)
    assert graphs_of(model).record is capture
    with pytest.warns(backend.EagerFallbackWarning, match="on a device of type cpu, which has none"):
        ours = model(packed(7))
    handle.restore()
    assert model.graphs is None
    assert torch.equal(ours.last_hidden_state, model(packed(7)).last_hidden_state)
    with pytest.raises(ValueError, match=r"no fastbert\.BertModel is in this Linear"):
        use_cuda_graphs(nn.Linear(2, 2))


# ---- memory and threads


def test_the_least_recently_used_go_first(static):
    # a result of 64 or 80 rows and 8 pooled ones, 64 wide, in fp32, and a MiB for the graph itself
    model = static(small_bert(), max_bytes=2 * ((1 << 20) + 88 * 64 * 4))
    graphs, sizes = graphs_of(model), {"a": packed(7), "b": packed(40, 30), "c": packed(50, 40)}
    for name in "abacac":
        assert_same(model(sizes[name]), plain(model, sizes[name]))
        assert len(graphs) <= 2
    kept = {key[0].tokens for key in graphs._recorded}
    assert kept == {64, 96}


def test_two_threads(static):
    model = static(small_bert())
    batches = [packed(7, 12, seed=0), packed(10, 9, seed=1), packed(40, 30, seed=2)]
    expected = [plain(model, batch).last_hidden_state for batch in batches]
    wrong: list[str] = []

    def work(start: int) -> None:
        with torch.inference_mode():
            for turn in range(40):
                index = (start + turn) % 3
                ours = model(batches[index]).last_hidden_state
                theirs = expected[index]
                if ours.shape != theirs.shape or not torch.allclose(ours, theirs, atol=1e-5):
                    wrong.append(f"thread {start}, turn {turn}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(start,)) for start in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert len(graphs_of(model)) == 2


# ---- what is asked of a capture


class Capture:
    """In the place of `capture`: notes what it is asked, and what lies in the buffers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.error = ""

    def __call__(self, run: Callable[[], Any], device: torch.device, *, pool: Any) -> Any:
        self.notes.append(f"capture on {device}")
        if self.error:
            raise CannotCapture(self.error)
        recorded = record_calls(run, device, pool=pool)
        replay = recorded.run

        def noted() -> None:
            self.notes.append("replay")
            replay()

        recorded.run = noted
        return recorded


def test_a_size_is_captured_the_second_time_and_replayed(monkeypatch):
    monkeypatch.setattr(BucketGraphs, "_comes_again", COMES_AGAIN)
    model, capturing = small_bert(), Capture()
    model.graphs = BucketGraphs(record=capturing)
    for batch in (packed(7), packed(70 - 6, 6)):
        assert torch.equal(model(batch).last_hidden_state, plain(model, batch).last_hidden_state)
    assert capturing.notes == []
    for batch in (packed(7), packed(8, seed=1), packed(70 - 6, 6), packed(9, seed=2)):
        assert_same(model(batch), plain(model, batch))
    assert capturing.notes == ["capture on cpu", "replay", "replay", "capture on cpu", "replay", "replay"]


def test_the_calls_of_torch_cuda(monkeypatch):
    """With stand-ins for it: `capture` itself, one pool for all sizes, and events between the calls."""
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(train_capture, "has_graphs", lambda device: True)
    monkeypatch.setattr(inference, "has_graphs", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "P")
    model = small_bert()
    model.graphs = BucketGraphs()
    with pytest.warns(backend.EagerFallbackWarning, match="attention runs eagerly, for which filler"):
        model(packed(7))
    monkeypatch.setattr(backend, "explain", lambda *_: backend.Decision("triton", "in this test"))
    for batch in (packed(7), packed(8, seed=1), packed(70 - 6, 6)):
        assert_same(model(batch), plain(model, batch))
    first, second = (
        [f"{side} waits for main", f"main waits for {side}", f"capture on {side}, thread_local, pool P"]
        for side in ("stream0", "stream3")
    )
    assert cuda.calls == [
        *(*first, "replay on main", "main records event1"),
        *("main waits for event1", "replay on main", "main records event2"),
        *("main waits for event2", *second, "replay on main", "main records event4"),
    ]
    cuda.calls.clear()
    model.double()  # the memory of the last replay is not given away before it has ended
    assert_same(model(packed(7)), plain(model, packed(7)))
    assert cuda.calls[0] == "the host waits for event4"


def test_what_cannot_be_captured_runs_and_says_why_once():
    model, capturing = small_bert(), Capture()
    model.graphs = BucketGraphs(record=capturing)
    capturing.error = "the capture failed: operation not permitted"
    with pytest.warns(backend.EagerFallbackWarning, match="graph: the capture failed: operation"):
        ours = model(packed(7))
    assert_same(ours, plain(model, packed(7)), atol=0)
    model(packed(70 - 6, 6))  # no second try, and no second word
    assert capturing.notes == ["capture on cpu"]
    # other modules may do better
    capturing.error = ""
    model.double()
    assert_same(model(packed(7)), plain(model, packed(7)))
    assert len(graphs_of(model)) == 1
