"""Draws of documents (lengths of the packed sequences) and of windows (reach of a branch).

None (no documents, no window) is the simplest. All kinds begin with the same draws, and lengths are decoded from one
integer: 0 is the simplest of a kind.
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
# Half of all Cases should have documents; a few kinds of Cases drop them again.
_ways = st.sampled_from((*(None,) * len(WAYS), *WAYS * 2))
_numbers = st.integers(0, 2**24 - 1)  # with more bits Hypothesis mostly draws small numbers
_empties = st.integers(0, 7)
_MAX_EDGES = 6
_AROUND = 6  # kinds of edges at the end of a shard: see `_at_cuts`
_SHORT = 4  # upper limit of the lengths of documents beside a long one, exclusive
_BEFORE = 4  # short documents before the long one
# For fused kernels, which take calls of many keys: documents of equal length, which fold, mixed with others.
MAX_FUSED = 128  # tokens of a Case for them
_FUSED = (*(None,) * 6, (16,), (32,), (16, 32), (24,), (48, 16, 16), (17, 0), (40, 1), (16,), (16,), (32,))
_fused = st.sampled_from(_FUSED)
_window_ways = st.sampled_from((*(None,) * 5, "one", "all", "local"))
_WINDOW_KINDS = 4
_BEYOND = 4  # tokens by which a window may exceed the sequence


def documents_of(draw: st.DrawFn, tokens: int, ends: Sequence[int]) -> Documents:
    """Draw documents of that many tokens. ends: positions between the tokens of two ranks."""
    way = draw(_ways)
    return None if way is None else lengths_of(draw, way, tokens, ends)


def lengths_of(draw: st.DrawFn, way: str, tokens: int, ends: Sequence[int]) -> tuple[int, ...]:
    """Draw lengths that add up to so many tokens. way: one of WAYS; ends: as in `documents_of`."""
    number, empty = draw(_numbers), draw(_empties)
    if way == "equal":
        return _with_empty(_repeated((1 + number % max(1, -(-tokens // 2)),), tokens), empty)
    if way == "among":
        return _with_empty(_among_short_ones(number, tokens), empty)
    edges = _at_cuts(number, ends, tokens) if way == "cuts" else _digits(number, tokens + 1, _MAX_EDGES)
    return _with_empty(_between(edges, tokens), empty)


def packed(draw: st.DrawFn, case: Case) -> Documents:
    """Draw documents for a Case, which may end at the ends of its shards or beside them."""
    return documents_of(draw, case.tokens, ends_of(case.shards()))


def fused_documents(draw: st.DrawFn, tokens: int, ranks: int) -> Documents:
    """Draw documents of about that many tokens. If they are equal, their number is a multiple of twice the number of
    ranks (up to MAX_FUSED tokens), so that every rank has documents that fold."""
    lengths = draw(_fused)
    if lengths is None:
        return None
    unit = 2 * ranks * lengths[0]
    if len(lengths) == 1 and unit <= MAX_FUSED:
        tokens = -(-min(tokens, MAX_FUSED // unit * unit) // unit) * unit
    return _repeated(lengths, tokens)


def ends_of(shards: Shards) -> list[int]:
    """Return positions at which a rank's tokens end, at most about one per rank, spread over the sequence."""
    ends = np.flatnonzero(np.diff(shards.holder)) + 1
    return [int(end) for end in ends[:: max(1, len(ends) // len(shards.counts))]]


def _digits(number: int, base: int, most: int) -> Iterator[int]:
    """Yield the digits of the number, at most `most`: a smaller number has fewer."""
    for _ in range(most):
        if not number:
            return
        number, digit = divmod(number, base)
        yield digit


def _at_cuts(number: int, ends: Iterable[int], tokens: int) -> Iterator[int]:
    """Yield, for each end of a shard, no edge, one edge near it, or two edges around a document of one token."""
    for end, digit in zip(ends, _digits(number, _AROUND, 24), strict=False):
        for moved in ((), (0,), (-1,), (1,), (0, 1), (-1, 0))[digit]:
            yield min(max(end + moved, 0), tokens)


def _between(edges: Iterable[int], tokens: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise((0, *sorted(edges), tokens)))


def _repeated(lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Repeat these lengths; the last document is shorter if they do not add up to the tokens."""
    documents: list[int] = []
    for length in cycle(lengths):
        if sum(documents) == tokens:
            return tuple(documents)
        documents.append(min(length, tokens - sum(documents)))
    raise ValueError("lengths: there must be one at least")


def _among_short_ones(number: int, tokens: int) -> tuple[int, ...]:
    """Return short documents, a long one, and short ones again."""
    short = list(_digits(number, _SHORT, 2 * _BEFORE))
    fitting = [length for length, so_far in zip(short, accumulate(short), strict=True) if so_far < tokens]
    return (*fitting[:_BEFORE], tokens - sum(fitting), *fitting[_BEFORE:])


def _with_empty(lengths: tuple[int, ...], where: int) -> tuple[int, ...]:
    """Return the lengths, mostly unchanged; else with empty documents at the start, at the end, or two in between."""
    if where < 5:
        return lengths
    at = (0, len(lengths), len(lengths) // 2)[where - 5]
    return (*lengths[:at], *(0,) * (1 + (where == 7)), *lengths[at:])


# --- windows ----------------------------------------------------------------------------------------------------------
#
# The effect of a window on a plan depends on the length that it is close to: 0, a step of the grid, a part of the
# segment, a shard, the segment, or the sequence. This length and the distance from it are decoded from one integer.
# Most windows are short: one that is too long to hide anything tests nothing.


def windowed(draw: st.DrawFn, pattern: Pattern, tokens: int, ranks: int) -> Pattern:
    """Draw windows for a pattern: mostly none; else for one branch, for all, or for an additional local branch, as in
    models. ranks: number of ranks that share the tokens."""
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
    """Decode a window from a number; 0 gives window 0. shard: tokens of a rank, about."""
    number, kind = divmod(number, _WINDOW_KINDS)
    rate, span = branch.dilation_rate, min(branch.segment_length or tokens, tokens)
    steps = rate * (number % 5) + number // 5 % rate  # of the grid, and a part of one
    edge = (shard + number // 2 % 3 - 1, span + number // 2 % 5 - 3, tokens + number // 2 % _BEYOND)[number % 3]
    return max(0, (number % 4, steps, number % (span // 2 + 1), edge)[kind])
