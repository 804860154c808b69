"""What every model class has besides its forward: initialisation, tying, resizing, and its two file methods.

A saved folder is a Hugging Face model folder: `config.json` and `model.safetensors` with transformers' own
keys, so that either library reads what the other wrote. `weights.py` has the files, `loading.py` the way from
their keys into a model.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fastbert import hub, loading, weights
from fastbert.config import ATTN_IMPLEMENTATIONS, BertConfig


class PretrainedModel(nn.Module):
    """Base of the model classes; a plain nn.Module that needs no transformers."""

    config_class = BertConfig
    _require_grads_hook: RemovableHandle | None = None
    base_model_prefix = "bert"
    main_input_name = "input_ids"
    # without this transformers' Trainer believes that the loss is divided by num_items_in_batch already
    accepts_loss_kwargs = False
    # what tools and tests written for transformers ask a class
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["BertEmbeddings", "BertLayer"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    # parameter that is another one too -> that other one, by their full names
    _tied_weights_keys: ClassVar[dict[str, str]] = {}
    # missing in a file: an error for these, a newly initialised module for all others
    _encoder_keys: ClassVar[re.Pattern[str]] = re.compile(r"^(bert\.)?(embeddings|encoder)\.")

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
    def _init_weights(self, module: nn.Module, names: Iterable[str] = ("weight", "bias")) -> None:
        """Initialise these parameters of one module: normal weights, zero biases, LayerNorm 1 and 0."""
        std = self.config.initializer_range
        if "weight" in names and isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, std)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        elif "weight" in names and isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
        bias = getattr(module, "bias", None)
        if "bias" in names and isinstance(bias, Tensor):
            bias.zero_()

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """`_tied_weights_keys` while `config.tie_word_embeddings`, else nothing."""
        return dict(self._tied_weights_keys) if self.config.tie_word_embeddings else {}

    def _tied_parameters(self) -> list[tuple[nn.Module, str, nn.Module, str]]:
        """(module, name, source module, source name) for each parameter that is another one too."""
        places = []
        for key, source_key in self._tied_weights_keys.items():
            (path, _, name), (source, _, source_name) = key.rpartition("."), source_key.rpartition(".")
            places.append((self.get_submodule(path), name, self.get_submodule(source), source_name))
        return places

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
    def _encoder(self) -> Any:
        return self.base_model.encoder

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
            raise ValueError(
                # transformers' words, its slip included
                f"Asking to pad the embedding matrix to a multiple of `{pad_to_multiple_of}`, which is not "
                "and integer. Please make sure to pass an integer"
            )
        table: Any = words.weight
        size = table.shape[0] if new_num_tokens is None else new_num_tokens
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

    def get_position_embeddings(self) -> nn.Module:
        """NotImplementedError, as in transformers: read `embeddings.position_embeddings`."""
        raise NotImplementedError(f"{type(self).__name__} has no get_position_embeddings")

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """NotImplementedError, as in transformers: set max_position_embeddings in the config."""
        raise NotImplementedError(f"{type(self).__name__} has no resize_position_embeddings")

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

        The keyword arguments go to `torch.utils.checkpoint.checkpoint`, with use_reentrant=False unless they
        say otherwise. Gradients are those without checkpointing, bit for bit.
        """
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        self._encoder.checkpoint_every = every_n_layers
        self._encoder.checkpoint_options = options
        if options["use_reentrant"]:
            # the reentrant form gives no gradients to layers whose input needs none (frozen embeddings)
            self.enable_input_require_grads()

    def gradient_checkpointing_disable(self) -> None:
        self._encoder.checkpoint_every = 0

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, every_n_layers: int = 1
    ) -> None:
        """transformers 5's name of `gradient_checkpointing_enable`."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, every_n_layers)

    def activation_checkpointing_disable(self) -> None:
        self.gradient_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        return bool(self._encoder.checkpoint_every)

    @property
    def is_activation_checkpointing(self) -> bool:
        return self.is_gradient_checkpointing

    def enable_input_require_grads(self) -> None:
        """Let the word embeddings' output need a gradient even if their table is frozen (for adapters)."""
        self.disable_input_require_grads()
        self._require_grads_hook = self.get_input_embeddings().register_forward_hook(_require_grad)

    def disable_input_require_grads(self) -> None:
        if self._require_grads_hook is not None:
            self._require_grads_hook.remove()
            self._require_grads_hook = None

    # ---- disk

    @classmethod
    def _from_config(cls, config: BertConfig, **kwargs: Any) -> Self:
        """A freshly initialised model; `dtype` and `attn_implementation` are written into the config."""
        dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None)
        attn_implementation = kwargs.pop("attn_implementation", None)
        if dtype is not None:
            config.dtype = dtype
        if attn_implementation is not None:
            config._attn_implementation = attn_implementation
        return cls(config, **kwargs).to(dtype=config.dtype)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        max_shard_size: int | str = "50GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write `config.json` and the weights with transformers' keys, each file atomically.

        Weights go into `model.safetensors`, or with `safe_serialization=False` into `pytorch_model.bin`;
        above `max_shard_size` (bytes, or "5GB", "200MB", ...) into shards and their index. What an earlier
        save left there is removed. Tied parameters are written once, under the key that transformers uses.
        The model's own config is not changed; the written one names this class and the weights' dtype. Does
        nothing unless `is_main_process`.
        """
        if not is_main_process:
            return
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = dict(self.state_dict() if state_dict is None else state_dict)
        for tied, source in self._tied_weights_keys.items():
            if tied in tensors and source in tensors and _is_same_storage(tensors[tied], tensors[source]):
                del tensors[tied]
        weights.write(directory, tensors, max_shard_size, safe_serialization)
        config = copy.deepcopy(self.config)
        # fully_shard makes a class of its own for each model, in front of the model's
        config.architectures = [type(self).__name__.removeprefix("FSDP")]
        floating = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
        config.dtype = floating[0] if floating else self.dtype
        config.save_pretrained(directory)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        config: BertConfig | str | os.PathLike[str] | None = None,
        state_dict: dict[str, Tensor] | None = None,
        dtype: torch.dtype | str | None = "auto",
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        attn_implementation: str | None = None,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        use_safetensors: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """A model in eval mode from a local folder, a weights file, or a hub id.

        Reads `model.safetensors`, `pytorch_model.bin` (whole or in shards), or Google's TensorFlow
        checkpoint (`bert_model.ckpt`), of any BERT class of transformers. `dtype="auto"` is the config's,
        else that of the weights; None is torch's default. A hub id is fetched with `huggingface_hub` and its
        `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`; `subfolder` works locally,
        too. Other keyword arguments override config fields or go to `__init__`; any other name is a
        TypeError.

        Newly initialised weights are warned about; `output_loading_info=True` also returns the missing,
        unexpected and mismatched keys. Raises OSError if there is nothing to read, a file is damaged or
        encoder weights are missing, UserError for another architecture, RuntimeError if shapes differ and
        `ignore_mismatched_sizes` is False. With None as the path, config and state_dict (whose tensors are
        copied) take the place of the files; an empty state_dict means freshly initialised.

        Weights are read straight into the model's memory: the peak is the size of the model and a tensor.
        """
        source = None
        if pretrained_model_name_or_path is not None:
            source = hub.open_files(pretrained_model_name_or_path, kwargs)
        elif state_dict is None or config is None:
            raise ValueError("from_pretrained without a path needs both state_dict and config")
        own_config, kwargs = loading.resolve_config(source, config, kwargs, attn_implementation)
        loading.refuse_unknown_arguments(cls, kwargs)
        is_fresh = source is None and not state_dict
        if state_dict is not None:
            tensors = {key: tensor.detach().clone() for key, tensor in state_dict.items()}
        else:
            assert source is not None
            tensors = weights.read(source, use_safetensors)
        own_config.dtype = wanted = loading.resolve_dtype(torch_dtype or dtype, own_config, tensors)

        # subclasses may own buffers and parameters that only a real construction fills
        is_ours = cls.__module__.startswith("fastbert.")
        with torch.device("meta") if is_ours else contextlib.nullcontext():
            model = cls(own_config, *model_args, **kwargs)
        info = loading.load_into(
            model,
            loading.convert_keys(tensors, model),
            device=torch.device(device) if device is not None else torch.get_default_device(),
            dtype=wanted,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            may_lack_encoder=is_fresh,
            where="state_dict" if source is None else source.name,
        )
        model.eval()
        return (model, vars(info)) if output_loading_info else model


def _require_grad(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


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
