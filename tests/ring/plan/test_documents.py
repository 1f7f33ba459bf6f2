"""Plans of packed documents: the oracle's pairs, nothing in vain, and the same plans as segments have."""

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
from tests.ring.plan.plan_walk import PlanSetting, check
from tests.support.plan_settings import documents

ORDERS = ("contiguous", "zigzag", "striped", "hilbert")
DOCUMENTS = (
    (5, 14, 5),  # one across three ranks of contiguous shards
    (3, 0, 1, 0, 7, 1, 1, 11),
    (1,) * 24,
    (6,) * 4,
    (0, 0, 23, 1, 0),
)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
def test_pairs_messages_and_gradients(lengths: tuple[int, ...], order: str, causal: bool) -> None:
    layout = getattr(Layout, order)(24, 3)
    dilated = Pattern.longnet((4, None), (1, 2), 4, causal, documents=lengths)
    for pattern in (Pattern.dense(causal, lengths), dilated, Pattern((Branch(5, 3, 2),), causal, lengths)):
        for exchange, bucket in zip(EXCHANGES, (3, 1000, 3), strict=True):
            check(PlanSetting(pattern, layout, 4, 2, exchange, bucket))


@pytest.mark.parametrize("varlen", (0, 3))
@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 3), min_size=12, max_size=20), p=st.integers(1, 2))
def test_many_documents_of_few_lengths(lengths: list[int], p: int, varlen: int) -> None:
    """Those of one length lie at any distances, and share calls with each other and with none else."""
    for causal in (False, True):
        pattern, layout = Pattern.dense(causal, tuple(lengths)), Layout.contiguous(sum(lengths), p)
        check(PlanSetting(pattern, layout, 1, 1, "direct", 9, varlen))


@pytest.mark.parametrize("exchange", ("ring", "direct"))
@pytest.mark.parametrize("order", ("contiguous", "zigzag"))
def test_documents_within_a_rank_send_nothing(order: str, exchange: str) -> None:
    lengths = (2, 2, 0, 4, 1, 3, 4, 4, 4)  # none crosses a multiple of 4
    setting = PlanSetting(Pattern.dense(False, lengths), getattr(Layout, order)(24, 3), 1, 1, exchange, 1000)
    assert not any(plan.steps for plan in setting.plans)


@pytest.mark.parametrize("order", ORDERS)
def test_one_document_is_planned_as_none_and_equal_ones_as_segments(order: str) -> None:
    n, offsets = 48, (0, 1)
    pairs = [
        (Pattern.longnet((8, None), (1, 3), 2, True, documents=(0, n, 0)), Pattern.longnet((8, None), (1, 3), 2, True))
    ]
    if order != "hilbert":  # a listed order has no views to compare
        for causal in (False, True):
            packed = Pattern((Branch(None, 2, offsets),), causal, (6,) * 8)
            pairs.append((packed, Pattern((Branch(6, 2, offsets),), causal)))
    for patterns in pairs:
        for exchange in EXCHANGES:
            for rank in range(3):
                arguments = getattr(Layout, order)(n, 3), rank, 2, 1, exchange, 7
                one, other = (described(plan_of(pattern, *arguments)) for pattern in patterns)
                assert one == other


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


def calls(lengths: tuple[int, ...], causal: bool, bucket: int, varlen: int = 0) -> list[tuple[int, int, int]]:
    """(folds, rows, sequences) of each call on one rank."""
    layout = Layout.contiguous(sum(lengths), 1)
    setting = PlanSetting(Pattern.dense(causal, lengths), layout, 1, 1, "ring", bucket, varlen)
    check(setting)
    found = [(x.query_rows, 0 if x.sequences is None else len(x.sequences.key) - 1) for _, x in setting.tiles()]
    return sorted((rows.folds, rows.length, sequences) for rows, sequences in found)


@pytest.mark.parametrize("causal", (False, True))
def test_documents_of_equal_length_share_calls_wherever_they_lie(causal: bool) -> None:
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
    """As many as the bucket allows, without folds of many equal ones; longer ones if they are the smaller part."""
    assert calls((3, 6, 5, 7, 9, 4, 2, 2, 2, 2), causal, bucket, varlen) == wanted


def test_a_message_of_many_documents_is_one_copy() -> None:
    setting = PlanSetting(Pattern.dense(True, (3, 2, 5, 1, 4) * 9), Layout.striped(135, 2), 1, 1, "direct", 1000)
    assert [[len(step.gathers) for step in plan.steps] for plan in setting.plans] == [[1], [1]]
    check(setting)


@settings(max_examples=100)
@given(st.data(), st.integers(1, 40))
def test_pieces_are_the_runs_cut_by_documents(data: st.DataObject, n: int) -> None:
    lengths = data.draw(documents(n))
    table = DocumentTable.of(lengths, n)
    edges = np.cumsum([0, *(lengths or (n,))])
    runs, found = [], []
    for rank in range(data.draw(st.integers(1, 3))):
        start, step = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, 9))
        runs.append((rank, 7 * rank, start, step, data.draw(st.integers(1, max(1, (n - 1 - start) // step + 1)))))
    pieces = Pieces.of(np.array(runs, np.int64).reshape(-1, 5), table)
    for i in range(len(pieces.rank)):
        element = np.arange(pieces.length[i])
        assert len(element)
        positions = pieces.origin[i] + pieces.start[i] + pieces.step[i] * element
        held = np.searchsorted(edges, positions, side="right") - 1
        assert (edges[held] == pieces.origin[i]).all() and table.begin[pieces.document[i]] == pieces.origin[i]
        found += [(int(pieces.rank[i]), int(pieces.row[i] + e), int(positions[e])) for e in element.tolist()]
    assert found == [
        (rank, row + e, start + e * step) for rank, row, start, step, length in runs for e in range(length)
    ]
