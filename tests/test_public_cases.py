"""Faults that people reported of other BERTs, each as a test with its right value (cases A, B, D and G)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

import fastbert
from fastbert import ops
from fastbert.layers import BertIntermediate
from fastbert.ops import PaddedLayout, SequenceLayout
from tests.data_parallel import batches_of, masked_lm, train_rank
from tests.packed_batches import make_batches
from tests.small_models import hf_config, small_config, spread_weights

HEADED = [
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
]


def large(name: str, **overrides: Any) -> Any:
    model = getattr(fastbert, name)(small_config(**overrides)).eval()
    spread_weights(model)
    return model


# ---- A: what a call means


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["BertModel", *HEADED])
def test_case_A_02_too_long_or_outside_the_table(name: str, attn_implementation: str) -> None:
    model = large(name)
    model.set_attn_implementation(attn_implementation)
    with pytest.raises(ValueError, match="65 is above max_position_embeddings = 64"):
        model(torch.ones(1, 65, dtype=torch.long))
    with pytest.raises(IndexError, match="input_ids holds 211, the table has vocab_size = 211"):
        model(torch.full((1, 3), 211))
    with pytest.raises(IndexError, match="position_ids holds 64, the table has max_position_embeddings = 64"):
        model(torch.ones(1, 3).long(), position_ids=torch.tensor([[0, 1, 64]]))
    with pytest.raises(IndexError, match="token_type_ids holds -1"):
        model(torch.ones(1, 3).long(), token_type_ids=torch.full((1, 3), -1))
    with pytest.raises(ValueError, match=r"token_type_ids has shape \(1, 4\), the input is \(2, 3\)"):
        model(torch.ones(2, 3).long(), token_type_ids=torch.zeros(1, 4).long())
    with pytest.raises(ValueError, match="inputs_embeds are 32 wide, hidden_size is 64"):
        model(inputs_embeds=torch.ones(1, 3, 32))
    assert model(torch.ones(1, 64, dtype=torch.long))[0].isfinite().all()  # and the process goes on


@pytest.mark.parametrize("name", HEADED)
def test_case_A_03_attention_weights_of_the_fast_path(name: str) -> None:
    model = large(name)
    ids, mask = torch.randint(1, 211, (2, 9)), torch.ones(2, 9)
    mask[:, 7:] = 0
    out = model(ids, mask, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 2
    for probabilities in out.attentions:
        assert probabilities.shape == (2, 4, 9, 9)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 4, 9), atol=1e-6, rtol=0)
        assert not probabilities[..., 7:].any()
    plain = model(ids, mask)
    for field in plain:
        is_token = plain[field].shape[1] == 9
        x, y = (v[field][:, :7] if is_token else v[field] for v in (out, plain))
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)
    assert len(out.hidden_states) == 3
    encoder = model.bert(ids, mask, output_hidden_states=True)
    assert encoder.hidden_states[-1] is encoder.last_hidden_state


ERF = {1.0: 0.84134475, 2.7: 2.69063917, -2.7: -0.00936083, -0.5: -0.15426877}
TANH = {1.0: 0.84119199, 2.7: 2.69111241, -2.7: -0.00888759, -0.5: -0.15428599}


@pytest.mark.parametrize(
    ("hidden_act", "expected"), [("gelu", ERF), ("gelu_new", TANH), ("gelu_pytorch_tanh", TANH)]
)
def test_case_A_04_which_gelu(hidden_act: str, expected: dict[float, float]) -> None:
    layer = BertIntermediate(small_config(hidden_size=4, intermediate_size=4, hidden_act=hidden_act))
    with torch.no_grad():
        layer.dense.weight.copy_(torch.eye(4))
        layer.dense.bias.zero_()
    x = torch.tensor([[*expected]], requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, torch.tensor([[*expected.values()]]), atol=1e-6, rtol=0)
    # the backward is that of the same form: the tanh form's differs by up to 1.2e-3
    (gradient,) = torch.autograd.grad(y.sum(), x)
    form = "none" if hidden_act == "gelu" else "tanh"
    x64 = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(torch.nn.functional.gelu(x64, approximate=form).sum(), x64)
    torch.testing.assert_close(gradient, exact.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", HEADED)
def test_case_A_05_extended_masks(name: str, attn_implementation: str) -> None:
    model = large(name)
    model.set_attn_implementation(attn_implementation)
    ids = torch.randint(1, 211, (2, 9))
    keep = (torch.arange(9) < 7).expand(2, 9)
    four_axes = keep[:, None, None, :].expand(2, 1, 9, 9)
    forms = [
        four_axes,
        torch.zeros(2, 1, 9, 9).masked_fill(~four_axes, torch.finfo(torch.float32).min),
        four_axes[:, 0].long(),
    ]
    with torch.no_grad():
        expected = model(ids, keep.long())
        for form in forms:
            out = model(ids, form)
            for field in expected:
                x, y = out[field], expected[field]
                if y.shape[1] == 9:
                    x, y = x[:, :7], y[:, :7]
                torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match="integers could mean either"):
            model(ids, four_axes.long())


# ---- B: padding and packing


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 5e-3), (torch.bfloat16, 2e-2)])
def test_case_B_02_mask_constants_in_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    minimum = torch.finfo(torch.float16).min
    assert torch.tensor(-15.0).half() + minimum == minimum
    assert torch.isinf(torch.tensor(-17.0).half() + minimum)  # so nothing is added to a score
    qkv = torch.randn(2, 9, 3, 4, 16).mul_(torch.tensor([3.0, 3.0, 1.0])[:, None, None]).to(dtype)
    q, k, _ = qkv.float().transpose(1, 3).unbind(2)
    assert (q @ k.transpose(-1, -2) / 4).min() < -17
    keep = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    layouts: list[Any] = [PaddedLayout.build(keep, 2, 9, qkv.device)]
    for value in (torch.finfo(dtype).min, torch.finfo(torch.float32).min, float("-inf")):
        additive = torch.zeros(2, 1, 9, 9).masked_fill(~keep[:, None, None], value)
        layouts.append(PaddedLayout.build(additive, 2, 9, qkv.device))
    expected, _ = ops.padded_attention(qkv.float(), layouts[0])
    for layout in layouts:
        context, _ = ops.padded_attention(qkv, layout)
        assert context.dtype == dtype
        assert context.isfinite().all()
        torch.testing.assert_close(context.float(), expected, atol=tolerance, rtol=tolerance)
    indices, cu_seqlens = ops.unpad_indices(keep)
    packed = ops.varlen_attention(qkv.flatten(0, 1)[indices], SequenceLayout.build(cu_seqlens, 9, 15))
    torch.testing.assert_close(packed.float(), expected[keep], atol=tolerance, rtol=tolerance)


def test_case_B_05_empty_sequences_and_rows_of_nobody() -> None:
    cu_seqlens = torch.tensor([0, 0, 3, 3, 5], dtype=torch.int32)
    qkv = torch.full((8, 3, 2, 16), float("nan"))
    qkv[:5] = torch.randn(5, 3, 2, 16)
    qkv.requires_grad_()
    out = ops.varlen_attention(qkv, SequenceLayout.build(cu_seqlens, 3, 8))
    weights = torch.randn(8, 2, 16)
    (gradient,) = torch.autograd.grad((out * weights).sum(), qkv)
    for start, end in ((0, 3), (3, 5)):
        alone = qkv.detach()[start:end].requires_grad_()
        layout = SequenceLayout.build(
            torch.tensor([0, end - start], dtype=torch.int32), end - start, end - start
        )
        expected = ops.varlen_attention(alone, layout)
        torch.testing.assert_close(out[start:end], expected, atol=1e-6, rtol=0)
        (expected_gradient,) = torch.autograd.grad((expected * weights[start:end]).sum(), alone)
        torch.testing.assert_close(gradient[start:end], expected_gradient, atol=1e-6, rtol=0)
    assert not out[5:].any()
    assert not gradient[5:].any()


@pytest.mark.parametrize("name", HEADED)
def test_case_B_05_padded_outputs_are_defined_everywhere(name: str) -> None:
    model = large(name)
    ids, mask = torch.randint(1, 211, (3, 9)), torch.ones(3, 9)
    mask[0, 4:], mask[1] = 0, 0  # the second sequence is empty
    first, second = model(ids, mask), model(ids, mask)
    for field in first:
        assert first[field].isfinite().all()
        assert torch.equal(first[field], second[field])
        if first[field].shape[1] == 9:
            minimum = torch.finfo(torch.float32).min
            at_pads = minimum if name == "BertForQuestionAnswering" else 0.0
            assert (first[field][mask == 0] == at_pads).all()


def test_case_B_07_packed_sequences_do_not_see_each_other() -> None:
    lengths = [5, 9, 2]
    packed, padded = make_batches(lengths, vocab_size=211)
    assert packed.position_ids.tolist() == [*range(5), *range(9), *range(2)]
    weights = torch.randn(16, 64)

    def run(form: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """(last hidden states of the kept tokens, pooled rows, gradients)."""
        torch.manual_seed(5)
        model = large("BertModel")
        if form == "packed":
            out = model(packed)
            hidden, pooled = out.last_hidden_state, out.pooler_output
        elif form == "padded":
            out = model(padded.input_ids, padded.attention_mask, padded.token_type_ids)
            hidden, pooled = out.last_hidden_state[padded.attention_mask], out.pooler_output
        else:
            outs = [
                model(padded.input_ids[i : i + 1, :n], token_type_ids=padded.token_type_ids[i : i + 1, :n])
                for i, n in enumerate(lengths)
            ]
            hidden = torch.cat([out.last_hidden_state[0] for out in outs])
            pooled = torch.cat([out.pooler_output for out in outs])
        ((hidden * weights).sum() + pooled.sum()).backward()
        return hidden.detach(), pooled.detach(), [p.grad for p in model.parameters()]

    separate = run("separate")
    for form in ("packed", "padded"):
        hidden, pooled, gradients = run(form)
        assert pooled.shape == (3, 64)
        torch.testing.assert_close(hidden, separate[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(pooled, separate[1], atol=2e-5, rtol=0)
        for gradient, expected in zip(gradients, separate[2], strict=True):
            torch.testing.assert_close(gradient, expected, atol=2e-4, rtol=2e-5)

    model = large("BertModel")
    before = model(packed).last_hidden_state
    packed.input_ids[5:14] = packed.input_ids[5:14].flip(0)
    after = model(packed).last_hidden_state
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[14:], after[14:])
    assert not torch.equal(before[5:14], after[5:14])


# ---- D: weights


def test_case_D_03_the_pooler_after_a_masked_lm(tmp_path: Path) -> None:
    full = large("BertForPreTraining")
    full.save_pretrained(tmp_path / "full")
    kept = fastbert.BertModel.from_pretrained(tmp_path / "full")
    assert torch.equal(kept.pooler.dense.weight, full.bert.pooler.dense.weight)
    fastbert.BertForMaskedLM.from_pretrained(tmp_path / "full").save_pretrained(tmp_path / "mlm")
    with pytest.warns(UserWarning, match=r"pooler\.dense\.bias, pooler\.dense\.weight"):
        _, info = fastbert.BertModel.from_pretrained(tmp_path / "mlm", output_loading_info=True)
    assert info["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}


def test_case_D_04_vocabularies_of_any_size() -> None:
    ids = torch.tensor([[5, 99, 7]])
    with pytest.raises(IndexError, match="input_ids holds 99, the table has vocab_size = 90 rows"):
        large("BertForMaskedLM", vocab_size=90)(ids)
    for vocab_size in (101, 128):  # not a multiple of anything, and padded
        ours = large("BertForMaskedLM", vocab_size=vocab_size)
        theirs = transformers.BertForMaskedLM(hf_config(vocab_size=vocab_size)).eval()
        theirs.load_state_dict(ours.state_dict())
        out, expected = (model(ids, labels=ids) for model in (ours, theirs))
        assert out.logits.shape == (1, 3, vocab_size)
        torch.testing.assert_close(out.logits, expected.logits, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(out.loss, expected.loss, atol=2e-5, rtol=0)


# ---- G: several processes


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_case_G_02_distributed_data_parallel_uses_every_parameter(tmp_path: Path) -> None:
    other = mp.spawn(train_rank, args=(1, str(tmp_path)), nprocs=1, join=False)
    train_rank(0, 0, str(tmp_path))  # this process is one of the two
    assert other.join(timeout=120)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    model = masked_lm(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for ids in batches_of(step):  # the mean over ranks
            (model(ids, labels=ids).loss / 2).backward()
        optimizer.step()
    assert sum(p.numel() for p in ranks[0][0]) == model.num_parameters()  # no pooler, the tied table once
    for with_checkpointing in range(2):
        for a, b, expected in zip(
            ranks[0][with_checkpointing], ranks[1][with_checkpointing], model.parameters(), strict=True
        ):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, expected, atol=1e-6, rtol=1e-5)
