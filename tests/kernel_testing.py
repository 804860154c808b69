"""What the tests of Triton kernels share: the interpreter in a process of its own, and the error budget.

Without a GPU the kernels run under Triton's interpreter, in a pytest of their own: TRITON_INTERPRET is read
where `@triton.jit` decorates, and Triton decorates its own library (`tl.sum`, `tl.zeros`, ...) when it is
imported. So the variable must be there before the process imports Triton, and reloading the kernel module is
not enough once another test has. A child process also keeps it from every other test, and a wild pointer
kills the child only.
To run one of them: TRITON_INTERPRET=1 pytest tests/test_kernel_bias_gelu.py -k known_values
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# of a class of tests that launch kernels
CAN_LAUNCH = INTERPRETED or torch.cuda.is_available()

in_the_parent_only = pytest.mark.skipif(INTERPRETED, reason="the tests below run in this process already")


def run_interpreted(file: str, name: str = "TestKernels") -> None:
    """Runs `name` of a test file, or "" for all of it, under the interpreter.

    AssertionError with the output if a test fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{file}::{name}" if name else file],
        cwd=Path(__file__).parents[1],
        env=environment | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, f"exit status {child.returncode}\n{child.stdout}{child.stderr}"


def assert_accurate(ours: Tensor, plain: Tensor, exact: Tensor, largest: Tensor | None = None) -> None:
    """At most twice as far from fp64 as plain torch in that dtype, plus one rounding of the largest value.

    `largest` of other results than `exact`: for one that is 0 because larger terms cancel.
    """
    assert ours.dtype == plain.dtype and ours.shape == plain.shape
    if not ours.numel():
        return
    budget = (
        2 * (plain.double() - exact).abs().max()
        + torch.finfo(ours.dtype).eps * (exact if largest is None else largest).abs().max()
    )
    error = (ours.double() - exact).abs().max()
    assert error <= budget, f"max error {error:.2e} over budget {budget:.2e}"  # false for NaN
