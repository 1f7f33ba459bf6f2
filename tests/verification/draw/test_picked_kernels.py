"""Fused kernels take tiles of drawn Cases, in the backward and as several folds: asking for one is not enough."""

from __future__ import annotations

from typing import Any

import pytest

from ring.compute import kernels
from ring.plan.tile import Tile
from tests.support.drawing import draw_many
from verification.draw.cases import cases
from verification.run.backends import simulate
from verification.run.rank import observe

pytestmark = pytest.mark.slow

DRAWS = 400


def test_fused_kernels_take_tiles_of_drawn_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tile] = []
    backward = kernels.backward

    def watch(name: str, q: Any, k: Any, v: Any, saved: Any, tile: Tile, scale: float) -> Any:
        if name == "flash":
            taken.append(tile)
        return backward(name, q, k, v, saved, tile, scale)

    monkeypatch.setattr(kernels, "backward", watch)
    fused = folded = 0
    for case in draw_many(cases(2), DRAWS):
        taken.clear()
        found = simulate(observe, case, (None, False))
        assert isinstance(found, list), found
        fused += bool(taken)
        folded += any(tile.query_rows.folds > 1 for tile in taken)
    assert fused >= DRAWS // 20, fused
    assert folded >= 2, folded
