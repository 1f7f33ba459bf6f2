"""Bounds that promise nothing are infinite, never NaN; what has one may be anything, and nothing else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from reference import Pattern, bounds
from reference.fast_oracle import QUANTITIES, evaluate
from reference.roundoff import Arithmetic, Counts
from tests.reference.test_bounds import PATTERNS, D, N, Scores, cut_in_blocks, inputs_of, problem, small
from verification.check.expectation import expect

# Scores so large that the softmax of fp32 is another one: what its backward makes of that is anything.
NOTHING_KNOWN: dict[str, Any] = {"values": "huge", "score_scale": 1024.0, "scale": 1024.0, "head_dim": 4, "seed": 1}
CAUSAL, ARITHMETIC = PATTERNS["causal"], Arithmetic.of("float32", "math", D, D**-0.5, Counts(N, N))


@pytest.mark.parametrize("pattern", PATTERNS.values())
def test_overflowing_bounds_are_infinite_on_seen_rows(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, unknown = (small(pattern=pattern, **changes) for changes in ({"score_scale": 300.0}, NOTHING_KNOWN))
    whole = [expect(usual), found := expect(unknown)]
    cut_in_blocks(monkeypatch)
    for blocks, wanted in zip((expect(usual), expect(unknown)), whole, strict=True):
        for name in QUANTITIES:
            np.testing.assert_allclose(blocks.bound[name], wanted.bound[name], rtol=1e-3)
    for name, bound in found.bound.items():
        dead = found.dead_keys if name in ("dk", "dv") else found.dead_rows
        mask = dead[None] if name == "lse" else dead.T[None, :, :, None]
        assert not np.isnan(bound).any() and np.isinf(bound).any(), name
        assert (np.where(mask, bound, 0.0) == 0.0).all(), name


def test_unknown_rows_leave_other_bounds_alone() -> None:
    tensors = problem("float32", 1.0)
    usual = evaluate(inputs_of(tensors, CAUSAL), ARITHMETIC)
    tensors[0][:, 5] *= 1e12
    found = evaluate(inputs_of(tensors, CAUSAL), ARITHMETIC)
    for name in ("out", "lse", "dq"):
        axis = 2 if name == "lse" else 1
        infinite = np.moveaxis(np.isinf(found.bound[name]), axis, 0).reshape(N, -1)
        assert np.flatnonzero(infinite.any(1)).tolist() == [5] and infinite[5].all(), name
        kept, wanted = (np.delete(x.bound[name], 5, axis) for x in (found, usual))
        np.testing.assert_allclose(kept, wanted, rtol=2e-3)  # e^x - 1 or x, by the largest of all
    for name in ("dk", "dv"):  # the keys that row 5 sees, and they alone
        assert np.flatnonzero(np.isinf(found.bound[name]).any((0, 2, 3))).tolist() == [0, 1, 2, 3, 4, 5], name


def test_bound_of_lse_outlasts_bound_of_weights() -> None:
    """An error of 2000 in one score moves the lse by as much: a bound of 600 would refuse what is right."""
    found = evaluate(inputs_of(problem("float32", 1.0)[:4], CAUSAL), replace(ARITHMETIC, u_exp=2000.0))
    assert (found.bound["lse"] >= 2000.0).all() and (found.bound["out"] == np.inf).all()


def test_softcap_and_huge_sinks_never_make_bounds_nan() -> None:
    tensors = problem("float32", 1.0)
    tensors[0] *= 1e12
    for softcap in (1e-300, 2.0):
        found = evaluate(inputs_of(tensors, CAUSAL, scores=Scores(softcap)), ARITHMETIC)
        assert all(np.isfinite(bound).all() for bound in found.bound.values())
        assert (found.bound["lse"] < 8 * softcap + 1e-3).all()  # at most 2 C for a score, whose softmax may be any
    for size in (1e12, 1e300):
        sinks = torch.tensor([size, -size, -torch.inf, 0.0], dtype=torch.float64)
        found = evaluate(
            inputs_of(problem("float32", 1.0), PATTERNS["dilated"], scores=Scores(None, sinks)), ARITHMETIC
        )
        assert np.isinf(found.bound["dsinks"]).tolist() == [True, True, False, False]


@pytest.mark.parametrize("made", (np.array, torch.tensor))
def test_infinite_weight_times_zero_is_infinite(made: Any) -> None:
    weights, sizes = made([[np.inf, 1.0], [2.0, 0.0]]), made([[0.0, 1.0], [3.0, 0.0]])
    assert bounds.product(weights, sizes).tolist() == [[np.inf, np.inf], [0.0, 2.0]]


@pytest.mark.parametrize("name", QUANTITIES)
def test_nan_bounds_raise(name: str) -> None:
    right = expect(small())
    with pytest.raises(ValueError, match=f"the bound of {name} is NaN"):
        replace(right, bound=right.bound | {name: np.where(right.bound[name] < 0, 0, np.nan)})
