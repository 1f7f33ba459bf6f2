"""Operators of graphs are given copies that nobody holds when the backward comes: what they need, they must keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reference.pattern import Pattern
from ring import compiled
from ring.comm.transport import SoloTransport
from tests.support.plain_case import plain
from verification.run.as_compiled import unlike

PACKED = Pattern.dense(causal=True, documents=(5, 7))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pattern", (PACKED, Pattern.longnet([4], [2], 2)))
def test_copies_do_as_well(seed: int, pattern: Pattern) -> None:
    assert unlike(SoloTransport(), plain(1, seed=seed, pattern=pattern, heads=2, kv_heads=2)) == []


def _not_kept(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Found by its number, and not kept for the backward."""
    return lambda patch: patch.setattr(compiled, name, getattr(compiled, name).__wrapped__)


@pytest.mark.parametrize("name", ("numbered_layout", "_packed_pattern"))
def test_what_is_not_kept_for_the_backward_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _not_kept(name)(monkeypatch)
    with pytest.raises(ValueError, match="must be the number of one that is there"):
        unlike(SoloTransport(), plain(1, pattern=PACKED))


def test_other_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = compiled.pattern_of
    monkeypatch.setattr(compiled, "pattern_of", lambda text: real(text.replace("causal", "all")))
    assert "out" in unlike(SoloTransport(), plain(1, pattern=Pattern.dense(causal=True)))
