"""Attention inside each sequence against a loop over sequences, in every layout and through every path."""

from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

from fastbert import ops
from fastbert.ops import PaddedLayout, SequenceLayout, attention_eager, philox
from fastbert.ops.attention import _attention, _attention_backward
from fastbert.ops.attention_eager import Dropout, attention_probabilities

HEADS, DIM = 2, 8


def reference(qkv, cu_seqlens, key_mask=None, dropout=None):
    """Softmax attention of each sequence alone, written out; 0 in rows without a key."""
    out = 0 * qkv[:, 0]
    for start, end in pairwise(cu_seqlens):
        keep = torch.ones(end - start, dtype=torch.bool) if key_mask is None else key_mask[start:end]
        if not keep.any():
            continue
        q, k, v = qkv[start:end].permute(1, 2, 0, 3)
        scores = (q @ k.transpose(-1, -2) / DIM**0.5).masked_fill(~keep, float("-inf"))
        probabilities = scores.softmax(-1)
        if dropout is not None:
            keep = philox.dropout_keep(
                dropout.seed, torch.tensor([start]), HEADS, end - start, end - start, dropout.p
            )
            probabilities = probabilities * keep[0] / (1 - dropout.p)
        out = torch.cat([out[:start], (probabilities @ v).transpose(0, 1), out[end:]])
    return out


def layout_of(cu_seqlens, max_seqlen, total):
    return SequenceLayout.build(torch.tensor(cu_seqlens, dtype=torch.int32), max_seqlen, total)


def by_runs(qkv, layout, key_mask=None, dropout=None):
    return attention_eager.by_runs(qkv, layout.runs, key_mask, dropout)


def in_one_group(qkv, layout, key_mask=None, dropout=None):
    """What a GPU without kernels runs: the host reads no length."""
    return attention_eager.in_one_group(qkv, layout.cu_seqlens, layout.max_seqlen, key_mask, dropout)


def registered(qkv, layout, key_mask=None, dropout=None):
    seed, dropout_p = (None, 0.0) if dropout is None else (dropout.seed, dropout.p)
    return _attention(qkv, layout.cu_seqlens, None, layout.max_seqlen, key_mask, seed, dropout_p)[0]


@pytest.fixture(params=["by_runs", "in_one_group", "registered", "registered_in_one_group"])
def attend(request, monkeypatch):
    """Each way that attention runs eagerly, as a function of qkv, layout, key mask and dropout."""
    if request.param == "registered_in_one_group":  # the operator's body on a GPU without kernels
        monkeypatch.setattr(attention_eager, "host_may_read", lambda x: False)
        return registered
    return {"by_runs": by_runs, "in_one_group": in_one_group, "registered": registered}[request.param]


