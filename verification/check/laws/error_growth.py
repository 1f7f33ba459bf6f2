"""The error does not grow with the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from reference import validators
from reference.fast_oracle import Expectation, evaluate
from reference.pattern import Pattern
from verification.case import Case
from verification.check.checks import assemble
from verification.check.expectation import arithmetic_of, inputs_of
from verification.check.laws.law import How, Law
from verification.failures import WrongResult
from verification.run.backends import Backend, observe_on
from verification.run.rank import InputEdit


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    """Many keys and outputs near 1, where a bfloat16 accumulator would add a rounding of full size at each merge."""
    case = Case(
        world=world, group=None, tokens=draw(st.integers(256, 512)),
        order=draw(st.sampled_from(("contiguous", "striped"))),
        cuts=None, pattern=Pattern.dense(), batch=1, heads=4, kv_heads=4, head_dim=16, dtype="bfloat16", scale=None,
        score_scale=1.0, values="normal", seed=draw(st.integers(0, 255)),
        exchange=draw(st.sampled_from(("ring", "direct", "gather"))), bucket=draw(st.sampled_from((None, 64))),
        kernel="math", lse="unused", strided=False,
    )  # fmt: skip
    return case, {"shift": 1}


def check_growth(backend: Backend, case: Case, how: How) -> float:
    """The RMS error of bfloat16 outputs is that of rounding the exact output once, on 1, 2, 4, ... ranks alike.

    Let O be exact, O' an implementation's output before its last rounding, T >= |O' - O| the a-priori bound without
    that rounding, and r(x) the distance of x to the nearest bfloat16, which changes no faster than x. The result is off
    by at most r(O') + |O' - O| <= r(O) + 2 T; hence, by Minkowski, RMS(error) <= RMS(r(O)) + 2 RMS(T). T is of the
    order of fp32's unit roundoff and r(O) of bfloat16's: any further rounding of partial results to 16 bits stands out,
    though entry by entry it hides below its bound.
    """
    edit = InputEdit("shift", how["shift"])
    sizes = [p for p in (1, 2, 4, 8, 16, 32) if p <= case.world]
    worst, exact = 0.0, _expect_edited(case, edit)
    rounded = torch.from_numpy(exact.exact["out"]).bfloat16().double().numpy()
    once = _rms(rounded - exact.exact["out"])
    for p in sizes:
        smaller = replace(case, group=None if p == case.world else tuple(range(p)))
        inner = _expect_edited(smaller, edit, inner=True).bound["out"]
        out = assemble(smaller, observe_on(backend, smaller, edit, False), "out")
        error, allowed = _rms(out - exact.exact["out"]), once + 2 * _rms(inner)
        if not error <= allowed:
            raise WrongResult(
                f"on {p} ranks the RMS error of out is {error:.3g}; rounding the exact output once makes it {once:.3g}"
                f", and {allowed:.3g} is allowed"
            )
        worst = max(worst, error / allowed)
    return worst


def _expect_edited(case: Case, edit: InputEdit, inner: bool = False) -> Expectation:
    """Return `expect` for edited tensors; `inner` leaves the last rounding of the output out of the bound."""
    arithmetic = arithmetic_of(case)
    if inner:
        arithmetic = replace(arithmetic, u_out=0.0)
    return evaluate(inputs_of(case, edit.apply(case.tensors())), arithmetic)


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
)  # fmt: skip
