"""Weight files on disk: safetensors and torch's pickles, whole or in shards, and Google's checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastbert import tf_checkpoint
from fastbert.hub import ModelFiles
from fastbert.paths import stays_inside

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TORCH_WEIGHTS_NAME = "pytorch_model.bin"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TF_INDEX_NAME = "bert_model.ckpt.index"
_READ_ORDER = (WEIGHTS_NAME, INDEX_NAME, TORCH_WEIGHTS_NAME, TORCH_INDEX_NAME, TF_INDEX_NAME)

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


# ---- reading


def read(files: ModelFiles, use_safetensors: bool | None = None) -> dict[str, Tensor]:
    """Every tensor of a model, on the CPU, under the file's own keys (TensorFlow's: Hugging Face's).

    The first of model.safetensors, its shards, pytorch_model.bin, its shards, and a TensorFlow checkpoint
    that is there is read; `use_safetensors` True or False leaves out the others or the safetensors. OSError
    names a file that is damaged, or what was looked for.
    """
    if files.given is not None:
        return _read_file(files.given, files)
    for name in _READ_ORDER:
        is_safetensors = name.startswith(WEIGHTS_NAME)
        if use_safetensors is not None and use_safetensors != is_safetensors:
            continue
        path = files.get(name)
        if path is not None:
            return _read_file(path, files)
    checkpoints = sorted(files.folder.glob("*.ckpt*.index")) if use_safetensors is None else []
    if len(checkpoints) == 1:
        return _read_file(checkpoints[0], files)
    if checkpoints:
        names = ", ".join(path.name for path in checkpoints)
        raise OSError(f"{files.folder} holds several TensorFlow checkpoints: give the path of one of {names}")
    raise files.absent((WEIGHTS_NAME,) if use_safetensors else (WEIGHTS_NAME, TORCH_WEIGHTS_NAME))


def _read_file(path: Path, files: ModelFiles) -> dict[str, Tensor]:
    if path.name.endswith(".index.json"):
        return _read_shards(path, files)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".index" or not path.is_file():
        return tf_checkpoint.read_bert(path.with_name(path.name.removesuffix(".index")), files.get)
    return _read_torch(path)


def _read_shards(index: Path, files: ModelFiles) -> dict[str, Tensor]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(f"{index} is no index of shards: {error!r}") from error
    tensors: dict[str, Tensor] = {}
    for name in shards:
        path = files.get(name) if stays_inside(name) else None
        if path is None:
            raise OSError(f"{index} names the shard {name}, which is not in {files.folder}")
        tensors.update(_read_file(path, files))
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    # the library checks the header, and would give views of the mapped file: a model on them breaks when
    # another program cuts the file short, and copies of them hold everything twice
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        raise OSError(f"{path} is truncated or no safetensors file: {error}") from error
    tensors = {}
    with path.open("rb") as file:
        (header_size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] not in _SAFETENSORS_DTYPES:
                raise OSError(f"{path} holds {name} as {entry['dtype']}: no dtype of a BERT")
            tensor = torch.empty(entry["shape"], dtype=_SAFETENSORS_DTYPES[entry["dtype"]], device="cpu")
            file.seek(8 + header_size + entry["data_offsets"][0])
            as_bytes: Any = tensor.view(-1).view(torch.uint8).numpy()
            if file.readinto(as_bytes) < tensor.nbytes:
                raise OSError(f"{path} is truncated: it ends inside {name}")
            tensors[name] = tensor
    return tensors


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(f"{path} is truncated or no torch weights file: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise OSError(f"{path} holds a {type(tensors).__name__}, weights are a dictionary of tensors")
    return tensors


# ---- writing


def write(
    directory: Path, tensors: dict[str, Tensor], max_shard_size: int | str, safe_serialization: bool
) -> None:
    """Write the tensors into one file, or into shards and their index if they are above `max_shard_size`.

    Each file is written beside, synced and renamed. A reader finds the old weights, the new ones, or (between
    two sets of equally many shards) none; never a mixture. Left-overs of an earlier save are removed.
    """
    whole_name = WEIGHTS_NAME if safe_serialization else TORCH_WEIGHTS_NAME
    index_name = f"{whole_name}.index.json"
    save = _save_safetensors if safe_serialization else torch.save
    shards = _split(tensors, parse_size(max_shard_size))
    if len(shards) == 1:
        _write_file(directory / whole_name, partial(save, _on_cpu(tensors)))
        written = {whole_name}
    else:
        stem, suffix = whole_name.split(".")
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}.{suffix}" for i in range(1, len(shards) + 1)]
        if any((directory / name).exists() for name in names):
            (directory / index_name).unlink(missing_ok=True)
        for name, shard in zip(names, shards):
            _write_file(directory / name, partial(save, _on_cpu(shard)))
        index = {
            "metadata": {
                "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
                "total_size": sum(tensor.nbytes for tensor in tensors.values()),
            },
            "weight_map": {key: name for name, shard in zip(names, shards) for key in shard},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        _write_file(directory / index_name, lambda path: path.write_text(text, encoding="utf-8"))
        written = {*names, index_name}
    _remove_stale(directory, written, with_torch=not safe_serialization)


def parse_size(size: int | str) -> int:
    """Bytes of 123, "5GB" (10^9) or "5GiB" (2^30). ValueError for anything else."""
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f"max_shard_size {size!r} is no size: give bytes, or a text such as '5GB'")
    number, unit, is_binary = match.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(unit.upper() or " "))


def _split(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """In order, each shard as full as the limit allows; a tensor above it has a shard of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    return shards


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()}


def _save_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def _write_file(path: Path, save: Callable[[Path], Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_stale(directory: Path, written: set[str], *, with_torch: bool) -> None:
    """Remove weights of an earlier save that a reader would prefer to, or mix up with, the written ones."""
    kinds = [("model", "safetensors"), *[("pytorch_model", "bin")] * with_torch]
    for stem, suffix in kinds:
        pattern = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}(\.index\.json)?")
        for path in directory.iterdir():
            if pattern.fullmatch(path.name) and path.name not in written:
                path.unlink()
