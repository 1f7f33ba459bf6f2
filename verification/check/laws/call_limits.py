"""What a kernel call takes at most, of keys and of query rows each by itself: folds, joined ranks and heads count in
full. Plans alone are looked at, so there are more tokens, segments and ranks to a call than where all is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from reference import fields
from reference.limits import CallLimits
from verification.case import Case
from verification.check.laws.law import MOST_INTEGER, How, Law
from verification.draw.plan_cases import plan_cases
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.plan_outline import CallOutline, outline
from verification.wording import counted

MOST_BUCKETS = 8
MORE = (None, 0, 5, 64)  # tokens of several segments of own keys, beyond the bucket; None: not given


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    """buckets: in place of the Case's. own: as `ring.plan.plan.plan_of` has it; None, or so much more than a bucket."""
    case = draw(plan_cases(world))
    small, middle, any_size = st.integers(1, 16), st.integers(8, 40), st.integers(1, 2 * case.tokens)
    buckets = draw(st.lists(st.one_of(small, middle, any_size), min_size=4, max_size=MOST_BUCKETS))
    return case, {"buckets": buckets, "own": draw(st.sampled_from(MORE))}


def check_call_limits(backend: Backend, case: Case, how: How) -> float:
    """Each call of each rank's plan is within `reference.limits`."""
    more = how["own"]
    limits = [CallLimits(b, b if more is None else b + more, case.kv_heads) for b in how["buckets"]]
    asked = [(replace(case, bucket=one.bucket), None if more is None else one.own) for one in limits]
    backend.submit(outline, case, *asked)
    for rank, plans in enumerate(backend.collect()):
        for one, plan in zip(limits, plans, strict=True):
            for call in plan.calls:
                _check_call(f"on rank {rank} of {case.world}, {one}", one, call)
    return 0.0


def _check_call(where: str, limits: CallLimits, call: CallOutline) -> None:
    own, folds, groups = call.stage == 0, call.keys.folds, len(call.query_heads)
    if call.queries.folds != folds:
        raise WrongResult(f"{where}: a call has {call.queries.folds} folds of rows and {folds} of keys")
    for what, found, most in (
        ("key", call.keys.tokens, limits.keys(own, folds)),
        ("query row", call.queries.tokens, limits.rows(own, folds)),
        ("key vector", call.keys.tokens * groups, limits.key_vectors(own, folds)),
    ):
        if found > most:
            raise WrongResult(
                f"{where}: a call at stage {call.stage}, {call.mask}, takes {counted(found, what)} in "
                f"{counted(folds, 'fold')} for {counted(groups, 'head group')}; at most {most} are allowed"
            )


def _premise(case: Case, how: Any) -> None:
    fields.exactly("how", how, ["buckets", "own"])
    if case.group is not None:
        raise ValueError(f"group is {case.group}; for the law of kernel calls it must be None")
    if not isinstance(how["buckets"], list) or not 1 <= len(how["buckets"]) <= MOST_BUCKETS:
        raise ValueError(f"buckets of how is {how['buckets']!r}; it must be a list of 1 to {MOST_BUCKETS} entries")
    for bucket in how["buckets"]:
        fields.integer("an entry of buckets of how", bucket, 1, MOST_INTEGER)
    if how["own"] is not None:
        fields.integer("own of how", how["own"], 0, MOST_INTEGER)


CALLS_KEEP_TO_THE_BUCKET = Law(
    "kernel calls keep to the bucket", _draw, check_call_limits, _premise, share=0.08, most=200
)
