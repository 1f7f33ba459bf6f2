"""Bounds that promise nothing are infinite, never NaN; what has one may be anything, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from reference import Pattern, bounds, exact
from reference.arithmetic import Arithmetic, Counts
from reference.exact import QUANTITIES, Inputs, evaluate
from tests.reference.test_bounds import MIXED, PATTERNS, D, N, problem, small
from verification.check.expectation import expect

# Scores so large that the softmax of fp32 is another one: what its backward makes of that is anything.
NOTHING_KNOWN: dict[str, Any] = {"values": "huge", "score_scale": 1024.0, "scale": 1024.0, "head_dim": 4, "seed": 1}


@pytest.mark.parametrize("pattern", [*PATTERNS.values(), MIXED])
@pytest.mark.parametrize("blocks", [False, True])
def test_bounds_that_overflow_are_infinite_where_something_is_seen(
    pattern: Pattern, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks:
        monkeypatch.setattr(exact, "WHOLE", 0)
        monkeypatch.setitem(exact.BLOCK, "cpu", 300)
    found = expect(small(pattern=pattern, **NOTHING_KNOWN))
    for name, bound in found.bound.items():
        dead = found.dead_keys if name in ("dk", "dv") else found.dead_rows
        mask = dead[None] if name == "lse" else dead.T[None, :, :, None]
        assert not np.isnan(bound).any(), name
        assert np.isinf(bound).any(), name
        assert (np.where(mask, bound, 0.0) == 0.0).all(), name


def test_a_row_of_which_nothing_is_known_leaves_the_others_their_bounds() -> None:
    tensors = problem("float32", 1.0)
    r = Arithmetic.of("float32", "math", D, D**-0.5, Counts(N, N))
    q, k, v, dout, dlse = (x.double().numpy() for x in tensors)
    usual = evaluate(Inputs(q, k, v, dout, dlse, PATTERNS["causal"], D**-0.5), r)
    q[:, 5] *= 1e12
    found = evaluate(Inputs(q, k, v, dout, dlse, PATTERNS["causal"], D**-0.5), r)
    for name in ("out", "lse", "dq"):
        axis = 2 if name == "lse" else 1
        infinite = np.moveaxis(np.isinf(found.bound[name]), axis, 0).reshape(N, -1)
        assert np.flatnonzero(infinite.any(1)).tolist() == [5] and infinite[5].all(), name
        others = np.delete(np.arange(N), 5)
        kept, wanted = (x.bound[name].take(others, axis) for x in (found, usual))
        np.testing.assert_allclose(kept, wanted, rtol=2e-3)  # e^x - 1 or x, by the largest of all
    for name in ("dk", "dv"):  # the keys that row 5 sees, and they alone
        assert np.flatnonzero(np.isinf(found.bound[name]).any((0, 2, 3))).tolist() == [0, 1, 2, 3, 4, 5], name


def test_the_bound_of_lse_does_not_stop_where_that_of_weights_does() -> None:
    """An error of 2000 in one score moves the lse by as much: a bound of 600 would refuse what is right."""
    r = replace(Arithmetic.of("float32", "math", D, D**-0.5, Counts(N, N)), u_exp=2000.0)
    q, k, v, dout, _ = (x.double().numpy() for x in problem("float32", 1.0))
    found = evaluate(Inputs(q, k, v, dout, None, PATTERNS["causal"], D**-0.5), r)
    assert (found.bound["lse"] >= 2000.0).all() and (found.bound["out"] == np.inf).all()


def test_an_infinite_weight_times_nothing_promises_nothing() -> None:
    makers: tuple[Any, ...] = (np.array, torch.tensor)
    for of in makers:
        weights, sizes = of([[np.inf, 1.0], [2.0, 0.0]]), of([[0.0, 1.0], [3.0, 0.0]])
        assert bounds.product(weights, sizes).tolist() == [[np.inf, np.inf], [0.0, 2.0]]


def test_a_bound_that_is_nan_is_not_compared() -> None:
    right = expect(small())
    for name in QUANTITIES:
        spoilt = right.bound[name].copy()
        spoilt.flat[3] = np.nan
        with pytest.raises(ValueError, match=f"the bound of {name} is NaN"):
            replace(right, bound=right.bound | {name: spoilt})
