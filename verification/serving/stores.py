"""Rules by which a server keeps and reads keys, right ones and usual mistakes; and the keys that a query then sees.

On each rank a slot has numbered places. A key is written to a place; a query sees the places that are read, as far as
the mask lets it. A place that was never written holds zeros.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from verification.serving.call import Call
from verification.serving.serving_case import ServingCase

UNWRITTEN = -1
Seen = tuple[int, ...]  # tokens, numbered through all calls, or UNWRITTEN


class Turn(NamedTuple):
    """A slot's part of a call: all calls of a rank, the number of this one, the slot."""

    calls: tuple[Call, ...]
    number: int
    slot: int

    @property
    def before(self) -> int:
        return self.calls[self.number].before[self.slot]

    @property
    def new(self) -> int:
        return self.calls[self.number].new[self.slot]


@dataclass(frozen=True)
class Rules:
    """Rules of a server; by default the right ones.

    owns      (call, position) -> True if the call's rank keeps it
    turn      the turn whose lengths are read
    prefix    (turn) -> position of the first new token, as the mask takes it
    place     (call, position) -> place of a key; None: the next one
    read      (turn, owned) -> number of places that are read; owned: keys of the request on the rank
    masked_as (turn, place, places read) -> position that the mask takes for a place; None: the right one
    reset     False if the keys of a finished request stay in front of the next one's
    """

    owns: Callable[[Call, int], bool] = Call.owns
    turn: Callable[[Turn], Turn] = lambda turn: turn
    prefix: Callable[[Turn], int] = lambda turn: turn.before
    place: Callable[[Call, int], int] | None = None
    read: Callable[[Turn, int], int] = lambda turn, owned: owned
    masked_as: Callable[[Turn, int, int], int] | None = None
    reset: bool = True


def seen_by(case: ServingCase, rules: Rules) -> dict[tuple[int, int, int], Seen]:
    """Return the keys that each query sees on each rank, by call, row and rank."""
    seen, most = dict[tuple[int, int, int], Seen](), 2 * case.tokens
    for rank in case.ranks:
        calls, memory = case.calls_of(rank), [dict[int, int]() for _ in case.calls[0]]
        owned = [p for p in range(most) if rules.owns(calls[0], p)]
        finished: list[Seen] = [()] * len(memory)
        for number, slot, rows, tokens in case.requests():
            turn, call = Turn(calls, number, slot), calls[number]
            if call.starts[slot] and not rules.reset:
                finished[slot], memory[slot] = (*finished[slot], *memory[slot].values()), {}
            for position in range(turn.before, len(tokens)):
                if rules.owns(call, position):
                    place = bisect_left(owned, position) if rules.place is None else rules.place(call, position)
                    memory[slot][place] = tokens[position]
            told = rules.turn(turn)
            places = rules.read(told, bisect_left(owned, told.before + told.new))
            for row in range(turn.new):
                visible = list(finished[slot])
                for i in range(places):
                    position = owned[i] if i < len(owned) else most
                    if rules.masked_as is not None:
                        position = rules.masked_as(told, i, places)
                    if position <= rules.prefix(told) + row:
                        visible.append(memory[slot].get(i, UNWRITTEN))
                seen[number, rows.start + row, rank] = tuple(visible)
    return seen


