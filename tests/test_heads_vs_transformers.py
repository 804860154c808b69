"""Each class with a head against transformers': outputs, every loss, all gradients, and files both ways."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
import transformers

import fastbert
from fastbert.batch import PackedBatch
from fastbert.modeling import BertForPreTraining
from fastbert.ops import pad_rows
from tests.packed_batches import make_batches
from tests.small_models import gradient_gap, hf_config, small_config, spread_weights

ATOL = 2e-5  # outputs and losses of size 1 to 10, fp32
GRADIENT_TOL = 2e-4  # of the largest entry of a gradient

CLASSES = [
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "BertForMultipleChoice",
]
TOKEN_OUTPUTS = ("prediction_logits", "start_logits", "end_logits")
B, C, S = 3, 2, 9


def pair(name: str, attn_implementation: str = "sdpa", **overrides: Any) -> tuple[Any, Any]:
    """(ours, transformers') in training mode without dropout, with the same large and uneven weights."""
    if name in ("BertForSequenceClassification", "BertForTokenClassification"):
        overrides = {"num_labels": 3, **overrides}
    theirs = getattr(transformers, name)(hf_config(attn_implementation, **overrides))
    spread_weights(theirs)
    ours = getattr(fastbert, name)(small_config(**overrides))
    ours.set_attn_implementation(attn_implementation)
    assert [(k, v.shape) for k, v in ours.state_dict().items()] == [
        (k, v.shape) for k, v in theirs.state_dict().items()
    ]
    ours.load_state_dict(theirs.state_dict())
    return ours.train(), theirs.train()


def mask_of(kind: str, rows: int) -> torch.Tensor:
    mask = torch.ones(rows, S, dtype=torch.long)
    if kind == "right":
        mask[0, 5:], mask[2, 1:] = 0, 0
    elif kind == "left":
        mask[0, :5], mask[2, :8] = 0, 0
    elif kind == "holes":
        mask = (torch.rand(rows, S) < 0.6).long()
        mask[:, 0] = 1
    return mask


def inputs_for(name: str, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(arguments of forward with labels, mask [rows, S])."""
    rows = B * C if name == "BertForMultipleChoice" else B
    mask = mask_of(kind, rows)
    inputs = {
        "input_ids": torch.randint(1, 211, (rows, S)),
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (rows, S)),
    }
    if name == "BertForMultipleChoice":
        inputs = {key: value.view(B, C, S) for key, value in inputs.items()}
    # the last kept token of each row: an answer that no padding touches
    last = torch.where(mask.bool(), torch.arange(S), 0).amax(1)
    labels = {
        "BertForPreTraining": {
            "labels": torch.randint(0, 211, (B, S)).masked_fill(mask[:B] == 0, -100),
            "next_sentence_label": torch.tensor([0, 1, -100]),
        },
        "BertForMaskedLM": {"labels": torch.randint(0, 211, (B, S)).masked_fill(mask[:B] == 0, -100)},
        "BertForNextSentencePrediction": {"labels": torch.tensor([1, 0, 1])},
        "BertForSequenceClassification": {"labels": torch.tensor([2, 0, 1])},
        "BertForTokenClassification": {
            "labels": torch.randint(0, 3, (B, S)).masked_fill(mask[:B] == 0, -100)
        },
        "BertForQuestionAnswering": {"start_positions": last[:B], "end_positions": last[:B, None]},
        "BertForMultipleChoice": {"labels": torch.tensor([1, 0, 1])},
    }[name]
    return {**inputs, **labels}, mask


def assert_gradients_match(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    largest = max(p.grad.abs().max().item() for p in theirs.parameters() if p.grad is not None)
    assert gradient_gap(ours, theirs) <= GRADIENT_TOL * max(1.0, largest)


def is_token_output(name: str, field: str) -> bool:
    return field in TOKEN_OUTPUTS or (
        field == "logits" and name in ("BertForMaskedLM", "BertForTokenClassification")
    )


@pytest.mark.parametrize("kind", ["none", "right", "holes", "left"])
@pytest.mark.parametrize("name", CLASSES)
def test_eager_path_is_transformers_everywhere(name: str, kind: str) -> None:
    ours, theirs = pair(name, "eager")
    inputs, _ = inputs_for(name, kind)
    out, expected = ours(**inputs), theirs(**inputs)
    assert list(out) == list(expected)
    for field in out:
        torch.testing.assert_close(out[field], expected[field], atol=ATOL, rtol=ATOL)
    out.loss.backward()
    expected.loss.backward()
    assert_gradients_match(ours, theirs)


# with padding on the left transformers pools a pad, ours the first token: only token outputs compare
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in CLASSES for kind in ("none", "right", "holes")]
    + [(name, "left") for name in ("BertForPreTraining", "BertForMaskedLM")]
    + [(name, "left") for name in ("BertForTokenClassification", "BertForQuestionAnswering")],
)
def test_default_path_is_transformers_at_kept_positions(name: str, kind: str) -> None:
    ours, theirs = pair(name)
    inputs, mask = inputs_for(name, kind)
    if kind == "left":
        inputs.pop("next_sentence_label", None)
    out, expected = ours(**inputs), theirs(**inputs)
    assert list(out) == list(expected)
    keep = mask.bool()
    for field in out:
        if field == "loss" and name == "BertForQuestionAnswering":
            continue
        if not is_token_output(name, field):
            if kind != "left" or field != "seq_relationship_logits":
                torch.testing.assert_close(out[field], expected[field], atol=ATOL, rtol=ATOL)
            continue
        torch.testing.assert_close(out[field][keep], expected[field][keep], atol=ATOL, rtol=ATOL)
        at_pads = torch.finfo(torch.float32).min if name == "BertForQuestionAnswering" else 0.0
        assert (out[field][~keep] == at_pads).all()
    loss, their_loss = out.loss, expected.loss
    if name == "BertForQuestionAnswering":  # transformers' own, with the pads left out
        positions = [inputs["start_positions"], inputs["end_positions"].squeeze(1)]
        logits = [x.masked_fill(~keep, float("-inf")) for x in (expected.start_logits, expected.end_logits)]
        their_loss = sum(torch.nn.functional.cross_entropy(x, p) for x, p in zip(logits, positions)) / 2
    if loss is None:
        assert kind == "left" and name == "BertForPreTraining"
        return
    torch.testing.assert_close(loss, their_loss, atol=ATOL, rtol=0)
    loss.backward()
    their_loss.backward()
    assert_gradients_match(ours, theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_files_go_both_ways(name: str, tmp_path: Any) -> None:
    ours, theirs = pair(name)
    inputs, _ = inputs_for(name, "none")
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back, info = type(ours).from_pretrained(tmp_path / "theirs", output_loading_info=True)
    there, their_info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert not their_info["missing_keys"]
    assert not their_info["unexpected_keys"]
    assert there.config.num_labels == back.config.num_labels == ours.config.num_labels
    with torch.no_grad():
        results = [model.eval()(**inputs).to_tuple() for model in (ours, theirs, back, there)]
    for result in results[1:]:
        for x, y in zip(result, results[0], strict=True):
            torch.testing.assert_close(x, y, atol=ATOL, rtol=ATOL)
    for model in (back, there):
        decoder = model.get_output_embeddings()
        if decoder is not None:
            assert decoder.weight is model.get_input_embeddings().weight
            assert decoder.bias is model.cls.predictions.bias


# what a class that lacks, or has more than, the checkpoint's modules reports
@pytest.mark.parametrize("source", ["BertModel", "BertForPreTraining", "BertForMaskedLM"])
@pytest.mark.parametrize("name", ["BertModel", *CLASSES])
def test_loading_reports_are_transformers(name: str, source: str, tmp_path: Any) -> None:
    getattr(fastbert, source)(small_config()).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = getattr(fastbert, name).from_pretrained(tmp_path, output_loading_info=True)
        _, expected = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == set(expected["missing_keys"])
    assert info["unexpected_keys"] == set(expected["unexpected_keys"])
    assert not any(parameter.is_meta for parameter in model.parameters())
    new = [p for n, p in model.named_parameters() if n in info["missing_keys"] and p.dim() > 1]
    assert all(0.01 < p.std().item() < 0.03 for p in new)


@pytest.mark.parametrize(
    ("num_labels", "labels", "problem_type"),
    [
        (1, torch.tensor([0.5, -1.0, 2.0]), "regression"),
        (1, torch.tensor([[0.5], [-1.0], [2.0]]), "regression"),
        (1, torch.tensor([0, 1, 2]), "regression"),
        (3, torch.tensor([0, 2, 1]), "single_label_classification"),
        (3, torch.tensor([[0], [2], [-100]]), "single_label_classification"),
        (3, torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.2, 0.0, 0.9]]), "multi_label_classification"),
    ],
)
def test_every_loss_of_sequence_classification(
    num_labels: int, labels: torch.Tensor, problem_type: str
) -> None:
    ours, theirs = pair("BertForSequenceClassification", num_labels=num_labels)
    inputs, _ = inputs_for("BertForSequenceClassification", "right")
    inputs["labels"] = labels
    out, expected = ours(**inputs), theirs(**inputs)
    torch.testing.assert_close(out.loss, expected.loss, atol=ATOL, rtol=ATOL)
    assert ours.config.problem_type == theirs.config.problem_type == problem_type
    assert ours(**inputs, num_items_in_batch=7).loss == out.loss
    out.loss.backward()
    expected.loss.backward()
    assert_gradients_match(ours, theirs)


def test_several_regressions_at_once() -> None:
    ours, theirs = pair("BertForSequenceClassification", problem_type="regression")
    inputs, _ = inputs_for("BertForSequenceClassification", "right")
    inputs["labels"] = torch.randn(B, 3)
    torch.testing.assert_close(ours(**inputs).loss, theirs(**inputs).loss, atol=ATOL, rtol=ATOL)


def test_labels_that_do_not_fit_are_named() -> None:
    ours, _ = pair("BertForSequenceClassification")
    ids = torch.randint(1, 211, (B, S))
    with pytest.raises(ValueError, match=r"integer labels of shape \(3, 3\) for 3 sequences"):
        ours(ids, labels=torch.zeros(B, 3, dtype=torch.long))
    ours.config.problem_type = "ranking"
    with pytest.raises(ValueError, match="'ranking' is not one of regression"):
        ours(ids, labels=torch.zeros(B, 3))
    ours.config.problem_type = "regression"
    with pytest.raises(ValueError, match=r"labels of shape \(3,\) do not fit logits of shape \(3, 3\)"):
        ours(ids, labels=torch.zeros(B))
    tokens, _ = pair("BertForTokenClassification")
    with pytest.raises(ValueError, match=r"labels have shape \(3, 8\), the tokens \(3, 9\)"):
        tokens(ids, labels=torch.zeros(B, S - 1, dtype=torch.long))
    answers, _ = pair("BertForQuestionAnswering", num_labels=3)
    with pytest.raises(ValueError, match="num_labels = 2"):
        answers(ids)
    choices, _ = pair("BertForMultipleChoice")
    with pytest.raises(ValueError, match=r"\[batch, choices, seqlen\]"):
        choices(ids)


def test_case_E_03_question_answering_targets() -> None:
    ours, theirs = pair("BertForQuestionAnswering")
    ids = torch.randint(1, 211, (1, S))
    end = torch.tensor([4])
    losses = {}
    for start in (8, 9, 10, 1000, -1, -100, 0):
        starts = torch.tensor([start])
        out, expected = (m(ids, start_positions=starts, end_positions=end) for m in (ours, theirs))
        torch.testing.assert_close(out.loss, expected.loss, atol=ATOL, rtol=0, equal_nan=True)
        losses[start] = out.loss
    assert out.start_logits.shape == out.end_logits.shape == (1, S)
    assert losses[8].isfinite()
    assert losses[9].isnan() and losses[10].isnan() and losses[1000].isnan()  # the only target is ignored
    assert losses[-1] == losses[-100] == losses[0]
    assert ours(ids, start_positions=end).loss is None
    # with a second row the ignored one takes no part in the mean, half of start and half of end
    ids, starts, ends = torch.cat([ids, ids + 0]), torch.tensor([9, 3]), torch.tensor([4, 3])
    out = ours(ids, start_positions=starts, end_positions=ends)
    start_loss = -out.start_logits[1].log_softmax(0)[3]
    end_loss = -(out.end_logits[0].log_softmax(0)[4] + out.end_logits[1].log_softmax(0)[3]) / 2
    torch.testing.assert_close(out.loss, (start_loss + end_loss) / 2, atol=ATOL, rtol=0)


def test_an_answer_at_a_pad_counts_as_in_transformers() -> None:
    ours, theirs = pair("BertForQuestionAnswering")
    inputs, mask = inputs_for("BertForQuestionAnswering", "right")
    inputs["start_positions"] = torch.full((B,), S - 1)
    assert not mask[0, S - 1]
    out, expected = ours(**inputs), theirs(**inputs)
    torch.testing.assert_close(out.loss, expected.loss, atol=ATOL, rtol=0)
    torch.testing.assert_close(out.start_logits, expected.start_logits, atol=ATOL, rtol=ATOL)


def test_case_E_04_classification_heads() -> None:
    ours, theirs = pair("BertForTokenClassification")
    inputs, mask = inputs_for("BertForTokenClassification", "right")
    inputs["labels"] = torch.randint(0, 3, (B, S))  # real labels at the pads, too
    loss, expected = ours(**inputs).loss, theirs(**inputs).loss
    torch.testing.assert_close(loss, expected, atol=ATOL, rtol=0)
    loss.backward()
    expected.backward()
    assert_gradients_match(ours, theirs)
    kept_only = ours(**{**inputs, "labels": inputs["labels"].masked_fill(mask == 0, -100)}).loss
    assert abs(kept_only - loss) > 1e-3
    # the dtype of a loss is fp32, of a bf16 model as well
    half, _ = pair("BertForSequenceClassification")
    out = half.bfloat16()(torch.ones(2, 3, dtype=torch.long), labels=torch.tensor([0, 1]))
    assert (out.logits.dtype, out.loss.dtype) == (torch.bfloat16, torch.float32)


def test_next_sentence_prediction_takes_labels_only() -> None:
    ours, _ = pair("BertForNextSentencePrediction")
    ids = torch.randint(1, 211, (B, S))
    assert ours(ids, next_sentence_label=torch.tensor([0, 1, 0])).loss is None


def test_inputs_embeds_of_multiple_choice() -> None:
    ours, theirs = pair("BertForMultipleChoice", "eager")
    ours.set_attn_implementation("sdpa")
    embeds, mask = torch.randn(B, C, S, 64), mask_of("right", B * C).view(B, C, S)
    given = {"inputs_embeds": embeds, "attention_mask": mask, "position_ids": torch.arange(S).expand(B, C, S)}
    out, expected = (m(**given, output_hidden_states=True, output_attentions=True) for m in (ours, theirs))
    torch.testing.assert_close(out.logits, expected.logits, atol=ATOL, rtol=ATOL)
    assert out.hidden_states[0].shape == (B * C, S, 64)
    assert out.attentions[0].shape == expected.attentions[0].shape == (B * C, 4, S, S)


# a PackedBatch in, unpadded tensors out: the same numbers as the padded rows
@pytest.mark.parametrize("name", CLASSES)
def test_packed_batches_give_the_numbers_of_padded_ones(name: str) -> None:
    ours, _ = pair(name)
    packed, padded = make_batches([S, 4, 7], vocab_size=211, filler=5, empty_ends=1, unused_slots=2)
    keep = padded.attention_mask
    arguments = {
        "input_ids": padded.input_ids,
        "attention_mask": keep,
        "token_type_ids": padded.token_type_ids,
    }
    if name == "BertForMultipleChoice":
        arguments = {key: value[:, None] for key, value in arguments.items()}
    out = ours(packed, output_hidden_states=True)
    expected = ours(**arguments, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    for x, y in zip(out.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(x[: packed.num_tokens], y[keep], atol=ATOL, rtol=0)
    for field in set(expected) - {"loss", "hidden_states"}:
        if is_token_output(name, field):
            torch.testing.assert_close(
                out[field][: packed.num_tokens], expected[field][keep], atol=ATOL, rtol=ATOL
            )
        else:
            torch.testing.assert_close(out[field][:3], expected[field], atol=ATOL, rtol=ATOL)


def test_losses_of_packed_batches() -> None:
    packed, padded = make_batches([S, 4, 7], vocab_size=211, filler=5, empty_ends=1, unused_slots=2)
    keep, num_slots = padded.attention_mask, packed.num_slots
    arguments = (padded.input_ids, keep, padded.token_type_ids)
    num_sequences = packed.cu_seqlens.numel() - 1

    mlm, _ = pair("BertForMaskedLM")
    labels = torch.full((B, S), -100)
    labels.view(-1)[padded.masked_positions] = padded.masked_labels
    torch.testing.assert_close(mlm(packed).loss, mlm(*arguments, labels=labels).loss, atol=ATOL, rtol=0)
    nsp, _ = pair("BertForNextSentencePrediction")
    expected = nsp(*arguments, labels=padded.next_sentence_labels).loss
    torch.testing.assert_close(nsp(packed).loss, expected, atol=ATOL, rtol=0)

    tokens, _ = pair("BertForTokenClassification")
    flat = torch.full((num_slots,), -100)
    flat[: packed.num_tokens] = torch.randint(0, 3, (packed.num_tokens,))
    labels = pad_rows(flat[: packed.num_tokens] + 100, keep.flatten().nonzero().squeeze(1), B, S) - 100
    expected = tokens(*arguments, labels=labels).loss
    torch.testing.assert_close(tokens(packed, labels=flat).loss, expected, atol=ATOL, rtol=0)

    answers, _ = pair("BertForQuestionAnswering")
    starts, ends = torch.tensor([0, 4, 2]), torch.tensor([8, 3, 6])  # 4 is beyond the second row's end
    padded_loss = answers(*arguments, start_positions=starts.where(starts != 4, 99), end_positions=ends).loss
    filler = torch.full((num_sequences - 3,), 99)
    packed_loss = answers(
        packed, start_positions=torch.cat([starts, filler]), end_positions=torch.cat([ends, filler])
    ).loss
    torch.testing.assert_close(packed_loss, padded_loss, atol=ATOL, rtol=0)

    with pytest.raises(ValueError, match="answer positions for"):
        answers(packed, start_positions=starts, end_positions=ends)
    with pytest.raises(ValueError, match="leave out labels"):
        pair("BertForMultipleChoice")[0](packed, labels=starts)
    with pytest.raises(ValueError, match="leave out attention_mask"):
        mlm(packed, keep)


@pytest.mark.parametrize("num_sequences", [0, 2])
@pytest.mark.parametrize("name", CLASSES)
def test_packed_batches_of_no_token(name: str, num_sequences: int) -> None:
    none = torch.zeros(0, dtype=torch.long)
    cu_seqlens = torch.zeros(num_sequences + 1, dtype=torch.int32)
    labels = torch.full((num_sequences,), -100)
    packed = PackedBatch(none, none, none, cu_seqlens, S, none, none, labels, 0)
    arguments = {}
    if name == "BertForQuestionAnswering":
        arguments = {"start_positions": labels + 100, "end_positions": labels + 100}
    out = pair(name)[0](packed, **arguments)
    for field in set(out) - {"loss"}:
        assert out[field].shape[0] == (0 if is_token_output(name, field) else num_sequences)
        assert out[field].isfinite().all()
        out[field].sum().backward(retain_graph=True)


def test_classifier_dropout() -> None:
    for name in ("BertForSequenceClassification", "BertForTokenClassification", "BertForMultipleChoice"):
        cls = getattr(fastbert, name)
        assert cls(small_config(hidden_dropout_prob=0.3)).dropout.p == 0.3
        assert cls(small_config(hidden_dropout_prob=0.3, classifier_dropout=0.0)).dropout.p == 0.0
        model = cls(small_config(classifier_dropout=0.5))
        ids = torch.randint(1, 211, (B, C, S) if "Choice" in name else (B, S))
        assert not torch.equal(model(ids).logits, model(ids).logits)
        model.eval()
        assert torch.equal(model(ids).logits, model(ids).logits)


# base: unique parameters, parameter tensors, state_dict keys
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("BertForMaskedLM", (109_514_298, 202, 204)),
        ("BertForPreTraining", (110_106_428, 206, 208)),
        ("BertForSequenceClassification", (109_482_240 + 2 * 769, 201, 201)),
        ("BertForMultipleChoice", (109_482_240 + 769, 201, 201)),
        ("BertForTokenClassification", (109_482_240 - 769 * 768 + 2 * 769, 199, 199)),
        ("BertForQuestionAnswering", (109_482_240 - 769 * 768 + 2 * 769, 199, 199)),
        ("BertForNextSentencePrediction", (109_482_240 + 2 * 769, 201, 201)),
    ],
)
def test_case_D_03_parameter_counts_of_base(name: str, counts: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        model = getattr(fastbert, name)(fastbert.BertConfig())
    assert (model.num_parameters(), len(list(model.parameters())), len(model.state_dict())) == counts


def test_the_class_of_pretraining_is_exported_from_one_place() -> None:
    assert fastbert.BertForPreTraining is BertForPreTraining
    assert all(getattr(fastbert, name).accepts_loss_kwargs is False for name in CLASSES)


@pytest.fixture
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("BertForQuestionAnswering", "packed"),
        ("BertForTokenClassification", "padded"),
    ],
)
def test_classes_compile_in_one_graph(name: str, form: str) -> None:
    ours, _ = pair(name, num_hidden_layers=1)
    if form == "packed":
        packed, _ = make_batches([S, 4, 7], vocab_size=211)
        inputs: dict[str, Any] = {"input_ids": packed}
        if name == "BertForQuestionAnswering":
            inputs |= {"start_positions": torch.tensor([8, 3, 1]), "end_positions": torch.tensor([8, 99, 1])}
    else:  # with a mask the number of kept tokens is data, which a graph cannot hold on the default path
        inputs, _ = inputs_for(name, "right")
        ours.set_attn_implementation("eager")
    expected = ours(**inputs)
    out = torch.compile(ours, fullgraph=True, backend="aot_eager")(**inputs)
    assert list(out) == list(expected)
    for field in out:
        torch.testing.assert_close(out[field], expected[field], atol=ATOL, rtol=ATOL)
    if out.loss is not None:
        parameters = list(ours.parameters())
        gradients = [torch.autograd.grad(o.loss, parameters, allow_unused=True) for o in (out, expected)]
        for x, y in zip(*gradients, strict=True):
            assert (x is None) is (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, atol=GRADIENT_TOL, rtol=GRADIENT_TOL)


@pytest.mark.parametrize("name", CLASSES)
def test_autocast_and_half_precision(name: str) -> None:
    ours, _ = pair(name)
    inputs, _ = inputs_for(name, "right")
    exact = ours(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(**inputs)
    half = copy.deepcopy(ours).bfloat16()
    for result in (out, half(**inputs)):
        assert (result.loss.dtype, result[1].dtype) == (torch.float32, torch.bfloat16)
        assert abs(result.loss - exact.loss) < 0.05 * abs(exact.loss) + 0.05
    out.loss.backward()
    assert all(
        p.grad is None or (p.grad.dtype == torch.float32 and p.grad.isfinite().all())
        for p in ours.parameters()
    )
    assert sum(p.grad is not None for p in ours.parameters()) == len(list(ours.parameters()))


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "BertForMultipleChoice", "BertForNextSentencePrediction"]
)
@pytest.mark.parametrize("empty_ends", [0, 2])
def test_finishing_the_last_layer_for_first_tokens_only_changes_nothing(name: str, empty_ends: int) -> None:
    """Logits and every gradient, in fp64, against the same head with every row computed."""
    torch.manual_seed(0)
    model = getattr(fastbert, name)(small_config()).double().train()
    spread_weights(model)
    packed, _ = make_batches([4, 9, 1, 6], vocab_size=model.config.vocab_size, empty_ends=empty_ends)
    num_sequences = 4 + empty_ends
    seen = []
    model.bert.encoder.layer[-1].register_forward_hook(lambda module, inputs, output: seen.append(output))

    results = []
    for every_row in (True, False):
        model.zero_grad()
        logits = model(packed, output_hidden_states=every_row).logits
        (logits * torch.arange(1.0, logits.numel() + 1).view_as(logits)).sum().backward()
        results.append((logits, [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
    assert [output.shape[0] for output in seen] == [20, num_sequences]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_a_batch_of_empty_sequences_still_has_a_row_for_each() -> None:
    model = fastbert.BertForSequenceClassification(small_config())
    packed, _ = make_batches([3], vocab_size=model.config.vocab_size)
    nothing = torch.zeros(0, dtype=torch.long)
    ids = dict.fromkeys(("input_ids", "token_type_ids", "position_ids"), nothing)
    empty = dataclasses.replace(
        packed, **ids, cu_seqlens=torch.zeros(3, dtype=torch.int32), masked_positions=nothing, num_tokens=0
    )
    assert model(empty).logits.shape == (2, model.config.num_labels)
