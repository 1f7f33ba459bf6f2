"""Patterns to draw, with every field of every kind."""

from hypothesis import strategies as st

from reference.pattern import Branch, Pattern


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
def patterns(draw: st.DrawFn, heads: int, packed: bool = False) -> Pattern:
    """packed: it may have documents, of any number of tokens."""
    parts = draw(st.lists(branches(heads), min_size=1, max_size=3))
    return Pattern(tuple(parts), draw(st.booleans()), draw(st.none() | documents()) if packed else None)
