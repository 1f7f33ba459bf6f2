"""The error does not grow with the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from reference import validators
from reference.fast_oracle import Expectation
from reference.pattern import Pattern
from verification.case import EXCHANGES, Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.checks import assemble
from verification.check.expectation import inputs_of
from verification.check.laws.law import How, Law
from verification.failures import WrongResult
from verification.run.rank import InputEdit


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    """Many keys and outputs near 1, where a bfloat16 accumulator would add a rounding of full size at each merge."""
    case = Case(
        world=world, group=None, tokens=draw(st.integers(256, 512)),
        order=draw(st.sampled_from(("contiguous", "striped"))),
        cuts=None, pattern=Pattern.dense(), batch=1, heads=4, kv_heads=4, head_dim=16, dtype="bfloat16", scale=None,
        score_scale=1.0, values="normal", seed=draw(st.integers(0, 255)),
        exchange=draw(st.sampled_from(EXCHANGES)), bucket=draw(st.sampled_from((None, 64))),
        kernel="math", lse="unused", strided=False,
    )  # fmt: skip
    return claimed(claims, case), {"shift": 1}


def check_growth(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """The RMS error of bfloat16 outputs is that of rounding the exact output once, on 1, 2, 4, ... ranks alike.

    Let O be exact, O' an implementation's output before its last rounding, T >= |O' - O| the a-priori bound without
    that rounding, and r(x) the distance of x to the nearest bfloat16, which changes no faster than x. The result is off
    by at most r(O') + |O' - O| <= r(O) + 2 T; hence, by Minkowski, RMS(error) <= RMS(r(O)) + 2 RMS(T). T is of the
    order of fp32's unit roundoff and r(O) of bfloat16's: any further rounding of partial results to 16 bits stands out,
    though entry by entry it hides below its bound.
    """
    edit = InputEdit("shift", how["shift"])
    sizes = sorted({case.world} | {p for p in (1, 2, 4, 8, 16, 32) if p < case.world})
    on_fewer = [replace(case.for_any_ranks(), group=None if p == case.world else tuple(range(p))) for p in sizes]
    worst, exact = 0.0, _expect_edited(ranks, case, edit)
    rounded = torch.from_numpy(exact.exact["out"]).bfloat16().double().numpy()
    once = _rms(rounded - exact.exact["out"])
    for smaller in (fewer for fewer in on_fewer if ranks.attention.claims(fewer) == fewer):
        inner = _expect_edited(ranks, smaller, edit, inner=True).bound["out"]
        out = assemble(smaller, ranks.observe(smaller, edit), "out")
        error, allowed = _rms(out - exact.exact["out"]), once + 2 * _rms(inner)
        if not error <= allowed:
            raise WrongResult(
                f"on {len(smaller.ranks)} ranks the RMS error of out is {error:.3g}; rounding the exact output once "
                f"makes it {once:.3g}, and {allowed:.3g} is allowed"
            )
        worst = max(worst, error / allowed)
    return worst


def _expect_edited(ranks: AttentionOnRanks, case: Case, edit: InputEdit, inner: bool = False) -> Expectation:
    """Return `expect` for edited tensors; `inner` leaves the last rounding of the output out of the bound."""
    arithmetic = ranks.attention.arithmetic(case)
    if inner:
        arithmetic = replace(arithmetic, u_out=0.0)
    return ranks.attention.evaluate(inputs_of(case, edit.apply(case.tensors())), arithmetic)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


ERROR_DOES_NOT_GROW = Law(
    "error does not grow with ranks", _draw, check_growth, share=0.003, most=20,
    how={"shift": lambda case, name, value: validators.integer(name, value, -1024, 1024)},
    cases={
        "dtype 'bfloat16', lse 'unused', and neither a group nor cuts": lambda case: (
            (case.dtype, case.lse, case.group, case.cuts) == ("bfloat16", "unused", None, None)
        )
    },
    of_any="the claim has no bfloat16 on all ranks, in even shards, without lse",
)  # fmt: skip
