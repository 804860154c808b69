"""Dropout masks as a function of a seed and a place, so that a backward pass makes them again.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3) turns a
counter of four 32-bit words into four random ones. Its cost decides what attention with dropout costs, so

* one call serves 8 elements, with 16 bits each: those that differ only in bit 3 of the row and in bits 0 and
  3 of the column. The accumulator of mma.sync and of wgmma keeps such elements in one thread (its fragment
  repeats every 8 rows and every 8 columns, with 2 adjacent columns), so nothing is exchanged between threads.
  In the transposed tile of the backward pass 4 of the 8 stay together.
* 7 rounds: the fewest that pass BigCrush in that paper (table 2). The usual 10 are a safety margin.
"""

from __future__ import annotations

import triton
import triton.language as tl

PHILOX_ROUNDS: tl.constexpr = tl.constexpr(7)
RANDOM_BITS = 16


def dropout_threshold(dropout_p: float) -> tuple[int, float]:
    """(t, scale): an element is dropped if its 16 random bits are below t, and kept ones are scaled.

    The share that is dropped is t / 65536, within 8e-6 of dropout_p; the scale is 1 / (1 - dropout_p), or 0
    where everything is dropped. ValueError outside [0, 1].
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p {dropout_p} is not a probability: give one from 0 to 1")
    threshold = min(round(dropout_p * 2**RANDOM_BITS), 2**RANDOM_BITS - 1)
    return threshold, 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)


@triton.jit
def dropout_keep(
    seed, row_start, col_start, major, minor, threshold,
    ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Which elements of a tile stay: [ROWS, COLS] bool, or [COLS, ROWS] if TRANSPOSED, with the same mask.

    Element (r, c) depends on the seed (int64) and on (row_start + r, col_start + c, major, minor) only, never
    on the tile. row_start and col_start are multiples of 16, and so are ROWS and COLS.
    """
    # row = 16 * rh + 8 * a + rl, column = 16 * ch + 8 * d + 2 * cq + b: one call for all (a, d, b)
    rows = (row_start // 16 + tl.arange(0, ROWS // 16))[:, None] * 8 + tl.arange(0, 8)[None, :]
    cols = (col_start // 16 + tl.arange(0, COLS // 16))[:, None] * 4 + tl.arange(0, 4)[None, :]
    rows = tl.reshape(rows, [ROWS // 2]).to(tl.uint32)
    cols = tl.reshape(cols, [COLS // 4]).to(tl.uint32)
    if TRANSPOSED:
        c0 = tl.broadcast_to(rows[None, :], [COLS // 4, ROWS // 2])
        c1 = tl.broadcast_to(cols[:, None], [COLS // 4, ROWS // 2])
    else:
        c0 = tl.broadcast_to(rows[:, None], [ROWS // 2, COLS // 4])
        c1 = tl.broadcast_to(cols[None, :], [ROWS // 2, COLS // 4])
    zero = c0 & 0
    w0, w1, w2, w3 = tl.philox(
        seed, c0, c1, zero + major.to(tl.uint32), zero + minor.to(tl.uint32), PHILOX_ROUNDS
    )
    bit = tl.arange(0, 2)
    if TRANSPOSED:
        w0 = tl.reshape(w0, [COLS // 16, 1, 4, 1, ROWS // 16, 1, 8])
        w1 = tl.reshape(w1, [COLS // 16, 1, 4, 1, ROWS // 16, 1, 8])
        w2 = tl.reshape(w2, [COLS // 16, 1, 4, 1, ROWS // 16, 1, 8])
        w3 = tl.reshape(w3, [COLS // 16, 1, 4, 1, ROWS // 16, 1, 8])
        a = tl.reshape(bit, [1, 1, 1, 1, 1, 2, 1])
        d = tl.reshape(bit, [1, 2, 1, 1, 1, 1, 1])
        b = tl.reshape(bit, [1, 1, 1, 2, 1, 1, 1])
    else:
        w0 = tl.reshape(w0, [ROWS // 16, 1, 8, COLS // 16, 1, 4, 1])
        w1 = tl.reshape(w1, [ROWS // 16, 1, 8, COLS // 16, 1, 4, 1])
        w2 = tl.reshape(w2, [ROWS // 16, 1, 8, COLS // 16, 1, 4, 1])
        w3 = tl.reshape(w3, [ROWS // 16, 1, 8, COLS // 16, 1, 4, 1])
        a = tl.reshape(bit, [1, 2, 1, 1, 1, 1, 1])
        d = tl.reshape(bit, [1, 1, 1, 1, 2, 1, 1])
        b = tl.reshape(bit, [1, 1, 1, 1, 1, 1, 2])
    # word 2 d + a; its low half for b = 0, its high half for b = 1. The comparison looks at the upper 16
    # bits, below which the threshold has zeros
    word = tl.where(d == 0, tl.where(a == 0, w0, w1), tl.where(a == 0, w2, w3))
    bits = word << (16 - b * 16).to(tl.uint32)
    if TRANSPOSED:
        bits = tl.reshape(tl.broadcast_to(bits, [COLS // 16, 2, 4, 2, ROWS // 16, 2, 8]), [COLS, ROWS])
    else:
        bits = tl.reshape(tl.broadcast_to(bits, [ROWS // 16, 2, 8, COLS // 16, 2, 4, 2]), [ROWS, COLS])
    return bits >= (threshold.to(tl.uint32) << 16)
