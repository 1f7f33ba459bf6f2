"""Tokens that a row does not see change nothing for it, bit for bit: in causal patterns the later ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from reference.fast_oracle import Flags, multiplicity
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.checks import assemble
from verification.check.laws.law import How, Law, same_numbers, token
from verification.run.rank import InputEdit
from verification.strategies.cases import cases


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = draw(cases(world))
    if not case.pattern.has_slices:
        case = replace(case, pattern=replace(case.pattern, causal=True))
    case = claimed(claims, case)
    return case, {"position": draw(st.integers(0, case.tokens - 1))}


def check_later(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Keys and values that a row does not see change no row that sees none of them, bit for bit."""
    seen = multiplicity(case.pattern, case.heads, case.tokens, case.key_tokens).any(0)
    sees: Flags = np.asarray(seen)  # (rows, keys)
    hidden: Flags = ~sees[how["position"]]
    affected: Flags = np.asarray(sees[:, hidden].any(1))  # of these rows the queries change as well
    edit = InputEdit("change", positions=_where(hidden), order=_where(affected))
    observations, edited = ranks.observe(case), ranks.observe(case, edit)
    for name in ("out", "lse") if case.lse != "unused" else ("out",):
        axis = 2 if name == "lse" else 1
        a, b = (assemble(case, x, name).take(np.flatnonzero(~affected), axis) for x in (observations, edited))
        same_numbers(name, a, b, f"when the tokens change that the one at position {how['position']} does not see")
    return 0.0


def _where(flags: Flags) -> tuple[int, ...]:
    return tuple(map(int, np.flatnonzero(flags)))


LATER_TOKENS_CHANGE_NOTHING = Law(
    "later tokens change nothing", _draw, check_later, share=0.02, how={"position": token},
    cases={"a causal pattern, or slices": lambda case: case.pattern.causal or case.pattern.has_slices},
    of_any="the claim has no causal pattern",
)  # fmt: skip
