"""From the tensors of a file into a model: configs, old key spellings, ties, and what does not fit."""

from __future__ import annotations

import copy
import inspect
import os
import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.hub import ModelFiles, open_files

if TYPE_CHECKING:
    from fastbert.pretrained import PretrainedModel

# old name -> new name, tried on every key of a file
KEY_RENAMES = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
)
# buffers that checkpoints up to transformers 4.30 stored
DROPPED_KEY = re.compile(r"(^|\.)embeddings\.(position_ids|token_type_ids)$")
# arguments of transformers that choose how to load, not what
_WITHOUT_EFFECT = ("low_cpu_mem_usage", "trust_remote_code", "weights_only")


@dataclass
class LoadingInfo:
    """What did not fit when a file was loaded: the model's keys, unexpected ones as the file spells them."""

    missing_keys: set[str] = field(default_factory=set)
    unexpected_keys: set[str] = field(default_factory=set)
    mismatched_keys: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    error_msgs: list[str] = field(default_factory=list)


def resolve_config(
    files: ModelFiles | None,
    config: BertConfig | str | os.PathLike[str] | None,
    kwargs: dict[str, Any],
    attn_implementation: str | None,
) -> tuple[BertConfig, dict[str, Any]]:
    """(a config of the model's own, the keyword arguments that are no config field)."""
    if config is None or isinstance(config, str | os.PathLike):
        if config is not None:
            files = open_files(config, {})
        assert files is not None
        own, kwargs = BertConfig.from_files(files, return_unused_kwargs=True, **kwargs)
    else:
        own = copy.deepcopy(config)
        for name in [name for name in kwargs if hasattr(own, name)]:
            setattr(own, name, kwargs.pop(name))
    if attn_implementation is not None:
        own._attn_implementation = attn_implementation
    return own, {name: value for name, value in kwargs.items() if name not in _WITHOUT_EFFECT}


def refuse_unknown_arguments(cls: type, kwargs: dict[str, Any]) -> None:
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in kwargs if name not in parameters and not takes_any]
    if unknown:
        raise TypeError(f"{cls.__name__} has no config field or argument {', '.join(map(repr, unknown))}")


def resolve_dtype(
    wanted: torch.dtype | str | None, config: BertConfig, tensors: dict[str, Tensor]
) -> torch.dtype:
    """ "auto": the config's, else that of the first weights; None: torch's default."""
    if wanted == "auto":
        wanted = config.dtype or next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
    if isinstance(wanted, str):
        wanted = getattr(torch, wanted.removeprefix("torch."), wanted)
    if wanted is None:
        wanted = torch.get_default_dtype()
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise ValueError(
            f"dtype {wanted!r} is no floating-point dtype: give a torch.dtype, its name or 'auto'"
        )
    return wanted


def convert_keys(tensors: dict[str, Tensor], model: PretrainedModel) -> dict[str, Tensor]:
    """The tensors under the model's key names: old spellings, the `bert.` prefix, dropped buffers."""
    prefix = f"{model.base_model_prefix}."
    expected = model.state_dict().keys()
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if DROPPED_KEY.search(key):
            continue
        for pattern, new in KEY_RENAMES:
            key = pattern.sub(new, key)
        # other keys keep the file's spelling, and are reported by it
        for other in (key.removeprefix(prefix), prefix + key):
            if key not in expected and other in expected:
                key = other
        converted[key] = tensor
    return converted


def load_into(
    model: PretrainedModel,
    tensors: dict[str, Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    ignore_mismatched_sizes: bool,
    may_lack_encoder: bool,
    where: str,
) -> LoadingInfo:
    """Make the tensors the model's parameters, in its dtype and device; initialise what they lack.

    Empties `tensors` on the way, so that no weight is held twice. The model may lie on the meta device.
    """
    info = LoadingInfo()
    _settle_ties(model, tensors)
    expected = model.state_dict()
    info.unexpected_keys = set(tensors) - set(expected)
    for key in set(tensors) & set(expected):
        if tensors[key].shape != expected[key].shape:
            info.mismatched_keys.add((key, tuple(tensors[key].shape), tuple(expected[key].shape)))
    if info.mismatched_keys and not ignore_mismatched_sizes:
        differences = "; ".join(
            f"{key} is {theirs} in the file and {ours} in the model"
            for key, theirs, ours in sorted(info.mismatched_keys)
        )
        raise RuntimeError(
            f"sizes differ: {differences}. Use another config, or ignore_mismatched_sizes=True"
        )
    ties = model.all_tied_weights_keys
    info.missing_keys = set(expected) - set(tensors)
    info.missing_keys -= {tied for tied, source in ties.items() if source in tensors}
    lost = sorted(key for key in info.missing_keys if model._encoder_keys.search(key))
    if lost and not may_lack_encoder:
        some = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise OSError(f"{where} lacks encoder weights: {some}. It is no BERT of this config")

    fresh = info.missing_keys | {key for key, _, _ in info.mismatched_keys}
    if device.type == "meta":
        model.to(device=device, dtype=dtype)
    else:
        _assign(model, tensors, set(expected) - fresh - set(ties), device, dtype)
        _initialise(model, fresh - set(ties), device, dtype)
        model.tie_weights()
        model.to(device=device, dtype=dtype)  # what only a subclass has
    if fresh and not may_lack_encoder:
        names = ", ".join(sorted(fresh))
        warnings.warn(f"newly initialised, missing or of other size in {where}: {names}", stacklevel=4)
    return info


def _place(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    path, _, name = key.rpartition(".")
    return model.get_submodule(path), name


def _put(model: nn.Module, key: str, tensor: Tensor) -> None:
    module, name = _place(model, key)
    old = getattr(module, name)
    if isinstance(old, nn.Parameter):
        setattr(module, name, nn.Parameter(tensor, requires_grad=old.requires_grad))
    else:
        setattr(module, name, tensor)


def _assign(
    model: nn.Module, tensors: dict[str, Tensor], keys: set[str], device: torch.device, dtype: torch.dtype
) -> None:
    seen: set[int] = set()
    for key in list(tensors):
        tensor = tensors.pop(key)
        if key not in keys:
            continue
        tensor = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        if (
            tensor.data_ptr() in seen
        ):  # a pickle may hold one tensor under two keys; the model decides on ties
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        _put(model, key, tensor.contiguous())


def _initialise(model: PretrainedModel, keys: set[str], device: torch.device, dtype: torch.dtype) -> None:
    for key in sorted(keys):
        module, name = _place(model, key)
        if getattr(module, name).is_meta:
            _put(model, key, torch.empty(getattr(module, name).shape, device=device, dtype=dtype))
            model._init_weights(module, (name,))


def _settle_ties(model: PretrainedModel, tensors: dict[str, Tensor]) -> None:
    """Fill in a missing half of a tied pair; untie the model if the file holds two different halves."""
    for tied, source in model.all_tied_weights_keys.items():
        if tied in tensors and source not in tensors:
            tensors[source] = tensors[tied]
        same_shape = tied in tensors and tensors[tied].shape == tensors[source].shape
        if same_shape and not torch.equal(tensors[tied], tensors[source]):
            warnings.warn(
                f"{tied} and {source} differ in the file although the config ties them: "
                "both are kept, untied, and config.tie_word_embeddings is now False",
                stacklevel=5,
            )
            model.untie_weights()
            return
