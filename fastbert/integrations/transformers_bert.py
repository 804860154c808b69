"""transformers' BERT computed without padding: subclasses of its encoder, its layer and token-level heads.

`accelerate` gives modules these classes; nothing is copied and no state is added, so parameters, pickling,
`deepcopy`, adapters and data parallelism work as before. The encoder gathers the kept tokens of the batch
once, its layers run on them through fastbert's operations, and the result is padded again. A layer receives
an `_Unpadded` in the place of the attention mask; with any other mask it is transformers' own.

Importing this module imports transformers. Written against 4.57 and 5.24.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert import modeling_bert as hf

from fastbert import ops
from fastbert.batch import IGNORE_INDEX
from fastbert.ops import SequenceLayout

# a score this far below the others has no probability left in any dtype
_DROPPED = -1e4
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# arguments of the encoder that change what it computes
_UNSUPPORTED_ARGUMENTS = (
    "encoder_hidden_states", "cache", "past_key_values", "head_mask", "output_attentions", "cu_seq_lens_q",
)  # fmt: skip
# transformers' activation modules that are exactly one of ours, and can be fused by name
_ACTIVATIONS = {type(ACT2FN[name]): name for name in ("gelu", "gelu_new", "relu")}
# transformers 4: a layer returns (hidden_states, ...), and the encoder collects the hidden states; from 5 on
# hooks on the layers do
_LAYER_RETURNS_TUPLE = "output_hidden_states" in inspect.signature(hf.BertEncoder.forward).parameters

_every_position: ContextVar[bool] = ContextVar("fastbert_every_position", default=False)


@dataclass(frozen=True)
class _Unpadded:
    """Which rows of a padded batch [B, S] are computed, end to end; made once per forward.

    A sequence whose first position is padding keeps it as a query (`pooler` and classifiers read it), but
    not as a key.
    """

    layout: SequenceLayout
    indices: Tensor | None  # [T] int64 into the flattened B*S axis; None: all of them
    shape: tuple[int, int]
    key_mask: Tensor | None  # [T] bool, where some row is no key

    @classmethod
    def build(cls, keep: Tensor | None, shape: tuple[int, int], device: torch.device) -> _Unpadded:
        """keep [B, S] bool, or None for every position."""
        rows = keep
        if keep is not None:
            rows = keep.clone()
            rows[:, 0] = True
        indices, cu_seqlens = ops.kept_tokens(rows, *shape, device)
        key_mask = None
        if keep is not None and not bool(keep[:, 0].all()):
            key_mask = keep.flatten() if indices is None else keep.flatten()[indices]
        total_tokens = shape[0] * shape[1] if indices is None else indices.shape[0]
        return cls(SequenceLayout.build(cu_seqlens, shape[1], total_tokens), indices, shape, key_mask)

    def gather(self, padded: Tensor) -> Tensor:
        """[B, S, H] -> [T, H]."""
        return ops.unpad_rows(padded, self.indices)

    def pad(self, rows: Tensor) -> Tensor:
        """[T, H] -> [B, S, H], 0 where no row goes."""
        return ops.pad_rows(rows, self.indices, *self.shape)


class BertEncoder(hf.BertEncoder):
    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        unpadded = self._unpad(hidden_states, attention_mask, args, kwargs)
        if unpadded is None:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        autocast = ops.backend.autocast_dtype(hidden_states.device) is not None
        rows = unpadded.gather(hidden_states)
        collects = _LAYER_RETURNS_TUPLE and bool(kwargs.get("output_hidden_states"))
        states: tuple[Tensor, ...] | None = (unpadded.pad(rows),) if collects else None
        for index, layer in enumerate(self.layer):
            has_hooks = bool(layer._forward_hooks or layer._forward_pre_hooks)
            # what a caller sees is fp32 under autocast, as behind torch's LayerNorm
            fp32_out = autocast and (has_hooks or collects or index == len(self.layer) - 1)
            if _inner_problem(layer):
                rows = unpadded.gather(_first(layer(unpadded.pad(rows), attention_mask)))
            elif has_hooks:
                rows = unpadded.gather(_first(layer(unpadded.pad(rows), unpadded, fp32_out=fp32_out)))
            else:
                rows = _first(layer(rows, unpadded, fp32_out=fp32_out))
            if states is not None:
                states += (unpadded.pad(rows),)
        last_hidden_state = unpadded.pad(rows) if states is None else states[-1]
        if kwargs.get("return_dict") is False:
            return (last_hidden_state,) if states is None else (last_hidden_state, states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=last_hidden_state, hidden_states=states
        )

    def _unpad(
        self, hidden_states: Tensor, mask: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Unpadded | None:
        """None where this call is transformers' own."""
        config = self.config
        if args or any(_is_given(kwargs.get(name)) for name in _UNSUPPORTED_ARGUMENTS):
            return None
        # transformers 5 takes this flag from the config, too
        if kwargs.get("output_attentions") is None and getattr(config, "output_attentions", False):
            return None
        if _model_problem(config) or torch.jit.is_tracing() or _is_exporting() or _every_position.get():
            return None
        if not hidden_states.numel() or not (mask is None or isinstance(mask, Tensor)):
            return None
        shape = (hidden_states.shape[0], hidden_states.shape[1])
        keep = None
        if mask is not None:
            keep = _kept_positions(mask, shape)
            if keep is None:
                return None
        return _Unpadded.build(keep, shape, hidden_states.device)