# one token; equal lengths; mixed; zero lengths at start, middle, end; rows that no sequence owns; nothing
CASES = [
    ([0, 1], 1),
    ([0, 6, 12, 18], 18),
    ([0, 5, 14, 16, 25, 30], 30),
    ([0, 0, 3, 3, 5, 5, 5], 5),
    ([0, 0, 3, 3, 5], 8),
    ([0, 0], 4),
]


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("masked", [False, True], ids=["all-keys", "key-mask"])
@pytest.mark.parametrize(("cu_seqlens", "total"), CASES, ids=[f"{c}-{t}" for c, t in CASES])
def test_attention_matches_a_loop(cu_seqlens, total, masked, dropout_p, attend):
    longest = max(b - a for a, b in pairwise(cu_seqlens))
    layout = layout_of(cu_seqlens, max(longest, 1), total)
    # holes, and no key at all in the second sequence of five
    key_mask = torch.arange(total) % 3 != 1 if masked else None
    if masked and len(cu_seqlens) == 6:
        key_mask[5:14] = False
    dropout = Dropout(torch.tensor([2**40 + 3]), dropout_p) if dropout_p else None
    qkv = torch.randn(total, 3, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(total, HEADS, DIM, dtype=torch.float64)
    out, expected = attend(qkv, layout, key_mask, dropout), reference(qkv, cu_seqlens, key_mask, dropout)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    (dqkv,) = torch.autograd.grad((out * direction).sum(), qkv)
    (expected_dqkv,) = torch.autograd.grad((expected * direction).sum(), qkv)
    torch.testing.assert_close(dqkv, expected_dqkv, atol=1e-12, rtol=1e-12)


def test_rows_without_a_sequence_are_zero_even_next_to_nan(attend):
    for cu_seqlens in ([0, 0, 3, 3, 5], [0, 3, 5, 5, 5]):
        layout = layout_of(cu_seqlens, 3, 8)
        qkv = torch.randn(8, 3, HEADS, DIM)
        qkv[5:] = float("nan")
        qkv.requires_grad_()
        for dropout in (None, Dropout(torch.tensor([7]), 0.2)):
            out = attend(qkv, layout, None, dropout)
            torch.testing.assert_close(out[:5], reference(qkv[:5], cu_seqlens, None, dropout))
            assert not out[5:].any()
            # gradients that reach rows without a sequence go nowhere
            (dqkv,) = torch.autograd.grad(out.sum(), qkv)
            assert torch.isfinite(dqkv).all()
            assert not dqkv[5:].any()


def test_no_token_at_all(attend):
    qkv = torch.randn(0, 3, HEADS, DIM, requires_grad=True)
    out = attend(qkv, layout_of([0, 0], 4, 0))
    assert out.shape == (0, HEADS, DIM)
    out.sum().backward()


def test_sequences_do_not_see_each_other(attend):
    layout = layout_of([0, 5, 14, 16], 9, 16)
    qkv = torch.randn(16, 3, HEADS, DIM)
    changed = qkv.clone()
    changed[5:14] = torch.randn(9, 3, HEADS, DIM)
    before, after = attend(qkv, layout), attend(changed, layout)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[14:], after[14:])
    assert not torch.equal(before[5:14], after[5:14])


