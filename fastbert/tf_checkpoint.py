"""Google's BERT checkpoints (`bert_model.ckpt`), read without TensorFlow.

A checkpoint of TensorFlow's second format is a "tensor bundle": `PREFIX.index` is a LevelDB table from
variable names to protobuf entries (dtype, shape, shard, offset, size, crc32c), and
`PREFIX.data-00000-of-00001` holds the bytes. Sources: tensorflow/core/util/tensor_bundle
(tensor_bundle.proto, table_format.txt of LevelDB), and google-research/bert's modeling.py for the names.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastbert.crc32c import crc32c

_TABLE_MAGIC = 0xDB4775248B80FB57
_FOOTER_SIZE = 48
# DataType of tensorflow/core/framework/types.proto; bfloat16 has no numpy type and is read as its bits
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 10: "?", 14: "<i2", 19: "<f2"}
_BFLOAT16 = 14
# what a training run saves besides weights
_NO_WEIGHT = re.compile(
    r"(^|/)(global_step|adam_[mv]|Adam(_\d+)?|lamb_[mv]|[^/]*_power|loss_scale|good_steps)$|^_CHECKPOINTABLE"
)
_NAMES = (
    (re.compile(r"(^|\.)layer_(\d+)\."), r"\1layer.\2."),
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
    (re.compile(r"\.kernel$"), ".weight"),
    (re.compile(r"(embeddings\.(word|position|token_type)_embeddings)$"), r"\1.weight"),
    (re.compile(r"^cls\.squad\."), "qa_outputs."),
    (re.compile(r"^output_"), "classifier.output_"),
    (re.compile(r"output_weights$"), "weight"),
    (re.compile(r"output_bias$"), "bias"),
)


def read_bert(prefix: Path, get: Callable[[str], Path | None]) -> dict[str, Tensor]:
    """Every weight of the checkpoint `prefix` under Hugging Face's name, dense kernels transposed.

    `get` gives the local path of a file name beside `prefix.index`. OSError names a file that is absent,
    damaged (every checksum is verified) or of another format.
    """
    tensors = {}
    for name, array in read_checkpoint(prefix, get, lambda name: not _NO_WEIGHT.search(name)):
        tensor = torch.from_numpy(array)
        if name.endswith("/kernel"):
            tensor = tensor.t().contiguous()
        key = name.replace("/", ".")
        for pattern, new in _NAMES:
            key = pattern.sub(new, key)
        tensors[key] = tensor
    return tensors


def read_checkpoint(
    prefix: Path, get: Callable[[str], Path | None], wants: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, np.ndarray]]:
    """(variable name, array) of each wanted variable, in the table's order."""
    index = prefix.with_name(f"{prefix.name}.index")
    try:
        table = dict(_table(index.read_bytes()))
        header = _message(table.pop(b""))
        num_shards = int(header.get(1, 1))
        if header.get(2, 0) != 0:
            raise ValueError("the checkpoint is big-endian")
        entries = {key.decode(): _message(value) for key, value in table.items()}
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise OSError(f"{index} is damaged or no TensorFlow checkpoint: {error}") from error
    for name, entry in entries.items():
        if not wants(name):
            continue
        data = prefix.with_name(f"{prefix.name}.data-{int(entry.get(3, 0)):05d}-of-{num_shards:05d}")
        path = get(data.name)
        if path is None:
            raise OSError(f"{index} needs {data.name}, which is not beside it")
        yield name, _read_array(path, name, entry)


def _read_array(path: Path, name: str, entry: dict[int, Any]) -> np.ndarray:
    dtype_number, offset, size = int(entry.get(1, 0)), int(entry.get(4, 0)), int(entry.get(5, 0))
    sizes = (_message(value) for field, value in _fields(_bytes(entry.get(2, b""))) if field == 2)
    shape = [int(dimension.get(1, 0)) for dimension in sizes]
    if 7 in entry or dtype_number not in _DTYPES:
        what = "is partitioned" if 7 in entry else f"has TensorFlow's dtype {dtype_number}"
        raise OSError(f"{path}: {name} {what}, which no BERT has")
    raw = np.fromfile(path, dtype=np.uint8, count=size, offset=offset)
    dtype = np.dtype(_DTYPES[dtype_number])
    if raw.size != size or size != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
        raise OSError(f"{path} is truncated: {name} of shape {shape} has {raw.size} of {size} bytes")
    if _masked(crc32c(raw)) != entry.get(6):
        raise OSError(f"{path} is damaged: the checksum of {name} is wrong")
    array = raw.view(dtype).reshape(shape)
    if dtype_number == _BFLOAT16:
        array = (array.astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


# ---- the table


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    footer = data[-_FOOTER_SIZE:]
    if len(footer) < _FOOTER_SIZE or struct.unpack("<Q", footer[-8:])[0] != _TABLE_MAGIC:
        raise ValueError("it does not end as a table does")
    position = 0
    handles = []
    for _ in range(4):  # offset and size of the metaindex block and of the index block
        value, position = _varint(footer, position)
        handles.append(value)
    for _, handle in _block(data, handles[2], handles[3]):
        offset, position = _varint(handle, 0)
        yield from _block(data, offset, _varint(handle, position)[0])


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    if offset + size + 5 > len(data):
        raise ValueError("a block lies beyond the end")
    block = data[offset : offset + size]
    compression, checksum = struct.unpack_from("<BI", data, offset + size)
    if _masked(crc32c(np.frombuffer(data, np.uint8, size + 1, offset))) != checksum:
        raise ValueError("the checksum of a block is wrong")
    if compression:
        raise ValueError("its blocks are compressed, which TensorFlow never writes")
    (num_restarts,) = struct.unpack("<I", block[-4:])
    end = size - 4 * (num_restarts + 1)
    position, key = 0, b""
    while position < end:
        shared, position = _varint(block, position)
        unshared, position = _varint(block, position)
        length, position = _varint(block, position)
        key = key[:shared] + block[position : position + unshared]
        position += unshared + length
        yield key, block[position - length : position]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, position = _varint(message, position)
        elif kind in (1, 5):
            value = int.from_bytes(message[position : position + (8 if kind == 1 else 4)], "little")
            position += 8 if kind == 1 else 4
        elif kind == 2:
            length, position = _varint(message, position)
            value = message[position : position + length]
            position += length
        else:
            raise ValueError(f"wire type {kind} in a message")
        yield tag >> 3, value


def _message(message: int | bytes) -> dict[int, Any]:
    """Last value of each field."""
    return dict(_fields(_bytes(message)))


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"the number {value} where a message belongs")
    return value


def _masked(crc: int) -> int:
    """How tables store a crc, so that the crc of data with crcs in it stays strong."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
