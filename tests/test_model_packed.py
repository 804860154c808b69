"""Packed batches: the same numbers as padded ones, and no sequence sees another."""

import copy
from dataclasses import replace

import pytest
import torch

from fastbert.batch import IGNORE_INDEX, PackedBatch
from fastbert.modeling import BertForPreTraining
from tests.packed_batches import dense_labels, make_batches
from tests.small_models import gradient_gap, model_pair, small_config, spread_weights

ATOL = 2e-5


def small_model(dtype=torch.float32, **overrides):
    model = BertForPreTraining(small_config(**overrides))
    spread_weights(model)
    return model.to(dtype).train()


def mean_loss(parts):
    return parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count


SHAPES = [
    {"seqlens": [5, 9, 2]},
    {"seqlens": [9, 9, 9], "pad_to": 9},
    {"seqlens": [1]},
    {"seqlens": [33, 1, 33, 7, 20], "filler": 40, "empty_ends": 3, "unused_slots": 5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=["mixed", "equal", "one-token", "filler"])
def test_packed_and_padded_losses_and_gradients_agree_with_transformers(shape, dtype):
    atol = ATOL if dtype == torch.float32 else 1e-11
    ours, theirs = model_pair(dtype)
    packed, padded = make_batches(vocab_size=211, **shape)
    expected = theirs(
        padded.input_ids,
        padded.attention_mask.long(),
        padded.token_type_ids,
        labels=dense_labels(padded),
        next_sentence_label=padded.next_sentence_labels,
    ).loss
    expected.backward()
    for batch in (packed, padded):
        parts = ours.loss_parts(batch)
        assert parts.mlm_count.item() == padded.masked_labels.numel()
        assert parts.nsp_count.item() == len(shape["seqlens"])
        ours.zero_grad()
        mean_loss(parts).backward()
        torch.testing.assert_close(mean_loss(parts), expected, atol=atol, rtol=0)
        assert gradient_gap(ours, theirs) < atol
    ours.zero_grad()
    loss = ours(packed).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=atol, rtol=0)
    assert gradient_gap(ours, theirs) < atol


def test_counts_and_correct_are_those_of_the_logits():
    model = small_model().eval()
    packed, _ = make_batches([9, 7, 12], vocab_size=211, mask_share=0.5, filler=5)
    out = model(packed)
    best = out.prediction_logits[packed.masked_positions].argmax(-1)
    labels = packed.masked_labels.clone()
    labels[::2] = best[::2]
    labels[1] = IGNORE_INDEX
    nsp = packed.next_sentence_labels.clone()
    nsp[0] = out.seq_relationship_logits[0].argmax()
    nsp[1] = 1 - out.seq_relationship_logits[1].argmax()
    nsp[2] = IGNORE_INDEX
    parts = model.loss_parts(replace(packed, masked_labels=labels, next_sentence_labels=nsp))
    assert parts.mlm_count.item() == labels.numel() - 1
    assert parts.mlm_correct.item() == ((best == labels) & (labels != IGNORE_INDEX)).sum().item()
    assert parts.mlm_correct.item() >= labels.numel() // 2
    assert (parts.nsp_count.item(), parts.nsp_correct.item()) == (2, 1)


def test_the_shortened_last_layer_equals_the_full_one():
    model = small_model(torch.float64)
    packed, _ = make_batches([9, 7, 12], vocab_size=211, filler=5, empty_ends=2)
    full = model.bert(packed)
    logits = model.cls.predictions(full.last_hidden_state)[packed.masked_positions]
    cross_entropy = torch.nn.functional.cross_entropy
    mlm_sum = cross_entropy(logits, packed.masked_labels, reduction="sum")
    nsp_logits = model.cls.seq_relationship(full.pooler_output)
    nsp_sum = cross_entropy(nsp_logits, packed.next_sentence_labels, reduction="sum", ignore_index=-100)
    (mlm_sum + nsp_sum).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parts = model.loss_parts(packed)
    (parts.mlm_sum + parts.nsp_sum).backward()
    torch.testing.assert_close(parts.mlm_sum, mlm_sum, atol=1e-11, rtol=0)
    torch.testing.assert_close(parts.nsp_sum, nsp_sum, atol=1e-11, rtol=0)
    for x, y in zip(model.parameters(), expected):
        torch.testing.assert_close(x.grad, y, atol=1e-11, rtol=1e-11)


