"""How large the rows of `gpu_check` are, and what they depend on of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.task import Case

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """How large the rows are."""

    tokens: int
    lengths: tuple[int, ...]  # rows of equal sequences; the last is also the longest of the mix
    heads: tuple[
        tuple[int, int], ...
    ]  # (heads, width of one): every length for the first, the mix for others
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    models: tuple[dict[str, int], ...]
    model_tokens: int
    matmul: int
    copied_bytes: int


def model_fields(
    hidden_size: int, num_hidden_layers: int, width: int = 64, vocab_size: int = 30522
) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": hidden_size // width,
        "intermediate_size": 4 * hidden_size,
        "vocab_size": vocab_size,
    }


REAL = Sizes(
    tokens=32_768,
    lengths=(128, 512),
    heads=((16, 64), (12, 32)),  # BERT-Large, MiniLM
    widths=(768, 1024),  # BERT-Base, BERT-Large
    rows=(4096, 16_384, 65_536),
    models=(model_fields(768, 12), model_fields(1024, 24)),
    model_tokens=16_384,
    matmul=8192,
    copied_bytes=2**30,
)
TINY = Sizes(
    tokens=32,
    lengths=(8, 16),
    heads=((1, 16), (2, 8)),
    widths=(64,),
    rows=(40,),
    models=(model_fields(32, 1, width=16, vocab_size=50),),
    model_tokens=12,
    matmul=64,
    copied_bytes=2**16,
)


@dataclass(frozen=True)
class Setting:
    """The machine, as far as rows depend on it."""

    device: torch.device
    sizes: Sizes
    peak_tflops: float | None = None  # of a large bf16 product
    peak_gb: float | None = None  # GB/s, read and written, of a large copy
    has_targets: bool = False  # the targets are for one GPU, the H200


@dataclass(frozen=True)
class Operation:
    """An entry of the registry: rows are timed only where all of `tests` have passed."""

    name: str
    tests: tuple[str, ...]  # files, or file::class::prefix of names
    cases: Callable[[Setting], Iterator[Case]]
