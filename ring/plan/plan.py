"""The plan of one rank: for every stage the messages, and the tiles of attention to compute once they are received.

pattern + layout -> ranges -> range pairs -> tiles, and ranges -> needs -> schedule. Pure integers, computed once for a
setting and cached: every rank computes the same ranges and needs, so that both ends of a message agree on it without
a word.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from reference.pattern import Pattern
from ring.layout import Layout
from ring.plan import schedule
from ring.plan.blocks import Heads
from ring.plan.diagonal import along_diagonals
from ring.plan.range_pairs import Mask, RangePairs, Subranges, masked, pair_up
from ring.plan.ranges import Ints, Ranges, joined, ranges_of
from ring.plan.rows import Fold, Rows, concatenate, folds
from ring.plan.schedule import Schedule, Sizes, SlotRanges, Transfer

EXCHANGES = ("ring", "direct", "gather")
# With fewer query rows than this a kernel call costs more to start than to run.
LEAST_ROWS = 16


@dataclass(frozen=True, eq=False)
class Tile:
    """One kernel call: query rows against key rows, folded over segments, for heads that share them.

    `key_rows` are rows of the own shard before the first stage, slots of the stage's receive buffer afterwards;
    `key_heads` likewise are heads of the shard, or columns of the slots. Positions, (folds, rows) int64, are there
    where the mask asks for them.
    """

    query_rows: Rows
    key_rows: Rows
    query_heads: Heads
    key_heads: Heads
    mask: Mask
    query_positions: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Rows of the own shard and the slots of a buffer that hold, or return, them."""

    rows: Rows
    heads: Heads
    slots: Rows
    columns: Heads