def test_packed_equals_each_sequence_alone_and_padded():
    model = small_model()
    seqlens = [5, 9, 2]
    packed, padded = make_batches(seqlens, vocab_size=211)
    together = model.bert(packed)
    by_rows = model.bert(padded.input_ids, padded.attention_mask, padded.token_type_ids)
    assert together.last_hidden_state.shape == (16, 64)
    assert together.pooler_output.shape == (3, 64)
    for i, n in enumerate(seqlens):
        alone = model.bert(padded.input_ids[i : i + 1, :n], None, padded.token_type_ids[i : i + 1, :n])
        states = together.last_hidden_state.split(seqlens)[i]
        torch.testing.assert_close(states, alone.last_hidden_state[0], atol=ATOL, rtol=0)
        torch.testing.assert_close(states, by_rows.last_hidden_state[i, :n], atol=ATOL, rtol=0)
        torch.testing.assert_close(together.pooler_output[i], alone.pooler_output[0], atol=ATOL, rtol=0)
        torch.testing.assert_close(together.pooler_output[i], by_rows.pooler_output[i], atol=ATOL, rtol=0)


def test_changing_one_sequence_leaves_the_others_bit_unchanged():
    model = small_model().eval()
    packed, padded = make_batches([5, 9, 2], vocab_size=211)
    ids = packed.input_ids.clone()
    ids[5:14] = torch.randint(5, 211, (9,))
    before, after = model.bert(packed), model.bert(replace(packed, input_ids=ids))
    for name, others in (("last_hidden_state", [*range(5), 14, 15]), ("pooler_output", [0, 2])):
        assert torch.equal(before[name][others], after[name][others])
    assert not torch.equal(before.last_hidden_state[5:14], after.last_hidden_state[5:14])
    padded_ids = padded.input_ids.clone()
    padded_ids[1] = torch.randint(5, 211, (9,))
    before, after = (model.bert(x, padded.attention_mask) for x in (padded.input_ids, padded_ids))
    assert torch.equal(before.last_hidden_state[[0, 2]], after.last_hidden_state[[0, 2]])


def test_filler_and_empty_sequences_change_nothing():
    model = small_model()
    losses, gradients = [], []
    for extra in ({}, {"filler": 30, "empty_ends": 4, "unused_slots": 9}):
        packed, _ = make_batches([9, 7, 12], vocab_size=211, **extra)
        parts = model.loss_parts(packed)
        model.zero_grad()
        mean_loss(parts).backward()
        losses.append(mean_loss(parts).detach())
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=0)
    for x, y in zip(*gradients):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)


def test_nothing_labelled_gives_zero_and_zero_gradients():
    model = small_model()
    packed, padded = make_batches([9, 7], vocab_size=211)
    for batch in (packed, padded):
        unlabelled = replace(
            batch,
            masked_labels=torch.full_like(batch.masked_labels, IGNORE_INDEX),
            next_sentence_labels=torch.full_like(batch.next_sentence_labels, IGNORE_INDEX),
        )
        parts = model.loss_parts(unlabelled)
        assert (parts.mlm_sum.item(), parts.mlm_count.item()) == (0.0, 0)
        assert (parts.nsp_sum.item(), parts.nsp_count.item()) == (0.0, 0)
        model.zero_grad(set_to_none=True)
        (parts.mlm_sum + parts.nsp_sum).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.equal(parameter.grad, torch.zeros_like(parameter.grad)), name


