"""LayerNorm(dropout(x) + residual): what closes each half of a layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def dropout_add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float = 0.0,
    training: bool = True,
) -> Tensor:
    """LayerNorm(dropout(x) + residual) over the last axis of x [..., H]; statistics in fp32 at least.

    `residual` has the shape of x or is None; weight and bias are [H]. Dropped elements come from torch's
    generator.
    """
    x = F.dropout(x, dropout_p, training) if dropout_p else x
    x = x if residual is None else x + residual
    return F.layer_norm(x, weight.shape, weight, bias, eps)
