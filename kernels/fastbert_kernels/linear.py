"""Query, key and value projections in one launch, from the three weights where they are.

y[:, i] = x @ w_i.T + b_i. The weights stay three parameters and nothing is concatenated: each tile of the
output selects its weight. Two kernels: one loads through pointers (any GPU, any width, any row stride). On
sm_90 and newer a persistent one fetches tiles through tensor descriptors (TMA); the host makes them with the
launch and they travel as its parameters, so it also runs in a CUDA graph. The gradients are in `linear_dx`
and `linear_dw`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastbert_kernels.launch import (
    CompileCase,
    MatmulConfig,
    architecture,
    check_can_launch,
    choose,
    device_guard,
    num_programs_persistent,
    qkv_bwd_dw_configs,
    qkv_bwd_dx_configs,
    qkv_fwd_configs,
    rows_bucket,
)
from fastbert_kernels.numerics import dot, input_precision
from fastbert_kernels.tune import TuningCase

# the candidate that is no kernel of this package: torch's product on the stacked weight
CUBLASLT = "cublaslt"
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# of addresses in bytes, for tensor descriptors; of widths and row strides in elements, because that is the
# one multiple that Triton looks for
_ALIGNMENT = 16


@triton.jit
def select(which, query, key, value):
    """One of three scalars or pointers, by number."""
    return tl.where(which == 0, query, tl.where(which == 1, key, value))


@triton.jit
def tile_position(tile, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile. GROUP_M rows of tiles are walked column by column: programs that run at the
    same time then share their operands in L2."""
    group = tile // (GROUP_M * num_tiles_n)
    first_m = group * GROUP_M
    rows = tl.minimum(num_tiles_m - first_m, GROUP_M)
    in_group = tile - group * (GROUP_M * num_tiles_n)
    return first_m + in_group % rows, in_group // rows


