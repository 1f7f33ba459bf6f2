"""Errors that the notebooks on rounding show are those of simulated ranks, and an entry beyond its bound shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simulated_ranks

from reference.exact import QUANTITIES


def test_errors_are_within_their_bounds_or_show(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(simulated_ranks.PLAIN, tokens=16, heads=1, kv_heads=1, head_dim=4)
    found = simulated_ranks.errors(short)
    assert set(found) == set(QUANTITIES)
    assert all(0 < error <= bound and 0 < ratio <= 1 for error, bound, ratio in found.values())
    seen, expected = simulated_ranks.results(short)
    seen["dk"][0, 3, 0, 1] += 2 * expected.bound["dk"][0, 3, 0, 1]
    monkeypatch.setattr(simulated_ranks, "results", lambda case: (seen, expected))
    with pytest.raises(AssertionError, match="dk: a bound does not hold"):
        simulated_ranks.errors(short)
