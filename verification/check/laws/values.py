"""Patterns and layouts are values, and counters are their owner's: copies are equal, what a caller does with what it
was given changes nothing, and nothing depends on how long an order is or how far on a position lies.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from reference import fields
from reference.pattern import Pattern, multiplicity, numbered_pattern
from ring import ring_attention
from ring.comm.transport import SoloTransport, Transport
from ring.layout import Layout, numbered_layout
from verification.case import Case
from verification.check.laws import kernel_choice, pattern_values
from verification.check.laws.law import How, Law, nothing_wrong
from verification.draw.cases import cases
from verification.run.backends import Backend
from verification.run.layouts import layout_of

FAR = 2**32  # segments: 32 bits number the next one 0
LONG = (1001, 1300)  # tokens of an order that NumPy prints without its middle


# --- layouts ----------------------------------------------------------------------------------------------------------


def _copies(layout: Layout) -> Iterator[str]:
    for way, made in (("copy", copy.deepcopy(layout)), ("pickle", pickle.loads(pickle.dumps(layout)))):
        if made != layout or hash(made) != hash(layout):
            yield f"a layout and what {way} makes of it must be equal, got {made} of {layout}"
        elif made.number == layout.number or numbered_layout(made.number) is not made:
            yield f"what {way} makes of a layout must have a number of its own, by which it is found"


def _changed_by_their_reader(case: Case, layout: Layout) -> Iterator[str]:
    for rank, wanted in enumerate(case.shards().positions):
        layout.positions(rank).add_(1)
        if not np.array_equal(layout.positions(rank).numpy(), wanted):
            yield f"positions({rank}) are others once a caller has changed those that it was given"


def _long_orders(case: Case, how: How) -> Iterator[str]:
    """Two that differ in two neighbours, anywhere, are two layouts."""
    tokens, at, p = how["tokens"], how["swapped"], len(case.ranks)
    order = np.random.default_rng(case.seed).permutation(tokens)
    cuts = [rank * tokens // p for rank in range(p + 1)]
    one = Layout.from_cuts(order, cuts)
    order[[at, at + 1]] = order[[at + 1, at]]
    other = Layout.from_cuts(order, cuts)
    if one == other:
        yield f"two orders of {tokens} tokens that differ at {at} and {at + 1} are one layout"
    held = torch.cat([other.positions(rank) for rank in range(p)]).numpy()
    if not np.array_equal(held, order):
        yield f"a layout does not hold the order that it was made of, of {tokens} tokens"


# --- patterns ---------------------------------------------------------------------------------------------------------


def _packed(pattern: Pattern, tokens: int) -> Iterator[str]:
    """Documents are part of a pattern's value: the lengths, in their order."""
    lengths = pattern.documents or (1, tokens - 1, 0)
    given = replace(pattern, documents=lengths)
    alike: dict[str, Any] = {"a list": list(lengths), "a tuple": tuple(lengths)}
    made = {f"{way} of lengths": replace(pattern, documents=same) for way, same in alike.items()}
    made |= {"copy": copy.deepcopy(given), "pickle": pickle.loads(pickle.dumps(given))}
    for way, one in made.items():
        if one != given or hash(one) != hash(given):
            yield f"patterns of equal documents must be equal, got by {way} {one} of {given}"
        if one.number == given.number or numbered_pattern(one.number) is not one:
            yield f"a pattern by {way} must have a number of its own, by which it is found"
    first, *others = lengths
    for unlike in (None, (*others, first), lengths[::-1], (0, *lengths), (*lengths, 0), (first + 1, *others)):
        if unlike != lengths and replace(pattern, documents=unlike) == given:
            yield f"patterns of the documents {lengths} and {unlike} must not be equal"