# what changes with the batch is not specialised on: being 1 or a multiple of 16 would compile another kernel
@triton.jit(do_not_specialize=["T"])
def _qkv_fwd_kernel(
    x_ptr,  # [T, K]
    wq_ptr,  # [N, K] contiguous
    wk_ptr,
    wv_ptr,
    bq_ptr,  # [N]
    bk_ptr,
    bv_ptr,
    y_ptr,  # [T, 3, N] contiguous
    stride_xt,
    T,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, column = tile_position(tl.program_id(0), tl.cdiv(T, BLOCK_M), 3 * num_tiles_n, GROUP_M)
    which = column // num_tiles_n
    tile_n = column - which * num_tiles_n
    w_ptr = select(which, wq_ptr, wk_ptr, wv_ptr)
    b_ptr = select(which, bq_ptr, bk_ptr, bv_ptr)

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
    bias = tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + (rows * 3 + which)[:, None] * N + cols[None, :]
    tl.store(y_ptrs, acc + bias[None, :], mask=(rows < T)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["T"])
def _qkv_fwd_descriptor_kernel(
    x_desc,  # [T, K]
    wq_desc,  # [N, K]
    wk_desc,
    wv_desc,
    bq_ptr,  # [N]
    bk_ptr,
    bv_ptr,
    y_desc,  # [T, 3 * N]; N is a multiple of BLOCK_N
    T,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    num_tiles_m = tl.cdiv(T, BLOCK_M)
    num_tiles_n = N // BLOCK_N
    num_tiles = num_tiles_m * num_tiles_n * 3
    # flattened: the loads of the next tile begin under the epilogue of this one
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        tile_m, column = tile_position(tile, num_tiles_m, 3 * num_tiles_n, GROUP_M)
        which = column // num_tiles_n
        first_col = (column - which * num_tiles_n) * BLOCK_N
        # becomes a selection between the addresses of three kernel parameters: nothing is copied
        if which == 0:
            w_desc = wq_desc
        elif which == 1:
            w_desc = wk_desc
        else:
            w_desc = wv_desc
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([tile_m * BLOCK_M, k])  # zeros beyond either end
            w = w_desc.load([first_col, k])
            acc = dot(x, w.T, acc, "ieee")
        bias_ptr = select(which, bq_ptr, bk_ptr, bv_ptr)
        bias = tl.load(bias_ptr + first_col + tl.arange(0, BLOCK_N)).to(tl.float32)
        y_desc.store([tile_m * BLOCK_M, which * N + first_col], (acc + bias[None, :]).to(y_desc.dtype))


def qkv_fwd(
    x: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    config: MatmulConfig | None = None,
) -> Tensor:
    """x [T, K], three weights [N, K], three biases [N] -> [T, 3, N], contiguous, in x's dtype.

    y[:, i] = x @ w_i.T + b_i. fp32, fp16 or bf16; sums and bias in fp32, rounded once; fp32 products use TF32
    where torch's do. T may be 0, rows of x may be strided. Deterministic, and a row depends on that row
    only. `config` is a configuration of `qkv_choice`; without one it is the first of its rule. ValueError for
    anything else.
    """
    check_matrix("x", x)
    check_weights(x, x.shape[1], wq, wk, wv)
    for name, bias in (("bq", bq), ("bk", bk), ("bv", bv)):
        check_like(name, bias, (wq.shape[0],), x)
    check_can_launch(_qkv_fwd_kernel, x)
    T, K = x.shape
    N = wq.shape[0]
    y = torch.empty((T, 3, N), dtype=x.dtype, device=x.device)
    if T == 0:
        return y
    config = checked_config("qkv_fwd", config, x, wq, wk, wv)
    tiles = 3 * triton.cdiv(T, config.block_m) * triton.cdiv(N, config.block_n)
    with device_guard(x):
        if config.tma:
            x_desc = TensorDescriptor.from_tensor(x, [config.block_m, config.block_k])
            w_descs = [
                TensorDescriptor.from_tensor(w, [config.block_n, config.block_k]) for w in (wq, wk, wv)
            ]
            y_desc = TensorDescriptor.from_tensor(y.view(T, 3 * N), [config.block_m, config.block_n])
            _qkv_fwd_descriptor_kernel[(min(tiles, num_programs_persistent(x)),)](
                x_desc, *w_descs, bq, bk, bv, y_desc, T, N, K, **launch_options(config)
            )
        else:
            _qkv_fwd_kernel[(tiles,)](
                x, wq, wk, wv, bq, bk, bv, y, x.stride(0), T, N, K,
                EVEN_K=K % config.block_k == 0, INPUT_PRECISION=input_precision(x.dtype),
                **launch_options(config),
            )  # fmt: skip
    return y


# ---- which implementation ---------------------------------------------------------------------------------


def qkv_choice(op: str, *tensors: Tensor) -> MatmulConfig | str:
    """How to compute `op` on this GPU: a configuration for its launcher, or CUBLASLT for torch's product.

    `op` and `tensors` are "qkv_fwd" and x, wq, wk, wv; "qkv_bwd_dx" and dqkv, wq, wk, wv; or "qkv_bwd_dw" and
    dqkv, x. CUBLASLT where nothing was measured. A lookup, the same in every process.
    """
    key, configs = candidates(op, *tensors)
    return choose(op, key, (CUBLASLT, *configs), tensors[0])


def candidates(op: str, *tensors: Tensor) -> tuple[str, tuple[MatmulConfig, ...]]:
    """The tuning key and the configurations of `op` for these tensors, as `qkv_choice` takes them."""
    first, last = tensors[0], tensors[-1]
    num_features = last.shape[0] if op == "qkv_fwd" else first.shape[2]
    num_inputs = last.shape[1]
    dtype = "tf32" if input_precision(first.dtype) == "tf32" else DTYPES[first.dtype]
    return _rule(
        op, architecture(first), dtype, rows_bucket(first.shape[0]), num_features, num_inputs,
        all(is_aligned(t) for t in tensors),
    )  # fmt: skip


@functools.cache
def _rule(
    op: str, arch: str, dtype: str, num_rows: int, num_features: int, num_inputs: int, aligned: bool
) -> tuple[str, tuple[MatmulConfig, ...]]:
    if op == "qkv_fwd":
        configs = qkv_fwd_configs(arch, dtype, num_rows, num_features, aligned)
    elif op == "qkv_bwd_dx":
        configs = qkv_bwd_dx_configs(arch, dtype, num_rows, num_features, aligned)
    else:
        configs = qkv_bwd_dw_configs(arch, dtype, num_rows, aligned)
    how = "" if aligned else " unaligned"
    return f"{dtype} {num_rows} rows {num_inputs} to 3x{num_features}{how}", configs


def checked_config(op: str, config: MatmulConfig | None, *tensors: Tensor) -> MatmulConfig:
    """`config`, or the first of the rule. ValueError if it wants descriptors that cannot take the tensors."""
    if config is None:
        return candidates(op, *tensors)[1][0]
    if config.tma:
        for tensor in tensors:
            if not is_aligned(tensor) or tensor.element_size() != 2:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} and {tensor.dtype} "
                    f"does not fit a tensor descriptor, which needs 16-bit elements in rows that start at "
                    f"multiples of {_ALIGNMENT} elements: use a configuration without tma"
                )
        num_features = tensors[-1].shape[0] if op == "qkv_fwd" else tensors[0].shape[2]
        # dW's products may reach from one projection into the next: what they get there is not stored
        block = {"qkv_fwd": config.block_n, "qkv_bwd_dx": config.block_k, "qkv_bwd_dw": 1}[op]
        if num_features % block:
            raise ValueError(
                f"{num_features} output features are not a multiple of the {block} that {config} takes at a "
                "time: use a configuration without tma"
            )
    return config


