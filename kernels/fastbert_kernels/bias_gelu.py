"""act(x + bias), the activation between the two products of a feed-forward block, and its gradients.

Only the pre-activation x is saved for the backward pass: x + bias and its activation are computed again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert_kernels.launch import (
    CompileCase,
    check_can_launch,
    column_sum_config,
    device_guard,
    elementwise_config,
)

# the names of torch.nn.functional.gelu, and relu: "none" is the exact erf form
FORMS = ("none", "tanh", "relu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# the interpreter multiplies a tensor by a constant, not a constant by a tensor: write them on the right
SQRT_1_2: tl.constexpr = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327)
SQRT_8_PI: tl.constexpr = tl.constexpr(1.5957691216057308)
TANH_CUBIC: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def _tanh_gate(h):
    # gate = (1 + tanh(u/2)) / 2 = sigmoid(u) and its derivative in u, through exp(-|u|): Triton's core has no
    # tanh, and neither tail loses digits (1 - gate would, times h^3) or overflows
    u = (h + h * h * h * TANH_CUBIC) * SQRT_8_PI
    e = tl.exp(-tl.abs(u))
    r = 1.0 / (1.0 + e)
    return tl.where(u < 0.0, e * r, r), e * r * r


@triton.jit
def act(h, APPROXIMATE: tl.constexpr):
    if APPROXIMATE == "none":
        return h * (0.5 * (1.0 + tl.erf(h * SQRT_1_2)))
    elif APPROXIMATE == "tanh":
        gate, _ = _tanh_gate(h)
        return h * gate
    else:
        return tl.where(h <= 0.0, 0.0, h)  # a NaN stays one, as in torch


@triton.jit
def _act_derivative(h, APPROXIMATE: tl.constexpr):
    if APPROXIMATE == "none":
        return 0.5 * (1.0 + tl.erf(h * SQRT_1_2)) + h * (tl.exp(-0.5 * h * h) * INV_SQRT_2PI)
    elif APPROXIMATE == "tanh":
        gate, slope = _tanh_gate(h)
        return gate + h * slope * ((1.0 + h * h * (3.0 * TANH_CUBIC)) * SQRT_8_PI)
    else:
        return tl.where(h <= 0.0, 0.0, 1.0)


# what changes with the batch is not specialised on: being 1 or a multiple of 16 would compile another kernel
@triton.jit(do_not_specialize=["M"])
def _bias_gelu_fwd_kernel(
    x_ptr,  # [M, N]
    bias_ptr,  # [N]
    y_ptr,  # [M, N]
    stride_xm,
    stride_ym,
    M,
    N,
    APPROXIMATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (pid // num_tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (pid % num_tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * stride_ym + cols, act(x + bias, APPROXIMATE), mask=mask)


@triton.jit(do_not_specialize=["M", "tiles_m"])
def _bias_gelu_bwd_kernel(
    dy_ptr,  # [M, N]
    x_ptr,  # [M, N]
    bias_ptr,  # [N]
    dx_ptr,  # [M, N]
    partial_ptr,  # [row programs, N] fp32, contiguous
    stride_dym,
    stride_xm,
    stride_dxm,
    M,
    N,
    tiles_m,
    APPROXIMATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m = (pid // num_tiles_n).to(tl.int64)
    cols = (pid % num_tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    rows = pid_m * tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(tiles_m):
        mask = (rows < M) & (cols < N)[None, :]
        x = tl.load(x_ptr + rows * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dx = dy * _act_derivative(x + bias, APPROXIMATE)
        tl.store(dx_ptr + rows * stride_dxm + cols[None, :], dx, mask=mask)
        acc += dx  # 0 where masked: dy is
        rows += BLOCK_M
    tl.store(partial_ptr + pid_m * N + cols, tl.sum(acc, axis=0), mask=cols < N)


def bias_gelu_fwd(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """act(x + bias): x [M, N], bias [N] -> y [M, N], contiguous, in x's dtype (fp32, fp16, bf16).

    `approximate` is "none" (GELU, exact erf form), "tanh" (GELU, tanh form) or "relu". bias has x's dtype or
    fp32, as under autocast. Maths in fp32. Rows of x may be strided, M and N may be 0. Deterministic: each
    element is computed by itself. ValueError for anything else.
    """
    check_arguments(x, bias, approximate)
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    config = elementwise_config(N)
    with device_guard(x):
        _bias_gelu_fwd_kernel[(config.num_programs(M, N),)](
            x, bias, y, x.stride(0), y.stride(0), M, N,
            APPROXIMATE=approximate, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            num_warps=config.num_warps,
        )  # fmt: skip
    return y


def bias_gelu_bwd(dy: Tensor, x: Tensor, bias: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """Gradients of `bias_gelu_fwd`: dy [M, N], x [M, N], bias [N] -> dx [M, N] (contiguous), dbias [N].

    dx has x's dtype, dbias that of bias. dbias is the column sum of the unrounded dx: fp32 partial sums, a
    row of them per program, then one sum over those rows. No atomics, so two runs give the same bits. M = 0
    gives dbias = 0. Rows of dy may be strided. ValueError as in the forward.
    """
    check_arguments(x, bias, approximate)
    _check_matrix("dy", dy)
    if dy.shape != x.shape or dy.dtype != x.dtype or dy.device != x.device:
        raise ValueError(
            f"dy must be like x, {tuple(x.shape)} {x.dtype} on {x.device}, "
            f"but is {tuple(dy.shape)} {dy.dtype} on {dy.device}"
        )
    M, N = x.shape
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros_like(bias)
    config = column_sum_config(M, N)
    partial = torch.empty((config.num_row_programs(M), N), dtype=torch.float32, device=x.device)
    with device_guard(x):
        _bias_gelu_bwd_kernel[(config.num_programs(M, N),)](
            dy, x, bias, dx, partial, dy.stride(0), x.stride(0), dx.stride(0), M, N, config.tiles_m,
            APPROXIMATE=approximate, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            num_warps=config.num_warps,
        )  # fmt: skip
    return dx, partial.sum(0).to(bias.dtype)


def check_arguments(x: Tensor, bias: Tensor, approximate: str) -> None:
    if approximate not in FORMS:
        raise ValueError(f"approximate {approximate!r} is not one of {', '.join(FORMS)}")
    _check_matrix("x", x)
    allowed = {x.dtype: str(x.dtype), torch.float32: "torch.float32"}
    if bias.shape != x.shape[1:] or bias.dtype not in allowed or bias.device != x.device:
        raise ValueError(
            f"bias must be [{x.shape[1]}] {' or '.join(allowed.values())} on {x.device} to fit x, "
            f"but is {list(bias.shape)} {bias.dtype} on {bias.device}"
        )
    if bias.shape[0] > 1 and bias.stride(0) != 1:
        raise ValueError(f"bias must be contiguous, but has stride {bias.stride(0)}: call .contiguous()")
    check_can_launch(_bias_gelu_fwd_kernel, x)


def _check_matrix(name: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name} must be [M, N], but has shape {tuple(x.shape)}: call .reshape(-1, N)")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, but is {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(
            f"{name} must have adjacent columns, but has column stride {x.stride(1)}: call .contiguous()"
        )


def compile_cases(arch: str) -> list[CompileCase]:
    """Both kernels at BERT-Base's feed-forward width, everywhere alike; relu and tanh form in bf16."""
    M, N = 16384, 3072
    cases = []
    for dtype, bias, approximate in (
        ("fp32", "fp32", "none"), ("fp16", "fp16", "none"), ("bf16", "bf16", "none"),
        ("bf16", "bf16", "tanh"), ("bf16", "bf16", "relu"), ("bf16", "fp32", "none"),
    ):  # fmt: skip
        matrix, vector = f"*{dtype}", f"*{bias}"
        forward = {"x_ptr": matrix, "bias_ptr": vector, "y_ptr": matrix}
        forward |= dict.fromkeys(("stride_xm", "stride_ym", "M", "N"), "i32")
        backward = {"dy_ptr": matrix, "x_ptr": matrix, "bias_ptr": vector, "dx_ptr": matrix}
        backward |= {"partial_ptr": "*fp32"}
        backward |= dict.fromkeys(("stride_dym", "stride_xm", "stride_dxm", "M", "N", "tiles_m"), "i32")
        for kernel, signature, config in (
            (_bias_gelu_fwd_kernel, forward, elementwise_config(N)),
            (_bias_gelu_bwd_kernel, backward, column_sum_config(M, N)),
        ):
            cases.append(
                CompileCase(
                    kernel=kernel,
                    label=("erf" if approximate == "none" else approximate)
                    + ("" if bias == dtype else f", bias {bias}"),
                    dtype=dtype,
                    signature=signature,
                    constexprs={
                        "APPROXIMATE": approximate,
                        "BLOCK_M": config.block_m,
                        "BLOCK_N": config.block_n,
                    },
                    num_warps=config.num_warps,
                    num_stages=None,
                    aligned=frozenset(signature) - {"M", "tiles_m"},
                )
            )
    return cases
