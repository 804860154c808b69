"""BERT for the tasks people fine-tune it on: transformers' classes, computed without pad tokens.

Every class takes transformers' arguments, or a PackedBatch as the first one. Token outputs are 0 at padding
on the default path (start and end logits: the dtype's minimum) and `[T, ...]` for a PackedBatch; sequence
outputs have a row for each sequence. Losses are means in fp32 at least; every keyword that is not an
argument is ignored, `num_items_in_batch` for one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.batch import IGNORE_INDEX, PackedBatch
from fastbert.config import BertConfig
from fastbert.layers import BertLMPredictionHead
from fastbert.modeling import BertModel, HeadedModel, VocabularyModel, is_labelled
from fastbert.outputs import (
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


class BertOnlyMLMHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)


class BertOnlyNSPHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


class BertForMaskedLM(VocabularyModel):
    """Encoder without pooler and the masked-language head; the decoder is tied to the word embeddings."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | PackedBatch | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """BertModel's arguments and labels [B, S] (IGNORE_INDEX takes no part) -> MaskedLMOutput.

        Without labels a PackedBatch that masks tokens brings its own.
        """
        kwargs |= {
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
        }
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self._encode(*inputs, kwargs=kwargs, reads=is_labelled(labels))
        logits = encoded.door.to_caller(self.cls.predictions(encoded.hidden))
        loss = None
        if labels is not None:
            loss = _token_loss(logits, labels)
        elif isinstance(input_ids, PackedBatch) and input_ids.masked_positions.numel():
            loss = ops.cross_entropy(logits[input_ids.masked_positions], input_ids.masked_labels)
        return self._answer(MaskedLMOutput(loss=loss, logits=logits), encoded, kwargs)


class BertForNextSentencePrediction(HeadedModel):
    """Encoder and the next-sentence head: label 0 = the second segment follows the first, 1 = it does not."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertOnlyNSPHead(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | PackedBatch | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """BertModel's arguments and labels [B] (IGNORE_INDEX takes no part) -> NextSentencePredictorOutput.

        Without labels a PackedBatch brings its own.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self._encode(*inputs, kwargs=kwargs, only_pooled=True)
        logits = self.cls.seq_relationship(encoded.pooled)
        if labels is None and isinstance(input_ids, PackedBatch):
            labels = input_ids.next_sentence_labels
        loss = None if labels is None else ops.cross_entropy(logits, labels.flatten())
        return self._answer(NextSentencePredictorOutput(loss=loss, logits=logits), encoded, kwargs)


class BertForSequenceClassification(HeadedModel):
    """Encoder, dropout and a linear classifier (or regression) on the pooled first token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config)
        self.dropout = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | PackedBatch | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """BertModel's arguments and labels -> SequenceClassifierOutput.

        `config.problem_type` decides the loss; if it is None the first labels do and it is stored:
        "regression" (mean squared error) if num_labels is 1, labels [B] or [B, 1];
        "single_label_classification" (cross-entropy; IGNORE_INDEX takes no part) for integer labels [B]; else
        "multi_label_classification" (binary cross-entropy of each), labels [B, num_labels].
        A PackedBatch has a row for each of its sequences, filler included.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self._encode(*inputs, kwargs=kwargs, only_pooled=True)
        assert encoded.pooled is not None
        logits = self.classifier(self.dropout(encoded.pooled))
        loss = None
        if labels is not None:
            if self.config.problem_type is None:
                self.config.problem_type = _infer_problem_type(self.num_labels, labels)
            loss = _sequence_loss(self.config.problem_type, logits, labels)
        return self._answer(SequenceClassifierOutput(loss=loss, logits=logits), encoded, kwargs)


class BertForTokenClassification(HeadedModel):
    """Encoder without pooler, dropout, and a linear classifier on every token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config, add_pooling_layer=False)
        self.dropout = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | PackedBatch | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """BertModel's arguments and labels [B, S], or [T] for a PackedBatch -> TokenClassifierOutput.

        Every label that is not IGNORE_INDEX counts, whatever the mask says.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self._encode(*inputs, kwargs=kwargs, reads=is_labelled(labels))
        logits = encoded.door.to_caller(self.classifier(self.dropout(encoded.hidden)))
        loss = None if labels is None else _token_loss(logits, labels)
        return self._answer(TokenClassifierOutput(loss=loss, logits=logits), encoded, kwargs)


