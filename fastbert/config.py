"""BertConfig: Hugging Face's field names, types and JSON, and the named sizes.

Reads and writes the `config.json` of transformers and Google's `bert_config.json`; needs neither package.
Semantics after transformers 5.24 (`PreTrainedConfig`, `BertConfig`).
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from fastbert.errors import UserError
from fastbert.hub import ModelFiles, open_files

# layers x hidden of Google's published sizes; heads = hidden / 64, intermediate = 4 * hidden
SIZES: dict[str, tuple[int, int]] = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}

# "eager" computes every padded position; all other names mean the default path, which skips padding
ATTN_IMPLEMENTATIONS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)

_NONE = type(None)

# name: (default, accepted types); `float` alone refuses an int, as transformers does
_BERT_FIELDS: dict[str, tuple[Any, tuple[type, ...]]] = {
    "vocab_size": (30522, (int,)),
    "hidden_size": (768, (int,)),
    "num_hidden_layers": (12, (int,)),
    "num_attention_heads": (12, (int,)),
    "intermediate_size": (3072, (int,)),
    "hidden_act": ("gelu", (str,)),
    "hidden_dropout_prob": (0.1, (float, int)),
    "attention_probs_dropout_prob": (0.1, (float, int)),
    "max_position_embeddings": (512, (int,)),
    "type_vocab_size": (2, (int,)),
    "initializer_range": (0.02, (float,)),
    "layer_norm_eps": (1e-12, (float,)),
    "pad_token_id": (0, (int, _NONE)),
    "use_cache": (True, (bool,)),
    "classifier_dropout": (None, (float, int, _NONE)),
    "is_decoder": (False, (bool,)),
    "add_cross_attention": (False, (bool,)),
    "bos_token_id": (None, (int, _NONE)),
    "eos_token_id": (None, (int, list, _NONE)),
    "tie_word_embeddings": (True, (bool,)),
}
_COMMON_FIELDS: dict[str, tuple[Any, tuple[type, ...]]] = {
    "architectures": (None, (list, _NONE)),
    "chunk_size_feed_forward": (0, (int,)),
    "gradient_checkpointing": (False, (bool,)),
    "is_encoder_decoder": (False, (bool,)),
    "output_attentions": (False, (bool, _NONE)),
    "output_hidden_states": (False, (bool, _NONE)),
    "position_embedding_type": ("absolute", (str,)),
    "problem_type": (None, (str, _NONE)),
    "return_dict": (True, (bool,)),
}
_FIELDS = {**_BERT_FIELDS, **_COMMON_FIELDS}
_TWO_LABELS = {0: "LABEL_0", 1: "LABEL_1"}
# belongs to text generation; transformers moves these to another file
_GENERATION_KEYS = frozenset(
    {
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "num_beam_groups",
        "diversity_penalty",
    }
)
_NEVER_WRITTEN = frozenset({"_attn_implementation", "_name_or_path", "output_attentions"})


def _is_instance(value: Any, accepted: tuple[type, ...]) -> bool:
    if isinstance(value, bool):  # bool is an int to Python, not to a config
        return bool in accepted
    return isinstance(value, accepted)


def _to_dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, str):
        value = getattr(torch, value.removeprefix("torch."), value)
    if value is None or isinstance(value, torch.dtype):
        return value
    raise ValueError(f"dtype must be a torch.dtype or its name, got {value!r}")


class BertConfig:
    """Architecture and behaviour of a BERT, keyword-only.

    Fields and defaults are those of `transformers.BertConfig` 5.24. Types are checked on construction and on
    assignment (ValueError); ranges are not, the model does that. Unknown keywords become attributes and are
    written back to JSON. `attn_implementation="eager"` selects the padded textbook path of the models; it is
    not written to disk.
    """

    model_type = "bert"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args:
            raise ValueError(
                f"BertConfig takes keyword arguments only, got {len(args)} positional: {args[0]!r}"
            )
        for name, (default, _) in _FIELDS.items():
            setattr(self, name, kwargs.pop(name, default))
        kwargs.pop("model_type", None)
        torch_dtype = kwargs.pop("torch_dtype", None)
        self.dtype = kwargs.pop("dtype", None) or torch_dtype
        attn_implementation = kwargs.pop("attn_implementation", None)
        self._attn_implementation = kwargs.pop("_attn_implementation", attn_implementation)
        self._set_labels(
            kwargs.pop("id2label", None), kwargs.pop("label2id", None), kwargs.pop("num_labels", None)
        )
        if self.problem_type == "single_label_classification" and self.num_labels == 1:
            raise ValueError(
                "problem_type 'single_label_classification' needs num_labels of at least 2, got 1: "
                "use 'regression' or more labels"
            )
        for name, value in kwargs.items():
            if name not in _GENERATION_KEYS:
                setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS:
            accepted = _FIELDS[name][1]
            is_callable_act = name == "hidden_act" and callable(value)
            if not _is_instance(value, accepted) and not is_callable_act:
                names = " or ".join("None" if kind is _NONE else kind.__name__ for kind in accepted)
                raise ValueError(f"{name} must be {names}, got {type(value).__name__} {value!r}")
        elif name in ("dtype", "torch_dtype"):
            name, value = "dtype", _to_dtype(value)
        elif name == "_attn_implementation" and value not in (None, *ATTN_IMPLEMENTATIONS):
            raise ValueError(f"attn_implementation {value!r} is not one of {', '.join(ATTN_IMPLEMENTATIONS)}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # reached for missing attributes only, so that mypy and readers know that extra fields exist
        raise AttributeError(f"BertConfig has no field {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BertConfig) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BertConfig {self.to_json_string()}"

    # ---- labels

    def _set_labels(
        self,
        id2label: dict[Any, str] | None,
        label2id: dict[str, Any] | None,
        num_labels: int | None,
    ) -> None:
        self.id2label = dict(_TWO_LABELS) if id2label is None else {int(k): v for k, v in id2label.items()}
        if id2label is not None and num_labels is not None and num_labels != len(self.id2label):
            warnings.warn(
                f"num_labels={num_labels} does not fit id2label of {len(self.id2label)} entries: "
                "num_labels is used and the labels become LABEL_0, LABEL_1, ...",
                stacklevel=3,
            )
        self.label2id = label2id or {label: index for index, label in self.id2label.items()}
        if num_labels is not None:
            self.num_labels = num_labels

    @property
    def num_labels(self) -> int:
        """Number of labels; assigning another number gives generic label names."""
        return len(self.id2label)

    @num_labels.setter
    def num_labels(self, value: int) -> None:
        if not _is_instance(value, (int,)):
            raise ValueError(f"num_labels must be int, got {type(value).__name__} {value!r}")
        if value != len(self.id2label):
            self.id2label = {index: f"LABEL_{index}" for index in range(value)}
            self.label2id = {label: index for index, label in self.id2label.items()}

    # ---- other names of transformers

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return self.dtype

    @property
    def use_return_dict(self) -> bool:
        return self.return_dict

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> BertConfig:
        """Itself: BERT has no other modality."""
        return self

    # ---- named sizes

    @classmethod
    def named(cls, size: str, **overrides: Any) -> BertConfig:
        """The config of one of SIZES; keyword arguments replace single fields. Unknown size: ValueError."""
        if size not in SIZES:
            raise ValueError(f"size {size!r} is not one of {', '.join(SIZES)}")
        layers, hidden = SIZES[size]
        fields: dict[str, Any] = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": hidden // 64,
            "intermediate_size": 4 * hidden,
        }
        return cls(**{**fields, **overrides})

    # ---- dictionaries and JSON

    def to_dict(self) -> dict[str, Any]:
        """Every field, with `dtype` as a name; changing the result does not change the config."""
        values = {name: copy.deepcopy(value) for name, value in self.__dict__.items()}
        values["model_type"] = self.model_type
        values["dtype"] = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        values.pop("_attn_implementation")
        return values

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds: the BERT fields, and any other field that differs from its default."""
        values = self.to_dict()
        keep = {
            name: value
            for name, value in values.items()
            if name in _BERT_FIELDS
            or (name not in _COMMON_FIELDS and name not in ("id2label", "label2id", "dtype"))
            or (name in _COMMON_FIELDS and value != _COMMON_FIELDS[name][0])
        }
        if values["dtype"] is not None:
            keep["dtype"] = values["dtype"]
        if self.id2label != _TWO_LABELS:
            keep["id2label"], keep["label2id"] = values["id2label"], values["label2id"]
        return {name: value for name, value in keep.items() if name not in _NEVER_WRITTEN}

    def to_json_string(self, use_diff: bool = True) -> str:
        values = self.to_diff_dict() if use_diff else self.to_dict()
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        Path(json_file_path).write_text(self.to_json_string(use_diff), encoding="utf-8")

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write `config.json` into the folder, which is made if need be."""
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".config.json.{os.getpid()}"
        self.to_json_file(temporary)
        temporary.replace(directory / "config.json")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A config from a dictionary; keyword arguments that are its fields replace them.

        With `return_unused_kwargs=True` the result is (config, the keyword arguments that are no field).
        """
        return_unused = kwargs.pop("return_unused_kwargs", False)
        values = {**config_dict}
        attn_implementation = kwargs.pop("attn_implementation", None)
        known = {*_FIELDS, "dtype", "torch_dtype", "id2label", "label2id", "num_labels", *config_dict}
        for name in list(kwargs):
            if name in known:
                if name in ("dtype", "torch_dtype"):
                    values.pop("torch_dtype", None)
                    values.pop("dtype", None)
                if name == "id2label":
                    values.pop("label2id", None)
                values[name] = kwargs.pop(name)
        config = cls(**values, attn_implementation=attn_implementation)
        return (config, kwargs) if return_unused else config

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> BertConfig:
        return cls(**_read_json(Path(json_file)))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Read `config.json` (else Google's `bert_config.json`) of a folder or hub id, or a JSON file.

        Keyword arguments override fields; `return_unused_kwargs=True` gives (config, unused). `subfolder` and
        huggingface_hub's `revision`, `token`, `cache_dir`, `force_download`, `local_files_only` say where.
        OSError when nothing is there, UserError for the config of another architecture.
        """
        return cls.from_files(open_files(pretrained_model_name_or_path, kwargs), **kwargs)

    @classmethod
    def from_files(cls, files: ModelFiles, **kwargs: Any) -> Any:
        """As `from_pretrained`, of files that are found already."""
        if files.given is not None and files.given.suffix == ".json":
            return cls.from_dict(_read_json(files.given), **kwargs)
        names = ("config.json", "bert_config.json")
        for name in names:
            path = files.get(name)
            if path is not None:
                values = _read_json(path)
                model_type = values.get("model_type", cls.model_type)
                if model_type != cls.model_type:
                    raise UserError(f"{path} is of model_type {model_type!r}: fastbert reads 'bert' only")
                return cls.from_dict(values, **kwargs)
        raise files.absent(names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise OSError(f"{path} is no valid JSON file: {error}") from error
    if not isinstance(values, dict):
        raise OSError(f"{path} holds a JSON {type(values).__name__}, a config is an object")
    return values
