"""Pairs of ranges that see each other by a slice (`reference.slices`): the join of query ranges with key ranges of the
same block and section, met with the block's slices.

Ranges stay uncut; a slice selects elements of them. What its bounds hide decides the sight: where both hide something,
the queries are cut into stretches in which each key is hidden by one bound at most.

    keys of a stretch that begins at query a              sight
    up to a + high    every query sees up to there        FROM  i + low
    beyond            no query begins to see there        UP_TO i + high

A stretch is as long as the band is wide, so each of its two parts is a triangle, and those of one part, in all
stretches, have no query and no key in common.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from reference.slices import Slice
from ring.plan.range_pairs import RangePairs, Sight, trim
from ring.plan.ranges import Ints, Ranges, Subranges, concatenated, group_starts, ragged_arange


def slice_pairs(ranges: Ranges, queries: Subranges, keys: Subranges) -> list[RangePairs]:
    """Return all pairs that see each other by a slice, trimmed to the mask, one table a sight."""
    tables: list[RangePairs] = []
    for index, block in enumerate(ranges.blocks):
        if block.slices:
            tables += _of_block(ranges, index, queries, keys)
    joined = [(sight, [x for x in tables if x.sight is sight and len(x)]) for sight in Sight]
    return [_concatenated(several) for _, several in joined if several]


class _Band(NamedTuple):
    """Both bounds of each pair, as distances in positions."""

    low: Ints
    high: Ints


class Within(NamedTuple):
    """Subranges that lie within a slice: the slice's number, their section, and the subrange they are cut from."""

    slice: Ints
    section: Ints
    item: Ints
    subranges: Subranges

    def take(self, which: Ints) -> Within:
        return Within(self.slice[which], self.section[which], self.item[which], self.subranges.take(which))


@lru_cache(maxsize=64)
def _table(slices: tuple[Slice, ...]) -> np.ndarray:
    """Return the limits of slices, (6, slices) int64."""
    return np.array([one.limits for one in slices], np.int64).T


def _of_block(ranges: Ranges, index: int, queries: Subranges, keys: Subranges) -> list[RangePairs]:
    block = ranges.blocks[index]
    q0, q1, k0, k1, low, high = _table(block.slices)
    left, right = subranges_within(ranges, index, queries, q0, q1), subranges_within(ranges, index, keys, k0, k1)
    sections = int(ranges.section.max(initial=0)) + 1
    right = right.take(np.argsort(right.slice * sections + right.section, kind="stable"))
    key_group, query_group = right.slice * sections + right.section, left.slice * sections + left.section
    first = np.searchsorted(key_group, query_group, side="left")
    partners = np.searchsorted(key_group, query_group, side="right") - first
    query = np.repeat(np.arange(len(partners)), partners)
    key = first[query] + ragged_arange(partners)
    number = left.slice[query]
    nothing = np.zeros_like(number)
    pairs = RangePairs(
        left.subranges.take(query), right.subranges.take(key), item=right.item[key], sight=Sight.ALL, bound=nothing,
        segment=nothing, sliced=True,
    )  # fmt: skip
    pairs, band = _trim_both(ranges, pairs, _Band(low[number], high[number]))
    return _by_sight(ranges, pairs, band, block.dilation_rate)


def subranges_within(ranges: Ranges, index: int, subranges: Subranges, begin: Ints, end: Ints) -> Within:
    """Cut the subranges of a block to the positions begin[s] .. end[s] - 1 of each slice s."""
    item = np.flatnonzero((ranges.block[subranges.range] == index) & (subranges.count > 0))
    own = subranges.take(item)
    first, last = ranges.position(own.range, own.first), ranges.position(own.range, own.first + own.count - 1)
    order = np.argsort(first, kind="stable")
    # In this order the subranges that may reach into a slice are neighbours.
    some = np.searchsorted(np.maximum.accumulate(last[order]), begin, side="left")
    counts = np.maximum(np.searchsorted(first[order], end, side="left") - some, 0)
    number = np.repeat(np.arange(len(begin)), counts)
    which = order[some[number] + ragged_arange(counts)]
    own, item = own.take(which), item[which]
    skip = np.maximum(ranges.count_until(own.range, begin[number] - 1) - own.first, 0)
    stop = np.minimum(ranges.count_until(own.range, end[number] - 1) - own.first, own.count)
    some = np.flatnonzero(stop > skip)
    within = Within(number, ranges.section[own.range], item, own.part(skip, stop - skip))
    return within.take(some)


def _ends(ranges: Ranges, some: Subranges) -> tuple[Ints, Ints]:
    """Return the first and the last position of subranges."""
    return ranges.position(some.range, some.first), ranges.position(some.range, some.first + some.count - 1)


def _trim_both(ranges: Ranges, pairs: RangePairs, band: _Band) -> tuple[RangePairs, _Band]:
    """Drop the keys that no query reaches, then the queries that reach no key, as far as the ends tell."""
    first, last = _ends(ranges, pairs.query)
    keys = _between(ranges, pairs.key, first + band.low, last + band.high)
    some = np.flatnonzero(keys[1] > 0)
    pairs, band = pairs.take(some), _Band(band.low[some], band.high[some])
    skip, count = keys[0][some], keys[1][some]
    pairs = pairs.part(queries=(np.zeros_like(skip), pairs.query.count), keys=(skip, count))
    first, last = _ends(ranges, pairs.key)
    skip, count = _between(ranges, pairs.query, first - band.high, last - band.low)
    some = np.flatnonzero(count > 0)
    pairs, band = pairs.take(some), _Band(band.low[some], band.high[some])
    return pairs.part(queries=(skip[some], count[some]), keys=(np.zeros_like(some), pairs.key.count)), band


