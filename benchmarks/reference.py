"""The textbook BERT that everything is compared with: padded rows, unfused attention, a decoder on every row.

It follows the paper (Devlin et al., arXiv 1810.04805) line by line, uses nothing of fastbert, and has Hugging
Face's parameter names, so that `load_state_dict` takes the weights of either library.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(x + self.position_embeddings(positions)))


class SelfAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, x: Tensor, additive_mask: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:  # [B, S, H] -> [B, heads, S, D]
            return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + additive_mask
        probabilities = self.dropout(scores.softmax(dim=-1))
        return (probabilities @ v).transpose(1, 2).flatten(2)


class DenseDropoutAddNorm(nn.Module):
    def __init__(self, in_size: int, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(in_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(config), "output": DenseDropoutAddNorm(config.hidden_size, config)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.intermediate_size)})
        self.output = DenseDropoutAddNorm(config.intermediate_size, config)

    def forward(self, x: Tensor, additive_mask: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, additive_mask), x)
        return self.output(F.gelu(self.intermediate["dense"](x)), x)


class Bert(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))}
        )
        self.pooler = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.hidden_size)})

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embeddings(input_ids, token_type_ids)
        lowest = torch.finfo(x.dtype).min
        additive_mask = torch.zeros_like(attention_mask, dtype=x.dtype).masked_fill(~attention_mask, lowest)
        for layer in self.encoder["layer"]:
            x = layer(x, additive_mask[:, None, None, :])
        return x


class Predictions(nn.Module):
    def __init__(self, config: Any, word_embeddings: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.ModuleDict(
            {
                "dense": nn.Linear(config.hidden_size, config.hidden_size),
                "LayerNorm": nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
            }
        )
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = word_embeddings.weight
        self.bias = self.decoder.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.transform["LayerNorm"](F.gelu(self.transform["dense"](x))))


class ReferenceBert(nn.Module):
    """BERT with both pre-training heads. `config` is any object with Hugging Face's BertConfig fields."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.bert = Bert(config)
        self.cls = nn.ModuleDict(
            {
                "predictions": Predictions(config, self.bert.embeddings.word_embeddings),
                "seq_relationship": nn.Linear(config.hidden_size, 2),
            }
        )

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        next_sentence_label: Tensor,
    ) -> Tensor:
        """Ids and labels [B, S] (label -100 = not asked), mask [B, S] bool -> mean MLM plus mean NSP loss."""
        x = self.bert(input_ids, token_type_ids, attention_mask)
        token_logits = self.cls["predictions"](x)
        pooled = torch.tanh(self.bert.pooler["dense"](x[:, 0]))
        sentence_logits = self.cls["seq_relationship"](pooled)
        mlm_loss = F.cross_entropy(token_logits.flatten(0, 1), labels.flatten())
        return mlm_loss + F.cross_entropy(sentence_logits, next_sentence_label)
