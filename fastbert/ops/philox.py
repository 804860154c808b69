"""The dropout mask of the attention kernels in torch integer arithmetic: one seed, one mask, everywhere.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3) with 7 rounds,
the fewest that pass BigCrush there. An element of the attention matrix gets 16 bits that depend on the seed,
its sequence, its head, and its row and column in the sequence; `kernels/fastbert_kernels/philox.py` says why
they are laid out as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
RANDOM_BITS = 16

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
# the upper bit of both halves of a word: flipped, halves compare as signed numbers
_SIGN_BITS = 0x80008000
# elements of a mask that a CPU makes at a time: its intermediate words then stay in the cache
_CPU_PIECE = 1 << 20

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_seed(device: torch.device) -> Tensor:
    """A new seed, int64 [1], from torch's generator of the device; the host does not see it."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def dropout_threshold(dropout_p: float) -> tuple[int, float]:
    """(t, scale): an element is dropped if its 16 bits are below t, and kept ones are scaled.

    The share that is dropped is t / 65536, within 8e-6 of dropout_p. ValueError outside [0, 1].
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p {dropout_p} is not a probability: give one from 0 to 1")
    threshold = min(round(dropout_p * 2**RANDOM_BITS), 2**RANDOM_BITS - 1)
    return threshold, 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)


def philox4x32(counter: Words, key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> Words:
    """Four random words for each counter of four words; int64 tensors whose lower 32 bits are the words.

    Counters and key broadcast against each other, which makes the first rounds of a grid of counters cheap.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # 64-bit products wrap into the sign; the shift then fills with ones, which the mask takes off
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ k0) & _WORD
        c2 = ((product0 >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = product1, product0  # only their lower halves are ever looked at
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def dropout_keep(
    seed: Tensor, major: Tensor, num_heads: int, num_rows: int, num_cols: int, dropout_p: float
) -> Tensor:
    """Which probabilities stay: bool [N, heads, rows, cols] for seed int64 [1] and major [N].

    `major` tells sequences apart: it is the token row where each begins. The same for any num_rows and
    num_cols that contain an element.
    """
    piece = max(1, _CPU_PIECE // max(1, num_heads * num_rows * num_cols))
    if seed.device.type != "cpu" or major.shape[0] <= piece:
        return _dropout_keep(seed, major, num_heads, num_rows, num_cols, dropout_p)
    pieces = (_dropout_keep(seed, m, num_heads, num_rows, num_cols, dropout_p) for m in major.split(piece))
    return torch.cat(list(pieces))


def _dropout_keep(
    seed: Tensor, major: Tensor, num_heads: int, num_rows: int, num_cols: int, dropout_p: float
) -> Tensor:
    row_blocks, col_blocks = (num_rows + 15) // 16, (num_cols + 15) // 16
    c0 = torch.arange(row_blocks * 8, device=seed.device)[:, None]
    c1 = torch.arange(col_blocks * 4, device=seed.device)
    c2 = major.long()[:, None, None, None]
    c3 = torch.arange(num_heads, device=seed.device)[:, None, None]
    words = philox4x32((c0, c1, c2, c3), (seed & _WORD, (seed >> 32) & _WORD))
    # row = 16 * rh + 8 * a + rl and column = 16 * ch + 8 * d + 2 * cq + b: half b of word 2 * d + a
    size = (major.shape[0], num_heads, row_blocks, 8, col_blocks, 4)
    bits = torch.empty((*size[:3], 2, 8, col_blocks, 2, 4), dtype=torch.int32, device=seed.device)
    for index, word in enumerate(words):
        bits[:, :, :, index % 2, :, :, index // 2] = (word ^ _SIGN_BITS).view(size)
    halves = bits.view(torch.int16).view(*size[:2], row_blocks * 16, col_blocks * 16)
    threshold, _ = dropout_threshold(dropout_p)
    return (halves >= threshold - 2 ** (RANDOM_BITS - 1))[:, :, :num_rows, :num_cols]
