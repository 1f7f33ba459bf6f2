"""Caches that forget too little, or keep what nobody counts, are told; sound ones are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from ring import attention, compiled
from ring.caching.bounded import Bounded
from ring.comm import calls
from ring.comm.transport import SoloTransport
from ring.layout import Layout
from ring.plan import plan, ranges
from tests.support.plain_case import plain
from verification.check.laws import what_is_kept
from verification.run.caches import bounded_of, recent_of
from verification.run.weights import weighed, weight

Plant = Callable[[pytest.MonkeyPatch], None]


def told() -> list[str]:
    return [word for seed in range(3) for word in what_is_kept.wrong(SoloTransport(), plain(1, seed=seed))]


def test_it_holds() -> None:
    assert told() == []


def _keeps(real: Any) -> Any:
    kept: list[Any] = []

    def act(*args: Any, **settings: Any) -> Any:
        kept.append(args)
        return real(*args, **settings)

    return act


def _never_heavy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bounded, "_is_heavy", lambda self: False)


def _keeps_bytes(patch: pytest.MonkeyPatch) -> None:
    class Never(dict[Any, int]):
        def pop(self, *_: Any) -> int:
            return 0

    real = Bounded.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._bytes = Never()

    patch.setattr(Bounded, "__init__", init)


def _plans_in(kept: Bounded[Any, Any]) -> Plant:
    return lambda patch: patch.setattr(plan, "_plans", kept)


PLANTED: dict[str, tuple[Plant, str]] = {
    "as many plans as come": (_plans_in(Bounded(10**6, 2**28)), "ring.plan.plan keeps 513"),
    "plans of any size": (_plans_in(Bounded(128)), "ring.plan.plan keeps entries of"),
    "bytes do not count": (_never_heavy, "must keep"),
    "keys are kept beside their bytes": (_keeps_bytes, "must keep"),
    "calls go on being known": (lambda patch: patch.setattr(calls, "KEPT", 10**6), "calls the last"),
    "texts without end": (
        lambda patch: patch.setattr(compiled, "pattern_of", cache(compiled.pattern_of.__wrapped__)), "may keep None",
    ),
    "calls are listed": (lambda patch: patch.setattr(attention, "agree", _keeps(attention.agree)), "tensors"),
    "layouts are listed": (lambda patch: patch.setattr(plan, "ranges_of", _keeps(ranges.ranges_of)), "layouts, pat"),
    "a plan weighs nothing": (lambda patch: patch.setattr(plan.Plan, "nbytes", 0), "a Plan of"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_kept_too_long_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, said = PLANTED[name]
    plant(monkeypatch)
    found = told()
    assert any(said in word for word in found), found


def test_caches_are_found_by_name() -> None:
    assert "ring.plan.plan" in {name for name, _ in bounded_of(("ring",))}
    assert "ring.layout.numbered_layout" in {name for name, _ in recent_of(("ring",))}


def test_arrays_within_objects_are_weighed() -> None:
    found = ranges.ranges_of(plain(1).pattern, Layout.contiguous(12, 1), 1, 1)
    assert weight((found, [found])) == weight(found) > 0
    with weighed() as light:
        for said in (weight([bytes(1)]), 8192):
            Bounded[int, Any](1).keep(0, [_array()], said)
    assert light == ["a list of 8192 bytes is kept as one of 0, must be about as many"]


def _array() -> Any:
    import numpy as np

    return np.zeros(1024, np.int64)
