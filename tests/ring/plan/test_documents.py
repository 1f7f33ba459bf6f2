"""Plans of packed documents: pairs by the oracle's mask, nothing in vain, and the same plans as segments have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from ring.layout import Layout
from ring.plan.pieces import DocumentTable, Pieces
from ring.plan.plan import EXCHANGES, plan_of
from ring.plan.tile import Mask
from tests.ring.plan.test_plan import check
from tests.support.plan_settings import documents
from verification.run.plan_walk import PlanSetting, PlanWalk

ORDERS = ("contiguous", "zigzag", "striped", "hilbert")
DOCUMENTS = (
    (24,),
    (5, 14, 5),  # one across three ranks of contiguous shards
    (3, 0, 1, 0, 7, 1, 1, 11),
    (1,) * 24,
    (6,) * 4,
    (0, 0, 23, 1, 0),
)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
def test_pairs_messages_and_gradients(lengths: tuple[int, ...], order: str, causal: bool, exchange: str) -> None:
    layout = getattr(Layout, order)(24, 3)
    dilated = Pattern.longnet((4, None), (1, 2), 4, causal, documents=lengths)
    for pattern in (Pattern.dense(causal, lengths), dilated, Pattern((Branch(5, 3, 2),), causal, lengths)):
        for bucket in (3, 1000):
            check(PlanSetting(pattern, layout, 4, 2, exchange, bucket))


@pytest.mark.parametrize("exchange", ("ring", "direct"))
@pytest.mark.parametrize("order", ("contiguous", "zigzag"))
def test_documents_within_a_rank_send_nothing(order: str, exchange: str) -> None:
    lengths = (2, 2, 0, 4, 1, 3, 4, 4, 4)  # none crosses a multiple of 4
    setting = PlanSetting(Pattern.dense(False, lengths), getattr(Layout, order)(24, 3), 1, 1, exchange, 1000)
    assert not any(plan.steps for plan in setting.plans)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("order", ("contiguous", "zigzag", "striped"))  # a listed order has no views to compare
def test_documents_of_one_length_are_planned_as_segments(order: str, exchange: str) -> None:
    layout, arguments = getattr(Layout, order)(48, 3), (2, 1, exchange, 7)
    for causal in (False, True):
        packed = Pattern((Branch(None, 2, (0, 1)),), causal, (6,) * 8)
        segments = Pattern((Branch(6, 2, (0, 1)),), causal)
        for rank in range(3):
            one, other = (plan_of(pattern, layout, rank, *arguments) for pattern in (packed, segments))
            assert described(one) == described(other)


@pytest.mark.parametrize("order", ORDERS)
def test_one_document_is_planned_as_none(order: str) -> None:
    layout = getattr(Layout, order)(37, 3)
    for lengths in ((37,), (0, 37, 0)):
        for rank in range(3):
            one, other = (
                plan_of(Pattern.longnet((8, None), (1, 3), 4, True, documents=given), layout, rank, 4, 2, "ring", 9)
                for given in (lengths, None)
            )
            assert described(one) == described(other)


def described(plan: Any) -> object:
    """A plan in plain values: its messages, its tiles and its slot maps."""
    steps = [
        (
            step.sends, step.receives, step.return_sends, step.return_receives, step.carried, step.once,
            [(m.rows.key, m.heads, m.slots.key, m.columns) for m in (*step.gathers, *step.scatters)],
            [tile_of(tile) for tile in step.tiles],
        )
        for step in plan.steps
    ]  # fmt: skip
    return [tile_of(tile) for tile in plan.local], steps, plan.sizes


def tile_of(tile: Any) -> object:
    positions = None
    if tile.mask is Mask.POSITION:
        positions = (tile.query_positions.tolist(), tile.key_positions.tolist())
    return tile.query_rows.key, tile.key_rows.key, tile.query_heads, tile.key_heads, tile.mask, positions


def test_documents_of_equal_length_share_calls_wherever_they_lie() -> None:
    lengths = (3, 2, 3, 1, 3, 3, 2, 1, 4, 2)  # on one rank: lengths 1 and 2, twice and three times; 3, four times; 4
    for causal in (False, True):
        setting = PlanSetting(Pattern.dense(causal, lengths), Layout.contiguous(24, 1), 1, 1, "ring", 1000)
        found = sorted((tile.query_rows.length, tile.query_rows.folds) for tile in setting.plans[0].local)
        assert found == [(1, 2), (2, 3), (3, 4), (4, 1)]
        check(setting)
        few = PlanSetting(setting.pattern, setting.layout, 1, 1, "ring", 6)  # two documents of 3 tokens, three of 2
        assert sorted((tile.query_rows.length, tile.query_rows.folds) for tile in few.plans[0].local) == [
            (1, 2), (2, 3), (3, 2), (3, 2), (4, 1)
        ]  # fmt: skip
        check(few)


@pytest.mark.parametrize("causal", (False, True))
def test_documents_of_several_lengths_share_calls(causal: bool) -> None:
    """As many as the bucket allows, without folds of many equal ones; longer ones if they are the smaller part."""
    lengths = (3, 6, 5, 7, 9, 4, 2, 2, 2, 2)

    def calls(bucket: int, varlen: int) -> list[tuple[int, int, int]]:
        """(folds, rows, sequences) of each"""
        setting = PlanSetting(Pattern.dense(causal, lengths), Layout.contiguous(42, 1), 1, 1, "ring", bucket, varlen)
        check(setting)
        return sorted(
            (
                tile.query_rows.folds,
                tile.query_rows.length,
                0 if tile.sequences is None else len(tile.sequences.key) - 1,
            )
            for tile in setting.plans[0].local
        )

    assert calls(1000, 7) == [(1, 34, 6), (4, 2, 0)]
    assert calls(1000, 6) == [(1, 7, 0), (1, 9, 0), (1, 18, 4), (4, 2, 0)]
    assert calls(1000, 4) == [(1, 5, 0), (1, 6, 0), (1, 7, 0), (1, 7, 2), (1, 9, 0), (4, 2, 0)]
    assert calls(12, 7) == [(1, 4, 0), (1, 9, 0), (1, 9, 2), (1, 12, 2), (4, 2, 0)]


def test_a_message_of_many_documents_is_one_copy() -> None:
    lengths = (3, 2, 5, 1, 4) * 9
    setting = PlanSetting(Pattern.dense(True, lengths), Layout.striped(135, 2), 1, 1, "direct", 1000)
    for plan in setting.plans:
        assert [len(step.gathers) for step in plan.steps] == [1]
    check(setting)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 40))
def test_pieces_are_the_runs_cut_by_documents(data: st.DataObject, n: int) -> None:
    lengths = data.draw(documents(n))
    table = DocumentTable.of(lengths, n)
    edges = np.cumsum([0, *(lengths or (n,))])
    runs, found = [], []
    for rank in range(data.draw(st.integers(1, 3))):
        start, step = data.draw(st.integers(0, max(n - 1, 0))), data.draw(st.integers(1, 9))
        length = data.draw(st.integers(1, max(1, (n - 1 - start) // step + 1)))
        if n:
            runs.append((rank, 7 * rank, start, step, length))
    pieces = Pieces.of(np.array(runs, np.int64).reshape(-1, 5), table)
    for i in range(len(pieces.rank)):
        assert pieces.length[i] > 0
        positions = pieces.origin[i] + pieces.start[i] + pieces.step[i] * np.arange(pieces.length[i])
        held = np.searchsorted(edges, positions, side="right") - 1
        assert (edges[held] == pieces.origin[i]).all() and (table.begin[pieces.document[i]] == pieces.origin[i])
        rows = pieces.row[i] + np.arange(pieces.length[i])
        found += [(int(pieces.rank[i]), *pair) for pair in zip(rows.tolist(), positions.tolist(), strict=True)]
    expected = [(rank, row + e, start + e * step) for rank, row, start, step, length in runs for e in range(length)]
    assert found == expected


def test_segments_are_numbered_through_all_documents() -> None:
    table = DocumentTable.of((5, 0, 4, 1), 10)
    assert table.begin.tolist() == [0, 5, 9] and table.end.tolist() == [5, 9, 10]
    assert table.first_segment(2).tolist() == [0, 3, 5] and table.first_segment(10).tolist() == [0, 1, 2]
    assert table.holding(np.arange(10)).tolist() == [0] * 5 + [1] * 4 + [2]


def test_a_walk_counts_the_slots_of_documents_across_ranks_only() -> None:
    setting = PlanSetting(Pattern.dense(False, (4, 4, 4)), Layout.contiguous(12, 2), 1, 1, "direct", 1000)
    assert PlanWalk(setting).go().sent == [2, 2]  # of the middle document, two tokens each way
