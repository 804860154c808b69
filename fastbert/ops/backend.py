"""Which implementation of an operation runs, how to force one, and how to ask.

The tensors decide; the model has no switches. On "auto", the default, tensors on a GPU go through the Triton
kernels, and so do CPU tensors in a process that was started with TRITON_INTERPRET=1; everything else runs
eagerly, in plain torch. An operation on a GPU that the kernels cannot run says so once
(EagerFallbackWarning).

    with backend.use("eager"):      # or "triton", "flash_attn", "auto"; a plain call sets it for the process
        model(batch)
    backend.last_run()              # {"attention": "eager", "qkv_projection": "eager"}
    backend.explain("attention", "cuda", torch.bfloat16, head_dim=64)

What was forced and cannot run is an error, never another implementation. Only the device, the dtype and the
width of a head decide: a path never depends on dropout or on training.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastbert.errors import UserError

CHOICES = ("auto", "eager", "triton", "flash_attn")
# the versions of Triton that the kernels are tested with: from the first to before the second
TESTED_TRITON = ((3, 6), (3, 10))
OLDEST_FLASH_ATTN = (2, 7)
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLASH_ATTN_DTYPES = (torch.float16, torch.bfloat16)
FLASH_ATTN_HEAD_DIM_LIMIT = 256
FLASH_ATTN_DEVICES = ("cuda",)

_choice = "auto"
_last_run: dict[str, str] = {}
_said: set[tuple[str, str]] = set()

Result = TypeVar("Result")


class EagerFallbackWarning(UserWarning):
    """An operation does not run where it was expected to: its name, what runs instead, and why."""


@dataclass(frozen=True)
class Decision:
    """What an operation would run on, and why."""

    implementation: str  # "eager", "triton" or "flash_attn"
    reason: str
    is_fallback: bool = False  # eager on a device that has kernels


# ---- forcing and asking -----------------------------------------------------------------------------------


class use(contextlib.AbstractContextManager["use"]):
    """Choose the implementation for this process: "auto", "eager", "triton" or "flash_attn".

    In a `with` statement the earlier choice comes back at its end. "flash_attn" is about attention only; the
    other operations run as on "auto". Under torch.compile another choice compiles again.
    """

    def __init__(self, choice: str) -> None:
        global _choice
        if choice not in CHOICES:
            raise ValueError(f"backend {choice!r} is not one of {', '.join(CHOICES)}")
        self._previous, _choice = _choice, choice

    def __exit__(self, *exception: object) -> None:
        global _choice
        _choice = self._previous


def last_run() -> dict[str, str]:
    """Operation -> the implementation that ran last: "eager", "triton", "cublaslt" or "flash_attn".

    Recorded by the implementations as they run, compiled or not; a CUDA graph that is replayed records
    nothing.
    """
    return dict(_last_run)


def ran(op: str, implementation: str) -> None:
    """Called by each implementation of an operation, when it runs and not when it is traced."""
    if not torch.compiler.is_compiling():
        _last_run[op] = implementation


def explain(op: str, device: torch.device | str, dtype: torch.dtype, head_dim: int | None = None) -> Decision:
    """What `op` (a name as in `last_run`, "attention") would run on for such tensors, and why; runs nothing.

    UserError where the operation itself would raise it. Where kernels run the projection, a measured table
    may still give a shape to cuBLASLt: `last_run` tells.
    """
    return _decide(_choice, op, torch.device(device), dtype, head_dim)


# ---- deciding ---------------------------------------------------------------------------------------------


def implementation(
    op: str,
    x: Tensor,
    head_dim: int | None = None,
    *,
    key_mask: bool = False,
    beyond_kernels: str = "",
    any_dtype: bool = False,
) -> str:
    """The implementation that `op` on x is to run: "eager", "triton" or "flash_attn".

    `beyond_kernels` names what no kernel provides ("a mask that depends on the query"), `key_mask` is a thing
    that flash-attn does not: both are said once. `any_dtype` is for kernels that only move elements.
    UserError for a forced implementation that cannot run here.
    """
    dtype = KERNEL_DTYPES[0] if any_dtype else x.dtype
    return _settle(_choice, op, x.device, dtype, head_dim, key_mask, beyond_kernels)


def choice() -> str:
    """What `use` chose last: "auto", "eager", "triton" or "flash_attn"."""
    return _choice


def is_forced(choice: str) -> bool:
    """Whether `use` chose this."""
    return _choice == choice


def kernels_expected(device: torch.device) -> bool:
    """Whether attention on this device may run through the Triton kernels, and wants their schedule."""
    return _kernels_expected(_choice, device)


def _kernels_expected(choice: str, device: torch.device) -> bool:
    return choice in ("auto", "triton") and not _device_problem(device)


def _settle(
    choice: str,
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int | None,
    key_mask: bool,
    beyond_kernels: str,
) -> str:
    decision = _decide(choice, op, device, dtype, head_dim)
    if decision.implementation == "flash_attn" and key_mask and not beyond_kernels:
        decision = _decide("auto", op, device, dtype, head_dim)
        _say_once(op, decision.implementation, "flash-attn takes no mask of the keys")
    elif decision.implementation != "eager" and beyond_kernels:
        decision = Decision("eager", beyond_kernels, is_fallback=True)
    if decision.is_fallback:
        _say_once(op, decision.implementation, decision.reason)
    return decision.implementation


def _say_once(op: str, implementation: str, reason: str) -> None:
    if (op, reason) not in _said:
        _said.add((op, reason))
        warnings.warn(f"{op} runs on {implementation}: {reason}", EagerFallbackWarning, stacklevel=2)


@functools.cache
def _decide(choice: str, op: str, device: torch.device, dtype: torch.dtype, head_dim: int | None) -> Decision:
    if choice == "eager":
        return Decision("eager", 'chosen by backend.use("eager")')
    if choice == "flash_attn" and op == "attention":
        problem = _flash_attn_problem(device, dtype, head_dim)
        if problem:
            raise UserError(f"attention cannot run on flash_attn: {problem}")
        return Decision("flash_attn", 'chosen by backend.use("flash_attn")')
    problem = _device_problem(device)
    is_fallback = device.type == "cuda"
    if not problem:
        problem = _kernel_problem(dtype, head_dim)
        is_fallback = True
    if not problem:
        return Decision("triton", f"the Triton kernels run on {device.type}")
    if choice == "triton":
        raise UserError(f"{op} cannot run on triton: {problem}")
    return Decision("eager", problem, is_fallback)


# These run while torch.compile traces, and their results become constants of the graph. This is what
# torch.compiler.assume_constant_result sets, which would make `import fastbert` import torch._dynamo, for a
# second
for _function in (_settle, _kernels_expected):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010


@functools.cache
def _device_problem(device: torch.device) -> str:
    """Why the kernels do not run on the device, or ""."""
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "tensors on a CPU need TRITON_INTERPRET=1 in the environment before Python starts"
    elif device.type != "cuda":
        return f"the Triton kernels have no version for {device.type}: move the tensors to a GPU"
    elif not torch.cuda.is_available():
        return "torch sees no GPU"
    problem = _triton_problem()
    if problem or device.type == "cpu":
        return problem
    from fastbert_kernels.launch import architecture_of

    try:
        if not torch.version.hip:
            architecture_of(torch.cuda.get_device_capability(device))
    except ValueError as error:
        return str(error)
    return ""


def _triton_problem() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    try:
        version = importlib.import_module("triton").__version__
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    first, end = TESTED_TRITON
    if not first <= _major_minor(version) < end:
        return (
            f"Triton {version} is not among the versions that the kernels are tested with: "
            f"install triton>={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        )
    return ""


def _kernel_problem(dtype: torch.dtype, head_dim: int | None) -> str:
    if dtype not in KERNEL_DTYPES:
        return f"the Triton kernels take float32, float16 and bfloat16, not {_name(dtype)}"
    if head_dim is not None:
        from fastbert_kernels.attention import HEAD_DIM_LIMIT

        if head_dim > HEAD_DIM_LIMIT:
            return f"a head is {head_dim} wide, and the Triton kernel takes at most {HEAD_DIM_LIMIT}"
    return ""


def _flash_attn_problem(device: torch.device, dtype: torch.dtype, head_dim: int | None) -> str:
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed: pip install flash-attn"
    try:
        module = importlib.import_module("flash_attn")
    except ImportError as error:
        return f"flash_attn cannot be imported: {error}"
    version = str(getattr(module, "__version__", "unknown"))
    # known by what it offers: another package may have its name
    wanted = f"flash-attn {OLDEST_FLASH_ATTN[0]}.{OLDEST_FLASH_ATTN[1]} or newer"
    if not callable(getattr(module, "flash_attn_varlen_qkvpacked_func", None)):
        return f"the module flash_attn has no flash_attn_varlen_qkvpacked_func: install {wanted}"
    if _major_minor(version) < OLDEST_FLASH_ATTN:
        return f"the version of flash_attn is {version}: install {wanted}"
    if device.type not in FLASH_ATTN_DEVICES:
        return f"it needs a GPU, and the tensors are on {device.type}"
    if dtype not in FLASH_ATTN_DTYPES:
        return f"it takes float16 and bfloat16, not {_name(dtype)}: use autocast, or convert the model"
    if head_dim is not None and head_dim > FLASH_ATTN_HEAD_DIM_LIMIT:
        return f"a head is {head_dim} wide, and it takes at most {FLASH_ATTN_HEAD_DIM_LIMIT}"
    return ""


def _major_minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- running ----------------------------------------------------------------------------------------------


def call(
    implementation: str,
    inputs: Iterable[Tensor],
    *,
    registered: Callable[[], Result],
    launch: Callable[[], Result],
    eager: Callable[[], Result],
) -> Result:
    """Run an operation: through its registration, or past it where that would only take time.

    torch.compile needs the `registered` operator. Without it, `eager` is plain differentiable torch, and
    `launch` calls the kernel without autograd, for `inputs` that want no gradient. All three compute the
    same.
    """
    if not torch.compiler.is_compiling():
        if implementation != "triton":
            return eager()
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            return launch()
    return registered()


def host_may_read(x: Tensor) -> bool:
    """Whether looking at x's values makes nobody wait: on a CPU, and not while torch.compile traces."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast asks for on the device, or None outside of it."""
    # tensors on "meta" have no values, and torch has no autocast for them
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, torch computes in the dtypes that it is given."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
