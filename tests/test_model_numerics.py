"""Half precision, autocast and dropout."""

import copy

import pytest
import torch

from fastbert.modeling import BertForPreTraining, BertModel
from tests.packed_batches import make_batches
from tests.small_models import model_pair, small_config, spread_weights


def mean_loss(parts):
    return parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_autocast_keeps_fp32_losses_and_gradients(packed, dtype):
    model = BertForPreTraining(small_config())
    batch = make_batches([17, 11, 17], vocab_size=211, filler=9)[0 if packed else 1]
    expected = mean_loss(model.loss_parts(batch))
    with torch.autocast("cpu", dtype):
        parts = model.loss_parts(batch)
        hidden = model.bert(make_batches([17, 11], vocab_size=211)[0]).last_hidden_state
    assert parts.mlm_sum.dtype == parts.nsp_sum.dtype == torch.float32
    assert hidden.dtype == torch.float32
    exact = model.bert(make_batches([17, 11], vocab_size=211)[0]).last_hidden_state
    assert (hidden - exact).abs().max() < 3e-2
    assert abs(mean_loss(parts) - expected) < 1e-2
    mean_loss(parts).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert torch.isfinite(parameter.grad).all(), name


def test_bf16_and_autocast_losses_are_as_accurate_as_transformers():
    ours, theirs = model_pair(num_hidden_layers=4)
    packed, padded = make_batches([33, 20, 33, 7], vocab_size=211)
    labels = torch.full_like(padded.input_ids, -100)
    labels.view(-1)[padded.masked_positions] = padded.masked_labels
    arguments = (padded.input_ids, padded.attention_mask.long(), padded.token_type_ids)
    targets = {"labels": labels, "next_sentence_label": padded.next_sentence_labels}

    def gradients(model, loss):
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    exact = copy.deepcopy(theirs).double()
    exact_gradient = gradients(exact, exact(*arguments, **targets).loss)
    for autocast in (True, False):
        if not autocast:
            ours, theirs = ours.bfloat16(), theirs.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            our_loss, their_loss = mean_loss(ours.loss_parts(packed)), theirs(*arguments, **targets).loss
        assert our_loss.dtype == torch.float32
        our_error = (gradients(ours, our_loss) - exact_gradient).norm()
        their_error = (gradients(theirs, their_loss) - exact_gradient).norm()
        assert our_error <= 2 * their_error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_constant_embeddings_do_not_give_nan_in_half(dtype):
    model = BertForPreTraining(small_config())
    with torch.no_grad():
        for table in (
            model.bert.embeddings.word_embeddings,
            model.bert.embeddings.position_embeddings,
            model.bert.embeddings.token_type_embeddings,
        ):
            table.weight.fill_(1.0)
    model = model.to(dtype)
    packed, padded = make_batches([9, 5], vocab_size=211)
    for batch in (packed, padded):
        loss = mean_loss(model.loss_parts(batch))
        assert torch.isfinite(loss)
        assert loss.dtype == torch.float32


def test_large_scores_with_padding_stay_finite_in_half():
    model = BertModel(small_config())
    spread_weights(model, 8.0)
    ids, mask = torch.randint(1, 211, (3, 9)), torch.ones(3, 9)
    mask[1, 4:] = 0
    exact = model(ids, mask).last_hidden_state
    for dtype, atol in ((torch.float16, 0.05), (torch.bfloat16, 0.4)):
        for attn_implementation in ("sdpa", "eager"):
            half = copy.deepcopy(model).to(dtype)
            half.set_attn_implementation(attn_implementation)
            out = half(ids, mask).last_hidden_state.float()
            assert torch.isfinite(out).all()
            assert (out - exact)[mask.bool()].abs().mean() < atol


def test_dropout_draws_anew_and_repeats_with_the_seed():
    model = BertForPreTraining(small_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))
    for batch in make_batches([33, 20], vocab_size=211):

        def run(batch=batch):
            return mean_loss(model.loss_parts(batch)).item()

        assert run() != run()
        torch.manual_seed(5)
        first = run()
        _ = torch.empty(1000)  # an allocation that has nothing to do with it
        torch.manual_seed(5)
        assert run() == first
        model.eval()
        assert run() == run()
        model.train()


def test_dropout_share_scale_and_independence():
    model = BertModel(small_config(hidden_dropout_prob=0.1, hidden_size=256)).train()
    ids = torch.randint(1, 211, (8, 50))
    kept = copy.deepcopy(model).eval().embeddings(ids, torch.zeros_like(ids), torch.zeros_like(ids))
    dropped = model.embeddings(ids, torch.zeros_like(ids), torch.zeros_like(ids))
    is_dropped = dropped == 0
    assert kept.numel() > 1e5
    assert abs(is_dropped.float().mean() - 0.1) < 0.004
    torch.testing.assert_close(dropped[~is_dropped], (kept / 0.9)[~is_dropped])
    again = model.embeddings(ids, torch.zeros_like(ids), torch.zeros_like(ids)) == 0
    assert abs((is_dropped == again).float().mean() - 0.82) < 0.01


def test_attention_dropout_differs_between_layers_and_heads():
    model = BertModel(small_config(attention_probs_dropout_prob=0.1)).train()
    attentions = model(torch.randint(1, 211, (8, 40)), output_attentions=True).attentions
    masks = [(a == 0)[:, head] for a in attentions for head in range(4)]
    for i, mask in enumerate(masks):
        assert abs(mask.float().mean() - 0.1) < 0.012
        for other in masks[i + 1 :]:
            assert abs((mask == other).float().mean() - 0.82) < 0.02


def test_backward_uses_the_forward_mask():
    """Finite differences of one seeded forward agree with its gradient only if both use one mask."""
    model = BertForPreTraining(
        small_config(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    ).double()
    weight = model.bert.encoder.layer[0].attention.self.value.weight
    direction = torch.randn_like(weight)
    for batch in make_batches([9, 5], vocab_size=211):

        def run(step, batch=batch):
            with torch.no_grad():
                weight.add_(direction, alpha=step)
            torch.manual_seed(2)
            loss = mean_loss(model.loss_parts(batch))
            with torch.no_grad():
                weight.sub_(direction, alpha=step)
            return loss

        torch.manual_seed(2)
        model.zero_grad()
        mean_loss(model.loss_parts(batch)).backward()
        slope = (run(1e-5) - run(-1e-5)) / 2e-5
        torch.testing.assert_close((weight.grad * direction).sum(), slope, atol=1e-6, rtol=1e-4)


def test_no_dropout_in_training_equals_evaluation():
    model = BertForPreTraining(small_config())
    packed, _ = make_batches([9, 5], vocab_size=211)
    training = model.loss_parts(packed).mlm_sum
    assert torch.equal(training, model.eval().loss_parts(packed).mlm_sum)
