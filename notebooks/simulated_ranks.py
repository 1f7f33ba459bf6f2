"""Plain Case, and results of simulated ranks beside exact ones, which the notebooks on rounding share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference import Pattern
from reference.fast_oracle import QUANTITIES, Expectation
from verification.case import Case
from verification.check.checks import assemble
from verification.check.expectation import expect
from verification.run.rank import observe
from verification.run.simulation.simulation import Simulation

PLAIN = Case(
    world=4, group=None, tokens=256, order="contiguous", cuts=None, pattern=Pattern.dense(causal=True), batch=1,
    heads=2, kv_heads=2, head_dim=32, dtype="float32", scale=None, score_scale=1.0, values="normal", seed=0,
    exchange="direct", bucket=32, kernel="math", lse="returned", strided=False,
)  # fmt: skip


def results(case: Case) -> tuple[dict[str, NDArray[np.float64]], Expectation]:
    """The results of simulated ranks, whole tensors by name (out, lse, dq, dk, dv); and exact values with bounds."""
    seen = Simulation(case.world, seed=1).run(lambda transport: observe(transport, case, None, False))
    return {name: assemble(case, seen, name) for name in QUANTITIES}, expect(case)


def errors(case: Case) -> dict[str, tuple[float, float, float]]:
    """By name: (largest error, largest bound, largest error / bound). Raises AssertionError for an entry whose error
    is beyond its own bound."""
    seen, expected = results(case)
    found = {}
    for name, x in seen.items():
        exact, bound = expected.exact[name], expected.bound[name]
        error = np.abs(np.subtract(x, exact, where=x != exact, out=np.zeros_like(exact)))  # -inf equals -inf
        assert (error <= bound).all(), f"{name}: a bound does not hold"
        found[name] = float(error.max()), float(bound.max()), float((error / np.where(bound > 0, bound, 1)).max())
    return found
