"""Plans of sequences of up to 2^40 tokens are those of short ones, at other positions; nobody makes a tensor of them.

Two ways to know what the plan of a long sequence must be:

    scaled   Positions, segments, rates and offsets times `by`: the long pattern selects none but the positions by * x,
             and sees among them what the short one sees. So messages and calls are those of the short plan, whose cost
             `reference.cost` counts, and its positions times `by`.
    counted  One branch over equal shards: messages and pairs of any size, in closed form.

Striped, position by * x lies on the rank of x if by - 1 is a multiple of the number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference import closed_forms, cost, fields
from reference.pattern import Branch, Pattern
from verification.case import Case
from verification.check.laws.law import MOST_INTEGER, How, Law
from verification.draw.cases import plan_cases
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.plan_outline import CallOutline, PlanOutline, Strip, outline, refusals

Ints = NDArray[np.int64]
WAYS = ("scaled", "counted")
ORDERS = ("contiguous", "zigzag", "striped")
_LONG = 2**31
_MOST_SHORT = 4096  # tokens of a Case before it is made long
_SLOT = 8  # bytes that `reference.cost` counts for a slot of one number in fp32, for keys and for gradients alike
TOO_LONG = (MOST_INTEGER + 1, 2**63, 10**30)


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    way = draw(st.sampled_from(WAYS))
    case = draw(plan_cases(world))
    order = draw(st.sampled_from(ORDERS))
    unit = 2 * world if order == "zigzag" else world
    if way == "counted":
        case, unit = replace(case, pattern=_one_branch(draw, case)), 16 * world
    free = way == "scaled" and order == "contiguous" and case.cuts is not None
    tokens = case.tokens if free else unit * -(-case.tokens // unit)
    case = replace(case, order=order, cuts=case.cuts if free else None, tokens=tokens)
    step = world if order == "striped" else 1
    least, most = -(-_LONG // tokens // step), (MOST_INTEGER // tokens - 1) // step
    return case, {"way": way, "by": 1 + step * draw(st.integers(least, most))}


def _one_branch(draw: st.DrawFn, case: Case) -> Pattern:
    """Segment lengths count in shards here: see `_counted`."""
    rate = draw(st.sampled_from((1, 2, 4, 8)))
    spans = [m for m in range(1, case.world + 1) if case.world % m == 0]
    spread = rate > 1 and case.heads == case.kv_heads and draw(st.booleans())
    offset = tuple(head % rate for head in range(case.heads)) if spread else draw(st.integers(0, rate - 1))
    return Pattern((Branch(draw(st.sampled_from(spans)), rate, offset),), case.pattern.causal)


def check_sizes(backend: Backend, case: Case, how: How) -> float:
    backend.submit(refusals, case, TOO_LONG)
    for said in (said for of_rank in backend.collect() for said in of_rank):
        if not said.startswith("ValueError: n must"):
            raise WrongResult(
                f"a layout of more than 2**40 tokens must be refused as ValueError that names n, got {said!r}"
            )
    if how["way"] == "counted":
        _check_counted(backend, _counted(case, how["by"]))
    else:
        _check_scaled(backend, case, how["by"])
    return 0.0


# --- scaled -----------------------------------------------------------------------------------------------------------


def scaled(case: Case, by: int) -> Case:
    """Every position of the Case times `by`."""
    branches = []
    for branch in case.pattern.branches:
        length = None if branch.segment_length is None else by * branch.segment_length
        offset = branch.offset
        moved = tuple(by * one for one in offset) if isinstance(offset, tuple) else by * offset
        branches.append(Branch(length, by * branch.dilation_rate, moved, branch.heads))
    cuts = None if case.cuts is None else tuple(by * cut for cut in case.cuts)
    return replace(case, tokens=by * case.tokens, cuts=cuts, pattern=Pattern(tuple(branches), case.pattern.causal))


def _check_scaled(backend: Backend, case: Case, by: int) -> None:
    long = scaled(case, by)
    backend.submit(outline, case, (case, None), (long, None))
    setting = cost.Setting(case.pattern, case.shards().positions, 1, case.heads, case.kv_heads, 1)
    whole = by if case.exchange == "gather" else 1  # whole shards travel
    sent, buffers = cost.sent(setting, case.exchange), cost.buffers(setting, case.exchange, case.tokens_per_call)
    pairs = cost.flops(setting).pairs
    copies = 1 if case.exchange == "gather" else 2
    for rank, (short_plan, long_plan) in enumerate(backend.collect()):
        where = f"rank {rank} of {case.world}, {case.order} with {long.tokens} tokens"
        _equal(f"{where}: counts", long_plan.counts, tuple(by * count for count in case.shards().counts))
        _equal(f"{where}: slots sent", _by_peer(long_plan.sent, case.world), whole * sent.forward[rank] // _SLOT)
        due = whole * sent.backward_gradients[rank] // _SLOT
        _equal(f"{where}: slots returned", _by_peer(long_plan.returned, case.world), due)
        held = (buffers.receive[rank] // copies, buffers.send[rank], buffers.returned[rank])
        _equal(f"{where}: slots of buffers", long_plan.sizes, tuple(whole * int(size) // _SLOT for size in held))
        _equal(f"{where}: pairs", sum(call.pairs for call in long_plan.calls), pairs[rank])
        _equal(f"{where}: calls", len(long_plan.calls), len(short_plan.calls))
        for number, (short_call, long_call) in enumerate(zip(short_plan.calls, long_plan.calls, strict=True)):
            _check_call(f"{where}: call {number}", case, long, by, rank, short_call, long_call)


def _check_call(
    where: str, short: Case, long: Case, by: int, rank: int, short_call: CallOutline, long_call: CallOutline
) -> None:
    for name in ("stage", "mask", "query_heads", "key_heads"):
        _equal(f"{where}: {name}", getattr(long_call, name), getattr(short_call, name))
    groups = len(short_call.query_heads)
    queries = [_positions(case, rank, one.queries, groups) for case, one in ((short, short_call), (long, long_call))]
    _equal(f"{where}: positions of queries", queries[1], by * queries[0])
    if short_call.stage and short.exchange != "gather":
        _equal(f"{where}: slots of keys", long_call.keys.listed(groups), short_call.keys.listed(groups))
    else:
        keys = [_key_positions(case, rank, one, groups) for case, one in ((short, short_call), (long, long_call))]
        _equal(f"{where}: positions of keys", keys[1], by * keys[0])
    if short_call.mask == "POSITION":
        _equal(f"{where}: positions for the mask", long_call.query_positions, by * _there(short_call.query_positions))
        _equal(f"{where}: positions for the mask", long_call.key_positions, by * _there(short_call.key_positions))


def _there(x: Ints | None) -> Ints:
    assert x is not None
    return x


def _positions(case: Case, rank: int, rows: Strip, groups: int) -> Ints:
    return positions_of(case, rank, rows.listed(groups))


def _key_positions(case: Case, rank: int, call: CallOutline, groups: int) -> Ints:
    """Of own keys; or of gathered ones, where the shards of the other ranks lie one after the other."""
    if not call.stage:
        return _positions(case, rank, call.keys, groups)
    found = np.full((call.keys.folds, groups, call.keys.length), -1, np.int64)
    row, begin = call.keys.listed(groups) // case.kv_heads, 0
    for other, count in enumerate(shard_sizes(case)):
        if other != rank:
            inside = (row >= begin) & (row < begin + count)
            found[inside] = positions_of(case, other, row[inside] - begin)
            begin += count
    return found


def shard_sizes(case: Case) -> list[int]:
    """Tokens of each rank, of shards that are equal or cut by the Case."""
    edges = [rank * case.tokens // case.world for rank in range(case.world + 1)] if case.cuts is None else case.cuts
    return [edges[rank + 1] - edges[rank] for rank in range(case.world)]


def positions_of(case: Case, rank: int, rows: Ints) -> Ints:
    """What a rank holds in these rows, of shards that are equal or cut by the Case; no position is listed for it."""
    p, half = case.world, case.tokens // (2 * case.world)
    if case.order == "striped":
        return rank + p * rows
    if case.order == "zigzag":
        return np.where(rows < half, rank * half + rows, (2 * p - 2 - rank) * half + rows)
    return sum(shard_sizes(case)[:rank]) + rows


# --- counted ----------------------------------------------------------------------------------------------------------


def _counted(case: Case, by: int) -> Case:
    """As many tokens, one segment to so many shards as the branch says; in calls of a chunk of the order's."""
    n, (branch,) = by * case.tokens, case.pattern.branches
    length = branch.segment_length * (n // case.world) if case.order == "contiguous" and branch.segment_length else n
    rate, offset = (branch.dilation_rate, branch.offset) if case.order == "contiguous" else (1, 0)
    piece = n // (2 * case.world if case.order == "zigzag" else case.world) // rate
    return replace(case, tokens=n, pattern=Pattern((Branch(length, rate, offset),), case.pattern.causal), bucket=piece)


def _check_counted(backend: Backend, case: Case) -> None:
    n, p, causal, (branch,) = case.tokens, case.world, case.pattern.causal, case.pattern.branches
    backend.submit(outline, case, (case, None))
    plans: list[PlanOutline] = [plan for (plan,) in backend.collect()]
    where = f"{case.order} with {n} tokens on {p} ranks, {branch}"
    length, rate = branch.segment_length or n, branch.dilation_rate
    _equal(f"{where}: counts", {plan.counts for plan in plans}, {(n // p,) * p})
    pairs = sum(call.pairs for plan in plans for call in plan.calls)
    _equal(f"{where}: pairs", pairs, closed_forms.segment_pairs(n, length, rate, case.heads, causal))
    if case.exchange == "gather" or (rate == 1 and length == n):
        wanted = closed_forms.dense_slots(n, p, case.kv_heads, causal, case.order, case.exchange)
    else:
        wanted = closed_forms.segment_slots(n, p, length, rate, case.kv_heads, causal, case.exchange)
    for name in ("sent", "returned"):
        found = sum(slots for plan in plans for _, _, slots in getattr(plan, name))
        _equal(f"{where}: slots {name}", found, wanted)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _by_peer(messages: tuple[tuple[int, int, int], ...], p: int) -> list[int]:
    found = [0] * p
    for _, peer, slots in messages:
        found[peer] += slots
    return found


def _equal(what: str, found: Any, wanted: Any) -> None:
    if not np.array_equal(found, wanted) if isinstance(wanted, np.ndarray) else found != wanted:
        raise WrongResult(f"{what}: {found}, must be {wanted}")


def _premise(case: Case, how: Any) -> None:
    fields.exactly("how", how, ["way", "by"])
    fields.choice("way of how", how["way"], WAYS)
    fields.at_most("tokens", case.tokens, _MOST_SHORT)
    fields.integer("by of how", how["by"], 1, MOST_INTEGER // case.tokens)
    fields.choice("order", case.order, ORDERS)
    if case.bucket is None or case.group is not None:
        raise ValueError(f"bucket and group are {case.bucket} and {case.group}; there must be a bucket, and no group")
    if case.cuts is not None and (case.order != "contiguous" or how["way"] == "counted"):
        raise ValueError(f"cuts is {case.cuts}; it must be None but for the contiguous order, scaled")
    unit = 16 * case.world if how["way"] == "counted" else 2 * case.world if case.order == "zigzag" else case.world
    if case.cuts is None and case.tokens % unit:
        raise ValueError(f"tokens is {case.tokens}; it must be a multiple of {unit}")
    if case.order == "striped" and (how["by"] - 1) % case.world:
        raise ValueError(f"by of how is {how['by']}; less 1 it must be a multiple of the {case.world} ranks")
    if how["way"] == "counted":
        _check_one_branch(case)


def _check_one_branch(case: Case) -> None:
    (branch, *others), spans = case.pattern.branches, case.pattern.branches[0].segment_length
    single = isinstance(branch.offset, int) or case.heads == case.kv_heads
    if others or branch.heads is not None or not spans or case.world % spans or 8 % branch.dilation_rate or not single:
        raise ValueError(
            f"pattern is {case.pattern}; it must be one branch for all heads, whose segment length (in shards) divides "
            "the number of ranks, whose rate divides 8, and whose offset is one for all grouped heads"
        )


LONG_PLANS = Law("plans of long sequences", _draw, check_sizes, _premise, share=0.02, most=100)
