"""What every model class has besides its forward: initialisation, tying, and files on disk.

A saved folder is a Hugging Face model folder: `config.json` and `model.safetensors` with transformers' own
keys, so that either library reads what the other wrote. All conversion of keys is in this file.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastbert.config import ATTN_IMPLEMENTATIONS, BertConfig

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TORCH_WEIGHTS_NAME = "pytorch_model.bin"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"

# old name -> new name, tried on every key of a file
KEY_RENAMES = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
)
# buffers that checkpoints up to transformers 4.30 stored
DROPPED_KEY = re.compile(r"(^|\.)embeddings\.(position_ids|token_type_ids)$")
# kept in the model, left out of a file: (tied key, the key it is tied to)
TIED_KEYS = (
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
)


@dataclass
class LoadingInfo:
    """What did not fit when a file was loaded; all keys are the model's."""

    missing_keys: set[str] = field(default_factory=set)
    unexpected_keys: set[str] = field(default_factory=set)
    mismatched_keys: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    error_msgs: list[str] = field(default_factory=list)


class PretrainedModel(nn.Module):
    """Base of the model classes; a plain nn.Module that needs no transformers."""

    config_class = BertConfig
    base_model_prefix = "bert"
    main_input_name = "input_ids"
    # without this transformers' Trainer believes that the loss is divided by num_items_in_batch already
    accepts_loss_kwargs = False
    # missing in a file: an error for encoder weights, a newly initialised module for these
    _head_keys: ClassVar[re.Pattern[str]] = re.compile(r"^(cls|classifier|qa_outputs)\.|(^|\.)pooler\.")

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if isinstance(config, dict) or not hasattr(config, "hidden_size"):
            raise TypeError(f"{type(self).__name__} takes a BertConfig, got {type(config).__name__}")
        _refuse_unsupported(config)
        self.config = config

    def post_init(self) -> None:
        """Initialise every weight, tie, and switch on what the config asks for; last line of `__init__`."""
        self.init_weights()
        self.tie_weights()
        if getattr(self.config, "gradient_checkpointing", False):
            self.gradient_checkpointing_enable()

    # ---- initialisation and tying

    def init_weights(self) -> None:
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, std)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, std)
            if module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
            module.bias.zero_()

    def _tied_parameters(self) -> list[tuple[nn.Module, str, nn.Module, str]]:
        """(module, name, source module, source name) for each parameter that is another one too."""
        return []

    def tie_weights(self) -> None:
        """Make tied parameters one object, if `config.tie_word_embeddings`."""
        if self.config.tie_word_embeddings:
            for module, name, source, source_name in self._tied_parameters():
                setattr(module, name, getattr(source, source_name))

    def untie_weights(self) -> None:
        """Give each tied parameter a copy of its own; `config.tie_word_embeddings` becomes False."""
        for module, name, _, _ in self._tied_parameters():
            setattr(module, name, nn.Parameter(getattr(module, name).detach().clone()))
        self.config.tie_word_embeddings = False

    def _are_tied(self) -> bool:
        return all(getattr(m, n) is getattr(source, s) for m, n, source, s in self._tied_parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # where nn.Module makes new Parameters (to_empty, some device moves) a tie would be lost
        was_tied = self._are_tied()
        super()._apply(fn, recurse)
        if was_tied:
            self.tie_weights()
        return self

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's; with `assign=True` tied parameters stay tied."""
        was_tied = self._are_tied()
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        if was_tied:
            self.tie_weights()
        return result

    # ---- small questions and switches

    @property
    def base_model(self) -> nn.Module:
        return getattr(self, self.base_model_prefix, self)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Unique parameters' elements; tied tensors count once."""
        left_out = {
            id(module.weight)
            for module in self.modules()
            if exclude_embeddings and isinstance(module, nn.Embedding)
        }
        return sum(
            p.numel()
            for p in self.parameters()
            if id(p) not in left_out and (p.requires_grad or not only_trainable)
        )

    def get_memory_footprint(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(t.numel() * t.element_size() for t in (*self.parameters(), *self.buffers()))

    def can_generate(self) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embeddings.word_embeddings  # type: ignore[union-attr, return-value]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word embeddings; call `tie_weights()` afterwards to tie the decoder to them."""
        self.base_model.embeddings.word_embeddings = value  # type: ignore[union-attr]

    def get_output_embeddings(self) -> nn.Module | None:
        return None

    def _vocab_parameters(self) -> list[tuple[nn.Module, str]]:
        """(module, name) of each parameter whose first axis is the vocabulary."""
        return [(self.get_input_embeddings(), "weight")]

    @torch.no_grad()
    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Give every vocabulary parameter `new_num_tokens` rows, in place; returns the input embeddings.

        The first rows stay. New rows are the mean of the old ones, or with `mean_resizing=False` freshly
        initialised. None keeps the number, which `pad_to_multiple_of` then rounds up.
        """
        words = self.get_input_embeddings()
        if new_num_tokens is None and pad_to_multiple_of is None:
            return words
        if pad_to_multiple_of is not None and not isinstance(pad_to_multiple_of, int):
            raise ValueError(f"pad_to_multiple_of must be int, got {pad_to_multiple_of!r}")
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        size = -(-size // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
        was_tied = self._are_tied()
        for module, name in self._vocab_parameters():
            old = getattr(module, name)
            new = old.new_empty(size, *old.shape[1:])
            kept = min(size, old.shape[0])
            new[:kept] = old[:kept]
            if mean_resizing:
                new[kept:] = old.float().mean(dim=0).to(old.dtype)
            else:
                new[kept:].normal_(0.0, self.config.initializer_range if old.dim() > 1 else 0.0)
            setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad))
            if isinstance(module, nn.Linear):
                module.out_features = size
        if isinstance(words, nn.Embedding):
            words.num_embeddings = size
            if words.padding_idx is not None and words.padding_idx >= size:
                words.padding_idx = None
        self.config.vocab_size = self.vocab_size = size
        if was_tied:
            self.tie_weights()
        return words

    def set_attn_implementation(self, attn_implementation: str) -> None:
        """Choose the path: "eager" computes every padded position, any other known name skips padding.

        Unknown name: ValueError.
        """
        if attn_implementation not in ATTN_IMPLEMENTATIONS:
            raise ValueError(
                f"attn_implementation {attn_implementation!r} is not one of {', '.join(ATTN_IMPLEMENTATIONS)}"
            )
        self.config._attn_implementation = attn_implementation

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, every_n_layers: int = 1
    ) -> None:
        """Recompute each layer in the backward instead of keeping its activations; in training only.

        Only the non-reentrant form of torch.utils.checkpoint exists here, which needs no input gradients.
        """
        options = gradient_checkpointing_kwargs or {}
        if options.get("use_reentrant"):
            raise ValueError("gradient checkpointing is non-reentrant here: leave use_reentrant out or False")
        self.base_model.encoder.checkpoint_every = every_n_layers  # type: ignore[union-attr]

    def gradient_checkpointing_disable(self) -> None:
        self.base_model.encoder.checkpoint_every = 0  # type: ignore[union-attr]

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, every_n_layers: int = 1
    ) -> None:
        """transformers 5's name of `gradient_checkpointing_enable`."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, every_n_layers)

    def activation_checkpointing_disable(self) -> None:
        self.gradient_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        return bool(self.base_model.encoder.checkpoint_every)  # type: ignore[union-attr]

    # ---- disk

    @classmethod
    def _from_config(cls, config: BertConfig, **kwargs: Any) -> Self:
        return cls(config, **kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors` with transformers' keys, each file atomically.

        Tied parameters are written once, under the key that transformers uses. The model's own config is not
        changed; the written one names this class and dtype.
        """
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = dict(self.state_dict() if state_dict is None else state_dict)
        for tied, source in TIED_KEYS:
            if tied in tensors and source in tensors and _is_same_storage(tensors[tied], tensors[source]):
                del tensors[tied]
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
        temporary = directory / f".{WEIGHTS_NAME}.{os.getpid()}"
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(directory / WEIGHTS_NAME)
        finally:
            temporary.unlink(missing_ok=True)
        config = copy.deepcopy(self.config)
        config.architectures = [type(self).__name__]
        config.dtype = self.dtype
        config.save_pretrained(directory)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *,
        config: BertConfig | str | os.PathLike[str] | None = None,
        state_dict: dict[str, Tensor] | None = None,
        dtype: torch.dtype | str | None = "auto",
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        attn_implementation: str | None = None,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """A model in eval mode from a local folder or weights file.

        Reads `model.safetensors` or `pytorch_model.bin`, whole or in shards, of any BERT class of
        transformers. `dtype="auto"` is the config's, else that of the weights. Other keyword arguments
        override config fields or go to `__init__`; any other name is a TypeError. Newly initialised, unused
        and mismatched weights are warned about and, with `output_loading_info=True`, returned as a second
        value. Raises OSError if there is nothing to read or encoder weights are missing, RuntimeError if
        shapes differ and `ignore_mismatched_sizes` is False.
        """
        path = None if pretrained_model_name_or_path is None else Path(pretrained_model_name_or_path)
        if path is None and (state_dict is None or config is None):
            raise ValueError("from_pretrained without a path needs both state_dict and config")
        if path is not None and not path.exists():
            raise OSError(f"{path} does not exist: give a local model folder or weights file")
        config, kwargs = _resolve_config(path, config, kwargs, attn_implementation)
        parameters = inspect.signature(cls.__init__).parameters
        unknown = [name for name in kwargs if name not in parameters]
        if unknown:
            raise TypeError(f"{cls.__name__} has no config field or argument {', '.join(map(repr, unknown))}")
        if state_dict is None:
            assert path is not None
            state_dict = read_state_dict(path)

        wanted = torch_dtype if torch_dtype is not None else dtype
        if wanted == "auto":
            wanted = config.dtype or next(
                (t.dtype for t in state_dict.values() if t.is_floating_point()), torch.float32
            )
        elif isinstance(wanted, str):
            wanted = getattr(torch, wanted)
        model = cls(config, **kwargs)
        # ties are decided by the file, before the dtype: rounding may make different tensors equal
        info = _load_into(model, convert_keys(state_dict, model), ignore_mismatched_sizes, path)
        model = model.to(device=device, dtype=wanted) if wanted is not None else model.to(device=device)
        model.eval()
        return (model, vars(info)) if output_loading_info else model


def _refuse_unsupported(config: BertConfig) -> None:
    if config.is_decoder:
        raise NotImplementedError(
            "config.is_decoder=True: this BERT is an encoder, it has no causal attention"
        )
    if config.add_cross_attention:
        raise NotImplementedError("config.add_cross_attention=True: this BERT has no cross attention")
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        raise NotImplementedError(
            f"config.position_embedding_type={config.position_embedding_type!r}: only 'absolute' exists"
        )


def _is_same_storage(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    same_view = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return same_view and a.device.type != "meta" and a.data_ptr() == b.data_ptr()


def _resolve_config(
    path: Path | None,
    config: Any,
    kwargs: dict[str, Any],
    attn_implementation: str | None,
) -> tuple[BertConfig, dict[str, Any]]:
    """(a config of our own, the keyword arguments that are no config field)."""
    if config is None or isinstance(config, str | os.PathLike):
        source = config if config is not None else path
        assert source is not None
        folder = Path(source).parent if config is None and Path(source).is_file() else Path(source)
        config, kwargs = BertConfig.from_pretrained(folder, return_unused_kwargs=True, **kwargs)
    else:
        config = copy.deepcopy(config)
        for name in [name for name in kwargs if hasattr(config, name)]:
            setattr(config, name, kwargs.pop(name))
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    return config, kwargs


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """All tensors of a weights file or model folder, on the CPU. OSError naming what was looked for."""
    if path.is_file():
        return _read_weights(path)
    for name in (WEIGHTS_NAME, INDEX_NAME, TORCH_WEIGHTS_NAME, TORCH_INDEX_NAME):
        file = path / name
        if not file.is_file():
            continue
        if not name.endswith(".json"):
            return _read_weights(file)
        shards = sorted(set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()))
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            if not (path / shard).is_file():
                raise OSError(f"{file} names the shard {shard}, which is not in {path}")
            tensors.update(_read_weights(path / shard))
        return tensors
    raise OSError(f"no file named {WEIGHTS_NAME}, or {TORCH_WEIGHTS_NAME}, found in directory {path}")


def _read_weights(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except SafetensorError as error:
            raise OSError(f"{file} is truncated or no safetensors file: {error}") from error
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError) as error:
        raise OSError(f"{file} is truncated or no torch weights file: {error}") from error


def convert_keys(state_dict: dict[str, Tensor], model: PretrainedModel) -> dict[str, Tensor]:
    """The tensors under the model's key names: old spellings, the `bert.` prefix, dropped buffers."""
    prefix = f"{model.base_model_prefix}."
    is_headed = model.base_model is not model
    in_file = any(key.startswith(prefix) for key in state_dict)
    converted: dict[str, Tensor] = {}
    for key, tensor in state_dict.items():
        if DROPPED_KEY.search(key):
            continue
        for pattern, new in KEY_RENAMES:
            key = pattern.sub(new, key)
        if in_file and not is_headed:
            key = key.removeprefix(prefix)
        elif not in_file and is_headed and key.split(".")[0] in ("embeddings", "encoder", "pooler"):
            key = prefix + key
        converted[key] = tensor
    return converted


def _load_into(
    model: PretrainedModel, tensors: dict[str, Tensor], ignore_mismatched_sizes: bool, path: Path | None
) -> LoadingInfo:
    info = LoadingInfo()
    _settle_ties(model, tensors)
    expected = model.state_dict()
    info.unexpected_keys = set(tensors) - set(expected)
    for key in set(tensors) & set(expected):
        if tensors[key].shape != expected[key].shape:
            info.mismatched_keys.add((key, tuple(tensors[key].shape), tuple(expected[key].shape)))
    mismatched = {key for key, _, _ in info.mismatched_keys}
    if mismatched and not ignore_mismatched_sizes:
        differences = "; ".join(
            f"{key} is {theirs} in the file and {ours} in the model"
            for key, theirs, ours in sorted(info.mismatched_keys)
        )
        raise RuntimeError(
            f"sizes differ: {differences}. Use another config, or ignore_mismatched_sizes=True"
        )
    info.missing_keys = set(expected) - set(tensors)
    if model.config.tie_word_embeddings:
        info.missing_keys -= {tied for tied, source in TIED_KEYS if source in tensors}
    lost = sorted(key for key in info.missing_keys if not model._head_keys.search(key))
    if lost:
        some = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise OSError(f"{path or 'state_dict'} lacks encoder weights: {some}. It is no BERT of this config")

    usable = {key: tensor for key, tensor in tensors.items() if key in expected and key not in mismatched}
    model.load_state_dict(usable, strict=False)
    where = path or "state_dict"
    if info.missing_keys or mismatched:
        names = ", ".join(sorted(info.missing_keys | mismatched))
        warnings.warn(f"newly initialised, missing or of other size in {where}: {names}", stacklevel=3)
    return info


def _settle_ties(model: PretrainedModel, tensors: dict[str, Tensor]) -> None:
    """Fill in a missing half of a tied pair; untie the model if the file holds two different halves."""
    if not model.config.tie_word_embeddings:
        return
    expected = model.state_dict().keys()
    for tied, source in TIED_KEYS:
        if tied not in expected:
            continue
        if tied in tensors and source not in tensors:
            tensors[source] = tensors[tied]
        same_shape = tied in tensors and tensors[tied].shape == tensors[source].shape
        if same_shape and not torch.equal(tensors[tied], tensors[source]):
            warnings.warn(
                f"{tied} and {source} differ in the file although the config ties them: "
                "both are kept, untied, and config.tie_word_embeddings is now False",
                stacklevel=4,
            )
            model.untie_weights()
            return
