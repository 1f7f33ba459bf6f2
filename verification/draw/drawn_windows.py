"""Draws of windows: how far a branch reaches. None, which is no window, is the simplest; the next one is 0.

What a window makes of a plan depends on what it is as long as: nothing, a step of the grid, a part of the segment, a
shard, the segment, or more than there is. Which of these, and by how much it misses it, is decoded from one integer.
Most are short: one that is longer than what it could hide shows nothing.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from reference.pattern import Branch, Pattern

WAYS = ("one", "all", "local")
_ways = st.sampled_from((*(None,) * 5, *WAYS))
_numbers = st.integers(0, 2**24 - 1)  # of more bits Hypothesis mostly draws small ones
_KINDS = 4
_BEYOND = 4  # tokens, of a window that is longer than everything


def windowed(draw: st.DrawFn, pattern: Pattern, tokens: int, ranks: int) -> Pattern:
    """The pattern, mostly as it is; else one of its branches has a window, or all have, or there is a local branch
    beside them, as models have it. ranks: those that share the tokens."""
    way = draw(_ways)
    if way is None:
        return pattern
    number, shard = draw(_numbers), -(-tokens // ranks)
    branches = list(pattern.branches)
    if way == "local":
        branches.insert(0, _limited(Branch(), number, tokens, shard))
    elif way == "one":
        number, at = divmod(number, len(branches))
        branches[at] = _limited(branches[at], number, tokens, shard)
    else:
        branches = [_limited(branch, number // 7**at, tokens, shard) for at, branch in enumerate(branches)]
    return replace(pattern, branches=tuple(branches))


def _limited(branch: Branch, number: int, tokens: int, shard: int) -> Branch:
    return replace(branch, window=window_of(branch, number, tokens, shard))


def window_of(branch: Branch, number: int, tokens: int, shard: int) -> int:
    """The window of that number, 0 being none at all. shard: tokens of a rank, about."""
    number, kind = divmod(number, _KINDS)
    rate, span = branch.dilation_rate, min(branch.segment_length or tokens, tokens)
    steps = rate * (number % 5) + number // 5 % rate  # of the grid, and a part of one
    edge = (shard + number // 2 % 3 - 1, span + number // 2 % 5 - 3, tokens + number // 2 % _BEYOND)[number % 3]
    return max(0, (number % 4, steps, number % (span // 2 + 1), edge)[kind])
