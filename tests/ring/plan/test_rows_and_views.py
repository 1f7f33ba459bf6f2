"""Rows, heads and stores: strided views and listings address the same elements as plain indexing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring.plan.blocks import Heads
from ring.plan.rows import Rows, concatenate, folds, varlen_folds
from ring.strided_view import StridedView, _head_index, _row_index

BATCH, DIM = 2, 3
KINDS = ("contiguous", "transposed", "sliced", "dim first")


@st.composite
def regular_rows(draw: Any) -> Rows:
    length, number, step = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    least = (length - 1) * step + 1
    fold_step = draw(st.integers(least, least + 3)) if number > 1 else 0
    return Rows(draw(st.integers(0, 3)), step, length, fold_step, number)


@st.composite
def rectangles(draw: Any, total: int) -> tuple[tuple[int, ...], ...]:
    """Distinct heads, at equal distances or not, in ascending order as blocks have them."""
    groups = draw(st.integers(1, total))
    per_group = draw(st.integers(1, total // groups))
    chosen = sorted(draw(st.permutations(range(total)))[: groups * per_group])
    return tuple(tuple(chosen[i * per_group : (i + 1) * per_group]) for i in range(groups))


distinct_rows = st.tuples(st.permutations(range(20)), st.integers(1, 4), st.integers(1, 4)).map(
    lambda drawn: Rows.of(np.array(drawn[0][: drawn[1] * drawn[2]]).reshape(drawn[1:]))
)
rows_of_either_kind = st.one_of(regular_rows(), distinct_rows)
six_heads = rectangles(6).map(Heads.of)


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


def places(rows: Rows, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and head of every element of a tile, (F, G, P, L) each."""
    row, head = torch.from_numpy(rows.listed())[:, None, None, :], torch.tensor(heads.listed())[None, :, :, None]
    return row.expand(-1, *head.shape[1:3], -1), head.expand(len(row), -1, -1, row.shape[3])


def expected_tile(x: torch.Tensor, rows: Rows, heads: Heads) -> torch.Tensor:
    """(F, B, G, P, L, D) from x (B, N, H, D), by indexing."""
    row, head = places(rows, heads)
    return x[:, row, head].transpose(0, 1)


@given(rows_of_either_kind)
def test_rows_are_those_of_their_listing(rows: Rows) -> None:
    found = Rows.of(rows.listed())
    assert (found.listed() == rows.listed()).all() and (found.folds, found.length) == (rows.folds, rows.length)
    assert found.key == Rows.of(rows.listed().copy()).key
    if rows.index is None:
        fold, element = np.indices((rows.folds, rows.length))
        assert (rows.listed() == rows.start + fold * rows.fold_step + element * rows.step).all()
        assert found.index is None, "a grid is recognised"


@pytest.mark.parametrize(
    "index", ([[3, 5, 8]], [[7, 5, 3]], [[4, 4]], [[8, 9], [0, 1]], [[0, 1], [8, 9], [17, 18]], [[0, 1], [8, 10]])
)
def test_irregular_rows_are_listed(index: list[list[int]]) -> None:
    """`as_strided` takes no negative strides."""
    rows = Rows.of(np.array(index))
    assert rows.index is not None and rows.listed().tolist() == index


def test_keys_tell_rows_apart() -> None:
    indices = ([[3, 1, 2]], [[3, 1, 4]], [[3, 4, 5]], [[3, 4, 5, 6]], [[3, 5, 7]], [[3], [4], [5]])
    assert len({Rows.of(np.array(index)).key for index in indices}) == len(indices)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 3)), min_size=2, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_rows_are_concatenated_as_their_listings_are(
    drawn: list[tuple[int, int, int]], continued: bool, listed: bool
) -> None:
    """continued: each begins behind the one before, mostly at its step."""
    parts: list[Rows] = []
    for start, step, length in drawn:
        behind = parts[-1].start + parts[-1].step * parts[-1].length if parts else start
        parts.append(Rows(behind if continued else start, step, length, 100, 2))
    wanted = Rows.of(np.concatenate([part.listed() for part in parts], axis=1))
    if listed:
        parts = [Rows(x.start, x.step, x.length, 0, 2, torch.from_numpy(x.listed())) for x in parts]
    assert (concatenate(parts).listed() == wanted.listed()).all()
    assert listed or concatenate(parts).key == wanted.key


