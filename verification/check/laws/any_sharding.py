"""The result does not depend on who computes it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.checks import assemble, compared
from verification.check.laws.law import TAME, How, Law, anything, bounded, changed, without_overflow, worst_ratio
from verification.check.supported import check_supported
from verification.strategies.cases import cases, other_sharding


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = without_overflow(draw(cases(world)))
    if case.lse == "apart":  # its gradients depend on the rank that holds a token
        case = replace(case, lse="differentiated")
    case = claimed(claims, case)
    how = other_sharding(draw, case)
    other = claimed(claims, changed(case, how))  # another attention may support other layouts only
    return case, {name: getattr(other, name) for name in how}


def check_anywhere(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Results with another group, layout, exchange and bucket differ by no more than the sum of both bounds."""
    other = changed(case, how)
    observations, first = ranks.observe_and_expect(case)
    other_observations, second = ranks.observe_and_expect(other)
    worst = 0.0
    for name in compared(case):
        a, b = assemble(case, observations, name), assemble(other, other_observations, name)
        worst = max(worst, worst_ratio(name, a, b, first.bound[name] + second.bound[name], how))
    return worst


SAME_ANYWHERE = Law(
    "same on any ranks, layout, exchange", _draw, check_anywhere,
    lambda case, how: check_supported(replace(case, **how)),  # a Case validates the other fields itself
    how=dict.fromkeys(("group", "order", "cuts", "exchange"), anything) | {"bucket": bounded}, of_any=True, share=0.04,
    cases=TAME | {"gradients that do not depend on the rank: lse other than 'apart'": lambda case: case.lse != "apart"},
)  # fmt: skip
