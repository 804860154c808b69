"""Attention inside each sequence against a loop over sequences, in every layout."""

from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck

from fastbert import ops
from fastbert.ops import PaddedLayout, SequenceLayout
from fastbert.ops.attention import attention_probabilities

HEADS, DIM = 2, 8


def reference(qkv, cu_seqlens):
    """Softmax attention of each sequence alone, written out; 0 in rows that no sequence owns."""
    out = torch.zeros_like(qkv[:, 0])
    for start, end in pairwise(cu_seqlens):
        q, k, v = qkv[start:end].permute(1, 2, 0, 3)
        scores = q @ k.transpose(-1, -2) / DIM**0.5
        out = torch.cat([out[:start], (scores.softmax(-1) @ v).transpose(0, 1), out[end:]])
    return out


def layouts(cu_seqlens, max_seqlen, total):
    """The layout of a CPU, and the one of a device whose lengths the host does not read."""
    layout = SequenceLayout.build(torch.tensor(cu_seqlens, dtype=torch.int32), max_seqlen, total)
    return [layout, SequenceLayout(layout.cu_seqlens, max_seqlen, total, None)]


# one token; equal lengths; mixed; zero lengths at start, middle, end; rows that no sequence owns; nothing
CASES = [
    ([0, 1], 1),
    ([0, 6, 12, 18], 18),
    ([0, 5, 14, 16, 25, 30], 30),
    ([0, 0, 3, 3, 5, 5, 5], 5),
    ([0, 0, 3, 3, 5], 8),
    ([0, 0], 4),
]


@pytest.mark.parametrize("kind", [0, 1], ids=["runs", "one-group"])
@pytest.mark.parametrize(("cu_seqlens", "total"), CASES, ids=[f"{c}-{t}" for c, t in CASES])
def test_varlen_attention_matches_a_loop(cu_seqlens, total, kind):
    longest = max(b - a for a, b in pairwise(cu_seqlens))
    layout = layouts(cu_seqlens, max(longest, 1), total)[kind]
    qkv = torch.randn(total, 3, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(total, HEADS, DIM, dtype=torch.float64)
    out, expected = ops.varlen_attention(qkv, layout), reference(qkv, cu_seqlens)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    (dqkv,) = torch.autograd.grad((out * direction).sum(), qkv)
    (expected_dqkv,) = torch.autograd.grad((expected * direction).sum(), qkv, allow_unused=True)
    torch.testing.assert_close(dqkv, expected_dqkv, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", [0, 1], ids=["runs", "one-group"])
def test_rows_without_a_sequence_are_zero_even_next_to_nan(kind):
    layout = layouts([0, 0, 3, 3, 5], 3, 8)[kind]
    qkv = torch.randn(8, 3, HEADS, DIM)
    qkv[5:] = float("nan")
    qkv.requires_grad_()
    out = ops.varlen_attention(qkv, layout)
    torch.testing.assert_close(out[:5], reference(qkv[:5], [0, 0, 3, 3, 5]))
    assert not out[5:].any()
    # gradients that reach rows without a sequence go nowhere
    (dqkv,) = torch.autograd.grad(out.sum(), qkv)
    assert torch.isfinite(dqkv).all()
    assert not dqkv[5:].any()


@pytest.mark.parametrize("kind", [0, 1], ids=["runs", "one-group"])
def test_sequences_do_not_see_each_other(kind):
    layout = layouts([0, 5, 14, 16], 9, 16)[kind]
    qkv = torch.randn(16, 3, HEADS, DIM)
    changed = qkv.clone()
    changed[5:14] = torch.randn(9, 3, HEADS, DIM)
    before, after = ops.varlen_attention(qkv, layout), ops.varlen_attention(changed, layout)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[14:], after[14:])
    assert not torch.equal(before[5:14], after[5:14])


@pytest.mark.parametrize("kind", [0, 1], ids=["runs", "one-group"])
def test_varlen_attention_gradcheck(kind):
    layout = layouts([0, 2, 2, 5], 3, 6)[kind]
    qkv = torch.randn(6, 3, 1, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: ops.varlen_attention(x, layout), qkv)


def test_dropout_of_probabilities_keeps_the_mean():
    layout = layouts([0, 64], 64, 64)[0]
    qkv = torch.randn(64, 3, HEADS, DIM)
    kept = ops.varlen_attention(qkv, layout)
    dropped = torch.stack([ops.varlen_attention(qkv, layout, dropout_p=0.5) for _ in range(400)])
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - kept).abs().mean() < 0.02


MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("need_probabilities", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padded_attention_masks_by_selection(additive, need_probabilities, dtype):
    # large scores: a mask constant of this dtype would overflow or not suffice
    qkv = (8 * torch.randn(3, 5, 3, HEADS, DIM)).to(dtype).requires_grad_()
    mask = MASK[:, None, None, :]
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    context, probabilities = ops.padded_attention(
        qkv, PaddedLayout.build(mask), need_probabilities=need_probabilities
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
    qkv = (8 * torch.randn(1, 5, 3, HEADS, DIM)).to(dtype)
    mask = torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min)
    context, _ = ops.padded_attention(qkv, PaddedLayout.build(mask))
    assert torch.isfinite(context).all()


def test_probabilities_sum_to_one_and_match_the_context():
    qkv = torch.randn(3, 5, 3, HEADS, DIM)
    layout = PaddedLayout.build(MASK[:, None, None, :])
    context, probabilities = ops.padded_attention(qkv, layout, need_probabilities=True)
    torch.testing.assert_close(probabilities[:2].sum(-1), torch.ones(2, HEADS, 5))
    torch.testing.assert_close(context, ops.padded_attention(qkv, layout)[0], atol=1e-6, rtol=0)
    q, k, _ = qkv.bfloat16().permute(2, 0, 3, 1, 4)
    assert attention_probabilities(q, k, layout).dtype == torch.float32
