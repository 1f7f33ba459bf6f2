"""The exchanges of keys as integers: the messages that a rank sends, receives and returns, stage by stage.

A slot holds one row of one key/value head of a block; a message is a row of slots in a buffer. All ranks run the same
number of stages, and a message is sent and received in the same stage. So messages between two ranks match by their
order alone.

ring    A slot travels from neighbour to neighbour as far as the farthest rank that needs it. Slots that travel farthest
        come first in a message, so each hop forwards a prefix of what it received. Gradients travel along; the last
        rank that used a slot returns its gradient directly to the owner. By "ring:N+direct" it travels so within each
        group of N neighbours: the owner sends it to one rank of the group (`ring.plan.relay_groups`).
direct  At distance t a rank receives from the rank t before it only the slots that it needs, and returns their
        gradients.
gather  Every rank receives every shard whole, and returns the gradients of each: the O(n) baseline.

`bucket` bounds the messages of `ring` and `direct`. Longer ones are cut into chunks, each sent in its own stage and
received in the same buffer.

The example (see `ring.plan`): the one stage of `direct`, on rank 0. It sends its own ranges 0 and 4 from the send
buffer, and reads rank 1's ranges 3 and 7 in the receive buffer. Gradients return the same way.

    slots     range  elements  first slot
    sent      0      0 1       0
    sent      4      0 1       2
    received  3      0 1       0
    received  7      0 1       2
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ring.caching.bounded_cache import BoundedCache
from ring.layout import Layout
from ring.plan.chunks import Chunks, Entries, SlotRanges, buffer_slots, cut, whole_messages
from ring.plan.ranges import Ints, Ranges, Subranges, concatenated
from ring.plan.relay_groups import RelayGroups
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
    received: SlotRanges  # the remote rows in it
    return_sends: tuple[Transfer, ...]  # gradients of these
    return_receives: tuple[Transfer, ...]  # into the buffer of returned gradients
    carried: int  # leading returned slots: added to the next stage's gradients, which travel on
    scatters: SlotRanges  # own rows to add returned gradients to


@dataclass(frozen=True)
class Sizes:
    """Slots of the buffers that a schedule needs, and the number of receive buffers, used in turn."""

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


class _Request(NamedTuple):
    """A message to `reader` at a distance; `peer`: the other rank, seen from this one."""

    reader: int
    distance: int
    peer: int


@dataclass(frozen=True, eq=False)
class _Requests:
    """The messages from and to one rank by `direct`. Message p * reader + distance goes to the reader at that distance.

    slots, widest: of the messages of all ranks, which determine the stages and the buffers.
    """

    p: int
    most: int
    whole: Chunks
    cut: Chunks
    slots: Ints  # (reader, distance)
    widest: int  # slots of a row

    def buffer_slots(self, messages: Sequence[_Request], chunk: int | None) -> int:
        """Return the slots of a buffer for these messages, or for any of their chunks."""
        lengths = [int(self.slots[message.reader, message.distance]) for message in messages]
        return sum(lengths) if chunk is None else sum(buffer_slots(x, self.most, self.widest) for x in lengths)

    def pack(self, messages: Sequence[_Request], chunk: int | None) -> tuple[tuple[Transfer, ...], SlotRanges]:
        """Lay out messages, or a chunk of each, in a buffer: their transfers, and the contents of the slots."""
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
    """Return stages by distance. most: slots of a stage, and of a message unless `most` would split a row."""
    p, requests = layout.world_size, _requests(ranges, layout.world_size, causal, rank, most)
    stages, receive, send = [], 0, 0
    for distances, chunk in _rounds(requests.slots.max(axis=0), most):
        incoming, served = [], []
        for t in distances:
            incoming.append(_Request(reader=rank, distance=t, peer=(rank - t) % p))
            served.append(_Request(reader=(rank + t) % p, distance=t, peer=(rank + t) % p))
        receives, received = requests.pack(incoming, chunk)
        sends, gathers = requests.pack(served, chunk)
        receive = max(receive, requests.buffer_slots(incoming, chunk))
        send = max(send, requests.buffer_slots(served, chunk))
        stages.append(
            Stage(
                gathers=gathers, sends=sends, relayed=False, receives=receives, received=received,
                return_sends=receives, return_receives=sends, carried=0, scatters=gathers,
            )
        )  # fmt: skip
    return Schedule(tuple(stages), Sizes(receive=receive, send=send, returned=send))


def _requests(ranges: Ranges, p: int, causal: bool, rank: int, most: int) -> _Requests:
    own, slots, widest = [], np.zeros((p, p), np.int64), 1
    for _, needs in needs_of(ranges, causal):
        owner, width = ranges.rank[needs.range], ranges.width[needs.range]
        np.add.at(slots, (needs.rank, (needs.rank - owner) % p), needs.count * width)
        widest = max(widest, int(width.max(initial=1)))
        own.append(needs.take(np.flatnonzero((needs.rank == rank) | (owner == rank))))
    needs = Needs.join(own)
    message = p * needs.rank + (needs.rank - ranges.rank[needs.range]) % p
    order = np.lexsort((needs.range, message))
    needs, message = needs.take(order), message[order]
    subranges = Subranges(needs.range, first=needs.first, count=needs.count)
    entries = Entries(message, travel=np.zeros_like(message), subranges=subranges, width=ranges.width[needs.range])
    return _Requests(p, most, whole=whole_messages(entries), cut=cut(entries, most), slots=slots, widest=widest)


def _rounds(longest: Ints, most: int) -> list[tuple[list[int], int | None]]:
    """Return (distances, chunk) of every stage, near ranks first. Distances share a stage while their messages fit
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
    """The messages of all owners to the groups, numbered p * away + owner. Slots that travel farthest come first."""

    chunks: Chunks
    prefix: Ints  # (message, chunk, t): the chunk's slots that travel t hops or more
    in_flight: Ints  # (message, t): the same of the whole message


