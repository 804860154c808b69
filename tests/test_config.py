"""BertConfig against transformers' own, field by field and file by file."""

import copy
import json
import pickle

import pytest
import torch
import transformers

from fastbert.config import SIZES, BertConfig


def test_defaults_and_json_equal_transformers():
    theirs = json.loads(transformers.BertConfig().to_json_string())
    theirs.pop("transformers_version")
    assert json.loads(BertConfig().to_json_string()) == theirs
    theirs = transformers.BertConfig().to_dict()
    ours = BertConfig().to_dict()
    for name in ("transformers_version", "_name_or_path"):
        theirs.pop(name)
    ours.pop("gradient_checkpointing")
    ours.pop("position_embedding_type")
    assert ours == theirs


@pytest.mark.parametrize(
    "fields",
    [
        {"num_labels": 3, "foo": [1, 2], "hidden_size": 64},
        {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}},
        {"hidden_dropout_prob": 0, "pad_token_id": None, "dtype": "bfloat16", "max_length": 7},
        {"output_hidden_states": True, "return_dict": False, "problem_type": "regression", "num_labels": 1},
        {"chunk_size_feed_forward": 4, "architectures": ["BertModel"], "tie_word_embeddings": False},
    ],
    ids=["unknown-key", "labels", "dtype", "flags", "common"],
)
def test_written_json_equals_transformers_and_each_reads_the_other(fields, tmp_path):
    ours, theirs = BertConfig(**fields), transformers.BertConfig(**fields)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    written = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    written[1].pop("transformers_version")
    assert written[0] == written[1]
    assert BertConfig.from_pretrained(tmp_path / "ours") == ours
    from_theirs = BertConfig.from_pretrained(tmp_path / "theirs")
    del from_theirs.transformers_version
    assert from_theirs == ours
    read = transformers.BertConfig.from_pretrained(tmp_path / "ours")
    assert read.hidden_size == theirs.hidden_size
    assert read.id2label == theirs.id2label
    assert read.dtype == theirs.dtype


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "768"),
        ("hidden_size", 768.0),
        ("layer_norm_eps", 1),
        ("initializer_range", 0),
        ("num_hidden_layers", True),
        ("use_cache", 1),
        ("hidden_act", 3),
        ("dtype", "float33"),
        ("attn_implementation", "flashy"),
    ],
)
def test_wrong_types_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        BertConfig(**{field: value})


def test_types_are_checked_on_assignment_and_arguments_are_keywords():
    config = BertConfig()
    with pytest.raises(ValueError, match="vocab_size must be int, got str '9'"):
        config.vocab_size = "9"
    with pytest.raises(ValueError, match="keyword"):
        BertConfig(30522)
    with pytest.raises(AttributeError, match="no_such"):
        _ = config.no_such


def test_values_are_not_range_checked():
    config = BertConfig(vocab_size=0, hidden_dropout_prob=1.5, problem_type="foo", num_attention_heads=5)
    assert config.hidden_dropout_prob == 1.5


def test_num_labels_and_maps_follow_each_other():
    config = BertConfig()
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
    config.num_labels = 3
    assert config.label2id == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
    with pytest.warns(UserWarning, match="num_labels=7"):
        config = BertConfig(id2label={"0": "a", "1": "b", "2": "c"}, num_labels=7)
    assert config.num_labels == 7
    assert config.id2label[6] == "LABEL_6"
    assert BertConfig(id2label={"0": "a", "1": "b"}).id2label == {0: "a", 1: "b"}
    with pytest.raises(ValueError, match="single_label_classification"):
        BertConfig(num_labels=1, problem_type="single_label_classification")


def test_from_pretrained_overrides_and_unused(tmp_path):
    BertConfig(hidden_size=64, foo=1).save_pretrained(tmp_path)
    config, unused = BertConfig.from_pretrained(
        tmp_path, hidden_size=128, foo=2, num_labels=5, bar=3, return_unused_kwargs=True
    )
    assert (config.hidden_size, config.foo, config.num_labels, unused) == (128, 2, 5, {"bar": 3})
    assert BertConfig.from_pretrained(tmp_path / "config.json").hidden_size == 64
    assert BertConfig.from_pretrained(tmp_path.parent, subfolder=tmp_path.name).foo == 1
    with pytest.raises(OSError, match="does not exist"):
        BertConfig.from_pretrained(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"no file named config.json, or bert_config.json, found"):
        BertConfig.from_pretrained(tmp_path / "empty")


def test_old_files_load(tmp_path):
    google = {
        "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 512,
        "max_position_embeddings": 512, "num_attention_heads": 2, "num_hidden_layers": 2,
        "type_vocab_size": 2, "vocab_size": 30522,
    }  # fmt: skip
    (tmp_path / "bert_config.json").write_text(json.dumps(google))
    assert BertConfig.from_pretrained(tmp_path) == BertConfig(**google)
    old = {"torch_dtype": "float16", "position_embedding_type": "absolute", "gradient_checkpointing": False}
    (tmp_path / "config.json").write_text(json.dumps({**google, **old, "transformers_version": "4.8.2"}))
    config = BertConfig.from_pretrained(tmp_path)
    assert (config.dtype, config.pad_token_id) == (torch.float16, 0)


def test_named_sizes():
    base = BertConfig.named("base")
    assert base == BertConfig()
    mini = BertConfig.named("mini", vocab_size=8192)
    assert (mini.num_hidden_layers, mini.hidden_size, mini.num_attention_heads) == (4, 256, 4)
    assert (mini.intermediate_size, mini.vocab_size) == (1024, 8192)
    assert set(SIZES) == {"tiny", "mini", "small", "medium", "base", "large"}
    with pytest.raises(ValueError, match="size 'huge' is not one of tiny, mini"):
        BertConfig.named("huge")


def test_copies_are_equal_and_independent():
    config = BertConfig(foo=[1], attn_implementation="eager")
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        twin.foo.append(2)
        assert config.foo == [1]
    assert "attn_implementation" not in config.to_json_string()
