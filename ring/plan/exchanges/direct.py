"""The exchange "direct": at distance t a rank receives from the rank t before it only the slots that it needs, and
returns their gradients.

A bucket bounds the messages. Longer ones are cut into chunks, each sent in its own stage and received in the same
buffer.

By "direct-kept" received slots are kept for the backward, which then has no wait before its first stage, and hides the
gradients that return last behind its own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ring.plan.chunks import Chunks, Entries, SlotRanges, buffer_slots, cut, whole_messages
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.ranges import Ints, Ranges, Subranges
from ring.plan.remote_rows import Needs, needs_of
from ring.plan.schedule import KeyRows, Schedule, Sizes, Stage, Transfer


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
    widest: int  # slots that are never split: of a row, or of a range that travels whole

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


def schedule(rows: KeyRows) -> Schedule:
    """Return stages by distance. A stage has at most `rows.most` slots, unless that would split a row."""
    p, rank, most = rows.layout.world_size, rows.rank, rows.most
    requests = _requests(rows.ranges, p, rank, most)
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


def _requests(ranges: Ranges, p: int, rank: int, most: int) -> _Requests:
    own, slots, widest = [], np.zeros((p, p), np.int64), 1
    for _, needs in needs_of(ranges):
        owner, width = ranges.rank[needs.range], ranges.width[needs.range]
        np.add.at(slots, (needs.rank, (needs.rank - owner) % p), needs.count * width)
        widest = max(widest, int((width * needs.count if ranges.chunked else width).max(initial=1)))
        own.append(needs.take(np.flatnonzero((needs.rank == rank) | (owner == rank))))
    needs = Needs.join(own)
    message = p * needs.rank + (needs.rank - ranges.rank[needs.range]) % p
    order = np.lexsort((needs.range, message))
    needs, message = needs.take(order), message[order]
    subranges = Subranges(needs.range, first=needs.first, count=needs.count)
    entries = Entries(
        message,
        travel=np.zeros_like(message),
        subranges=subranges,
        width=ranges.width[needs.range],
        whole=ranges.chunked,
    )
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


DIRECT = KeyExchange("direct", schedule, straight=True)
DIRECT_KEPT = KeyExchange("direct-kept", schedule, straight=True, kept=True)
