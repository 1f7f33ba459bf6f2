"""The strategies reach what they claim to reach, draw valid Cases only, and shrink to the simplest one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st

from reference.pattern import Branch
from verification.case import Case
from verification.strategies import cases, digits, head_range, permutation

DRAWS = 3000
QUIET = settings(
    max_examples=DRAWS,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=(HealthCheck.too_slow,),
)


def draw_many(world: int, count: int) -> list[Case]:
    drawn: list[Case] = []

    @seed(1)
    @settings(QUIET, max_examples=count)
    @given(cases(world))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    return drawn


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return draw_many(4, DRAWS)


def members(case: Case) -> int:
    return case.world if case.group is None else len(case.group)


def some(condition: Callable[[Case, Branch], bool]) -> Callable[[Case], bool]:
    return lambda case: any(condition(case, branch) for branch in case.pattern.branches)


def offsets_of_one_kv_head(case: Case, branch: Branch) -> int:
    """The most distinct offsets among the query heads that share a key/value head."""
    offsets = branch.offsets(case.heads)
    share = case.heads // case.kv_heads
    groups = [set(offsets[start : start + share]) - {None} for start in range(0, case.heads, share)]
    return max(len(group) for group in groups)


# Each feature and how often, at least, it must be met among 3000 draws: a strategy that stops reaching one
# fails here.
FEATURES: dict[str, tuple[Callable[[Case], bool], int]] = {
    "dense": (lambda c: c.pattern.branches == (Branch(),), 150),
    "causal": (lambda c: c.pattern.causal, 900),
    "one branch": (lambda c: len(c.pattern.branches) == 1 and c.pattern.branches != (Branch(),), 300),
    "several branches": (lambda c: len(c.pattern.branches) > 1, 900),
    "segment beyond the sequence": (some(lambda c, b: (b.segment_length or 0) > c.tokens), 150),
    "segment does not divide the sequence": (some(lambda c, b: bool(c.tokens % (b.segment_length or 1))), 600),
    "dilation beyond the segment": (some(lambda c, b: b.dilation_rate > (b.segment_length or math.inf)), 150),
    "dilation does not divide the segment": (some(lambda c, b: bool((b.segment_length or 0) % b.dilation_rate)), 600),
    "an offset per head": (some(lambda c, b: isinstance(b.offset, tuple) and len(set(b.offset)) > 1), 300),
    "some heads only": (some(lambda c, b: b.heads is not None), 300),
    "a head that no branch serves": (
        lambda c: any(all(b.offsets(c.heads)[h] is None for b in c.pattern.branches) for h in range(c.heads)),
        30,
    ),
    "offset beyond a short tail": (
        some(
            lambda c, b: (
                0
                < c.tokens % (b.segment_length or c.tokens)
                <= max((o for o in b.offsets(c.heads) if o is not None), default=0)
            )
        ),
        100,
    ),
    "several offsets for one kv head": (some(lambda c, b: offsets_of_one_kv_head(c, b) > 1), 100),
    "MQA": (lambda c: c.kv_heads == 1 < c.heads, 300),
    "GQA": (lambda c: 1 < c.kv_heads < c.heads, 300),
    "an empty shard": (lambda c: 0 in c.layout().counts, 300),
    "uneven cuts": (lambda c: c.cuts is not None, 300),
    "fewer tokens than ranks": (lambda c: c.tokens < members(c), 100),
    "tokens that ranks do not divide": (lambda c: bool(c.tokens % members(c)), 900),
    "a subgroup": (lambda c: members(c) < c.world, 100),
    "a subgroup without rank 0": (lambda c: c.group is not None and c.group[0] > 0, 30),
    "one token": (lambda c: c.tokens == 1, 30),
    "forty tokens and more": (lambda c: c.tokens >= 40, 150),
    "several batches": (lambda c: c.batch > 1, 600),
    "head_dim 1": (lambda c: c.head_dim == 1, 100),
    "head_dim 32 and more": (lambda c: c.head_dim >= 32, 100),
    "head_dim no power of two": (lambda c: c.head_dim in (3, 5, 7, 12), 300),
    "explicit scale": (lambda c: c.scale is not None, 600),
    "large scores": (lambda c: c.score_scale > 10, 200),
    "bucket of one token": (lambda c: c.bucket == 1, 30),
    "bucket beyond the sequence": (lambda c: (c.bucket or 0) > c.tokens, 100),
    "strided": (lambda c: c.strided, 600),
}
CHOICES = {
    "order": ("contiguous", "zigzag", "striped", "hilbert", "shuffled"),
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "values": ("normal", "ties", "huge", "tiny", "onehot", "constant"),
    "exchange": ("ring", "direct", "gather"),
    "kernel": ("auto", "math", "flash"),
    "lse": ("unused", "returned", "differentiated"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_is_reached(drawn: list[Case], feature: str) -> None:
    condition, at_least = FEATURES[feature]
    assert sum(map(condition, drawn)) >= at_least


@pytest.mark.parametrize("field", CHOICES)
def test_every_choice_is_drawn(drawn: list[Case], field: str) -> None:
    seen = [getattr(case, field) for case in drawn]
    assert set(seen) == set(CHOICES[field])
    assert all(seen.count(choice) >= DRAWS // 30 for choice in CHOICES[field])


def test_cases_are_valid_and_come_back_from_json(drawn: list[Case]) -> None:
    for case in drawn:
        case.pattern.validate(case.heads)
        layout = case.layout()
        assert (layout.n, layout.world_size) == (case.tokens, members(case))
        assert case.heads % case.kv_heads == 0
        assert Case.from_json(case.to_json()) == case


def test_a_world_of_one_draws_no_groups() -> None:
    assert all(case.group is None and case.world == 1 for case in draw_many(1, 300))


@pytest.mark.parametrize("world", (1, 2, 8))
def test_shrinks_to_the_simplest_case(world: int) -> None:
    simplest = find(cases(world), lambda case: True, settings=QUIET)
    assert simplest.pattern.branches == (Branch(),) and not simplest.pattern.causal
    assert (simplest.tokens, simplest.heads, simplest.kv_heads, simplest.head_dim, simplest.batch) == (1, 1, 1, 1, 1)
    assert (simplest.order, simplest.cuts, simplest.group, simplest.bucket) == ("contiguous", None, None, None)
    assert (simplest.dtype, simplest.exchange, simplest.kernel) == ("float32", "ring", "auto")
    assert (simplest.lse, simplest.values, simplest.strided, simplest.scale) == ("unused", "normal", False, None)


def test_shrinks_away_what_a_defect_does_not_need() -> None:
    def defect(case: Case) -> bool:
        return case.pattern.causal and case.tokens >= 5 and any(b.dilation_rate > 1 for b in case.pattern.branches)

    shrinking = settings(database=None, deadline=None, phases=(Phase.generate, Phase.shrink), max_examples=500)
    case = find(cases(4), defect, settings=shrinking)
    assert case.tokens == 5 and len(case.pattern.branches) == 1
    assert case.pattern.branches[0].dilation_rate == 2 and case.pattern.branches[0].offset == 0
    assert (case.dtype, case.order, case.exchange, case.heads) == ("float32", "contiguous", "ring", 1)


@given(st.integers(1, 5), st.data())
@settings(database=None, deadline=None, max_examples=50)
def test_decoders_reach_everything_once(count: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, count))
    arrangements = {permutation(i, range(count), size) for i in range(math.perm(count, size))}
    assert len(arrangements) == math.perm(count, size)
    assert permutation(0, range(count), size) == tuple(range(size))
    ranges = [head_range(i, count) for i in range(1 + count * (count + 1) // 2)]
    assert ranges[0] is None and len(set(ranges)) == len(ranges)
    assert all(r is None or 0 <= r.start < r.stop <= count for r in ranges)
    assert len({digits(i, 3, count) for i in range(3**count)}) == 3**count
