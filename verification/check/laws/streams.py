"""On a GPU the result does not depend on the streams on which forward and backward are called."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from verification.case import Case
from verification.check import properties
from verification.check.expectation import expect
from verification.check.laws.law import How, Law
from verification.run.backends import Backend
from verification.run.side_streams import observe_on_streams
from verification.strategies.cases import cases


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    return replace(draw(cases(world)), again="alike", measured=False), {}


def check_streams(backend: Backend, case: Case, how: How) -> float:
    """The forward on one stream, the backward on another: results as the oracle has them, and the same bits as on the
    stream that is current when a program begins.
    """
    backend.submit(observe_on_streams, case)
    return max(properties.check(case, expect(case), backend.collect()).values())


# On CPUs there are no streams: what is drawn would be the plain examples once more.
STREAMS_DO_NOT_MATTER = Law(
    "streams do not matter", _draw, check_streams, how={}, share=0.02, most=60, on_cpus=False,
    cases={"again 'alike' that are not measured": lambda case: case.again == "alike" and not case.measured},
)  # fmt: skip
