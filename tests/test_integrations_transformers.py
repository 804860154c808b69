"""accelerate() inside transformers' BERT: the same outputs, gradients and API as without it."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fastbert.integrations import accelerate, restore
from tests.minilm import TEXTS, minilm_folder
from tests.small_models import gradient_gap, hf_config, spread_weights

ATOL = 2e-5
IS_V4 = transformers.__version__.startswith("4.")
four_axes = pytest.mark.skipif(IS_V4, reason="transformers 4 takes no mask of four axes here")
HEADS = (
    "BertModel", "BertForPreTraining", "BertForMaskedLM", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering",
)  # fmt: skip
# right, none, left, holes
MASK = torch.tensor([[1] * 3 + [0] * 6, [1] * 9, [0] * 4 + [1] * 5, [1, 1, 0, 1, 0, 1, 1, 0, 0]])


def pair(head: str = "BertModel", attention: str = "sdpa", **overrides: Any) -> tuple[Any, Any]:
    """(accelerated, plain), with equal weights that all matter."""
    plain = getattr(transformers, head)(hf_config(attention, **overrides)).eval()
    spread_weights(plain)
    accelerated = copy.deepcopy(plain)
    assert accelerate(accelerated).accelerated
    return accelerated, plain


def inputs() -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(1, 211, MASK.shape),
        "token_type_ids": torch.randint(0, 2, MASK.shape),
        "attention_mask": MASK,
    }


def assert_kept_equal(ours: Any, theirs: Any, mask: Tensor = MASK) -> None:
    """Every field of two outputs, token for token, except at padding."""
    assert list(ours.keys()) == list(theirs.keys())
    for name in list(theirs.keys()):
        x, y = ours[name], theirs[name]
        for a, b in zip(x, y, strict=True) if isinstance(y, tuple) else [(x, y)]:
            assert a.shape == b.shape and a.dtype == b.dtype, name
            if a.shape[:2] == mask.shape:
                a, b = a[mask != 0], b[mask != 0]
            torch.testing.assert_close(a, b, atol=ATOL, rtol=ATOL, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("head", "attention"), [*((head, "sdpa") for head in HEADS), ("BertModel", "eager")])
def test_outputs_equal_transformers(head, attention):
    ours, theirs = pair(head, attention)
    batch = inputs()
    with torch.no_grad():
        assert_kept_equal(ours(**batch), theirs(**batch))
        assert_kept_equal(
            ours(**batch, output_hidden_states=True), theirs(**batch, output_hidden_states=True)
        )
        x, y = ours(**batch, return_dict=False), theirs(**batch, return_dict=False)
    assert isinstance(x, tuple) and [a.shape for a in x] == [a.shape for a in y]


def test_padding_is_not_computed_and_zero():
    ours, _ = pair()
    shapes = []
    ours.encoder.layer[0].intermediate.dense.register_forward_hook(lambda m, x, y: shapes.append(y.shape))
    hidden = ours(**inputs()).last_hidden_state
    # kept tokens, and the first position of the sequence that is padded on the left
    assert shapes == [(int(MASK.sum()) + 1, 96)]
    unread = MASK == 0
    unread[2, 0] = False
    assert not hidden[unread].any()


@pytest.mark.parametrize("mask", [None, torch.ones_like(MASK), MASK.bool(), MASK.float(), "empty row"])
def test_masks(mask):
    ours, theirs = pair()
    batch = {**inputs(), "attention_mask": mask}
    kept = torch.ones_like(MASK) if mask is None else mask
    if isinstance(mask, str):
        batch["attention_mask"] = MASK.clone()
        batch["attention_mask"][1] = 0
        kept = batch["attention_mask"]
    x, y = ours(**batch), theirs(**batch)
    if isinstance(mask, str) and IS_V4:  # it pools a mean over the padding there
        x.pooler_output, y.pooler_output = x.pooler_output[[0, 2, 3]], y.pooler_output[[0, 2, 3]]
    assert_kept_equal(x, y, kept)


@four_axes
def test_a_mask_of_keys_with_four_axes():
    ours, theirs = pair()
    batch = {**inputs(), "attention_mask": MASK[:, None, None, :].bool().expand(-1, 1, 9, -1)}
    assert_kept_equal(ours(**batch), theirs(**batch))
    assert not ours(**batch).last_hidden_state[0, 3:].any()


@four_axes
def test_other_masks_are_left_to_transformers():
    ours, theirs = pair()
    causal = torch.ones(4, 1, 9, 9).tril().bool()
    bias = torch.randn(4, 1, 1, 9).expand(-1, 1, 9, -1)
    for mask in (causal, bias):
        batch = {**inputs(), "attention_mask": mask}
        assert torch.equal(ours(**batch).last_hidden_state, theirs(**batch).last_hidden_state)


def test_attention_maps_are_left_to_transformers():
    ours, theirs = pair(attention="eager")
    batch = inputs()
    x, y = ours(**batch, output_attentions=True), theirs(**batch, output_attentions=True)
    assert len(x.attentions) == 2
    for a, b in zip(x.attentions, y.attentions, strict=True):
        assert torch.equal(a, b)
    # and the next call is ours again
    assert not ours(**batch).last_hidden_state[0, 3:].any()


LABELS = {
    "BertForMaskedLM": {"labels": torch.where(MASK == 1, 7, -100)},
    "BertForPreTraining": {
        "labels": torch.where(MASK == 1, 7, -100),
        "next_sentence_label": torch.tensor([0, 1, 1, 0]),
    },
    "BertForNextSentencePrediction": {"labels": torch.tensor([0, 1, 1, 0])},
    "BertForSequenceClassification": {"labels": torch.tensor([0, 1, 1, 0])},
    "BertForTokenClassification": {"labels": torch.where(MASK == 1, 1, -100)},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", LABELS)
def test_losses_and_gradients_equal_transformers(head, checkpointing):
    ours, theirs = pair(head)
    if checkpointing:
        ours.gradient_checkpointing_enable()
    batch = {**inputs(), **LABELS[head]}
    loss, expected = (model.train()(**batch).loss for model in (ours, theirs))
    torch.testing.assert_close(loss, expected, atol=ATOL, rtol=ATOL)
    loss.backward()
    expected.backward()
    assert gradient_gap(ours, theirs) < 2e-4


def test_gradient_checkpointing_recomputes_layers():
    ours, _ = pair("BertForSequenceClassification")
    ours.gradient_checkpointing_enable()
    calls = []
    ours.bert.encoder.layer[1].output.dense.register_forward_hook(lambda *_: calls.append(1))
    ours.train()(**inputs(), labels=torch.tensor([0, 1, 1, 0])).loss.backward()
    assert len(calls) == 2


def test_a_label_at_padding_counts():
    ours, theirs = pair("BertForTokenClassification")
    batch = {**inputs(), "labels": torch.randint(0, 2, MASK.shape)}
    torch.testing.assert_close(ours(**batch).loss, theirs(**batch).loss, atol=ATOL, rtol=ATOL)


def test_question_answering_leaves_padding_out_of_the_softmax():
    ours, theirs = pair("BertForQuestionAnswering")
    batch = inputs()
    starts, ends = torch.tensor([1, 8, 5, 30]), torch.tensor([2, 8, 6, -1])
    output = ours(**batch, start_positions=starts, end_positions=ends)
    with torch.no_grad():
        plain = theirs(**batch)
    losses = []
    for logits, positions in ((plain.start_logits, starts), (plain.end_logits, ends)):
        logits = logits.masked_fill(MASK == 0, float("-inf")).log_softmax(dim=-1)
        places = positions.clamp(min=0)
        rows = places < 9  # beyond the end: takes no part
        losses.append(-logits[rows, places[rows]].mean())
    torch.testing.assert_close(output.loss, sum(losses) / 2, atol=ATOL, rtol=ATOL)
    assert list(output.keys()) == ["loss", "start_logits", "end_logits"]
    assert (output.start_logits[MASK == 0] == torch.finfo(torch.float32).min).all()
    loss, start_logits, _ = ours(
        batch["input_ids"], MASK, batch["token_type_ids"], start_positions=starts, end_positions=ends,
        return_dict=False,
    )  # fmt: skip
    assert torch.equal(loss, output.loss) and torch.equal(start_logits, output.start_logits)


def test_dropout_is_drawn_from_torch_and_differs_from_eval():
    ours, _ = pair(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    batch = inputs()
    ours.train()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(ours(**batch).last_hidden_state)
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], ours.eval()(**batch).last_hidden_state)


def test_autocast_and_half_precision():
    ours, theirs = pair("BertForSequenceClassification")
    batch = inputs()
    kept = MASK.bool()
    with torch.autocast("cpu", torch.bfloat16):
        x, y = (m(**batch, output_hidden_states=True) for m in (ours, theirs))
    assert x.logits.dtype == y.logits.dtype
    for a, b in zip(x.hidden_states, y.hidden_states, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a[kept], b[kept], atol=0.1, rtol=0.1)
    x, y = (m.bfloat16()(**batch).logits for m in (ours, theirs))
    torch.testing.assert_close(x, y, atol=0.1, rtol=0.1)


# ---- what stays as it was


def test_parameters_are_the_same_objects_and_restore_undoes_everything():
    model = transformers.BertForTokenClassification(hf_config())
    classes = [type(module) for module in model.modules()]
    parameters, keys = list(model.parameters()), list(model.state_dict())
    handle = accelerate(model)
    assert handle.accelerated == ("bert",) and handle.left == {}
    assert accelerate(model).accelerated == ("bert",)  # again: nothing more
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert isinstance(model.bert.encoder, transformers.models.bert.modeling_bert.BertEncoder)
    handle.restore()
    assert [type(module) for module in model.modules()] == classes
    restore(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_accelerated_and_independent(copied):
    ours, _ = pair()
    batch = inputs()
    other = copied(ours)
    assert torch.equal(other(**batch).last_hidden_state, ours(**batch).last_hidden_state)
    assert accelerate(other).accelerated == ("",)
    with torch.no_grad():
        other.encoder.layer[0].output.dense.weight.zero_()
    assert not torch.equal(other(**batch).last_hidden_state, ours(**batch).last_hidden_state)


@pytest.mark.parametrize("head", HEADS)
def test_names_and_signatures_stay(head):
    """transformers.Trainer chooses the columns of a data set, and the labels, by them."""
    ours, theirs = pair(head)
    assert type(ours).__name__ == type(theirs).__name__
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)


def test_save_pretrained_writes_what_transformers_writes(tmp_path):
    ours, theirs = pair("BertForMaskedLM")
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_hooks_on_a_layer_see_padded_tensors():
    ours, theirs = pair()
    seen = []
    for model in (ours, theirs):
        model.encoder.layer[1].register_forward_hook(
            lambda module, args, output: seen.append((args[0], output[0] if IS_V4 else output))
        )
        model(**inputs())
    for x, y in zip(*seen, strict=True):
        assert x.shape == y.shape == (4, 9, 64)


def test_a_layer_with_changed_inner_modules_is_computed_as_transformers_does():
    ours, theirs = pair()
    batch = inputs()
    for model in (ours, theirs):
        model.encoder.layer[0].attention.output.register_forward_hook(lambda m, args, output: 2 * output)
    assert_kept_equal(ours(**batch), theirs(**batch))


def test_tracing_bakes_no_lengths_in():
    ours, theirs = pair(return_dict=False)
    batch = inputs()
    other = torch.ones_like(MASK)
    other[:, 5:] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(ours, (batch["input_ids"], MASK))
    torch.testing.assert_close(
        traced(batch["input_ids"], other)[0], theirs(batch["input_ids"], other)[0], atol=ATOL, rtol=0
    )


# ---- what is left as it is


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: transformers.BertModel(hf_config(is_decoder=True)), "it is a decoder"),
        (
            lambda: transformers.BertModel(hf_config(is_decoder=True, add_cross_attention=True)),
            "it is a decoder",
        ),
        (
            lambda: transformers.RobertaModel(
                transformers.RobertaConfig(
                    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
                )
            ),
            "RobertaModel is no BERT",
        ),
        (lambda: nn.Linear(2, 2), "no BERT of transformers is in it"),
    ],
)
def test_what_is_left_is_said(make, says):
    model = make()
    with pytest.warns(UserWarning, match=says) as caught:
        handle = accelerate(model)
    assert len(caught) == 1
    assert handle.accelerated == () and says in handle.left[""]


def test_a_wrapped_encoder_is_left():
    model = transformers.BertModel(hf_config())
    model.encoder.layer[1] = nn.Identity()
    with pytest.warns(UserWarning, match="BertLayer is a Identity"):
        assert accelerate(model).accelerated == ()


def test_import_loads_no_transformers():
    code = "import sys, fastbert.integrations; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- with other libraries


def test_the_trainer_learns_the_same(tmp_path: Path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    losses = []
    for model in pair("BertForSequenceClassification"):
        rows = [
            {"input_ids": [2, *range(5, 6 + i), 3], "labels": i % 2, "text": "removed by its name"}
            for i in range(8)
        ]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, logging_steps=1,
            learning_rate=1e-3, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, seed=0,
            gradient_checkpointing=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=_collate)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert losses[0][-1] != losses[0][0]


def _collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    assert "text" not in rows[0]
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {
        "input_ids": padded,
        "attention_mask": (padded != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


@pytest.mark.parametrize("order", ["before", "after"])
def test_lora(order):
    peft = pytest.importorskip("peft")
    _, plain = pair("BertForSequenceClassification")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", target_modules=["query", "value"], r=4, init_lora_weights=False, lora_dropout=0.0
    )
    models = []
    for is_ours in (True, False):
        model = copy.deepcopy(plain)
        if is_ours and order == "before":
            accelerate(model)
        torch.manual_seed(3)  # the adapters' weights
        model = peft.get_peft_model(model, config)
        if is_ours and order == "after":
            accelerate(model)
        models.append(model.train())
    batch = {**inputs(), "labels": torch.tensor([0, 1, 1, 0])}
    ours, theirs = (model(**batch) for model in models)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=ATOL, rtol=ATOL)
    assert not torch.allclose(ours.logits, plain(**inputs()).logits, atol=1e-2)  # the adapters act
    ours.loss.backward()
    theirs.loss.backward()
    assert gradient_gap(*models) < 2e-4
    merged, expected = (model.merge_and_unload().eval()(**batch).logits for model in models)
    torch.testing.assert_close(merged, expected, atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("side", ["right", "left"])
def test_minilm_equals_transformers(side):
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    for count, max_length in ((1, 64), (5, 64), (256, 24)):
        texts = (TEXTS * 37)[:count]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.inference_mode():
            x, y = (m(**batch, output_hidden_states=True) for m in (ours, theirs))
        assert_kept_equal(x, y, batch["attention_mask"])
