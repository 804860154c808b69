"""Longest-pack-first histogram packing: which sequence lengths share a pack.

Krell, Kosec, Perez, Fitzgibbon: Efficient Sequence Packing without Cross-contamination, arXiv 2107.02027,
algorithm 2 (LPFHP). It looks only at how many sequences of each length there are, so its cost does not depend
on the number of sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

PackGroup = tuple[int, list[int]]  # (how many packs, the lengths in each of them)


def pack_histogram(histogram: np.ndarray, capacity: int, max_sequences: int | None = None) -> list[PackGroup]:
    """Packs for `histogram[n-1]` sequences of each length n.

    Lengths are placed from the longest down; each goes to the open pack with the least room that still holds
    it, and whole groups of equal packs are filled at once.

    Args:
        histogram: [capacity or fewer] counts, index n-1 for length n.
        capacity: tokens a pack holds.
        max_sequences: most sequences a pack holds; None = no limit.

    Returns: (count, lengths) groups; over all groups each length occurs as often as the histogram says.
    Deterministic. Raises ValueError where a length exceeds the capacity.
    """
    counts = [int(count) for count in histogram]
    longest = max((n for n, count in enumerate(counts, start=1) if count), default=0)
    if longest > capacity:
        raise ValueError(f"a sequence of {longest} tokens does not fit a pack of {capacity}")
    limit = capacity if max_sequences is None else max_sequences

    open_packs: dict[int, list[PackGroup]] = {}  # free room -> groups, the last added on top
    rooms: list[int] = []  # sorted keys of open_packs
    closed: list[PackGroup] = []

    def put(count: int, lengths: list[int], room: int) -> None:
        if room == 0 or len(lengths) == limit:
            closed.append((count, lengths))
            return
        if room not in open_packs:
            open_packs[room] = []
            insort(rooms, room)
        open_packs[room].append((count, lengths))

    for length in range(longest, 0, -1):
        left = counts[length - 1]
        while left:
            at = bisect_left(rooms, length)  # best fit
            if at == len(rooms):
                repeat = min(capacity // length, limit, left)
                count = left // repeat
                put(count, [length] * repeat, capacity - repeat * length)
            else:
                room = rooms[at]
                group_count, lengths = open_packs[room].pop()
                if not open_packs[room]:
                    del open_packs[room]
                    del rooms[at]
                repeat = min(room // length, limit - len(lengths), left)
                count = min(group_count, left // repeat)
                if group_count > count:
                    put(group_count - count, lengths, room)
                put(count, lengths + [length] * repeat, room - repeat * length)
            left -= count * repeat

    return closed + [group for room in rooms for group in open_packs[room]]


def pack_sequences(
    lengths: np.ndarray, capacity: int, max_sequences: int | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Order `lengths` [N] into packs.

    Returns (order [N], starts [num_packs + 1]): pack p holds the sequences `order[starts[p]:starts[p+1]]`.
    Which of the sequences of equal length goes where, and the order of the packs, are random.
    """
    groups = pack_histogram(np.bincount(lengths, minlength=1)[1:], capacity, max_sequences)
    packs = [pack for count, pack in groups for _ in range(count)]
    shuffled = [packs[i] for i in rng.permutation(len(packs))]
    slot_lengths = np.fromiter((n for pack in shuffled for n in pack), dtype=np.int64, count=len(lengths))
    starts = np.concatenate([[0], np.cumsum([len(pack) for pack in shuffled], dtype=np.int64)])

    # the i-th slot of length n takes the i-th sequence of length n of a random permutation
    candidates = rng.permutation(len(lengths))
    candidates = candidates[np.argsort(lengths[candidates], kind="stable")]
    order = np.empty(len(lengths), dtype=np.int64)
    order[np.argsort(slot_lengths, kind="stable")] = candidates
    return order, starts


def packing_efficiency(groups: list[PackGroup], capacity: int) -> float:
    """Share of the slots of all packs that hold a token."""
    num_packs = sum(count for count, _ in groups)
    return sum(count * sum(lengths) for count, lengths in groups) / (num_packs * capacity)