def test_accumulated_micro_batches_weigh_every_token_the_same():
    model = small_model(torch.float64)
    short, _ = make_batches([14], vocab_size=211, seed=1)  # 2 masked tokens
    long, _ = make_batches([30, 23], vocab_size=211, seed=2)  # 8 masked tokens
    parts = [model.loss_parts(batch) for batch in (short, long)]
    assert [p.mlm_count.item() for p in parts] == [2, 8]
    total = sum(p.mlm_count for p in parts)
    sequences = sum(p.nsp_count for p in parts)
    for p in parts:
        (p.mlm_sum / total + p.nsp_sum / sequences).backward()
    gradients = [p.grad.clone() for p in model.parameters()]

    both = PackedBatch(
        input_ids=torch.cat([short.input_ids, long.input_ids]),
        token_type_ids=torch.cat([short.token_type_ids, long.token_type_ids]),
        position_ids=torch.cat([short.position_ids, long.position_ids]),
        cu_seqlens=torch.cat([short.cu_seqlens, long.cu_seqlens[1:] + 14]),
        max_seqlen=30,
        masked_positions=torch.cat([short.masked_positions, long.masked_positions + 14]),
        masked_labels=torch.cat([short.masked_labels, long.masked_labels]),
        next_sentence_labels=torch.cat([short.next_sentence_labels, long.next_sentence_labels]),
        num_tokens=67,
    )
    model.zero_grad()
    whole = model.loss_parts(both)
    mean_loss(whole).backward()
    weighted = sum(p.mlm_sum for p in parts) / total + sum(p.nsp_sum for p in parts) / sequences
    torch.testing.assert_close(mean_loss(whole), weighted, atol=1e-12, rtol=0)
    for x, y in zip(model.parameters(), gradients):
        torch.testing.assert_close(x.grad, y, atol=1e-11, rtol=0)


def run_with_gradients(model, batch):
    torch.manual_seed(11)
    model.zero_grad()
    parts = model.loss_parts(batch)
    mean_loss(parts).backward()
    return mean_loss(parts).detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("every_n_layers", [1, 2])
def test_checkpointing_gives_the_same_bits_with_dropout(every_n_layers):
    model = small_model(num_hidden_layers=3, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    for batch in make_batches([9, 7, 12], vocab_size=211, filler=5):
        model.gradient_checkpointing_disable()
        loss, gradients = run_with_gradients(model, batch)
        model.gradient_checkpointing_enable(every_n_layers=every_n_layers)
        assert model.is_gradient_checkpointing
        loss_again, gradients_again = run_with_gradients(model, batch)
        assert torch.equal(loss, loss_again)
        assert all(torch.equal(x, y) for x, y in zip(gradients, gradients_again))


def test_checkpointing_recomputes_each_layer_once():
    model = small_model(num_hidden_layers=3, gradient_checkpointing=True)
    calls = []
    for layer in model.bert.encoder.layer:
        layer.intermediate.register_forward_hook(lambda *_: calls.append(1))
    packed, _ = make_batches([9, 7], vocab_size=211)
    loss = mean_loss(model.loss_parts(packed))
    assert len(calls) == 3
    loss.backward()
    assert len(calls) == 6
    model.eval()
    mean_loss(model.loss_parts(packed)).backward()
    assert len(calls) == 9


def test_a_packed_batch_longer_than_the_position_table_is_refused():
    packed, _ = make_batches([65, 7], vocab_size=211)
    with pytest.raises(ValueError, match="65 is above max_position_embeddings = 64"):
        small_model().loss_parts(packed)


def test_attentions_of_a_packed_batch_are_refused():
    packed, _ = make_batches([9, 7], vocab_size=211)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        small_model().bert(packed, output_attentions=True)


def test_a_replaced_projection_is_called_as_a_module():
    """What LoRA does: the projection becomes another module, whose forward must run."""

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    packed, padded = make_batches([9, 7], vocab_size=211)
    model = small_model().eval()
    for path in (
        "attention.self.query", "attention.self.value", "attention.output.dense",
        "intermediate.dense", "output.dense",
    ):  # fmt: skip
        twin, scaled = copy.deepcopy(model), copy.deepcopy(model)
        layer = twin.bert.encoder.layer[1]
        parent, name = path.rsplit(".", 1)
        plain = layer.get_submodule(path)
        doubled = Doubled(plain.in_features, plain.out_features)
        doubled.load_state_dict(plain.state_dict())
        setattr(layer.get_submodule(parent), name, doubled)
        with torch.no_grad():
            for parameter in scaled.bert.encoder.layer[1].get_submodule(path).parameters():
                parameter.mul_(2)
        expected = mean_loss(scaled.loss_parts(packed))
        assert abs(expected - mean_loss(model.loss_parts(packed))) > 1e-4
        for batch in (packed, padded):
            torch.testing.assert_close(mean_loss(twin.loss_parts(batch)), expected, atol=ATOL, rtol=0)

        hooked, seen = copy.deepcopy(model), []
        hooked.bert.encoder.layer[1].get_submodule(path).register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(1) or 2 * output
        )
        torch.testing.assert_close(mean_loss(hooked.loss_parts(packed)), expected, atol=ATOL, rtol=0)
        assert seen == [1]