@pytest.mark.parametrize("dropout", [None, Dropout(torch.tensor([9]), 0.3)], ids=["", "dropout"])
def test_attention_gradcheck(attend, dropout):
    # finite differences see another mask in the backward
    layout = layout_of([0, 2, 2, 5], 3, 6)
    qkv = torch.randn(6, 3, 1, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: attend(x, layout, None, dropout), qkv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_good_as_torchs_own(attend, dtype):
    cu_seqlens = [0, 5, 14, 16]
    layout = layout_of(cu_seqlens, 9, 16)
    qkv = torch.randn(16, 3, HEADS, DIM).to(dtype).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    for mine, theirs, right in zip(*(
        (out.detach(), torch.autograd.grad(out.sum(), x)[0])
        for out, x in (
            (attend(qkv, layout), qkv),
            (reference(qkv, cu_seqlens), qkv),
            (reference(exact, cu_seqlens), exact),
        )
    )):  # fmt: skip
        assert mine.dtype == dtype
        budget = 2 * (theirs.double() - right).abs().max() + torch.finfo(dtype).eps * right.abs().max()
        assert (mine.double() - right).abs().max() <= budget


def test_a_large_batch_is_worked_through_in_pieces(monkeypatch):
    monkeypatch.setattr(attention_eager, "_PIECE", 2 * HEADS * 36)
    layout = layout_of([0, 6, 12, 18, 24, 30], 6, 30)
    pieces = list(attention_eager._groups(layout.cu_seqlens, 6, 30, HEADS))
    assert [group.rows.shape[0] for group in pieces] == [2, 2, 1]
    qkv = torch.randn(30, 3, HEADS, DIM)
    torch.testing.assert_close(registered(qkv, layout), reference(qkv, range(0, 31, 6)))


def test_runs_of_equal_lengths():
    cu_seqlens = torch.tensor([0, 0, 3, 3, 6, 7, 8, 11, 11], dtype=torch.int32)
    runs = attention_eager.equal_runs(cu_seqlens)
    assert [(run.start, run.count, run.length) for run in runs] == [(0, 2, 3), (6, 2, 1), (8, 1, 3)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_are_registered_as_they_should_be(dropout_p, masked, dtype):
    qkv = torch.randn(8, 3, HEADS, DIM).to(dtype)
    key_mask = torch.arange(8) % 3 != 1 if masked else None
    seed = torch.tensor([5]) if dropout_p else None
    rest = (torch.tensor([0, 0, 3, 3, 5], dtype=torch.int32), None, 3, key_mask, seed, dropout_p)
    tolerance = {"atol": 1e-5, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
    opcheck(_attention, (qkv.clone().requires_grad_(), *rest), **tolerance)
    out, lse = _attention(qkv, *rest)
    opcheck(_attention_backward, (torch.randn_like(out), qkv, out, lse, *rest), **tolerance)


def test_lse_is_the_logarithm_of_the_denominator():
    qkv = torch.randn(7, 3, HEADS, DIM)
    cu_seqlens = torch.tensor([0, 4, 5], dtype=torch.int32)
    _, lse = _attention(qkv, cu_seqlens, None, 4, torch.arange(7) != 4, None, 0.0)
    assert lse.shape == (HEADS, 7) and lse.dtype == torch.float32
    q, k, _ = qkv[:4].permute(1, 2, 0, 3)
    torch.testing.assert_close(lse[:, :4], (q @ k.transpose(-1, -2) / DIM**0.5).exp().sum(-1).log())
    # a sequence whose only key is masked, and rows without a sequence
    assert not lse[:, 4:].any()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_computes_in_the_dtype_of_qkv_under_autocast(dtype, dropout_p):
    layout = layout_of([0, 5, 9], 5, 9)
    dropout = Dropout(torch.tensor([3]), dropout_p) if dropout_p else None
    start = torch.randn(9, 3, HEADS, DIM).to(dtype)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            torch.manual_seed(0)
            qkv, other = start.clone().requires_grad_(), start.clone().requires_grad_()
            public, out = (
                ops.varlen_attention(qkv, layout, dropout_p),
                registered(other, layout, None, dropout),
            )
            out.float().square().sum().backward()  # inside, too
        public.float().square().sum().backward()
        results.append((public, qkv.grad, out, other.grad))
    assert {x.dtype for x in results[1]} == {dtype}
    assert all(torch.equal(a, b) for a, b in zip(*results))


# ---- dropout through the public functions -----------------------------------------------------------------


def test_dropout_of_probabilities_keeps_the_mean():
    layout = layout_of([0, 64], 64, 64)
    qkv = torch.randn(64, 3, HEADS, DIM)
    kept = ops.varlen_attention(qkv, layout)
    dropped = torch.stack([ops.varlen_attention(qkv, layout, dropout_p=0.5) for _ in range(400)])
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - kept).abs().mean() < 0.02


def test_dropout_is_reproduced_by_the_seed_and_scaled():
    layout = layout_of([0, 33, 64], 33, 64)
    qkv = torch.randn(64, 3, HEADS, DIM)
    qkv[:, 0] = 0  # every probability is 1 / length
    qkv[:, 2] = 1
    torch.manual_seed(5)
    first, second = (ops.varlen_attention(qkv, layout, 0.1) for _ in range(2))
    torch.empty(1000).normal_(generator=torch.Generator())  # unrelated
    torch.manual_seed(5)
    assert torch.equal(first, ops.varlen_attention(qkv, layout, 0.1))
    assert not torch.equal(first, second)
    # a whole number of the 33 keys stays, and each counts 1 / 0.9
    num_kept = first[:33] * 33 * 0.9
    torch.testing.assert_close(num_kept, num_kept.round(), atol=1e-4, rtol=0)
    assert not torch.equal(first[:33, 0], first[:33, 1])  # heads


def test_padded_rows_drop_as_packed_ones():
    """One mask whatever the layout: it depends on where a sequence starts in the token axis."""
    qkv = torch.randn(3, 7, 3, HEADS, DIM)
    layout = PaddedLayout.build(None, 3, 7, qkv.device)
    everything = PaddedLayout.build(torch.zeros(3, 1, 7, 7), 3, 7, qkv.device)
    results = []
    for run in (
        lambda: ops.padded_attention(qkv, layout, 0.3)[0],
        lambda: ops.padded_attention(qkv, layout, 0.3, need_probabilities=True)[0],
        lambda: ops.padded_attention(qkv, everything, 0.3)[0],
        lambda: ops.varlen_attention(qkv.flatten(0, 1), layout.rows, 0.3).view(3, 7, HEADS, DIM),
    ):
        torch.manual_seed(2)
        results.append(run())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-6, rtol=0)


# ---- padded -----------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)


def padded_layout(mask):
    return PaddedLayout.build(mask, 3, 5, torch.device("cpu"))


def test_a_mask_of_the_keys_is_recognised():
    for mask in (MASK, MASK[:, None, None, :]):
        assert torch.equal(padded_layout(mask).key_mask, MASK.flatten())
    row = MASK[:1, None, None, :]
    assert torch.equal(padded_layout(row).key_mask, MASK[0].repeat(3))
    for mask in (torch.zeros(3, 1, 1, 5), torch.ones(3, 1, 5, 5).bool(), torch.ones(3, HEADS, 1, 5).bool()):
        assert padded_layout(mask).key_mask is None


@pytest.mark.parametrize("form", ["keys", "bool", "additive"])
@pytest.mark.parametrize("need_probabilities", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padded_attention_masks_by_selection(form, need_probabilities, dtype):
    # large scores: a mask constant of this dtype would overflow or not suffice
    qkv = (8 * torch.randn(3, 5, 3, HEADS, DIM)).to(dtype).requires_grad_()
    mask = MASK if form == "keys" else MASK[:, None, None, :].expand(3, 1, 5, 5)
    if form == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    context, probabilities = ops.padded_attention(
        qkv, padded_layout(mask), need_probabilities=need_probabilities
    )
    exact = qkv.detach().double()
    for row, keep in enumerate(MASK):
        if not keep.any():
            assert not context[row].any()
            continue
        q, k, v = exact[row].permute(1, 2, 0, 3)
        scores = (q @ k[:, keep].transpose(-1, -2)) / DIM**0.5
        expected = (scores.softmax(-1) @ v[:, keep]).transpose(0, 1)
        # inputs of size 8 and one rounding of the probabilities
        atol = {torch.float32: 2e-5, torch.bfloat16: 0.2, torch.float16: 0.03}[dtype]
        torch.testing.assert_close(context[row].double(), expected, atol=atol, rtol=0)
        if probabilities is not None:
            assert not probabilities[row][..., ~keep].any()
    context.float().sum().backward()
    assert torch.isfinite(qkv.grad).all()
    assert not qkv.grad[2].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_least_fp32_number_as_mask_stays_finite_in_half(dtype):
    qkv = (8 * torch.randn(3, 5, 3, HEADS, DIM)).to(dtype)
    mask = torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min)
    context, _ = ops.padded_attention(qkv, padded_layout(mask))
    assert torch.isfinite(context).all()


def test_probabilities_sum_to_one_and_match_the_context():
    qkv = torch.randn(3, 5, 3, HEADS, DIM)
    layout = padded_layout(MASK)
    context, probabilities = ops.padded_attention(qkv, layout, need_probabilities=True)
    torch.testing.assert_close(probabilities[:2].sum(-1), torch.ones(2, HEADS, 5))
    torch.testing.assert_close(context, ops.padded_attention(qkv, layout)[0], atol=1e-6, rtol=0)
    q, k, _ = qkv.bfloat16().permute(2, 0, 3, 1, 4)
    assert attention_probabilities(q, k, MASK[:, None, None, :]).dtype == torch.float32
