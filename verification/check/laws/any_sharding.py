"""The result does not depend on who computes it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from verification.case import Case
from verification.check.checks import assemble, compared
from verification.check.expectation import expect
from verification.check.laws.law import TAME, How, Law, anything, bounded, changed, without_overflow, worst_ratio
from verification.check.supported import check_supported
from verification.run.backends import Backend
from verification.run.rank import observe
from verification.strategies.cases import cases, other_sharding


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = without_overflow(draw(cases(world)))
    if case.lse == "apart":  # its gradients depend on the rank that holds a token
        case = replace(case, lse="differentiated")
    return case, other_sharding(draw, case)


def check_anywhere(backend: Backend, case: Case, how: How) -> float:
    """Results with another group, layout, exchange and bucket differ by no more than the sum of both bounds."""
    other = changed(case, how)
    backend.submit(observe, case, None, False)
    first = expect(case)
    observations = backend.collect()
    backend.submit(observe, other, None, False)
    second = expect(other)
    other_observations = backend.collect()
    worst = 0.0
    for name in compared(case):
        a, b = assemble(case, observations, name), assemble(other, other_observations, name)
        worst = max(worst, worst_ratio(name, a, b, first.bound[name] + second.bound[name], how))
    return worst


SAME_ANYWHERE = Law(
    "same on any ranks, layout, exchange", _draw, check_anywhere,
    lambda case, how: check_supported(replace(case, **how)),  # a Case validates the other fields itself
    how=dict.fromkeys(("group", "order", "cuts", "exchange"), anything) | {"bucket": bounded}, share=0.04,
    cases=TAME | {"gradients that do not depend on the rank: lse other than 'apart'": lambda case: case.lse != "apart"},
)  # fmt: skip
