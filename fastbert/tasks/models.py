"""A pre-trained body under a task's head, from any folder or hub id."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer

from fastbert import hub
from fastbert.config import BertConfig
from fastbert.data.tokenizer import load_tokenizer, vocabulary_size
from fastbert.errors import UserError
from fastbert.pretrained import PretrainedModel
from fastbert.tasks.task import Say
from fastbert.train.checkpoint import model_folder

_GENERIC = re.compile(r"LABEL_\d+")
_Model = TypeVar("_Model", bound=PretrainedModel)


def source_folder(source: str | Path, say: Say) -> Path:
    """The local folder of a model: itself, a run's newest checkpoint, or a copy of a hub id.

    Raises UserError for what is none of these, or holds no BERT.
    """
    try:
        folder = model_folder(hub.local_folder(source), say)
    except OSError as error:
        raise UserError(str(error)) from error
    model_type = source_config(folder).get("model_type", "bert")
    if model_type != "bert":
        raise UserError(f"{folder} holds a model of type {model_type!r}; only BERT runs here")
    return folder


def source_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, without truncation and padding; a literal [SEP] is one, as in transformers.

    Raises UserError where there is none, or where it has more ids than the model.
    """
    tokenizer = load_tokenizer(folder)
    tokenizer.encode_special_tokens = False
    rows = source_config(folder).get("vocab_size")
    if rows is not None and vocabulary_size(tokenizer) > rows:
        raise UserError(
            f"the tokenizer of {folder} has {vocabulary_size(tokenizer)} ids, but the embedding table has "
            f"{rows} rows; put the model's own tokenizer there"
        )
    return tokenizer


def head_labels(folder: Path, head: type[PretrainedModel]) -> list[str] | None:
    """The label names of a folder whose weights are of this class, in order; None for any other folder."""
    config = source_config(folder)
    if head.__name__ not in (config.get("architectures") or []):
        return None
    names = BertConfig.from_pretrained(folder).id2label
    return [names[index] for index in range(len(names))]


def are_generic(labels: list[str]) -> bool:
    """Whether the names are LABEL_0, LABEL_1, …, which stand for nothing."""
    return all(_GENERIC.fullmatch(label) for label in labels)


def load_head(
    head: type[_Model],
    folder: Path,
    say: Say,
    *,
    labels: list[str] | None = None,
    problem_type: str | None = None,
    new_head: bool = False,
) -> _Model:
    """The model of this class with the folder's weights in fp32; what they lack is initialised, and said.

    `labels` and `problem_type` are written into its config; without `labels` the folder's stay. With
    `new_head` everything outside the encoder and its pooler is initialised anew. Draws from torch's global
    generator. UserError for weights that cannot be loaded.
    """
    config = BertConfig.from_pretrained(folder)
    if labels is not None:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
        config.problem_type = problem_type
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is new is said below
            model, info = head.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=new_head,
                output_loading_info=True,
            )
    except (OSError, ValueError, NotImplementedError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be loaded as a {head.__name__}: {error}") from error
    fresh = set(info["missing_keys"])
    if new_head:
        for name, module in model.named_modules():
            if name and name.split(".")[0] != model.base_model_prefix:
                model._init_weights(module)
                fresh |= {f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)}
    if fresh:
        say(f"new weights: {', '.join(sorted(fresh))}")
    unused = {key.split(".")[0] for key in info["unexpected_keys"]}
    if unused:
        say(f"not used of {folder}: {', '.join(sorted(unused))}")
    return model


def source_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as it stands there; UserError without one."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no config.json; give a model folder or a hub id")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable JSON file ({error}): mend or remove it") from error
    return config if isinstance(config, dict) else {}
