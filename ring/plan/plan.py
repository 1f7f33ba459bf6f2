"""The plan of one rank: the messages of every step, and the tiles to compute once they are received.

    pattern, layout -> ranges -> range pairs -> needs -> schedule
                       ranges and schedule -> tiles
                       ranges and schedule -> slot maps

Pure integers, computed once for a setting and cached. Every rank computes the ranges and needs of all ranks, so both
ends of a message agree on it without communication.

The example (see `ring.plan`), for rank 0: with its own keys it computes one tile. In the one step it sends 4 slots to
rank 1, receives 4 slots from it, computes a tile with them, returns their gradients and adds those that it gets back.

    tile      mask    heads  query rows of head 0  query rows of head 1
    own       CAUSAL  0 1    0 2 4 6               1 3 5 7
    received  FULL    0 1    4 6                   5 7

The slot maps of that step: rows 0 and 2 of head 0 are copied to slots 0 and 1 of the send buffer, rows 1 and 3 of head
1 to slots 2 and 3. Returned gradients lie in the same slots and are added to the same rows.

    rows  heads  slots
    0 2   0      0 1
    1 3   1      2 3
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import numpy as np

from reference.pattern import Pattern
from ring.caching.bounded_cache import BoundedCache
from ring.layout import Layout
from ring.plan.blocks import Heads
from ring.plan.chunks import SlotRanges
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.parts import ReturnedSum, Trees, part_tiles, returns_of
from ring.plan.ranges import Ints, Ranges, group_starts, ragged_arange, ranges_of
from ring.plan.rows import Rows, folds
from ring.plan.schedule import KeyRows, Schedule, Sizes, Transfer
from ring.plan.tile import Tile
from ring.plan.tiling import Limits, tiles_of
from ring.plan.timeline import steps_picture

MAX_BYTES = 2**29  # of the cached plans
_FEW = 16  # up to so many slot ranges of documents are copied one by one, as strided views


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Rows and heads of the own shard, and the slots and columns of a buffer that hold them or their gradients."""

    rows: Rows
    heads: Heads
    slots: Rows
    columns: Heads


@dataclass(frozen=True, eq=False)
class Step:
    """A stage of the schedule (`ring.plan.schedule.Stage`) with its tiles, ready to execute."""

    gathers: tuple[SlotMap, ...]  # own rows to copy into the send buffer
    sends: tuple[Transfer, ...]
    relayed: bool
    receives: tuple[Transfer, ...]
    tiles: tuple[Tile, ...]
    return_sends: tuple[Transfer, ...]
    return_receives: tuple[Transfer, ...]
    carried: int
    scatters: tuple[SlotMap, ...]  # own rows to add returned gradients to
    once: bool  # each received slot is read by exactly one tile, so its gradient can be written instead of added
    sums: tuple[
        ReturnedSum, ...
    ] = ()  # with `same_bits`, in place of the gradients of received slots: those that return
    returned: tuple[ReturnedSum, ...] = ()  # and those that come back, in place of scatters


