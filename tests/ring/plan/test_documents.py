"""Plans of packed documents: the oracle's pairs, nothing in vain, and the same plans as segments have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from ring.layout import Layout
from ring.plan.exchanges import KEY_EXCHANGES
from ring.plan.plan import Plan, plan_of
from tests.ring.plan.plan_walk import PlanSetting, check


@pytest.mark.parametrize("varlen", (0, 3))
@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 3), min_size=12, max_size=20), p=st.integers(1, 2))
def test_many_documents_of_few_lengths(lengths: list[int], p: int, varlen: int) -> None:
    """Documents of one length lie at any distances, and share calls with each other only."""
    for causal in (False, True):
        pattern, layout = Pattern.dense(causal, tuple(lengths)), Layout.contiguous(sum(lengths), p)
        check(PlanSetting(pattern, layout, 1, 1, "direct", 9, varlen))


@pytest.mark.parametrize("order", ("contiguous", "zigzag", "striped"))
def test_equal_documents_are_planned_as_segments(order: str) -> None:
    branches, equal = Pattern.longnet((8, None), (1, 3), 2).branches, Branch(None, 2, (0, 1))
    for exchange in KEY_EXCHANGES.values():
        for causal in (False, True):
            for pattern, other in (
                (Pattern(branches, causal, (0, 48, 0)), Pattern(branches, causal)),
                (Pattern((equal,), causal, (6,) * 8), Pattern((Branch(6, 2, (0, 1)),), causal)),
            ):
                for rank in range(3):
                    arguments = getattr(Layout, order)(48, 3), rank, 2, 1, exchange, 7
                    assert described(plan_of(pattern, *arguments)) == described(plan_of(other, *arguments))


def described(plan: Plan) -> object:
    """A plan in plain values: its sizes, its tiles and its messages."""
    tiles = [*plan.local, *(tile for step in plan.steps for tile in step.tiles)]
    return (
        plan.sizes,
        [(x.query_rows.key, x.key_rows.key, x.query_heads, x.key_heads, x.mask) for x in tiles],
        [(x.sends, x.receives, x.return_sends, x.return_receives, x.carried, x.once) for x in plan.steps],
        [(m.rows.key, m.heads, m.slots.key) for step in plan.steps for m in (*step.gathers, *step.scatters)],
    )


def calls(lengths: tuple[int, ...], causal: bool, bucket: int, varlen: int = 0) -> list[tuple[int, int, int]]:
    """(folds, rows, sequences) of each call on one rank."""
    layout = Layout.contiguous(sum(lengths), 1)
    setting = PlanSetting(Pattern.dense(causal, lengths), layout, 1, 1, "ring", bucket, varlen)
    check(setting)
    found = [(x.query_rows, 0 if x.sequences is None else len(x.sequences.key) - 1) for _, x in setting.tiles()]
    return sorted((rows.folds, rows.length, sequences) for rows, sequences in found)


@pytest.mark.parametrize("causal", (False, True))
def test_equal_documents_share_calls(causal: bool) -> None:
    lengths = (3, 2, 3, 1, 3, 3, 2, 1, 4, 2)  # lengths 1 and 2, twice and three times; 3, four times; 4
    assert calls(lengths, causal, 1000) == [(1, 4, 0), (2, 1, 0), (3, 2, 0), (4, 3, 0)]
    assert calls(lengths, causal, 6) == [(1, 4, 0), (2, 1, 0), (2, 3, 0), (2, 3, 0), (3, 2, 0)]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    ("bucket", "varlen", "wanted"),
    (
        (1000, 7, [(1, 34, 6), (4, 2, 0)]),
        (1000, 6, [(1, 7, 0), (1, 9, 0), (1, 18, 4), (4, 2, 0)]),
        (1000, 4, [(1, 5, 0), (1, 6, 0), (1, 7, 0), (1, 7, 2), (1, 9, 0), (4, 2, 0)]),
        (12, 7, [(1, 4, 0), (1, 9, 0), (1, 9, 2), (1, 12, 2), (4, 2, 0)]),
    ),
)
def test_documents_of_several_lengths_share_calls(
    bucket: int, varlen: int, wanted: list[tuple[int, int, int]], causal: bool
) -> None:
    """Calls take as many as the bucket allows, without folds of many equal ones; longer ones if they are fewer."""
    assert calls((3, 6, 5, 7, 9, 4, 2, 2, 2, 2), causal, bucket, varlen) == wanted


def test_a_message_of_many_documents_is_one_copy() -> None:
    setting = PlanSetting(Pattern.dense(True, (3, 2, 5, 1, 4) * 9), Layout.striped(135, 2), 1, 1, "direct", 1000)
    assert [[len(step.gathers) for step in plan.steps] for plan in setting.plans] == [[1], [1]]
