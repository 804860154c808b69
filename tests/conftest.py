"""Fixtures every test may use: a seed, and the optional data that lies beside a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# toy sizes gain nothing from threads, and lose minutes to them where the machine is busy
torch.set_num_threads(1)

_BESIDE = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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
