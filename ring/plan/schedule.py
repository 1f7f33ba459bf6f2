"""The three exchanges as integers: what a rank sends, receives and returns, stage by stage.

All ranks walk equally many stages and post, in every stage, what its peers wait for in the same stage; so messages
between two ranks match by their order alone and nobody leaves early.

ring    A slot (one row, one key/value head of one block) travels from neighbour to neighbour as far as the farthest
        rank that needs it. Slots that travel farthest come first in a message, so what goes on at a hop is a prefix
        of what came. Gradients travel along; the last rank that used a slot sends its gradient straight home.
direct  At distance t a rank takes from the rank t before it just the slots that it needs, and returns their gradients.
gather  Every rank receives every shard whole, and returns the gradients of each: the O(n) baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ring.layout import Layout
from ring.plan.range_pairs import Needs, Subranges, needs_of
from ring.plan.ranges import Ints, Ranges, counter


@dataclass(frozen=True)
class Transfer:
    """Slots start .. stop - 1 of a buffer, to or from a peer (rank in the group)."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class SlotRanges:
    """Subranges of ranges, row after row in consecutive slots, the first at `slot`, and the message each is part of."""

    subranges: Subranges
    slot: Ints
    message: Ints

    def shifted(self, by: int) -> SlotRanges:
        return SlotRanges(self.subranges, self.slot + by, self.message)

    @classmethod
    def none(cls) -> SlotRanges:
        empty = np.empty(0, np.int64)
        return cls(Subranges(empty, empty, empty), empty, empty)

    @classmethod
    def join(cls, parts: list[SlotRanges]) -> SlotRanges:
        if not parts:
            return cls.none()
        columns = [(p.subranges.range, p.subranges.first, p.subranges.count, p.slot, p.message) for p in parts]
        index, first, count, slot, message = (np.concatenate(column) for column in zip(*columns, strict=True))
        return cls(Subranges(index, first, count), slot, message)


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of one rank. Gradients of landed slots have the receive buffer's own addresses."""

    gathers: SlotRanges  # own rows -> send buffer
    sends: tuple[Transfer, ...]  # from the send buffer, or, if relayed, from the receive buffer of the stage before
    relayed: bool
    receives: tuple[Transfer, ...]  # into this stage's receive buffer
    received: SlotRanges  # other ranks' rows -> receive buffer
    return_sends: tuple[Transfer, ...]  # of this stage's gradients
    return_receives: tuple[Transfer, ...]  # into the returned box
    carried: int  # leading returned slots that are added to the next stage's gradients
    scatters: SlotRanges  # own rows <- returned gradients


@dataclass(frozen=True)
class Sizes:
    """Slots of the buffers that a rank needs for a schedule, and how many receive buffers it takes in turn."""

    receive: int
    send: int
    returned: int
    receive_buffers: int = 2


