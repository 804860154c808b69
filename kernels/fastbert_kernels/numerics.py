"""Arithmetic that several kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

# the kernels of this process run in Triton's interpreter (decided when `triton.jit` decorates, as is this)
INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, INPUT_PRECISION: tl.constexpr):
    """a [M, K] @ b [K, N] + acc [M, N] fp32; INPUT_PRECISION ("ieee" or "tf32") is for fp32 operands.

    The interpreter multiplies the bit patterns of bf16: there, and only there, they are widened first, which
    changes no product.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=INPUT_PRECISION)


def input_precision(dtype: torch.dtype) -> str:
    """The INPUT_PRECISION of `dot`: "tf32" for fp32 operands where the user allowed torch's products TF32.

    `torch.backends.cuda.matmul.fp32_precision` or `torch.set_float32_matmul_precision` say so; else "ieee".
    """
    return (
        "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    )
