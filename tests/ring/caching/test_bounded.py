"""What `Bounded` keeps, and what it forgets first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from reference.pattern import Pattern
from ring.caching.bounded import Bounded
from ring.layout import Layout
from ring.plan import plan
from ring.plan.plan import plan_of


def test_the_oldest_is_forgotten() -> None:
    kept: Bounded[int, str] = Bounded(3)
    for number in range(5):
        assert kept.keep(number, str(number)) == str(number)
    assert list(kept) == [2, 3, 4] and kept.get(1) is None


def test_the_oldest_are_forgotten_until_the_rest_is_light() -> None:
    kept: Bounded[str, int] = Bounded(10, most_bytes=100)
    for key, nbytes in (("a", 40), ("b", 30), ("c", 30)):
        kept.keep(key, 0, nbytes)
    assert list(kept) == ["a", "b", "c"]
    kept.keep("d", 0, 41)
    assert list(kept) == ["c", "d"]
    kept.keep("heavy", 0, 1000)  # the newest stays
    assert list(kept) == ["heavy"]
    kept.keep("e", 0, 100)
    assert list(kept) == ["e"]
    kept.clear()
    kept.keep("f", 0, 100)
    assert list(kept) == ["f"]


def test_what_is_there_is_not_made_again() -> None:
    kept: Bounded[str, int] = Bounded(10, most_bytes=100)
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [kept.once("a", make), kept.once("a", make)] == [0, 0] and made == [0]
    assert kept.once("b", make, lambda value: 60 * value) == 1  # 0 is something: it is there
    assert kept.once("c", make, lambda value: 60 * value) == 2 and list(kept) == ["c"]
    assert kept.once("a", make) == 3


def test_what_cannot_be_made_is_not_kept() -> None:
    kept: Bounded[str, float] = Bounded(10)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            kept.once("a", lambda: 1 / 0)
    assert not kept and kept.once("a", lambda: 1.0) == 1.0


def test_threads_that_ask_at_once_all_get_one() -> None:
    kept: Bounded[int, str] = Bounded(4)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda key: kept.once(key % 7, lambda: str(key % 7)), range(2000)))
    assert found == [str(key % 7) for key in range(2000)] and len(kept) <= 4


def test_plans_of_ever_other_documents_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.striped(600, 2)
    lengths = [(1, 2, 3, 4, 590 - i, i) for i in range(40)]
    one = plan_of(Pattern.dense(True, lengths[0]), layout, 0, 1, 1, "direct", 64)
    assert one.nbytes > 1000
    kept: Bounded[object, plan.Plan] = Bounded(128, most_bytes=5 * one.nbytes)
    monkeypatch.setattr(plan, "_plans", kept)
    sizes = []
    for documents in lengths:
        found = plan_of(Pattern.dense(True, documents), layout, 0, 1, 1, "direct", 64)
        assert plan_of(Pattern.dense(True, documents), layout, 0, 1, 1, "direct", 64) is found
        sizes.append(len(kept))
        assert sum(x.nbytes for x in kept.values()) <= 5 * one.nbytes
    assert max(sizes) < 10 and all(b <= a + 1 for a, b in pairwise(sizes))
