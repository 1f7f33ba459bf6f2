"""Later tokens change nothing in causal patterns, bit for bit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.checks import assemble
from verification.check.laws.law import How, Law, same_numbers, token
from verification.run.rank import InputEdit
from verification.strategies.cases import cases


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = draw(cases(world))
    case = claimed(claims, replace(case, pattern=replace(case.pattern, causal=True)))
    return case, {"position": draw(st.integers(0, case.tokens - 1))}


def check_later(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Tokens after a position change no output up to it in a causal pattern, bit for bit."""
    observations = ranks.observe(case)
    edited = ranks.observe(case, InputEdit("after", how["position"]))
    upto = how["position"] + 1
    for name in ("out", "lse") if case.lse != "unused" else ("out",):
        axis = 2 if name == "lse" else 1
        a, b = (assemble(case, x, name).take(range(upto), axis) for x in (observations, edited))
        same_numbers(name, a, b, f"when the tokens after position {how['position']} change")
    return 0.0


LATER_TOKENS_CHANGE_NOTHING = Law(
    "later tokens change nothing", _draw, check_later, share=0.02, how={"position": token},
    cases={"a causal pattern": lambda case: case.pattern.causal}, of_any="the claim has no causal pattern",
)  # fmt: skip
