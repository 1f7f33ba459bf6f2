"""The plan of one rank: for every step the messages, and the tiles to compute once they are received.

    pattern, layout -> ranges -> range pairs -> needs -> schedule
                       ranges and schedule -> tiles
                       ranges and schedule -> slot maps

Pure integers, computed once for a setting and cached. Every rank computes the ranges and needs of all ranks, so both
ends of a message agree on it without exchanging a word.

The example (see `ring.plan`), for rank 0: with its own keys it computes one tile. In the one step it sends 4 slots to
rank 1 and receives 4 slots from it, computes a tile with them, returns their gradients and adds those that come back.

    tile      mask    heads  query rows of head 0  query rows of head 1
    own       CAUSAL  0 1    0 2 4 6               1 3 5 7
    received  FULL    0 1    4 6                   5 7

The slot maps of that step: rows 0 and 2 of head 0 are copied to the slots 0 and 1 of the send buffer, rows 1 and 3 of
head 1 to the slots 2 and 3. The gradients that come back lie in the same slots, and are added to the same rows.

    rows  heads  slots
    0 2   0      0 1
    1 3   1      2 3
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from reference.pattern import Pattern
from ring.caching.bounded_cache import BoundedCache
from ring.layout import Layout
from ring.plan import schedule
from ring.plan.blocks import Heads
from ring.plan.chunks import SlotRanges
from ring.plan.ranges import Ints, Ranges, counter, opens, ranges_of
from ring.plan.rows import Rows, folds
from ring.plan.schedule import Schedule, Sizes, Transfer
from ring.plan.tile import Tile
from ring.plan.tiling import Limits, tiles_of

EXCHANGES = ("ring", "direct", "gather")
MOST_BYTES = 2**29  # of the plans that are kept
_FEW = 16  # slot ranges of documents of which each is copied by itself, as a strided view


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Rows and heads of the own shard, and the slots and columns of a buffer that hold them, or their gradients."""

    rows: Rows
    heads: Heads
    slots: Rows
    columns: Heads


