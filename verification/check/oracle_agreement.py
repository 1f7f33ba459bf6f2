"""The oracle and its fast twin agree: examples are judged by the twin, so the twin is compared with the definition.

Every example is judged by `reference.fast_oracle`, the fast twin of `reference.oracle`. Here the two are compared on
all Cases of at most MAX_SCORES scores (batch * query heads * queries * keys), nine in ten of the drawn ones.

The allowed difference is derived. Both compute in fp64, without a merge of partial results, so each is within
`reference.bounds` of the exact result, for an `Arithmetic` of fp64 with p = p' = 1; for fp64 these bounds count both
sides (`sides` = 2). They take exp(s - lse) for the probabilities in backward. Oracle and twin divide exp(s - m) by its
row's sum instead, whose errors, u |s - m| + rowsum(P eps) + g(b + 1), are no larger than those that the bounds allow
there: u |s - L| + T_L, as |s - m| <= |s - L| + |L| + |m| and T_L has u (3 |L| + 2 |m|).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from reference.bounds import Array
from reference.fast_oracle import Expectation, evaluate
from reference.oracle import attention_and_gradients
from reference.roundoff import Arithmetic, Counts, max_pairs
from verification.case import Case
from verification.check.worst_entry import worst_entry
from verification.failures import WrongResult
from verification.run.observation import RESULTS, Observations

MAX_SCORES = 2**14


def is_compared(case: Case) -> bool:
    return case.batch * case.heads * case.tokens * case.key_tokens <= MAX_SCORES


def check_twin(case: Case, expectation: Expectation, observations: Observations) -> dict[str, float]:
    """Oracle and twin differ by no more than two fp64 computations may, in every entry; the ranks take no part."""
    if not is_compared(case):
        return {}
    oracle, allowed = oracle_results(expectation)
    return {name: _compare(name, oracle[name], expectation.exact[name], allowed[name]) for name in oracle}


@lru_cache(maxsize=1)
def oracle_results(expectation: Expectation) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the oracle's results and the bounds of another fp64 computation, by quantity. Cached, so that it can be
    called while the ranks are at work.

    Rows that see nothing must pass no gradient on, whatever comes in: the oracle gets NaN and -inf there.
    """
    inputs, dead = expectation.inputs, torch.from_numpy(expectation.dead_rows)  # (H, R)
    sinks = None if inputs.sinks is None else torch.from_numpy(inputs.sinks)
    if sinks is not None:
        dead = dead & sinks.isneginf()[:, None]
    q, k, v, dout = (torch.from_numpy(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    dout = dout.masked_fill(dead.T[..., None], torch.nan)
    dlse = None if inputs.dlse is None else torch.from_numpy(inputs.dlse).masked_fill(dead, -torch.inf)
    rows = None if inputs.rows is None else torch.from_numpy(inputs.rows)
    tensors = attention_and_gradients(
        q, k, v, inputs.pattern, dout, dlse, q_positions=rows, scale=inputs.scale, sinks=sinks, softcap=inputs.softcap
    )
    results = {name: x.numpy() for name, x in zip(RESULTS, tensors, strict=False)}  # dsinks only with sinks
    counts = Counts(*max_pairs(inputs.pattern, max(q.shape[1], k.shape[1]), inputs.heads, inputs.kv_heads))
    arithmetic = Arithmetic.of("float64", "math", q.shape[3], inputs.scale, counts)
    return results, evaluate(inputs, arithmetic).bound


def _compare(name: str, oracle: Array, twin: Array, allowed: Array) -> float:
    """Return the largest |oracle - twin| / allowed, 0 where they are equal. Raises WrongResult if not <= 1."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.where(oracle == twin, 0.0, np.abs(oracle - twin) / allowed)
    ratio[np.isnan(ratio) & np.isposinf(allowed)] = 0.0  # an infinite bound allows anything
    if not (ratio <= 1).all():
        where = worst_entry(ratio)
        raise WrongResult(
            f"oracle: {name} is {oracle[where]} at {where} of {oracle.shape} by the oracle, and "
            f"{twin[where]} by its twin: {ratio[where]:.3g} times as far apart as computations in fp64 may be, "
            f"{allowed[where]:.3g}"
        )
    return float(ratio.max(initial=0.0))
