"""What a user would pick instead, each behind the one name by which rows call it.

Every function here either returns something to call or raises: a library that is not installed, is another
one of the same name, or has another interface than the published one is an exception whose words become the
row's reason for leaving that side out (`benchmarks.task.Task.admit`). Nothing is imported early.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.batch import IGNORE_INDEX

# seconds that a row may spend in torch.compile; what has begun then is finished
COMPILE_SECONDS = 10.0
# forms of one function that stay compiled: every peer is one, and shapes may make more of it
COMPILED_FORMS = 64


class MissingPeer(ImportError):
    """A library that is there under its name, but is not the one that is meant."""


# ---- torch.compile ----------------------------------------------------------------------------------------


@dataclass
class Compiler:
    """torch.compile with a limit on the time that it may take in all."""

    left_s: float = COMPILE_SECONDS
    seconds: dict[str, float] = field(default_factory=dict)  # name -> its first calls

    def __call__(self, name: str, function: Any, warm_up: Callable[[Any], object]) -> Any:
        """`function` compiled; `warm_up` calls it with every shape that it will see.

        RuntimeError if no time is left.
        """
        if self.left_s <= 0:
            raise RuntimeError("no time is left for torch.compile")
        if not self.seconds:
            torch.compiler.reset()  # what other rows compiled takes memory, and counts as forms
        torch._dynamo.config.recompile_limit = COMPILED_FORMS
        compiled = torch.compile(function, dynamic=True)
        begin = time.perf_counter()
        try:
            warm_up(compiled)
        finally:
            self.seconds[name] = time.perf_counter() - begin
            self.left_s -= self.seconds[name]
        return compiled


# ---- transformers -----------------------------------------------------------------------------------------


def transformers_model(
    kind: str, config: Any, state: dict[str, Tensor], attention: str, **arguments: Any
) -> Any:
    """`transformers.<kind>` with these weights, and "eager" or "sdpa" attention."""
    transformers = importlib.import_module("transformers")
    theirs = transformers.BertConfig(**config.to_diff_dict(), attn_implementation=attention)
    model = getattr(transformers, kind)(theirs, **arguments)
    model.load_state_dict(state)
    return model


# ---- flash-attn -------------------------------------------------------------------------------------------


def flash_attn_config(config: Any) -> Any:
    """A transformers config with the switches of flash-attn's BERT: unpadded, heads on asked rows."""
    transformers = importlib.import_module("transformers")
    theirs = transformers.BertConfig(**config.to_diff_dict())
    switches = {
        "use_flash_attn": True,
        "dense_seq_output": True,
        "last_layer_subset": True,
        "fused_bias_fc": False,
        "fused_dropout_add_ln": False,
        "position_embedding_type": "absolute",  # asked for, and gone from transformers 5
    }
    for name, value in switches.items():
        setattr(theirs, name, value)
    return theirs


def flash_attn_bert(config: Any, state: dict[str, Tensor]) -> nn.Module:
    """flash-attn's BertForPreTraining with these weights (names as in transformers)."""
    module = importlib.import_module("flash_attn.models.bert")
    theirs = flash_attn_config(config)
    model: nn.Module = module.BertForPreTraining(theirs)
    model.load_state_dict(module.remap_state_dict(state, theirs))
    return model


def flash_attn_encoder(config: Any, state: dict[str, Tensor]) -> nn.Module:
    """flash-attn's BertModel without pooler, with the weights of a transformers BertModel."""
    module = importlib.import_module("flash_attn.models.bert")
    theirs = flash_attn_config(config)
    theirs.last_layer_subset = theirs.dense_seq_output = False
    model: nn.Module = module.BertModel(theirs, add_pooling_layer=False)
    renamed = module.remap_state_dict({f"bert.{name}": t for name, t in state.items()}, theirs)
    model.load_state_dict({name.removeprefix("bert."): t for name, t in renamed.items()})
    return model


def flash_attn_arguments(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' arguments as flash-attn's BERT takes them: its label that is not asked is 0."""
    labels = arguments["labels"]
    return arguments | {"labels": labels.masked_fill(labels == IGNORE_INDEX, 0)}


def flash_attn_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, p: float) -> Tensor:
    """q, k, v [T, heads, D] -> [T, heads, D]."""
    module = importlib.import_module("flash_attn")
    out: Tensor = module.flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, dropout_p=p
    )
    return out


def flash_attn_unpad(x: Tensor, indices: Tensor) -> Tensor:
    """x [B, S, H] -> rows [T, H]."""
    module = importlib.import_module("flash_attn.bert_padding")
    rows: Tensor = module.index_first_axis(x.flatten(0, 1), indices)
    return rows


def flash_attn_pad(rows: Tensor, indices: Tensor, batch_size: int, seqlen: int) -> Tensor:
    module = importlib.import_module("flash_attn.bert_padding")
    x: Tensor = module.pad_input(rows, indices, batch_size, seqlen)
    return x


# ---- torch's own ------------------------------------------------------------------------------------------


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """torch's variable-length attention, which has no dropout; on CUDA only."""
    module = importlib.import_module("torch.nn.attention.varlen")
    out: Tensor = module.varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    return out


def padded_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, p: float) -> Tensor:
    """q, k, v [B, S, heads, D] and mask [B, S] bool -> [B, S, heads, D]."""
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*rows, attn_mask=mask[:, None, None, :], dropout_p=p)
    return out.transpose(1, 2)


