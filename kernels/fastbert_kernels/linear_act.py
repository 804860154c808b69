"""The first product of a feed-forward block with its activation as epilogue: act(x @ w.T + bias).

The product leaves the matrix instructions once: it is rounded, stored for the backward pass where there is
one, and goes through bias and activation while it is still in registers. Behind cuBLASLt the same takes a
second kernel that reads it back (`bias_gelu`). Two kernels, as in `linear`: through pointers anywhere, and a
persistent one through tensor descriptors (TMA) on sm_90 and newer. The gradients are `bias_gelu_bwd` and
torch's products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastbert_kernels.bias_gelu import act, bias_gelu_fwd, check_arguments
from fastbert_kernels.launch import (
    CompileCase,
    MatmulConfig,
    architecture,
    check_can_launch,
    choose,
    device_guard,
    linear_act_configs,
    num_programs_persistent,
    rows_bucket,
)
from fastbert_kernels.linear import (
    CUBLASLT,
    DTYPES,
    TUNED_ROWS,
    TUNED_WIDTHS,
    check_like,
    check_matrix,
    compile_case,
    descriptor,
    is_aligned,
    launch_options,
    tile_position,
)
from fastbert_kernels.numerics import dot, input_precision
from fastbert_kernels.tune import TuningCase


# what changes with the batch is not specialised on: being 1 or a multiple of 16 would compile another kernel
@triton.jit(do_not_specialize=["T"])
def _linear_act_kernel(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K] contiguous
    bias_ptr,  # [N]
    y_ptr,  # [T, N] contiguous
    h_ptr,  # [T, N] contiguous, the product without the bias; not touched unless SAVE_H
    stride_xt,
    T,
    N,
    K,
    APPROXIMATE: tl.constexpr,
    SAVE_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    tile_m, tile_n = tile_position(tl.program_id(0), tl.cdiv(T, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # rows and columns beyond the end repeat the last one and are not stored: no mask in the loop
    x_ptrs = x_ptr + tl.minimum(rows, T - 1)[:, None] * stride_xt + ks[None, :]
    w_ptrs = w_ptr + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * K + ks[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            in_k = (ks < K - k)[None, :]
            x = tl.load(x_ptrs, mask=in_k, other=0.0)
            w = tl.load(w_ptrs, mask=in_k, other=0.0)
        acc = dot(x, w.T, acc, INPUT_PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    mask = (rows < T)[:, None] & (cols < N)[None, :]
    places = rows[:, None] * N + cols[None, :]
    h = acc.to(y_ptr.dtype.element_ty)
    if SAVE_H:
        tl.store(h_ptr + places, h, mask=mask)
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    # of the rounded product, which is what the backward pass will see
    tl.store(y_ptr + places, act(h.to(tl.float32) + bias[None, :], APPROXIMATE), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _linear_act_descriptor_kernel(
    x_desc,  # [T, K]
    w_desc,  # [N, K]
    bias_ptr,  # [N]
    y_desc,  # [T, N]
    h_desc,  # [T, N]; not touched unless SAVE_H
    T,
    N,
    K,
    APPROXIMATE: tl.constexpr,
    SAVE_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    num_tiles_m = tl.cdiv(T, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    # flattened: the loads of the next tile begin under the epilogue of this one
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_position(tile, num_tiles_m, num_tiles_n, GROUP_M)
        first_row, first_col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([first_row, k])  # zeros beyond either end
            w = w_desc.load([first_col, k])
            acc = dot(x, w.T, acc, "ieee")
        h = acc.to(y_desc.dtype)
        if SAVE_H:
            h_desc.store([first_row, first_col], h)  # nothing is stored beyond either end
        cols = first_col + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        y = act(h.to(tl.float32) + bias[None, :], APPROXIMATE)
        y_desc.store([first_row, first_col], y.to(y_desc.dtype))


def linear_act_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    approximate: str = "none",
    save: bool = True,
    config: MatmulConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [T, K], weight [N, K], bias [N] -> (act(x @ weight.T + bias), x @ weight.T), both [T, N], contiguous.

    The second, which `bias_gelu_bwd` takes, is None without `save`. x and weight in fp32, fp16 or bf16, bias
    in their dtype or fp32. `approximate` is "none" (GELU, exact erf form), "tanh" (tanh form) or "relu".
    The product is summed in fp32 and rounded to x's dtype, the rest is fp32; fp32 products use TF32 where
    torch's do. T may be 0, rows of x may be strided. Deterministic, and a row depends on that row only.
    `config` is a configuration of `linear_act_choice`; without one it is the first of its rule. ValueError
    for anything else.
    """
    check_matrix("x", x)
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"weight must be [N, K] with N > 0, but has shape {tuple(weight.shape)}")
    check_like("weight", weight, (weight.shape[0], x.shape[1]), x)
    check_can_launch(_linear_act_kernel, x)
    T, K = x.shape
    N = weight.shape[0]
    y = torch.empty((T, N), dtype=x.dtype, device=x.device)
    check_arguments(y, bias, approximate)
    h = torch.empty_like(y) if save else None
    if T == 0:
        return y, h
    config = _checked_config(config, x, weight)
    tiles = triton.cdiv(T, config.block_m) * triton.cdiv(N, config.block_n)
    options = {"APPROXIMATE": approximate, "SAVE_H": save} | launch_options(config)
    with device_guard(x):
        if config.tma:
            x_desc = TensorDescriptor.from_tensor(x, [config.block_m, config.block_k])
            w_desc = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])
            y_desc, h_desc = (
                TensorDescriptor.from_tensor(out, [config.block_m, config.block_n])
                for out in (y, y if h is None else h)
            )
            _linear_act_descriptor_kernel[(min(tiles, num_programs_persistent(x)),)](
                x_desc, w_desc, bias, y_desc, h_desc, T, N, K, **options
            )
        else:
            _linear_act_kernel[(tiles,)](
                x, weight, bias, y, y if h is None else h, x.stride(0), T, N, K,
                EVEN_K=K % config.block_k == 0, INPUT_PRECISION=input_precision(x.dtype), **options,
            )  # fmt: skip
    return y, h


