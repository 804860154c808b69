"""The checks that transformers' own suite makes of its BERT, made of ours.

After `BertModelTester` and `ModelTesterMixin` of transformers: tiny random models, each class with each form
of input, and what every model of the library must do (save, load, resize, checkpoint, give its states). They
run with our config and with transformers', since a user may hand over either.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fastbert

BATCH, SEQLEN, HIDDEN, LAYERS, HEADS, VOCAB, TYPES, LABELS, CHOICES = 13, 7, 32, 2, 4, 99, 16, 3, 4
CLASSES = [
    "BertModel",
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "BertForMultipleChoice",
]
TIED = ("BertForPreTraining", "BertForMaskedLM")
WITH_LOSS = CLASSES[1:]

every_class = pytest.mark.parametrize("name", CLASSES)


@pytest.fixture(params=[fastbert.BertConfig, transformers.BertConfig], ids=["our_config", "hf_config"])
def config(request: pytest.FixtureRequest) -> Any:
    return request.param(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=37,
        hidden_act="gelu",
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        max_position_embeddings=512,
        type_vocab_size=TYPES,
        is_decoder=False,
        initializer_range=0.02,
    )


@pytest.fixture
def our_config(request: pytest.FixtureRequest) -> fastbert.BertConfig:
    return fastbert.BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=37,
        type_vocab_size=TYPES,
    )


def random_mask() -> torch.Tensor:
    mask = torch.randint(0, 2, (BATCH, SEQLEN))
    mask[:, 0] = 1  # as transformers' random_attention_mask
    return mask


def inputs_of(name: str, with_labels: bool = False) -> dict[str, torch.Tensor]:
    inputs = {
        "input_ids": torch.randint(0, VOCAB, (BATCH, SEQLEN)),
        "token_type_ids": torch.randint(0, TYPES, (BATCH, SEQLEN)),
        "attention_mask": random_mask(),
    }
    if name == "BertForMultipleChoice":
        inputs = {key: x.unsqueeze(1).expand(-1, CHOICES, -1).contiguous() for key, x in inputs.items()}
    if with_labels:
        one_each, each_token = torch.zeros(BATCH).long(), torch.zeros(BATCH, SEQLEN).long()
        if name == "BertForQuestionAnswering":
            inputs |= {"start_positions": one_each, "end_positions": one_each}
        elif name in ("BertForMaskedLM", "BertForTokenClassification"):
            inputs["labels"] = each_token
        elif name == "BertForPreTraining":
            inputs |= {"labels": each_token, "next_sentence_label": one_each}
        else:
            inputs["labels"] = one_each
    return inputs


def make(name: str, config: Any, **kwargs: Any) -> Any:
    return getattr(fastbert, name)(config, **kwargs)


# ---- create_and_check_*


def test_create_and_check_model(config: Any) -> None:
    model = fastbert.BertModel(config=config)
    model.to("cpu")
    model.eval()
    inputs = inputs_of("BertModel")
    result = model(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], token_type_ids=inputs["token_type_ids"]
    )
    result = model(inputs["input_ids"], token_type_ids=inputs["token_type_ids"])
    result = model(inputs["input_ids"])
    assert result.last_hidden_state.shape == (BATCH, SEQLEN, HIDDEN)
    assert result.pooler_output.shape == (BATCH, HIDDEN)


SHAPES = {
    "BertForMaskedLM": {"logits": (BATCH, SEQLEN, VOCAB)},
    "BertForNextSentencePrediction": {"logits": (BATCH, 2)},
    "BertForPreTraining": {
        "prediction_logits": (BATCH, SEQLEN, VOCAB),
        "seq_relationship_logits": (BATCH, 2),
    },
    "BertForQuestionAnswering": {"start_logits": (BATCH, SEQLEN), "end_logits": (BATCH, SEQLEN)},
    "BertForSequenceClassification": {"logits": (BATCH, LABELS)},
    "BertForTokenClassification": {"logits": (BATCH, SEQLEN, LABELS)},
    "BertForMultipleChoice": {"logits": (BATCH, CHOICES)},
}


@pytest.mark.parametrize("name", WITH_LOSS)
def test_create_and_check_heads(name: str, config: Any) -> None:
    if "Classification" in name:
        config.num_labels = LABELS
    config.num_choices = CHOICES
    model = make(name, config).to("cpu").eval()
    inputs = inputs_of(name, with_labels=True)
    for key in inputs.keys() - {"input_ids", "token_type_ids", "attention_mask"}:
        high = {"labels": 2, "next_sentence_label": 2, "start_positions": 2, "end_positions": 2}[key]
        inputs[key] = torch.randint(0, high, inputs[key].shape)
    result = model(**inputs)
    for field, shape in SHAPES[name].items():
        assert result[field].shape == shape
    assert result.loss.shape == ()
    assert result.loss.isfinite()


# ---- the common checks


@every_class
def test_forward_signature(name: str, our_config: Any) -> None:
    model = make(name, our_config)
    names = list(inspect.signature(model.forward).parameters)
    assert names == list(inspect.signature(getattr(transformers, name).forward).parameters)[1:]
    assert names[0] == "input_ids"


@every_class
def test_save_load(name: str, config: Any, tmp_path: Any) -> None:
    model = make(name, config).eval()
    inputs = inputs_of(name)
    with torch.no_grad():
        first = model(**inputs)
        model.save_pretrained(tmp_path)
        assert (tmp_path / "model.safetensors").exists()
        assert (tmp_path / "config.json").exists()
        loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
        second = loaded(**inputs)
    assert not any(info.values())
    assert not loaded.training
    assert torch.equal(first[0], second[0])
    assert loaded.config.architectures == [name]
    torch.save(model.state_dict(), tmp_path / "state.bin")
    twin = make(name, copy.deepcopy(config)).eval()
    twin.load_state_dict(torch.load(tmp_path / "state.bin", weights_only=True))
    with torch.no_grad():
        assert torch.equal(twin(**inputs)[0], first[0])
    from_state = type(model).from_pretrained(None, config=config, state_dict=model.state_dict())
    assert all(torch.equal(v, from_state.state_dict()[k]) for k, v in model.state_dict().items())


@every_class
def test_determinism(name: str, our_config: Any) -> None:
    model = make(name, our_config).eval()
    inputs = inputs_of(name)
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], model(**inputs)[0])


@every_class
def test_hidden_states_output(name: str, config: Any) -> None:
    rows = BATCH * CHOICES if name == "BertForMultipleChoice" else BATCH

    def check(outputs: Any) -> None:
        assert len(outputs.hidden_states) == LAYERS + 1
        assert all(states.shape == (rows, SEQLEN, HIDDEN) for states in outputs.hidden_states)

    inputs = inputs_of(name)
    check(make(name, config).eval()(**inputs, output_hidden_states=True))
    config.output_hidden_states = True
    check(make(name, config).eval()(**inputs))


@every_class
def test_attention_outputs(name: str, config: Any) -> None:
    inputs = inputs_of(name)
    cls = getattr(fastbert, name)
    model = cls._from_config(config, attn_implementation="eager").eval()
    assert model.config._attn_implementation == "eager"
    without = model(**inputs)
    outputs = model(**inputs, output_attentions=True)
    config.output_attentions = True
    for result in (outputs, cls(config).eval()(**inputs), model(**inputs, output_hidden_states=True)):
        assert len(result.attentions) == LAYERS
        assert all(a.shape[-3:] == (HEADS, SEQLEN, SEQLEN) for a in result.attentions)
    extra = 2 if name == "BertModel" else 1  # BertModel has cross_attentions, empty
    assert len(outputs) == len(without) + extra


@pytest.mark.parametrize("tied", [True, False])
@every_class
def test_resize_tokens_embeddings(name: str, tied: bool, config: Any) -> None:
    config.tie_word_embeddings = tied
    model = make(name, config).eval()
    inputs = inputs_of(name)
    words = model.get_input_embeddings()
    before = words.weight.clone()
    names = [n for n, _ in model.named_parameters()]
    for size, multiple, expected in [
        (VOCAB + 10, None, VOCAB + 10),
        (VOCAB - 15, None, VOCAB - 15),
        (None, 64, 128),
        (VOCAB + 13, 64, 128),
        (128, 64, 128),
    ]:
        resized = model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
        assert resized is model.get_input_embeddings()
        assert model.config.vocab_size == model.vocab_size == resized.num_embeddings == expected
        assert resized.weight.shape == (expected, HIDDEN)
        kept = min(expected, VOCAB - 15)
        assert torch.equal(resized.weight[:kept], before[:kept])
        if name in TIED:
            decoder = model.get_output_embeddings()
            assert decoder.weight.shape[0] == decoder.bias.shape[0] == decoder.out_features == expected
            assert model.cls.predictions.bias.shape == (expected,)
            assert (decoder.weight is resized.weight) is tied
        inputs["input_ids"] = inputs["input_ids"].clamp(max=expected - 1)
        with torch.no_grad():
            assert model(**inputs)[0].isfinite().all()
    assert [n for n, _ in model.named_parameters()] == names
    message = "multiple of `1.3`, which is not and integer. Please make sure to pass an integer"
    with pytest.raises(ValueError, match=re.escape(message)):
        model.resize_token_embeddings(VOCAB, pad_to_multiple_of=1.3)


@every_class
def test_model_get_set_embeddings(name: str, our_config: Any) -> None:
    model = make(name, our_config)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    new = nn.Embedding(10, 10)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    output = model.get_output_embeddings()
    assert isinstance(output, nn.Linear) if name in TIED else output is None


@every_class
def test_inputs_embeds_matches_input_ids(name: str, our_config: Any) -> None:
    model = make(name, our_config).eval()
    inputs = inputs_of(name)
    ids = inputs.pop("input_ids")
    with torch.no_grad():
        expected = model(input_ids=ids, **inputs)
        out = model(inputs_embeds=model.get_input_embeddings()(ids), **inputs)
    torch.testing.assert_close(out[0], expected[0], atol=1e-6, rtol=1e-6)


@every_class
def test_model_outputs_equivalence(name: str, our_config: Any) -> None:
    model = make(name, our_config).eval()
    for with_labels in (False, name in WITH_LOSS):
        for flags in ({}, {"output_hidden_states": True}, {"output_attentions": True}):
            inputs = {**inputs_of(name, with_labels), **flags}
            with torch.no_grad():
                as_tuple = model(**inputs, return_dict=False)
                as_dict = model(**inputs, return_dict=True)
            assert isinstance(as_tuple, tuple)
            assert len(as_tuple) == len(as_dict.to_tuple())
            for x, y in zip(as_tuple, as_dict.to_tuple(), strict=True):
                pairs = [(x, y)] if isinstance(x, torch.Tensor) else list(zip(x, y, strict=True))
                assert all(torch.equal(a, b) for a, b in pairs)
            assert as_dict[0] is as_dict.to_tuple()[0]


@every_class
def test_retain_grad_hidden_states_attentions(name: str, config: Any) -> None:
    config.output_hidden_states = config.output_attentions = True
    config._attn_implementation = "eager"
    outputs = make(name, config)(**inputs_of(name))
    hidden_states, attentions = outputs.hidden_states[0], outputs.attentions[0]
    hidden_states.retain_grad()
    attentions.retain_grad()
    outputs[0].flatten()[0].backward(retain_graph=True)
    assert hidden_states.grad is not None
    assert attentions.grad is not None


@pytest.mark.parametrize(
    "checkpointing",
    [None, {}, {"use_reentrant": False}, {"use_reentrant": True}],
    ids=["off", "on", "non_reentrant", "reentrant"],
)
@pytest.mark.parametrize("name", WITH_LOSS)
def test_training(name: str, checkpointing: dict[str, bool] | None, our_config: Any) -> None:
    our_config.hidden_dropout_prob = our_config.attention_probs_dropout_prob = 0.0
    model = make(name, our_config)
    inputs = inputs_of(name, with_labels=True)
    plain = torch.autograd.grad(model(**inputs).loss, list(model.parameters()))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing or None)
        assert model.is_gradient_checkpointing
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(**inputs).loss.backward()
    for (parameter_name, parameter), expected in zip(model.named_parameters(), plain, strict=True):
        assert torch.equal(parameter.grad, expected), parameter_name
    optimizer.step()
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_with_frozen_embeddings_trains_the_rest(our_config: Any, use_reentrant: bool) -> None:
    model = make("BertForMaskedLM", our_config)
    model.bert.embeddings.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model(**inputs_of("BertForMaskedLM", with_labels=True)).loss.backward()
    assert model.bert.encoder.layer[0].attention.self.query.weight.grad.any()


def test_enable_input_require_grads(our_config: Any) -> None:
    model = make("BertForMaskedLM", our_config)
    model.requires_grad_(False)
    ids = inputs_of("BertModel")["input_ids"]
    assert not model(ids).logits.requires_grad
    model.enable_input_require_grads()
    assert model(ids).logits.requires_grad
    model.disable_input_require_grads()
    assert not model(ids).logits.requires_grad


@every_class
def test_gradient_checkpointing_of_the_config(name: str, config: Any) -> None:
    config.gradient_checkpointing = True
    assert make(name, config).is_gradient_checkpointing


@every_class
def test_initialization(name: str, our_config: Any) -> None:
    our_config.initializer_range = 1e-10
    for parameter_name, parameter in make(name, our_config).named_parameters():
        assert parameter.requires_grad
        mean = ((parameter.data.mean() * 1e9).round() / 1e9).item()
        assert mean in (0.0, 1.0), parameter_name


@every_class
def test_missing_weights_are_initialised(name: str, our_config: Any) -> None:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = getattr(fastbert, name).from_pretrained(None, config=our_config, state_dict={})
    assert not any(parameter.is_meta for parameter in model.parameters())
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            assert not parameter.any()
        elif "LayerNorm" in parameter_name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert 0.01 < parameter.std() < 0.03
    assert not model.get_input_embeddings().weight[0].any()


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_keys(name: str, our_config: Any, tmp_path: Any) -> None:
    model = make(name, our_config)
    assert model._tied_weights_keys == getattr(transformers, name)._tied_weights_keys
    assert model.all_tied_weights_keys == model._tied_weights_keys
    groups: dict[int, list[str]] = {}
    for key, tensor in model.state_dict().items():
        groups.setdefault(tensor.data_ptr(), []).append(key)
    shared = {key for keys in groups.values() if len(keys) > 1 for key in keys}
    assert shared == {*model._tied_weights_keys, *model._tied_weights_keys.values()}
    our_config.tie_word_embeddings = False
    untied = make(name, our_config)
    assert untied.all_tied_weights_keys == {}
    untied.save_pretrained(tmp_path)
    loaded, info = type(untied).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert loaded.get_output_embeddings().weight is not loaded.get_input_embeddings().weight


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_stay_tied(name: str, our_config: Any, tmp_path: Any) -> None:
    model = make(name, our_config)
    model.save_pretrained(tmp_path)
    twin = make(name, our_config)
    twin.load_state_dict(model.state_dict(), assign=True)
    with torch.device("meta"):
        empty = make(name, our_config)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model).to(torch.float64),
        empty.to_empty(device="cpu"),
        twin,
        type(model).from_pretrained(tmp_path, dtype=torch.bfloat16),
    ):
        predictions = other.cls.predictions
        assert predictions.decoder.weight is other.get_input_embeddings().weight
        assert predictions.decoder.bias is predictions.bias
        assert other.num_parameters() == model.num_parameters()


@pytest.mark.parametrize("name", WITH_LOSS)
def test_correct_missing_keys(name: str, our_config: Any, tmp_path: Any) -> None:
    model = make(name, our_config)
    model.base_model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="newly initialised"):
        _, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    own = {key for key in model.state_dict() if not key.startswith("bert.")}
    assert info["missing_keys"] == own - {
        "cls.predictions.decoder.weight"
    }  # that one is tied to what is there


def test_problem_types(config: Any) -> None:
    for problem_type, num_labels, dtype in [
        ("multi_label_classification", 2, torch.float),
        ("single_label_classification", 1, torch.long),
        ("regression", 1, torch.float),
    ]:
        config.problem_type, config.num_labels = problem_type, num_labels
        model = make("BertForSequenceClassification", config)
        inputs = inputs_of("BertForSequenceClassification", with_labels=True)
        if num_labels > 1:
            inputs["labels"] = inputs["labels"].unsqueeze(1).repeat(1, num_labels)
        inputs["labels"] = inputs["labels"].to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a target of another size than the input is a warning of torch's
            model(**inputs).loss.backward()


def test_load_with_mismatched_shapes(our_config: Any, tmp_path: Any) -> None:
    make("BertForSequenceClassification", our_config).save_pretrained(tmp_path)
    cls = fastbert.BertForSequenceClassification
    with pytest.raises(RuntimeError, match="sizes differ"):
        cls.from_pretrained(tmp_path, num_labels=42)
    with pytest.raises(RuntimeError, match="sizes differ"):
        fastbert.BertModel.from_pretrained(tmp_path, vocab_size=10)
    with pytest.warns(UserWarning, match=r"other size.*classifier\.bias, classifier\.weight"):
        model = cls.from_pretrained(tmp_path, num_labels=42, ignore_mismatched_sizes=True)
    assert model(torch.ones(2, 3).long()).logits.shape == (2, 42)
    with pytest.warns(UserWarning, match="word_embeddings"):
        model = fastbert.BertModel.from_pretrained(tmp_path, vocab_size=10, ignore_mismatched_sizes=True)
    assert model(torch.ones(2, 3).long()).last_hidden_state.isfinite().all()


@every_class
def test_feed_forward_chunking_changes_nothing(name: str, our_config: Any) -> None:
    inputs = inputs_of(name)
    results = []
    for chunk in (0, 1):
        torch.manual_seed(0)
        our_config.chunk_size_feed_forward = chunk
        results.append(make(name, our_config).eval()(**inputs)[0])
    assert torch.equal(*results)


@every_class
def test_batching_equivalence(name: str, our_config: Any) -> None:
    model = make(name, our_config).eval()
    inputs = inputs_of(name)
    with torch.no_grad():
        together = model(**inputs)
        alone = model(**{key: value[2:3] for key, value in inputs.items()})
    for field in alone:
        torch.testing.assert_close(alone[field], together[field][2:3], atol=1e-6, rtol=1e-5)


@every_class
def test_dtypes_of_from_config(name: str, config: Any) -> None:
    model = getattr(fastbert, name)._from_config(config, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.dtype == torch.bfloat16
    assert model.eval()(**inputs_of(name))[0].dtype == torch.bfloat16
