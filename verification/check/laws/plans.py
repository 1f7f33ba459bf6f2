"""A plan computes each pair of the pattern as often as branches see it, and nothing else; no slot is lost on the way.

Plans alone are followed (`verification.run.plan_walk`): an example costs no more for being irregular, so every call of
a rank may have another shape. Each Case is planned by every exchange, in several orders and with several buckets; and
once over an order that is nearly regular, where a plan may take a listing for a whole shard, or two runs for one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reference import fields
from reference.cost import EXCHANGES
from reference.exact import multiplicity
from reference.pattern import Branch, Pattern
from ring.comm.transport import Transport
from verification.case import ORDERS, Case
from verification.check.laws.law import MOST_INTEGER, How, Law
from verification.draw.plan_cases import MOST_SHORT, irregular_cases
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.layouts import layout_of
from verification.run.plan_walk import PlanSetting, PlanWalk, WrongPlan

MOST = 4  # orders, and buckets


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    """orders, buckets: in place of the Case's, each with each and by every exchange. varlen: as plans for GPUs have it,
    tokens of documents of several lengths that share a call; 0: none do.
    """
    case = draw(irregular_cases(world))
    small = st.integers(1, max(1, case.tokens // 5))
    buckets = [draw(small), draw(st.integers(1, 2 * MOST_SHORT))]
    varlen = draw(st.integers(0, 8)) if case.pattern.documents and draw(st.booleans()) else 0
    return case, {"orders": [case.order], "buckets": buckets, "varlen": varlen}


def check_plans(backend: Backend, case: Case, how: How) -> float:
    """Each rank follows some of the plans; each for all ranks, since plans need no messages."""
    chosen = product(how["orders"], EXCHANGES, how["buckets"])
    others = [replace(case, order=order, exchange=exchange, bucket=b) for order, exchange, b in chosen]
    others.append(_nearly_regular(case, how["buckets"][0]))
    backend.submit(followed, case, how.get("varlen", 0), *others)
    for wrong in backend.collect():
        if wrong:
            raise WrongResult(wrong)
    return 0.0


def _nearly_regular(case: Case, bucket: int) -> Case:
    """Dense attention, where a few positions are in each other's place; or a grid of which a rank has every second row
    of one run and all of the next, which begins where the first would go on."""
    ranks, which = len(case.ranks), case.seed // 2
    plain = replace(case, cuts=None, exchange=EXCHANGES[case.seed % len(EXCHANGES)], bucket=bucket)
    if case.seed % 2:
        return replace(plain, pattern=replace(case.pattern, branches=(Branch(),)), order="swapped")
    rate = max(2, ranks)
    grid = Pattern((Branch(None, rate, which % 2 * (which % rate)),), case.pattern.causal)
    return replace(plain, pattern=grid, order="stepped", tokens=2 * rate * ranks * (1 + which % 2))


def followed(transport: Transport, case: Case, varlen: int, *others: Case) -> str:
    """Task: what is wrong with the first wrong plan among those that fall to this rank; "" if nothing is."""
    for other in others[transport.rank :: transport.world_size]:
        due = multiplicity(other.pattern, case.heads, other.tokens)
        setting = PlanSetting(
            other.pattern, layout_of(other), case.heads, case.kv_heads, other.exchange, other.bucket or 1, varlen
        )
        try:
            walk = PlanWalk(setting).go()
        except WrongPlan as error:
            return f"{_named(other)}: {error}"
        if wrong := np.argwhere(walk.pairs != due).tolist():
            head, query, key = wrong[0]
            computed, seen = int(walk.pairs[head, query, key]), int(due[head, query, key])
            return f"{_named(other)}: head {head} of query {query} takes key {key} {computed} times, must be {seen}"
        if wrong := np.argwhere(walk.got != walk.due).tolist():
            return f"{_named(other)}: gradients of position {wrong[0][0]}, head {wrong[0][1]}, are lost or doubled"
    return ""


def _named(case: Case) -> str:
    return f"{case.order} by {case.exchange} with a bucket of {case.bucket}"


def _premise(case: Case, how: Any) -> None:
    fields.exactly("how", {"varlen": 0, **how}, ["orders", "buckets", "varlen"])  # saved ones may have none
    fields.integer("varlen of how", how.get("varlen", 0), 0, MOST_INTEGER)
    fields.at_most("tokens", case.tokens, MOST_SHORT)
    if case.group is not None:
        raise ValueError(f"group is {case.group}; for the law of plans it must be None")
    for name in ("orders", "buckets"):
        if not isinstance(how[name], list) or not 1 <= len(how[name]) <= MOST:
            raise ValueError(f"{name} of how is {how[name]!r}; it must be a list of 1 to {MOST} entries")
    for order in how["orders"]:
        fields.choice("an entry of orders of how", order, ORDERS)
    for bucket in how["buckets"]:
        fields.integer("an entry of buckets of how", bucket, 1, MOST_INTEGER)


PLANS_COMPUTE_THE_PATTERN = Law("plans compute the pattern", _draw, check_plans, _premise, share=0.18)
