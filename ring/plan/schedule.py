"""The three exchanges as integers: what a rank sends, receives and returns, stage by stage.

A slot holds one row of one key/value head of a block; a message is a row of slots in a buffer. All ranks walk equally
many stages, and post in each what their peers wait for in the same stage. So messages between two ranks match by their
order alone, and no rank is done before the others.

ring    A slot travels from neighbour to neighbour as far as the farthest rank that needs it. Slots that travel farthest
        come first in a message, so what goes on at a hop is a prefix of what came. Gradients travel along; the last
        rank that used a slot returns its gradient directly to the owner.
direct  At distance t a rank takes from the rank t before it just the slots that it needs, and returns their gradients.
gather  Every rank receives every shard whole, and returns the gradients of each: the O(n) baseline.

`bucket` bounds the messages of `ring` and `direct`: longer ones are cut into chunks, which are sent in stages of their
own and are received in the same buffer.

The example (see `ring.plan`): the one stage of `direct`, on rank 0. It sends its own ranges 0 and 4 from the send
buffer, and reads rank 1's ranges 3 and 7 in the receive buffer. Gradients take the same way back.

    slots     range  elements  first slot
    sent      0      0 1       0
    sent      4      0 1       2
    received  3      0 1       0
    received  7      0 1       2
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ring.caching.bounded_cache import BoundedCache
from ring.layout import Layout
from ring.plan.chunks import Chunks, Entries, SlotRanges, buffer_slots, cut, whole_messages
from ring.plan.ranges import Ints, Ranges, Subranges, concatenated
from ring.plan.remote_rows import Needs, needs_of

_NOTHING = SlotRanges.join(())


@dataclass(frozen=True)
class Transfer:
    """A message: slots start .. stop - 1 of a buffer, to or from a peer (rank in the group)."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of one rank. The gradient of a received slot has the same number in the gradient buffer."""

    gathers: SlotRanges  # own rows to copy into the send buffer
    sends: tuple[Transfer, ...]  # from the send buffer or, if relayed, from the receive buffer of the stage before
    relayed: bool
    receives: tuple[Transfer, ...]  # into this stage's receive buffer
    received: SlotRanges  # the other ranks' rows that are then in it
    return_sends: tuple[Transfer, ...]  # gradients of these
    return_receives: tuple[Transfer, ...]  # into the buffer of returned gradients
    carried: int  # leading returned slots that are added to the next stage's gradients, and travel on
    scatters: SlotRanges  # own rows to add returned gradients to


@dataclass(frozen=True)
class Sizes:
    """Slots of the buffers that a rank needs for a schedule, and how many receive buffers take turns."""

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


# --- direct ---


class _ToReader(NamedTuple):
    """What `reader` takes at a distance: from the rank `peer`, or, seen from there, to it."""

    reader: int
    distance: int
    peer: int


@dataclass(frozen=True, eq=False)
class _Requests:
    """What all ranks take by `direct`. Message p * reader + distance is what the reader takes at that distance."""

    p: int
    most: int
    whole: Chunks
    cut: Chunks
    slots: Ints  # (reader, distance)

    def buffer_slots(self, messages: Sequence[_ToReader], chunk: int | None) -> int:
        """Slots of a buffer for these messages, or for any of their chunks."""
        lengths = [int(self.slots[message.reader, message.distance]) for message in messages]
        return (
            sum(lengths)
            if chunk is None
            else sum(buffer_slots(x, self.most, self.whole.entries.widest) for x in lengths)
        )

    def side_by_side(self, messages: Sequence[_ToReader], chunk: int | None) -> tuple[tuple[Transfer, ...], SlotRanges]:
        """Messages, or a chunk of each, one after the other in a buffer: the transfers, and what the slots hold."""
        chunks = self.whole if chunk is None else self.cut
        transfers, parts, at = [], [], 0
        for message in messages:
            which = chunks.of(self.p * message.reader + message.distance, chunk or 0)
            if len(which):
                stop = at + int(chunks.entries.slots[which].sum())
                transfers.append(Transfer(message.peer, at, stop))
                parts.append(chunks.slot_ranges(which).shifted(at))
                at = stop
        return tuple(transfers), SlotRanges.join(parts)


