"""The kernel calls of one rank: its range pairs, cut where the mask changes, folded and joined into tiles.

Range pairs of own keys can be computed at once, those of remote keys after the stage that receives them. Each pair is
cut into parts with one mask each. Parts that differ only in their segment are folded. Parts with the same query rows
and the same mask are joined. Heads with shifted grids share a call (`ring.plan.diagonal`).

The example (see `ring.plan`): rank 0 has four pairs of own ranges, 0 and 2 of block 0 and 4 and 6 of block 1, with
themselves. It has two more with remote keys, received in stage 1. The pair of a range with itself is a causal square.
In this example a remote range is either wholly visible or wholly hidden.

    stage  mask    query  key  query rows  keys
    0      CAUSAL  0      0    0 2         0 2
    0      CAUSAL  2      2    4 6         4 6
    0      CAUSAL  4      4    1 3         1 3
    0      CAUSAL  6      6    5 7         5 7
    1      FULL    2      3    4 6         0 1
    1      FULL    6      7    5 7         2 3

Folding makes one tile of the first two rows and one of the next two. Joining heads makes one tile of these, and one of
the last two rows. So a rank computes this example in two kernel calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from ring.layout import Layout
from ring.plan.chunks import SlotRanges
from ring.plan.diagonal import merge_diagonals
from ring.plan.range_pairs import RangePairs, Sight, pair_up
from ring.plan.ranges import Ints, Ranges, Subranges, merge_adjacent
from ring.plan.rows import Fold, FoldKind, Rows, concatenate, folds, gathered_folds, varlen_folds
from ring.plan.schedule import Schedule
from ring.plan.slice_pairs import disjoint_layers, slice_pairs
from ring.plan.tile import Mask, Sequences, Tile
from ring.plan.window_runs import WindowRuns, window_runs

_Join = Callable[[Ranges, Subranges, Subranges], list[RangePairs]]

MIN_ROWS = 16  # a kernel call with fewer query rows costs more to start than to run


@dataclass(frozen=True)
class Limits:
    """Most key/value tokens of a kernel call: `bucket` in general, `own` where it takes several segments of own keys.

    varlen: documents of different lengths share a call if their range pairs have at most so many rows and keys. Longer
    ones share it too where they are less than half of the work. 0: none share a call.
    window: longest window, in elements, that a call takes: of own keys all (`ring.plan.window_runs`), of the segment
    before those from a row's own on. With longer ones parts are computed, each without a window. 0: always.
    """

    bucket: int
    own: int
    varlen: int = 0
    window: int = 0

    @property
    def rows(self) -> int:
        """Most query rows of a call."""
        return max(self.bucket, MIN_ROWS)


def tiles_of(
    ranges: Ranges, layout: Layout, route: Schedule, *, rank: int, kv_heads: int, limits: Limits
) -> list[tuple[Tile, ...]]:
    """Return the tiles that `rank` computes with its own keys, then those of every stage."""
    own, received = merge_adjacent(ranges, rank), received_keys(ranges, layout, route, rank, kv_heads)
    runs = window_runs(own, limits.bucket, limits.window) if limits.window else None
    tiles: list[list[Tile]] = [[] for _ in range(len(route.stages) + 1)]
    if runs is not None:
        tiles[0] += _window_tiles(runs, rank, limits)
    # Slices tell distances, which adjacent ranges that were merged no longer have.
    parts: list[tuple[Ranges, Keys, int, tuple[_Join, ...]]] = [
        (own, own_keys(own, rank), limits.own, (partial(_outside_runs, runs=runs),))
    ]
    if any(block.slices for block in ranges.blocks):
        parts.append((ranges, own_keys(ranges, rank), limits.own, (slice_pairs,)))
    parts.append((ranges, received, limits.bucket, (pair_up, slice_pairs)))
    for table, keys, fold_limit, joins in parts:
        for stage, tile in _tiles(table, keys.cut(limits.bucket), rank, joins, limits, fold_limit):
            tiles[stage].append(tile)
    most = limits.bucket * kv_heads
    return [tuple(merge_diagonals(x, most, packed=i > 0 and not route.whole)) for i, x in enumerate(tiles)]


# --- addresses of keys ---


@dataclass(frozen=True, eq=False)
class Keys:
    """Subranges of keys in ascending order of range, the stage after which each can be read, and its address.

                              packed   address of element e           base            scale
        own shard (stage 0)   False    its row                        0               1
        gathered shards       False    base + scale * its row         shard's place   key/value heads
        slots of a message    True     base + scale * (e - first)     first slot      the block's width

    Rows are arithmetic, or looked up in the listing of the ranges. Slots of a message are arithmetic in any layout.
    """

    subranges: Subranges
    stage: Ints
    packed: Ints  # bool
    base: Ints
    scale: Ints

    @classmethod
    def of(cls, subranges: Subranges, *, stage: Ints | int, packed: bool, base: Ints | int, scale: Ints | int) -> Keys:
        """Build the columns: an array has a value for each subrange, a number is the value of all."""
        columns = (np.full(len(subranges), column) for column in (stage, packed, base, scale))
        return cls(subranges, *columns)

    def take(self, which: Ints) -> Keys:
        columns = (column[which] for column in (self.stage, self.packed, self.base, self.scale))
        return Keys(self.subranges.take(which), *columns)

    @classmethod
    def joined(cls, *parts: Keys) -> Keys:
        """Return all keys of several, in ascending order of range."""
        names = ("stage", "packed", "base", "scale")
        columns = (np.concatenate([getattr(x, name) for x in parts]) for name in names)
        keys = cls(Subranges.join([x.subranges for x in parts]), *columns)
        return keys.take(np.argsort(keys.subranges.range, kind="stable"))

    def cut(self, most: int) -> Keys:
        """Cut the subranges into parts of at most `most` elements."""
        subranges, which = self.subranges.cut(most)
        skip = subranges.first - self.subranges.first[which]
        base = self.base[which] + np.where(self.packed[which], skip * self.scale[which], 0)
        return Keys(subranges, self.stage[which], self.packed[which], base, self.scale[which])


def own_keys(own: Ranges, rank: int) -> Keys:
    """Return the rank's own keys, readable from the start. own: its ranges, merged where they are adjacent."""
    whole = Subranges.whole(own, own.keys[own.rank[own.keys] == rank])
    return Keys.of(whole, stage=0, packed=False, base=0, scale=1)


