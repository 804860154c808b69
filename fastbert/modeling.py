"""BertModel, BertForPreTraining and the base of all heads: Hugging Face's tree, without pad tokens.

One layer serves two layouts. By default the kept tokens of a batch are gathered once, before the embeddings,
into one `[T, H]` tensor, and every sequence attends to itself (`SequenceLayout`). With
`attn_implementation="eager"`, a mask of three or four axes, or `output_attentions=True`, every position of
the padded `[B, S, H]` tensor is computed as transformers does (`PaddedLayout`). Forward hooks on a layer
therefore see `[T, H]` on the default path, and `[B, H]` on the last layer of a head that reads first tokens
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.batch import IGNORE_INDEX, PackedBatch, PaddedBatch
from fastbert.config import BertConfig
from fastbert.door import Door, Encoded, Tokens
from fastbert.layers import BertEmbeddings, BertEncoder, BertPooler, BertPreTrainingHeads
from fastbert.ops import PaddedLayout, SequenceLayout
from fastbert.outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    BertForPreTrainingOutput,
    ModelOutput,
)
from fastbert.pretrained import PretrainedModel

if TYPE_CHECKING:
    from fastbert.inference import BucketGraphs

_DECODER_ARGUMENTS = (
    "encoder_hidden_states",
    "encoder_attention_mask",
    "cache",
    "past_key_values",
    "head_mask",
)


class BertModel(PretrainedModel):
    """The encoder.

    `forward` takes transformers' arguments, or a PackedBatch as the only one. On the default path hidden
    states are exactly 0 at padding, and the pooler reads each sequence's first kept token.
    """

    graphs: BucketGraphs | None = None  # see fastbert.inference.use_cuda_graphs

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

        attention_mask: [B, S] of any dtype (nonzero = token), [B, S, S] likewise, [B, 1 or heads, 1 or S, S]
        bool (True = keep) or additive float. Also accepts output_hidden_states, output_attentions (real
        probabilities) and return_dict; ignores other keywords. Decoder arguments: NotImplementedError.
        On the default path hidden_states are made to be read: gradients with respect to them, and hooks that
        see [B, S, H], belong to `attn_implementation="eager"`.
        """
        refuse_decoder_arguments(
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            cache=cache,
            **kwargs,
        )
        encoded = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **_output_flags(kwargs)
        )
        if encoded.hidden_states is not None:
            last_hidden_state = encoded.hidden_states[-1]
        else:
            last_hidden_state = encoded.door.to_caller(encoded.hidden)
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=last_hidden_state,
            pooler_output=encoded.pooled,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
            cross_attentions=None if encoded.attentions is None else (),
        )
        return in_wanted_form(output, self.config, kwargs)

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
        only_pooled: bool = False,
    ) -> Encoded:
        """The door: chooses the layout, embeds, runs the layers, pools. Every head begins here.

        For a head that reads `pooled` and nothing else, the last layer is finished for first tokens only.
        """
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        if output_attentions is None:
            output_attentions = bool(self.config.output_attentions)
        if isinstance(input_ids, PackedBatch):
            if output_attentions:
                raise NotImplementedError("output_attentions=True needs padded input, not a PackedBatch")
            others = (attention_mask, token_type_ids, position_ids, inputs_embeds)
            if any(other is not None for other in others):
                raise ValueError(
                    "a PackedBatch holds its segments, positions and boundaries itself: leave out "
                    "attention_mask, token_type_ids, position_ids and inputs_embeds"
                )
            kept: Tokens | Door = self._packed_tokens(input_ids)
        else:
            arguments = self._padded_arguments(input_ids, token_type_ids, position_ids, inputs_embeds)
            kept = self._open_padded(*arguments, attention_mask, compute_pads or output_attentions)
        if isinstance(kept, Tokens):
            if self.graphs is not None and kept.ids is not None and not output_hidden_states:
                replayed = self._replay(self.graphs, kept, only_pooled)
                if replayed is not None:
                    return replayed
            kept = self._embed(kept)
        return self._run(kept, output_hidden_states, output_attentions, only_pooled)

    def _run(
        self,
        door: Door,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        only_pooled: bool = False,
    ) -> Encoded:
        """Layers and pooler."""
        rows = door.first_rows() if only_pooled and not output_hidden_states else None
        encoded = self.encoder(
            door.embedded,
            door.layout,
            rows=rows,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden = encoded.last_hidden_state
        hidden_states = encoded.hidden_states
        if hidden_states is not None:
            hidden_states = tuple(door.to_caller(states) for states in hidden_states)
        pooled = None if self.pooler is None else self.pooler(door.first_tokens(hidden, rows))
        return Encoded(hidden, pooled, hidden_states, encoded.attentions, door)

    def _replay(self, graphs: BucketGraphs, kept: Tokens, only_pooled: bool) -> Encoded | None:
        """The same through a graph, or None where none is used."""

        def compute(
            ids: Tensor, types: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int
        ) -> tuple[Tensor, ...]:
            door = self._embed(Tokens(ids, types, positions, None, cu_seqlens, max_seqlen))
            encoded = self._run(door, only_pooled=only_pooled)
            return (encoded.hidden,) if encoded.pooled is None else (encoded.hidden, encoded.pooled)

        def read(hidden: Tensor, pooled: Tensor | None = None) -> Encoded:
            hidden = hidden[: num_sequences if only_pooled else num_tokens].clone()
            pooled = None if pooled is None else pooled[:num_sequences].clone()
            layout = SequenceLayout(kept.cu_seqlens, kept.max_seqlen, num_tokens)
            return Encoded(hidden, pooled, None, None, Door(hidden, layout, kept.shape, kept.indices))

        assert kept.ids is not None
        num_tokens, num_sequences = kept.ids.shape[0], kept.cu_seqlens.shape[0] - 1
        tokens = (kept.ids, kept.types, kept.positions)
        return graphs.run(compute, self, tokens, kept.cu_seqlens, kept.max_seqlen, read, key=only_pooled)

    def encode_rows(self, batch: PackedBatch | PaddedBatch, rows: Tensor) -> Tensor:
        """The last hidden states [R, H] at `rows` [R] of the flattened token axis, for the losses.

        A PackedBatch finishes its last layer for these rows only; a PaddedBatch computes every position.
        """
        if isinstance(batch, PackedBatch):
            door = self._embed(self._packed_tokens(batch))
            return self.encoder(door.embedded, door.layout, rows=rows).last_hidden_state
        arguments = self._padded_arguments(batch.input_ids, batch.token_type_ids, None, None)
        padded = self._open_padded(*arguments, batch.attention_mask, compute_pads=True)
        assert isinstance(padded, Door)
        door = padded
        hidden = self.encoder(door.embedded, door.layout).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, rows)

    def _packed_tokens(self, batch: PackedBatch) -> Tokens:
        self._check_length(batch.max_seqlen)
        tokens = (batch.input_ids, batch.token_type_ids, batch.position_ids)
        return Tokens(*tokens, None, batch.cu_seqlens, batch.max_seqlen)

    def _embed(self, kept: Tokens) -> Door:
        embedded = self.embeddings(kept.ids, kept.types, kept.positions, kept.embeds)
        layout = SequenceLayout.build(kept.cu_seqlens, kept.max_seqlen, embedded.shape[0])
        return Door(embedded, layout, kept.shape, kept.indices)

    def _open_padded(
        self,
        ids: Tensor | None,
        types: Tensor,
        positions: Tensor,
        embeds: Tensor | None,
        attention_mask: Tensor | None,
        compute_pads: bool,
    ) -> Tokens | Door:
        batch_size, seqlen = shape = positions.shape[0], positions.shape[1]
        mask = ops.check_mask(attention_mask, batch_size, seqlen, self.config.num_attention_heads)
        is_key_mask = mask is None or mask.dim() == 2
        if compute_pads or self.config._attn_implementation == "eager" or not is_key_mask:
            embedded = self.embeddings(ids, types, positions, embeds)
            layout = PaddedLayout.build(mask, batch_size, seqlen, positions.device)
            return Door(embedded, layout, shape, None)
        indices, cu_seqlens = ops.kept_tokens(mask, batch_size, seqlen, positions.device)
        ids, embeds = (None if x is None else ops.unpad_rows(x, indices) for x in (ids, embeds))
        types, positions = ops.unpad_rows(types, indices), ops.unpad_rows(positions, indices)
        return Tokens(ids, types, positions, embeds, cu_seqlens, seqlen, shape, indices)

    def _check_length(self, seqlen: int) -> None:
        limit = self.config.max_position_embeddings
        if seqlen > limit:
            raise ValueError(f"sequence length {seqlen} is above max_position_embeddings = {limit}: truncate")

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
                "input_ids [batch, seqlen]"
                if inputs_embeds is None
                else "inputs_embeds [batch, seqlen, hidden]"
            )
            raise ValueError(f"the model takes {wanted}, got shape {tuple(given.shape)}")
        batch_size, seqlen = given.shape[:2]
        if not batch_size or not seqlen:
            raise ValueError(f"the batch is empty: shape {tuple(given.shape)}")
        if inputs_embeds is not None and inputs_embeds.shape[2] != self.config.hidden_size:
            raise ValueError(
                f"inputs_embeds are {inputs_embeds.shape[2]} wide, hidden_size is {self.config.hidden_size}"
            )
        self._check_length(seqlen)
        if position_ids is None:
            position_ids = torch.arange(seqlen, device=given.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros(1, dtype=torch.long, device=given.device)
        types = _broadcast("token_type_ids", token_type_ids, batch_size, seqlen)
        positions = _broadcast("position_ids", position_ids, batch_size, seqlen)
        return input_ids, types, positions, inputs_embeds


@dataclass
class LossParts:
    """Sums and counts of one batch; the trainer divides once, by the counts of everything that it adds up."""

    mlm_sum: Tensor  # fp32 scalar with a graph
    mlm_count: Tensor  # int64 scalar
    mlm_correct: Tensor  # int64 scalar
    nsp_sum: Tensor
    nsp_count: Tensor
    nsp_correct: Tensor


class HeadedModel(PretrainedModel):
    """Base of the classes with heads, whose encoder is `self.bert`."""

    bert: BertModel

    def _encode(
        self,
        *inputs: Any,
        kwargs: dict[str, Any],
        reads: Tensor | None = None,
        only_pooled: bool = False,
    ) -> Encoded:
        """The five inputs of `forward` and its other keywords -> the encoder's states.

        `reads` [B, S] bool says which tokens a loss reads: if there is a pad among them, transformers' number
        is that of its logits, and every position is computed. `only_pooled`: see `BertModel.encode`.
        """
        refuse_decoder_arguments(**kwargs)
        mask = inputs[1]
        skips_pads = mask is not None and mask.dim() == 2 and self.config._attn_implementation != "eager"
        reads_a_pad = False
        if skips_pads and reads is not None and reads.shape == mask.shape:
            reads_a_pad = bool((reads & (mask == 0)).any())
        flags = _output_flags(kwargs)
        return self.bert.encode(*inputs, compute_pads=reads_a_pad, only_pooled=only_pooled, **flags)

    def _answer(self, output: ModelOutput, encoded: Encoded, kwargs: dict[str, Any]) -> Any:
        """The output with the encoder's states in it, in the form the caller wants."""
        for name in ("hidden_states", "attentions"):
            if getattr(encoded, name) is not None:
                output[name] = getattr(encoded, name)
        return in_wanted_form(output, self.config, kwargs)


class VocabularyModel(HeadedModel):
    """Base of the classes whose decoder `cls.predictions` is tied to the word embeddings."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    cls: Any

    def _vocab_parameters(self) -> list[tuple[nn.Module, str]]:
        predictions = self.cls.predictions
        return [
            *super()._vocab_parameters(),
            (predictions.decoder, "weight"),
            (predictions.decoder, "bias"),
            (predictions, "bias"),
        ]

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder, and the bias that `cls.predictions` shares with it."""
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias


class BertForPreTraining(VocabularyModel):
    """Encoder with the masked-language and next-sentence heads.

    On the default path token logits are exactly 0 at padding.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.post_init()

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
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self._encode(*inputs, kwargs=kwargs, reads=is_labelled(labels))
        prediction_logits = encoded.door.to_caller(self.cls.predictions(encoded.hidden))
        nsp_logits = self.cls.seq_relationship(encoded.pooled)
        loss = None
        if isinstance(input_ids, PackedBatch):
            batch = input_ids
            loss = ops.cross_entropy(prediction_logits[batch.masked_positions], batch.masked_labels)
            loss = loss + ops.cross_entropy(nsp_logits, batch.next_sentence_labels)
        elif labels is not None and next_sentence_label is not None:
            loss = ops.cross_entropy(prediction_logits.flatten(0, 1), labels.flatten())
            loss = loss + ops.cross_entropy(nsp_logits, next_sentence_label.flatten())
        output = BertForPreTrainingOutput(
            loss=loss,
            prediction_logits=prediction_logits,
            seq_relationship_logits=nsp_logits,
        )
        return self._answer(output, encoded, kwargs)

    def loss_parts(self, batch: PackedBatch | PaddedBatch) -> LossParts:
        """Sums and counts of both losses; the vocabulary is reached by the masked rows only.

        A PackedBatch also finishes its last layer only for rows that a loss reads; a PaddedBatch computes
        every position, the textbook way. Labels equal to IGNORE_INDEX take no part; if all are, a sum is 0
        with a graph that gives zero gradients.
        """
        masked_positions, masked_labels = batch.masked_positions, batch.masked_labels
        if isinstance(batch, PackedBatch):
            first = (batch.cu_seqlens[:-1].long()).clamp(max=batch.num_slots - 1)
        else:
            num_rows, seqlen = batch.input_ids.shape
            first = torch.arange(0, num_rows * seqlen, seqlen, device=batch.input_ids.device)
        nsp_labels = batch.next_sentence_labels
        if ops.backend.host_may_read(masked_labels):
            # unused slots cost a row each; leaving them out would synchronise a GPU, and break a graph
            is_used, has_label = masked_labels != IGNORE_INDEX, nsp_labels != IGNORE_INDEX
            masked_positions, masked_labels = masked_positions[is_used], masked_labels[is_used]
            first, nsp_labels = first[has_label], nsp_labels[has_label]
        hidden = self.bert.encode_rows(batch, torch.cat([masked_positions, first]))
        mlm_hidden, first_hidden = hidden.split([masked_positions.shape[0], first.shape[0]])

        mlm_sum, mlm_correct, mlm_count = self.cls.predictions.loss(mlm_hidden, masked_labels)
        assert self.bert.pooler is not None
        nsp_logits = self.cls.seq_relationship(self.bert.pooler(first_hidden))
        nsp_sum, nsp_correct, nsp_count = ops.cross_entropy_parts(nsp_logits, nsp_labels)
        return LossParts(mlm_sum, mlm_count, mlm_correct, nsp_sum, nsp_count, nsp_correct)


# ---- helpers


def is_labelled(labels: Tensor | None) -> Tensor | None:
    """[B, S] bool: where a label counts."""
    return None if labels is None else labels != IGNORE_INDEX


def _broadcast(name: str, ids: Tensor, batch_size: int, seqlen: int) -> Tensor:
    try:
        return ids.expand(batch_size, seqlen)
    except RuntimeError as error:
        raise ValueError(
            f"{name} has shape {tuple(ids.shape)}, the input is ({batch_size}, {seqlen})"
        ) from error


def refuse_decoder_arguments(**arguments: Any) -> None:
    """NotImplementedError for an argument of a decoder (or transformers 4's head_mask) that is not None."""
    for name in _DECODER_ARGUMENTS:
        if arguments.get(name) is not None:
            raise NotImplementedError(
                f"{name} is not supported: this encoder has no cross attention, caches or head masks"
            )


def _output_flags(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs.get(name) for name in ("output_hidden_states", "output_attentions")}


def in_wanted_form(output: ModelOutput, config: BertConfig, kwargs: dict[str, Any]) -> Any:
    """The output, or its tuple if return_dict (the argument, else the config's) is False."""
    return_dict = kwargs.get("return_dict")
    return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()
