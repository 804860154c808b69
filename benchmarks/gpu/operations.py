"""The registry of `gpu_check`: each operation with the tests it must pass and the rows it gets then."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.attention import attention_cases
from benchmarks.gpu.cross_entropy import cross_entropy_cases
from benchmarks.gpu.elementwise import activation_cases, norm_cases
from benchmarks.gpu.embedding import embedding_cases, padding_cases
from benchmarks.gpu.model import call_cases, model_cases
from benchmarks.gpu.optimizer import optimizer_cases
from benchmarks.gpu.projection import qkv_cases
from benchmarks.gpu.setting import DTYPE, Operation, Setting
from benchmarks.task import Case, Task, is_the_basis

# the rows whose rates are the floors of other rows, where none are known
COPY, MATMUL = "copy", "matmul"


def machine_cases(setting: Setting) -> Iterator[Case]:
    def copy() -> Task:
        source = torch.randn(setting.sizes.copied_bytes // 2, device=setting.device).to(DTYPE)
        target = torch.empty_like(source)
        task = Task(2 * setting.sizes.copied_bytes / 1e9, "gb")
        task.admit("torch copy_", lambda: lambda: target.copy_(source), is_the_basis)
        return task

    def matmul() -> Task:
        n = setting.sizes.matmul
        a, b = (torch.randn(n, n, device=setting.device).to(DTYPE) for _ in range(2))
        task = Task(2 * n**3 / 1e12, "tflop")
        task.admit("torch matmul", lambda: lambda: a @ b, is_the_basis)
        return task

    yield Case(COPY, copy)
    yield Case(MATMUL, matmul)


KERNELS = ("tests/test_kernel_attention.py", "tests/test_kernel_linear.py")
CASES = "tests/test_gpu_cases.py::TestKernels::test"

# the machine first: its rate of matrix products is the floor of the other rows where no figure is known
OPERATIONS = (
    Operation("machine", (), machine_cases),
    Operation("attention", (KERNELS[0], f"{CASES}_attention"), attention_cases),
    Operation("qkv", (KERNELS[1], f"{CASES}_projection"), qkv_cases),
    Operation("linear_cross_entropy", ("tests/test_kernel_cross_entropy.py",), cross_entropy_cases),
    Operation("norm", ("tests/test_kernel_dropout_add_norm.py",), norm_cases),
    Operation(
        "activation",
        ("tests/test_kernel_bias_gelu.py", "tests/test_kernel_linear_act.py"),
        activation_cases,
    ),
    Operation("optimizer", ("tests/test_kernel_lamb.py",), optimizer_cases),
    Operation("embed", ("tests/test_kernel_embedding.py",), embedding_cases),
    Operation("padding", ("tests/test_op_padding.py",), padding_cases),
    Operation("call", (*KERNELS, "tests/test_model_kernels.py"), call_cases),
    Operation(
        "model",
        (*KERNELS, "tests/test_model_kernels.py", "tests/test_gpu_cases.py", "tests/test_gpu_graphs.py"),
        model_cases,
    ),
)