def received_keys(ranges: Ranges, layout: Layout, route: Schedule, rank: int, kv_heads: int) -> Keys:
    """Return the remote keys of all stages at once: there may be hundreds of stages with few keys each."""
    if route.whole:
        return _gathered_keys(ranges, layout, route, rank, kv_heads)
    slots = SlotRanges.join([stage.received for stage in route.stages])
    lengths = [len(stage.received.subranges) for stage in route.stages]
    stage, index = np.repeat(np.arange(1, len(lengths) + 1), lengths), slots.subranges.range
    keys = Keys.of(slots.subranges, stage=stage, packed=True, base=slots.slot, scale=ranges.width[index])
    return keys.take(np.argsort(index, kind="stable"))


def _gathered_keys(ranges: Ranges, layout: Layout, route: Schedule, rank: int, kv_heads: int) -> Keys:
    """Return the remote keys of whole shards. One stage receives them all; a single rank has none."""
    bases = np.zeros(layout.world_size, np.int64)
    for stage in route.stages:
        for transfer in stage.receives:
            bases[transfer.peer] = transfer.start
    remote = Subranges.whole(ranges, ranges.keys[ranges.rank[ranges.keys] != rank])
    return Keys.of(remote, stage=1, packed=False, base=bases[ranges.rank[remote.range]], scale=kv_heads)


# --- one mask for each part ---


def split_by_mask(ranges: Ranges, pairs: RangePairs, window: int = 0) -> list[tuple[Mask, RangePairs]]:
    """Cut range pairs into parts with one mask each. window: as in `Limits`.

    Two arithmetic ranges with equal steps see each other along a diagonal: query i sees the keys j <= i + c, and c >= 0
    after trimming. That makes three parts: c keys that all queries see, a causal square of t queries and t keys, and
    the queries below the square, which see all of it.

    Where a query sees the keys from a position on, the square is anticausal. If it is longer than the window of a call,
    its queries and keys are counted from the last first, and copied: then it is causal.
    """
    q, k = pairs.query, pairs.key
    if pairs.sight is Sight.ALL:
        return [(Mask.FULL, pairs)]
    if pairs.sight is Sight.FROM:
        limit = ranges.position(q.range, q.first + q.count - 1) + pairs.bound  # first position that all queries see
        full = ranges.position(k.range, k.first) >= limit
    else:
        limit = ranges.position(q.range, q.first) + pairs.bound  # last position that all queries see
        full = ranges.position(k.range, k.first + k.count - 1) <= limit
    if ranges.listing is not None:
        return [(Mask.FULL, pairs.take(np.flatnonzero(full))), (Mask.POSITION, pairs.take(np.flatnonzero(~full)))]
    equal_steps = ranges.step[q.range] == ranges.step[k.range]
    diagonal = np.flatnonzero(~full & equal_steps)
    return [
        (Mask.FULL, pairs.take(np.flatnonzero(full))),
        (Mask.POSITION, pairs.take(np.flatnonzero(~full & ~equal_steps))),
        *_along_diagonal(ranges, pairs.take(diagonal), limit[diagonal], window),
    ]


