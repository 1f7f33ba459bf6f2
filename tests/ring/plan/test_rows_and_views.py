"""Rows, heads and stores: strided views and listings address the same elements as plain indexing."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring.plan.blocks import Heads
from ring.plan.rows import Rows, concatenate, folds, varlen_folds
from ring.strided_view import StridedView, _as_one, _has_words, _head_index, _row_index

BATCH, DIM = 2, 3


@st.composite
def regular_rows(draw: Any, disjoint: bool = False) -> Rows:
    length, number = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    step = draw(st.integers(1, 3))
    least = (length - 1) * step + 1 if disjoint else 1
    fold_step = draw(st.integers(least, least + 3)) if number > 1 else 0
    return Rows(draw(st.integers(0, 3)), step, length, fold_step, number)


@st.composite
def listed_rows(draw: Any, most: int = 20) -> Rows:
    """Distinct rows in any order, but not a regular grid kept as a view."""
    length, number = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    index = np.array(draw(st.permutations(range(most)))[: length * number], np.int64).reshape(number, length)
    return Rows(int(index[0, 0]), 1, length, 0, number, torch.from_numpy(index))


@st.composite
def rectangles(draw: Any, total: int) -> tuple[tuple[int, ...], ...]:
    """Distinct heads, at equal distances or not, in ascending order as blocks have them."""
    groups = draw(st.integers(1, total))
    per_group = draw(st.integers(1, total // groups))
    chosen = sorted(draw(st.permutations(range(total)))[: groups * per_group])
    return tuple(tuple(chosen[i * per_group : (i + 1) * per_group]) for i in range(groups))


def heads_of(total: int) -> st.SearchStrategy[Heads]:
    return rectangles(total).map(Heads.of)


rows_of_either_kind = st.one_of(regular_rows(disjoint=True), listed_rows())


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 3)), min_size=2, max_size=4), st.booleans()
)
def test_rows_are_concatenated_as_their_listings_are(drawn: list[tuple[int, int, int]], continued: bool) -> None:
    """continued: each begins behind the one before, mostly at its step."""
    parts: list[Rows] = []
    for start, step, length in drawn:
        behind = parts[-1].start + parts[-1].step * parts[-1].length if parts else start
        parts.append(Rows(behind if continued else start, step, length, 100, 2))
    found, wanted = concatenate(parts), Rows.of(np.concatenate([part.listed() for part in parts], axis=1))
    assert found.key == wanted.key


def test_long_rows_that_continue_each_other_are_not_listed() -> None:
    assert concatenate([Rows(2**33, 2, 2**36), Rows(2**33 + 2**37, 2, 1)]).key == Rows(2**33, 2, 2**36 + 1).key


def expected_tile(x: torch.Tensor, rows: Rows, heads: Heads) -> torch.Tensor:
    """(F, B, G, P, L, D) from x (B, N, H, D), element by element."""
    row, head = rows.listed(), heads.listed()
    tile = torch.empty(rows.folds, x.shape[0], heads.groups, heads.per_group, rows.length, x.shape[3], dtype=x.dtype)
    for f in range(rows.folds):
        for i in range(rows.length):
            for g in range(heads.groups):
                for j in range(heads.per_group):
                    tile[f, :, g, j, i] = x[:, int(row[f, i]), head[g][j]]
    return tile


def shard(kind: str, tokens: int = 56, heads: int = 6) -> torch.Tensor:
    """(B, N, H, D) with distinct elements, in several strides."""
    size = BATCH * tokens * heads * DIM
    if kind == "contiguous":
        return torch.arange(float(size)).view(BATCH, tokens, heads, DIM)
    if kind == "transposed":
        return torch.arange(float(size)).view(BATCH, heads, tokens, DIM).transpose(1, 2)
    if kind == "sliced":
        return torch.arange(8.0 * size).view(2 * BATCH, 2 * tokens, heads, 2 * DIM)[1::2, 3 : 3 + tokens, :, ::2]
    return torch.arange(float(size)).view(DIM, tokens, BATCH, heads).permute(2, 1, 3, 0)


KINDS = ("contiguous", "transposed", "sliced", "dim first")


# --- rows and heads ---


@given(regular_rows())
def test_regular_rows_are_what_they_say(rows: Rows) -> None:
    listing = rows.listed().tolist()
    assert listing == [
        [rows.start + f * rows.fold_step + i * rows.step for i in range(rows.length)] for f in range(rows.folds)
    ]


@given(regular_rows())
def test_rows_of_recognises_a_grid(rows: Rows) -> None:
    found = Rows.of(rows.listed())
    assert found.index is None and (found.listed() == rows.listed()).all()
    assert found.key == Rows.of(rows.listed().copy()).key


@given(listed_rows())
def test_rows_of_keeps_what_was_listed(rows: Rows) -> None:
    assert rows.index is not None
    found = Rows.of(rows.index.numpy())
    assert (found.listed() == rows.index.numpy()).all() and (found.folds, found.length) == (rows.folds, rows.length)
    if found.index is None:
        assert found.step >= 1 and found.fold_step >= 0


@pytest.mark.parametrize(
    "index, regular",
    [
        ([[5]], True),
        ([[3, 5, 7]], True),
        ([[3, 5, 8]], False),
        ([[7, 5, 3]], False),  # as_strided takes no negative strides
        ([[4, 4]], False),
        ([[8, 9], [0, 1]], False),
        ([[0, 1], [8, 9], [16, 17]], True),
        ([[0, 1], [8, 9], [17, 18]], False),
        ([[0, 1], [8, 10]], False),
    ],
)
def test_what_is_a_grid(index: list[list[int]], regular: bool) -> None:
    rows = Rows.of(np.array(index))
    assert (rows.index is None) == regular
    assert rows.listed().tolist() == index


def test_keys_tell_rows_apart() -> None:
    index = np.array([[3, 1, 2]])
    alike = [Rows.of(index), Rows.of(index.copy())]
    assert alike[0].key == alike[1].key
    others = [Rows.of(np.array(i)) for i in ([[3, 1, 4]], [[3, 4, 5]], [[3, 4, 5, 6]], [[3, 5, 7]], [[3], [4], [5]])]
    assert len({rows.key for rows in [*alike, *others]}) == 6


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_concatenate_puts_rows_side_by_side(starts: list[int], number: int, listed: bool) -> None:
    parts = []
    for start in starts:
        rows = Rows(start, 2, 3, 10 if number > 1 else 0, number)
        parts.append(Rows(start, 2, 3, 0, number, torch.from_numpy(rows.listed())) if listed else rows)
    found = concatenate(parts)
    assert (found.listed() == np.concatenate([part.listed() for part in parts], axis=1)).all()
    assert (found.folds, found.length) == (number, 3 * len(starts))


@given(rectangles(8))
def test_heads_of_lists_what_was_given(ids: tuple[tuple[int, ...], ...]) -> None:
    heads = Heads.of(ids)
    assert heads.listed() == ids and (heads.groups, heads.per_group) == (len(ids), len(ids[0]))
    if heads.ids is None:
        expected = [
            [heads.start + i * heads.step + j * heads.inner for j in range(heads.per_group)]
            for i in range(heads.groups)
        ]
        assert [list(row) for row in ids] == expected


@pytest.mark.parametrize(
    "ids, regular",
    [
        (((3,),), True),
        (((0, 1), (2, 3)), True),
        (((0, 2), (1, 3)), True),
        (((0, 1, 3),), False),
        (((0,), (1,), (3,)), False),
        (((0, 2, 3),), False),  # nearer than the first two
        (((0,), (2,), (3,)), False),
        (((0, 2), (3, 4)), False),
        (((0, 1), (3, 4), (6, 8)), False),
        (((0, 1), (2, 4)), False),
    ],
)
def test_which_heads_are_regular(ids: tuple[tuple[int, ...], ...], regular: bool) -> None:
    heads = Heads.of(ids)
    assert (heads.ids is None) == regular and heads.listed() == ids


# --- folds ---


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 3), st.sampled_from((2, 2, 2, 3, -1)), st.sampled_from((5, 5, 5, 4, 0))
        ),
        min_size=1,
        max_size=14,
    )
)
def test_folds_are_a_partition_at_equal_distances(steps: list[tuple[bool, int, int, int]]) -> None:
    """Mostly regular entries of two kinds: some share a segment, some lie at another distance on either side."""
    kind = np.array([step[0] for step in steps], np.int64)
    segment, left, right = (np.cumsum([step[i] for step in steps]) for i in (1, 2, 3))
    segment, left, right = np.where(segment > 0, segment, 0), left + 20, right + 20
    most = 3 + 2 * kind  # equal for equal signatures
    found = list(folds([kind], segment, left, right, most))
    assert sorted(i for fold in found for i in fold.members.tolist()) == list(range(len(steps)))
    for fold in found:
        members = fold.members
        assert len(set(kind[members].tolist())) == 1 and len(members) <= most[members[0]]
        assert (np.diff(segment[members]) > 0).all(), "two of one segment, or out of order"
        if len(members) == 1:
            assert (fold.left_step, fold.right_step) == (0, 0)
        else:
            assert fold.left_step > 0 and fold.right_step > 0
            assert (np.diff(left[members]) == fold.left_step).all()
            assert (np.diff(right[members]) == fold.right_step).all()


def test_an_entry_beyond_the_limit_has_a_call_to_itself() -> None:
    """Of documents of 2, 9 and 3 rows, at most 5 rows a call."""
    entries, lengths = np.arange(3), np.array([2, 9, 3])
    found = varlen_folds(
        [0 * entries], [lengths], entries, 10 * entries, 10 * entries, 0 * entries + 4, (lengths, lengths), 20, (5, 5)
    )
    members = [fold.members.tolist() for fold in islice(found, 9)]
    assert sorted(members) == [[0], [1], [2]]


def test_folds_take_as_many_as_they_may() -> None:
    count = np.arange(10)
    sizes = [len(f.members) for f in folds([0 * count], count, 3 * count, 5 * count, 0 * count + 4)]
    assert sizes == [4, 4, 2]
    assert [len(f.members) for f in folds([0 * count], count, 3 * count, 5 * count, 0 * count + 99)] == [10]
    nothing = np.empty(0, np.int64)
    assert list(folds([nothing], nothing, nothing, nothing, nothing)) == []


# --- stores ---


@settings(max_examples=60, deadline=None)
@given(rows_of_either_kind, heads_of(6), st.sampled_from(KINDS))
def test_a_view_of_a_shard(rows: Rows, heads: Heads, kind: str) -> None:
    x = shard(kind)
    tile = StridedView(x).view(rows, heads)
    assert tile.equal(expected_tile(x, rows, heads))
    if rows.index is None and heads.ids is None:
        assert tile.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "a copy where a view would do"


def test_two_dims_are_one_where_the_outer_goes_on_behind_the_inner() -> None:
    assert _as_one(3, 20, 4, 5) == 5
    assert [_as_one(3, step, 4, 5) for step in (15, 25, 40, 0)] == [None] * 4
    assert _as_one(1, 99, 4, 5) == 5 and _as_one(3, 99, 1, 5) == 99


@settings(max_examples=150, deadline=None)
@given(rows_of_either_kind, heads_of(6), st.sampled_from(KINDS), st.integers(1, BATCH), st.booleans(), st.booleans())
def test_a_tile_with_folds_and_batches_as_one_dim(
    rows: Rows, heads: Heads, kind: str, batch: int, wide: bool, in_words: bool
) -> None:
    """wide: rows of 16 bytes, which kernels that load in words may read where they lie."""
    x = shard(kind)[:batch]
    x = x.repeat(1, 1, 1, 4)[..., :4].contiguous() if wide else x
    tile = expected_tile(x, rows, heads)
    folds, _, groups, share, length, dim = tile.shape
    found = StridedView(x).batched(rows, heads, in_words)
    assert found.equal(tile.reshape(folds * batch, groups * share, length, dim))


@settings(max_examples=60, deadline=None)
@given(rows_of_either_kind, heads_of(6), st.sampled_from(KINDS))
def test_put_and_add_touch_their_tile_only(rows: Rows, heads: Heads, kind: str) -> None:
    base = shard(kind)
    wanted, tile = base.clone(), expected_tile(base, rows, heads)
    row, head = rows.listed(), heads.listed()
    new = torch.randn(tile.shape, generator=torch.Generator().manual_seed(0))
    added = wanted.clone()
    for f in range(rows.folds):
        for i in range(rows.length):
            for g in range(heads.groups):
                for j in range(heads.per_group):
                    wanted[:, int(row[f, i]), head[g][j]] = new[f, :, g, j, i]
                    added[:, int(row[f, i]), head[g][j]] += new[f, :, g, j, i]
    put, add = shard(kind), shard(kind)
    StridedView(put).put(rows, heads, new)
    StridedView(add).add(rows, heads, new)
    assert put.equal(wanted) and add.equal(added)


@st.composite
def slot_tiles(draw: Any) -> tuple[Rows, Heads, int]:
    """Packed rows of a block of some width, and some of its columns."""
    width = draw(st.integers(1, 4))
    heads = draw(heads_of(width))
    length, number = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    start, gap = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    rows = Rows(start, width, length, length * width + gap if number > 1 else 0, number)
    if draw(st.booleans()):
        order = draw(st.permutations(rows.listed().ravel().tolist()))
        rows = Rows.of(np.array(order).reshape(number, length))
    return rows, heads, width


@settings(max_examples=60, deadline=None)
@given(slot_tiles(), st.booleans())
def test_slots_are_addressed_by_row_plus_column(drawn: tuple[Rows, Heads, int], half: bool) -> None:
    rows, heads, _ = drawn
    buffer = torch.arange(90.0 * 2 * BATCH * DIM).view(90, 2, BATCH, DIM)
    x = buffer[:, int(half)]  # the keys, or the values, of a communication buffer
    row, head = rows.listed(), heads.listed()
    tile = StridedView.of_slots(buffer, int(half)).view(rows, heads)
    assert tile.shape == (rows.folds, BATCH, heads.groups, heads.per_group, rows.length, DIM)
    new = torch.randn(tile.shape, generator=torch.Generator().manual_seed(0))
    put, added = buffer.clone(), buffer.clone()
    for f in range(rows.folds):
        for i in range(rows.length):
            for g in range(heads.groups):
                for j in range(heads.per_group):
                    slot = int(row[f, i]) + head[g][j]
                    assert tile[f, :, g, j, i].equal(x[slot])
                    put[slot, int(half)] = new[f, :, g, j, i]
                    added[slot, int(half)] += new[f, :, g, j, i]
    written, summed = buffer.clone(), buffer.clone()
    StridedView.of_slots(written, int(half)).put(rows, heads, new)
    StridedView.of_slots(summed, int(half)).add(rows, heads, new)
    assert written.equal(put) and summed.equal(added)


@pytest.mark.parametrize("listed", (False, True))
def test_tiles_of_another_type_are_stored_in_the_type_of_the_store(listed: bool) -> None:
    rows = Rows.of(np.array([[2, 0, 1]] if listed else [[0, 1, 2]]))
    heads = Heads.of(((0,), (1,)))
    x = torch.zeros(1, 4, 2, 3, dtype=torch.float32)
    tile = torch.full((1, 1, 2, 1, 3, 3), 1.5, dtype=torch.float16)
    StridedView(x).put(rows, heads, tile)
    StridedView(x).add(rows, heads, tile)
    assert x.dtype is torch.float32 and x[:, :3].eq(3.0).all() and x[:, 3].eq(0).all()


def test_an_expanded_shard_is_read_as_it_is() -> None:
    x = torch.arange(3.0).expand(2, 8, 2, 3)
    rows, heads = Rows(1, 2, 3), Heads.of(((0,), (1,)))
    assert StridedView(x).view(rows, heads).equal(expected_tile(x, rows, heads))


@pytest.mark.parametrize("listed", [False, True])
def test_rows_that_move_with_the_heads(listed: bool) -> None:
    x = torch.arange(2 * 12 * 3 * 2.0).view(2, 12, 3, 2)
    rows = Rows(1, 4, 2, head_step=1)
    if listed:
        rows = Rows(1, 4, 2, index=torch.tensor([[1, 5]]), head_step=1)
    heads = Heads(3, 1, 0, 1, 1)
    tile = StridedView(x).view(rows, heads)
    for head in range(3):
        assert torch.equal(tile[0, :, head, 0], x[:, [1 + head, 5 + head], head])
    moved = torch.zeros_like(x)
    StridedView(moved).add(rows, heads, tile)
    assert moved.count_nonzero() == 2 * 3 * 2 * 2
    assert torch.equal(StridedView(moved).view(rows, heads), tile)


def test_indices_are_made_once() -> None:
    """On a GPU each would be a copy to wait for, and one that a graph cannot capture."""
    device, heads = torch.device("cpu"), Heads.of(((0,), (1,), (3,)))
    for rows in (Rows(1, 4, 2), Rows.of(np.array([[2, 0, 1]]))):
        assert _row_index(rows, 3, device) is _row_index(rows, 3, device)
    assert _head_index(heads, device) is _head_index(heads, device)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_words_of_16_bytes_are_seen_where_torch_takes_them(dtype: torch.dtype) -> None:
    """And where they begin at such addresses, too."""
    seen = set()
    memory = torch.arange(4096).to(dtype)
    for dim in (1, 2, 4, 6, 8, 16, 24):
        for row in (dim, dim + 1, dim + 2, dim + 4, 2 * dim, 3 * dim, 4 * dim + 8):
            for start in (0, 1, 2, 3, 4, 8, 12, 16):
                for last in (1, 2):
                    x = memory.as_strided((1, 5, dim), (7 * row, row, last), start)
                    try:
                        taken = torch.equal(x.view(torch.complex128).view(dtype), x)
                    except RuntimeError:
                        taken = False
                    # Of one number alone, at any stride, torch makes a word only where it is one.
                    assert _has_words(x) == (taken and last == 1), (dim, row, start, last)
                    seen.add(_has_words(x))
    assert seen == {True, False}
