"""Fixtures every test may use: a seed, buffers of NaN, and the optional data that lies beside a checkout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# toy sizes gain nothing from threads, and lose minutes to them where the machine is busy
torch.set_num_threads(1)

_BESIDE = Path(__file__).resolve().parents[2] / "shared"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch sees none")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs compiled kernels, and TRITON_INTERPRET=1 interprets them")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def nan_filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh buffers hold NaN (integers: 85), so that an element that no kernel writes is seen."""
    made = []

    def filled(allocate: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            made.append(allocate(*args, **kwargs))
            return made[-1].fill_(float("nan") if made[-1].is_floating_point() else 85)

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
    yield
    assert made, "the launchers allocate in another way: nothing was filled"


@pytest.fixture
def shared_data() -> Path:
    """Small real corpora; not part of the repository."""
    if not (_BESIDE / "data").is_dir():
        pytest.skip("no ../shared/data beside the checkout")
    return _BESIDE / "data"


@pytest.fixture
def shared_spec() -> Path:
    """Published test vectors; not part of the repository."""
    if not (_BESIDE / "spec").is_dir():
        pytest.skip("no ../shared/spec beside the checkout")
    return _BESIDE / "spec"


@pytest.fixture(params=["calls", "operators"])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What records a pass on a CPU: calls on static buffers, or operators on the memory that they had."""
    from fastbert.inference import BucketGraphs
    from fastbert.ops import attention_eager, backend
    from tests.recorded_operators import record_calls, record_operators

    monkeypatch.setattr(BucketGraphs, "_comes_again", lambda self, key: True)  # the first one, too
    if request.param == "calls":
        return record_calls
    # as on a GPU, where the host reads neither lengths nor ids
    for module in (attention_eager, backend):
        monkeypatch.setattr(module, "host_may_read", lambda x: False)
    return record_operators
