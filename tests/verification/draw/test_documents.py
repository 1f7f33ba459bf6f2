"""Drawn documents add up, reach every kind, end where shards do, and shrink to none; windows fit a branch."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from reference.pattern import Branch
from tests.support.plain_case import plain
from verification.draw.documents import MOST_FUSED, WAYS, Documents, documents_of, ends_of, fused_documents, window_of

QUIET = settings(max_examples=400, database=None, deadline=None, suppress_health_check=(HealthCheck.too_slow,))
SHRINKING = settings(QUIET, phases=(Phase.generate, Phase.shrink), max_examples=3000)

drawn = st.composite(documents_of)
fused = st.composite(fused_documents)


@given(st.data(), st.integers(1, 300))
@QUIET
def test_they_add_up(data: st.DataObject, tokens: int) -> None:
    found = data.draw(drawn(tokens, (tokens // 3, tokens // 2)))
    assert found is None or (sum(found) == tokens and min(found) >= 0)


@given(st.data(), st.integers(1, MOST_FUSED), st.integers(1, 8))
@QUIET
def test_those_for_fused_kernels_are_of_about_so_many_tokens(data: st.DataObject, tokens: int, ranks: int) -> None:
    found: Documents = data.draw(fused(tokens, ranks))
    assert found is None or (min(found) >= 0 and 0 < sum(found) <= MOST_FUSED)


def test_they_reach_every_kind() -> None:
    reached = set[Documents]()
    for numbers in product(WAYS, range(1000), (0, 5, 6, 7)):
        draw: Any = partial(lambda left, strategy: next(left), iter(numbers))
        reached.add(documents_of(draw, 32, (16,)))
    cut = {(16, 16), (15, 17), (17, 15), (16, 1, 15), (16, 0, 0, 16)}
    assert cut | {(32,), (5, 27), (0, 32), (32, 0), (8, 8, 8, 8), (9, 9, 9, 5), (1, 1, 30), (2, 0, 1, 3, 26)} <= reached


def test_none_is_the_simplest_and_one_document_the_next() -> None:
    assert find(drawn(32, (16,)), lambda found: True, settings=SHRINKING) is None
    assert find(drawn(32, (16,)), lambda found: found is not None, settings=SHRINKING) == (32,)
    few = find(drawn(32, (16,)), lambda found: len(found or ()) > 2, settings=SHRINKING)
    assert few is not None and len(few) == 3


def test_ends_are_those_of_the_shards() -> None:
    assert ends_of(plain(4, tokens=32).shards()) == [8, 16, 24]
    assert len(ends_of(plain(4, tokens=32, order="striped").shards())) <= 5, "a few of many"


def test_windows_of_every_size_are_reached() -> None:
    windows = {window_of(Branch(16, 3), number, 32, 8) for number in range(2**12)}
    assert {0, 1, 2, 3, 6, 7, 8, 9, 13, 14, 15, 16, 17, 32, 33} <= windows and max(windows) <= 35
