"""The exchange "ring": a slot travels from neighbour to neighbour as far as the farthest rank that needs it.

Slots that travel farthest come first in a message, so each hop forwards a prefix of what it received. Gradients travel
along; the last rank that used a slot returns its gradient directly to the owner. By "ring:N+direct" it travels so
within each group of N neighbours: the owner sends it to one rank of the group (`ring.plan.exchanges.relay_groups`).

A bucket bounds the messages. Longer ones are cut into chunks, each sent in its own stage and received in the same
buffer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from ring.caching.bounded_cache import BoundedCache
from ring.layout import Layout
from ring.plan.chunks import Chunks, Entries, buffer_slots, cut
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.exchanges.relay_groups import RelayGroups
from ring.plan.ranges import Ints, Ranges, Subranges, concatenated, group_starts, ragged_arange
from ring.plan.remote_rows import Needs, needs_of
from ring.plan.schedule import NOTHING, KeyRows, Schedule, Sizes, Stage, transfers


@dataclass(frozen=True, eq=False)
class _Travelling:
    """The messages of all owners to the groups, numbered p * away + owner. Slots that travel farthest come first."""

    chunks: Chunks
    prefix: Ints  # (message, chunk, t): the chunk's slots that travel t hops or more
    in_flight: Ints  # (message, t): the same of the whole message


def schedule(rows: KeyRows, size: int | None = None) -> Schedule:
    """Return stages by group, chunk and hop. A message has at most `rows.most` slots, unless that would split a row.

    size: neighbours that pass keys round; None: all ranks do.
    """
    ranks, rank, most = rows.layout.world_size, rows.rank, rows.most
    groups = RelayGroups(ranks, size or ranks)
    travelling = _travelling(rows.ranges, rows.layout, most, groups)
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
            gathers=chunks.slot_ranges(own) if t == 1 else NOTHING,
            sends=transfers((sent[0], 0, slots(sent[1], t))),
            relayed=t > 1,
            receives=transfers((source if t == 1 else before, 0, arriving)),
            received=chunks.slot_ranges(remote[travel[remote] >= t]),
            return_sends=transfers((after, 0, onward), (source, onward, arriving)),
            return_receives=transfers((before, 0, carried), (last, carried, carried + end - first)),
            carried=carried,
            scatters=chunks.slot_ranges(own[travel[own] == t]).shifted(carried - first),
        )


_travels: BoundedCache[Hashable, _Travelling] = BoundedCache(16, most_bytes=2**27)


def _travelling(ranges: Ranges, layout: Layout, most: int, groups: RelayGroups) -> _Travelling:
    """Return the cached messages of all ranks."""
    key = ranges, layout.world_size, most, groups
    return _travels.get_or_make(
        key, lambda: _all_travelling(ranges, most, groups), lambda table: ranges.nbytes + table.chunks.nbytes
    )


def _all_travelling(ranges: Ranges, most: int, groups: RelayGroups) -> _Travelling:
    parts, travels, messages = [], [], []
    for _, needs in needs_of(ranges):
        away, hop = groups.hop(ranges.rank[needs.range], needs.rank)
        for group in range(groups.count):
            there = np.flatnonzero(away == group)
            subranges, travel = _by_travel(needs.take(there), hop[there])
            parts.append(subranges)
            travels.append(travel)
            messages.append(groups.message(group, ranges.rank[subranges.range]))
    subranges, travel, message = Subranges.join(parts), concatenated(travels), concatenated(messages)
    order = np.lexsort((subranges.range, -travel, message))
    subranges, travel, message = subranges.take(order), travel[order], message[order]
    chunks = cut(Entries(message, travel, subranges, ranges.width[subranges.range], ranges.chunked), most)
    entries = chunks.entries
    slots = np.zeros((groups.count * groups.ranks, chunks.count, groups.hops + 2), np.int64)
    np.add.at(slots, (entries.message, chunks.chunk, entries.travel), entries.slots)
    prefix = np.flip(np.cumsum(np.flip(slots, 2), 2), 2)
    return _Travelling(chunks, prefix, prefix.sum(axis=1))


def _by_travel(needs: Needs, hop: Ints) -> tuple[Subranges, Ints]:
    """Return the needed elements of each range by the hops that they travel, as far as the farthest rank that needs
    them. hop: at which each need is met.

    Between two neighbouring ends of needs all elements travel alike.
    """
    if not len(hop):
        return Subranges.join(()), hop
    span = int((needs.first + needs.count).max()) + 1  # so that the ends of two ranges never mix
    begin = needs.range * span + needs.first
    end = begin + needs.count
    edges = np.unique(np.concatenate((begin, end)))
    low, high = np.searchsorted(edges, begin), np.searchsorted(edges, end)
    travel = np.zeros(len(edges), np.int64)
    np.maximum.at(travel, np.repeat(low, high - low) + ragged_arange(high - low), np.repeat(hop, high - low))
    index, first = np.divmod(edges, span)
    leads = np.flatnonzero(group_starts(index, travel))
    stop = np.append(edges[leads[1:]], edges[-1])
    some = np.flatnonzero(travel[leads] > 0)
    leads, stop = leads[some], stop[some]
    return Subranges(index[leads], first[leads], stop - edges[leads]), travel[leads]


RING = KeyExchange("ring", schedule)


@lru_cache(maxsize=64)  # equal records are one object
def relayed(size: int) -> KeyExchange:
    """Return the exchange by which keys go once to each group of so many neighbours, and round inside."""
    return KeyExchange(f"ring:{size}+direct", partial(schedule, size=size), group=size)