@dataclass(frozen=True, eq=False)
class Step:
    """A stage of the schedule (`ring.plan.schedule.Stage`) with its tiles, ready to walk."""

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


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank does: the tiles of its own keys, then the steps."""

    rank: int
    tokens: int
    exchange: str
    local: tuple[Tile, ...]
    steps: tuple[Step, ...]
    sizes: Sizes  # of the buffers, in slots
    setting: Hashable  # what the plan was made for, but for the rank: equal on ranks whose plans go together

    @cached_property
    def nbytes(self) -> int:
        """About what the plan takes."""
        tiles = [*self.local, *(tile for step in self.steps for tile in step.tiles)]
        maps = [slot_map for step in self.steps for slot_map in (*step.gathers, *step.scatters)]
        return sum(tile.nbytes for tile in tiles) + sum(one.rows.nbytes + one.slots.nbytes for one in maps)


# Of a hundred thousand tokens on each rank in a thousand documents a plan takes some MB.
_plans: BoundedCache[Hashable, Plan] = BoundedCache(128, most_bytes=MOST_BYTES)


def plan_of(
    pattern: Pattern, layout: Layout, rank: int, heads: int, kv_heads: int, exchange: str, bucket: int,
    own: int | None = None, varlen: int = 0,
) -> Plan:  # fmt: skip
    """The plan of `rank`.

    bucket: key/value tokens of a kernel call and of a receive buffer, at most; >= 1. own: the same for a call that
    takes several segments of the rank's own keys, which are not received; None: as `bucket`. A call also takes at most
    as many query rows, or LEAST_ROWS if that is more, so that what it returns is bounded as well. varlen: query rows,
    and keys, of packed documents up to which those of several lengths share a call, as longer ones do that are less
    than half of the work; 0: none do.

    The arguments are taken as valid (`ring.validation` checks what users pass).
    """
    key = pattern, layout, rank, heads, kv_heads, exchange, bucket, own, varlen
    return _plans.get_or_make(key, lambda: _plan(*key), lambda made: made.nbytes)


def _plan(
    pattern: Pattern, layout: Layout, rank: int, heads: int, kv_heads: int, exchange: str, bucket: int,
    own: int | None, varlen: int,
) -> Plan:  # fmt: skip
    ranges = ranges_of(pattern, layout, heads, kv_heads)
    if exchange == "gather":
        route = schedule.gather(layout, kv_heads, rank)
    else:
        make = schedule.ring if exchange == "ring" else schedule.direct
        route = make(ranges, layout, pattern.causal, rank, bucket * kv_heads)
    limits = Limits(bucket=bucket, own=bucket if own is None else own, varlen=varlen)
    local, *received = tiles_of(
        ranges, layout, route, rank=rank, kv_heads=kv_heads, causal=pattern.causal, limits=limits
    )
    return Plan(
        rank=rank,
        tokens=layout.counts[rank],
        exchange=exchange,
        local=local,
        steps=_steps(ranges, layout, route, received, rank=rank, kv_heads=kv_heads, once=exchange == "direct"),
        sizes=route.sizes,
        setting=(pattern, layout, heads, kv_heads, exchange, bucket),
    )


def _steps(
    ranges: Ranges, layout: Layout, route: Schedule, received: Sequence[tuple[Tile, ...]], *,
    rank: int, kv_heads: int, once: bool,
) -> tuple[Step, ...]:  # fmt: skip
    """once: every received slot is read at least once."""
    tokens, others = layout.counts[rank], layout.world_size - 1
    steps = []
    for stage, tiles in zip(route.stages, received, strict=True):
        if route.whole:
            gathers, scatters = _shard_maps(tokens, kv_heads, 1), _shard_maps(tokens, kv_heads, others)
        else:
            gathers = _slot_maps(ranges, stage.gathers)
            # By `direct` both are the same: the gradients come back in the slots that were sent.
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
    """Whether tiles read as many slots as are received: if each is read at least once, then each once."""
    read = sum(tile.key_rows.folds * tile.key_rows.length * tile.key_heads.groups for tile in tiles)
    return read == sum(transfer.stop - transfer.start for transfer in receives)


def _slot_maps(ranges: Ranges, found: SlotRanges) -> tuple[SlotMap, ...]:
    """Slot ranges of one message and block, folded over segments."""
    subranges = found.subranges
    if not len(subranges):
        return ()
    block, width = ranges.block[subranges.range], ranges.width[subranges.range]
    start, step = ranges.rows(subranges)
    if ranges.packed and len(subranges) > _FEW:
        return _listed_maps(ranges, found, start, step)
    signature = (found.message, block, subranges.count, step)
    unlimited = np.full_like(start, len(start))
    maps = []
    for fold in folds(signature, ranges.segment[subranges.range], start, found.slot, unlimited):
        one = fold.members[0]
        rows = fold.rows(start, fold.left_step, step, subranges.count)
        if ranges.listing is not None:
            rows = Rows.of(ranges.listing.rows[rows.listed()])
        slots = fold.rows(found.slot, fold.right_step, width, subranges.count)
        maps.append(SlotMap(rows, ranges.blocks[block[one]].key, slots, _columns(int(width[one]))))
    return tuple(maps)


def _listed_maps(ranges: Ranges, found: SlotRanges, start: Ints, step: Ints) -> tuple[SlotMap, ...]:
    """Slot ranges of many documents: as one map where they follow each other in the slots of a message."""
    subranges = found.subranges
    block, width, count = ranges.block[subranges.range], ranges.width[subranges.range], subranges.count
    leads = opens(found.message, block)
    leads[1:] |= found.slot[1:] != found.slot[:-1] + count[:-1] * width[:-1]
    begins = np.flatnonzero(leads)
    rows = np.repeat(start, count) + counter(count) * np.repeat(step, count)
    if ranges.listing is not None:
        rows = ranges.listing.rows[rows]
    ends = np.cumsum(count)
    maps = []
    for one, last in zip(begins.tolist(), (np.append(begins[1:], len(start)) - 1).tolist(), strict=True):
        mine = rows[ends[one] - count[one] : ends[last]]
        slots = Rows(int(found.slot[one]), int(width[one]), len(mine))
        maps.append(SlotMap(Rows.of(mine[None]), ranges.blocks[block[one]].key, slots, _columns(int(width[one]))))
    return tuple(maps)


def _shard_maps(tokens: int, kv_heads: int, copies: int) -> tuple[SlotMap, ...]:
    """The whole shard, so many copies of it one after the other."""
    if tokens == 0:
        return ()
    heads = _columns(kv_heads)
    slots = [Rows(start=copy * tokens * kv_heads, step=kv_heads, length=tokens) for copy in range(copies)]
    return tuple(SlotMap(Rows(0, 1, tokens), heads, place, heads) for place in slots)


@lru_cache(maxsize=64)
def _columns(width: int) -> Heads:
    return Heads.column(range(width))