@dataclass(frozen=True, eq=False)
class Schedule:
    """The stages of one rank and its buffers. `whole`: shards travel whole, addressed by row and head, not by block."""

    stages: tuple[Stage, ...]
    sizes: Sizes
    whole: bool = False


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Entries of messages cut into chunks: which message and chunk, which rows, and where in the chunk they lie."""

    message: Ints
    chunk: Ints
    travel: Ints  # the distance that a ring's slot travels; 0 for direct
    subranges: Subranges
    slot: Ints
    slots: Ints

    def slot_ranges(self, which: Ints) -> SlotRanges:
        return SlotRanges(self.subranges.take(which), self.slot[which], self.message[which])


def _cut(message: Ints, travel: Ints, subranges: Subranges, width: Ints, cap: int | None) -> _Chunks:
    """Lay the entries of each message in order; a row that starts at slot x is in chunk x // cap.

    Entries of 3 and 2 rows, each row 2 slots wide, and a cap of 4: rows start at 0 2 | 4 6 | 8, so the chunks hold rows
    (0 1 of the first), (2 of the first, 0 of the second), (1 of the second): five entries become four.
    """
    slots = subranges.count * width
    end = np.cumsum(slots)
    new = np.flatnonzero(np.diff(message, prepend=-1))
    base = np.repeat((end - slots)[new], np.diff(np.append(new, len(message))))
    begin = end - slots - base
    if cap is None:
        return _Chunks(message, 0 * message, travel, subranges, begin, slots)
    low_chunk = begin // cap
    parts = (begin + slots - width) // cap - low_chunk + 1
    entry = np.repeat(np.arange(len(parts)), parts)
    chunk = low_chunk[entry] + counter(parts)
    begin, width, count = begin[entry], width[entry], subranges.count[entry]
    low = np.maximum(-((begin - chunk * cap) // width), 0)  # first row that starts in the chunk
    high = np.minimum(-((begin - (chunk + 1) * cap) // width), count)
    some = np.flatnonzero(high > low)
    entry, chunk, low, high = entry[some], chunk[some], low[some], high[some]
    begin, width = begin[some] + low * width[some], width[some]
    message = message[entry]
    opens = np.ones(len(entry), bool)
    opens[1:] = (np.diff(message) != 0) | (np.diff(chunk) != 0)
    where = np.flatnonzero(opens)
    origin = np.repeat(begin[where], np.diff(np.append(where, len(entry))))
    rows = subranges.take(entry).part(low, high - low)
    return _Chunks(message, chunk, travel[entry], rows, begin - origin, (high - low) * width)


def _room(cap: int, width: int) -> Callable[[int], int]:
    """What a chunked message of so many slots needs room for: a row is never split between chunks."""
    return lambda slots: min(slots, cap + width - 1)


def direct(ranges: Ranges, layout: Layout, causal: bool, rank: int, cap: int) -> Schedule:
    """Stages by distance: near ranks first; several distances in one stage while their slots fit the cap together."""
    p = layout.world_size
    needs = needs_of(ranges, causal)
    width = _widths(ranges)[needs.range]
    distance = (needs.rank - ranges.rank[needs.range]) % p
    order = np.lexsort((needs.range, distance, needs.rank))
    needs, width, distance = _take(needs, order), width[order], distance[order]
    slots = np.zeros((p, p), np.int64)  # (reader, distance)
    np.add.at(slots, (needs.rank, distance), needs.count * width)
    rounds = _distance_rounds(slots.max(axis=0), cap)
    message = needs.rank * p + distance
    subranges = Subranges(needs.range, 0 * needs.count, needs.count)
    cut = _cut(message, 0 * message, subranges, width, cap)
    whole = _cut(message, 0 * message, subranges, width, None)
    room = _room(cap, int(width.max(initial=1)))
    stages, receive, send = [], 0, 0
    for distances, chunk in rounds:
        chunks = whole if chunk is None else cut
        sizes = room if chunk is not None else int
        incoming, served = [], []
        for t in distances:
            incoming.append((t, (rank - t) % p, _of_message(chunks, rank * p + t, chunk)))
            served.append((t, (rank + t) % p, _of_message(chunks, (rank + t) % p * p + t, chunk)))
        receives, received = _lay_out(chunks, incoming)
        sends, gathers = _lay_out(chunks, served)
        receive = max(receive, sum(sizes(int(slots[rank, t])) for t in distances))
        send = max(send, sum(sizes(int(slots[(rank + t) % p, t])) for t in distances))
        stages.append(Stage(gathers, sends, False, receives, received, receives, sends, 0, gathers))
    return Schedule(tuple(stages), Sizes(receive, send, send))


def _distance_rounds(most: Ints, cap: int) -> list[tuple[list[int], int | None]]:
    """(distances, chunk) of every stage; chunk None: whole messages. `most[t]`: the largest message at distance t."""
    rounds: list[tuple[list[int], int | None]] = []
    room = 0
    for t in range(1, len(most)):
        slots = int(most[t])
        if slots == 0:
            continue
        if slots > cap:
            rounds += [([t], chunk) for chunk in range(-(-slots // cap))]
            room = 0
        elif rounds and slots <= room:
            rounds[-1][0].append(t)
            room -= slots
        else:
            rounds.append(([t], None))
            room = cap - slots
    return rounds


def _of_message(chunks: _Chunks, message: int, chunk: int | None) -> Ints:
    low, high = np.searchsorted(chunks.message, [message, message + 1])
    which = np.arange(low, high)
    return which if chunk is None else which[chunks.chunk[which] == chunk]


def _lay_out(chunks: _Chunks, messages: list[tuple[int, int, Ints]]) -> tuple[tuple[Transfer, ...], SlotRanges]:
    """Messages one after the other in a buffer: the transfers and where every subrange then lies."""
    transfers, parts, at = [], [], 0
    for _, peer, which in messages:
        if len(which):
            stop = at + int(chunks.slots[which].sum())
            transfers.append(Transfer(peer, at, stop))
            parts.append(chunks.slot_ranges(which).shifted(at))
            at = stop
    return tuple(transfers), SlotRanges.join(parts)


def ring(ranges: Ranges, layout: Layout, causal: bool, rank: int, cap: int) -> Schedule:
    """Stages by chunk and hop.

    At hop t rank r holds slots of owner r - t that travel t hops or more, `here` of them. The leading `onward` go on
    to r + 1; the others end here, so their gradients go straight home. Example, 3 ranks, 5 slots of each owner, 3 of
    which travel 2 hops and 2 travel 1: at t = 1 rank 0 lands 5 slots of rank 2, carries gradients of the leading 3 on
    to rank 1 and sends those of the last 2 home to rank 2. It receives gradients of 3 slots of rank 1, which it will
    see at t = 2 (`carried`), and behind them those of its own last 2, which rank 1 was the last to use. In its own
    messages these two are numbers 3 and 4 (`kept` = 3, `end` = 5); in the returned box they lie behind the carried.
    """
    p = layout.world_size
    cut, room, in_flight = _ring_chunks(ranges, layout, causal, cap)
    after, owner_at = (rank + 1) % p, lambda t: (rank - t) % p
    chunks = int(cut.chunk.max(initial=-1)) + 1
    slots = np.zeros((p, chunks, p + 1), np.int64)  # (owner, chunk, travel), summed from the farthest: a prefix per hop
    np.add.at(slots, (cut.message, cut.chunk, cut.travel), cut.slots)
    prefix = np.flip(np.cumsum(np.flip(slots, 2), 2), 2)
    stages = []
    for chunk in range(chunks):
        for t in range(1, p):
            if not prefix[:, chunk, t].any():
                break
            source, before = owner_at(t), (rank - 1) % p
            here, onward = int(prefix[source, chunk, t]), int(prefix[source, chunk, t + 1])
            sent = int(prefix[owner_at(t - 1), chunk, t])
            carried = int(prefix[owner_at(t + 1), chunk, t + 1])
            mine = np.flatnonzero((cut.message == rank) & (cut.chunk == chunk))
            theirs = np.flatnonzero((cut.message == source) & (cut.chunk == chunk) & (cut.travel >= t))
            back = mine[cut.travel[mine] == t]
            kept, end = int(prefix[rank, chunk, t + 1]), int(prefix[rank, chunk, t])
            stages.append(
                Stage(
                    gathers=cut.slot_ranges(mine) if t == 1 else SlotRanges.none(),
                    sends=_transfers((after, 0, sent)),
                    relayed=t > 1,
                    receives=_transfers((before, 0, here)),
                    received=cut.slot_ranges(theirs),
                    return_sends=_transfers((after, 0, onward), (source, onward, here)),
                    return_receives=_transfers((before, 0, carried), ((rank + t) % p, carried, carried + end - kept)),
                    carried=carried,
                    scatters=cut.slot_ranges(back).shifted(carried - kept),
                )
            )
    hops = range(1, p)
    receive = max((room(int(in_flight[owner_at(t), t])) for t in hops), default=0)
    ending = max((room(int(in_flight[rank, t] - in_flight[rank, t + 1])) for t in hops), default=0)
    send = room(int(in_flight[rank, 1])) if p > 1 else 0
    return Schedule(tuple(stages), Sizes(receive, send, receive + ending))


@lru_cache(maxsize=16)
def _ring_chunks(ranges: Ranges, layout: Layout, causal: bool, cap: int) -> tuple[_Chunks, Callable[[int], int], Ints]:
    """What travels from every owner, farthest first; and (owner, t): the slots that travel at least t hops."""
    p = layout.world_size
    needs = needs_of(ranges, causal)
    reach = np.zeros((len(ranges.count), p + 1), np.int64)  # rows of a range that are needed t hops on, or farther
    reach[needs.range, (needs.rank - ranges.rank[needs.range]) % p] = needs.count
    reach = np.flip(np.maximum.accumulate(np.flip(reach, 1), 1), 1)
    reach[:, 0] = 0
    fresh = np.zeros_like(reach)
    fresh[:, 1:p] = reach[:, 1:p] - reach[:, 2:]
    index, travel = np.nonzero(fresh)
    owner = ranges.rank[index]
    order = np.lexsort((index, -travel, owner))
    index, travel, owner = index[order], travel[order], owner[order]
    subranges = Subranges(index, reach[index, travel + 1], fresh[index, travel])
    width = _widths(ranges)[index]
    in_flight = np.zeros((p, p + 1), np.int64)
    np.add.at(in_flight, ranges.rank, reach * _widths(ranges)[:, None])
    return _cut(owner, travel, subranges, width, cap), _room(cap, int(width.max(initial=1))), in_flight


def gather(layout: Layout, kv_heads: int, rank: int) -> Schedule:
    """One stage: every shard to everyone."""
    p, slots = layout.world_size, [count * kv_heads for count in layout.counts]
    others = [peer for peer in range(p) if peer != rank]
    if not others:
        return Schedule((), Sizes(0, 0, 0, receive_buffers=1), whole=True)
    into, back, at = [], [], 0
    for peer in others:
        into.append((peer, at, at + slots[peer]))
        at += slots[peer]
    for copy, peer in enumerate(others):
        back.append((peer, copy * slots[rank], (copy + 1) * slots[rank]))
    sends = _transfers(*((peer, 0, slots[rank]) for peer in others))
    receives, returns = _transfers(*into), _transfers(*back)
    nothing = SlotRanges.none()
    stage = Stage(nothing, sends, False, receives, nothing, receives, returns, 0, nothing)
    sizes = Sizes(at, slots[rank], len(others) * slots[rank], receive_buffers=1)
    return Schedule((stage,), sizes, whole=True)


def _transfers(*transfers: tuple[int, int, int]) -> tuple[Transfer, ...]:
    return tuple(Transfer(*transfer) for transfer in transfers if transfer[2] > transfer[1])


def _widths(ranges: Ranges) -> Ints:
    return np.array([block.width for block in ranges.blocks], np.int64)[ranges.block]


def _take(needs: Needs, which: Ints) -> Needs:
    return Needs(needs.rank[which], needs.range[which], needs.count[which])
