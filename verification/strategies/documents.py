"""Draws of documents, how a sequence of so many tokens is packed; and of windows, how far a branch reaches.

None, which is no documents, or no window, is the simplest. All ways begin with the same draws, and lengths are decoded
from one integer: 0 makes one document of all tokens, and window 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, cycle, pairwise

import numpy as np
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from reference.shards import Shards
from verification.case import Case

Documents = tuple[int, ...] | None
WAYS = ("edges", "cuts", "equal", "among")
# Of all Cases half are to have some; a few kinds of Cases have none, whatever is drawn here.
_ways = st.sampled_from((*(None,) * len(WAYS), *WAYS * 2))
_numbers = st.integers(0, 2**24 - 1)  # of more bits Hypothesis mostly draws small ones
_empties = st.integers(0, 7)
_MOST_EDGES = 6
_AROUND = 6  # what an edge is, beside the end of a shard: see `_at_cuts`
_SHORT = 4  # lengths of the documents beside a long one are below
_BEFORE = 4  # so many short ones are before the long one
# For fused kernels, which take calls of many keys: documents that fold since they are equally long, and those between.
MOST_FUSED = 128  # tokens of a Case for them
_FUSED = (*(None,) * 6, (16,), (32,), (16, 32), (24,), (48, 16, 16), (17, 0), (40, 1), (16,), (16,), (32,))
_fused = st.sampled_from(_FUSED)
_window_ways = st.sampled_from((*(None,) * 5, "one", "all", "local"))
_WINDOW_KINDS = 4
_BEYOND = 4  # tokens, of a window that is longer than everything


def documents_of(draw: st.DrawFn, tokens: int, ends: Sequence[int]) -> Documents:
    """ends: where some rank's tokens end and another's begin."""
    way = draw(_ways)
    if way is None:
        return None
    number, empty = draw(_numbers), draw(_empties)
    if way == "equal":
        return _with_empty(_repeated((1 + number % max(1, -(-tokens // 2)),), tokens), empty)
    if way == "among":
        return _with_empty(_among_short_ones(number, tokens), empty)
    edges = _at_cuts(number, ends, tokens) if way == "cuts" else _digits(number, tokens + 1, _MOST_EDGES)
    return _with_empty(_between(edges, tokens), empty)


def packed(draw: st.DrawFn, case: Case) -> Documents:
    """For a Case, of whose shards the documents end where they do, or beside them."""
    return documents_of(draw, case.tokens, ends_of(case.shards()))


def fused_documents(draw: st.DrawFn, tokens: int, ranks: int) -> Documents:
    """Of about so many tokens. Equal ones are twice as many as there are ranks, or a multiple of that, where this makes
    no sequence of more than MOST_FUSED tokens: every rank then has some that fold."""
    lengths = draw(_fused)
    if lengths is None:
        return None
    unit = 2 * ranks * lengths[0]
    if len(lengths) == 1 and unit <= MOST_FUSED:
        tokens = -(-min(tokens, MOST_FUSED // unit * unit) // unit) * unit
    return _repeated(lengths, tokens)


def ends_of(shards: Shards) -> list[int]:
    """Positions at which a rank's tokens end, at most one for each rank, spread over the sequence."""
    ends = np.flatnonzero(np.diff(shards.holder)) + 1
    return [int(end) for end in ends[:: max(1, len(ends) // len(shards.counts))]]


def _digits(number: int, base: int, most: int) -> Iterator[int]:
    """Those of the number, as many as it has: a smaller one has fewer."""
    for _ in range(most):
        if not number:
            return
        number, digit = divmod(number, base)
        yield digit


def _at_cuts(number: int, ends: Iterable[int], tokens: int) -> Iterator[int]:
    """At each end of a shard nothing, an edge there, before or behind it, or several: a document of one token."""
    for end, digit in zip(ends, _digits(number, _AROUND, 24), strict=False):
        for moved in ((), (0,), (-1,), (1,), (0, 1), (-1, 0))[digit]:
            yield min(max(end + moved, 0), tokens)


def _between(edges: Iterable[int], tokens: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise((0, *sorted(edges), tokens)))


def _repeated(lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
    """These lengths again and again; the last document is shorter where they do not add up."""
    found: list[int] = []
    for length in cycle(lengths):
        if sum(found) == tokens:
            return tuple(found)
        found.append(min(length, tokens - sum(found)))
    raise ValueError("lengths: there must be one at least")


def _among_short_ones(number: int, tokens: int) -> tuple[int, ...]:
    """Short documents, a long one, and short ones again."""
    short = list(_digits(number, _SHORT, 2 * _BEFORE))
    kept = [length for length, so_far in zip(short, accumulate(short), strict=True) if so_far < tokens]
    return (*kept[:_BEFORE], tokens - sum(kept), *kept[_BEFORE:])


def _with_empty(lengths: tuple[int, ...], where: int) -> tuple[int, ...]:
    """Mostly as they are; else with documents of no tokens at the start, at the end, or twice in between."""
    if where < 5:
        return lengths
    at = (0, len(lengths), len(lengths) // 2)[where - 5]
    return (*lengths[:at], *(0,) * (1 + (where == 7)), *lengths[at:])


# --- windows ----------------------------------------------------------------------------------------------------------
#
# What a window makes of a plan depends on what it is as long as: nothing, a step of the grid, a part of the segment, a
# shard, the segment, or more than there is. Which of these, and by how much it misses it, is decoded from one integer.
# Most are short: one that is longer than what it could hide shows nothing.


def windowed(draw: st.DrawFn, pattern: Pattern, tokens: int, ranks: int) -> Pattern:
    """The pattern, mostly as it is; else one of its branches has a window, or all have, or there is a local branch
    beside them, as models have it. ranks: those that share the tokens."""
    way = draw(_window_ways)
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
    number, kind = divmod(number, _WINDOW_KINDS)
    rate, span = branch.dilation_rate, min(branch.segment_length or tokens, tokens)
    steps = rate * (number % 5) + number // 5 % rate  # of the grid, and a part of one
    edge = (shard + number // 2 % 3 - 1, span + number // 2 % 5 - 3, tokens + number // 2 % _BEYOND)[number % 3]
    return max(0, (number % 4, steps, number % (span // 2 + 1), edge)[kind])
