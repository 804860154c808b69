"""Outputs, losses, gradients and training steps against transformers with the same weights."""

import pytest
import torch
import transformers

from fastbert.modeling import BertForPreTraining, BertModel
from tests.packed_batches import dense_labels, make_batches
from tests.small_models import gradient_gap, hf_config, model_pair, small_config, spread_weights

ATOL = 2e-5  # fp32; states and logits are of size 1 to 10


def padding(kind):
    mask = torch.ones(4, 9, dtype=torch.long)
    if kind == "right":
        mask[0, 5:], mask[2, 1:] = 0, 0
    elif kind == "left":
        mask[0, :5], mask[2, :8] = 0, 0
    elif kind == "holes":
        mask = (torch.rand(4, 9) < 0.6).long()
        mask[:, 0] = 1
    return mask


def random_inputs():
    return {
        "input_ids": torch.randint(1, 211, (4, 9)),
        "token_type_ids": torch.randint(0, 2, (4, 9)),
    }


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["none", "ones", "right", "left", "holes"])
def test_outputs_match(kind, attn_implementation):
    ours, theirs = model_pair(attn_implementation=attn_implementation)
    ours.set_attn_implementation(attn_implementation)
    mask = padding(kind)
    inputs = {**random_inputs(), "attention_mask": None if kind == "none" else mask}
    out = ours(**inputs, output_hidden_states=True)
    expected = theirs(**inputs, output_hidden_states=True)
    is_compared = mask.bool() if attn_implementation == "sdpa" else torch.ones_like(mask, dtype=torch.bool)
    model_out = ours.bert(**inputs, output_hidden_states=True)
    assert model_out.hidden_states[-1] is model_out.last_hidden_state
    for x, y in zip(out.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(x[is_compared], y[is_compared], atol=ATOL, rtol=0)
        assert not x[~is_compared].any()
    torch.testing.assert_close(
        out.prediction_logits[is_compared], expected.prediction_logits[is_compared], atol=ATOL, rtol=ATOL
    )
    assert not out.prediction_logits[~is_compared].any()
    if kind != "left" or attn_implementation == "eager":
        torch.testing.assert_close(
            out.seq_relationship_logits, expected.seq_relationship_logits, atol=ATOL, rtol=0
        )


def test_left_padding_pools_the_first_kept_token():
    ours, _ = model_pair()
    ids = torch.randint(1, 211, (1, 5))
    alone = ours.bert(ids).pooler_output
    left = ours.bert(
        torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1),
        torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]),
        position_ids=torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]]),
    )
    torch.testing.assert_close(left.pooler_output, alone, atol=ATOL, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["none", "right", "holes"])
@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new"])
def test_loss_and_gradients_match(kind, hidden_act, dtype):
    ours, theirs = model_pair(dtype, hidden_act=hidden_act)
    mask = padding(kind)
    labels = torch.randint(0, 211, (4, 9)).masked_fill((torch.rand(4, 9) < 0.6) | (mask == 0), -100)
    inputs = {
        **random_inputs(),
        "attention_mask": mask,
        "labels": labels,
        "next_sentence_label": torch.tensor([0, 1, -100, 1]),
    }
    loss, expected = ours(**inputs).loss, theirs(**inputs).loss
    atol = 2e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(loss, expected, atol=atol, rtol=0)
    loss.backward()
    expected.backward()
    assert gradient_gap(ours, theirs) < atol


def test_a_label_at_a_pad_counts_as_in_transformers():
    ours, theirs = model_pair()
    inputs = {
        **random_inputs(),
        "attention_mask": padding("right"),
        "labels": torch.randint(0, 211, (4, 9)),
        "next_sentence_label": torch.tensor([0, 1, 0, 1]),
    }
    torch.testing.assert_close(ours(**inputs).loss, theirs(**inputs).loss, atol=ATOL, rtol=0)


def test_loss_needs_both_labels_and_all_ignored_is_nan():
    ours, _ = model_pair()
    ids = torch.randint(1, 211, (2, 5))
    ignored, nsp = torch.full((2, 5), -100), torch.tensor([0, 1])
    assert ours(ids, labels=ignored).loss is None
    assert ours(ids, next_sentence_label=nsp).loss is None
    assert ours(ids, labels=ignored, next_sentence_label=nsp).loss.isnan()


