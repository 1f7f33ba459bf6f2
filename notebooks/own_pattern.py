"""A pattern of one's own on shorter and on longer sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.pattern import Pattern
from reference.slices import Slice, meet


def first_tokens(pattern: Pattern, tokens: int) -> Pattern:
    """Return the pattern of a sequence's first tokens. Rotary positions are places."""
    square = Slice(0, tokens, 0, tokens)
    branches = tuple(
        branch
        if branch.slices is None
        else replace(branch, slices=[x for one in branch.slices if (x := meet(one, square))])
        for branch in pattern.branches
    )
    ends = None if pattern.documents is None else np.minimum(np.cumsum(pattern.documents), tokens)
    return Pattern(branches, pattern.causal, None if ends is None else tuple(np.diff(ends, prepend=0).tolist()))


def several(pattern: Pattern, times: int) -> Pattern:
    """Return the pattern of so many sequences in a row, each with all documents. Without documents it is the same."""
    if pattern.documents is None:
        return pattern
    length = sum(pattern.documents)
    begins = range(0, times * length, length)
    branches = tuple(
        branch
        if branch.slices is None
        else replace(branch, slices=[_moved(x, begin, length) for begin in begins for x in branch.slices])
        for branch in pattern.branches
    )
    return Pattern(branches, pattern.causal, pattern.documents * times)


def _moved(one: Slice, begin: int, length: int) -> Slice:
    q0, q1, k0, k1, low, high = one
    q1, k1 = (length if end is None else end for end in (q1, k1))
    return Slice(q0 + begin, q1 + begin, k0 + begin, k1 + begin, low, high)
