"""Patterns to draw, with every field of every kind."""

from dataclasses import replace

from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from reference.slices import Slice, meet


@st.composite
def slices(draw: st.DrawFn, longest: int) -> tuple[Slice, ...]:
    """Disjoint ones, in rectangles of any place that overlap, within so many tokens."""
    place, found = st.integers(0, longest), list[Slice]()
    for _ in range(draw(st.integers(0, 6))):
        (q0, q1), (k0, k1) = (sorted((draw(place), draw(place))) for _ in range(2))
        low, high = (draw(st.none() | st.integers(-longest, longest)) for _ in range(2))
        one = Slice(q0, draw(st.sampled_from((q1, None))), k0, draw(st.sampled_from((k1, None))), low, high)
        if not any(meet(one, other) for other in found):
            found.append(one)
    return tuple(found)


@st.composite
def branches(draw: st.DrawFn, heads: int, longest: int = 20) -> Branch:
    rate = draw(st.integers(1, 5))
    start = draw(st.integers(0, heads - 1))
    served = draw(st.none() | st.integers(start + 1, heads).map(lambda stop: range(start, stop)))
    count = heads if served is None else len(served)
    one = st.integers(0, rate - 1)
    offset = draw(one | st.lists(one, min_size=count, max_size=count).map(tuple))
    window = draw(st.none() | st.integers(0, 4) | st.integers(0, 12))
    return Branch(draw(st.none() | st.integers(1, longest)), rate, offset, served, window)


def documents(most: int = 7) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.sampled_from((0, 1, 2, 3, 5, 7)), max_size=most).map(tuple)


@st.composite
def patterns(draw: st.DrawFn, heads: int, packed: bool = False, sliced: int | None = None) -> Pattern:
    """packed: it may have documents, of any number of tokens. sliced: tokens within which branches may have slices."""
    parts = draw(st.lists(branches(heads), min_size=1, max_size=3))
    if sliced is not None:
        parts = [replace(branch, slices=draw(st.none() | slices(sliced))) for branch in parts]
    return Pattern(tuple(parts), draw(st.booleans()), draw(st.none() | documents()) if packed else None)