# ---- which implementation ---------------------------------------------------------------------------------


def linear_act_choice(x: Tensor, weight: Tensor) -> MatmulConfig | str:
    """How to compute act(x @ weight.T + bias) on this GPU: a configuration, or CUBLASLT.

    CUBLASLT, torch's product and then `bias_gelu_fwd`, where nothing was measured. A lookup, the same in
    every process.
    """
    key, configs = candidates(x, weight)
    return choose("linear_act", key, (CUBLASLT, *configs), x)


def candidates(x: Tensor, weight: Tensor) -> tuple[str, tuple[MatmulConfig, ...]]:
    dtype = "tf32" if input_precision(x.dtype) == "tf32" else DTYPES[x.dtype]
    aligned = is_aligned(x) and is_aligned(weight) and weight.shape[0] % 16 == 0
    return _rule(architecture(x), dtype, rows_bucket(x.shape[0]), *weight.shape, aligned)


@functools.cache
def _rule(
    arch: str, dtype: str, num_rows: int, num_features: int, num_inputs: int, aligned: bool
) -> tuple[str, tuple[MatmulConfig, ...]]:
    how = "" if aligned else " unaligned"
    key = f"{dtype} {num_rows} rows {num_inputs} to {num_features}{how}"
    return key, linear_act_configs(arch, dtype, num_rows, aligned)


def _checked_config(config: MatmulConfig | None, x: Tensor, weight: Tensor) -> MatmulConfig:
    if config is None:
        return candidates(x, weight)[1][0]
    fits = is_aligned(x) and is_aligned(weight) and weight.shape[0] % 16 == 0 and x.element_size() == 2
    if config.tma and not fits:
        raise ValueError(
            f"x {tuple(x.shape)} with strides {x.stride()} and weight {tuple(weight.shape)} in {x.dtype} do "
            "not fit tensor descriptors, which need 16-bit elements in rows that start at multiples of 16 "
            "elements: use a configuration without tma"
        )
    return config