def _along_diagonal(ranges: Ranges, pairs: RangePairs, limit: Ints, window: int) -> list[tuple[Mask, RangePairs]]:
    """Cut pairs along the diagonal (`split_by_mask`). limit: the last, or first, position that all queries see."""
    q, k = pairs.query, pairs.key
    backwards = pairs.sight is Sight.FROM
    edge = ranges.position(k.range, k.first + k.count - 1 if backwards else k.first)
    before = abs(limit - edge) // ranges.step[k.range]  # c
    square = k.count - before  # t
    zero = np.zeros_like(square)
    if backwards:
        left = pairs.part(queries=(zero, q.count), keys=(square, before))
        diagonal = pairs.part(queries=(q.count - square, square), keys=(zero, square))
        short = square <= window
        squares = [
            (Mask.ANTICAUSAL, diagonal.take(np.flatnonzero(short))),
            (Mask.CAUSAL, diagonal.take(np.flatnonzero(~short)).from_the_last()),
        ]
        below = pairs.part(queries=(zero, q.count - square), keys=(zero, square))
    else:
        left = pairs.part(queries=(zero, q.count), keys=(zero, before))
        squares = [(Mask.CAUSAL, pairs.part(queries=(zero, square), keys=(before, square)))]
        below = pairs.part(queries=(square, q.count - square), keys=(before, square))
    return [
        (Mask.FULL, left.take(np.flatnonzero(before))),
        *squares,
        (Mask.FULL, below.take(np.flatnonzero(q.count > square))),
    ]


# --- from parts of one mask to tiles ---


@dataclass(frozen=True, eq=False)
class _Draft:
    """A tile of one block, before it is split into head groups."""

    stage: int
    block: int
    packed: bool
    query: Rows
    key: Rows
    query_positions: Ints | None
    key_positions: Ints | None
    sequences: Sequences | None
    alone: bool  # its rows, or keys, would not stay disjoint beside another's


def _window_tiles(runs: WindowRuns, rank: int, limits: Limits) -> Iterator[Tile]:
    """Yield the tiles of runs with themselves."""
    keys = own_keys(runs.table, rank)
    own, causal = keys.subranges, runs.table.causal
    none = np.zeros_like(own.range)
    for mask, sight in ((Mask.CAUSAL, Sight.UP_TO), (Mask.FULL, Sight.ALL)):
        pairs = RangePairs(own, own, np.arange(len(own)), sight, bound=none, segment=runs.table.segment)
        alike = causal == (mask is Mask.CAUSAL)
        for reach in np.unique(runs.reach[alike]).tolist():
            some = pairs.take(np.flatnonzero(alike & (runs.reach == reach)))
            for draft in _drafts(runs.table, keys, mask, some, limits.own, limits):
                for _, tile in _tiles_of_call(runs.table, mask, [draft], reach):
                    yield tile


def _tiles(
    ranges: Ranges, keys: Keys, rank: int, joins: Sequence[_Join], limits: Limits, fold_limit: int
) -> Iterator[tuple[int, Tile]]:
    """Yield (stage, tile) for all calls of `rank` with these keys. fold_limit: most key tokens of several segments."""
    queries, _ = Subranges.whole(ranges, ranges.queries[ranges.rank[ranges.queries] == rank]).cut(limits.rows)
    tables = chain.from_iterable(join(ranges, queries, keys.subranges) for join in joins)
    for mask, part in chain.from_iterable(split_by_mask(ranges, pairs, limits.window) for pairs in tables):
        drafts = _drafts(ranges, keys, mask, part, fold_limit, limits)
        if mask is Mask.FULL:
            drafts = _join_rows(drafts, limits.rows)
        for call in _group_keys(drafts, 0 if mask in (Mask.CAUSAL, Mask.ANTICAUSAL) else limits.bucket):
            yield from _tiles_of_call(ranges, mask, call)


