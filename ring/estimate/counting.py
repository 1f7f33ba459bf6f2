"""Counts of `reference.cost` by arithmetic on ranges instead of token by token: the same integers for long sequences.

A group is the ranges of keys of one block in one segment (`ring.plan.ranges`), with the ranges of queries that may see
them: those of the same segment and, under a window, of the segments beside it. Most groups are alike: one is another,
shifted by some positions and rotated by some ranks. Each kind is counted once, and added for every rotation in which it
occurs. Queries that see all of a key range are summed by rank; ranges that see each other in part are counted in pairs.

Keys are counted by their owner s and the distance t = (d - s) mod p to the rank d that reads them. Of a key range rank
d sees leading elements and, under a window, trailing ones, as in `ring.plan.remote_rows`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isqrt

import numpy as np

from reference.cost import Setting
from reference.pattern import Pattern
from ring.layout import Layout
from ring.plan.blocks import Block
from ring.plan.exchanges.relay_groups import RelayGroups
from ring.plan.head_rows import block_layout
from ring.plan.range_pairs import group_of
from ring.plan.ranges import Ints, Ranges, group_starts, ragged_arange, ranges_of, ranges_of_runs

MAX_TOKENS = 2**31  # sums of positions over a range fit into 64 bits
MAX_PAIRS = 2**27  # of ranges that see each other
MAX_TABLE = 2**24  # blocks times ranks squared: some GiB
_BATCH = 2**16  # of these at a time, so that arrays stay in the caches of a processor
_PART = 2**10  # key ranges
_EXACT = 2**53  # sums are taken in fp64


@dataclass(frozen=True, eq=False)
class Counted(Setting):
    """A setting that is counted by ranges. It lists no positions."""

    layout: Layout = Layout(0, (0, 0), ())
    key_layout: Layout = Layout(0, (0, 0), ())

    def __post_init__(self) -> None:
        """Nothing: `ring.estimate.estimates` checks all arguments."""

    @property
    def world(self) -> int:
        """Number of ranks, p."""
        return self.layout.world_size

    @cached_property
    def counts(self) -> Ints:
        """Number of queries of each rank, (p,)."""
        return np.array(self.layout.counts, np.int64)

    @cached_property
    def key_counts(self) -> Ints:
        """Number of keys of each rank, (p,)."""
        return np.array(self.key_layout.counts, np.int64)

    @cached_property
    def slots(self) -> Ints:
        """(p, p): slots of rank [s] that rank [d] needs, over all blocks; the diagonal is 0."""
        return to_readers(self.needed.sum(0))

    def ending(self, size: int) -> Ints:
        """Return (p, groups, hops + 1): as `Setting.ending`; column 0 is not counted, nothing reads it."""
        return self.stopping(size).sum(0)

    @cached_property
    def widest(self) -> int:
        """W, the greatest width of a block of which some rank needs a remote row; 0 if there is none."""
        return int(max((w for w, x in zip(self.widths, self.needed, strict=True) if x.any()), default=0))

    @cached_property
    def widths(self) -> Ints:
        """Slots of a row of each block, (blocks,)."""
        return np.array([block.width for block in self._ranges.blocks], np.int64)

    @cached_property
    def needed(self) -> Ints:
        """(blocks, p, p): slots of rank [s] that the rank at distance [t] needs, by block."""
        return _exact(self.widths[:, None, None] * np.array([needed for needed, _ in self._tables]))

    def stopping(self, size: int) -> Ints:
        """Return (blocks, p, groups, hops + 1): `ending`, by block."""
        if size not in self._stopping:
            groups = RelayGroups(self.world, size)
            shape = self.world, groups.count, groups.hops + 1
            tables = [sum((kinds.flying(groups) for kinds in parts), np.zeros(shape)) for parts in self._kinds]
            flying = _exact(self.widths[:, None, None, None] * np.array(tables))
            self._stopping[size] = flying - np.append(flying[..., 1:], np.zeros_like(flying[..., :1]), axis=3)
        return self._stopping[size]

    @cached_property
    def work(self) -> Ints:
        """(p, p): (query head, query, key) triples of keys of rank [s] with queries of the rank at distance [t]."""
        heads = [sum(g.query.groups * g.query.per_group for g in block.head_sets) for block in self._ranges.blocks]
        return _exact(np.sum([h * pairs for h, (_, pairs) in zip(heads, self._tables, strict=True)], axis=0))

    @cached_property
    def pairs(self) -> Ints:
        """`work` of the queries of each rank, (p,)."""
        return to_readers(self.work).sum(0)

    def of_heads(self, dividing: Sequence[Sequence[int]], queries: range, keys: int) -> Counted:
        """Return the problem of a block of heads on joined shards, the same object for equal problems."""
        pattern = self.pattern.of_heads(queries)
        problem = pattern, len(queries), keys, dividing
        if problem not in self._problems:
            if dividing not in self._joined:
                self._joined[dividing] = block_layout(self.layout, dividing), block_layout(self.key_layout, dividing)
            layout, key_layout = self._joined[dividing]
            self._problems[problem] = replace(
                self, pattern=pattern, heads=len(queries), kv_heads=keys, layout=layout, key_layout=key_layout
            )
        return self._problems[problem]

    @cached_property
    def _problems(self) -> dict[Hashable, Counted]:
        return {}

    @cached_property
    def _stopping(self) -> dict[int, Ints]:
        return {}

    @cached_property
    def _joined(self) -> dict[Hashable, tuple[Layout, Layout]]:
        return {}

    @cached_property
    def _ranges(self) -> Ranges:
        layouts = (self.layout,) if self.key_layout == self.layout else (self.layout, self.key_layout)
        sizes = self.heads, self.kv_heads
        if all(layout.listed is None for layout in layouts):
            return ranges_of(self.pattern, self.layout, *sizes, self.key_layout)
        return ranges_of_runs(self.pattern, [_intervals(x) for x in layouts], max(x.n for x in layouts), *sizes)

    @cached_property
    def _tables(self) -> list[Ints]:
        """The tables of each block, (2, p, p)."""
        return [
            sum((kinds.tables() for kinds in parts), np.zeros((2, self.world, self.world))) for parts in self._kinds
        ]

    @cached_property
    def _kinds(self) -> list[list[_Kinds]]:
        """The kinds of each block, in parts."""
        count = len(self._ranges.blocks)
        if count * self.world**2 > MAX_TABLE:
            most = isqrt(MAX_TABLE // count)
            raise ValueError(f"ranks are {self.world}; with the pattern's {count} blocks at most {most} are counted")
        blocks = _kinds_of(self._ranges, self.pattern, self.world)
        pairs = sum(int(kinds.partners.sum()) for parts in blocks for kinds in parts)
        if pairs > MAX_PAIRS:
            raise ValueError(
                f"layout has too many runs of positions: {pairs} pairs of them would be counted, and 2**27 are the "
                "most. Give one of fewer runs, such as Layout.zigzag(n, p)"
            )
        return blocks


def to_readers(by_distance: Ints) -> Ints:
    """Turn a table of (owner, distance) into one of (owner, reader), both (p, p)."""
    ranks = np.arange(len(by_distance))
    return by_distance[ranks[:, None], (ranks - ranks[:, None]) % len(ranks)]


def _intervals(layout: Layout) -> Ints:
    """Return a layout's runs of neighbouring positions, (runs, 5): rank, row, start, step, length. Rows are all 0."""
    owner = np.empty(layout.n, np.int64)
    owner[layout.order] = np.repeat(np.arange(layout.world_size), layout.counts)
    start = np.flatnonzero(group_starts(owner))
    length = np.diff(np.append(start, layout.n))
    return np.stack([owner[start], np.zeros_like(start), start, np.ones_like(start), length], axis=1)


