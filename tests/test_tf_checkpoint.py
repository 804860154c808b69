"""Google's checkpoints, read without TensorFlow.

TensorFlow is too large to install for a test, so `write_checkpoint` writes the published format byte by byte:
LevelDB's table_format.txt (prefix-compressed blocks, restarts, masked CRC-32C, index, footer) and
tensor_bundle.proto. The checksums come from tensorboardX, which writes TensorFlow's event files.
The reader has also been run, by hand, on variables that TensorFlow itself wrote (those in basic-pitch 0.4.0's
wheel).
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboardX.crc32c import crc32c as reference_crc32c

import fastbert
from fastbert.crc32c import crc32c
from fastbert.tf_checkpoint import read_checkpoint
from tests.small_models import SMALL, small_config, spread_weights

TF_DTYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}


# ---- a writer


def varint(value: int) -> bytes:
    out = b""
    while value >= 128:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def masked_crc(data: bytes) -> int:
    crc = reference_crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def block(items: list[tuple[bytes, bytes]], restart_interval: int = 16) -> bytes:
    out, restarts, last = b"", [], b""
    for number, (key, value) in enumerate(items):
        shared = 0
        if number % restart_interval:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        else:
            restarts.append(len(out))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    out += struct.pack(f"<{len(restarts)}I", *restarts) + struct.pack("<I", len(restarts))
    return out


def write_table(path: Path, items: list[tuple[bytes, bytes]], keys_in_a_block: int = 10) -> None:
    data, handles = b"", []

    def add(content: bytes) -> bytes:
        nonlocal data
        handle = varint(len(data)) + varint(len(content))
        data += content + b"\0" + struct.pack("<I", masked_crc(content + b"\0"))
        return handle

    for start in range(0, len(items), keys_in_a_block):
        part = items[start : start + keys_in_a_block]
        handles.append((part[-1][0] + b"\0", add(block(part))))
    metaindex = add(block([]))
    index = add(block(handles, restart_interval=1))
    footer = (metaindex + index).ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    path.write_bytes(data + footer)


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def entry(array: np.ndarray, shard: int, offset: int, dtype: int | None = None) -> bytes:
    shape = b"".join(field(2, field(1, size)) for size in array.shape)
    crc = struct.pack("<I", masked_crc(array.tobytes()))
    message = field(1, TF_DTYPES[array.dtype.name] if dtype is None else dtype) + field(2, shape)
    if shard:
        message += field(3, shard)
    if offset:
        message += field(4, offset)
    return message + field(5, array.nbytes) + varint(6 << 3 | 5) + crc


def write_checkpoint(prefix: Path, variables: dict[str, np.ndarray], num_shards: int = 1) -> None:
    shards = [b""] * num_shards
    items = [(b"", field(1, num_shards) + field(3, field(1, 1)))]
    for number, (name, array) in enumerate(sorted(variables.items())):
        shard = number % num_shards
        items.append((name.encode(), entry(array, shard, len(shards[shard]))))
        shards[shard] += array.tobytes()
    write_table(prefix.with_name(f"{prefix.name}.index"), items)
    for shard, data in enumerate(shards):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{num_shards:05d}").write_bytes(data)


def google_variables(model: fastbert.BertForPreTraining) -> dict[str, np.ndarray]:
    """The weights under the names of google-research/bert, kernels as [in, out], and an optimizer's slots."""
    variables = {}
    for key, tensor in model.state_dict().items():
        if key.startswith("cls.predictions.decoder"):
            continue
        array = tensor.numpy()
        name = key.replace("encoder.layer.", "encoder.layer_").replace(".", "/")
        if "LayerNorm" in name:
            name = name.replace("/weight", "/gamma").replace("/bias", "/beta")
        elif "_embeddings/weight" in name:
            name = name.removesuffix("/weight")
        elif name == "cls/predictions/bias":
            name = "cls/predictions/output_bias"
        elif name.startswith("cls/seq_relationship"):
            name = name.replace("/weight", "/output_weights").replace("/bias", "/output_bias")
        elif name.endswith("/weight"):
            name, array = name.removesuffix("weight") + "kernel", np.ascontiguousarray(array.T)
        variables[name] = array
        if array.ndim == 1:  # slots of the optimizer
            variables[f"{name}/adam_m"] = variables[f"{name}/adam_v"] = np.zeros_like(array)
    variables["global_step"] = np.array(1_000_000, dtype=np.int64)
    return variables