def test_long_continuing_rows_are_not_listed() -> None:
    assert concatenate([Rows(2**33, 2, 2**36), Rows(2**33 + 2**37, 2, 1)]).key == Rows(2**33, 2, 2**36 + 1).key


@pytest.mark.parametrize(
    ("ids", "regular"),
    [
        (((3,),), True), (((0, 1), (2, 3)), True), (((0, 2), (1, 3)), True), (((0,), (1,), (3,)), False),
        (((0, 2, 3),), False), (((0, 2), (3, 4)), False), (((0, 1), (3, 4), (6, 8)), False), (((0, 1), (2, 4)), False),
    ],
)  # fmt: skip
def test_heads_are_regular_by_their_offsets(ids: tuple[tuple[int, ...], ...], regular: bool) -> None:
    heads = Heads.of(ids)
    assert (heads.ids is None) == regular and heads.listed() == ids


def test_an_entry_beyond_the_limit_has_a_call_to_itself() -> None:
    """Fold documents of 2, 9 and 3 rows into calls of at most 5 rows."""
    entries, lengths = np.arange(3), np.array([2, 9, 3])
    found = varlen_folds(
        [0 * entries], [lengths], entries, 10 * entries, 10 * entries, 0 * entries + 4, (lengths, lengths), 20, (5, 5)
    )
    assert sorted(fold.members.tolist() for fold in itertools.islice(found, 9)) == [[0], [1], [2]]


@pytest.mark.parametrize(("count", "most", "sizes"), ((10, 4, [4, 4, 2]), (10, 99, [10]), (0, 9, [])))
def test_folds_take_as_many_as_they_may(count: int, most: int, sizes: list[int]) -> None:
    entries = np.arange(count)
    found = folds([0 * entries], entries, 3 * entries, 5 * entries, 0 * entries + most)
    assert [len(fold.members) for fold in found] == sizes


@settings(max_examples=80)
@given(rows_of_either_kind, six_heads, st.sampled_from(KINDS), st.sampled_from((torch.float32, torch.float16)))
def test_a_store_reads_writes_and_adds_its_tile_only(rows: Rows, heads: Heads, kind: str, dtype: torch.dtype) -> None:
    """Also of numbers of another type."""
    x = shard(kind)
    tile = StridedView(x).view(rows, heads)
    assert tile.equal(expected_tile(x, rows, heads))
    if rows.index is None and heads.ids is None:
        assert tile.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "a copy where a view would do"
    new, (row, head) = torch.randn(tile.shape).to(dtype), places(rows, heads)
    written, summed = x.clone(), x.clone()
    written[:, row, head] = new.transpose(0, 1).float()
    summed[:, row, head] += new.transpose(0, 1)
    put, add = shard(kind), shard(kind)
    StridedView(put).put(rows, heads, new)
    StridedView(add).add(rows, heads, new)
    assert put.equal(written) and add.equal(summed)


@settings(max_examples=150)
@given(rows_of_either_kind, six_heads, st.sampled_from(KINDS), st.integers(1, BATCH), st.booleans(), st.booleans())
def test_a_tile_with_folds_and_batches_as_one_dim(
    rows: Rows, heads: Heads, kind: str, batch: int, wide: bool, in_words: bool
) -> None:
    """wide: rows of 16 bytes, which kernels that load in words may read where they lie."""
    x = shard(kind)[:batch]
    x = x.repeat(1, 1, 1, 4)[..., :4].contiguous() if wide else x
    wanted = expected_tile(x, rows, heads).flatten(2, 3).flatten(0, 1)
    assert StridedView(x).batched(rows, heads, in_words).equal(wanted)


def test_indices_are_made_once() -> None:
    """On a GPU each would be a copy to wait for, and one that a graph cannot capture."""
    device, heads = torch.device("cpu"), Heads.of(((0,), (1,), (3,)))
    for rows in (Rows(1, 4, 2), Rows.of(np.array([[2, 0, 1]]))):
        assert _row_index(rows, 3, device) is _row_index(rows, 3, device)
    assert _head_index(heads, device) is _head_index(heads, device)
