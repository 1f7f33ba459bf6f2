"""Integers decoded into permutations, ranges and lists, so that each takes one draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def permutation(index: int, items: Sequence[Item], size: int) -> tuple[Item, ...]:
    """Return the index-th arrangement (0 <= index < perm(len(items), size)) of `size` items; 0 keeps the order."""
    remaining, picks = list(items), []
    for _ in range(size):
        index, pick = divmod(index, len(remaining))
        picks.append(remaining.pop(pick))
    return tuple(picks)


def head_range(index: int, heads: int) -> range | None:
    """Return the index-th contiguous range of heads: 0 is all of them (None), then single heads, then longer ranges."""
    if index == 0:
        return None
    index -= 1
    for length in range(1, heads + 1):
        starts = heads - length + 1
        if index < starts:
            return range(index, index + length)
        index -= starts
    raise ValueError(f"index: there are {1 + heads * (heads + 1) // 2} ranges of {heads} heads")


def digits(number: int, base: int, count: int) -> tuple[int, ...]:
    """Return the lowest `count` digits of a number, least significant first: one draw for the offsets of all heads."""
    lowest = []
    for _ in range(count):
        number, digit = divmod(number, base)
        lowest.append(digit)
    return tuple(lowest)