class BertLayer(hf.BertLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(attention_mask, _Unpadded):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        unpadded, is_padded = attention_mask, hidden_states.dim() == 3
        rows = unpadded.gather(hidden_states) if is_padded else hidden_states
        rows = _layer(self, rows, unpadded, **kwargs)
        output = unpadded.pad(rows) if is_padded else rows
        return (output,) if _LAYER_RETURNS_TUPLE else output


def _layer(layer: Any, rows: Tensor, unpadded: _Unpadded, fp32_out: bool) -> Tensor:
    """One layer of BERT on rows [T, H]."""
    attention, output = layer.attention.self, layer.attention.output
    qkv = ops.qkv_projection(
        rows, attention.query, attention.key, attention.value, attention.num_attention_heads
    )
    dropout_p = attention.dropout.p if attention.training else 0.0
    context = ops.varlen_attention(qkv, unpadded.layout, dropout_p, unpadded.key_mask).flatten(1)
    rows = ops.dense_dropout_add_norm(context, output.dense, output.dropout, rows, output.LayerNorm)
    dense, act = layer.intermediate.dense, layer.intermediate.intermediate_act_fn
    if ops.is_plain(dense, nn.Linear):
        inner = ops.linear_act(rows, dense.weight, dense.bias, _ACTIVATIONS.get(type(act), act))
    else:
        inner = act(dense(rows))
    output = layer.output
    return ops.dense_dropout_add_norm(inner, output.dense, output.dropout, rows, output.LayerNorm, fp32_out)


# ---- heads that read every position -----------------------------------------------------------------------


def _with_labels_at_padding(forward: Any) -> Any:
    """`forward` of a head, with every position computed where a label stands at padding and so counts."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = _by_name(forward, self, args, kwargs)
        token = _every_position.set(_labels_a_pad(arguments.get("labels"), arguments.get("attention_mask")))
        try:
            return forward(self, *args, **kwargs)
        finally:
            _every_position.reset(token)

    return wrapped


class BertForMaskedLM(hf.BertForMaskedLM):
    forward = _with_labels_at_padding(hf.BertForMaskedLM.forward)


class BertForPreTraining(hf.BertForPreTraining):
    forward = _with_labels_at_padding(hf.BertForPreTraining.forward)


class BertForTokenClassification(hf.BertForTokenClassification):
    forward = _with_labels_at_padding(hf.BertForTokenClassification.forward)


class BertForQuestionAnswering(hf.BertForQuestionAnswering):
    @functools.wraps(hf.BertForQuestionAnswering.forward)
    def forward(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers', with the least number of the dtype as logits at padding."""
        theirs = hf.BertForQuestionAnswering.forward
        arguments = _by_name(theirs, self, args, kwargs)
        starts, ends = (arguments.pop(name, None) for name in ("start_positions", "end_positions"))
        return_dict = arguments.pop("return_dict", None)
        output = theirs(self, **arguments, return_dict=True)
        mask = arguments.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            least = torch.finfo(output.start_logits.dtype).min
            output.start_logits = output.start_logits.masked_fill(mask == 0, least)
            output.end_logits = output.end_logits.masked_fill(mask == 0, least)
        if starts is not None and ends is not None:
            start_loss = _position_loss(output.start_logits, starts)
            loss = (start_loss + _position_loss(output.end_logits, ends)) / 2
            output = type(output)(loss=loss, **output)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


def _position_loss(logits: Tensor, positions: Tensor) -> Tensor:
    """Positions beyond the end take no part; negative ones mean position 0, as in transformers."""
    seqlen = logits.shape[1]
    return nn.functional.cross_entropy(logits, positions.view(-1).clamp(0, seqlen), ignore_index=seqlen)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    hf.BertEncoder: BertEncoder,
    hf.BertLayer: BertLayer,
    hf.BertForMaskedLM: BertForMaskedLM,
    hf.BertForPreTraining: BertForPreTraining,
    hf.BertForTokenClassification: BertForTokenClassification,
    hf.BertForQuestionAnswering: BertForQuestionAnswering,
}


# ---- taking over ------------------------------------------------------------------------------------------


