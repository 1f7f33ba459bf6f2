"""The laws of what a process keeps of a call find planted memories, and hold nothing against what is sound."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from tests.support.planted_isolation import (
    forgets_the_pattern,
    keeps_results,
    seeds_random_numbers,
    sets_the_default_dtype,
)
from verification.check.laws.isolation import check_left, check_neighbours, neighbour
from verification.failures import WrongResult
from verification.run.backends import GlooBackend, SimBackend

pytestmark = pytest.mark.ranks

BACKENDS = (SimBackend, GlooBackend)


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    one = request.param()
    one.start(2)
    yield one
    one.close()


def broken(kind: type[Any], prepare: Callable[[], None], check: Callable[..., float], how: dict[str, Any]) -> str:
    backend = kind(10.0, prepare)
    backend.start(2)
    try:
        with pytest.raises(WrongResult) as caught:
            check(backend, plain(2), how)
    finally:
        backend.close()
    return str(caught.value)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather"))
def test_a_sound_call_leaves_nothing(backend: Any, exchange: str) -> None:
    assert check_left(backend, plain(2, exchange=exchange, lse="differentiated"), {}) == 0.0
    assert 0 < check_neighbours(backend, plain(2, exchange=exchange), {"causal": True}) < 1


@pytest.mark.parametrize("kind", BACKENDS)
def test_another_pattern_s_plan_is_found(kind: type[Any]) -> None:
    assert "out is" in broken(kind, forgets_the_pattern, check_neighbours, {"causal": True})


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (keeps_results, "in memory when all results are dropped: q, k, v, out"),
        (seeds_random_numbers, "changed by the call: torch's random numbers"),
        (sets_the_default_dtype, "changed by the call: the default dtype"),
    ],
)
def test_what_a_call_leaves_is_named(kind: type[Any], prepare: Callable[[], None], said: str) -> None:
    assert f"on index 0 of the group, {said}" in broken(kind, prepare, check_left, {})


def test_one_thing_is_changed() -> None:
    case = plain(2, pattern=Pattern((Branch(4, 2, 1), Branch(8, 1, 0)), causal=True), heads=4, kv_heads=4)
    first, second = case.pattern.branches
    assert neighbour(case, "causal", False).pattern == Pattern((first, second))
    assert neighbour(case, "twice", 1).pattern == Pattern((first, second, second), causal=True)
    assert neighbour(case, "shifted", 0).pattern == Pattern((Branch(4, 2, 0), second), causal=True)
    assert neighbour(case, "cuts", [0, 1, 12]).cuts == (0, 1, 12)
    assert neighbour(case, "kv_heads", 2).kv_heads == 2


def test_looking_at_random_numbers_draws_none_but_once() -> None:
    """Who looks, and finds all as it was, has not changed it himself."""
    from verification.check.laws.isolation import _STATE

    seen = [[look() for look in _STATE.values()] for _ in range(2)]
    assert seen[0] == seen[1]
    torch.rand(1), random.random(), np.random.random()  # noqa: NPY002 - the global generator is meant
    assert sum(a != look() for a, look in zip(seen[0], _STATE.values(), strict=True)) == 3
