"""What a compiled graph does in place of a call is that call, and what the graph was told of it is so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from reference import fields
from verification.case import Case
from verification.check.laws.law import How, Law
from verification.draw.cases import cases
from verification.failures import WrongResult
from verification.run.as_compiled import unlike
from verification.run.backends import Backend


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    """Every fourth Case has a window, mostly one of 0, which is not none."""
    case = draw(cases(world))
    if draw(st.integers(0, 3)) < 3:
        return case, {}
    first, *others = case.pattern.branches
    first = replace(first, window=draw(st.sampled_from((0, 0, 1))))
    return replace(case, pattern=replace(case.pattern, branches=(first, *others))), {}


def check_compiled(backend: Backend, case: Case, how: How) -> float:
    """The operators give, bit for bit, what the call gives, or raise the same; and shapes, types and strides are those
    that a graph is told before anything runs.
    """
    backend.submit(unlike, case)
    for index, found in enumerate(backend.collect()):
        if found:
            raise WrongResult(f"on index {index} of the group the operators of a graph differ: {'; '.join(found)}")
    return 0.0


def _premise(case: Case, how: Any) -> None:
    """Holds for any Case."""
    fields.exactly("how", how, [])


COMPILED_CALLS_ARE_CALLS = Law(
    "compiled calls are calls", _draw, check_compiled, _premise, share=0.1, most=120, on_gpus=False
)