def _between(ranges: Ranges, some: Subranges, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return how many elements of each subrange lie before the position `begin`, and how many from there to `end`."""
    skip = np.clip(ranges.count_until(some.range, begin - 1) - some.first, 0, some.count)
    return skip, np.clip(ranges.count_until(some.range, end) - some.first, 0, some.count) - skip


def _by_sight(ranges: Ranges, pairs: RangePairs, band: _Band, rate: int) -> list[RangePairs]:
    """Return tables of pairs that one bound, or none, hides keys of."""
    (first_query, last_query), (first_key, last_key) = _ends(ranges, pairs.query), _ends(ranges, pairs.key)
    below, above = first_key < last_query + band.low, last_key > first_query + band.high
    both = np.flatnonzero(below & above)
    cut = _cut_band(ranges, pairs.take(both), _Band(band.low[both], band.high[both]), rate)
    single = [
        pairs.take(np.flatnonzero(~below & ~above)),
        trim(ranges, _bounded(pairs, Sight.UP_TO, band.high, np.flatnonzero(above & ~below))),
        trim(ranges, _bounded(pairs, Sight.FROM, band.low, np.flatnonzero(below & ~above))),
    ]
    return [*single, *cut]


def _bounded(pairs: RangePairs, sight: Sight, bound: Ints, which: Ints) -> RangePairs:
    return replace(pairs.take(which), sight=sight, bound=bound[which])


def _cut_band(ranges: Ranges, pairs: RangePairs, band: _Band, rate: int) -> list[RangePairs]:
    """Cut the queries of pairs into stretches, and the keys of each in two, those `FROM` and those `UP_TO`."""
    if not len(pairs):
        return []
    q = pairs.query
    pair, element = np.repeat(np.arange(len(pairs)), q.count), ragged_arange(q.count)
    position = ranges.position(q.range[pair], q.first[pair] + element)
    stretch = position // (band.high - band.low + rate)[pair]
    begins = np.flatnonzero(group_starts(pair, stretch))
    pair, element, first = pair[begins], element[begins], position[begins]
    count = np.diff(np.append(begins, len(position)))
    parts, high = pairs.take(pair), band.high[pair]
    middle = np.clip(ranges.count_until(parts.key.range, first + high) - parts.key.first, 0, parts.key.count)
    nothing = np.zeros_like(middle)
    upper = parts.part(queries=(element, count), keys=(nothing, middle))
    lower = parts.part(queries=(element, count), keys=(middle, parts.key.count - middle))
    return [
        trim(ranges, _bounded(upper, Sight.FROM, band.low[pair], np.flatnonzero(upper.key.count > 0))),
        trim(ranges, _bounded(lower, Sight.UP_TO, high, np.flatnonzero(lower.key.count > 0))),
    ]


def _concatenated(tables: list[RangePairs]) -> RangePairs:
    """Join tables of one sight."""
    one = tables[0]
    names = ("item", "bound", "segment")
    item, bound, segment = (concatenated([getattr(table, name) for table in tables]) for name in names)
    return RangePairs(
        Subranges.join([x.query for x in tables]), Subranges.join([x.key for x in tables]), item=item, sight=one.sight,
        bound=bound, segment=segment, sliced=True,
    )  # fmt: skip


def disjoint_layers(ranges: Ranges, pairs: RangePairs, call: tuple[Ints, ...], joined: bool) -> tuple[Ints, Ints]:
    """Return a layer for each pair, and its number in the order of positions.

    Two pairs of one layer that are equal in `call` have no query and no key in common: both ascend. Pairs of slices
    share rows, as a node of a tree does with its ancestors. A kernel call writes each row, and each key's gradient,
    once. joined: pairs of the same queries, or of the same keys, have layers of their own, since they become one call.
    """
    (q_first, q_last), (k_first, k_last) = _ends(ranges, pairs.query), _ends(ranges, pairs.key)
    order = np.lexsort((k_first, q_first, *reversed(call)))
    starts = group_starts(*(column[order] for column in call)).tolist()
    single = _repeated(pairs.query, call) | _repeated(pairs.key, call) if joined else np.zeros(len(order), bool)
    layer = -1 - np.arange(len(order))
    ends: list[tuple[int, int]] = []  # of the last query and key of each layer
    entries = zip(*(x[order].tolist() for x in (q_first, q_last, k_first, k_last, single)), strict=True)
    for place, (a, b, c, d, alone) in enumerate(entries):
        if starts[place]:
            ends = []
        if not alone:
            free = next((number for number, (q, k) in enumerate(ends) if q < a and k < c), len(ends))
            ends[free : free + 1] = [(b, d)]
            layer[order[place]] = free
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return layer, number


def _repeated(some: Subranges, call: tuple[Ints, ...]) -> np.ndarray:
    """Return True for each subrange that occurs several times in its call."""
    columns = (*call, some.range, some.first, some.count)
    order = np.lexsort(columns)
    starts = group_starts(*(column[order] for column in columns))
    sizes = np.diff(np.append(np.flatnonzero(starts), len(order)))
    repeated = np.empty(len(order), bool)
    repeated[order] = np.repeat(sizes > 1, sizes)
    return repeated
