"""The result does not depend on the GPU streams on which forward and backward are called."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from verification.case import Case
from verification.check import properties
from verification.check.attention_on_ranks import AttentionOnRanks
from verification.check.expectation import expect
from verification.check.laws.law import How, Law
from verification.run.side_streams import observe_on_streams
from verification.strategies.cases import cases


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    return replace(draw(cases(world)), again="alike", measured=False), {}


def check_streams(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Forward on one stream and backward on another give the oracle's results, and the bits of the default stream."""
    ranks.backend.submit(observe_on_streams, case)
    return max(properties.check(case, expect(case), ranks.backend.collect()).values())


# CPUs have no streams: the examples would repeat the plain ones.
STREAMS_DO_NOT_MATTER = Law(
    "streams do not matter", _draw, check_streams, how={}, share=0.02, most=60, on_cpus=False,
    cases={"again 'alike' that are not measured": lambda case: case.again == "alike" and not case.measured},
)  # fmt: skip
