"""What users of the model classes rely on besides numbers: arguments, outputs, refusals, tying, copies."""

import copy
import inspect
import pickle

import pytest
import torch
import transformers

import fastbert
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining, BertModel
from fastbert.outputs import BertForPreTrainingOutput
from tests.small_models import hf_config, small_config

CLASSES = [
    BertModel,
    BertForPreTraining,
    fastbert.BertForMaskedLM,
    fastbert.BertForNextSentencePrediction,
    fastbert.BertForSequenceClassification,
    fastbert.BertForTokenClassification,
    fastbert.BertForQuestionAnswering,
    fastbert.BertForMultipleChoice,
]
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


# unique parameters, parameter tensors, state_dict keys
@pytest.mark.parametrize(
    ("size", "cls", "theirs", "counts"),
    [
        ("base", BertModel, transformers.BertModel, (109_482_240, 199, 199)),
        ("base", BertForPreTraining, transformers.BertForPreTraining, (110_106_428, 206, 208)),
        ("large", BertModel, transformers.BertModel, (335_141_888, 391, 391)),
        ("large", BertForPreTraining, transformers.BertForPreTraining, (336_226_108, 398, 400)),
    ],
)
def test_keys_shapes_and_counts_are_hugging_faces(size, cls, theirs, counts):
    config = BertConfig.named(size)
    with torch.device("meta"):
        model = cls(config)
        expected = theirs(transformers.BertConfig(**config.to_diff_dict()))
    assert (model.num_parameters(), len(list(model.parameters())), len(model.state_dict())) == counts
    assert [(k, v.shape) for k, v in model.state_dict().items()] == [
        (k, v.shape) for k, v in expected.state_dict().items()
    ]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in expected.named_parameters()]
    if cls is BertModel:
        kinds = [(name, type(module).__name__) for name, module in model.named_modules()]
        their_kinds = [(name, type(module).__name__) for name, module in expected.named_modules()]
        left_out = ("act_fn",)  # transformers wraps activations in modules
        assert kinds == [pair for pair in their_kinds if not pair[0].endswith(left_out)]


@pytest.mark.parametrize("cls", [BertModel, BertForPreTraining])
def test_argument_names_and_order_are_transformers(cls):
    ours = list(inspect.signature(cls.forward).parameters)
    theirs = list(inspect.signature(getattr(transformers, cls.__name__).forward).parameters)
    assert ours == theirs


def test_outputs_are_dictionaries_tuples_and_attributes():
    out = BertForPreTraining(small_config()).eval()(IDS)
    assert isinstance(out, BertForPreTrainingOutput)
    assert list(out) == ["prediction_logits", "seq_relationship_logits"]
    assert len(out) == 2
    assert out.loss is None
    assert "loss" not in out
    assert out[0] is out["prediction_logits"] is out.prediction_logits
    assert out[:2] == out.to_tuple() == tuple(out.values())
    a, b = out
    assert (a, b) == ("prediction_logits", "seq_relationship_logits")
    with pytest.raises(KeyError):
        _ = out["loss"]
    twin = pickle.loads(pickle.dumps(out))
    assert torch.equal(twin.prediction_logits, out.prediction_logits)
    assert copy.copy(out).keys() == out.keys()


def test_return_dict_and_flags_come_from_the_config_too():
    model = BertModel(small_config()).eval()
    as_tuple = model(IDS, return_dict=False, output_hidden_states=True)
    assert isinstance(as_tuple, tuple)
    assert [type(x) for x in as_tuple] == [torch.Tensor, torch.Tensor, tuple]
    assert len(model(IDS, return_dict=False, output_attentions=True)) == 4
    assert len(BertModel(small_config(), add_pooling_layer=False)(IDS, return_dict=False)) == 1
    model = BertModel(small_config(return_dict=False, output_hidden_states=True))
    assert len(model(IDS)) == 3
    assert len(model(IDS, output_hidden_states=False)) == 2