# ---- NVIDIA apex ------------------------------------------------------------------------------------------


def apex(module: str) -> Any:
    """`apex.<module>` of NVIDIA's apex. MissingPeer for the one on PyPI, another package."""
    optimizers = importlib.import_module("apex.optimizers")
    if not hasattr(optimizers, "FusedLAMB"):
        raise MissingPeer("this apex has no apex.optimizers.FusedLAMB: it is not NVIDIA's")
    return importlib.import_module(f"apex.{module}")


def fused_lamb(groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """apex's FusedLAMB, clipping to 1; it takes fp32 and fp16 parameters, no bf16."""
    optimizer: torch.optim.Optimizer = apex("optimizers").FusedLAMB(groups, max_grad_norm=1.0, **options)
    return optimizer


def fused_layer_norm(weight: Tensor, bias: Tensor, eps: float) -> nn.Module:
    """apex's FusedLayerNorm with these parameters."""
    norm: nn.Module = apex("normalization").FusedLayerNorm(weight.shape[0], eps=eps)
    return _with_parameters(norm, weight, bias)


def _with_parameters(norm: Any, weight: Tensor, bias: Tensor) -> nn.Module:
    norm.weight, norm.bias = (nn.Parameter(t.detach().clone()) for t in (weight, bias))
    module: nn.Module = norm
    return module


# ---- Liger ------------------------------------------------------------------------------------------------


def liger_layer_norm(weight: Tensor, bias: Tensor, eps: float) -> nn.Module:
    module = importlib.import_module("liger_kernel.transformers")
    return _with_parameters(module.LigerLayerNorm(weight.shape[0], eps=eps), weight, bias)


def liger_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Sum of the losses over whole logits, which Liger overwrites with their gradient."""
    functional = importlib.import_module("liger_kernel.transformers.functional")
    loss: Tensor = functional.liger_cross_entropy(F.linear(hidden, weight, bias), labels, reduction="sum")
    return loss


def liger_linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """The same without whole logits."""
    functional = importlib.import_module("liger_kernel.transformers.functional")
    loss: Tensor = functional.liger_fused_linear_cross_entropy(
        hidden, weight, labels, bias=bias, reduction="sum"
    )
    return loss


# ---- whole models against ours ----------------------------------------------------------------------------

PaddedArguments = dict[str, Tensor]


def length_sorted(arguments: PaddedArguments, rows: int) -> list[PaddedArguments]:
    """A padded batch as batches of at most `rows` rows of similar lengths, each padded to its longest."""
    lengths = arguments["attention_mask"].sum(dim=1)
    order = lengths.argsort(stable=True)
    parts = []
    for chosen in order.split(rows):
        longest = int(lengths[chosen].max())
        parts.append(
            {
                name: values[chosen] if values.dim() == 1 else values[chosen, :longest]
                for name, values in arguments.items()
            }
        )
    return parts


@dataclass(frozen=True)
class ModelPeer:
    """A model of another library: its batches, and how a step or an encoding runs them."""

    name: str
    make: Callable[[], Any]  # -> the model, or an exception
    batches: Sequence[PaddedArguments]
    compiled: bool = False


def model_peers(
    kind: str,
    config: Any,
    state: dict[str, Tensor],
    arguments: PaddedArguments,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    sorted_rows: int,
    forms: str = "all",
    **options: Any,
) -> Iterator[ModelPeer]:
    """transformers' `kind` in every form: attention, plain and compiled, padded and length-sorted.

    `forms` may also be "plain", which is sdpa as it comes, padded; or "compiled", which adds its best: sorted
    and compiled. `state` are the weights, converted to `dtype` if one is given; `options` are the model's.
    """
    padded, by_length = [arguments], length_sorted(arguments, sorted_rows)

    def make(attention: str) -> Callable[[], Any]:
        return lambda: transformers_model(kind, config, state, attention, **options).to(device, dtype)

    for attention in ("sdpa", "eager"):
        for compiled in (False, True):
            for way, batches in (("", padded), (", sorted", by_length)):
                name = f"transformers {attention}{' compiled' if compiled else ''}{way}"
                is_plain = attention == "sdpa" and not compiled and not way
                if is_plain or forms == "all" or (forms == "compiled" and attention == "sdpa"):
                    name = "transformers" if is_plain else name
                    yield ModelPeer(name, make(attention), batches, compiled)


def precision(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """autocast to `dtype`, or nothing."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)
