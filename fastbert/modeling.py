"""BertModel and BertForPreTraining: Hugging Face's module tree, computed without pad tokens.

One layer serves two layouts. By default the kept tokens of a batch are gathered once, before the embeddings,
into one `[T, H]` tensor, and every sequence attends to itself (`SequenceLayout`). With
`attn_implementation="eager"`, a mask of three or four axes, or `output_attentions=True`, every position of the
padded `[B, S, H]` tensor is computed as transformers does (`PaddedLayout`). Forward hooks on a layer therefore
see `[T, H]` on the default path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastbert import ops
from fastbert.batch import IGNORE_INDEX, PackedBatch, PaddedBatch
from fastbert.config import BertConfig
from fastbert.ops import PaddedLayout, SequenceLayout
from fastbert.outputs import BaseModelOutputWithPoolingAndCrossAttentions, BertForPreTrainingOutput
from fastbert.pretrained import PretrainedModel

Layout = SequenceLayout | PaddedLayout


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor,
        position_ids: Tensor,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Ids [...] (or inputs_embeds [..., H] for the word part) -> [..., H]."""
        tables = (self.token_type_embeddings.weight, self.position_embeddings.weight)
        words = self.word_embeddings
        if inputs_embeds is None and ops.is_plain(words, nn.Embedding):
            assert input_ids is not None
            summed = ops.embed(
                input_ids, token_type_ids, position_ids, words.weight, *tables, padding_idx=words.padding_idx
            )
        else:
            embeds = words(input_ids) if inputs_embeds is None else inputs_embeds
            summed = ops.add_type_and_position(embeds, token_type_ids, position_ids, *tables)
        return self.dropout(self.LayerNorm(summed))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        # checkpoints up to transformers 4.30 stored this buffer
        state_dict.pop(prefix + "position_ids", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class BertSelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        if hidden_size % num_heads:
            raise ValueError(
                f"The hidden size ({hidden_size}) is not a multiple of the number of attention heads ({num_heads})"
            )
        self.num_attention_heads = num_heads
        self.attention_head_size = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(
        self, hidden_states: Tensor, layout: Layout, need_probabilities: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[..., H] -> (context [..., H], probabilities [B, heads, S, S] or None)."""
        qkv = ops.qkv_projection(hidden_states, self.query, self.key, self.value, self.num_attention_heads)
        dropout_p = self.dropout.p if self.dropout.training else 0.0
        probabilities = None
        if isinstance(layout, SequenceLayout):
            context = ops.varlen_attention(qkv, layout, dropout_p)
        else:
            context, probabilities = ops.padded_attention(qkv, layout, dropout_p, need_probabilities)
        return context.reshape(hidden_states.shape), probabilities


class _DenseAddNorm(nn.Module):
    """LayerNorm(dropout(dense(x)) + residual)."""

    def __init__(self, in_size: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(in_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        norm, dropout = self.LayerNorm, self.dropout
        if ops.is_plain(norm, nn.LayerNorm) and ops.is_plain(dropout, nn.Dropout):
            return ops.dropout_add_norm(
                hidden_states, residual, norm.weight, norm.bias, norm.eps, dropout.p, dropout.training
            )
        return norm(dropout(hidden_states) + residual)


class BertSelfOutput(_DenseAddNorm):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.hidden_size, config)


class BertOutput(_DenseAddNorm):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.intermediate_size, config)


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertSelfOutput(config)

    def forward(
        self,
        hidden_states: Tensor,
        layout: Layout,
        rows: Tensor | None = None,
        need_probabilities: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As BertLayer; with `rows` only these rows of the flattened token axis go on after the attention."""
        context, probabilities = self.self(hidden_states, layout, need_probabilities)
        if rows is not None:
            context = context.flatten(0, -2).index_select(0, rows)
            hidden_states = hidden_states.flatten(0, -2).index_select(0, rows)
        return self.output(context, hidden_states), probabilities


class BertIntermediate(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.hidden_act = config.hidden_act
        self.intermediate_act_fn = ops.activation(config.hidden_act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _dense_act(self.dense, hidden_states, self.hidden_act)


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(
        self,
        hidden_states: Tensor,
        layout: Layout,
        rows: Tensor | None = None,
        need_probabilities: bool = False,
    ) -> Any:
        """[..., H] -> [..., H], or [R, H] for R rows; with `need_probabilities` (that, [B, heads, S, S])."""
        attn_output, probabilities = self.attention(hidden_states, layout, rows, need_probabilities)
        hidden_states = self.output(self.intermediate(attn_output), attn_output)
        return (hidden_states, probabilities) if need_probabilities else hidden_states


@dataclass
class _EncoderOutput:
    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.checkpoint_every = 0  # 0 = keep all activations, n = recompute each n-th layer

    def forward(
        self,
        hidden_states: Tensor,
        layout: Layout,
        *,
        rows: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> _EncoderOutput:
        """[..., H] -> [..., H]; with `rows` [R] the last layer is finished for these rows only: [R, H]."""
        if rows is not None and not self.layer:
            hidden_states = hidden_states.flatten(0, -2).index_select(0, rows)
        collected, attentions = [hidden_states], []
        recompute = bool(self.checkpoint_every) and self.training and torch.is_grad_enabled()
        for index, layer in enumerate(self.layer):
            layer_rows = rows if index == len(self.layer) - 1 else None
            if recompute and index % self.checkpoint_every == 0:
                output = checkpoint(
                    layer, hidden_states, layout, layer_rows, output_attentions, use_reentrant=False
                )
            else:
                output = layer(hidden_states, layout, layer_rows, output_attentions)
            if output_attentions:
                output, probabilities = output
                attentions.append(probabilities)
            hidden_states = output
            if output_hidden_states:
                collected.append(hidden_states)
        return _EncoderOutput(
            hidden_states,
            tuple(collected) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
        )


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, first_tokens: Tensor) -> Tensor:
        """[B, H] of each sequence's first token -> [B, H]."""
        return self.activation(self.dense(first_tokens))


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.hidden_act = config.hidden_act
        self.transform_act_fn = ops.activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(_dense_act(self.dense, hidden_states, self.hidden_act))


class BertLMPredictionHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> logits [..., V]."""
        return self.decoder(self.transform(hidden_states))

    def loss(self, hidden_states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [P, H], labels [P] -> (sum of the losses, correct, count); logits never whole."""
        hidden_states = self.transform(hidden_states)
        if ops.is_plain(self.decoder, nn.Linear) and self.decoder.bias is not None:
            return ops.linear_cross_entropy(hidden_states, self.decoder.weight, self.decoder.bias, labels)
        return _cross_entropy_parts(self.decoder(hidden_states), labels)


class BertPreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


@dataclass
class _Encoded:
    """What the door hands to the heads: rows as computed, and how to give them the caller's shape."""

    hidden: Tensor  # [T, H] (unpadded or PackedBatch) or [B, S, H]
    pooled: Tensor | None  # [B, H]
    hidden_states: tuple[Tensor, ...] | None  # in the caller's shape
    attentions: tuple[Tensor, ...] | None
    to_caller: Callable[[Tensor], Tensor]  # rows like `hidden` -> [B, S, ...], or [T, ...] for a PackedBatch


class BertModel(PretrainedModel):
    """The encoder.

    `forward` takes transformers' arguments, or a PackedBatch as the only one. On the default path hidden
    states are exactly 0 at padding, and the pooler reads each sequence's first kept token.
    """

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
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
        cache: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Ids [B, S] -> BaseModelOutputWithPoolingAndCrossAttentions, or a tuple with return_dict=False.

        attention_mask: [B, S] of any dtype (nonzero = token), [B, 1 or heads, 1 or S, S] bool (True = keep) or
        additive float, [B, S, S]. Also accepts output_hidden_states, output_attentions (real probabilities),
        return_dict; ignores other keywords. Decoder arguments raise NotImplementedError.
        """
        _refuse_decoder_arguments(
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            cache=cache,
            past_key_values=kwargs.get("past_key_values"),
            head_mask=kwargs.get("head_mask"),
        )
        encoded = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **_output_flags(kwargs)
        )
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=encoded.to_caller(encoded.hidden),
            pooler_output=encoded.pooled,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
            cross_attentions=None if encoded.attentions is None else (),
        )
        return output if _wants_dict(self.config, kwargs) else output.to_tuple()

    def encode(
        self,
        input_ids: Tensor | PackedBatch | None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        compute_pads: bool = False,
    ) -> _Encoded:
        """The door: chooses the layout, embeds, runs the layers, pools. Used by every head."""
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        if output_attentions is None:
            output_attentions = bool(self.config.output_attentions)
        layout: Layout
        first: Tensor | None
        if isinstance(input_ids, PackedBatch):
            batch = input_ids
            if output_attentions:
                raise NotImplementedError("output_attentions=True needs padded input, not a PackedBatch")
            layout = _layout_of(batch)
            embedded = self.embeddings(batch.input_ids, batch.token_type_ids, batch.position_ids)
            first, is_empty, to_caller = _first_tokens(layout), _is_empty(layout), _identity
        else:
            ids, types, positions, embeds = self._padded_arguments(
                input_ids, token_type_ids, position_ids, inputs_embeds
            )
            batch_size, seqlen = positions.shape
            mask = _check_mask(attention_mask, batch_size, seqlen, self.config.num_attention_heads)
            is_key_mask = mask is None or mask.dim() == 2
            is_eager = self.config._attn_implementation == "eager" or compute_pads or output_attentions
            if is_eager or not is_key_mask:
                if mask is not None and mask.dim() == 2:
                    mask = mask[:, None, None, :]
                layout = PaddedLayout.build(mask)
                embedded = self.embeddings(ids, types, positions, embeds)
                first = is_empty = None
                to_caller = _identity
            else:
                indices, cu_seqlens = _kept_tokens(mask, batch_size, seqlen, positions.device)
                ids, types, positions, embeds = (
                    None if x is None else x.flatten(0, 1) if indices is None else x.flatten(0, 1)[indices]
                    for x in (ids, types, positions, embeds)
                )
                assert positions is not None
                layout = SequenceLayout.build(cu_seqlens, seqlen, positions.shape[0])
                embedded = self.embeddings(ids, types, positions, embeds)
                first, is_empty = _first_tokens(layout), None if indices is None else _is_empty(layout)

                def to_caller(rows: Tensor) -> Tensor:
                    return ops.pad_rows(rows, indices, batch_size, seqlen)

        encoded = self.encoder(
            embedded,
            layout,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden, pooled = encoded.last_hidden_state, None
        if self.pooler is not None:
            pooled = self.pooler(hidden[:, 0] if first is None else _take_first(hidden, first, is_empty))
        hidden_states = encoded.hidden_states
        if hidden_states is not None:
            hidden_states = tuple(to_caller(states) for states in hidden_states)
        return _Encoded(hidden, pooled, hidden_states, encoded.attentions, to_caller)

    def _padded_arguments(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """ids, types, positions [B, S] and embeds [B, S, H], defaults filled in and shapes checked."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        given = input_ids if input_ids is not None else inputs_embeds
        assert given is not None
        if given.dim() != (2 if inputs_embeds is None else 3):
            wanted = (
                "input_ids must be [batch, seqlen]"
                if inputs_embeds is None
                else ("inputs_embeds must be [batch, seqlen, hidden]")
            )
            raise ValueError(f"{wanted}, got shape {tuple(given.shape)}")
        batch_size, seqlen = given.shape[:2]
        if not batch_size or not seqlen:
            raise ValueError(f"the batch is empty: shape {tuple(given.shape)}")
        limit = self.config.max_position_embeddings
        if seqlen > limit:
            raise ValueError(f"sequence length {seqlen} is above max_position_embeddings = {limit}: truncate")
        if position_ids is None:
            position_ids = torch.arange(seqlen, device=given.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros(1, dtype=torch.long, device=given.device)
        shape = (batch_size, seqlen)
        return input_ids, token_type_ids.expand(shape), position_ids.expand(shape), inputs_embeds

    def encode_rows(self, batch: PackedBatch | PaddedBatch, rows: Tensor) -> Tensor:
        """The last hidden states [R, H] at `rows` [R] of the flattened token axis, for the losses.

        A PackedBatch finishes its last layer for these rows only; a PaddedBatch computes every position.
        """
        if isinstance(batch, PackedBatch):
            embedded = self.embeddings(batch.input_ids, batch.token_type_ids, batch.position_ids)
            return self.encoder(embedded, _layout_of(batch), rows=rows).last_hidden_state
        encoded = self.encode(
            batch.input_ids,
            batch.attention_mask,
            batch.token_type_ids,
            compute_pads=True,
            output_hidden_states=False,
            output_attentions=False,
        )
        return encoded.hidden.flatten(0, 1).index_select(0, rows)


@dataclass
class LossParts:
    """Sums and counts of one batch; the trainer divides once, by the counts of everything that it adds up."""

    mlm_sum: Tensor  # fp32 scalar with a graph
    mlm_count: Tensor  # int64 scalar
    mlm_correct: Tensor  # int64 scalar
    nsp_sum: Tensor
    nsp_count: Tensor
    nsp_correct: Tensor


class BertForPreTraining(PretrainedModel):
    """Encoder with the masked-language and next-sentence heads.

    On the default path token logits are exactly 0 at padding.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.post_init()

    def _tied_parameters(self) -> list[tuple[nn.Module, str, nn.Module, str]]:
        predictions = self.cls.predictions
        return [
            (predictions.decoder, "weight", self.bert.embeddings.word_embeddings, "weight"),
            (predictions.decoder, "bias", predictions, "bias"),
        ]

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder, and the bias that `cls.predictions` shares with it."""
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    def forward(
        self,
        input_ids: Tensor | PackedBatch | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """BertModel's arguments, labels [B, S] and next_sentence_label [B] -> BertForPreTrainingOutput.

        The loss, mean masked-language plus mean next-sentence loss in fp32, exists if both labels are given;
        IGNORE_INDEX takes no part. A PackedBatch brings its own labels and gives logits [T, V] and [B, 2].
        """
        _refuse_decoder_arguments(
            encoder_hidden_states=kwargs.get("encoder_hidden_states"),
            encoder_attention_mask=kwargs.get("encoder_attention_mask"),
            cache=kwargs.get("cache"),
            past_key_values=kwargs.get("past_key_values"),
            head_mask=kwargs.get("head_mask"),
        )
        encoded = self.bert.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            compute_pads=_labels_a_pad(labels, attention_mask),
            **_output_flags(kwargs),
        )
        token_logits = self.cls.predictions(encoded.hidden)
        nsp_logits = self.cls.seq_relationship(encoded.pooled)
        prediction_logits = encoded.to_caller(token_logits)
        loss = None
        if isinstance(input_ids, PackedBatch):
            batch = input_ids
            loss = _cross_entropy(prediction_logits[batch.masked_positions], batch.masked_labels)
            loss = loss + _cross_entropy(nsp_logits, batch.next_sentence_labels)
        elif labels is not None and next_sentence_label is not None:
            loss = _cross_entropy(prediction_logits.flatten(0, 1), labels.flatten())
            loss = loss + _cross_entropy(nsp_logits, next_sentence_label.flatten())
        output = BertForPreTrainingOutput(
            loss=loss,
            prediction_logits=prediction_logits,
            seq_relationship_logits=nsp_logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return output if _wants_dict(self.config, kwargs) else output.to_tuple()

    def loss_parts(self, batch: PackedBatch | PaddedBatch) -> LossParts:
        """Sums and counts of both losses; the vocabulary is reached by the masked rows only.

        A PackedBatch also finishes its last layer only for rows that a loss reads; a PaddedBatch computes
        every position, the textbook way. Labels equal to IGNORE_INDEX take no part; if all are, a sum is 0
        with a graph that gives zero gradients.
        """
        masked_positions, masked_labels = batch.masked_positions, batch.masked_labels
        if masked_labels.device.type == "cpu":
            # unused prediction slots cost a row each; leaving them out would synchronise a GPU
            is_used = masked_labels != IGNORE_INDEX
            masked_positions, masked_labels = masked_positions[is_used], masked_labels[is_used]
        if isinstance(batch, PackedBatch):
            first = (batch.cu_seqlens[:-1].long()).clamp(max=batch.num_slots - 1)
        else:
            num_rows, seqlen = batch.input_ids.shape
            first = torch.arange(0, num_rows * seqlen, seqlen, device=batch.input_ids.device)
        hidden = self.bert.encode_rows(batch, torch.cat([masked_positions, first]))
        mlm_hidden, first_hidden = hidden.split([masked_positions.shape[0], first.shape[0]])

        mlm_sum, mlm_correct, mlm_count = self.cls.predictions.loss(mlm_hidden, masked_labels)
        nsp_logits = self.cls.seq_relationship(self.bert.pooler(first_hidden))
        nsp_sum, nsp_correct, nsp_count = _cross_entropy_parts(nsp_logits, batch.next_sentence_labels)
        return LossParts(mlm_sum, mlm_count, mlm_correct, nsp_sum, nsp_count, nsp_correct)


# ---- helpers


def _dense_act(dense: nn.Module, x: Tensor, hidden_act: Any) -> Tensor:
    if ops.is_plain(dense, nn.Linear):
        return ops.linear_act(x, dense.weight, dense.bias, hidden_act)  # type: ignore[arg-type]
    return ops.activation(hidden_act)(dense(x))


def _identity(rows: Tensor) -> Tensor:
    return rows


def _layout_of(batch: PackedBatch) -> SequenceLayout:
    return SequenceLayout.build(batch.cu_seqlens, batch.max_seqlen, batch.num_slots)


def _first_tokens(layout: SequenceLayout) -> Tensor:
    return layout.cu_seqlens[:-1].long().clamp(max=max(layout.total_tokens - 1, 0))


def _is_empty(layout: SequenceLayout) -> Tensor:
    return layout.cu_seqlens.diff() == 0


def _take_first(hidden: Tensor, first: Tensor, is_empty: Tensor | None) -> Tensor:
    """hidden [T, H] at first [B]; zeros for empty sequences, which own no token."""
    if hidden.shape[0] == 0:
        return hidden.new_zeros(first.shape[0], hidden.shape[1])
    rows = hidden.index_select(0, first)
    return rows if is_empty is None else rows.masked_fill(is_empty[:, None], 0.0)


def _kept_tokens(
    mask: Tensor | None, batch_size: int, seqlen: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """(indices of the kept tokens or None for all, cu_seqlens)."""
    if mask is not None:
        indices, cu_seqlens = ops.unpad_indices(mask)
        if indices.shape[0] != batch_size * seqlen:
            return indices, cu_seqlens
    return None, torch.arange(0, (batch_size + 1) * seqlen, seqlen, dtype=torch.int32, device=device)


def _check_mask(mask: Tensor | None, batch_size: int, seqlen: int, num_heads: int) -> Tensor | None:
    """None, [B, S] bool, or [B or 1, heads or 1, S or 1, S] bool or additive float; else ValueError."""
    if mask is None:
        return None
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        if shape != (batch_size, seqlen):
            raise ValueError(f"attention_mask has shape {shape}, the input is ({batch_size}, {seqlen})")
        return mask != 0
    if mask.dim() == 3:
        if shape != (batch_size, seqlen, seqlen):
            raise ValueError(
                f"attention_mask has shape {shape}, three axes must be ({batch_size}, {seqlen}, {seqlen})"
            )
        return (mask != 0)[:, None]
    if mask.dim() != 4:
        raise ValueError(f"attention_mask has {mask.dim()} axes, it may have 2, 3 or 4")
    allowed = ((1, batch_size), (1, num_heads), (1, seqlen), (seqlen,))
    if any(size not in sizes for size, sizes in zip(shape, allowed)):
        raise ValueError(
            f"attention_mask has shape {shape}, four axes must broadcast to "
            f"({batch_size}, {num_heads}, {seqlen}, {seqlen})"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"a 4-D attention_mask must be bool (True = keep) or additive float, got {mask.dtype}: "
            "integers could mean either"
        )
    return mask


def _labels_a_pad(labels: Tensor | None, attention_mask: Tensor | None) -> bool:
    """Whether a label asks for a position that the mask leaves out, whose logits must then be computed."""
    if labels is None or attention_mask is None or attention_mask.dim() != 2:
        return False
    if labels.shape != attention_mask.shape:
        return False
    return bool(((labels != IGNORE_INDEX) & (attention_mask == 0)).any())


def _refuse_decoder_arguments(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is not supported: this BERT is an encoder without cross attention, caches or head masks"
            )


def _output_flags(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs.get(name) for name in ("output_hidden_states", "output_attentions")}


def _wants_dict(config: BertConfig, kwargs: dict[str, Any]) -> bool:
    wanted = kwargs.get("return_dict")
    return config.return_dict if wanted is None else bool(wanted)


def _upcast(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that are not IGNORE_INDEX (nan if there is none), in fp32 at least."""
    return F.cross_entropy(_upcast(logits), labels, ignore_index=IGNORE_INDEX)


def _cross_entropy_parts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [N, C], labels [N] -> (sum of the losses, correct, count)."""
    loss_sum = F.cross_entropy(_upcast(logits), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss_sum, (logits.argmax(dim=-1) == labels).sum(), (labels != IGNORE_INDEX).sum()
