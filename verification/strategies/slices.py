"""Draws of slices (`reference.slices`), masks as data: for one branch of a Case, for all, for a further one or by head.

A Case without slices is the simplest. Prefixes, spans, frames and nodes of trees have the lengths of drawn documents:
they end at the ends of shards, one token beside them, or anywhere. Bands lie away from the diagonal, two in a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from reference.slices import (
    Slice,
    first_token_slices,
    frame_slices,
    meet,
    prefix_slices,
    span_slices,
    tree_slices,
)
from verification.case import Case
from verification.strategies.decoding import digits
from verification.strategies.documents import WAYS, ends_of, lengths_of

Slices = tuple[Slice, ...]
MOST = 10  # spans, frames or nodes; what remains of the sequence is one more
_ways = st.sampled_from(("alone", "one", "all", "more", "alone", "heads"))
_kinds = st.sampled_from(("prefix", "spans", "frames", "tree", "first tokens", "noisy frames", "bands", "tree"))
_listed = st.sampled_from(("hilbert", "shuffled", "permuted", "swapped"))
_lengths = st.sampled_from((*WAYS, "among"))  # a node among short ones is longer than a shard
_numbers = st.integers(0, 2**24 - 1)
_quarters = st.integers(0, 3)
_FEW = 9  # base of the digits of a number: a band is narrow, and most parents are among the first nodes


def sliced(draw: st.DrawFn, case: Case) -> Case:
    """Draw slices for a Case: a pattern of their own, or a factor of the grids that it has."""
    way = draw(_ways)
    kind = draw(_kinds)
    if kind == "bands":  # whose tiles differ in their ends alone, where rows and keys are listed
        case = replace(case, order=draw(_listed))
    slices, branches = slices_of(draw, case, kind), list(case.pattern.branches)
    if way == "alone" or (way == "heads" and case.heads == 1):
        # The drawn causality stays, which then says nothing.
        return replace(case, pattern=replace(case.pattern, branches=(Branch(slices=slices),)))
    if way == "heads":
        first, other = 1 + draw(_quarters) % (case.heads - 1), slices_of(draw, case, draw(_kinds))
        parts = (range(first), slices), (range(first, case.heads), other)
        branches = [Branch(heads=heads, slices=own) for heads, own in parts]
    elif way == "more":
        branches.append(Branch(slices=slices))
    else:
        chosen = range(len(branches)) if way == "all" else (draw(_quarters) % len(branches),)
        for at in chosen:
            branches[at] = replace(branches[at], slices=slices)
    return replace(case, pattern=replace(case.pattern, branches=tuple(branches)))


def slices_of(draw: st.DrawFn, case: Case, kind: str) -> Slices:
    """Draw the slices of a mask of that kind for a Case's sequence; of one in four only pieces, in any order."""
    number, tokens = draw(_numbers), case.tokens
    begins = list(accumulate(case.pattern.documents or (), initial=0))[:-1] or [0]
    if kind == "first tokens":
        slices: Sequence[Slice] = first_token_slices(number % 4, number // 4 % (tokens // 2 + 1), begins)
    elif kind == "bands":
        slices = _bands(*digits(number, _FEW, 5))
    else:
        covered = tokens // 2 if kind == "noisy frames" else tokens
        lengths = lengths_of(draw, draw(_lengths), covered, ends_of(case.shards()))
        if len(lengths) > MOST:
            lengths = (*lengths[:MOST], sum(lengths[MOST:]))
        if kind == "prefix":
            each = zip(case.pattern.documents or (tokens,), lengths * len(begins), strict=False)
            slices = prefix_slices([min(pair) for pair in each], begins)
        elif kind == "spans":  # every other length is a span
            edges = list(accumulate(lengths, initial=0))[number % 2 :]
            window = None if number // 2 % 2 == 0 else number // 4 % (tokens // 2 + 1)
            slices = span_slices(list(pairwise(edges))[::2], window)
        elif kind == "tree":
            slices = tree_slices(parents_of(number, len(lengths)), lengths)
        else:
            slices = frame_slices(lengths, noisy=kind == "noisy frames")
    if draw(_quarters) == 3:
        slices = _pieces(slices, draw(_numbers), tokens)
    return tuple(_clipped(slices, tokens, tokens))  # more first tokens than there are


def parents_of(number: int, nodes: int) -> list[int | None]:
    """Decode the parents of a tree's nodes: 0 has all as children of the first."""
    choices = (choice % (node + 1) for node, choice in enumerate(digits(number, _FEW, nodes)))
    return [None if choice == node else choice for node, choice in enumerate(choices)]


def _bands(before: int, width: int, between: int, other: int, later: int) -> Slices:
    """Return a band of earlier keys, and another before it or of later keys."""
    high = -1 - before
    low = high - width
    another = (between, between + other) if later % 2 else (low - 1 - between - other, low - 1 - between)
    return Slice(low=low, high=high), Slice(low=another[0], high=another[1])


def halves(one: Slice, axis: str, at: int) -> tuple[Slice, Slice]:
    """Return a slice cut in two at a query or key. axis: "q" or "k"."""
    begin, end = f"{axis}0", f"{axis}1"
    return one._replace(**{end: at}), one._replace(**{begin: at})


def cut(one: Slice, pick: Random, tokens: int) -> tuple[Slice, Slice]:
    """Return a slice cut in two somewhere within so many tokens."""
    axis = pick.choice("qk")
    begin, end = (one.q0, one.q1) if axis == "q" else (one.k0, one.k1)
    return halves(one, axis, pick.randint(begin, max(begin, tokens if end is None else min(end, tokens))))


def _pieces(slices: Sequence[Slice], number: int, tokens: int) -> Slices:
    """Return most of the pieces of slices that are cut at random, in random order."""
    pick = Random(number)
    pieces = [piece for one in slices for piece in cut(one, pick, tokens) if pick.randrange(4)]
    pick.shuffle(pieces)
    return tuple(pieces)


def clipped(pattern: Pattern, tokens: int, key_tokens: int) -> Pattern:
    """Return the pattern with slices that lie within so many queries and keys; open ends stay open."""
    if not pattern.has_slices:
        return pattern
    branches = (
        branch if branch.slices is None else replace(branch, slices=tuple(_clipped(branch.slices, tokens, key_tokens)))
        for branch in pattern.branches
    )
    return replace(pattern, branches=tuple(branches))


def _clipped(slices: Sequence[Slice], tokens: int, key_tokens: int) -> Iterator[Slice]:
    for one in slices:
        if meet(one, Slice(0, tokens, 0, key_tokens)) is not None:
            q1, k1 = (end if end is None else min(end, most) for end, most in ((one.q1, tokens), (one.k1, key_tokens)))
            yield one._replace(q1=q1, k1=k1)
