"""The result does not depend on who computes it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import reject
from hypothesis import strategies as st

from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.laws.law import TAME, How, Law, anything, bounded, changed, without_overflow, worst_difference
from verification.check.supported import check_supported
from verification.strategies.cases import cases, other_sharding

SETTLED = 4  # claims that follow each other until a Case and the other one differ by the sharding alone


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = without_overflow(draw(cases(world))).for_any_ranks()
    if case.lse == "apart":  # its gradients depend on the rank that holds a token
        case = replace(case, lse="differentiated")
    case = claimed(claims, case)
    return settled(claims, case, other_sharding(draw, case))


def settled(claims: Claims, case: Case, how: How) -> tuple[Case, How]:
    """Return a claimed Case with a change that leads to another claimed one. Hypothesis draws again where none is."""
    for _ in range(SETTLED):  # another attention may support other layouts only, and other lengths on other ranks
        other = claimed(claims, changed(case, how))
        how = {name: getattr(other, name) for name in how}
        if changed(case, how) == other:
            return case, how
        cuts = case.cuts if case.tokens == other.tokens else None
        case = claimed(claims, changed(other, {name: getattr(case, name) for name in how} | {"cuts": cuts}))
    reject()


def _another_claimed(claims: Claims, case: Case, how: How) -> None:
    other = changed(case, how)
    if replace(other, group=case.group) == case and other.ranks == case.ranks:  # None and all ranks are the same group
        raise ValueError("how changes nothing; it must have another group, order, cuts, exchange or bucket")
    if claims(other) != other:
        raise ValueError(f"how is {how}; it must make a Case that is claimed")


def check_anywhere(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Results with another group, layout, exchange and bucket differ by no more than the sum of both bounds."""
    return worst_difference(ranks, case, changed(case, how), how)


SAME_ANYWHERE = Law(
    "same on any ranks, layout, exchange", _draw, check_anywhere,
    lambda case, how: check_supported(replace(case, **how)),  # a Case validates the other fields itself
    how=dict.fromkeys(("group", "order", "cuts", "exchange"), anything) | {"bucket": bounded}, share=0.04,
    cases=TAME | {"gradients that do not depend on the rank: lse other than 'apart'": lambda case: case.lse != "apart"},
    of_any="the claim has one group, order and exchange only", of_others=_another_claimed,
)  # fmt: skip