def mistakes(case: ServingCase) -> Iterator[tuple[str, Rules]]:
    """Yield usual mistakes of stores: in words that follow "as if", and their rules. Public ones are named."""
    if case.replicated:
        words = "keys that every rank keeps were given the owners and slots of sharded ones (vllm-project/vllm#57260)"
        own = Rules(owns=_sharded, place=_local_place)
        yield words, own
        yield words, replace(own, read=lambda turn, owned: turn.before + turn.new, masked_as=lambda turn, i, read: i)
    words = "a call read the lengths of an earlier call (vllm-project/vllm#36070)"
    for earlier in (_call_before, _first_alike, _first_call):
        yield words, Rules(turn=earlier)
        yield words, Rules(read=lambda turn, owned, earlier=earlier: _owned(case, earlier(turn)))  # type: ignore[misc]
    yield "new keys were not read in their own call", Rules(read=lambda turn, owned: _owned(case, turn, turn.before))
    yield "the keys of a finished request were still read by the next one in its slot", Rules(reset=False)
    words = "the causal mask compared queries with places in the rank's shard (sgl-project/sglang#32098)"
    yield words, Rules(masked_as=lambda turn, i, read: i)
    yield words, Rules(masked_as=lambda turn, i, read: turn.before + turn.new - read + i)
    yield "a query did not see its own position", Rules(prefix=lambda turn: turn.before - 1)
    yield "a query saw the position after its own", Rules(prefix=lambda turn: turn.before + 1)
    yield "there were no causal mask", Rules(masked_as=lambda turn, i, read: 0)
    words = "the prefix were the length less new tokens that are padded{} (sgl-project/sglang#23415)"
    for multiple in dict.fromkeys((case.world, 2 * case.world, 8, 16)):
        yield words.format(", no less than 0"), Rules(prefix=lambda turn, m=multiple: max(0, _padded(turn, m)))  # type: ignore[misc]
        yield words.format(""), Rules(prefix=lambda turn, m=multiple: _padded(turn, m))  # type: ignore[misc]
    yield "queries began at position 0 in each call", Rules(prefix=lambda turn: 0)
    if case.world > 1 and not case.replicated:
        words = "position p belonged to rank ((p - 1) // block) % ranks, a negative modulo (NVIDIA/TensorRT-LLM#17795)"
        yield words, Rules(owns=lambda call, p: (p - 1) // call.block % call.world == call.rank)
        yield "position p belonged to rank p % ranks", Rules(owns=lambda call, p: p % call.world == call.rank)
        yield "every rank kept every key", Rules(owns=lambda call, p: True)
        for shift in range(1, case.world):
            owns = lambda call, p, shift=shift: call.owns(p, (call.rank + shift) % call.world)  # noqa: E731
            yield f"rank r kept the keys of rank r + {shift}, modulo the ranks", Rules(owns=owns)
        yield "a key were written to place p, as if its rank had all", Rules(place=lambda call, p: p)
        yield "a key were written to place p // ranks, whatever the block", Rules(place=lambda call, p: p // call.world)
        words = "every rank had a key for each {} of the length"
        yield words.format("begun turn"), Rules(read=lambda turn, owned: -(-(turn.before + turn.new) // case.world))
        yield words.format("whole turn"), Rules(read=lambda turn, owned: (turn.before + turn.new) // case.world)
    yield "nothing were wrong", Rules()


def _sharded(call: Call, position: int) -> bool:
    return position // call.block % call.world == call.rank


def _local_place(call: Call, position: int) -> int:
    return position // (call.block * call.world) * call.block + position % call.block


def _owned(case: ServingCase, turn: Turn, length: int | None = None) -> int:
    call = turn.calls[turn.number]
    return sum(call.owns(p) for p in range(turn.before + turn.new if length is None else length))


def _padded(turn: Turn, multiple: int) -> int:
    return turn.before + turn.new + -turn.new // multiple * multiple


def _call_before(turn: Turn) -> Turn:
    """The latest earlier call in which the slot had new tokens."""
    numbers = [n for n in range(turn.number) if turn.calls[n].new[turn.slot]]
    return turn._replace(number=numbers[-1]) if numbers else turn


def _first_alike(turn: Turn) -> Turn:
    """The first call with as many new tokens in each slot, as a graph is captured for such."""
    return turn._replace(number=next(n for n, call in enumerate(turn.calls) if call.new == turn.calls[turn.number].new))


def _first_call(turn: Turn) -> Turn:
    """The first call in which the slot had new tokens."""
    return turn._replace(number=next(n for n, call in enumerate(turn.calls) if call.new[turn.slot]))
