"""Errors that the notebooks on rounding show are of results within their bounds: an entry beyond its own is found."""

from dataclasses import replace

import pytest

from notebooks import simulated_ranks
from reference import Branch, Pattern


def test_entries_beyond_bounds_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(simulated_ranks.PLAIN, tokens=16, heads=1, kv_heads=1, head_dim=4)
    assert all(0 < error <= bound and 0 < ratio <= 1 for error, bound, ratio in simulated_ranks.errors(short).values())
    nothing = replace(short, pattern=Pattern((Branch(3, 5, 4),)))  # log-sum-exps are -inf
    assert simulated_ranks.errors(nothing) == dict.fromkeys(("out", "lse", "dq", "dk", "dv"), (0, 0, 0))
    seen, expected = simulated_ranks.results(short)
    seen["dk"][0, 3, 0, 1] += 2 * expected.bound["dk"][0, 3, 0, 1]
    monkeypatch.setattr(simulated_ranks, "results", lambda case: (seen, expected))
    with pytest.raises(AssertionError, match="dk: a bound does not hold"):
        simulated_ranks.errors(short)