def is_aligned(x: Tensor) -> bool:
    """Whether every row of x starts at a multiple of _ALIGNMENT elements and bytes, apart from the others."""
    return (
        x.data_ptr() % _ALIGNMENT == 0
        and x.shape[-1] % _ALIGNMENT == 0
        and all(stride % _ALIGNMENT == 0 for stride in x.stride()[:-1])
        and x.stride(0) >= math.prod(x.shape[1:])
    )


def launch_options(config: MatmulConfig) -> dict[str, int]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


# ---- what the launchers refuse ----------------------------------------------------------------------------


def check_matrix(name: str, x: Tensor) -> None:
    """ValueError unless x is [T, columns], of a supported dtype, with adjacent columns."""
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"{name} must be [T, K] with K > 0, but has shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, but is {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(
            f"{name} must have adjacent columns, but has column stride {x.stride(1)}: call .contiguous()"
        )


def check_weights(x: Tensor, num_inputs: int, wq: Tensor, wk: Tensor, wv: Tensor) -> None:
    """ValueError unless the weights are [N, num_inputs], contiguous, and of x's dtype and device."""
    if wq.dim() != 2 or wq.shape[0] == 0:
        raise ValueError(f"wq must be [N, K] with N > 0, but has shape {tuple(wq.shape)}")
    for name, weight in (("wq", wq), ("wk", wk), ("wv", wv)):
        check_like(name, weight, (wq.shape[0], num_inputs), x)


def check_like(name: str, parameter: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """ValueError unless `parameter` is contiguous, of that shape, and of x's dtype and device."""
    if parameter.shape != shape or parameter.dtype != x.dtype or parameter.device != x.device:
        raise ValueError(
            f"{name} must be {list(shape)} {x.dtype} on {x.device}, "
            f"but is {list(parameter.shape)} {parameter.dtype} on {parameter.device}"
        )
    if not parameter.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, but has strides {parameter.stride()}: call .contiguous()"
        )


def check_dqkv(dqkv: Tensor) -> None:
    """ValueError unless dqkv is [T, 3, N], of a supported dtype, each row contiguous."""
    if dqkv.dim() != 3 or dqkv.shape[1] != 3 or dqkv.shape[2] == 0:
        raise ValueError(f"dqkv must be [T, 3, N] with N > 0, but has shape {tuple(dqkv.shape)}")
    if dqkv.dtype not in DTYPES:
        raise ValueError(f"dqkv must be float32, float16 or bfloat16, but is {dqkv.dtype}")
    N = dqkv.shape[2]
    if (N > 1 and dqkv.stride(2) != 1) or dqkv.stride(1) != N:
        raise ValueError(
            f"each row of dqkv must be contiguous, but its strides are {dqkv.stride()}: call .contiguous()"
        )


# ---- compiling and tuning ---------------------------------------------------------------------------------

# (dtype, width): BERT-Base; aligned, but no multiple of a block; no multiple of 16, so nothing is known to be
# aligned. fp16 and TF32 have the code of bf16 and fp32 otherwise
COMPILED_SHAPES = (
    ("fp32", 768), ("fp32", 1000), ("tf32", 768), ("fp16", 768), ("bf16", 768), ("bf16", 720), ("bf16", 1000),
)  # fmt: skip
# MiniLM, BERT-Base, BERT-Large; from a batch of queries to a packed micro-batch
TUNED_WIDTHS = (384, 768, 1024)
TUNED_ROWS = (512, 2048, 8192, 16_384, 32_768)


def compile_cases(arch: str) -> list[CompileCase]:
    """Both forward kernels with each configuration of their rule."""
    return cases_of_op("qkv_fwd", arch, _forward_case)