def direct(ranges: Ranges, layout: Layout, causal: bool, rank: int, most: int) -> Schedule:
    """Stages by distance. most: slots in a stage, and in a message but for rows that `most` splits."""
    p, asked = layout.world_size, _requests(ranges, layout, causal, most)
    stages, receive, send = [], 0, 0
    for distances, chunk in _rounds(asked.slots.max(axis=0), most):
        incoming, served = [], []
        for t in distances:
            incoming.append(_ToReader(reader=rank, distance=t, peer=(rank - t) % p))
            served.append(_ToReader(reader=(rank + t) % p, distance=t, peer=(rank + t) % p))
        receives, received = asked.side_by_side(incoming, chunk)
        sends, gathers = asked.side_by_side(served, chunk)
        receive, send = max(receive, asked.buffer_slots(incoming, chunk)), max(send, asked.buffer_slots(served, chunk))
        stages.append(
            Stage(
                gathers=gathers, sends=sends, relayed=False, receives=receives, received=received,
                return_sends=receives, return_receives=sends, carried=0, scatters=gathers,
            )
        )  # fmt: skip
    return Schedule(tuple(stages), Sizes(receive=receive, send=send, returned=send))


_asked: BoundedCache[Hashable, _Requests] = BoundedCache(16, most_bytes=2**27)


def _requests(ranges: Ranges, layout: Layout, causal: bool, most: int) -> _Requests:
    """For all ranks at once."""
    key = ranges, layout, causal, most
    return _asked.get_or_make(
        key, lambda: _all_requests(*key), lambda made: ranges.nbytes + made.whole.nbytes + made.cut.nbytes
    )


def _all_requests(ranges: Ranges, layout: Layout, causal: bool, most: int) -> _Requests:
    p, needs = layout.world_size, needs_of(ranges, causal)
    distance = (needs.rank - ranges.rank[needs.range]) % p
    order = np.lexsort((needs.range, distance, needs.rank))
    needs, distance = needs.take(order), distance[order]
    asked = Subranges(needs.range, first=needs.first, count=needs.count)
    message, none = p * needs.rank + distance, np.zeros_like(distance)
    entries = Entries(message, travel=none, subranges=asked, width=ranges.width[needs.range])
    slots = np.zeros((p, p), np.int64)
    np.add.at(slots, (needs.rank, distance), entries.slots)
    return _Requests(p, most, whole=whole_messages(entries), cut=cut(entries, most), slots=slots)


