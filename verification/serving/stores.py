"""Rules by which a server keeps and reads keys, right ones and usual mistakes; and the keys that a query then sees.

On each rank a slot has numbered places. A key is written to a place; a query sees the places that are read, as far as
the mask lets it. A place that was never written holds zeros.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from verification.serving.serving_case import Call, ServingCase

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

    def captured(self) -> Turn:
        """The first call with as many new tokens in each slot, as a graph is captured for such."""
        alike = (n for n, call in enumerate(self.calls) if call.new == self.calls[self.number].new)
        return self._replace(number=next(alike))

    def previous(self) -> Turn:
        """The latest earlier call in which the slot had new tokens."""
        numbers = [n for n in range(self.number) if self.calls[n].new[self.slot]]
        return self._replace(number=numbers[-1]) if numbers else self


@dataclass(frozen=True)
class Rules:
    """Rules of a server; by default the right ones."""

    owns: Callable[[Call, int], bool] = Call.owns  # (call, position): True if the call's rank keeps it
    turn: Callable[[Turn], Turn] = lambda turn: turn  # whose lengths are read
    prefix: Callable[[Turn], int] = lambda turn: turn.before  # position of the first new token, as the mask takes it
    # (turn, keys of its request on the rank) -> number of places that are read
    read: Callable[[Turn, int], int] = lambda turn, owned: owned
    # (turn, place, places read) -> position that the mask takes for a place; None: the right one
    masked_as: Callable[[Turn, int, int], int] | None = None


def seen_by(case: ServingCase, rules: Rules) -> dict[tuple[int, int, int], Seen]:
    """Return the keys that each query sees on each rank, by call, row and rank."""
    seen, most = dict[tuple[int, int, int], Seen](), 2 * case.tokens
    for rank in case.ranks:
        calls, memory = case.calls_of(rank), [dict[int, int]() for _ in case.calls[0]]
        owned = [p for p in range(most) if rules.owns(calls[0], p)]
        for number, slot, rows, tokens in case.requests():
            turn, call = Turn(calls, number, slot), calls[number]
            for position in range(turn.before, len(tokens)):
                if rules.owns(call, position):
                    memory[slot][bisect_left(owned, position)] = tokens[position]
            told = rules.turn(turn)
            places = range(rules.read(told, bisect_left(owned, told.before + told.new)))
            masked = [*owned, *(most for _ in places)]
            if rules.masked_as is not None:
                masked = [rules.masked_as(told, place, len(places)) for place in places]
            for row in range(turn.new):
                visible = (place for place in places if masked[place] <= rules.prefix(told) + row)
                seen[number, rows.start + row, rank] = tuple(memory[slot].get(place, UNWRITTEN) for place in visible)
    return seen


def mistakes(case: ServingCase) -> Iterator[tuple[str, Rules]]:
    """Yield usual mistakes of stores: in words that follow "as if", and their rules. Public ones are named."""
    if case.replicated:
        words = "keys that every rank keeps were given the owners and slots of sharded ones (vllm-project/vllm#57260)"
        own = Rules(owns=lambda call, p: p // call.block % call.world == call.rank)
        yield words, own
        yield words, replace(own, read=lambda turn, owned: turn.before + turn.new, masked_as=lambda turn, i, read: i)
    words = "a call read the lengths of an earlier call (vllm-project/vllm#36070)"
    for earlier in (Turn.previous, Turn.captured):
        yield words, Rules(turn=earlier)
        yield words, Rules(read=partial(_owned_at, earlier))
    words = "the causal mask compared queries with places in the rank's shard (sgl-project/sglang#32098)"
    yield words, Rules(masked_as=lambda turn, i, read: i)
    yield words, Rules(masked_as=lambda turn, i, read: turn.before + turn.new - read + i)
    yield "a query did not see its own position", Rules(prefix=lambda turn: turn.before - 1)
    yield "there were no causal mask", Rules(masked_as=lambda turn, i, read: 0)
    words = "the prefix were the length less new tokens that are padded{} (sgl-project/sglang#23415)"
    for multiple in (case.world, 2 * case.world):
        yield words.format(", no less than 0"), Rules(prefix=partial(_padded, multiple, 0))
        yield words.format(""), Rules(prefix=partial(_padded, multiple, -case.tokens))
    yield "queries began at position 0 in each call", Rules(prefix=lambda turn: 0)
    if case.world > 1 and not case.replicated:
        words = "position p belonged to rank ((p - 1) // block) % ranks, a negative modulo (NVIDIA/TensorRT-LLM#17795)"
        yield words, Rules(owns=lambda call, p: (p - 1) // call.block % call.world == call.rank)
        yield "position p belonged to rank p % ranks", Rules(owns=lambda call, p: p % call.world == call.rank)
        yield (
            "rank r kept the keys of rank r + 1",
            Rules(owns=lambda call, p: call.owns(p, (call.rank + 1) % call.world)),
        )
    yield "nothing were wrong", Rules()


def _owned_at(earlier: Callable[[Turn], Turn], turn: Turn, owned: int) -> int:
    return sum(turn.calls[turn.number].owns(position) for position in range(earlier(turn).before + earlier(turn).new))


def _padded(multiple: int, least: int, turn: Turn) -> int:
    return max(least, turn.before + turn.new + -turn.new // multiple * multiple)