def ring(ranges: Ranges, layout: Layout, causal: bool, rank: int, most: int, groups: RelayGroups) -> Schedule:
    """Return stages by group, chunk and hop. most: slots of a message, unless `most` would split a row."""
    travelling = _travelling(ranges, layout, causal, most, groups)
    stages, hops = [], _Hops(travelling, groups, rank)
    for away in range(groups.count):
        for chunk in range(travelling.chunks.count):
            for t in range(1, groups.hops + 1):
                if not hops.any(away, chunk, t):
                    break
                stages.append(hops.stage(away, chunk, t))
    in_flight, widest = travelling.in_flight, travelling.chunks.entries.widest

    def largest(slots: Iterable[int]) -> int:
        return max((buffer_slots(int(x), most, widest) for x in slots), default=0)

    places = [(away, t) for away in range(groups.count) for t in range(1, groups.hops + 1)]
    own = [groups.message(away, rank) for away in range(groups.count)]
    receive = largest(in_flight[groups.message(away, groups.source(rank, away, t)), t] for away, t in places)
    ending = largest(in_flight[own[away], t] - in_flight[own[away], t + 1] for away, t in places)
    send = largest(in_flight[own, 1])
    return Schedule(tuple(stages), Sizes(receive=receive, send=send, returned=receive + ending))


class _Hops(NamedTuple):
    """The hops of all messages, seen from one rank."""

    travelling: _Travelling
    groups: RelayGroups
    rank: int

    def any(self, away: int, chunk: int, t: int) -> bool:
        """True if some rank receives slots at hop t of this chunk."""
        first = self.groups.message(away, 0)
        return bool(self.travelling.prefix[first : first + self.groups.ranks, chunk, t].any())

    def stage(self, away: int, chunk: int, t: int) -> Stage:
        """Return hop t of a chunk to groups `away`: the rank receives the slots of an owner, `source`, that travel t
        hops or more, `arriving`.

        The leading `onward` of these go on to the next rank of the group, and so do their gradients once this rank has
        added its own. The others stop, and their gradients return to the owner. The rank before sends the gradients of
        the slots that this rank will receive at the next hop (`carried`). Behind them in the buffer lie the gradients
        of its own slots that stop at `last`: slots `first` .. `end` - 1 of its own message.

        Example: 3 ranks of a group send 5 slots each; 3 slots travel 2 hops, 2 travel 1. At t = 1 rank 0 receives 5
        slots of rank 2 (`arriving`). It sends the gradients of the leading 3 (`onward`) on to rank 1, and those of the
        last 2 back to rank 2. It receives gradients of 3 slots of rank 1 (`carried`), and behind them those of its own
        last 2, which only rank 1 has used: slots 3 and 4 (`first` = 3, `end` = 5).
        """
        rank, groups, chunks = self.rank, self.groups, self.travelling.chunks
        source, last = groups.source(rank, away, t), groups.visited(rank, away, t)
        before, after = groups.neighbour(rank, -1), groups.neighbour(rank, 1)

        def slots(owner: int, hops: int) -> int:
            return int(self.travelling.prefix[groups.message(away, owner), chunk, hops])

        sent = (last, rank) if t == 1 else (after, groups.source(after, away, t))
        arriving, onward = slots(source, t), slots(source, t + 1)
        carried = slots(groups.source(rank, away, t + 1), t + 1)
        first, end = slots(rank, t + 1), slots(rank, t)
        own, remote = (chunks.of(groups.message(away, owner), chunk) for owner in (rank, source))
        travel = chunks.entries.travel
        return Stage(
            gathers=chunks.slot_ranges(own) if t == 1 else _NOTHING,
            sends=_transfers((sent[0], 0, slots(sent[1], t))),
            relayed=t > 1,
            receives=_transfers((source if t == 1 else before, 0, arriving)),
            received=chunks.slot_ranges(remote[travel[remote] >= t]),
            return_sends=_transfers((after, 0, onward), (source, onward, arriving)),
            return_receives=_transfers((before, 0, carried), (last, carried, carried + end - first)),
            carried=carried,
            scatters=chunks.slot_ranges(own[travel[own] == t]).shifted(carried - first),
        )