@dataclass(frozen=True, eq=False)
class Plan:
    """Tiles of a rank's own keys, then its steps."""

    rank: int
    tokens: int  # of its keys
    exchange: KeyExchange
    local: tuple[Tile, ...]
    steps: tuple[Step, ...]
    sizes: Sizes  # of the buffers, in slots
    setting: Hashable  # arguments of the plan except the rank: equal on ranks with matching plans
    chunked: bool = False  # of parts, whose results are summed in trees

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Tiles of own keys, then those of all steps."""
        return self.local + tuple(tile for step in self.steps for tile in step.tiles)

    @cached_property
    def disjoint(self) -> bool:
        """True if no two trees of parts have rows of a head in common."""
        return all(tile.part.query.tree.alone for tile in self.tiles if tile.part is not None)

    @cached_property
    def nbytes(self) -> int:
        """Approximate bytes."""
        maps = [slot_map for step in self.steps for slot_map in (*step.gathers, *step.scatters)]
        return sum(tile.nbytes for tile in self.tiles) + sum(x.rows.nbytes + x.slots.nbytes for x in maps)

    def _repr_html_(self) -> str:
        scores = [sum(tile.scores for tile in tiles) for tiles in (self.local, *(step.tiles for step in self.steps))]
        slots = [sum(x.stop - x.start for x in step.receives) for step in self.steps]
        title = f"{self.exchange.name}, forward: {len(self.steps)} steps"
        return steps_picture(title, f"rank {self.rank}", scores, [*slots, 0]).svg


# A plan of 100,000 tokens per rank in 1,000 documents takes some MB.
_plans: BoundedCache[Hashable, Plan] = BoundedCache(128, most_bytes=MAX_BYTES)


def plan_of(
    pattern: Pattern, layout: Layout, rank: int, heads: int, kv_heads: int, exchange: KeyExchange, bucket: int,
    own: int | None = None, *, varlen: int = 0, window: int = 0, key_layout: Layout | None = None,
    chunk: int | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of `rank`. The arguments must be valid (`ring.validation` checks them).

    Args:
        bucket: most key/value tokens of a kernel call and of a receive buffer, >= 1. Query rows of a call have the same
            bound, or MIN_ROWS if that is more, so that its results are bounded as well.
        own: the same for a call that takes several segments of the rank's own keys; None: `bucket`.
        varlen: most query rows, and keys, of packed documents of different lengths that share a call. Longer ones share
            it where they are less than half of the work. 0: none share a call.
        window: longest window, in rows, that a call on own keys takes as such; 0: none.
        key_layout: layout of the keys, for as many ranks; None: that of the queries, `layout`.
        chunk: `same_bits` of the call. Then calls take a part each (`ring.plan.parts`), and limits bound messages only.
    """
    layouts = layout, layout if key_layout is None else key_layout
    digests = tuple(x.digest for x in layouts)  # a key without the layouts, which may list their orders
    limits = Limits(bucket, bucket if own is None else own, varlen, window)
    rest = rank, heads, kv_heads, exchange, limits, chunk
    return _plans.get_or_make(
        (pattern, digests, *rest), lambda: _plan(pattern, layouts, *rest), lambda plan: plan.nbytes
    )


def _plan(
    pattern: Pattern,
    layouts: tuple[Layout, Layout],
    rank: int,
    heads: int,
    kv_heads: int,
    exchange: KeyExchange,
    limits: Limits,
    chunk: int | None,
) -> Plan:
    layout, key_layout = layouts
    ranges = ranges_of(pattern, layout, heads, kv_heads, key_layout, chunk)
    route = exchange.schedule(KeyRows(ranges, key_layout, rank, kv_heads, limits.bucket))
    setting = pattern, layout.digest, key_layout.digest, heads, kv_heads, exchange.name, limits.bucket, chunk
    if chunk is not None:
        return _plan_of_parts(ranges, key_layout, route, rank, kv_heads, exchange, limits, setting)
    local, *received = tiles_of(ranges, key_layout, route, rank=rank, kv_heads=kv_heads, limits=limits)
    return Plan(
        rank=rank,
        tokens=key_layout.counts[rank],
        exchange=exchange,
        local=local,
        steps=_steps(ranges, key_layout, route, received, rank=rank, kv_heads=kv_heads, once=exchange.straight),
        sizes=route.sizes,
        setting=setting,
    )


def _plan_of_parts(
    ranges: Ranges, layout: Layout, route: Schedule, rank: int, kv_heads: int, exchange: KeyExchange, limits: Limits,
    setting: Hashable,
) -> Plan:  # fmt: skip
    """Build the plan of a call with `same_bits`. layout: of the keys."""

    @cache
    def route_of(reader: int) -> Schedule:
        return route if reader == rank else exchange.schedule(KeyRows(ranges, layout, reader, kv_heads, limits.bucket))

    trees = Trees(ranges, rank)
    local, *received = (tuple(x) for x in part_tiles(ranges, layout, route, trees, rank, kv_heads))
    steps = _steps(ranges, layout, route, received, rank=rank, kv_heads=kv_heads, once=False)
    returns = returns_of(ranges, route_of, trees, rank, layout.world_size)
    steps = tuple(
        replace(
            step, return_sends=own.transfers, return_receives=others.transfers, carried=0, scatters=(), sums=own.sums,
            returned=others.sums,
        )
        for step, (own, others) in zip(steps, returns, strict=True)
    )  # fmt: skip
    gradients, returned = (max((x[side].slots for x in returns), default=0) for side in (0, 1))
    sizes = replace(route.sizes, gradients=gradients, returned=returned)
    return Plan(rank, layout.counts[rank], exchange, local, steps, sizes, setting, chunked=True)