def _rounds(longest: Ints, most: int) -> list[tuple[list[int], int | None]]:
    """(distances, chunk) of every stage, near ranks first. Several distances share a stage while their messages fit
    together, whole (chunk None); longer messages have a stage for each chunk. longest: slots, by distance.
    """
    rounds: list[tuple[list[int], int | None]] = []
    left = 0
    for t in range(1, len(longest)):
        slots = int(longest[t])
        if slots == 0:
            continue
        if slots > most:
            rounds += [([t], chunk) for chunk in range(-(-slots // most))]
            left = 0
        elif rounds and slots <= left:
            rounds[-1][0].append(t)
            left -= slots
        else:
            rounds.append(([t], None))
            left = most - slots
    return rounds


# --- ring ---


@dataclass(frozen=True, eq=False)
class _Travelling:
    """What all owners send round the ring, message by owner. Slots that travel farthest come first."""

    chunks: Chunks
    prefix: Ints  # (owner, chunk, t): the chunk's slots that travel t hops or more
    in_flight: Ints  # (owner, t): the message's slots that do


def ring(ranges: Ranges, layout: Layout, causal: bool, rank: int, most: int) -> Schedule:
    """Stages by chunk and hop. most: slots of a message, but for rows that `most` splits."""
    p, travelling = layout.world_size, _travelling(ranges, layout, causal, most)
    stages = []
    for chunk in range(travelling.chunks.count):
        for t in range(1, p):
            if not travelling.prefix[:, chunk, t].any():
                break
            stages.append(_hop(travelling, rank=rank, chunk=chunk, t=t))
    in_flight, widest = travelling.in_flight, travelling.chunks.entries.widest

    def largest(slots: Iterable[int]) -> int:
        return max((buffer_slots(int(one), most, widest) for one in slots), default=0)

    receive = largest(in_flight[(rank - t) % p, t] for t in range(1, p))
    ending = largest(in_flight[rank, t] - in_flight[rank, t + 1] for t in range(1, p))
    send = largest(in_flight[rank, t] for t in range(1, min(p, 2)))
    return Schedule(tuple(stages), Sizes(receive=receive, send=send, returned=receive + ending))


def _hop(travelling: _Travelling, *, rank: int, chunk: int, t: int) -> Stage:
    """Hop t of a chunk. The rank receives the slots of owner rank - t that travel t hops or more, `here` of them.

    The leading `onward` of these go on to rank + 1, and so do their gradients, once those of this rank are added. The
    others end here, and their gradients return to the owner. From rank - 1 come the gradients of the slots that this
    rank will receive at the next hop (`carried`), and from rank + t, behind them in the buffer, those of its own slots
    that end there. In its own messages the latter have the numbers `kept` to `end`.

    3 ranks, say, and each sends 5 slots, 3 of which travel 2 hops and 2 travel 1. At t = 1 rank 0 receives 5 slots of
    rank 2 (`here`). It sends gradients of the leading 3 (`onward`) on to rank 1, and those of the last 2 back to rank
    2. It receives gradients of 3 slots of rank 1 (`carried`), and behind them those of its own last 2, which only rank
    1 has used: their numbers are 3 and 4 (`kept` = 3, `end` = 5).
    """
    chunks, p = travelling.chunks, len(travelling.prefix)
    source, before, after = (rank - t) % p, (rank - 1) % p, (rank + 1) % p

    def slots(owner: int, hops: int) -> int:
        return int(travelling.prefix[owner % p, chunk, hops])

    here, onward = slots(source, t), slots(source, t + 1)
    carried = slots(source - 1, t + 1)
    kept, end = slots(rank, t + 1), slots(rank, t)
    mine, theirs = chunks.of(rank, chunk), chunks.of(source, chunk)
    travel = chunks.entries.travel
    return Stage(
        gathers=chunks.slot_ranges(mine) if t == 1 else _NOTHING,
        sends=_transfers((after, 0, slots(source + 1, t))),
        relayed=t > 1,
        receives=_transfers((before, 0, here)),
        received=chunks.slot_ranges(theirs[travel[theirs] >= t]),
        return_sends=_transfers((after, 0, onward), (source, onward, here)),
        return_receives=_transfers((before, 0, carried), ((rank + t) % p, carried, carried + end - kept)),
        carried=carried,
        scatters=chunks.slot_ranges(mine[travel[mine] == t]).shifted(carried - kept),
    )


_under_way: BoundedCache[Hashable, _Travelling] = BoundedCache(16, most_bytes=2**27)


def _travelling(ranges: Ranges, layout: Layout, causal: bool, most: int) -> _Travelling:
    """For all ranks at once."""
    key = ranges, layout, causal, most
    return _under_way.get_or_make(key, lambda: _all_travelling(*key), lambda made: ranges.nbytes + made.chunks.nbytes)


def _all_travelling(ranges: Ranges, layout: Layout, causal: bool, most: int) -> _Travelling:
    p, needs = layout.world_size, needs_of(ranges, causal)
    leading, trailing = _hops(ranges, needs, p)
    subranges, travel = _by_travel(leading, trailing, ranges.count[:, None])
    order = np.lexsort((subranges.range, -travel, ranges.rank[subranges.range]))
    subranges, travel = subranges.take(order), travel[order]
    index = subranges.range
    chunks = cut(Entries(ranges.rank[index], travel, subranges, ranges.width[index]), most)
    entries = chunks.entries
    slots = np.zeros((p, chunks.count, p + 1), np.int64)
    np.add.at(slots, (entries.message, chunks.chunk, entries.travel), entries.slots)
    prefix = np.flip(np.cumsum(np.flip(slots, 2), 2), 2)
    in_flight = np.zeros((p, p + 1), np.int64)
    moving = leading if trailing is None else np.minimum(leading + trailing, ranges.count[:, None])
    moving[:, 0] = 0
    np.add.at(in_flight, ranges.rank, moving * ranges.width[:, None])
    return _Travelling(chunks, prefix, in_flight)


def _hops(ranges: Ranges, needs: Needs, p: int) -> tuple[Ints, Ints | None]:
    """(range, t): how many of the leading elements of a range travel t hops or more; likewise of the trailing ones, if
    there are any.
    """
    distance, trail = (needs.rank - ranges.rank[needs.range]) % p, needs.first > 0
    found: list[Ints | None] = []
    for which in (np.flatnonzero(~trail), np.flatnonzero(trail)):
        rows = np.zeros((len(ranges.count), p + 1), np.int64)
        rows[needs.range[which], distance[which]] = needs.count[which]
        found.append(np.flip(np.maximum.accumulate(np.flip(rows, 1), 1), 1) if len(which) else None)
    leading, trailing = found
    return np.zeros((len(ranges.count), p + 1), np.int64) if leading is None else leading, trailing


def _by_travel(leading: Ints, trailing: Ints | None, count: Ints) -> tuple[Subranges, Ints]:
    """The elements that travel exactly t hops, and t: those that are among the leading, or the trailing, ones for t and
    not for t + 1. count: elements of each range, (ranges, 1).
    """
    onward, here = leading[:, 2:], leading[:, 1:-1]
    parts = [(onward, here)]
    if trailing is not None:
        kept, staying = count - trailing[:, 2:], count - trailing[:, 1:-1]
        here = np.minimum(here, kept)
        parts = [(onward, here), (np.maximum(staying, np.maximum(here, onward)), kept)]
    found, travels = [], []
    for first, end in parts:
        index, t = np.nonzero(end > first)
        found.append(Subranges(index, first=first[index, t], count=(end - first)[index, t]))
        travels.append(t + 1)
    return Subranges.join(found), concatenated(travels)


def _transfers(*transfers: tuple[int, int, int]) -> tuple[Transfer, ...]:
    """Those of (peer, start, stop) that are not empty."""
    return tuple(Transfer(peer, start, stop) for peer, start, stop in transfers if stop > start)


# --- gather ---


def gather(layout: Layout, kv_heads: int, rank: int) -> Schedule:
    """One stage: every shard to everyone. A shard's slots are its rows, each with all key/value heads."""
    slots = [count * kv_heads for count in layout.counts]
    others = [peer for peer in range(layout.world_size) if peer != rank]
    if not others:
        return Schedule((), Sizes(receive=0, send=0, returned=0, receive_buffers=1), whole=True)
    receives, stop = [], 0
    for peer in others:
        receives.append((peer, stop, stop + slots[peer]))
        stop += slots[peer]
    own = slots[rank]
    received = _transfers(*receives)
    stage = Stage(
        gathers=_NOTHING,
        sends=_transfers(*((peer, 0, own) for peer in others)),
        relayed=False,
        receives=received,
        received=_NOTHING,
        return_sends=received,
        return_receives=_transfers(*((peer, copy * own, (copy + 1) * own) for copy, peer in enumerate(others))),
        carried=0,
        scatters=_NOTHING,
    )
    sizes = Sizes(receive=stop, send=own, returned=len(others) * own, receive_buffers=1)
    return Schedule((stage,), sizes, whole=True)
