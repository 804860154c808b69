"""The loss without whole logits against F.cross_entropy on whole logits, as an operator and past it."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from fastbert import ops
from fastbert.batch import IGNORE_INDEX
from fastbert.modeling import BertForPreTraining
from fastbert.ops import backend, linear_cross_entropy
from fastbert.ops.linear_cross_entropy import _linear_cross_entropy, _linear_cross_entropy_backward
from tests.packed_batches import make_batches
from tests.peak_bytes import PeakBytes
from tests.small_models import small_config

module = importlib.import_module("fastbert.ops.linear_cross_entropy")


def registered(hidden, weight, bias, labels, ignore_index=IGNORE_INDEX, label_smoothing=0.0):
    return _linear_cross_entropy(hidden, weight, bias, labels, ignore_index, label_smoothing)[:3]


both = pytest.mark.parametrize("op", [linear_cross_entropy, registered], ids=["public", "operator"])


def inputs(rows, vocab, hidden=16, dtype=torch.float64):
    h = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    b = torch.randn(vocab, dtype=dtype, requires_grad=True)
    return h, w, b, torch.randint(0, vocab, (rows,))


@pytest.fixture(params=[3, 7, 1000], ids=["chunks-of-3", "chunks-of-7", "one-chunk"])
def _chunks(request, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(module, "_MIN_CHUNK_ROWS", request.param)


# ---- values -----------------------------------------------------------------------------------------------


@both
@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("ignore_index", "ignored"),
    [(IGNORE_INDEX, 0), (IGNORE_INDEX, 4), (IGNORE_INDEX, 20), (0, 4), (30, 4)],
    ids=["none-ignored", "some", "all", "word-0", "last-word"],
)
def test_matches_cross_entropy(op, ignore_index, ignored, label_smoothing):
    h, w, b, labels = inputs(20, 31)
    labels[:ignored] = ignore_index
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss, correct, count = op(h, w, b, labels, **options)
    logits = F.linear(h, w, b)
    expected = F.cross_entropy(logits, labels, reduction="sum", **options)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-12)
    counted = labels != ignore_index
    assert correct.item() == ((logits.argmax(-1) == labels) & counted).sum().item()
    assert (count.item(), count.dtype, correct.dtype) == (counted.sum().item(), torch.int64, torch.int64)
    ours = torch.autograd.grad(loss, (h, w, b))
    theirs = torch.autograd.grad(expected, (h, w, b))
    for ours_, theirs_ in zip(ours, theirs):
        torch.testing.assert_close(ours_, theirs_, atol=1e-10, rtol=1e-10)


@both
@pytest.mark.usefixtures("_chunks")
def test_gradcheck(op):
    h, w, b, labels = inputs(8, 5, hidden=3)
    labels[2] = IGNORE_INDEX
    assert gradcheck(lambda *x: op(*x, labels, IGNORE_INDEX, 0.2)[0], (h, w, b))


@both
def test_no_rows_give_zero_with_a_graph(op):
    h, w, b, labels = inputs(0, 5)
    loss, _, count = op(h, w, b, labels)
    assert (loss.item(), count.item()) == (0.0, 0)
    loss.backward()
    assert not w.grad.any()
    assert not b.grad.any()


@both
def test_closed_words_have_no_probability(op):
    h, w, b, labels = inputs(6, 9)
    with torch.no_grad():
        b[:8] = float("-inf")
    labels.fill_(8)
    loss, correct, _ = op(h, w, b, labels)
    assert (loss.item(), correct.item()) == (0.0, 6)
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (h, w, b)))


def test_lse_is_that_of_the_logits():
    h, w, b, labels = (x.detach() for x in inputs(9, 11))
    lse = _linear_cross_entropy(h, w, b, labels, IGNORE_INDEX, 0.0)[3]
    torch.testing.assert_close(lse, F.linear(h, w, b).logsumexp(1))


# ---- autograd ---------------------------------------------------------------------------------------------


@both
def test_second_backward_over_a_retained_graph_gives_the_same_gradient(op):
    h, w, b, labels = inputs(9, 11)
    loss = op(h, w, b, labels)[0]
    first = torch.autograd.grad(3 * loss, (h, w, b), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (h, w, b))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


@both
@pytest.mark.parametrize("wanted", range(8))
def test_gradients_of_what_wants_one(op, wanted):
    h, w, b, labels = inputs(9, 11)
    leaves = (h, w, b)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(h, w, b), labels, reduction="sum"), leaves)
    for number, leaf in enumerate(leaves):
        leaf.requires_grad_(bool(wanted >> number & 1))
    loss, correct, count = op(h, w, b, labels)
    assert loss.requires_grad == (wanted > 0) and not correct.requires_grad and not count.requires_grad
    if wanted:
        loss.backward()
    for leaf, theirs in zip(leaves, expected):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, theirs)
        else:
            assert leaf.grad is None


def test_without_gradients():
    h, w, b, labels = inputs(9, 11)
    with torch.no_grad():
        loss, _, _ = linear_cross_entropy(h, w, b, labels)
    assert not loss.requires_grad


@both
def test_under_activation_checkpointing(op):
    h, w, b, labels = inputs(9, 11)
    results = []
    for run in (op, lambda *x: checkpoint(op, *x, use_reentrant=False)):
        loss, correct, _ = run(h, w, b, labels)
        results.append((loss, correct, *torch.autograd.grad(2 * loss, (h, w, b))))
    assert all(torch.equal(x, y) for x, y in zip(*results))


# ---- dtypes -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "pure-bf16"])
def test_bf16_loss_is_fp32_and_as_accurate_as_torch(op, autocast):
    h, w, b, labels = inputs(64, 300, dtype=torch.float32)
    exact = F.cross_entropy(F.linear(h, w, b).double(), labels, reduction="sum")
    exact_gradients = torch.autograd.grad(exact, (h, w, b))
    if not autocast:
        h, w, b = (x.detach().bfloat16().requires_grad_() for x in (h, w, b))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # the operator's hidden states have the dtype of its products
        loss = op(h.bfloat16() if op is registered else h, w, b, labels)[0]
        plain = F.cross_entropy(F.linear(h, w, b).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert abs(loss - exact) <= 2 * abs(plain - exact) + 1e-3 * exact
    ours, theirs = torch.autograd.grad(loss, (h, w, b)), torch.autograd.grad(plain, (h, w, b))
    for x, y, z in zip(ours, theirs, exact_gradients):
        assert x.dtype == y.dtype
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 1e-5


def test_what_autocast_leaves_alone_stays_as_it_is():
    h, w, b, labels = inputs(9, 11)
    expected = linear_cross_entropy(h, w, b, labels)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(h, w, b, labels)[0]
    assert loss.dtype == torch.float64 and torch.equal(loss, expected)


@pytest.mark.parametrize(
    ("hidden", "weight"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)]
)
def test_mixed_dtypes_compute_in_the_wider_one(hidden, weight):
    h, w, b, labels = inputs(9, 11, dtype=torch.float32)
    h, w, b = (x.detach().to(t).requires_grad_() for x, t in ((h, hidden), (w, weight), (b, weight)))
    loss = linear_cross_entropy(h, w, b, labels)[0]
    wide = [x.detach().float().requires_grad_() for x in (h, w, b)]
    expected = F.cross_entropy(F.linear(*wide), labels, reduction="sum")
    torch.testing.assert_close(loss, expected)
    for ours, theirs, leaf in zip(
        torch.autograd.grad(loss, (h, w, b)), torch.autograd.grad(expected, wide), (h, w, b)
    ):
        torch.testing.assert_close(ours, theirs.to(leaf.dtype))


# ---- registration and torch.compile -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_are_registered_as_they_should_be(dtype):
    h, w, b, labels = inputs(6, 9, dtype=dtype)
    labels[1] = 0
    for label_smoothing in (0.0, 0.1):
        opcheck(_linear_cross_entropy, (h, w, b, labels, 0, label_smoothing))
    h, w, b = (x.detach() for x in (h, w, b))
    lse = _linear_cross_entropy(h, w, b, labels, 0, 0.1)[3]
    for needs in ([True, True, True], [False, True, False], [True, False, True]):
        opcheck(_linear_cross_entropy_backward, (torch.tensor(0.5), h, w, b, labels, lse, 0, 0.1, needs))


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_compiled_in_full(autocast):
    torch.compiler.reset()
    h, w, b, labels = inputs(9, 11, dtype=torch.float32)
    labels[3] = IGNORE_INDEX

    def loss_of(h, w, b):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, correct, count = linear_cross_entropy(2 * h, w, b, labels, label_smoothing=0.1)
        return loss / count, correct

    results = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        loss, correct = function(h, w, b)
        results.append((loss, correct, *torch.autograd.grad(loss, (h, w, b))))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert backend.last_run()["linear_cross_entropy_backward"] == "eager"
    torch.compiler.reset()


def test_what_ran_is_recorded():
    backend._last_run.clear()
    h, w, b, labels = inputs(9, 11)
    linear_cross_entropy(h, w, b, labels)
    assert backend.last_run() == {"linear_cross_entropy": "eager"}
    registered(h, w, b, labels)[0].backward()
    assert backend.last_run() == dict.fromkeys(
        ("linear_cross_entropy", "linear_cross_entropy_backward"), "eager"
    )


# ---- bad input --------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("label", [11, -1, -101, 2**40])
def test_a_label_beyond_the_vocabulary_is_an_index_error(op, label):
    h, w, b, labels = inputs(9, 11)
    labels[4] = label
    match = rf"labels holds {label}, but weight has vocab_size = 11 rows \(0..10\): .* ignore_index, -100"
    with pytest.raises(IndexError, match=match):
        op(h, w, b, labels)
    # marked as one that takes no part, it may lie anywhere
    assert op(h, w, b, labels, label)[2].item() == 8


def test_bad_arguments_are_one_clear_error():
    h, w, b, labels = inputs(6, 9)
    for label_smoothing in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"label_smoothing {label_smoothing} is not between 0 and 1"):
            linear_cross_entropy(h, w, b, labels, label_smoothing=label_smoothing)
    with pytest.raises(ValueError, match=r"hidden must be \[P, H\] .* \[2, 3, 16\] .* flatten"):
        linear_cross_entropy(h.view(2, 3, 16), w, b, labels)
    with pytest.raises(ValueError, match=r"labels \[P\], but they are \[6, 16\] and \[5\]"):
        linear_cross_entropy(h, w, b, labels[:5])


# ---- memory -----------------------------------------------------------------------------------------------


def test_the_operator_keeps_one_number_a_row_beside_its_inputs():
    h, w, b, labels = inputs(9, 11)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        registered(h, w, b, labels)
    given = {x.data_ptr() for x in (h, w, b, labels)}
    assert [x.shape for x in kept if x.data_ptr() not in given] == [(9,)]


def test_the_eager_path_holds_two_chunks(monkeypatch):
    P, V, H = 640, 1000, 16
    monkeypatch.setattr(module, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(module, "_MIN_CHUNK_ROWS", P // 16)
    h, w, b, labels = (x.detach() for x in inputs(P, V, hidden=H, dtype=torch.float32))
    logits_bytes = P * V * 4
    with PeakBytes() as peak:
        *_, gradients = module._by_row_chunks(h, w, b, labels, IGNORE_INDEX, 0.1, (True, True, True))
    temporaries = peak.bytes - sum(x.nbytes for x in gradients)
    # beside two chunks: a few numbers a row, and sums over the rows of a chunk
    assert 2 / 16 * logits_bytes < temporaries <= 2 / 16 * logits_bytes + 4 * V * 3 + 40 * P


# ---- logits that somebody holds ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_leave_the_logits_of_a_user_alone(dtype):
    logits = torch.randn(7, 5).to(dtype).requires_grad_()
    labels = torch.tensor([0, 4, IGNORE_INDEX, 2, 1, 0, 3])
    before = logits.detach().clone()
    mean = ops.cross_entropy(logits, labels)
    loss_sum, correct, count = ops.cross_entropy_parts(logits, labels)
    first, again = (torch.autograd.grad(mean, logits, retain_graph=True)[0] for _ in range(2))
    of_sum = torch.autograd.grad(loss_sum, logits)[0]
    assert torch.equal(logits, before) and torch.equal(first, again)
    torch.testing.assert_close(of_sum.float() / 6, first.float(), atol=1e-3, rtol=1e-2)
    assert loss_sum.dtype == torch.float32 and count.item() == 6
    assert correct.item() == (before.argmax(1) == labels).sum().item()
    torch.testing.assert_close(loss_sum / count, F.cross_entropy(before.float(), labels))


def test_a_loss_of_ones_own_has_the_gradients_of_the_models():
    """The loss that the model returns beside its logits, and the same loss from these logits."""
    model = BertForPreTraining(small_config()).train()
    _, padded = make_batches([5, 9], vocab_size=211)
    labels = torch.full_like(padded.input_ids, IGNORE_INDEX)
    labels.view(-1)[padded.masked_positions] = padded.masked_labels
    arguments = (padded.input_ids, padded.attention_mask, padded.token_type_ids)
    sentences = padded.next_sentence_labels
    gradients = []
    for given in ({"labels": labels, "next_sentence_label": sentences}, {}):
        model.zero_grad()
        out = model(*arguments, **given)
        logits = out.prediction_logits
        assert logits.requires_grad
        before = logits.detach().clone()
        loss = out.loss
        if not given:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss = loss + F.cross_entropy(out.seq_relationship_logits, sentences)
        loss.backward()
        assert torch.equal(logits, before)
        gradients.append([p.grad.clone() for p in model.parameters()])
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
