"""The kernel calls of one rank: its range pairs, cut where the mask changes, folded and joined into tiles.

Range pairs of own keys can be computed at once, those of remote keys after the stage that receives them. Each pair is
cut so that every part has one mask; parts that are alike in all segments are folded; parts that the same rows see
alike are joined; and heads with shifted grids share a call (`ring.plan.diagonal`).

The example (see `ring.plan`): rank 0 has these four pairs with the ranges 0 and 2 of block 0 and the ranges 4 and 6 of
block 1 as queries and own keys, and two more with remote keys, received in stage 1. A range pair of a range with itself
is a causal square; ranges that another rank holds are either wholly visible here or not at all.

    stage  mask    query  key  query rows  keys
    0      CAUSAL  0      0    0 2         0 2
    0      CAUSAL  2      2    4 6         4 6
    0      CAUSAL  4      4    1 3         1 3
    0      CAUSAL  6      6    5 7         5 7
    1      FULL    2      3    4 6         0 1
    1      FULL    6      7    5 7         2 3

Folding makes one tile of the first two rows, one of the next two; joining heads makes one of these, and one of the last
two rows: a rank computes this example in two kernel calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from ring.layout import Layout
from ring.plan.chunks import SlotRanges
from ring.plan.diagonal import along_diagonals
from ring.plan.range_pairs import RangePairs, Sight, pair_up
from ring.plan.ranges import Ints, Ranges, Subranges, joined
from ring.plan.rows import Fold, How, Rows, concatenate, folds, gathered_folds, varlen_folds
from ring.plan.schedule import Schedule
from ring.plan.tile import Mask, Sequences, Tile

LEAST_ROWS = 16  # with fewer query rows a kernel call costs more to start than to run


@dataclass(frozen=True)
class Limits:
    """Key/value tokens of a kernel call: `bucket` in general, `own` where it takes several segments of own keys.

    varlen: rows and keys up to which documents' range pairs of several lengths share a call, and beyond which those do
    that are less than half of the work; 0: none do.
    """

    bucket: int
    own: int
    varlen: int = 0

    @property
    def rows(self) -> int:
        """Query rows of a call."""
        return max(self.bucket, LEAST_ROWS)


def tiles_of(
    ranges: Ranges, layout: Layout, route: Schedule, *, rank: int, kv_heads: int, causal: bool, limits: Limits
) -> list[tuple[Tile, ...]]:
    """The tiles that `rank` computes with its own keys, then those of every stage."""
    own, received = joined(ranges, rank), _received_keys(ranges, layout, route, rank, kv_heads)
    tiles: list[list[Tile]] = [[] for _ in range(len(route.stages) + 1)]
    for table, keys, folded in ((own, _own_keys(own, rank), limits.own), (ranges, received, limits.bucket)):
        for stage, tile in _tiles(table, keys.cut(limits.bucket), rank, causal, limits, folded):
            tiles[stage].append(tile)
    most = limits.bucket * kv_heads
    return [
        tuple(along_diagonals(found, most, packed=number > 0 and not route.whole)) for number, found in enumerate(tiles)
    ]


# --- where keys are ---


@dataclass(frozen=True, eq=False)
class _Keys:
    """Subranges of keys, in ascending order of range, with the stage after which they can be read, and their address.

                              packed   address of element e           base            scale
        own shard (stage 0)   False    its row                        0               1
        gathered shards       False    base + scale * its row         shard's place   key/value heads
        slots of a message    True     base + scale * (e - first)     first slot      the block's width

    A row is arithmetic, or looked up in the listing of the ranges. Slots of a message are arithmetic in any layout.
    """

    subranges: Subranges
    stage: Ints
    packed: Ints  # bool
    base: Ints
    scale: Ints

    @classmethod
    def of(cls, subranges: Subranges, *, stage: Ints | int, packed: bool, base: Ints | int, scale: Ints | int) -> _Keys:
        """A number is for all subranges, an array has one for each."""
        columns = (np.full(len(subranges), column) for column in (stage, packed, base, scale))
        return cls(subranges, *columns)

    def take(self, which: Ints) -> _Keys:
        columns = (column[which] for column in (self.stage, self.packed, self.base, self.scale))
        return _Keys(self.subranges.take(which), *columns)

    def cut(self, most: int) -> _Keys:
        """The same in subranges of at most so many elements."""
        subranges, which = self.subranges.cut(most)
        skip = subranges.first - self.subranges.first[which]
        base = self.base[which] + np.where(self.packed[which], skip * self.scale[which], 0)
        return _Keys(subranges, self.stage[which], self.packed[which], base, self.scale[which])


def _own_keys(own: Ranges, rank: int) -> _Keys:
    """The own keys, which can be read from the start. own: ranges, joined where they can be."""
    whole = Subranges.whole(own, np.flatnonzero(own.rank == rank))
    return _Keys.of(whole, stage=0, packed=False, base=0, scale=1)


def _received_keys(ranges: Ranges, layout: Layout, route: Schedule, rank: int, kv_heads: int) -> _Keys:
    """The keys of other ranks, in all stages at once: there may be hundreds of stages with few keys each."""
    if route.whole:
        return _gathered_keys(ranges, layout, route, rank, kv_heads)
    found = SlotRanges.join([stage.received for stage in route.stages])
    lengths = [len(stage.received.subranges) for stage in route.stages]
    number, which = np.repeat(np.arange(1, len(lengths) + 1), lengths), found.subranges.range
    keys = _Keys.of(found.subranges, stage=number, packed=True, base=found.slot, scale=ranges.width[which])
    return keys.take(np.argsort(which, kind="stable"))


def _gathered_keys(ranges: Ranges, layout: Layout, route: Schedule, rank: int, kv_heads: int) -> _Keys:
    """The keys of whole shards. One stage receives them all; a single rank has no stage, and no such keys."""
    bases = np.zeros(layout.world_size, np.int64)
    for stage in route.stages:
        for transfer in stage.receives:
            bases[transfer.peer] = transfer.start
    theirs = Subranges.whole(ranges, np.flatnonzero(ranges.rank != rank))
    return _Keys.of(theirs, stage=1, packed=False, base=bases[ranges.rank[theirs.range]], scale=kv_heads)


# --- one mask for each part ---


def masked(ranges: Ranges, found: RangePairs) -> list[tuple[Mask, RangePairs]]:
    """The range pairs, cut so that each part has one of the three masks.

    Two arithmetic ranges with steps of equal length see each other along a diagonal: query i sees the keys j <= i + c,
    with c >= 0 once trimmed. That makes c keys which all queries see, then a causal square of t queries and t keys,
    then the queries below the square, which see all of it.

    Where a query sees the keys from a position on, the same holds with queries and keys counted from the last one.
    """
    q, k = found.query, found.key
    if found.sight is Sight.ALL:
        return [(Mask.FULL, found)]
    if found.sight is Sight.FROM_WINDOW:
        limit = ranges.position(q.range, q.first + q.count - 1) - found.reach(ranges)  # from here on all queries see
        full = ranges.position(k.range, k.first) >= limit
    else:
        limit = ranges.position(q.range, q.first) + found.reach(ranges)  # up to here all queries see
        full = ranges.position(k.range, k.first + k.count - 1) <= limit
    if ranges.listing is not None:
        return [(Mask.FULL, found.take(np.flatnonzero(full))), (Mask.POSITION, found.take(np.flatnonzero(~full)))]
    aligned = ranges.step[q.range] == ranges.step[k.range]
    diagonal = np.flatnonzero(~full & aligned)
    return [
        (Mask.FULL, found.take(np.flatnonzero(full))),
        (Mask.POSITION, found.take(np.flatnonzero(~full & ~aligned))),
        *_along_diagonal(ranges, found.take(diagonal), limit[diagonal]),
    ]


def _along_diagonal(ranges: Ranges, found: RangePairs, limit: Ints) -> list[tuple[Mask, RangePairs]]:
    """See `masked`. limit: the last key, or the first one, that all queries of a pair see."""
    q, k = found.query, found.key
    backwards = found.sight is Sight.FROM_WINDOW
    edge = ranges.position(k.range, k.first + k.count - 1 if backwards else k.first)
    before = abs(limit - edge) // ranges.step[k.range]  # c
    square = k.count - before  # t
    none = np.zeros_like(square)
    if backwards:
        left = found.part(queries=(none, q.count), keys=(square, before))
        diagonal = found.part(queries=(q.count - square, square), keys=(none, square)).from_the_last()
        below = found.part(queries=(none, q.count - square), keys=(none, square))
    else:
        left = found.part(queries=(none, q.count), keys=(none, before))
        diagonal = found.part(queries=(none, square), keys=(before, square))
        below = found.part(queries=(square, q.count - square), keys=(before, square))
    return [
        (Mask.FULL, left.take(np.flatnonzero(before))),
        (Mask.CAUSAL, diagonal),
        (Mask.FULL, below.take(np.flatnonzero(q.count > square))),
    ]


# --- from parts of one mask to tiles ---


@dataclass(frozen=True, eq=False)
class _Draft:
    """A tile before its heads are told apart."""

    stage: int
    block: int
    packed: bool
    query: Rows
    key: Rows
    query_positions: Ints | None
    key_positions: Ints | None
    sequences: Sequences | None


def _tiles(
    ranges: Ranges, keys: _Keys, rank: int, causal: bool, limits: Limits, folded: int
) -> Iterator[tuple[int, Tile]]:
    """(stage, tile) for all that `rank` has to compute with these keys. folded: key tokens of several segments."""
    queries, _ = Subranges.whole(ranges, np.flatnonzero(ranges.rank == rank)).cut(limits.rows)
    pairs = pair_up(ranges, queries, keys.subranges, causal)
    for mask, part in chain.from_iterable(masked(ranges, found) for found in pairs):
        drafts = _drafts(ranges, keys, mask, part, folded, limits)
        if mask is Mask.FULL:
            drafts = _same_keys(drafts, limits.rows)
        for several in _same_rows(drafts, 0 if mask is Mask.CAUSAL else limits.bucket):
            yield from _finish(ranges, mask, several)


def _drafts(
    ranges: Ranges, keys: _Keys, mask: Mask, found: RangePairs, folded: int, limits: Limits
) -> Iterator[_Draft]:
    """Range pairs of one mask, folded over segments as far as the limits allow. folded: key tokens of a strided view;
    what has to be gathered is bounded by the bucket, since it is copied.
    """
    if not len(found):
        return
    addresses = _Addresses.of(ranges, keys, found)
    q, k = found.query, found.key
    most = np.maximum(np.minimum(folded // k.count, max(folded, LEAST_ROWS) // q.count), 1)
    what = addresses.signature, ranges.segment[q.range], addresses.query, addresses.key, most
    if ranges.packed and limits.varlen and mask is not Mask.POSITION:
        sums = (q.count, k.count), limits.varlen, (limits.rows, limits.bucket)
        together = varlen_folds(addresses.call, *what, *sums)
    elif ranges.packed:
        together = gathered_folds(*what, np.maximum(np.minimum(limits.bucket // k.count, limits.rows // q.count), 1))
    else:
        together = folds(*what)
    for fold in together:
        one = fold.members[0]
        query, key = addresses.rows(fold)
        by_position = mask is Mask.POSITION
        yield _Draft(
            stage=int(keys.stage[found.item[one]]),
            block=int(ranges.block[q.range[one]]),
            packed=bool(keys.packed[found.item[one]]),
            query=query,
            key=key,
            query_positions=_query_limits(ranges, found.take(fold.members)) if by_position else None,
            key_positions=_key_places(ranges, found.take(fold.members)) if by_position else None,
            sequences=_sequences(fold, q, k),
        )


@dataclass(frozen=True, eq=False)
class _Addresses:
    """Where the queries and keys of range pairs begin, and their steps: rows or slots, or places in a listing."""

    ranges: Ranges
    found: RangePairs
    query: Ints
    query_step: Ints
    key: Ints
    key_step: Ints
    packed: Ints
    origin: Ints  # what is added to the row of a key that is not packed: where its shard begins
    scale: Ints
    call: tuple[Ints, ...]  # equal for pairs that one call can take
    signature: tuple[Ints, ...]  # equal for pairs that are alike but for where they begin

    @classmethod
    def of(cls, ranges: Ranges, keys: _Keys, found: RangePairs) -> _Addresses:
        q, k, item = found.query, found.key, found.item
        query, query_step = ranges.rows(q)
        row, row_step = ranges.rows(k)
        packed, base, scale = keys.packed[item], keys.base[item], keys.scale[item]
        if ranges.listing is None:
            row, row_step = base + scale * row, scale * row_step
        # With a listing, base and scale come in when rows are looked up in it.
        slot = base + (k.first - keys.subranges.first[item]) * scale
        key, key_step = np.where(packed, slot, row), np.where(packed, scale, row_step)
        if found.descending:
            query, query_step = query + (q.count - 1) * query_step, -query_step
            key, key_step = key + (k.count - 1) * key_step, -key_step
        origin = np.where(packed, 0, base)
        owner = ranges.rank[k.range]  # keys of one owner lie at equal distances, those of several need not
        call = keys.stage[item], ranges.block[q.range], packed, origin
        signature = (*call, owner, q.count, k.count, query_step, key_step)
        return cls(
            ranges, found, query=query, query_step=query_step, key=key, key_step=key_step, packed=packed, origin=origin,
            scale=scale, call=call, signature=signature,
        )  # fmt: skip

    def rows(self, fold: Fold) -> tuple[Rows, Rows]:
        """The query rows and the key rows, or slots, of a fold."""
        one, listing = fold.members[0], self.ranges.listing
        query = fold.rows(self.query, fold.left_step, self.query_step, self.found.query.count)
        key = fold.rows(self.key, fold.right_step, self.key_step, self.found.key.count)
        if listing is not None:
            query = Rows.of(listing.rows[query.listed()])
            if not self.packed[one]:
                key = Rows.of(self.origin[one] + self.scale[one] * listing.rows[key.listed()])
        return query, key


def _sequences(fold: Fold, queries: Subranges, keys: Subranges) -> Sequences | None:
    if fold.how is not How.VARLEN:
        return None
    return Sequences.of(queries.count[fold.members], keys.count[fold.members])


def _query_limits(ranges: Ranges, found: RangePairs) -> Ints:
    """(pairs, elements): up to where each query sees, for `_key_places`."""
    position = _positions(ranges, found.query) * (-1 if found.sight is Sight.FROM_WINDOW else 1)
    return position + np.reshape(found.reach(ranges), (-1, 1))


def _key_places(ranges: Ranges, found: RangePairs) -> Ints:
    """(pairs, elements): the positions of keys; negative where queries see the keys from a position on."""
    position = _positions(ranges, found.key)
    return -position if found.sight is Sight.FROM_WINDOW else position


def _positions(ranges: Ranges, subranges: Subranges) -> Ints:
    """(subranges, elements) positions of subranges of equal count."""
    elements = subranges.first[:, None] + np.arange(subranges.count[0])
    return ranges.position(np.broadcast_to(subranges.range[:, None], elements.shape), elements)


def _same_keys(drafts: Iterator[_Draft], most_rows: int) -> Iterator[_Draft]:
    """Query rows that see the same keys, and continue each other, as one: both halves of a zigzag shard, say."""
    readers: dict[tuple[object, ...], list[_Draft]] = {}
    for draft in drafts:
        if draft.sequences is not None:
            yield draft
            continue
        readers.setdefault((draft.stage, draft.block, draft.packed, draft.key.key), []).append(draft)
    for found in readers.values():
        found.sort(key=lambda draft: draft.query.start)
        last = found[0]
        for draft in found[1:]:
            rows = concatenate([last.query, draft.query])
            if rows.index is None and rows.length * rows.folds <= most_rows:
                last = replace(last, query=rows)
            else:
                yield last
                last = draft
        yield last


def _same_rows(drafts: Iterator[_Draft], most_keys: int) -> Iterator[list[_Draft]]:
    """Drafts for one call each: keys of several ranks or subranges that the same rows see alike, up to so many."""
    calls: dict[tuple[object, ...], list[_Draft]] = {}
    for draft in drafts:
        if draft.sequences is not None:
            yield [draft]
            continue
        call = calls.setdefault((draft.stage, draft.block, draft.packed, draft.query.key), [])
        tokens = (sum(peer.key.length for peer in call) + draft.key.length) * draft.key.folds
        if call and tokens > most_keys:
            yield list(call)
            call.clear()
        call.append(draft)
    yield from calls.values()


def _finish(ranges: Ranges, mask: Mask, drafts: list[_Draft]) -> Iterator[tuple[int, Tile]]:
    """(stage, tile) for each head group of the block, from drafts of the same query rows."""
    drafts = sorted(drafts, key=lambda draft: draft.key.start)  # ascending rows are a strided view if any are
    one = drafts[0]
    key = concatenate([draft.key for draft in drafts])
    query_positions = key_positions = None
    if one.query_positions is not None:
        query_positions = torch.from_numpy(one.query_positions)
        listed = [draft.key_positions for draft in drafts if draft.key_positions is not None]
        key_positions = torch.from_numpy(np.concatenate(listed, axis=1))
    for group in ranges.blocks[one.block].head_groups:
        heads = group.column if one.packed else group.key
        yield (
            one.stage,
            Tile(
                query_rows=one.query,
                key_rows=key,
                query_heads=group.query,
                key_heads=heads,
                mask=mask,
                query_positions=query_positions,
                key_positions=key_positions,
                sequences=one.sequences,
            ),
        )