@pytest.mark.parametrize("cls", CLASSES)
def test_decoder_features_are_refused_by_name(cls):
    for field in ("is_decoder", "add_cross_attention"):
        with pytest.raises(NotImplementedError, match=field):
            cls(small_config(**{field: True}))
    with pytest.raises(NotImplementedError, match="position_embedding_type='relative_key'"):
        cls(small_config(position_embedding_type="relative_key"))
    model = cls(small_config())
    ids = IDS[:, None] if cls is fastbert.BertForMultipleChoice else IDS
    for name in ("encoder_hidden_states", "encoder_attention_mask", "cache", "past_key_values", "head_mask"):
        with pytest.raises(NotImplementedError, match=name):
            model(ids, **{name: torch.ones(2, 3)})
        model(ids, **{name: None})
    model(ids, use_cache=True, num_items_in_batch=3, anything="else")
    with pytest.raises(NotImplementedError, match="get_position_embeddings"):
        model.get_position_embeddings()
    with pytest.raises(NotImplementedError, match="resize_position_embeddings"):
        model.resize_position_embeddings(7)


def test_bad_arguments_are_named():
    model = BertModel(small_config(max_position_embeddings=64)).eval()
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one"):
        model(IDS, inputs_embeds=torch.zeros(2, 3, 64))
    with pytest.raises(ValueError, match=r"\[batch, seqlen\], got shape \(3,\)"):
        model(IDS[0])
    with pytest.raises(ValueError, match="batch is empty"):
        model(IDS[:0])
    with pytest.raises(ValueError, match="65 is above max_position_embeddings = 64"):
        model(torch.ones(1, 65, dtype=torch.long))
    with pytest.raises(IndexError, match="holds 211, the table has vocab_size = 211"):
        model(torch.full((1, 3), 211))
    with pytest.raises(IndexError, match="token_type_ids holds 2"):
        model(IDS, token_type_ids=torch.full((2, 3), 2))
    assert torch.isfinite(model(IDS).last_hidden_state).all()  # and the process goes on
    with pytest.raises(ValueError, match=r"hidden size \(64\) .* attention heads \(5\)"):
        BertModel(small_config(num_attention_heads=5))
    with pytest.raises(ValueError, match="hidden_act 'gelo'"):
        BertModel(small_config(hidden_act="gelo"))
    with pytest.raises(TypeError, match="dict"):
        BertModel(small_config().to_dict())
    with pytest.raises(ValueError, match="flashy"):
        model.set_attn_implementation("flashy")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3), "1 axes"),
        (torch.ones(2, 4), r"\(2, 4\), the input is \(2, 3\)"),
        (torch.ones(1, 3), r"\(1, 3\)"),
        (torch.ones(2, 1, 3), r"three axes must be \(2, 3, 3\)"),
        (torch.ones(2, 1, 3, 3, dtype=torch.long), "integers could mean either"),
        (torch.ones(2, 5, 3, 3), r"broadcast to \(2, 4, 3, 3\)"),
    ],
)
def test_bad_masks_are_named(mask, message):
    with pytest.raises(ValueError, match=message):
        BertModel(small_config())(IDS, mask)


def is_tied(model):
    predictions = model.cls.predictions
    words = model.bert.embeddings.word_embeddings
    return predictions.decoder.weight is words.weight and predictions.decoder.bias is predictions.bias


def test_tying_survives_copies_moves_and_loads():
    model = BertForPreTraining(small_config())
    assert is_tied(model)
    assert is_tied(copy.deepcopy(model))
    assert is_tied(pickle.loads(pickle.dumps(model)))
    assert is_tied(copy.deepcopy(model).to(torch.float64))
    assert is_tied(copy.deepcopy(model).half())
    assert is_tied(copy.deepcopy(model).to("meta"))
    with torch.device("meta"):
        empty = BertForPreTraining(small_config())
    assert is_tied(empty.to_empty(device="cpu"))
    assert is_tied(copy.deepcopy(model).share_memory())
    twin = BertForPreTraining(small_config())
    twin.load_state_dict(model.state_dict(), assign=True)
    assert is_tied(twin)
    assert torch.equal(twin.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_embeddings_can_be_replaced_and_tied_again():
    model = BertForPreTraining(small_config())
    assert model.get_output_embeddings() is model.cls.predictions.decoder
    table = torch.nn.Embedding(211, 64, padding_idx=0)
    model.set_input_embeddings(table)
    assert model.bert.get_input_embeddings() is table
    assert not is_tied(model)
    assert not is_tied(model.to(torch.float64))
    model.tie_weights()
    assert is_tied(model)
    untied = BertForPreTraining(small_config(tie_word_embeddings=False))
    assert not is_tied(untied)
    assert len(list(untied.parameters())) == len(list(model.parameters())) + 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("size", "multiple", "expected"), [(230, None, 230), (99, 64, 128), (7, None, 7)])
