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
from ring.plan.range_pairs import Needs, Stretches, needs_of
from ring.plan.ranges import Ints, Pieces, counter


@dataclass(frozen=True)
class Move:
    """Slots start .. stop - 1 of a buffer, to or from a peer (rank in the group)."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Packed:
    """Stretches of pieces, row after row in consecutive slots, the first at `slot`, and the message each is part of."""

    stretches: Stretches
    slot: Ints
    message: Ints

    def shifted(self, by: int) -> Packed:
        return Packed(self.stretches, self.slot + by, self.message)

    @classmethod
    def none(cls) -> Packed:
        empty = np.empty(0, np.int64)
        return cls(Stretches(empty, empty, empty), empty, empty)

    @classmethod
    def join(cls, parts: list[Packed]) -> Packed:
        if not parts:
            return cls.none()
        columns = [(p.stretches.piece, p.stretches.first, p.stretches.count, p.slot, p.message) for p in parts]
        piece, first, count, slot, message = (np.concatenate(column) for column in zip(*columns, strict=True))
        return cls(Stretches(piece, first, count), slot, message)


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of one rank. Gradients of landed slots have the landing's own addresses."""

    packed: Packed  # own rows -> outbox
    sends: tuple[Move, ...]  # from the outbox, or, if relayed, from the landing of the stage before
    relayed: bool
    receives: tuple[Move, ...]  # into this stage's landing
    landed: Packed  # other ranks' rows -> landing
    return_sends: tuple[Move, ...]  # of this stage's gradients
    return_receives: tuple[Move, ...]  # into the returned box
    carried: int  # leading returned slots that are added to the next stage's gradients
    home: Packed  # own rows <- returned box


@dataclass(frozen=True)
class Sizes:
    """Slots of the buffers that a rank needs for a schedule, and how many landings it takes in turn."""

    landing: int
    outbox: int
    returned: int
    turns: int = 2


@dataclass(frozen=True, eq=False)
class Schedule:
    """The stages of one rank and its buffers. `whole`: shards move whole, addressed by row and head, not by block."""

    stages: tuple[Stage, ...]
    sizes: Sizes
    whole: bool = False


@dataclass(frozen=True, eq=False)
class _Parcels:
    """Entries of messages cut into chunks: which message and chunk, which rows, and where in the chunk they lie."""

    message: Ints
    chunk: Ints
    travel: Ints  # the distance that a ring's slot travels; 0 for direct
    stretches: Stretches
    slot: Ints
    slots: Ints

    def packed(self, which: Ints) -> Packed:
        return Packed(self.stretches.take(which), self.slot[which], self.message[which])


def _cut(message: Ints, travel: Ints, stretches: Stretches, width: Ints, cap: int | None) -> _Parcels:
    """Lay the entries of each message in order; a row that starts at slot x is in chunk x // cap.

    Entries of 3 and 2 rows, each row 2 slots wide, and a cap of 4: rows start at 0 2 | 4 6 | 8, so the chunks hold rows
    (0 1 of the first), (2 of the first, 0 of the second), (1 of the second): five entries become four.
    """
    slots = stretches.count * width
    end = np.cumsum(slots)
    new = np.flatnonzero(np.diff(message, prepend=-1))
    base = np.repeat((end - slots)[new], np.diff(np.append(new, len(message))))
    begin = end - slots - base
    if cap is None:
        return _Parcels(message, 0 * message, travel, stretches, begin, slots)
    low_chunk = begin // cap
    parts = (begin + slots - width) // cap - low_chunk + 1
    entry = np.repeat(np.arange(len(parts)), parts)
    chunk = low_chunk[entry] + counter(parts)
    begin, width, count = begin[entry], width[entry], stretches.count[entry]
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
    rows = stretches.take(entry).part(low, high - low)
    return _Parcels(message, chunk, travel[entry], rows, begin - origin, (high - low) * width)


def _room(cap: int, width: int) -> Callable[[int], int]:
    """What a chunked message of so many slots needs room for: a row is never split between chunks."""
    return lambda slots: min(slots, cap + width - 1)


