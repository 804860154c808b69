"""Model outputs: ordered dictionaries with attributes, as transformers' ModelOutput.

`output.logits`, `output["logits"]`, `output[0]`, `output[:2]` and `output.to_tuple()` all work. A field that
is None is readable as an attribute but absent from keys, length and tuple. Iterating yields the keys.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


class ModelOutput(OrderedDict):
    """Base of the output dataclasses; see the module's docstring."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return self.to_tuple()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not None, in order."""
        return tuple(self.values())


@dataclass
class BaseModelOutputWithPoolingAndCrossAttentions(ModelOutput):
    last_hidden_state: Tensor | None = None  # [B, S, H], or [T, H] for a PackedBatch
    pooler_output: Tensor | None = None  # [B, H]
    hidden_states: tuple[Tensor, ...] | None = None  # L+1 of the shape of last_hidden_state
    cache: None = None
    attentions: tuple[Tensor, ...] | None = None  # L of [B, heads, S, S]
    cross_attentions: tuple[Tensor, ...] | None = None


@dataclass
class BertForPreTrainingOutput(ModelOutput):
    loss: Tensor | None = None
    prediction_logits: Tensor | None = None  # [B, S, V], or [T, V] for a PackedBatch
    seq_relationship_logits: Tensor | None = None  # [B, 2]
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class MaskedLMOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, S, V], or [T, V] for a PackedBatch
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class NextSentencePredictorOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, 2]
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class SequenceClassifierOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, labels]
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class TokenClassifierOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, S, labels], or [T, labels] for a PackedBatch
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class QuestionAnsweringModelOutput(ModelOutput):
    loss: Tensor | None = None
    start_logits: Tensor | None = None  # [B, S], or [T] for a PackedBatch
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class MultipleChoiceModelOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None  # [B, choices], or [sequences, 1] for a PackedBatch
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