def test_resizing_matches_transformers(tied, size, multiple, expected):
    theirs = transformers.BertForPreTraining(hf_config(tie_word_embeddings=tied)).eval()
    ours = BertForPreTraining(small_config(tie_word_embeddings=tied)).eval()
    ours.load_state_dict(theirs.state_dict())
    words = ours.get_input_embeddings()
    assert ours.resize_token_embeddings() is words
    assert ours.resize_token_embeddings(size, pad_to_multiple_of=multiple) is words
    theirs.resize_token_embeddings(size, pad_to_multiple_of=multiple)
    assert (ours.config.vocab_size, ours.vocab_size, words.num_embeddings) == (expected,) * 3
    assert is_tied(ours) is tied
    x, y = ours(IDS % 7).prediction_logits, theirs(IDS % 7).prediction_logits
    assert x.shape == y.shape == (2, 3, expected)
    torch.testing.assert_close(x, y, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"multiple of `1\.5`, which is not"):
        ours.resize_token_embeddings(8, pad_to_multiple_of=1.5)


def test_resizing_with_fresh_rows():
    model = BertForPreTraining(small_config(pad_token_id=210))
    model.resize_token_embeddings(1000, mean_resizing=False)
    table = model.get_input_embeddings()
    assert abs(table.weight[211:].std().item() - 0.02) < 1e-3
    assert not model.cls.predictions.bias.any()
    assert table.padding_idx == 210
    model.resize_token_embeddings(100)
    assert table.padding_idx is None


def test_small_questions():
    config = small_config()
    model = BertForPreTraining(config)
    assert model.config is config
    assert model.base_model is model.bert
    assert model.bert.base_model is model.bert
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.bfloat16().dtype == torch.bfloat16
    tables = (211 + 64 + 2) * 64
    assert model.num_parameters() - model.num_parameters(exclude_embeddings=True) == tables
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    assert model.num_parameters() - model.num_parameters(only_trainable=True) == 211 * 64
    assert BertForPreTraining.accepts_loss_kwargs is False
    assert model.can_generate() is False
    assert (model.main_input_name, model.base_model_prefix) == ("input_ids", "bert")
    assert model.get_memory_footprint() == 2 * model.num_parameters()


def test_gradient_checkpointing_switches():
    model = BertForPreTraining(small_config(gradient_checkpointing=True))
    assert model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing
    inside = BertForPreTraining(small_config())
    inside.bert.gradient_checkpointing_enable()
    assert inside.is_gradient_checkpointing


def test_state_dicts_go_both_ways_and_old_buffers_are_accepted():
    theirs = transformers.BertForPreTraining(hf_config())
    ours = BertForPreTraining(small_config())
    theirs.load_state_dict(ours.state_dict())
    state = theirs.state_dict()
    ours.load_state_dict({**state, "bert.embeddings.position_ids": torch.arange(64)[None]})
    assert all(torch.equal(v, state[k]) for k, v in ours.state_dict().items())
    with pytest.raises(RuntimeError, match="unknown_key"):
        ours.load_state_dict({**state, "unknown_key": torch.zeros(1)})


def test_hooks_on_layers_and_embeddings_run():
    model = BertModel(small_config()).eval()
    seen = []
    model.encoder.layer[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    model.embeddings.word_embeddings.register_forward_hook(lambda module, inputs, output: output + 1)
    out = model(IDS)
    assert torch.equal(seen[0].view_as(out.last_hidden_state), out.last_hidden_state)
    plain = BertModel(small_config()).eval()
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(IDS).last_hidden_state, out.last_hidden_state)