def test_inputs_embeds_and_position_ids():
    ours, theirs = model_pair()
    embeds, positions = torch.randn(2, 7, 64), torch.randint(0, 64, (1, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    for position_ids in (None, positions, positions.expand(2, 7)):
        given = {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": position_ids}
        x, y = ours.bert(**given), theirs.bert(**given)
        torch.testing.assert_close(
            x.last_hidden_state[mask.bool()], y.last_hidden_state[mask.bool()], atol=ATOL, rtol=0
        )
    ids = torch.randint(1, 211, (2, 7))
    x, y = (
        ours.bert(ids.int(), None, torch.ones(1, 7).long()),
        theirs.bert(ids, None, torch.ones(2, 7).long()),
    )
    torch.testing.assert_close(x.last_hidden_state, y.last_hidden_state, atol=ATOL, rtol=0)


def test_attention_probabilities_are_real():
    theirs = transformers.BertModel(hf_config("eager")).eval()
    ours = BertModel(small_config()).eval()
    ours.load_state_dict(theirs.state_dict())
    ids, mask = torch.randint(1, 211, (2, 9)), torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    out = ours(ids, mask, output_attentions=True, output_hidden_states=True)
    expected = theirs(ids, mask, output_attentions=True)
    assert len(out.attentions) == 2
    for x, y in zip(out.attentions, expected.attentions, strict=True):
        assert x.shape == (2, 4, 9, 9)
        torch.testing.assert_close(x, y, atol=1e-6, rtol=0)
        torch.testing.assert_close(x.sum(-1), torch.ones(2, 4, 9), atol=1e-6, rtol=0)
        assert not x[1, :, :, 7:].any()
    plain = ours(ids, mask).last_hidden_state
    torch.testing.assert_close(out.last_hidden_state[mask.bool()], plain[mask.bool()], atol=ATOL, rtol=0)
    assert out.hidden_states[-1] is out.last_hidden_state
    assert len(out.hidden_states) == 3
    assert out.cross_attentions == ()


# one mask in each form: keep 7 of 9 keys
def test_mask_forms_agree():
    ours, theirs = model_pair()
    ids = torch.randint(1, 211, (2, 9))
    keep = (torch.arange(9) < 7).expand(2, 9)
    four_axes = keep[:, None, None, :].expand(2, 1, 9, 9)
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~four_axes, torch.finfo(torch.float32).min)
    expected = theirs.bert(ids, keep.long()).last_hidden_state[keep]
    forms = [keep, keep.long(), keep.float() * 0.5, keep.int() * -2]
    forms += [four_axes, additive, additive.clamp(min=-1e4), additive.masked_fill(~four_axes, float("-inf"))]
    forms += [four_axes[:, 0].long(), four_axes[:, 0], four_axes[:1], four_axes.expand(2, 4, 9, 9)]
    for form in forms:
        out = ours.bert(ids, form).last_hidden_state[keep]
        torch.testing.assert_close(out, expected, atol=ATOL, rtol=0)


def test_any_additive_bias_matches():
    ours, theirs = model_pair()
    ids, bias = torch.randint(1, 211, (2, 9)), torch.randn(2, 4, 9, 9)
    x, y = ours.bert(ids, bias), theirs.bert(ids, bias)
    torch.testing.assert_close(x.last_hidden_state, y.last_hidden_state, atol=ATOL, rtol=0)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_a_fully_masked_sequence_is_finite_and_leaves_the_others_alone(attn_implementation):
    ours, _ = model_pair()
    ours.set_attn_implementation(attn_implementation)
    ids, mask = torch.randint(1, 211, (3, 9)), torch.ones(3, 9)
    expected = ours.bert(ids, mask)
    mask[1] = 0
    out = ours.bert(ids, mask)
    for name in ("last_hidden_state", "pooler_output"):
        assert torch.isfinite(out[name]).all()
        torch.testing.assert_close(out[name][[0, 2]], expected[name][[0, 2]], atol=ATOL, rtol=0)
    (out.last_hidden_state.sum() + out.pooler_output.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in ours.bert.parameters())
    if attn_implementation == "sdpa":
        assert not out.last_hidden_state[1].any()
        everything_masked = ours.bert(ids, torch.zeros(3, 9))
        assert torch.isfinite(everything_masked.pooler_output).all()


def test_untied_decoder_uses_its_own_bias():
    ours, theirs = model_pair(tie_word_embeddings=False)
    with torch.no_grad():
        for model in (ours, theirs):
            model.cls.predictions.decoder.bias.fill_(0.7)
    ids = torch.randint(1, 211, (2, 5))
    x, y = ours(ids).prediction_logits, theirs(ids).prediction_logits
    torch.testing.assert_close(x, y, atol=ATOL, rtol=ATOL)


def test_a_model_of_no_layers():
    ours, theirs = model_pair(num_hidden_layers=0)
    packed, padded = make_batches([5, 3], vocab_size=211)
    x = ours(padded.input_ids, padded.attention_mask, padded.token_type_ids)
    y = theirs(padded.input_ids, padded.attention_mask, padded.token_type_ids)
    keep = padded.attention_mask
    torch.testing.assert_close(x.prediction_logits[keep], y.prediction_logits[keep], atol=ATOL, rtol=ATOL)
    torch.testing.assert_close(ours.loss_parts(packed).mlm_sum, ours.loss_parts(padded).mlm_sum)


def test_the_padding_row_learns_through_the_decoder_only():
    ours, theirs = model_pair()
    ids = torch.tensor([[5, 0, 7]])
    for model in (ours, theirs):
        model.bert(ids).last_hidden_state.pow(2).sum().backward()
        assert not model.bert.embeddings.word_embeddings.weight.grad[0].any()
        model.zero_grad()
        model(ids, labels=ids, next_sentence_label=torch.tensor([0])).loss.backward()
        assert model.bert.embeddings.word_embeddings.weight.grad[0].any()
    assert gradient_gap(ours, theirs) < ATOL


@pytest.fixture
def _one_thread():
    """Hundreds of tiny steps: threads cost more than they give, most of all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("_one_thread")
def test_fifty_training_steps_give_the_same_losses():
    ours, theirs = model_pair()
    ours.load_state_dict(theirs.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, theirs)]
    for step in range(50):
        packed, padded = make_batches([18, 7, 18, 11, 3], vocab_size=211, seed=step % 7, filler=7)
        parts = ours.loss_parts(packed)
        loss = parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count
        expected = theirs(
            padded.input_ids,
            padded.attention_mask.long(),
            padded.token_type_ids,
            labels=dense_labels(padded),
            next_sentence_label=padded.next_sentence_labels,
        ).loss
        assert abs(loss.item() - expected.item()) < 1e-4, f"step {step}"
        for optimizer, value in zip(optimizers, (loss, expected)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert expected.item() < 4  # the batches repeat and are learnt: it started above ln 211 = 5.4


def bf16_errors(model_pair_, run):
    """Largest error of (ours, theirs) against transformers in fp32."""
    ours, theirs = model_pair_
    exact = run(theirs)
    return [(run(m).float() - exact).abs().max().item() for m in (ours.bfloat16(), theirs.bfloat16())]


def test_pure_bf16_is_as_accurate_as_transformers():
    ours, theirs = model_pair(num_hidden_layers=4)
    ids, mask = torch.randint(1, 211, (4, 33)), torch.ones(4, 33)
    mask[1, 20:] = 0

    def run(model):
        with torch.no_grad():
            return model.bert(ids, mask).last_hidden_state[mask.bool()]

    our_error, their_error = bf16_errors((ours.eval(), theirs.eval()), run)
    assert our_error <= 2 * their_error + 1e-5


def test_initialisation_is_hugging_faces():
    torch.manual_seed(3)
    model = BertForPreTraining(small_config(vocab_size=3000, hidden_size=256, initializer_range=0.03))
    table = model.bert.embeddings.word_embeddings.weight
    assert not table[0].any()
    assert abs(table[1:].std().item() - 0.03) < 1e-4
    assert table.abs().max() > 0.12  # a plain normal, not cut at two sigma
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "LayerNorm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert abs(parameter.std().item() - 0.03) < 3e-3, name
    assert model.training
    torch.manual_seed(3)
    twin = BertForPreTraining(small_config(vocab_size=3000, hidden_size=256, initializer_range=0.03))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_spread_weights_reach_every_parameter():
    model = BertForPreTraining(small_config())
    before = [p.clone() for p in model.parameters()]
    spread_weights(model)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
