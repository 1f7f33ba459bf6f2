"""Plans of sequences of up to 2^40 tokens are those of short ones, at other positions; nobody makes a tensor of them.

Two ways to know what the plan of a long sequence must be, in each order that is kept as runs:

    scaled   Positions, documents, segments, windows, rates and offsets times `by`: the long pattern selects none but
             the positions by * x, and sees among them what the short one sees. So messages and calls are those of the
             short plan, whose cost `reference.cost` counts, and its positions times `by`.
    counted  One branch over equal shards: messages and pairs of any size, in closed form.

Striped, position by * x lies on the rank of x if by - 1 is a multiple of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference import closed_forms, cost, fields
from reference.pattern import Branch, Pattern
from verification.case import Case
from verification.check.laws.law import MOST_INTEGER, How, Law
from verification.draw.plan_cases import plan_cases
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.plan_outline import CallOutline, PlanOutline, Strip, outline, refusals

Ints = NDArray[np.int64]
ORDERS = ("contiguous", "zigzag", "striped")
MOST_FACTORS = 2
RATES = (1, 2, 4, 8)  # of the branch that is counted
_LONG = 2**31
_MOST_SHORT = 4096  # tokens of a Case before it is made long
_SLOT = 8  # bytes that `reference.cost` counts for a slot of one number in fp32, for keys and for gradients alike
TOO_LONG = (MOST_INTEGER + 1, 2**63, 10**30)


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    """The order and the cuts of the Case: those of the contiguous order; the others are cut evenly. shards, rate,
    offsets (by head): of the branch that is counted, a segment of which is so many shards.
    """
    case = draw(plan_cases(world))
    unit = _unit(world)
    tokens = unit * -(-case.tokens // unit)
    cuts = None if case.cuts is None else (*case.cuts[:-1], tokens)
    bucket = max(case.bucket or 1, tokens // 6)  # few calls: each is compared with its like in several plans
    case = case.lengthened(tokens, order="contiguous", cuts=cuts, bucket=bucket)
    factors = st.integers(-(-_LONG // tokens // world), (MOST_INTEGER // tokens - 1) // world)
    rate = draw(st.sampled_from(RATES))
    spread = case.heads == case.kv_heads and draw(st.booleans())
    first = draw(st.integers(0, rate - 1))
    how: How = {
        "by": [1 + world * draw(factors) for _ in range(MOST_FACTORS)],
        "shards": draw(st.sampled_from([m for m in range(1, world + 1) if world % m == 0])),
        "rate": rate,
        "offsets": [(first + head * spread) % rate for head in range(case.heads)],
    }
    return case, how


def _unit(world: int) -> int:
    """Chunks of the zigzag order, and shards at every rate, are then of equal length."""
    return 2 * max(RATES) * world


def check_sizes(backend: Backend, case: Case, how: How) -> float:
    backend.submit(refusals, case, TOO_LONG)
    for said in (said for of_rank in backend.collect() for said in of_rank):
        if not said.startswith("ValueError: n must"):
            raise WrongResult(
                f"a layout of more than 2**40 tokens must be refused by a ValueError about n, got {said!r}"
            )
    for order in ORDERS:
        _check_scaled(backend, replace(case, order=order, cuts=case.cuts if order == "contiguous" else None), how["by"])
    for order in ORDERS:
        for causal in (False, True):
            _check_counted(backend, _counted(case, order, causal, how))
    return 0.0


# --- scaled -----------------------------------------------------------------------------------------------------------


def scaled(case: Case, by: int) -> Case:
    """Every position of the Case times `by`."""
    branches = []
    for branch in case.pattern.branches:
        length = None if branch.segment_length is None else by * branch.segment_length
        offset = branch.offset
        moved = tuple(by * one for one in offset) if isinstance(offset, tuple) else by * offset
        window = None if branch.window is None else by * branch.window
        branches.append(Branch(length, by * branch.dilation_rate, moved, branch.heads, window))
    cuts = None if case.cuts is None else tuple(by * cut for cut in case.cuts)
    documents = case.pattern.documents
    longer = None if documents is None else tuple(by * length for length in documents)
    pattern = Pattern(tuple(branches), case.pattern.causal, longer)
    return replace(case, tokens=by * case.tokens, cuts=cuts, pattern=pattern)


def _check_scaled(backend: Backend, case: Case, factors: Sequence[int]) -> None:
    backend.submit(outline, case, (case, None), *((scaled(case, by), None) for by in factors))
    costs = _ShortCosts.of(case)
    for rank, (short_plan, *long_plans) in enumerate(backend.collect()):
        for by, long_plan in zip(factors, long_plans, strict=True):
            where = f"rank {rank} of {case.world}, {case.order} with {by * case.tokens} tokens"
            _check_costs(where, case, by, rank, costs, long_plan)
            if case.order != "striped" or case.exchange != "gather":
                _check_calls(where, case, by, rank, short_plan, long_plan)


def _check_calls(where: str, case: Case, by: int, rank: int, short_plan: PlanOutline, long_plan: PlanOutline) -> None:
    """Not where striped shards are gathered: rows of different shards then lie at other distances than `by` times those
    of the short ones, and by distances calls are joined.
    """
    long = scaled(case, by)
    _equal(f"{where}: calls", len(long_plan.calls), len(short_plan.calls))
    for number, calls in enumerate(zip(short_plan.calls, long_plan.calls, strict=True)):
        _check_call(f"{where}: call {number}", case, long, by, rank, *calls)


@dataclass(frozen=True)
class _ShortCosts:
    """By `reference.cost`, of a short Case."""

    sent: cost.Traffic
    buffers: cost.Buffers
    pairs: tuple[int, ...]

    @classmethod
    def of(cls, case: Case) -> _ShortCosts:
        setting = cost.Setting(case.pattern, case.shards().positions, 1, case.heads, case.kv_heads, 1)
        buffers = cost.buffers(setting, case.exchange, case.tokens_per_call)
        return cls(cost.sent(setting, case.exchange), buffers, cost.flops(setting).pairs)


def _check_costs(where: str, case: Case, by: int, rank: int, costs: _ShortCosts, plan: PlanOutline) -> None:
    """Those of the short Case, except that `gather` sends whole shards."""
    whole, copies = (by, 1) if case.exchange == "gather" else (1, 2)
    sent, buffers = costs.sent, costs.buffers
    _equal(f"{where}: counts", plan.counts, tuple(by * count for count in case.shards().counts))
    _equal(f"{where}: slots sent", _by_peer(plan.sent, case.world), whole * sent.forward[rank] // _SLOT)
    due = whole * sent.backward_gradients[rank] // _SLOT
    _equal(f"{where}: slots returned", _by_peer(plan.returned, case.world), due)
    held = (buffers.receive[rank] // copies, buffers.send[rank], buffers.returned[rank])
    _equal(f"{where}: slots of buffers", plan.sizes, tuple(whole * int(size) // _SLOT for size in held))
    _equal(f"{where}: pairs", sum(call.pairs for call in plan.calls), costs.pairs[rank])


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


def _counted(case: Case, order: str, causal: bool, how: How) -> Case:
    """The Case's tokens times the first factor, without its documents, of which there is no closed form; in calls of
    one shard's rows, or one chunk's."""
    n = how["by"][0] * case.tokens
    branch, piece = Branch(n), n // case.world
    if order == "contiguous":
        branch, piece = Branch(how["shards"] * piece, how["rate"], tuple(how["offsets"])), piece // how["rate"]
    elif order == "zigzag":
        piece //= 2
    return replace(case, order=order, cuts=None, tokens=n, pattern=Pattern((branch,), causal), bucket=piece)


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
    fields.exactly("how", how, ["by", "shards", "rate", "offsets"])
    fields.at_most("tokens", case.tokens, _MOST_SHORT)
    if case.bucket is None or case.group is not None or case.order != "contiguous" or case.tokens % _unit(case.world):
        raise ValueError(
            f"tokens, order, group and bucket are {case.tokens}, {case.order!r}, {case.group} and {case.bucket}; they "
            f"must be a multiple of {_unit(case.world)}, 'contiguous', None and a number"
        )
    for by in fields.integers("by of how", how["by"]):
        fields.integer("an entry of by of how", by, 1, MOST_INTEGER // case.tokens)
        if (by - 1) % case.world:
            raise ValueError(f"by of how has {by}; less 1 it must be a multiple of the {case.world} ranks")
    if how["rate"] not in RATES:
        raise ValueError(f"rate of how is {how['rate']!r}; it must be one of {RATES}")
    shards = fields.integer("shards of how", how["shards"], 1)
    offsets = fields.integers("offsets of how", how["offsets"])
    alike = len(set(offsets)) == 1 or case.heads == case.kv_heads
    if not how["by"] or case.world % shards or len(offsets) != case.heads or max(offsets) >= how["rate"] or not alike:
        raise ValueError(
            f"how is {how}; shards must divide the {case.world} ranks, and there must be a factor and, below the rate, "
            f"{case.heads} offsets, equal ones where heads are grouped"
        )


LONG_PLANS = Law("plans of long sequences", _draw, check_sizes, _premise, share=0.08, most=60)