def cases_of_op(
    op: str, arch: str, case_of: Callable[[MatmulConfig, str, int, str], CompileCase]
) -> list[CompileCase]:
    """`case_of(config, dtype, width, label)` for every configuration that `op` could be launched with."""
    cases = []
    for dtype, width in COMPILED_SHAPES:
        _, configs = _rule(op, arch, dtype, 8192, width, width, width % _ALIGNMENT == 0)
        for config in configs[: 1 if dtype == "fp16" else None]:
            label = f"{dtype} {width} wide {config.block_m}x{config.block_n}x{config.block_k} "
            label += f"{config.num_warps} warps {config.num_stages} stages"
            cases.append(case_of(config, dtype, width, label))
    return cases


def _forward_case(config: MatmulConfig, dtype: str, width: int, label: str) -> CompileCase:
    element = "fp32" if dtype == "tf32" else dtype
    weights, biases = ([f"{kind}{i}" for i in "qkv"] for kind in "wb")
    sizes = ("T", "N", "K")
    if config.tma:
        signature = {"x_desc": descriptor(element, config.block_m, config.block_k)}
        signature |= {f"{w}_desc": descriptor(element, config.block_n, config.block_k) for w in weights}
        signature |= {f"{b}_ptr": f"*{element}" for b in biases}
        signature |= {"y_desc": descriptor(element, config.block_m, config.block_n)}
        constants = {}
    else:
        signature = {f"{t}_ptr": f"*{element}" for t in ("x", *weights, *biases, "y")}
        signature |= {"stride_xt": "i32"}
        constants = {
            "EVEN_K": width % config.block_k == 0,
            "INPUT_PRECISION": "tf32" if dtype == "tf32" else "ieee",
        }
    signature |= dict.fromkeys(sizes, "i32")
    kernel = _qkv_fwd_descriptor_kernel if config.tma else _qkv_fwd_kernel
    return compile_case(kernel, label, element, signature, constants, config, width)


def descriptor(element: str, rows: int, columns: int) -> str:
    """The type of a descriptor's tiles in a signature."""
    return f"tensordesc<{element}[{rows}, {columns}]>"


def compile_case(
    kernel: Any,
    label: str,
    element: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    config: MatmulConfig,
    width: int,
) -> CompileCase:
    """A case of a product as it is launched at that width: pointers and widths aligned, or nothing."""
    options = launch_options(config)
    never = {p.name for p in kernel.params if p.do_not_specialize}
    aligned = [name for name, kind in signature.items() if not kind.startswith("tensordesc")]
    return CompileCase(
        kernel=kernel,
        label=label,
        dtype=element,
        signature=signature,
        constexprs=constants | {name: value for name, value in options.items() if name.isupper()},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=frozenset(set(aligned) - never if width % _ALIGNMENT == 0 else ()),
        uses_dot=True,
    )


def tuning_cases(arch: str) -> list[TuningCase]:
    """The forward product at BERT's widths."""
    return [
        TuningCase("qkv_fwd", key, (CUBLASLT, *configs), functools.partial(_prepare, *shape), flops)
        for key, configs, shape, flops in tuned_shapes("qkv_fwd", arch)
    ]


def tuned_shapes(
    op: str, arch: str
) -> list[tuple[str, tuple[MatmulConfig, ...], tuple[torch.dtype, int, int], float]]:
    """(key, configurations, (dtype, rows, width), flops) of each shape that is measured."""
    shapes = []
    for dtype in (torch.bfloat16, torch.float16):
        for width in TUNED_WIDTHS:
            for rows in TUNED_ROWS:
                key, configs = _rule(op, arch, DTYPES[dtype], rows_bucket(rows), width, width, True)
                shapes.append((key, configs, (dtype, rows, width), 6.0 * rows * width * width))
    return shapes


def _prepare(
    dtype: torch.dtype, num_rows: int, width: int, device: torch.device
) -> Callable[[MatmulConfig | str], tuple[Tensor, ...]]:
    x = torch.randn(num_rows, width, dtype=dtype, device=device)
    weights = [torch.randn(width, width, dtype=dtype, device=device) / width**0.5 for _ in range(3)]
    biases = [torch.randn(width, dtype=dtype, device=device) for _ in range(3)]

    def launch(candidate: MatmulConfig | str) -> tuple[Tensor, ...]:
        if isinstance(candidate, str):
            y = torch.nn.functional.linear(x, torch.cat(weights), torch.cat(biases))
            return (y.view(num_rows, 3, width),)
        return (qkv_fwd(x, *weights, *biases, config=candidate),)

    return launch