class BertForQuestionAnswering(HeadedModel):
    """Encoder without pooler, and the start and end scores of an answer at every token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | PackedBatch | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """BertModel's arguments and both positions [B] or [B, 1] -> QuestionAnsweringModelOutput.

        At padding the logits are the dtype's minimum, so that pads take no part in the loss or an argmax. If
        a position is that of a pad, or with `attn_implementation="eager"`, every logit is computed and takes
        part, as in transformers. A position at or beyond the end is ignored, a negative one counts as 0. The
        positions of a PackedBatch count from the start of their sequence.
        """
        if self.num_labels != 2:
            raise ValueError(f"question answering needs num_labels = 2 (start, end), got {self.num_labels}")
        positions = None
        if start_positions is not None and end_positions is not None:
            positions = torch.stack([start_positions.flatten(), end_positions.flatten()]).clamp(min=0)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self._encode(*inputs, kwargs=kwargs, reads=_is_answer(positions, attention_mask))
        logits = self.qa_outputs(encoded.hidden)
        logits = encoded.door.to_caller(logits, fill=torch.finfo(logits.dtype).min)
        loss = None
        if positions is not None:
            if isinstance(input_ids, PackedBatch):
                rows, seqlens = _in_rows(logits, input_ids)
            else:
                rows, seqlens = logits, torch.full_like(positions[0], logits.shape[1])
            loss = _span_loss(rows, positions, seqlens)
        start_logits, end_logits = logits.unbind(dim=-1)
        output = QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits.contiguous(), end_logits=end_logits.contiguous()
        )
        return self._answer(output, encoded, kwargs)


class BertForMultipleChoice(HeadedModel):
    """Encoder, dropout and one score for each choice, on its pooled first token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | PackedBatch | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """BertModel's arguments with an axis of choices, ids [B, C, S], and labels [B] -> logits [B, C].

        Hidden states and attentions stay [B*C, ...]. A PackedBatch, which does not know of choices, gives
        logits [sequences, 1] and takes no labels.
        """
        if isinstance(input_ids, PackedBatch):
            if labels is not None:
                raise ValueError(
                    "a PackedBatch does not say how many choices a question has: leave out labels, and give "
                    "`logits.view(-1, choices)` to cross_entropy"
                )
            num_choices, inputs = 1, (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        else:
            given = input_ids if input_ids is not None else inputs_embeds
            wanted_axes = 3 if input_ids is not None else 4
            if given is None or given.dim() != wanted_axes:
                raise ValueError(
                    "multiple choice takes input_ids [batch, choices, seqlen] or inputs_embeds "
                    f"[batch, choices, seqlen, hidden], got {None if given is None else tuple(given.shape)}"
                )
            num_choices = given.shape[1]
            ids = (input_ids, attention_mask, token_type_ids, position_ids)
            inputs = (
                *(None if x is None else x.reshape(-1, x.shape[-1]) for x in ids),
                None if inputs_embeds is None else inputs_embeds.flatten(0, 1),
            )  # type: ignore[assignment]
        encoded = self._encode(*inputs, kwargs=kwargs, only_pooled=True)
        assert encoded.pooled is not None
        logits = self.classifier(self.dropout(encoded.pooled)).view(-1, num_choices)
        loss = None if labels is None else ops.cross_entropy(logits, labels.flatten())
        return self._answer(MultipleChoiceModelOutput(loss=loss, logits=logits), encoded, kwargs)


# ---- helpers


def _classifier_dropout(config: BertConfig) -> nn.Dropout:
    p = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return nn.Dropout(p)


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [..., C], labels [...] -> mean cross-entropy."""
    if labels.numel() != logits[..., 0].numel():
        raise ValueError(f"labels have shape {tuple(labels.shape)}, the tokens {tuple(logits.shape[:-1])}")
    return ops.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _infer_problem_type(num_labels: int, labels: Tensor) -> str:
    if num_labels == 1:
        return "regression"
    is_integer = labels.dtype in (torch.int64, torch.int32)
    return "single_label_classification" if is_integer else "multi_label_classification"


def _sequence_loss(problem_type: str, logits: Tensor, labels: Tensor) -> Tensor:
    """logits [B, C] and the labels of the problem -> mean loss."""
    batch_size, num_labels = logits.shape
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if problem_type == "single_label_classification":
        if labels.numel() != batch_size:
            raise ValueError(
                f"integer labels of shape {tuple(labels.shape)} for {batch_size} sequences: give one each or "
                "float labels for several at once"
            )
        return ops.cross_entropy(logits, labels.flatten().long())
    if labels.numel() != logits.numel():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}"
        )
    targets = labels.to(logits.dtype).view(batch_size, num_labels)
    if problem_type == "regression":
        return F.mse_loss(logits, targets)
    if problem_type == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, targets)
    raise ValueError(f"config.problem_type {problem_type!r} is not one of {', '.join(PROBLEM_TYPES)}")


def _is_answer(positions: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """positions [2, B], mask [B, S] -> [B, S] bool: where an answer begins or ends."""
    if positions is None or attention_mask is None or attention_mask.dim() != 2:
        return None
    places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (positions[..., None] == places).any(dim=0)


def _in_rows(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """logits [T, 2] -> ([B, max_seqlen, 2] with the dtype's minimum beyond each end, seqlens [B])."""
    starts, seqlens = batch.cu_seqlens[:-1].long(), batch.cu_seqlens.diff().long()
    offsets = torch.arange(batch.max_seqlen, device=logits.device)
    # beyond its end every sequence reads one row that is added here
    rows = F.pad(logits, (0, 0, 0, 1), value=torch.finfo(logits.dtype).min)
    places = (starts[:, None] + offsets).masked_fill(offsets >= seqlens[:, None], batch.num_slots)
    return rows[places], seqlens


def _span_loss(logits: Tensor, positions: Tensor, seqlens: Tensor) -> Tensor:
    """logits [B, S, 2], positions [2, B] -> mean of the losses of start and end."""
    if positions.shape[1] != logits.shape[0]:
        raise ValueError(
            f"{positions.shape[1]} answer positions for {logits.shape[0]} sequences: give one each"
        )
    targets = positions.masked_fill(positions >= seqlens, IGNORE_INDEX)
    start, end = (ops.cross_entropy(logits[..., i], targets[i]) for i in range(2))
    return (start + end) / 2
