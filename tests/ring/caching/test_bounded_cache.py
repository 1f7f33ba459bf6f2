"""`BoundedCache` keeps what a list of entries would, of which the first are dropped, and frees what it forgets."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.caching.bounded_cache import BoundedCache


class Thing:
    """May be a key, and can be referred to weakly."""


Step = tuple[int | None, bool, int]  # number of a known key or a new one, by `get_or_make` or by `keep`, bytes
STEPS = st.lists(st.tuples(st.none() | st.integers(0, 7), st.booleans(), st.integers(0, 60)), max_size=30)


@given(st.integers(1, 8), st.none() | st.integers(1, 100), STEPS, st.integers(0, 40))
def test_evicts_oldest_first(most: int, most_bytes: int | None, steps: list[Step], cleared: int) -> None:
    kept: BoundedCache[Thing, Thing] = BoundedCache(most, most_bytes)
    wanted: list[tuple[Thing, Thing, int]] = []
    for at, (number, once, nbytes) in enumerate(steps):
        if at == cleared:
            kept.clear()
            wanted.clear()
        known = [key for key, *_ in wanted]
        key = known[number % len(known)] if known and number is not None else Thing()
        entry = key, Thing(), nbytes
        place = known.index(key) if key in known else len(wanted)
        if once:
            before = wanted[place] if place < len(wanted) else entry
            assert kept.get_or_make(key, iter(entry[1:2]).__next__, {entry[1]: nbytes}.__getitem__) is before[1]
            entry = before
        else:
            assert kept.put(*entry) is entry[1]
        wanted[place : place + 1] = [entry]
        heaviest = 10**6 if most_bytes is None else most_bytes
        while len(wanted) > most or (len(wanted) > 1 and sum(nbytes for *_, nbytes in wanted) > heaviest):
            del wanted[0]
        assert list(kept.items()) == [(key, value) for key, value, _ in wanted]


@pytest.mark.parametrize("most_bytes", (None, 100))
def test_evicted_values_are_freed(most_bytes: int | None) -> None:
    kept: BoundedCache[Any, Any] = BoundedCache(2, most_bytes)
    seen = []
    for _ in range(5):
        key, value = Thing(), Thing()
        seen.append((weakref.ref(key), weakref.ref(value)))
        kept.put(key, value, 1)
    del key, value
    gc.collect()
    assert [[one() is not None for one in refs] for refs in seen] == [[False, False]] * 3 + [[True, True]] * 2
    kept.clear()
    assert all(one() is None for refs in seen for one in refs)


def test_falsy_values_are_cached_and_failures_are_not() -> None:
    kept: BoundedCache[str, float] = BoundedCache(10)
    assert [kept.get_or_make("a", lambda: 0), kept.get_or_make("a", lambda: 1)] == [0, 0] and kept.get("b") is None
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            kept.get_or_make("b", lambda: 1 / 0)
    assert list(kept) == ["a"] and kept.get_or_make("b", lambda: 1.0) == 1.0


def test_threads_share_one_value() -> None:
    kept: BoundedCache[int, str] = BoundedCache(4)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda key: kept.get_or_make(key % 7, lambda: str(key % 7)), range(2000)))
    assert found == [str(key % 7) for key in range(2000)] and len(kept) <= 4
