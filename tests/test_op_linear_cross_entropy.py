"""The chunked loss against F.cross_entropy on whole logits."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from fastbert.batch import IGNORE_INDEX
from fastbert.ops import linear_cross_entropy

module = importlib.import_module("fastbert.ops.linear_cross_entropy")


def inputs(rows, vocab, hidden=16, dtype=torch.float64):
    h = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    b = torch.randn(vocab, dtype=dtype, requires_grad=True)
    return h, w, b, torch.randint(0, vocab, (rows,))


@pytest.fixture(params=[3, 7, 1000], ids=["chunks-of-3", "chunks-of-7", "one-chunk"])
def _chunks(request, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(module, "_MIN_CHUNK_ROWS", request.param)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("ignored", [0, 4, 20], ids=["none-ignored", "some", "all"])
def test_matches_cross_entropy(ignored):
    h, w, b, labels = inputs(20, 31)
    labels[:ignored] = IGNORE_INDEX
    loss, correct, count = linear_cross_entropy(h, w, b, labels)
    logits = F.linear(h, w, b)
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-12)
    assert correct.item() == ((logits.argmax(-1) == labels) & (labels != IGNORE_INDEX)).sum().item()
    assert (count.item(), count.dtype, correct.dtype) == (20 - ignored, torch.int64, torch.int64)
    ours = torch.autograd.grad(loss, (h, w, b))
    theirs = torch.autograd.grad(expected, (h, w, b))
    for ours_, theirs_ in zip(ours, theirs):
        torch.testing.assert_close(ours_, theirs_, atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures("_chunks")
def test_gradcheck():
    h, w, b, labels = inputs(8, 5, hidden=3)
    labels[2] = IGNORE_INDEX
    assert gradcheck(lambda *x: linear_cross_entropy(*x, labels)[0], (h, w, b))


def test_no_rows_give_zero_with_a_graph():
    h, w, b, labels = inputs(0, 5)
    loss, _, count = linear_cross_entropy(h, w, b, labels)
    assert (loss.item(), count.item()) == (0.0, 0)
    loss.backward()
    assert not w.grad.any()
    assert not b.grad.any()


def test_second_backward_over_a_retained_graph_gives_the_same_gradient():
    h, w, b, labels = inputs(9, 11)
    loss = linear_cross_entropy(h, w, b, labels)[0]
    first = torch.autograd.grad(3 * loss, (h, w, b), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (h, w, b))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


def test_without_gradients():
    h, w, b, labels = inputs(9, 11)
    with torch.no_grad():
        loss, _, _ = linear_cross_entropy(h, w, b, labels)
    assert not loss.requires_grad
    # a frozen decoder: only the hidden states learn
    loss = linear_cross_entropy(h, w.detach(), b.detach(), labels)[0]
    (dh,) = torch.autograd.grad(loss, h)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(h, w, b), labels, reduction="sum"), h)[0]
    torch.testing.assert_close(dh, expected)
    # frozen hidden states: only the decoder learns
    loss = linear_cross_entropy(h.detach(), w, b, labels)[0]
    loss.backward()
    assert w.grad is not None


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "pure-bf16"])
def test_bf16_loss_is_fp32_and_as_accurate_as_torch(autocast):
    h, w, b, labels = inputs(64, 300, dtype=torch.float32)
    exact = F.cross_entropy(F.linear(h, w, b).double(), labels, reduction="sum")
    exact_gradients = torch.autograd.grad(exact, (h, w, b))
    if not autocast:
        h, w, b = (x.detach().bfloat16().requires_grad_() for x in (h, w, b))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(h, w, b, labels)[0]
        plain = F.cross_entropy(F.linear(h, w, b).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert abs(loss - exact) <= 2 * abs(plain - exact) + 1e-3 * exact
    ours, theirs = torch.autograd.grad(loss, (h, w, b)), torch.autograd.grad(plain, (h, w, b))
    for x, y, z in zip(ours, theirs, exact_gradients):
        assert x.dtype == y.dtype
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 1e-5