def direct(pieces: Pieces, layout: Layout, causal: bool, rank: int, cap: int) -> Schedule:
    """Stages by distance: near ranks first; several distances in one stage while their slots fit the cap together."""
    p = layout.world_size
    needs = needs_of(pieces, causal)
    width = _widths(pieces)[needs.piece]
    distance = (needs.rank - pieces.rank[needs.piece]) % p
    order = np.lexsort((needs.piece, distance, needs.rank))
    needs, width, distance = _take(needs, order), width[order], distance[order]
    slots = np.zeros((p, p), np.int64)  # (reader, distance)
    np.add.at(slots, (needs.rank, distance), needs.count * width)
    rounds = _distance_rounds(slots.max(axis=0), cap)
    message = needs.rank * p + distance
    stretches = Stretches(needs.piece, 0 * needs.count, needs.count)
    cut = _cut(message, 0 * message, stretches, width, cap)
    whole = _cut(message, 0 * message, stretches, width, None)
    room = _room(cap, int(width.max(initial=1)))
    stages, landing, outbox = [], 0, 0
    for distances, chunk in rounds:
        parcels = whole if chunk is None else cut
        sizes = room if chunk is not None else int
        incoming, served = [], []
        for t in distances:
            incoming.append((t, (rank - t) % p, _of_message(parcels, rank * p + t, chunk)))
            served.append((t, (rank + t) % p, _of_message(parcels, (rank + t) % p * p + t, chunk)))
        receives, landed = _lay_out(parcels, incoming)
        sends, packed = _lay_out(parcels, served)
        landing = max(landing, sum(sizes(int(slots[rank, t])) for t in distances))
        outbox = max(outbox, sum(sizes(int(slots[(rank + t) % p, t])) for t in distances))
        stages.append(Stage(packed, sends, False, receives, landed, receives, sends, 0, packed))
    return Schedule(tuple(stages), Sizes(landing, outbox, outbox))


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


def _of_message(parcels: _Parcels, message: int, chunk: int | None) -> Ints:
    low, high = np.searchsorted(parcels.message, [message, message + 1])
    which = np.arange(low, high)
    return which if chunk is None else which[parcels.chunk[which] == chunk]


def _lay_out(parcels: _Parcels, messages: list[tuple[int, int, Ints]]) -> tuple[tuple[Move, ...], Packed]:
    """Messages one after the other in a buffer: the moves to make and where every stretch then lies."""
    moves, parts, at = [], [], 0
    for _, peer, which in messages:
        if len(which):
            stop = at + int(parcels.slots[which].sum())
            moves.append(Move(peer, at, stop))
            parts.append(parcels.packed(which).shifted(at))
            at = stop
    return tuple(moves), Packed.join(parts)


def ring(pieces: Pieces, layout: Layout, causal: bool, rank: int, cap: int) -> Schedule:
    """Stages by chunk and hop.

    At hop t rank r holds slots of owner r - t that travel t hops or more, `here` of them. The leading `onward` go on
    to r + 1; the others end here, so their gradients go straight home. Example, 3 ranks, 5 slots of each owner, 3 of
    which travel 2 hops and 2 travel 1: at t = 1 rank 0 lands 5 slots of rank 2, carries gradients of the leading 3 on
    to rank 1 and sends those of the last 2 home to rank 2. It receives gradients of 3 slots of rank 1, which it will
    see at t = 2 (`carried`), and behind them those of its own last 2, which rank 1 was the last to use. In its own
    messages these two are numbers 3 and 4 (`kept` = 3, `end` = 5); in the returned box they lie behind the carried.
    """
    p = layout.world_size
    cut, room, visiting = _ring_parcels(pieces, layout, causal, cap)
    after, home_of = (rank + 1) % p, lambda t: (rank - t) % p
    chunks = int(cut.chunk.max(initial=-1)) + 1
    slots = np.zeros((p, chunks, p + 1), np.int64)  # (owner, chunk, travel), summed from the farthest: a prefix per hop
    np.add.at(slots, (cut.message, cut.chunk, cut.travel), cut.slots)
    prefix = np.flip(np.cumsum(np.flip(slots, 2), 2), 2)
    stages = []
    for chunk in range(chunks):
        for t in range(1, p):
            if not prefix[:, chunk, t].any():
                break
            source, before = home_of(t), (rank - 1) % p
            here, onward = int(prefix[source, chunk, t]), int(prefix[source, chunk, t + 1])
            sent = int(prefix[home_of(t - 1), chunk, t])
            carried = int(prefix[home_of(t + 1), chunk, t + 1])
            mine = np.flatnonzero((cut.message == rank) & (cut.chunk == chunk))
            theirs = np.flatnonzero((cut.message == source) & (cut.chunk == chunk) & (cut.travel >= t))
            back = mine[cut.travel[mine] == t]
            kept, end = int(prefix[rank, chunk, t + 1]), int(prefix[rank, chunk, t])
            stages.append(
                Stage(
                    packed=cut.packed(mine) if t == 1 else Packed.none(),
                    sends=_moves((after, 0, sent)),
                    relayed=t > 1,
                    receives=_moves((before, 0, here)),
                    landed=cut.packed(theirs),
                    return_sends=_moves((after, 0, onward), (source, onward, here)),
                    return_receives=_moves((before, 0, carried), ((rank + t) % p, carried, carried + end - kept)),
                    carried=carried,
                    home=cut.packed(back).shifted(carried - kept),
                )
            )
    hops = range(1, p)
    landing = max((room(int(visiting[home_of(t), t])) for t in hops), default=0)
    ending = max((room(int(visiting[rank, t] - visiting[rank, t + 1])) for t in hops), default=0)
    outbox = room(int(visiting[rank, 1])) if p > 1 else 0
    return Schedule(tuple(stages), Sizes(landing, outbox, landing + ending))


