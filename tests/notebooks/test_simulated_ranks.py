"""What the notebooks on rounding share: errors are those of simulated ranks, and an entry beyond its bound shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simulated_ranks

from reference.exact import QUANTITIES

SHORT = replace(simulated_ranks.PLAIN, tokens=16, heads=1, kv_heads=1, head_dim=4)


def test_errors_are_within_their_bounds() -> None:
    found = simulated_ranks.errors(SHORT)
    assert set(found) == set(QUANTITIES)
    assert all(0 < error <= bound and 0 < ratio <= 1 for error, bound, ratio in found.values())


def test_an_entry_beyond_its_bound_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, expected = simulated_ranks.results(SHORT)
    seen["dk"][0, 3, 0, 1] += 2 * expected.bound["dk"][0, 3, 0, 1]
    monkeypatch.setattr(simulated_ranks, "results", lambda case: (seen, expected))
    with pytest.raises(AssertionError, match="dk: a bound does not hold"):
        simulated_ranks.errors(SHORT)
