"""Integers that stand for arrangements, ranges and lists, so that one draw makes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def permutation(index: int, items: Sequence[Item], size: int) -> tuple[Item, ...]:
    """The index-th arrangement (0 <= index < perm(len(items), size)) of `size` of the items; 0 keeps their order."""
    left, chosen = list(items), []
    for _ in range(size):
        index, pick = divmod(index, len(left))
        chosen.append(left.pop(pick))
    return tuple(chosen)


def head_range(index: int, heads: int) -> range | None:
    """The index-th contiguous range of heads: 0 is all of them (None), then single heads, then longer ranges."""
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
    """The lowest `count` digits of a number, least significant first: one draw for the offsets of all heads."""
    found = []
    for _ in range(count):
        number, digit = divmod(number, base)
        found.append(digit)
    return tuple(found)