def _steps(
    ranges: Ranges, layout: Layout, route: Schedule, received: Sequence[tuple[Tile, ...]], *,
    rank: int, kv_heads: int, once: bool,
) -> tuple[Step, ...]:  # fmt: skip
    """Build the steps. layout: of the keys. once: every received slot is read at least once."""
    tokens, others = layout.counts[rank], layout.world_size - 1
    steps = []
    for stage, tiles in zip(route.stages, received, strict=True):
        if route.whole:
            gathers, scatters = _shard_maps(tokens, kv_heads, 1), _shard_maps(tokens, kv_heads, others)
        else:
            gathers = _slot_maps(ranges, stage.gathers)
            # By `direct` both are the same: the gradients return in the slots that were sent.
            scatters = gathers if stage.scatters is stage.gathers else _slot_maps(ranges, stage.scatters)
        steps.append(
            Step(
                gathers=gathers,
                sends=stage.sends,
                relayed=stage.relayed,
                receives=stage.receives,
                tiles=tiles,
                return_sends=stage.return_sends,
                return_receives=stage.return_receives,
                carried=stage.carried,
                scatters=scatters,
                once=once and _read_once(stage.receives, tiles),
            )
        )
    return tuple(steps)


def _read_once(receives: Sequence[Transfer], tiles: Sequence[Tile]) -> bool:
    """Return True if tiles read as many slots as are received: slots read at least once are then read just once."""
    read = sum(tile.key_rows.folds * tile.key_rows.length * tile.key_heads.groups for tile in tiles)
    return read == sum(transfer.stop - transfer.start for transfer in receives)


def _slot_maps(ranges: Ranges, slot_ranges: SlotRanges) -> tuple[SlotMap, ...]:
    """Build slot maps of one message and block each, folded over segments."""
    subranges = slot_ranges.subranges
    if not len(subranges):
        return ()
    block, width = ranges.block[subranges.range], ranges.width[subranges.range]
    start, step = ranges.rows(subranges)
    if ranges.packed and len(subranges) > _FEW:
        return _listed_maps(ranges, slot_ranges, start, step)
    signature = (slot_ranges.message, block, subranges.count, step)
    unlimited = np.full_like(start, len(start))
    maps = []
    for fold in folds(signature, ranges.segment[subranges.range], start, slot_ranges.slot, unlimited):
        first = fold.members[0]
        rows = fold.rows(start, fold.left_step, step, subranges.count)
        if ranges.listing is not None:
            rows = Rows.of(ranges.listing.rows[rows.listed()])
        slots = fold.rows(slot_ranges.slot, fold.right_step, width, subranges.count)
        maps.append(SlotMap(rows, ranges.blocks[block[first]].key, slots, _columns(int(width[first]))))
    return tuple(maps)


def _listed_maps(ranges: Ranges, slot_ranges: SlotRanges, start: Ints, step: Ints) -> tuple[SlotMap, ...]:
    """Build slot maps of many documents: one map where they follow each other in the slots of a message."""
    subranges = slot_ranges.subranges
    block, width, count = ranges.block[subranges.range], ranges.width[subranges.range], subranges.count
    leads = group_starts(slot_ranges.message, block)
    leads[1:] |= slot_ranges.slot[1:] != slot_ranges.slot[:-1] + count[:-1] * width[:-1]
    begins = np.flatnonzero(leads)
    rows = np.repeat(start, count) + ragged_arange(count) * np.repeat(step, count)
    if ranges.listing is not None:
        rows = ranges.listing.rows[rows]
    ends = np.cumsum(count)
    maps = []
    for first, last in zip(begins.tolist(), (np.append(begins[1:], len(start)) - 1).tolist(), strict=True):
        listed = rows[ends[first] - count[first] : ends[last]]
        slots = Rows(int(slot_ranges.slot[first]), int(width[first]), len(listed))
        maps.append(SlotMap(Rows.of(listed[None]), ranges.blocks[block[first]].key, slots, _columns(int(width[first]))))
    return tuple(maps)


def _shard_maps(tokens: int, kv_heads: int, copies: int) -> tuple[SlotMap, ...]:
    """Map the whole shard to `copies` copies, one after the other."""
    if tokens == 0:
        return ()
    heads = _columns(kv_heads)
    slots = [Rows(start=copy * tokens * kv_heads, step=kv_heads, length=tokens) for copy in range(copies)]
    return tuple(SlotMap(Rows(0, 1, tokens), heads, place, heads) for place in slots)


@lru_cache(maxsize=64)
def _columns(width: int) -> Heads:
    return Heads.column(range(width))
