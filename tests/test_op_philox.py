"""Philox and the dropout masks made of it: published vectors, a scalar loop, and what a mask must be."""

import pytest
import torch

from fastbert.ops import philox

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)
# Random123's kat_vectors: rounds, counter, key, words
VECTORS = [
    (7, (0,) * 4, (0,) * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (ONES,) * 4, (ONES,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, PI, PI_KEY, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, (0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, (ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI, PI_KEY, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(rounds, counter, key, expected):
    counter, key = (tuple(torch.tensor([word]) for word in words) for words in (counter, key))
    words = philox.philox4x32(counter, key, rounds)
    assert " ".join(f"{int(word) & ONES:08x}" for word in words) == expected


def kept(seed, row, col, major, minor, threshold):
    """One element, in Python's own integers."""
    counter = (row // 16 * 8 + row % 8, col // 16 * 4 + col % 8 // 2, major, minor)
    c0, c1, c2, c3 = counter
    k0, k1 = seed & ONES, seed >> 32
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & ONES, (a >> 32) ^ c3 ^ k1, a & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    word = (c0, c1, c2, c3)[2 * (col // 8 % 2) + row // 8 % 2]
    return (word >> 16 if col % 2 else word & 0xFFFF) >= threshold


def test_a_mask_is_the_scalar_loops():
    seed, majors = 2**63 - 12345, [0, 37, 2**31 - 7]
    mask = philox.dropout_keep(torch.tensor([seed]), torch.tensor(majors), 2, 19, 37, 0.4)
    threshold, _ = philox.dropout_threshold(0.4)
    expected = [
        [
            [[kept(seed, row, col, major, minor, threshold) for col in range(37)] for row in range(19)]
            for minor in range(2)
        ]
        for major in majors
    ]
    assert mask.tolist() == expected


def test_an_element_does_not_depend_on_the_size_of_the_mask():
    seed, major = philox.draw_seed(torch.device("cpu")), torch.tensor([5])
    whole = philox.dropout_keep(seed, major, 3, 50, 70, 0.5)
    assert torch.equal(philox.dropout_keep(seed, major, 2, 17, 33, 0.5), whole[:, :2, :17, :33])


@pytest.mark.parametrize(
    ("dropout_p", "threshold", "scale"), [(0.0, 0, 1.0), (0.5, 32768, 2.0), (1.0, 65535, 0.0)]
)
def test_dropout_threshold_known_values(dropout_p, threshold, scale):
    assert philox.dropout_threshold(dropout_p) == (threshold, scale)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, float("nan")])
def test_what_is_no_probability_is_refused(dropout_p):
    with pytest.raises(ValueError, match="is not a probability: give one from 0 to 1"):
        philox.dropout_threshold(dropout_p)


def test_share_and_independence():
    seed, other = (philox.draw_seed(torch.device("cpu")) for _ in range(2))
    majors = torch.tensor([0, 320])
    mask = philox.dropout_keep(seed, majors, 2, 320, 320, 0.1).float()
    assert mask.numel() > 4e5
    # 4 sigma at 1e5 elements, for each sequence and head
    assert (mask.mean(dim=(2, 3)) - 0.9).abs().max() < 0.004
    # neither rows nor columns nor the 8 elements of one call go together
    assert (mask.mean(dim=(0, 1, 2)) - 0.9).abs().max() < 0.05
    assert (mask.mean(dim=(0, 1, 3)) - 0.9).abs().max() < 0.05
    elsewhere = [mask[0, 1], mask[1, 0], philox.dropout_keep(other, majors, 1, 320, 320, 0.1)[0, 0].float()]
    elsewhere += [mask[0, 0].roll(shift, dim) for shift in (1, 8) for dim in (0, 1)]
    for another in elsewhere:
        assert abs((mask[0, 0] == another).float().mean() - 0.82) < 0.01


def test_seeds_come_from_torchs_generator():
    device = torch.device("cpu")
    torch.manual_seed(3)
    first, second = philox.draw_seed(device), philox.draw_seed(device)
    assert first.dtype == torch.int64 and first.shape == (1,) and first != second
    torch.manual_seed(3)
    assert torch.equal(first, philox.draw_seed(device))
