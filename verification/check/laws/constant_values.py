"""The output equals the values if all values are equal: the weights of a row add up to 1, however large its scores.

Rounding bounds grow with the scores, since lse has a last digit: a merge that takes its weights from the rounded lse
stays within them, and drifts. But each partial result, and each merge, is divided by the sum of its own weights, so
that only the roundings of these sums remain. A row that sees nothing has output 0. A sink takes a share of the weights,
so there are none here. Where scores are large, one key has nearly all the weight; so keys may be equal as well: each
partial result then weighs as much as it has keys.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from reference.fast_oracle import multiplicity
from verification.case import Case
from verification.check.attention_on_ranks import OURS, AttentionOnRanks, Claims, any_case, claimed
from verification.check.checks import assemble
from verification.check.laws.law import How, Law, flag
from verification.check.worst_entry import worst_entry
from verification.failures import WrongResult
from verification.run.rank import InputEdit
from verification.strategies.cases import cases

DTYPES = {"float32": 2.0**-24, "float64": 2.0**-53}  # unit roundoff: 16-bit kernels round weights before they sum them
SCORE_SCALES = (32.0, 1024.0)


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = draw(cases(world))
    dtype = case.dtype if case.dtype in DTYPES else "float32"
    scale = draw(st.sampled_from(SCORE_SCALES))
    how: How = {"keys_too": draw(st.sampled_from((False, True, True)))}
    return claimed(claims, replace(case, dtype=dtype, values="normal", score_scale=scale, sinks=None)), how


def check_equal_values(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """The error is at most k roundings for a sum of k numbers and a few for a merge, in weights and in products."""
    counts = ranks.attention.arithmetic(case).counts
    allowed = 2 * (counts.keys + 8 * counts.merges + 8) * DTYPES[case.dtype]
    edit = InputEdit("equal", int(how["keys_too"]))
    if ranks.attention is not OURS:  # a merge may take its weights from lse, which is rounded as their difference is
        lse = ranks.expect(case, edit.apply(case.tensors())).exact["lse"]
        largest = np.abs(lse, where=np.isfinite(lse), out=np.zeros_like(lse)).max(initial=0.0)
        allowed += 4 * counts.merges * DTYPES[case.dtype] * float(largest)
    out = assemble(case, ranks.observe(case, edit), "out")  # (B, n, H, D)
    value = edit.apply(case.tensors())[2][:, :1].double().numpy()  # (B, 1, Hk, D)
    value = np.repeat(value, case.heads // case.kv_heads, axis=2)
    key_counts = multiplicity(case.pattern, case.heads, case.tokens, case.key_tokens).sum(2)
    sees = key_counts.T[None, :, :, None] > 0  # (1, n, H, 1)
    value = np.where(sees, value, 0.0)
    error = np.abs(out - value) / np.where(sees, np.abs(value), 1.0)
    worst = float(error.max(initial=0.0) / allowed)
    if not worst <= 1.0:
        where = worst_entry(error)
        raise WrongResult(
            f"out at {where} is {out[where]}; it must be {value[where]}, since all values of that head are equal (0 "
            f"where a row sees nothing): an error of {worst:.3g} times what rounding allows"
        )
    return worst


EQUAL_VALUES_COME_OUT = Law(
    "equal values come out", _draw, check_equal_values, share=0.03, how={"keys_too": flag},
    cases={
        "values 'normal' in float32 or float64": lambda case: case.dtype in DTYPES and case.values == "normal",
        "no sinks": lambda case: case.sinks is None,
    },
    of_any="the claim has neither float32 nor float64",
)  # fmt: skip
