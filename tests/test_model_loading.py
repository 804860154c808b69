"""Where weights come from and what loading costs: hub, shards, memory, damaged and foreign files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

import fastbert
from fastbert import weights
from tests.small_models import hf_config, small_config, spread_weights

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model() -> fastbert.BertForPreTraining:
    model = fastbert.BertForPreTraining(small_config()).eval()
    spread_weights(model)
    return model


def assert_same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


# ---- hub


@pytest.fixture
def hub_cache(tmp_path: Path, model: fastbert.BertForPreTraining) -> Path:
    """huggingface_hub's cache as it is after somebody/tiny-bert was fetched once."""
    repo = tmp_path / "cache" / "models--somebody--tiny-bert"
    snapshot = repo / "snapshots" / COMMIT
    model.save_pretrained(snapshot, max_shard_size="100KB")
    model.save_pretrained(snapshot / "inner")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return tmp_path / "cache"


def test_a_hub_id_is_read_from_the_cache(hub_cache: Path, model: fastbert.BertForPreTraining) -> None:
    where: dict[str, Any] = {"cache_dir": hub_cache, "local_files_only": True}
    ours, info = fastbert.BertForPreTraining.from_pretrained(
        "somebody/tiny-bert", output_loading_info=True, **where
    )
    assert not any(info.values())
    assert_same_weights(ours, model)
    inner = fastbert.BertForMaskedLM.from_pretrained("somebody/tiny-bert", subfolder="inner", **where)
    assert torch.equal(inner.cls.predictions.bias, model.cls.predictions.bias)
    fastbert.BertModel.from_pretrained("somebody/tiny-bert", revision=COMMIT, **where)
    config = fastbert.BertConfig.from_pretrained("somebody/tiny-bert", hidden_act="relu", **where)
    assert (config.hidden_size, config.hidden_act) == (64, "relu")
    with pytest.raises(OSError, match=r"somebody/tiny-bert .* holds no config.json"):
        fastbert.BertModel.from_pretrained("somebody/tiny-bert", revision="another", **where)