# ---- compiling and tuning ---------------------------------------------------------------------------------


# BERT-Base, and a width that nothing is known of; what else there is `linear` compiles
_COMPILED_SHAPES = (("fp32", 768), ("tf32", 768), ("fp16", 768), ("bf16", 768), ("bf16", 1000))


def compile_cases(arch: str) -> list[CompileCase]:
    """Each configuration with the erf form and the product saved; one without, one with the tanh form."""
    cases = []
    for dtype, width in _COMPILED_SHAPES:
        configs = _rule(arch, dtype, 8192, 4 * width, width, width % 16 == 0)[1]
        for config in configs[: 1 if dtype == "fp16" else None]:
            cases.append(_case(config, dtype, width, "none", save=True))
    bf16 = _rule(arch, "bf16", 8192, 4 * 768, 768, True)[1][0]
    cases.append(_case(bf16, "bf16", 768, "none", save=False))
    cases.append(_case(bf16, "bf16", 768, "tanh", save=True))
    return cases


def _case(config: MatmulConfig, dtype: str, width: int, approximate: str, save: bool) -> CompileCase:
    element = "fp32" if dtype == "tf32" else dtype
    constants = {"APPROXIMATE": approximate, "SAVE_H": save}
    if config.tma:
        signature = {"x_desc": descriptor(element, config.block_m, config.block_k)}
        signature |= {"w_desc": descriptor(element, config.block_n, config.block_k)}
        signature |= {"bias_ptr": f"*{element}"}
        signature |= dict.fromkeys(("y_desc", "h_desc"), descriptor(element, config.block_m, config.block_n))
    else:
        signature = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr", "h_ptr"), f"*{element}")
        signature |= {"stride_xt": "i32"}
        constants |= {
            "EVEN_K": width % config.block_k == 0,
            "INPUT_PRECISION": "tf32" if dtype == "tf32" else "ieee",
        }
    signature |= dict.fromkeys(("T", "N", "K"), "i32")
    label = f"{dtype} {width} wide {config.block_m}x{config.block_n}x{config.block_k} "
    label += f"{config.num_warps} warps {config.num_stages} stages"
    label += ("" if approximate == "none" else f" {approximate}") + ("" if save else " inference")
    kernel = _linear_act_descriptor_kernel if config.tma else _linear_act_kernel
    return compile_case(kernel, label, element, signature, constants, config, width)


def tuning_cases(arch: str) -> list[TuningCase]:
    """Training's form at BERT's widths, against cuBLASLt and a second kernel."""
    cases = []
    for dtype in (torch.bfloat16, torch.float16):
        for width in TUNED_WIDTHS:
            for rows in TUNED_ROWS:
                key, configs = _rule(arch, DTYPES[dtype], rows_bucket(rows), 4 * width, width, True)
                prepare = functools.partial(_prepare, dtype, rows, width)
                cases.append(
                    TuningCase("linear_act", key, (CUBLASLT, *configs), prepare, 8.0 * rows * width**2)
                )
    return cases


def _prepare(
    dtype: torch.dtype, num_rows: int, width: int, device: torch.device
) -> Callable[[MatmulConfig | str], tuple[Tensor, ...]]:
    x = torch.randn(num_rows, width, dtype=dtype, device=device)
    weight = torch.randn(4 * width, width, dtype=dtype, device=device) / width**0.5
    bias = torch.randn(4 * width, dtype=dtype, device=device)

    def launch(candidate: MatmulConfig | str) -> tuple[Tensor, ...]:
        if isinstance(candidate, str):
            h = F.linear(x, weight)
            return bias_gelu_fwd(h, bias), h
        y, h = linear_act_fwd(x, weight, bias, config=candidate)
        assert h is not None
        return y, h

    return launch
