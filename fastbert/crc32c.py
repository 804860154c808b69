"""CRC-32C (Castagnoli), which TensorFlow's checkpoints carry, in numpy: some hundred megabytes a second.

A crc is linear over GF(2) in its state and its data. So the remainders of many stripes of the data are made
side by side, four bytes a step, and joined in a tree: what n zero bytes make of a state is a 32x32 matrix of
bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np

_POLYNOMIAL = np.uint32(0x82F63B78)  # reflected
_MAX_STRIPES = 1 << 14


def crc32c(data: np.ndarray) -> int:
    """The checksum of uint8 data [n]."""
    stripes = 1 << max(0, min(_MAX_STRIPES, data.size // 64).bit_length() - 1)
    length = data.size // stripes // 4 * 4
    states = np.zeros(stripes, dtype=np.uint32)
    states[0] = 0xFFFFFFFF
    low, high = _four_byte_tables()
    for words in data[: stripes * length].view("<u4").reshape(stripes, length // 4).T:
        states = states ^ words
        states = low[states & 0xFFFF] ^ high[states >> 16]
    skip = _zero_bytes(length)
    while states.size > 1:
        states = _apply(skip, states[0::2]) ^ states[1::2]
        skip = _apply(skip, skip)
    table = _byte_table()
    state = int(states[0])
    for byte in data[stripes * length :].tolist():
        state = int(table[(state ^ byte) & 255]) ^ (state >> 8)
    return state ^ 0xFFFFFFFF


@cache
def _byte_table() -> np.ndarray:
    table: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (_POLYNOMIAL * (table & 1))
    return table


def _after_zero_bytes(states: np.ndarray, count: int) -> np.ndarray:
    for _ in range(count):
        states = _byte_table()[states & 255] ^ (states >> 8)
    return states


@cache
def _four_byte_tables() -> tuple[np.ndarray, np.ndarray]:
    """What four bytes make of the lower and of the upper half of a state."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    return _after_zero_bytes(halves, 4), _after_zero_bytes(halves << 16, 4)


def _zero_bytes(count: int) -> np.ndarray:
    """The matrix of `count` zero bytes, as the images of the 32 bits: square and multiply of one byte's."""
    matrix = bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power = _after_zero_bytes(bits, 1)
    while count:
        if count & 1:
            matrix = _apply(power, matrix)
        power = _apply(power, power)
        count >>= 1
    return matrix


def _apply(matrix: np.ndarray, states: np.ndarray) -> np.ndarray:
    images = np.zeros_like(states)
    for bit in range(32):
        images ^= matrix[bit] * ((states >> np.uint32(bit)) & np.uint32(1))
    return images