def test_offline_mode(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # what the environment sets
    fastbert.BertModel.from_pretrained("somebody/tiny-bert", cache_dir=hub_cache)
    with pytest.raises(OSError, match=r"somebody/other is no local folder, the hub cannot be reached"):
        fastbert.BertModel.from_pretrained("somebody/other", cache_dir=hub_cache)


def test_options_go_to_the_hub_and_the_commit_is_kept(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_cache / "models--somebody--tiny-bert" / "snapshots" / COMMIT
    calls = []

    def download(repo_id: str, filename: str, **options: Any) -> str:
        calls.append((repo_id, filename, options))
        path = snapshot / (options["subfolder"] or "") / filename
        if not path.is_file():
            raise errors.LocalEntryNotFoundError(filename)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    given = {"cache_dir": "c", "force_download": True, "local_files_only": False, "token": "t"}
    fastbert.BertModel.from_pretrained("somebody/tiny-bert", revision="v1", **given)
    files = [filename for _, filename, _ in calls]
    assert files[:3] == ["config.json", "model.safetensors", "model.safetensors.index.json"]
    assert all(name.startswith("model-0") for name in files[3:])
    assert len(files) > 4
    assert calls[0] == ("somebody/tiny-bert", "config.json", {**given, "revision": "v1", "subfolder": None})
    assert all(options["revision"] == COMMIT for _, _, options in calls[1:])
    # what was not in the cache could not be fetched: nothing waits for the network again
    assert [options["local_files_only"] for _, _, options in calls[:3]] == [False, False, True]


@pytest.mark.parametrize(
    "error",
    [
        errors.HFValidationError("Repo id must be in the form"),
        OSError("connection refused"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_oserror(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(OSError, match="nobody/nothing is neither a local folder nor a model") as caught:
        fastbert.BertModel.from_pretrained("nobody/nothing")
    assert str(error) in str(caught.value)


def test_a_repository_without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_config().save_pretrained(tmp_path)

    def download(repo_id: str, filename: str, **_options: Any) -> str:
        if filename != "config.json":
            raise errors.EntryNotFoundError(filename)
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(OSError, match=r"hub model some/bert has no file named model.safetensors, or"):
        fastbert.BertModel.from_pretrained("some/bert")


def test_a_path_is_no_hub_id(tmp_path: Path) -> None:
    for name in (tmp_path / "gone", str(tmp_path / "gone"), "./gone", "a/b/c"):
        with pytest.raises(OSError, match=r"(gone|a/b/c) does not exist"):
            fastbert.BertModel.from_pretrained(name)
    with pytest.raises(OSError, match="nowhere does not exist"):
        fastbert.BertModel.from_pretrained(tmp_path, subfolder="nowhere")


# ---- shards


@pytest.mark.parametrize("safe", [True, False])
def test_shards_written_and_read_by_both(
    safe: bool, model: fastbert.BertForPreTraining, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path, max_shard_size="60KB", safe_serialization=safe)
    names = sorted(path.name for path in tmp_path.iterdir())
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    shards = [name for name in names if name.startswith(f"{stem}-")]
    assert names == sorted(["config.json", f"{stem}.{suffix}.index.json", *shards])
    assert shards[0] == f"{stem}-00001-of-{len(shards):05d}.{suffix}"
    index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())
    assert index["metadata"] == {
        "total_parameters": model.num_parameters(),
        "total_size": 4 * model.num_parameters(),
    }
    assert set(index["weight_map"].values()) == set(shards)
    ours, info = fastbert.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert_same_weights(ours, model)
    theirs, info = transformers.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert_same_weights(theirs, model)
    if safe:
        sizes = [sum(t.nbytes for t in load_file(tmp_path / name).values()) for name in shards]
        assert all(size <= 60_000 for size in sizes)


def test_stale_files_are_removed(model: fastbert.BertForPreTraining, tmp_path: Path) -> None:
    def weight_files() -> list[str]:
        return sorted(
            path.name for path in tmp_path.iterdir() if path.name not in ("config.json", "notes.txt")
        )

    (tmp_path / "notes.txt").write_text("mine")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    many = weight_files()
    model.save_pretrained(tmp_path, max_shard_size="150KB")
    fewer = weight_files()
    assert len(fewer) < len(many)
    assert set(many) & set(fewer) == {"model.safetensors.index.json"}
    model.save_pretrained(tmp_path)
    assert weight_files() == ["model.safetensors"]
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert weight_files() == many
    model.save_pretrained(tmp_path, safe_serialization=False)
    assert weight_files() == ["pytorch_model.bin"]
    assert_same_weights(fastbert.BertForPreTraining.from_pretrained(tmp_path), model)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_only_the_main_process_writes(model: fastbert.BertForPreTraining, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()


def test_sizes() -> None:
    texts = {"5GB": 5 * 10**9, "5GiB": 5 * 2**30, "200 mb": 2 * 10**8, "1.5KB": 1500, "12B": 12}
    assert {text: weights.parse_size(text) for text in texts} == texts
    assert weights.parse_size(77) == 77
    with pytest.raises(ValueError, match="'many' is no size"):
        weights.parse_size("many")


def test_use_safetensors_chooses(model: fastbert.BertForPreTraining, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    state = {**model.state_dict(), "bert.pooler.dense.bias": torch.full((64,), 5.0)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    for choice, expected in ((None, False), (True, False), (False, True)):
        ours = fastbert.BertForPreTraining.from_pretrained(tmp_path, use_safetensors=choice)
        assert bool((ours.bert.pooler.dense.bias == 5).all()) is expected
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors, found in"):
        fastbert.BertForPreTraining.from_pretrained(tmp_path, use_safetensors=True)


# ---- what loading makes


MEMORY = """
import sys, torch, fastbert

def resident(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

for small, big in (sys.argv[1:3], sys.argv[3:5]):
    fastbert.BertModel.from_pretrained(small)  # pages in what the library needs itself
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
    before = resident("VmRSS")
    model = fastbert.BertForMaskedLM.from_pretrained(big)
    print((resident("VmHWM") - before) / model.get_memory_footprint())
    del model
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak counter")
def test_no_weight_is_held_twice(tmp_path: Path) -> None:
    config = small_config(hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=20_000)
    big, small = fastbert.BertForMaskedLM(config), fastbert.BertModel(small_config())
    folders = [tmp_path / f"{size}-{kind}" for kind in ("safetensors", "bin") for size in ("small", "big")]
    for folder in folders:
        saved = small if "small" in folder.name else big
        saved.save_pretrained(folder, safe_serialization="safetensors" in folder.name)
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY, *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ratios = [float(line) for line in done.stdout.split()]
    assert len(ratios) == 2
    assert 0.9 < ratios[0] < 1.2  # freed memory may serve the second model
    assert ratios[1] < 1.2


def test_the_model_outlives_its_file(model: fastbert.BertForPreTraining, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    ours = fastbert.BertForPreTraining.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")  # in place: a mapped file would be gone now
    assert_same_weights(ours, model)
    with torch.no_grad():
        ours.bert.pooler.dense.bias.zero_()


def test_tensors_of_the_caller_are_copied(model: fastbert.BertForPreTraining) -> None:
    state = model.state_dict()
    ours = fastbert.BertForPreTraining.from_pretrained(None, config=small_config(), state_dict=state)
    with torch.no_grad():
        ours.bert.pooler.dense.bias.fill_(9.0)
    assert not (model.bert.pooler.dense.bias == 9).any()


def test_device_dtype_and_default_device(model: fastbert.BertForPreTraining, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    ours = fastbert.BertForPreTraining.from_pretrained(tmp_path, dtype=torch.float16, device="cpu")
    assert {p.dtype for p in ours.parameters()} == {torch.float16}
    assert ours.config.dtype == torch.float16
    assert torch.equal(ours.bert.pooler.dense.weight, model.bert.pooler.dense.weight.half())
    assert ours.cls.predictions.decoder.weight is ours.get_input_embeddings().weight
    with torch.device("meta"):
        assert fastbert.BertForPreTraining.from_pretrained(tmp_path).device.type == "meta"
    with pytest.raises(ValueError, match="'float31' is no floating-point dtype"):
        fastbert.BertForPreTraining.from_pretrained(tmp_path, dtype="float31")


class Ranker(fastbert.BertModel):
    """A class of a user, with a buffer and a parameter that no file has."""

    def __init__(self, config: fastbert.BertConfig, factor: float = 2.0) -> None:
        super().__init__(config)
        self.register_buffer("weights_of_classes", torch.tensor([1.0, 3.0]), persistent=False)
        self.scale = torch.nn.Parameter(torch.tensor([factor]))


def test_subclasses_keep_what_they_make_themselves(
    model: fastbert.BertForPreTraining, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"newly initialised.*scale"):
        ours, info = Ranker.from_pretrained(tmp_path, 7.0, output_loading_info=True)
    with pytest.warns(UserWarning, match=r"newly initialised.*scale"):
        by_name = Ranker.from_pretrained(tmp_path, factor=5.0)
    assert by_name.scale.tolist() == [5.0]
    assert ours.scale.tolist() == [7.0]
    assert ours.weights_of_classes.tolist() == [1.0, 3.0]
    assert info["missing_keys"] == {"scale"}
    assert torch.equal(ours.pooler.dense.weight, model.bert.pooler.dense.weight)


def test_shared_tensors_of_a_pickle_do_not_tie_an_untied_model(tmp_path: Path) -> None:
    model = fastbert.BertForPreTraining(small_config())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # decoder and words are one tensor in it
    small_config(tie_word_embeddings=False).save_pretrained(tmp_path)
    ours = fastbert.BertForPreTraining.from_pretrained(tmp_path)
    decoder, words = ours.get_output_embeddings().weight, ours.get_input_embeddings().weight
    assert decoder.data_ptr() != words.data_ptr()
    assert torch.equal(decoder, words)


def test_arguments_without_effect_are_taken(model: fastbert.BertForPreTraining, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    fastbert.BertModel.from_pretrained(tmp_path, low_cpu_mem_usage=True, trust_remote_code=False)
    with pytest.raises(TypeError, match="'device_map'"):
        fastbert.BertModel.from_pretrained(tmp_path, device_map="auto")


# ---- files that are not what they should be


def write_raw_safetensors(path: Path, dtype: str) -> None:
    header = json.dumps({"x": {"dtype": dtype, "shape": [1], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", "is truncated or no safetensors file"),
        ("model.safetensors", b"not weights at all", "is truncated or no safetensors file"),
        ("pytorch_model.bin", b"", "is truncated or no torch weights file"),
        ("pytorch_model.bin", b"not weights at all", "is truncated or no torch weights file"),
        ("model.safetensors.index.json", b"{", "is no index of shards"),
        ("model.safetensors.index.json", b"[]", "is no index of shards"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"x": "gone.safetensors"}}',
            "names the shard gone",
        ),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"x": "../model.safetensors"}}',
            r"names the shard \.\./model\.safetensors, which is not in",
        ),
        ("bert_model.ckpt.index", b"", "is damaged or no TensorFlow checkpoint"),
    ],
)
def test_damaged_files_are_one_sentence(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    small_config().save_pretrained(tmp_path)
    fastbert.BertModel(small_config()).save_pretrained(tmp_path.parent)  # whole, but beside the folder
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OSError, match=message) as caught:
        fastbert.BertModel.from_pretrained(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_cut_at_any_place(model: fastbert.BertForPreTraining, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "safe")
    model.save_pretrained(tmp_path / "torch", safe_serialization=False)
    for file in (tmp_path / "safe" / "model.safetensors", tmp_path / "torch" / "pytorch_model.bin"):
        content = file.read_bytes()
        for size in (7, 100, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            with pytest.raises(OSError, match="is truncated"):
                fastbert.BertForPreTraining.from_pretrained(file.parent)


def test_pickles_that_hold_more_than_tensors(tmp_path: Path) -> None:
    small_config().save_pretrained(tmp_path)
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="holds a list, weights are a dictionary of tensors"):
        fastbert.BertModel.from_pretrained(tmp_path)
    torch.save({"x": Path("/")}, tmp_path / "pytorch_model.bin")  # an object that runs code to come back
    with pytest.raises(OSError, match="no torch weights file"):
        fastbert.BertModel.from_pretrained(tmp_path)
    write_raw_safetensors(tmp_path / "model.safetensors", "F8_E4M3")
    with pytest.raises(OSError, match="holds x as F8_E4M3: no dtype of a BERT"):
        fastbert.BertModel.from_pretrained(tmp_path)


def test_other_architectures_are_named(tmp_path: Path) -> None:
    transformers.T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=16, d_kv=8).save_pretrained(tmp_path)
    with pytest.raises(fastbert.UserError, match="is of model_type 't5': fastbert reads 'bert' only"):
        fastbert.BertModel.from_pretrained(tmp_path)
    # its weights under a BERT's config
    small_config().save_pretrained(tmp_path)
    save_file(
        {"encoder.block.0.layer.0.SelfAttention.q.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(OSError, match=r"lacks encoder weights: .* It is no BERT of this config"):
        fastbert.BertModel.from_pretrained(tmp_path)


def test_a_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no file named config.json, or bert_config.json, found in directory"):
        fastbert.BertModel.from_pretrained(tmp_path)
    small_config().save_pretrained(tmp_path)
    message = r"Error no file named model.safetensors, or pytorch_model.bin, found in directory"
    with pytest.raises(OSError, match=message):
        fastbert.BertModel.from_pretrained(tmp_path)


def test_files_of_the_first_generation_are_written_anew(tmp_path: Path) -> None:
    theirs = transformers.BertForMaskedLM(hf_config())
    state = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in theirs.state_dict().items()
        if not key.startswith("cls.predictions.decoder")
    }
    state["bert.embeddings.position_ids"] = torch.arange(64)[None]
    # the first files were no zip archives
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    small_config().save_pretrained(tmp_path)
    ours, info = fastbert.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    ours.save_pretrained(tmp_path / "new")
    keys = load_file(tmp_path / "new" / "model.safetensors").keys()
    theirs.save_pretrained(tmp_path / "theirs")
    assert keys == load_file(tmp_path / "theirs" / "model.safetensors").keys()
