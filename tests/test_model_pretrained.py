"""Files: what we write transformers reads, what it writes we read, and what does not fit is named."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining, BertModel
from tests.packed_batches import dense_labels, make_batches
from tests.small_models import hf_config, small_config, spread_weights

ATOL = 2e-5


@pytest.fixture
def saved(tmp_path):
    """(our model, the folder it was saved in)."""
    model = BertForPreTraining(small_config()).eval()
    spread_weights(model)
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def loss_of(model):
    _, padded = make_batches([9, 5, 7], vocab_size=211)
    with torch.no_grad():
        return model(
            padded.input_ids,
            padded.attention_mask.long(),
            padded.token_type_ids,
            labels=dense_labels(padded),
            next_sentence_label=padded.next_sentence_labels,
        ).loss


def test_transformers_reads_ours_and_gives_our_loss(saved):
    model, folder = saved
    theirs, info = transformers.BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(loss_of(theirs), loss_of(model), atol=ATOL, rtol=0)
    assert theirs.config.architectures == ["BertForPreTraining"]


def test_we_read_transformers_and_give_its_loss(tmp_path):
    theirs = transformers.BertForPreTraining(hf_config()).eval()
    spread_weights(theirs)
    theirs.save_pretrained(tmp_path)
    ours, info = BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert not ours.training
    torch.testing.assert_close(loss_of(ours), loss_of(theirs), atol=ATOL, rtol=0)
    assert ours.cls.predictions.decoder.weight is ours.bert.embeddings.word_embeddings.weight


def test_the_written_files_are_those_of_transformers(saved, tmp_path):
    model, folder = saved
    theirs = transformers.BertForPreTraining(hf_config())
    theirs.load_state_dict(model.state_dict())
    theirs.save_pretrained(tmp_path / "theirs")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    ours_, theirs_ = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "theirs"))
    assert ours_.keys() == theirs_.keys()
    assert not any("decoder" in key for key in ours_)
    assert all(torch.equal(ours_[key], theirs_[key]) for key in ours_)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "theirs")]
    configs[1].pop("transformers_version")
    assert configs[0] == configs[1]
    assert model.config.architectures is None  # saving changes nothing in the model


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    model, folder = saved
    before = (folder / "model.safetensors").read_bytes()

    def fail(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("fastbert.weights.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        model.save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_prefix_is_stripped_and_added(saved, tmp_path):
    model, folder = saved
    bare, info = BertModel.from_pretrained(folder, output_loading_info=True)
    assert {key.split(".")[0] for key in info["unexpected_keys"]} == {"cls"}
    assert len(info["unexpected_keys"]) == 7
    assert all(torch.equal(v, model.bert.state_dict()[k]) for k, v in bare.state_dict().items())
    bare.save_pretrained(tmp_path / "bare")
    with pytest.warns(UserWarning, match=r"newly initialised.*cls\.predictions\.bias"):
        headed, info = BertForPreTraining.from_pretrained(tmp_path / "bare", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert {key.split(".")[0] for key in info["missing_keys"]} == {"cls"}
    assert all(torch.equal(v, headed.bert.state_dict()[k]) for k, v in bare.state_dict().items())


def test_a_lost_pooler_is_reported_and_a_kept_one_is_bit_equal(saved, tmp_path):
    model, folder = saved
    transformers.BertForMaskedLM.from_pretrained(folder).save_pretrained(tmp_path / "mlm")
    with pytest.warns(UserWarning, match=r"pooler\.dense\.bias, pooler\.dense\.weight"):
        _, info = BertModel.from_pretrained(tmp_path / "mlm", output_loading_info=True)
    assert info["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}
    kept = BertModel.from_pretrained(folder)
    assert torch.equal(kept.pooler.dense.weight, model.bert.pooler.dense.weight)
    no_pooler, info = BertModel.from_pretrained(
        tmp_path / "mlm", add_pooling_layer=False, output_loading_info=True
    )
    assert no_pooler.pooler is None
    assert not info["missing_keys"]


def test_old_spellings_and_torch_files(saved, tmp_path):
    model, folder = saved
    state = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in model.state_dict().items()
    }
    state["bert.embeddings.position_ids"] = torch.arange(64)[None]
    model.config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin", folder / "model.safetensors"):
        ours, info = BertForPreTraining.from_pretrained(path, output_loading_info=True)
        assert not any(info.values())
        assert torch.equal(loss_of(ours), loss_of(model))


def test_shards_of_transformers(tmp_path):
    theirs = transformers.BertForPreTraining(hf_config()).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    ours, info = BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(loss_of(ours), loss_of(theirs), atol=ATOL, rtol=0)
    shards[0].unlink()
    with pytest.raises(OSError, match=shards[0].name):
        BertForPreTraining.from_pretrained(tmp_path)
    # one whole file replaces the shards
    ours.save_pretrained(tmp_path)
    assert BertForPreTraining.from_pretrained(tmp_path)


@pytest.mark.parametrize("left_out", ["both", "decoder", "words", "bias"])
def test_tied_variants_on_disk(saved, left_out):
    model, folder = saved
    state = {k: v.clone() for k, v in model.state_dict().items()}
    gone = {
        "both": [],
        "decoder": ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
        "words": ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.bias"],
        "bias": ["cls.predictions.bias", "cls.predictions.decoder.weight"],
    }[left_out]
    for key in gone:
        del state[key]
    save_file(state, folder / "model.safetensors")
    ours, info = BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert ours.cls.predictions.decoder.weight is ours.bert.embeddings.word_embeddings.weight
    assert ours.cls.predictions.decoder.bias is ours.cls.predictions.bias
    assert torch.equal(loss_of(ours), loss_of(model))


def test_two_different_halves_stay_untied_with_a_warning(saved):
    model, folder = saved
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state["cls.predictions.decoder.weight"] += 1
    save_file(state, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="differ in the file"):
        ours = BertForPreTraining.from_pretrained(folder)
    assert torch.equal(ours.cls.predictions.decoder.weight, state["cls.predictions.decoder.weight"])
    assert torch.equal(ours.bert.embeddings.word_embeddings.weight, model.get_input_embeddings().weight)
    ours.save_pretrained(folder)
    again = BertForPreTraining.from_pretrained(folder)
    assert torch.equal(again.cls.predictions.decoder.weight, state["cls.predictions.decoder.weight"])


def test_mismatched_sizes(saved):
    model, folder = saved
    with pytest.raises(RuntimeError, match=r"word_embeddings.weight is \(211, 64\) .* \(90, 64\)"):
        BertForPreTraining.from_pretrained(folder, vocab_size=90)
    with pytest.warns(UserWarning, match="of other size"):
        ours, info = BertForPreTraining.from_pretrained(
            folder, vocab_size=90, ignore_mismatched_sizes=True, output_loading_info=True
        )
    assert ("bert.embeddings.word_embeddings.weight", (211, 64), (90, 64)) in info["mismatched_keys"]
    assert ours.get_input_embeddings().weight.shape == (90, 64)
    assert torch.equal(ours.bert.pooler.dense.weight, model.bert.pooler.dense.weight)


def test_dtype_and_device(saved):
    model, folder = saved
    assert BertForPreTraining.from_pretrained(folder).dtype == torch.float32
    assert BertForPreTraining.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert BertForPreTraining.from_pretrained(folder, torch_dtype="float16").dtype == torch.float16
    assert BertForPreTraining.from_pretrained(folder, device="meta").device.type == "meta"
    model.half().save_pretrained(folder)
    assert BertForPreTraining.from_pretrained(folder).dtype == torch.float16
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert BertForPreTraining.from_pretrained(folder, dtype="float32").dtype == torch.float32


def test_arguments_of_from_pretrained(saved):
    model, folder = saved
    ours = BertForPreTraining.from_pretrained(
        folder, hidden_dropout_prob=0.3, attn_implementation="eager", output_hidden_states=True
    )
    assert ours.config.hidden_dropout_prob == 0.3
    assert ours.bert.encoder.layer[0].output.dropout.p == 0.3
    assert ours.config._attn_implementation == "eager"
    assert ours(torch.ones(1, 3, dtype=torch.long)).hidden_states is not None
    with pytest.raises(TypeError, match="'no_such_thing'"):
        BertForPreTraining.from_pretrained(folder, no_such_thing=1)
    config = BertConfig.from_pretrained(folder)
    given = BertForPreTraining.from_pretrained(folder, config=config, hidden_act="relu")
    assert given.config.hidden_act == "relu"
    assert config.hidden_act == "gelu"
    from_state = BertForPreTraining.from_pretrained(None, config=config, state_dict=model.state_dict())
    assert torch.equal(loss_of(from_state), loss_of(model))


def test_files_that_are_not_there_or_broken(saved, tmp_path):
    model, folder = saved
    with pytest.raises(OSError, match=r"no_such does not exist: give a local model folder"):
        BertForPreTraining.from_pretrained(tmp_path / "no_such")
    model.config.save_pretrained(tmp_path / "empty")
    with pytest.raises(OSError, match=r"no file named model.safetensors, or pytorch_model.bin, found in"):
        BertForPreTraining.from_pretrained(tmp_path / "empty")
    state = {k: v for k, v in model.state_dict().items() if "layer.1.output" not in k}
    torch.save(state, tmp_path / "empty" / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"lacks encoder weights: bert.encoder.layer.1.output"):
        BertForPreTraining.from_pretrained(tmp_path / "empty")
    for file in (folder / "model.safetensors", tmp_path / "empty" / "pytorch_model.bin"):
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(OSError, match="is truncated"):
            BertForPreTraining.from_pretrained(file.parent)