def _outside_runs(ranges: Ranges, queries: Subranges, keys: Subranges, runs: WindowRuns | None) -> list[RangePairs]:
    """Return the pairs of ranges that are not of one run: other calls compute those."""
    tables = pair_up(ranges, queries, keys)
    if runs is None:
        return tables
    numbers = [(runs.run_of[pairs.query.range], runs.run_of[pairs.key.range]) for pairs in tables]
    several = zip(tables, numbers, strict=True)
    return [pairs.take(np.flatnonzero((query != key) | (query < 0))) for pairs, (query, key) in several]


def _drafts(
    ranges: Ranges, keys: Keys, mask: Mask, pairs: RangePairs, fold_limit: int, limits: Limits
) -> Iterator[_Draft]:
    """Fold range pairs of one mask over segments as far as the limits allow. fold_limit: most key tokens of a strided
    view. Gathered keys are copied, so the bucket bounds them.
    """
    if not len(pairs):
        return
    addresses = Addresses.of(ranges, keys, pairs)
    q, k = pairs.query, pairs.key
    segment, call = pairs.segment, addresses.call
    if pairs.sliced:
        triangles = mask in (Mask.CAUSAL, Mask.ANTICAUSAL)
        layer, segment = disjoint_layers(ranges, pairs, call, joined=not triangles)
        call = *call, layer
    most = np.maximum(np.minimum(fold_limit // k.count, max(fold_limit, MIN_ROWS) // q.count), 1)
    entries = (*call, *addresses.shape), segment, addresses.query, addresses.key, most
    if ranges.packed and limits.varlen and mask is not Mask.POSITION:
        sums = (q.count, k.count), limits.varlen, (limits.rows, limits.bucket)
        calls = varlen_folds(call, *entries, *sums)
    elif ranges.packed:
        calls = gathered_folds(*entries, np.maximum(np.minimum(limits.bucket // k.count, limits.rows // q.count), 1))
    else:
        calls = folds(*entries)
    for fold in calls:
        first = fold.members[0]
        query, key = addresses.rows(fold)
        by_position = mask is Mask.POSITION
        yield _Draft(
            stage=int(keys.stage[pairs.item[first]]),
            block=int(ranges.block[q.range[first]]),
            packed=bool(keys.packed[pairs.item[first]]),
            query=query,
            key=key,
            query_positions=query_positions(ranges, pairs.take(fold.members)) if by_position else None,
            key_positions=key_positions(ranges, pairs.take(fold.members)) if by_position else None,
            sequences=_sequences(fold, q, k),
            alone=len(fold.members) > 1 and (pairs.sliced or fold.kind is FoldKind.VARLEN),
        )


@dataclass(frozen=True, eq=False)
class Addresses:
    """Start and step of the queries and keys of range pairs: rows, slots, or places in a listing."""

    ranges: Ranges
    pairs: RangePairs
    query: Ints
    query_step: Ints
    key: Ints
    key_step: Ints
    packed: Ints
    origin: Ints  # start of the key's shard, added to its row; 0 for packed keys
    scale: Ints
    call: tuple[Ints, ...]  # equal for pairs that can share a call
    shape: tuple[Ints, ...]  # equal for pairs of a call that differ only in where they begin

    @classmethod
    def of(cls, ranges: Ranges, keys: Keys, pairs: RangePairs) -> Addresses:
        q, k, item = pairs.query, pairs.key, pairs.item
        query, query_step = ranges.rows(q)
        row, row_step = ranges.rows(k)
        packed, base, scale = keys.packed[item], keys.base[item], keys.scale[item]
        if ranges.listing is None:
            row, row_step = base + scale * row, scale * row_step
        # With a listing, `rows` applies base and scale after the lookup.
        slot = base + (k.first - keys.subranges.first[item]) * scale
        key, key_step = np.where(packed, slot, row), np.where(packed, scale, row_step)
        if pairs.descending:
            query, query_step = query + (q.count - 1) * query_step, -query_step
            key, key_step = key + (k.count - 1) * key_step, -key_step
        origin = np.where(packed, 0, base)
        owner = ranges.rank[k.range]  # only keys of one owner are sure to lie at equal distances
        call = keys.stage[item], ranges.block[q.range], packed, origin
        return cls(
            ranges, pairs, query=query, query_step=query_step, key=key, key_step=key_step, packed=packed, origin=origin,
            scale=scale, call=call, shape=(owner, q.count, k.count, query_step, key_step),
        )  # fmt: skip

    def rows(self, fold: Fold) -> tuple[Rows, Rows]:
        """Return the query rows and the key rows, or slots, of a fold."""
        first, listing = fold.members[0], self.ranges.listing
        query = fold.rows(self.query, fold.left_step, self.query_step, self.pairs.query.count)
        key = fold.rows(self.key, fold.right_step, self.key_step, self.pairs.key.count)
        if listing is not None:
            query = Rows.of(listing.rows[query.listed()])
            if not self.packed[first]:
                key = Rows.of(self.origin[first] + self.scale[first] * listing.rows[key.listed()])
        return query, key


def _sequences(fold: Fold, queries: Subranges, keys: Subranges) -> Sequences | None:
    if fold.kind is not FoldKind.VARLEN:
        return None
    return Sequences.of(queries.count[fold.members], keys.count[fold.members])


def query_positions(ranges: Ranges, pairs: RangePairs) -> Ints:
    """Return (pairs, elements): the positions of queries, negated where they see the keys from a position on."""
    position = _positions(ranges, pairs.query)
    return -position if pairs.sight is Sight.FROM else position


def key_positions(ranges: Ranges, pairs: RangePairs) -> Ints:
    """Return (pairs, elements): the least of the `query_positions` that sees each key."""
    position = _positions(ranges, pairs.key) - pairs.bound[:, None]
    return -position if pairs.sight is Sight.FROM else position


def _positions(ranges: Ranges, subranges: Subranges) -> Ints:
    """Return the positions of subranges of equal count, (subranges, elements)."""
    elements = subranges.first[:, None] + np.arange(subranges.count[0])
    return ranges.position(np.broadcast_to(subranges.range[:, None], elements.shape), elements)


def _join_rows(drafts: Iterator[_Draft], most_rows: int) -> Iterator[_Draft]:
    """Join query rows that see the same keys and continue each other, such as both halves of a zigzag shard."""
    readers: dict[tuple[object, ...], list[_Draft]] = {}
    for draft in drafts:
        if draft.alone:
            yield draft
            continue
        readers.setdefault((draft.stage, draft.block, draft.packed, draft.key.key), []).append(draft)
    for several in readers.values():
        several.sort(key=lambda draft: draft.query.start)
        last = several[0]
        for draft in several[1:]:
            rows = concatenate([last.query, draft.query])
            if rows.index is None and rows.length * rows.folds <= most_rows:
                last = replace(last, query=rows)
            else:
                yield last
                last = draft
        yield last


def _group_keys(drafts: Iterator[_Draft], most_keys: int) -> Iterator[list[_Draft]]:
    """Group drafts of the same query rows into calls of at most `most_keys` keys, of several ranks or subranges."""
    calls: dict[tuple[object, ...], list[_Draft]] = {}
    for draft in drafts:
        if draft.alone:
            yield [draft]
            continue
        call = calls.setdefault((draft.stage, draft.block, draft.packed, draft.query.key), [])
        tokens = (sum(peer.key.length for peer in call) + draft.key.length) * draft.key.folds
        if call and tokens > most_keys:
            yield list(call)
            call.clear()
        call.append(draft)
    yield from calls.values()


def _tiles_of_call(
    ranges: Ranges, mask: Mask, drafts: list[_Draft], window: int | None = None
) -> Iterator[tuple[int, Tile]]:
    """Yield (stage, tile) for each head group of the block, from drafts of the same query rows."""
    drafts = sorted(drafts, key=lambda draft: draft.key.start)  # in another order they are never a strided view
    first = drafts[0]
    key = concatenate([draft.key for draft in drafts])
    query_positions = key_positions = None
    if first.query_positions is not None:
        query_positions = torch.from_numpy(first.query_positions)
        listed = [draft.key_positions for draft in drafts if draft.key_positions is not None]
        key_positions = torch.from_numpy(np.concatenate(listed, axis=1))
    for group in ranges.blocks[first.block].head_sets:
        heads = group.column if first.packed else group.key
        yield (
            first.stage,
            Tile(
                query_rows=first.query,
                key_rows=key,
                query_heads=group.query,
                key_heads=heads,
                mask=mask,
                query_positions=query_positions,
                key_positions=key_positions,
                sequences=first.sequences,
                window=window,
            ),
        )
