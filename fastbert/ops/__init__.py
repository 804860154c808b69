"""The operations of a BERT layer and its losses, one file each: eager reference and public function."""

from fastbert.ops import backend
from fastbert.ops.attention import PaddedLayout, SequenceLayout, padded_attention, varlen_attention
from fastbert.ops.bias_gelu import ACTIVATIONS, activation, linear_act
from fastbert.ops.dropout_add_norm import dense_dropout_add_norm, dropout_add_norm, layer_norm
from fastbert.ops.embedding import can_embed, check_ids, embed, raise_reported_ids, recycle_gradient
from fastbert.ops.linear_cross_entropy import cross_entropy, cross_entropy_parts, linear_cross_entropy
from fastbert.ops.padding import check_mask, kept_tokens, pad_rows, unpad_indices, unpad_rows
from fastbert.ops.qkv import is_plain, qkv_projection, stack_qkv

__all__ = [
    "ACTIVATIONS",
    "PaddedLayout",
    "SequenceLayout",
    "activation",
    "backend",
    "can_embed",
    "check_ids",
    "check_mask",
    "cross_entropy",
    "cross_entropy_parts",
    "dense_dropout_add_norm",
    "dropout_add_norm",
    "embed",
    "is_plain",
    "kept_tokens",
    "layer_norm",
    "linear_act",
    "linear_cross_entropy",
    "pad_rows",
    "padded_attention",
    "qkv_projection",
    "raise_reported_ids",
    "recycle_gradient",
    "stack_qkv",
    "unpad_indices",
    "unpad_rows",
    "varlen_attention",
]