@lru_cache(maxsize=16)
def _ring_parcels(
    pieces: Pieces, layout: Layout, causal: bool, cap: int
) -> tuple[_Parcels, Callable[[int], int], Ints]:
    """What travels from every owner, farthest first; and (owner, t): the slots that travel at least t hops."""
    p = layout.world_size
    needs = needs_of(pieces, causal)
    reach = np.zeros((len(pieces.count), p + 1), np.int64)  # rows of a piece that are needed t hops on, or farther
    reach[needs.piece, (needs.rank - pieces.rank[needs.piece]) % p] = needs.count
    reach = np.flip(np.maximum.accumulate(np.flip(reach, 1), 1), 1)
    reach[:, 0] = 0
    fresh = np.zeros_like(reach)
    fresh[:, 1:p] = reach[:, 1:p] - reach[:, 2:]
    piece, travel = np.nonzero(fresh)
    owner = pieces.rank[piece]
    order = np.lexsort((piece, -travel, owner))
    piece, travel, owner = piece[order], travel[order], owner[order]
    stretches = Stretches(piece, reach[piece, travel + 1], fresh[piece, travel])
    width = _widths(pieces)[piece]
    visiting = np.zeros((p, p + 1), np.int64)
    np.add.at(visiting, pieces.rank, reach * _widths(pieces)[:, None])
    return _cut(owner, travel, stretches, width, cap), _room(cap, int(width.max(initial=1))), visiting


def gather(layout: Layout, kv_heads: int, rank: int) -> Schedule:
    """One stage: every shard to everyone."""
    p, slots = layout.world_size, [count * kv_heads for count in layout.counts]
    others = [peer for peer in range(p) if peer != rank]
    if not others:
        return Schedule((), Sizes(0, 0, 0, turns=1), whole=True)
    into, back, at = [], [], 0
    for peer in others:
        into.append((peer, at, at + slots[peer]))
        at += slots[peer]
    for copy, peer in enumerate(others):
        back.append((peer, copy * slots[rank], (copy + 1) * slots[rank]))
    sends = _moves(*((peer, 0, slots[rank]) for peer in others))
    receives, returns = _moves(*into), _moves(*back)
    nothing = Packed.none()
    stage = Stage(nothing, sends, False, receives, nothing, receives, returns, 0, nothing)
    sizes = Sizes(at, slots[rank], len(others) * slots[rank], turns=1)
    return Schedule((stage,), sizes, whole=True)


def _moves(*moves: tuple[int, int, int]) -> tuple[Move, ...]:
    return tuple(Move(*move) for move in moves if move[2] > move[1])


def _widths(pieces: Pieces) -> Ints:
    return np.array([block.width for block in pieces.blocks], np.int64)[pieces.block]


def _take(needs: Needs, which: Ints) -> Needs:
    return Needs(needs.rank[which], needs.piece[which], needs.count[which])