@dataclass(frozen=True, eq=False)
class Step:
    """A stage with its tiles, ready to walk; the transfers are those of `schedule.Stage`. once: every received slot is
    read by exactly one tile, so that gradients of slots are written, not summed.
    """

    gathers: tuple[SlotMap, ...]
    sends: tuple[Transfer, ...]
    relayed: bool
    receives: tuple[Transfer, ...]
    tiles: tuple[Tile, ...]
    return_sends: tuple[Transfer, ...]
    return_receives: tuple[Transfer, ...]
    carried: int
    scatters: tuple[SlotMap, ...]
    once: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank does: the tiles of its own keys, then the steps. `sizes`: the buffers, in slots. `setting`: what it
    was made for, the rank apart: equal on ranks whose plans go together.
    """

    rank: int
    tokens: int
    exchange: str
    local: tuple[Tile, ...]
    steps: tuple[Step, ...]
    sizes: Sizes
    setting: Hashable


@lru_cache(maxsize=128)
def plan_of(
    pattern: Pattern, layout: Layout, rank: int, heads: int, kv_heads: int, exchange: str, bucket: int,
    own: int | None = None,
) -> Plan:  # fmt: skip
    """The plan of `rank`. `bucket`: at most so many key/value tokens a kernel call and a receive buffer, >= 1. `own`:
    so many where a call takes several segments of the rank's own keys, which are not received; None: as many.

    A kernel call takes as many query rows at most, or LEAST_ROWS if that is more: what it returns is bounded as well.
    The arguments are taken as valid (`ring.agreement` checks what users pass).
    """
    ranges = ranges_of(pattern, layout, heads, kv_heads)
    cap = bucket * kv_heads
    if exchange == "ring":
        route = schedule.ring(ranges, layout, pattern.causal, rank, cap)
    elif exchange == "direct":
        route = schedule.direct(ranges, layout, pattern.causal, rank, cap)
    else:
        route = schedule.gather(layout, kv_heads, rank)
    tiles: list[list[Tile]] = [[] for _ in range(len(route.stages) + 1)]
    received = ranges, _received_keys(ranges, layout, route, rank, kv_heads)
    for (table, keys), most in ((_own_keys(ranges, rank), bucket if own is None else own), (received, bucket)):
        for stage, tile in _tiles(table, keys.cut(bucket), rank, pattern.causal, bucket, most):
            tiles[stage].append(tile)
    tiles = [along_diagonals(found, cap, number > 0 and not route.whole) for number, found in enumerate(tiles)]
    others = layout.world_size - 1
    steps = tuple(
        Step(
            _whole_shard_maps(layout, rank, kv_heads, 1) if route.whole else _slot_maps(ranges, stage.gathers),
            stage.sends, stage.relayed, stage.receives, tuple(tiles[number]), stage.return_sends,
            stage.return_receives, stage.carried,
            _whole_shard_maps(layout, rank, kv_heads, others) if route.whole else _slot_maps(ranges, stage.scatters),
            exchange == "direct" and _read_once(stage.receives, tiles[number]),
        )
        for number, stage in enumerate(route.stages, start=1)
    )  # fmt: skip
    setting = (pattern, layout, heads, kv_heads, exchange, bucket)
    return Plan(rank, layout.counts[rank], exchange, tuple(tiles[0]), steps, route.sizes, setting)


def _read_once(receives: Sequence[Transfer], tiles: Sequence[Tile]) -> bool:
    """Whether tiles read as many slots as land. With `direct` each is read at least once, so then each once."""
    read = sum(tile.key_rows.folds * tile.key_rows.length * tile.key_heads.groups for tile in tiles)
    return read == sum(transfer.stop - transfer.start for transfer in receives)


@dataclass(frozen=True, eq=False)
class _Keys:
    """Subranges of keys, in order of range, with the stage at which they are at hand (0: they are local) and address.

    own shard (stage 0)     packed 0    element e lies at its row                    base 0, scale 1
    gathered shards         packed 0    at base + scale * its row                    scale: key/value heads
    packed in a message     packed 1    at base + scale * (e - first)                scale: the block's width

    A row is arithmetic, or looked up in the ranges' listing; packed slots are arithmetic in any layout.
    """

    subranges: Subranges
    stage: Ints
    packed: Ints  # 0 or 1
    base: Ints
    scale: Ints

    def cut(self, most: int) -> _Keys:
        """The same in subranges of at most so many elements."""
        subranges, which = self.subranges.cut(most)
        skip = subranges.first - self.subranges.first[which]
        base = self.base[which] + self.packed[which] * skip * self.scale[which]
        return _Keys(subranges, self.stage[which], self.packed[which], base, self.scale[which])


def _own_keys(ranges: Ranges, rank: int) -> tuple[Ranges, _Keys]:
    """The own ranges, joined where they can be, as keys that are at hand from the start."""
    own = joined(ranges, rank)
    which = np.flatnonzero(own.rank == rank)
    return own, _Keys(Subranges.whole(own, which), 0 * which, 0 * which, 0 * which, 0 * which + 1)


def _received_keys(ranges: Ranges, layout: Layout, route: Schedule, rank: int, kv_heads: int) -> _Keys:
    width = np.array([block.width for block in ranges.blocks], np.int64)
    none = np.empty(0, np.int64)
    parts = [(Subranges(none, none, none), 0, 0, none, none)]
    for number, stage in enumerate(route.stages, start=1):
        if route.whole:
            bases = np.zeros(layout.world_size, np.int64)
            for transfer in stage.receives:
                bases[transfer.peer] = transfer.start
            others = np.flatnonzero(ranges.rank != rank)
            theirs = Subranges.whole(ranges, others)
            parts.append((theirs, number, 0, bases[ranges.rank[others]], 0 * others + kv_heads))
        else:
            received = stage.received
            parts.append((received.subranges, number, 1, received.slot, width[ranges.block[received.subranges.range]]))
    index, first, count, base, scale = (
        np.concatenate(column)
        for column in zip(*((s.range, s.first, s.count, base, scale) for s, _, _, base, scale in parts), strict=True)
    )
    lengths = [len(subranges.range) for subranges, *_ in parts]
    stage_of = np.repeat([number for _, number, *_ in parts], lengths)
    packed = np.repeat([flag for _, _, flag, *_ in parts], lengths)
    order = np.argsort(index, kind="stable")
    subranges = Subranges(index[order], first[order], count[order])
    return _Keys(subranges, stage_of[order], packed[order], base[order], scale[order])


def _tiles(
    ranges: Ranges, keys: _Keys, rank: int, causal: bool, bucket: int, folded: int
) -> Iterator[tuple[int, Tile]]:
    """(stage, tile) for all that `rank` has to compute with these keys. folded: tokens of several segments."""
    most_rows = max(bucket, LEAST_ROWS)
    queries, _ = Subranges.whole(ranges, np.flatnonzero(ranges.rank == rank)).cut(most_rows)
    found = pair_up(ranges, queries, keys.subranges, causal)
    for mask, part in masked(ranges, found, causal):
        drafts = _drafts(ranges, keys, mask, part, folded)
        if mask is Mask.FULL:
            drafts = _same_keys(drafts, most_rows)
        calls: dict[tuple[object, ...], list[_Draft]] = {}
        for draft in drafts:
            # Keys of several ranks or subranges that the same rows see alike go into one call, up to the bucket.
            peers = calls.setdefault((draft.stage, draft.block, draft.packed, draft.query.key), [])
            tokens = (sum(peer.key.length for peer in peers) + draft.key.length) * draft.key.folds
            if mask is Mask.CAUSAL or tokens > bucket:
                yield from _finish(ranges, mask, peers)
                peers.clear()
            peers.append(draft)
        for peers in calls.values():
            yield from _finish(ranges, mask, peers)


def _same_keys(drafts: Iterator[_Draft], most_rows: int) -> Iterator[_Draft]:
    """Query rows that see the same keys, and continue each other, as one: both halves of a zigzag shard, say."""
    readers: dict[tuple[object, ...], list[_Draft]] = {}
    for draft in drafts:
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


def _drafts(ranges: Ranges, keys: _Keys, mask: Mask, found: RangePairs, bucket: int) -> Iterator[_Draft]:
    if not len(found.item):
        return
    q, k, item = found.query, found.key, found.item
    block, packed, base = ranges.block[q.range], keys.packed[item], keys.base[item]
    q_start, q_step = _row_addresses(ranges, q)
    row_start, row_step = _row_addresses(ranges, k)
    scale = keys.scale[item]
    slot = base + (k.first - keys.subranges.first[item]) * scale
    if ranges.listed:  # an address within the listing: base and scale come in when it is looked up
        k_start, k_step = np.where(packed, slot, row_start), np.where(packed, scale, row_step)
    else:
        k_start = np.where(packed, slot, base + scale * row_start)
        k_step = np.where(packed, scale, scale * row_step)
    origin = np.where(packed, 0, base)
    source = ranges.rank[k.range]  # keys of one owner lie at equal distances, those of several need not
    signature = (keys.stage[item], block, packed, origin, source, q.count, k.count, q_step, k_step)
    most = np.maximum(np.minimum(bucket // k.count, max(bucket, LEAST_ROWS) // q.count), 1)
    for fold in folds(signature, ranges.segment[q.range], q_start, k_start, most):
        one, number = fold.members[0], len(fold.members)
        query = Rows(int(q_start[one]), int(q_step[one]), int(q.count[one]), fold.left_step, number)
        key = Rows(int(k_start[one]), int(k_step[one]), int(k.count[one]), fold.right_step, number)
        if ranges.listed_rows is not None:
            query = Rows.of(ranges.listed_rows[query.listed()])
            if not packed[one]:
                key = Rows.of(origin[one] + scale[one] * ranges.listed_rows[key.listed()])
        by_position = mask is Mask.POSITION
        yield _Draft(
            int(keys.stage[item[one]]), int(block[one]), bool(packed[one]), query, key,
            _positions(ranges, q.take(fold.members)) if by_position else None,
            _positions(ranges, k.take(fold.members)) if by_position else None,
        )  # fmt: skip


def _row_addresses(ranges: Ranges, subranges: Subranges) -> tuple[Ints, Ints]:
    """First row and step of every subrange; in a listing, first place and 1."""
    step = ranges.row_step[subranges.range]
    return ranges.row[subranges.range] + subranges.first * step, step


def _positions(ranges: Ranges, subranges: Subranges) -> Ints:
    """(subranges, elements) positions of subranges of equal count."""
    elements = subranges.first[:, None] + np.arange(subranges.count[0])
    return ranges.position(np.broadcast_to(subranges.range[:, None], elements.shape), elements)


def _finish(ranges: Ranges, mask: Mask, drafts: list[_Draft]) -> Iterator[tuple[int, Tile]]:
    """One tile per head group of the block, from drafts of the same rows."""
    if not drafts:
        return
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
        yield one.stage, Tile(one.query, key, group.query, heads, mask, query_positions, key_positions)


def _slot_maps(ranges: Ranges, slots: SlotRanges) -> tuple[SlotMap, ...]:
    subranges = slots.subranges
    if not len(subranges.range):
        return ()
    block = ranges.block[subranges.range]
    start, step = _row_addresses(ranges, subranges)
    signature = (slots.message, block, subranges.count, step)
    maps = []
    for fold in folds(signature, ranges.segment[subranges.range], start, slots.slot, 0 * start + len(start)):
        maps.append(_slot_map(ranges, fold, subranges, start, step, slots.slot))
    return tuple(maps)


def _slot_map(ranges: Ranges, fold: Fold, subranges: Subranges, start: Ints, step: Ints, slot: Ints) -> SlotMap:
    one, number = fold.members[0], len(fold.members)
    block = ranges.blocks[ranges.block[subranges.range[one]]]
    length = int(subranges.count[one])
    rows = Rows(int(start[one]), int(step[one]), length, fold.left_step, number)
    if ranges.listed_rows is not None:
        rows = Rows.of(ranges.listed_rows[rows.listed()])
    slots = Rows(int(slot[one]), block.width, length, fold.right_step, number)
    return SlotMap(rows, block.key, slots, _columns(block.width))


def _whole_shard_maps(layout: Layout, rank: int, kv_heads: int, copies: int) -> tuple[SlotMap, ...]:
    """The shard as it stands, so many copies of it one after the other."""
    tokens = layout.counts[rank]
    if tokens == 0:
        return ()
    heads = _columns(kv_heads)
    slots = [Rows(copy * tokens * kv_heads, kv_heads, tokens) for copy in range(copies)]
    return tuple(SlotMap(Rows(0, 1, tokens), heads, place, heads) for place in slots)


def _columns(width: int) -> Heads:
    return Heads.of(tuple((column,) for column in range(width)))