def take_over(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """(names of the BERTs that were taken over, {name: reason} of models that were not)."""
    from transformers import PreTrainedModel

    accelerated: list[str] = []
    left: dict[str, str] = {}
    inside_a_head: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, hf.BertModel):
            problem = _encoder_problem(module)
            if problem:
                left[name] = problem
                continue
            accelerated.append(name)
            _change_class(module.encoder)
            for layer in module.encoder.layer:
                _change_class(layer)
        elif isinstance(module, PreTrainedModel) and module not in inside_a_head:
            has_bert = any(isinstance(part, hf.BertModel) for part in module.modules())
            if not has_bert:
                left[name] = f"{type(module).__name__} is no BERT of transformers"
                inside_a_head.update(module.modules())
            elif type(module) in _CLASSES and not _encoder_problem(module.bert):
                _change_class(module)
    if not accelerated and not left:
        left[""] = "no BERT of transformers is in it"
    return accelerated, left


def give_back(model: nn.Module) -> None:
    originals = {ours: theirs for theirs, ours in _CLASSES.items()}
    for module in model.modules():
        module.__class__ = originals.get(type(module), type(module))


def _change_class(module: nn.Module) -> None:
    module.__class__ = _CLASSES.get(type(module), type(module))


def _encoder_problem(bert: Any) -> str:
    """Why this BertModel cannot be taken over, or ""."""
    encoder = bert.encoder
    modules = [encoder, *encoder.layer]
    for module, theirs in zip(modules, [hf.BertEncoder] + [hf.BertLayer] * len(encoder.layer)):
        if type(module) not in (theirs, _CLASSES[theirs]):
            return (
                f"its {theirs.__name__} is a {type(module).__name__}: accelerate the model before wrapping it"
            )
        if "forward" in module.__dict__:
            return f"forward of its {theirs.__name__} was replaced: accelerate the model before wrapping it"
    return _model_problem(bert.config)


def _model_problem(config: Any) -> str:
    if config.is_decoder:
        return "it is a decoder, and only encoders run without padding"
    if config.add_cross_attention:
        return "it has cross attention"
    position_embedding_type = getattr(config, "position_embedding_type", "absolute")
    # transformers 5 reads only absolute positions, whatever the config says
    if _LAYER_RETURNS_TUPLE and position_embedding_type != "absolute":
        return f"its positions are {position_embedding_type!r}, not absolute"
    if config._attn_implementation not in _ATTENTION:
        return f"its attention is {config._attn_implementation!r}, a function of its own"
    return ""


def _inner_problem(layer: Any) -> bool:
    """Whether modules of the layer that would be passed over are more than transformers made of them."""
    for module in (
        layer.attention, layer.attention.self, layer.attention.output, layer.intermediate, layer.output,
    ):  # fmt: skip
        if type(module).__module__ != hf.__name__ or "forward" in module.__dict__:
            return True
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        # transformers' own hooks wait there for attention maps, and do nothing without them
        if any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks):
            return True
        if module._backward_hooks or module._backward_pre_hooks:
            return True
    return False


# ---- masks and arguments ----------------------------------------------------------------------------------


def _kept_positions(mask: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """[B, S] bool of a mask that BertModel made of the caller's, or None if it is more than that."""
    if mask.dim() == 2 and mask.shape == shape:
        return mask != 0
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[-1] != shape[1]:
        return None
    keys = mask[:, 0, 0]
    is_key_mask = (mask == mask[:, :, :1]).all() if mask.shape[2] > 1 and mask.stride(2) else None
    if mask.dtype == torch.bool:
        keep = keys
    elif mask.is_floating_point():
        keep = keys == 0
        is_whole = (keep | (keys <= _DROPPED)).all()
        is_key_mask = is_whole if is_key_mask is None else is_key_mask & is_whole
    else:
        return None
    if is_key_mask is not None and not bool(is_key_mask):
        return None
    return keep.expand(shape)


def _labels_a_pad(labels: Tensor | None, attention_mask: Tensor | None) -> bool:
    if labels is None or attention_mask is None or labels.shape != attention_mask.shape:
        return False
    return bool(((labels != IGNORE_INDEX) & (attention_mask == 0)).any())


def _by_name(forward: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return dict(kwargs)
    arguments = inspect.signature(forward).bind_partial(model, *args, **kwargs).arguments
    extra = arguments.pop("kwargs", {})
    arguments.pop("self")
    return {**arguments, **extra}


def _first(output: Any) -> Tensor:
    hidden_states: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_states


def _is_given(value: Any) -> bool:
    """Not None, False, or transformers 4's head mask of Nones."""
    if isinstance(value, (list, tuple)):
        return any(item is not None for item in value)
    return value is not None and value is not False


def _is_exporting() -> bool:
    return torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting()
