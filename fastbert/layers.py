"""The modules of Hugging Face's BERT tree, from the embeddings to the prediction heads.

A layer works on `[..., H]` and either layout: a `SequenceLayout` for kept tokens end to end, `[T, H]`, or a
`PaddedLayout` for every position of a padded batch, `[B, S, H]`. A submodule that is more than plain torch
(LoRA, parametrizations, hooks) is called as the module it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.ops import PaddedLayout, SequenceLayout

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
        words, types, positions = self.word_embeddings, self.token_type_embeddings, self.position_embeddings
        norm, dropout = self.LayerNorm, self.dropout
        if inputs_embeds is None and ops.can_embed(words, types, positions, norm, dropout):
            assert input_ids is not None
            return ops.embed(
                input_ids,
                token_type_ids,
                position_ids,
                words.weight,
                types.weight,
                positions.weight,
                norm.weight,
                norm.bias,
                norm.eps,
                dropout.p,
                dropout.training,
                padding_idx=words.padding_idx,
            )
        ops.check_ids("token_type_ids", token_type_ids, "type_vocab_size", types.weight.shape[0])
        ops.check_ids("position_ids", position_ids, "max_position_embeddings", positions.weight.shape[0])
        embeds = words(input_ids) if inputs_embeds is None else inputs_embeds
        return dropout(ops.layer_norm(embeds + types(token_type_ids) + positions(position_ids), norm))

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
                f"The hidden size ({hidden_size}) is not a multiple of the number of attention heads "
                f"({num_heads})"
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

    def forward(self, hidden_states: Tensor, residual: Tensor, fp32_out: bool = False) -> Tensor:
        return ops.dense_dropout_add_norm(
            hidden_states, self.dense, self.dropout, residual, self.LayerNorm, fp32_out
        )


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
        fp32_out: bool = False,
    ) -> Any:
        """[..., H] -> [..., H], or [R, H] for R rows; with `need_probabilities` (that, [B, heads, S, S]).

        Under autocast in its dtype, which is what the next products read, or in fp32 with `fp32_out`.
        """
        attn_output, probabilities = self.attention(hidden_states, layout, rows, need_probabilities)
        hidden_states = self.output(self.intermediate(attn_output), attn_output, fp32_out)
        return (hidden_states, probabilities) if need_probabilities else hidden_states


@dataclass
class EncoderOutput:
    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.checkpoint_every = 0  # 0 = keep all activations, n = recompute each n-th layer
        self.checkpoint_options: dict[str, Any] = {"use_reentrant": False}

    def forward(
        self,
        hidden_states: Tensor,
        layout: Layout,
        *,
        rows: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> EncoderOutput:
        """[..., H] -> [..., H]; with `rows` [R] the last layer is finished for these rows only: [R, H]."""
        if rows is not None and not self.layer:
            hidden_states = hidden_states.flatten(0, -2).index_select(0, rows)
        collected, attentions = [hidden_states], []
        recompute = bool(self.checkpoint_every) and self.training and torch.is_grad_enabled()
        for index, layer in enumerate(self.layer):
            is_last = index == len(self.layer) - 1
            # what leaves the encoder under autocast is fp32, as what leaves torch's LayerNorm there
            fp32_out = is_last and ops.backend.autocast_dtype(hidden_states.device) is not None
            options = (rows if is_last else None, output_attentions, fp32_out)
            if recompute and index % self.checkpoint_every == 0:
                output = checkpoint(layer, hidden_states, layout, *options, **self.checkpoint_options)
            else:
                output = layer(hidden_states, layout, *options)
            if output_attentions:
                output, probabilities = output
                attentions.append(probabilities)
            hidden_states = output
            if output_hidden_states:
                collected.append(hidden_states)
        return EncoderOutput(
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
        return ops.layer_norm(_dense_act(self.dense, hidden_states, self.hidden_act), self.LayerNorm)


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
        return ops.cross_entropy_parts(self.decoder(hidden_states), labels)


class BertPreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


def _dense_act(dense: nn.Module, x: Tensor, hidden_act: Any) -> Tensor:
    if ops.is_plain(dense, nn.Linear):
        return ops.linear_act(x, dense.weight, dense.bias, hidden_act)  # type: ignore[arg-type]
    return ops.activation(hidden_act)(dense(x))