def _far_on(case: Case) -> Iterator[str]:
    """2**32 segments later everything is as it was, and segments there are no segments here; without documents, which
    end before. Where a window is all that ends what a query sees, 2**32 steps of its grid later."""
    here = torch.arange(min(case.tokens, 16))
    for branch in case.pattern.branches:
        if branch.segment_length is None and (branch.window is None or branch.window >= FAR - case.tokens):
            continue  # its one segment begins at 0, and a query there sees what is here
        shift = FAR * (branch.segment_length or branch.dilation_rate)
        alone = Pattern((branch,), case.pattern.causal)
        near, far = (multiplicity(alone, x, x, case.heads) for x in (here, here + shift))
        if not torch.equal(near, far):
            yield f"{shift} positions on other pairs are seen than at 0, by {alone}"
        if multiplicity(alone, here + shift, here, case.heads).any():
            yield f"a query sees a key of another segment, or beyond its window, {shift} positions back, by {alone}"


# --- operators --------------------------------------------------------------------------------------------------------


def _operators() -> Iterator[str]:
    """What a graph says in place of objects is refused once these are gone, and before they are there."""
    x = torch.ones(1, 2, 1, 1)
    ring_attention(x, x, x, Pattern.dense(), Layout.contiguous(2, 1), group=SoloTransport())
    layout, pattern = Layout.contiguous(2, 1).number, Pattern.dense(documents=(1, 1)).number  # nobody holds these
    tries: tuple[tuple[str, Callable[[int], object], int], ...] = (
        ("prepared", lambda number: torch.ops.ring.attention(x, x, x, number), 0),
        ("layout", numbered_layout, layout),
        ("pattern", numbered_pattern, pattern),
    )
    for name, act, gone in tries:
        for number in (gone, -1, 2**62):
            try:
                act(number)
            except ValueError as error:
                if name not in str(error):
                    yield f"the number {number} of no {name} must be refused by that name, got {error}"
            else:
                yield f"the number {number} of no {name} that is there must be refused as ValueError"


# --- groups -----------------------------------------------------------------------------------------------------------


class _Stranger:
    """What a transport of one rank has, in a class of its own."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        inner = SoloTransport()
        self.calls, self.post, self.prepare, self.empty = inner.calls, inner.post, inner.prepare, inner.empty
        self.all_equal, self.all_gather = inner.all_equal, inner.all_gather


def _groups() -> Iterator[str]:
    """A transport is what has a transport's methods, whatever its class is."""
    x = torch.ones(1, 2, 1, 1)
    try:
        ring_attention(x, x, x, Pattern.dense(), Layout.contiguous(2, 1), group=_Stranger())
    except ValueError as error:
        yield f"an object with the methods of a transport must do as a group, got {error}"


# --- the law ----------------------------------------------------------------------------------------------------------


def wrong(transport: Transport, case: Case, how: How) -> list[str]:
    """Task: what is wrong, of rank 0, without messages."""
    if transport.rank:
        return []
    layout = layout_of(case)
    looked = (
        _copies(layout), _changed_by_their_reader(case, layout), _long_orders(case, how), pattern_values.patterns(case),
        _packed(case.pattern, case.tokens), _far_on(case), *kernel_choice.looked_at(case),
        _operators(), _groups(),
    )  # fmt: skip
    return [word for words in looked for word in words]


def check_values(backend: Backend, case: Case, how: How) -> float:
    return nothing_wrong(backend, wrong, case, how)


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    tokens = draw(st.integers(*LONG))
    return draw(cases(world)), {"tokens": tokens, "swapped": draw(st.integers(0, tokens - 2))}


def _premise(case: Case, how: Any) -> None:
    fields.exactly("how", how, ["tokens", "swapped"])
    fields.integer("tokens of how", how["tokens"], *LONG)
    fields.integer("swapped of how", how["swapped"], 0, how["tokens"] - 2)


PATTERNS_AND_LAYOUTS_ARE_VALUES = Law(
    "patterns and layouts are values", _draw, check_values, _premise, share=0.05, most=60
)