@pytest.fixture
def google(tmp_path: Path) -> tuple[fastbert.BertForPreTraining, Path]:
    """(the model, a folder with bert_model.ckpt and bert_config.json of it)."""
    model = fastbert.BertForPreTraining(small_config()).eval()
    spread_weights(model)
    write_checkpoint(tmp_path / "bert_model.ckpt", google_variables(model))
    (tmp_path / "bert_config.json").write_text(json.dumps({**SMALL, "type_vocab_size": 2}))
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    return model, tmp_path


# ---- tests


def test_crc32c_is_the_published_one() -> None:
    digits = np.frombuffer(b"123456789", dtype=np.uint8)
    assert crc32c(digits) == 0xE3069283  # the check value of the CRC catalogue
    assert crc32c(np.zeros(32, dtype=np.uint8)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(np.full(32, 255, dtype=np.uint8)) == 0x62A8AB43
    rng = np.random.default_rng(0)
    for size in (0, 1, 3, 63, 64, 127, 128, 1001, 40_003):
        data = rng.integers(0, 256, size, dtype=np.uint8)
        assert crc32c(data) == reference_crc32c(data.tobytes()), size


def test_a_google_checkpoint_gives_the_same_model(google: tuple[fastbert.BertForPreTraining, Path]) -> None:
    model, folder = google
    ids = torch.randint(1, 211, (2, 7))
    forms = (folder, folder / "bert_model.ckpt", folder / "bert_model.ckpt.index")
    for path in forms:
        ours, info = fastbert.BertForPreTraining.from_pretrained(path, output_loading_info=True)
        assert not any(info.values())
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in ours.state_dict().items())
        assert ours.cls.predictions.decoder.weight is ours.get_input_embeddings().weight
    with torch.no_grad():
        assert torch.equal(ours(ids).prediction_logits, model(ids).prediction_logits)
    bare, info = fastbert.BertModel.from_pretrained(folder, output_loading_info=True)
    assert torch.equal(bare.pooler.dense.weight, model.bert.pooler.dense.weight)
    assert {key.split(".")[0] for key in info["unexpected_keys"]} == {"cls"}
    assert fastbert.BertModel.from_pretrained(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_fine_tuned_heads_and_another_name(tmp_path: Path) -> None:
    config = small_config(num_labels=3)
    model = fastbert.BertForSequenceClassification(config)
    spread_weights(model)
    variables = google_variables(model)  # type: ignore[arg-type]
    variables = {k: v for k, v in variables.items() if not k.startswith("classifier")}
    variables["output_weights"] = model.classifier.weight.detach().numpy()
    variables["output_bias"] = model.classifier.bias.detach().numpy()
    write_checkpoint(tmp_path / "model.ckpt-1234", variables)
    ours, info = fastbert.BertForSequenceClassification.from_pretrained(
        tmp_path, config=config, output_loading_info=True
    )
    assert not any(info.values())
    assert torch.equal(ours.classifier.weight, model.classifier.weight)

    squad = {k: v for k, v in variables.items() if not k.startswith(("output_", "bert/pooler"))}
    squad["cls/squad/output_weights"] = np.ones((2, 64), dtype=np.float32)
    squad["cls/squad/output_bias"] = np.array([1.0, 2.0], dtype=np.float32)
    write_checkpoint(tmp_path / "model.ckpt-99", squad)
    with pytest.raises(
        OSError, match=r"several TensorFlow checkpoints: .* model.ckpt-1234.index, model.ckpt"
    ):
        fastbert.BertForQuestionAnswering.from_pretrained(tmp_path, config=small_config())
    answers, info = fastbert.BertForQuestionAnswering.from_pretrained(
        tmp_path / "model.ckpt-99", config=small_config(), output_loading_info=True
    )
    assert not any(info.values())
    assert answers.qa_outputs.bias.tolist() == [1.0, 2.0]


def test_every_dtype_shape_and_shard(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    variables = {
        name: rng.normal(size=shape).astype(dtype)
        for name, shape, dtype in [
            ("a/scalar", (), "float64"),
            ("a/empty", (0, 3), "float32"),
            ("b/half", (5, 1), "float16"),
            ("c/ints", (2, 3, 4), "int32"),
            ("d/long", (300,), "int64"),
            ("é/name", (1,), "float32"),
        ]
    }
    write_checkpoint(tmp_path / "x.ckpt", variables, num_shards=2)

    def get(name: str) -> Path:
        return tmp_path / name

    read = dict(read_checkpoint(tmp_path / "x.ckpt", get))
    assert read.keys() == variables.keys()
    for name, array in variables.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
    bits = np.array([0x3F80, 0xC000], dtype=np.uint16).view(np.float16)  # bfloat16's 1.0 and -2.0
    write_table(tmp_path / "y.ckpt.index", [(b"", field(1, 1)), (b"w", entry(bits, 0, 0, dtype=14))])
    (tmp_path / "y.ckpt.data-00000-of-00001").write_bytes(bits.tobytes())
    assert dict(read_checkpoint(tmp_path / "y.ckpt", get))["w"].tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("data bit", "is damaged: the checksum of .* is wrong"),
        ("data cut", "is truncated"),
        ("data gone", r"needs bert_model.ckpt.data-00000-of-00001, which is not beside it"),
        ("index bit", "the checksum of a block is wrong"),
        ("index cut", "does not end as a table does"),
        ("index empty", "does not end as a table does"),
        ("compressed", "its blocks are compressed"),
        ("no header", "is damaged or no TensorFlow checkpoint"),
        ("strange dtype", "has TensorFlow's dtype 7"),
        ("partitioned", "is partitioned"),
    ],
)
def test_damaged_checkpoints_are_one_sentence(
    google: tuple[fastbert.BertForPreTraining, Path], damage: str, message: str
) -> None:
    _, folder = google
    index, data = folder / "bert_model.ckpt.index", folder / "bert_model.ckpt.data-00000-of-00001"
    content = bytearray((data if damage.startswith("data") else index).read_bytes())
    one = np.zeros(3, dtype=np.float32)
    if damage == "data bit":
        content[1000] ^= 4
        data.write_bytes(content)
    elif damage == "data cut":
        data.write_bytes(content[:1000])
    elif damage == "data gone":
        data.unlink()
    elif damage == "index bit":
        content[100] ^= 4
        index.write_bytes(content)
    elif damage == "index cut":
        index.write_bytes(content[:-1])
    elif damage == "index empty":
        index.write_bytes(b"")
    elif damage == "compressed":
        first = block([(b"", b"")])
        body = first + b"\1" + struct.pack("<I", masked_crc(first + b"\1"))
        handles = varint(0) + varint(len(first)) + varint(0) + varint(len(first))
        index.write_bytes(body + handles.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57))
    elif damage == "no header":
        write_table(index, [(b"bert/x", entry(one, 0, 0))])
    elif damage == "strange dtype":
        write_table(index, [(b"", field(1, 1)), (b"bert/x", entry(one, 0, 0, dtype=7))])
    elif damage == "partitioned":
        write_table(index, [(b"", field(1, 1)), (b"bert/x", entry(one, 0, 0) + field(7, b"\x0a\x00"))])
    with pytest.raises(OSError, match=message) as caught:
        fastbert.BertForPreTraining.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_its_config_says_so(google: tuple[fastbert.BertForPreTraining, Path]) -> None:
    _, folder = google
    shutil.move(folder / "bert_config.json", folder / "elsewhere")
    with pytest.raises(OSError, match=r"no file named config.json, or bert_config.json"):
        fastbert.BertModel.from_pretrained(folder / "bert_model.ckpt")