_travels: BoundedCache[Hashable, _Travelling] = BoundedCache(16, most_bytes=2**27)


def _travelling(ranges: Ranges, layout: Layout, causal: bool, most: int, groups: RelayGroups) -> _Travelling:
    """Return the cached messages of all ranks."""
    key = ranges, layout.world_size, causal, most, groups
    return _travels.get_or_make(
        key, lambda: _all_travelling(ranges, causal, most, groups), lambda table: ranges.nbytes + table.chunks.nbytes
    )


def _all_travelling(ranges: Ranges, causal: bool, most: int, groups: RelayGroups) -> _Travelling:
    parts, travels, messages = [], [], []
    in_flight = np.zeros((groups.count * groups.ranks, groups.hops + 2), np.int64)
    for which, needs in needs_of(ranges, causal):
        count, owner = ranges.count[which, None], ranges.rank[which]
        away, hop = groups.hop(ranges.rank[needs.range], needs.rank)
        for group in range(groups.count):
            there = np.flatnonzero(away == group)
            leading, trailing = _hops(needs.take(there), which, hop[there], groups.hops)
            subranges, travel = _by_travel(leading, trailing, count)
            parts.append(replace(subranges, range=subranges.range + which.start))
            travels.append(travel)
            messages.append(groups.message(group, owner[subranges.range]))
            moving = leading if trailing is None else np.minimum(leading + trailing, count)
            moving[:, 0] = 0
            np.add.at(in_flight, groups.message(group, owner), moving * ranges.width[which, None])
    subranges, travel, message = Subranges.join(parts), concatenated(travels), concatenated(messages)
    order = np.lexsort((subranges.range, -travel, message))
    subranges, travel, message = subranges.take(order), travel[order], message[order]
    chunks = cut(Entries(message, travel, subranges, ranges.width[subranges.range]), most)
    entries = chunks.entries
    slots = np.zeros((len(in_flight), chunks.count, groups.hops + 2), np.int64)
    np.add.at(slots, (entries.message, chunks.chunk, entries.travel), entries.slots)
    prefix = np.flip(np.cumsum(np.flip(slots, 2), 2), 2)
    return _Travelling(chunks, prefix, in_flight)


def _hops(needs: Needs, ranges: slice, hop: Ints, most: int) -> tuple[Ints, Ints | None]:
    """Return (range, t): the number of leading elements of a range that travel t hops or more. The second table counts
    trailing elements; None if there are none. hop: at which each need is met, at most `most`.
    """
    trail, tables = needs.first > 0, []
    for which in (np.flatnonzero(~trail), np.flatnonzero(trail)):
        rows = np.zeros((ranges.stop - ranges.start, most + 2), np.int64)
        rows[needs.range[which] - ranges.start, hop[which]] = needs.count[which]
        tables.append(np.flip(np.maximum.accumulate(np.flip(rows, 1), 1), 1))
    leading, trailing = tables
    return leading, trailing if trail.any() else None


def _by_travel(leading: Ints, trailing: Ints | None, count: Ints) -> tuple[Subranges, Ints]:
    """Return the elements that travel exactly t hops, and t: those among the leading, or trailing, ones for t but not
    for t + 1. count: elements of each range, (ranges, 1).
    """
    onward, arriving = leading[:, 2:], leading[:, 1:-1]
    parts = [(onward, arriving)]
    if trailing is not None:
        end, begin = count - trailing[:, 2:], count - trailing[:, 1:-1]
        arriving = np.minimum(arriving, end)
        parts = [(onward, arriving), (np.maximum(begin, np.maximum(arriving, onward)), end)]
    subranges, travels = [], []
    for first, end in parts:
        index, t = np.nonzero(end > first)
        subranges.append(Subranges(index, first=first[index, t], count=(end - first)[index, t]))
        travels.append(t + 1)
    return Subranges.join(subranges), concatenated(travels)


def _transfers(*transfers: tuple[int, int, int]) -> tuple[Transfer, ...]:
    """Build the transfers (peer, start, stop) that are not empty."""
    return tuple(Transfer(peer, start, stop) for peer, start, stop in transfers if stop > start)


# --- gather ---


def gather(layout: Layout, kv_heads: int, rank: int) -> Schedule:
    """Return one stage: every shard to all ranks. A shard's slots are its rows, each with all key/value heads."""
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