@dataclass(frozen=True, eq=False)
class _Kinds:
    """Some kinds of groups of one block. queries, keys: ranges of all kinds, one after the other, a column a field.

    counts: ranges of queries and of keys of each kind, (kinds, 2).
    often: groups of each kind by rotation, (kinds, p).
    """

    block: Block
    causal: bool
    queries: Ints
    keys: Ints
    counts: Ints
    often: Ints

    def tables(self) -> Ints:
        """Count by owner [s] and distance [t], (2, p, p): rows that the rank at distance t needs, and pairs of a query
        and a key.
        """
        leading, trailing, seen = self._extents()
        return self._in_all_rotations(np.stack([np.minimum(leading + trailing, self.keys[:, 4:]), seen], axis=1))

    def flying(self, groups: RelayGroups) -> Ints:
        """Count by owner, groups away and hop, (p, groups, hops + 1): rows that travel so many hops or more."""
        p = groups.ranks
        leading, trailing, _ = self._extents()
        total = np.zeros((p, groups.count, groups.hops + 1))
        for place in range(groups.size if groups.count > 1 else 1):  # of the owner in its group
            owner = np.full(p - 1, place)
            at = groups.hop(owner, (owner + np.arange(1, p)) % p)
            extents = np.zeros((2, len(self.keys), groups.count, groups.hops + 1), np.int64)
            for extent, at_distance in zip(extents, (leading, trailing), strict=True):
                extent[:, *at] = at_distance[:, 1:]
            farther = np.flip(np.maximum.accumulate(np.flip(extents, 3), axis=3), 3).sum(0)
            farther = np.minimum(farther, self.keys[:, 4, None, None])
            farther[:, :, 0] = 0
            every = self._in_all_rotations(farther.reshape(len(farther), 1, -1))[0].reshape(total.shape)
            owners = slice(place, None, groups.size) if groups.count > 1 else slice(None)
            total[owners] = every[owners]
        return total

    def _extents(self) -> tuple[Ints, Ints, Ints]:
        """Return leading and trailing elements that the rank at each distance needs, and its pairs, (keys, p)."""
        count = self.keys[:, 4:]
        whole = self._seeing_all()
        leading, trailing = np.where(whole > 0, count, 0)
        seen = whole.sum(0) * count
        for query, key, at in self._pairs():
            shift, after = query[5], query[0] > key[0]
            until, pairs = (
                _count_until(key, query[2] + (query[4] - 1) * query[3] + shift),
                _sum_until(query, key, shift),
            )
            if self.block.window is not None:
                hidden = _count_until(key, query[2] + shift)
                np.maximum.at(trailing.reshape(-1), at, np.where(after, key[4] - hidden, 0))
                until, pairs = np.where(after, 0, until), np.where(after, query[4] * key[4] - pairs, pairs)
            np.maximum.at(leading.reshape(-1), at, until)
            np.add.at(seen.reshape(-1), at, pairs)
        leading[:, 0] = trailing[:, 0] = 0  # own rows
        return leading, trailing, seen

    def _seeing_all(self) -> Ints:
        """Count the queries of the rank at each distance that see all of a key range, (2, keys, p): of those that see
        leading elements of some range, and of those that see trailing ones.
        """
        p, (before, until) = self.often.shape[1], self.edges
        trailing = self.shift < 0
        begin = self.key_begin + np.where(trailing, until, 0)
        end = self.key_begin + np.where(trailing, self.key_count, before)
        changes = np.zeros((2, len(self.keys) + 1, p), np.int64)
        for edge, count in ((begin, self.queries[:, 4]), (end, -self.queries[:, 4])):
            at = np.ravel_multi_index((trailing.astype(int), edge, self.queries[:, 1]), changes.shape)
            np.add.at(changes.reshape(-1), at, count)
        by_rank = np.cumsum(changes, axis=1)[:, :-1]
        return np.take_along_axis(by_rank, (self.keys[None, :, 1:2] + np.arange(p)) % p, axis=2)

    @cached_property
    def shift(self) -> Ints:
        """Positions from a query to the last key that it sees or, in the segment behind the key's, does not see."""
        away, reach = self.queries[:, 0], self.block.window
        return np.zeros_like(away) if reach is None else np.where(away > 0, -reach - 1, reach * (away < 0))

    @cached_property
    def edges(self) -> tuple[Ints, Ints]:
        """Number of key ranges of its kind that end up to the first shifted position of each query range, and of those
        that begin up to its last. Those between them are seen in part, but for a segment of which all is seen.
        """
        own = (self.queries[:, 0] == 0) | (self.block.window is None)
        first, key = self.queries[:, 2] + self.shift, self.keys[:, 2]
        last, key_last = (x[:, 2] + (x[:, 4] - 1) * x[:, 3] for x in (self.queries, self.keys))
        low, span = int(key.min(initial=0)) - 1, int(key_last.max(initial=0)) - int(key.min(initial=0)) + 2
        kind, key_kind = (np.repeat(np.arange(len(self.counts)), x) * span for x in self.counts.T)
        ends = np.maximum.accumulate(key_kind + key_last - low)
        before, until = (
            np.searchsorted(x, kind + np.clip(position - low, 0, span - 1), "right") - self.key_begin
            for x, position in ((ends, first), (key_kind + key - low, last + self.shift))
        )
        if self.causal:
            return before, until
        return np.where(own, self.key_count, before), np.where(own, self.key_count, until)

    @property
    def partners(self) -> Ints:
        """Key ranges that each query range is paired with: the first ones of its kind, by position."""
        return self.edges[1] if self.block.window is None else self.key_count

    @cached_property
    def key_begin(self) -> Ints:
        """The first key range of the kind of each query range."""
        return np.repeat(np.cumsum(self.counts[:, 1]) - self.counts[:, 1], self.counts[:, 0])

    @cached_property
    def key_count(self) -> Ints:
        """Key ranges of the kind of each query range."""
        return np.repeat(self.counts[:, 1], self.counts[:, 0])

    def _pairs(self) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield the columns of the query and its shift, the columns of the key, and key * p + distance of each, of some
        pairs after others that see each other in part.
        """
        p, queries, keys = self.often.shape[1], np.append(self.queries.T, self.shift[None], axis=0), self.keys.T.copy()
        before, until = self.edges
        partners, first_key = until - before, self.key_begin + before
        begins: list[int] = np.flatnonzero(group_starts(np.cumsum(partners) // _BATCH)).tolist()
        for begin, end in pairwise([*begins, len(partners)]):
            which, several = np.arange(begin, end), partners[begin:end]
            key_at = np.repeat(first_key[which], several) + ragged_arange(several)
            query, key = queries[:, np.repeat(which, several)], keys[:, key_at]
            yield query, key, key_at * p + (query[1] - key[1]) % p

    def _in_all_rotations(self, tables: Ints) -> Ints:
        """Add the rows of each key range, (keys, tables, columns), to those of its owner in all groups: (tables, p,
        columns) in fp64.
        """
        kind, p = np.repeat(np.arange(len(self.counts)), self.counts[:, 1]), self.often.shape[1]
        weights = self.often[kind[:, None], (np.arange(p) - self.keys[:, 1:2]) % p]
        total = weights.T.astype(float) @ tables.reshape(len(tables), -1).astype(float)
        return total.reshape(p, *tables.shape[1:]).transpose(1, 0, 2)


def _kinds_of(ranges: Ranges, pattern: Pattern, p: int) -> list[list[_Kinds]]:
    """Find the kinds of groups of each block, in parts."""
    group = group_of(ranges)
    columns = np.stack([group, ranges.rank, ranges.first, ranges.step, ranges.count], axis=1)
    queries, keys = (x[np.lexsort((ranges.first[x], group[x]))] for x in (ranges.queries, ranges.keys))
    begin = np.flatnonzero(group_starts(group[keys]))
    groups, windowed = group[keys[begin]], ranges.window[keys[begin]] >= 0
    low = np.searchsorted(group[queries], groups - (windowed & (not pattern.causal)), "left")
    high = np.searchsorted(group[queries], groups + windowed, "right")
    end, block = np.append(begin, len(keys))[1:], ranges.block[keys[begin]]
    queries, keys = columns[queries], columns[keys]
    found: list[dict[tuple[bytes, bytes], tuple[Ints, Ints, Ints]]] = [{} for _ in ranges.blocks]
    for index, a, b, c, d in zip(*(x.tolist() for x in (block, low, high, begin, end)), strict=True):
        origin = keys[c] * (1, 1, 1, 0, 0)  # group, rank and position of the first key range
        sides = queries[a:b] - origin, keys[c:d] - origin
        for side in sides:
            side[:, 1] %= p
        kind = sides[0].tobytes(), sides[1].tobytes()
        if kind not in found[index]:
            found[index][kind] = *sides, np.zeros(p, np.int64)
        found[index][kind][2][origin[1]] += 1
    return [
        list(_parts(x, pattern.causal, list(kinds.values()), p)) for x, kinds in zip(ranges.blocks, found, strict=True)
    ]


def _parts(block: Block, causal: bool, kinds: list[tuple[Ints, Ints, Ints]], p: int) -> Iterator[_Kinds]:
    """Yield a block's kinds, given as queries, keys and rotations, in parts of about _PART key ranges."""
    counts = np.array([(len(queries), len(keys)) for queries, keys, _ in kinds], np.int64).reshape(-1, 2)
    begins = np.flatnonzero(group_starts(np.cumsum(counts[:, 1]) // _PART)).tolist()
    for a, b in pairwise([*begins, len(kinds)]):
        queries, keys = (np.concatenate([kind[i] for kind in kinds[a:b]]) for i in (0, 1))
        yield _Kinds(block, causal, queries, keys, counts[a:b], np.array([kind[2] for kind in kinds[a:b]], np.int64))


def _count_until(key: Ints, position: Ints) -> Ints:
    """Count the elements of key ranges at or before a position."""
    return np.clip((position - key[2]) // key[3] + 1, 0, key[4])


def _sum_until(query: Ints, key: Ints, reach: Ints) -> Ints:
    """Sum `_count_until` of position + reach over the positions of a query range."""
    first = query[2] + reach - key[2]  # from the first key on
    some = np.clip(-(first // query[3]), 0, query[4])  # queries that see no key
    every = np.clip(-((first - (key[4] - 1) * key[3]) // query[3]), some, query[4])  # that do not see all
    partial = _floor_sum(every - some, key[3], query[3], np.maximum(first + some * query[3], 0))
    return partial + every - some + (query[4] - every) * key[4]


def _floor_sum(n: Ints, m: Ints, a: Ints, b: Ints) -> Ints:
    """Sum (a i + b) // m over i = 0 .. n - 1, for a, m >= 1 and b >= 0, by Euclid's algorithm on m and a.

    Take the whole parts of a / m and b / m out. What is left counts the points (i, j), j >= 1, with j m <= a i + b, and
    is a sum of the same form over the j, which has m and a exchanged.
    """
    total = np.zeros_like(n)
    while n.any():
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        n, b = np.divmod(a * n + b, m)
        a, m = m, np.maximum(a, 1)  # a is 0 only where n is now
    return total


def _exact(total: Ints) -> Ints:
    """Return a sum of integers in fp64 as integers; refuse one that fp64 rounds."""
    if total.max(initial=0) >= _EXACT:
        raise ValueError(
            "tokens are too many: a rank has 2**53 or more pairs of a query and a key, which are not counted"
        )
    return total.astype(np.int64)
