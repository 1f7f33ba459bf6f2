"""Packed documents: the definition written out by hand, what it equals, what is refused, and how lengths are found."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference import (
    Branch,
    Inputs,
    Pattern,
    attention,
    documents_from_cu_seqlens,
    documents_from_positions,
    evaluate,
    gradients,
)
from reference.arithmetic import Arithmetic, Counts, most_seen
from reference.cost import Setting, flops, sent
from reference.exact import QUANTITIES
from reference.exact import multiplicity as counted
from reference.needed import blocks
from reference.oracle import attention_and_gradients
from reference.pattern import multiplicity, selected
from tests.support import drawn_patterns

F64 = torch.float64
budget = settings(max_examples=80, deadline=None)


def drawn(n: int, heads: int = 1, dim: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, n, heads, dim, dtype=F64, generator=torch.Generator().manual_seed(seed))


def pairs(pattern: Pattern, n: int) -> list[str]:
    """c of the only head, a line of digits for each query, by the oracle; its twin must have the same."""
    c = multiplicity(pattern, torch.arange(n), torch.arange(n), 1)[0]
    assert (counted(pattern, 1, n)[0] == c.numpy()).all()
    return ["".join(str(entry) for entry in row) for row in c.tolist()]


BRANCHES = st.lists(drawn_patterns.branches(2, longest=8), min_size=1, max_size=2).map(tuple)
PACKED = st.builds(Pattern, BRANCHES, st.booleans(), drawn_patterns.documents())


# --- on paper ---------------------------------------------------------------------------------------------------------


GRID, PLAIN = Branch(None, 2, 1), Branch()
ON_PAPER: list[tuple[Branch, bool, tuple[int, ...], str]] = [
    (PLAIN, False, (2, 3), "11000 11000 00111 00111 00111"),
    (PLAIN, True, (2, 3), "10000 11000 00100 00110 00111"),
    (PLAIN, True, (0, 1, 0, 0, 2, 1, 0), "1000 0100 0110 0001"),
    (PLAIN, False, (0, 0), ""),
    (PLAIN, False, (), ""),
    # Documents 0 1 2 | 3 4 5 6 7, segments of 2 in them: 0 1 | 2, and 3 4 | 5 6 | 7.
    (Branch(2), False, (3, 5), "11000000 11000000 00100000 00011000 00011000 00000110 00000110 00000001"),
    # Positions within the documents are 0 1 2 | 0 1 2 3 4; offset 1 of rate 2 selects 1 | 1 3.
    (GRID, False, (3, 5), "00000000 01000000 00000000 00000000 00001010 00000000 00001010 00000000"),
]


@pytest.mark.parametrize(("branch", "causal", "documents", "seen"), ON_PAPER)
def test_on_paper(branch: Branch, causal: bool, documents: tuple[int, ...], seen: str) -> None:
    assert pairs(Pattern((branch,), causal, documents), sum(documents)) == seen.split()


def test_selected_positions_begin_anew_in_each_document() -> None:
    assert selected(GRID, torch.arange(8), 1, (3, 5)).nonzero().flatten().tolist() == [1, 4, 6]
    assert selected(Branch(3, 2), torch.arange(8), 0, (3, 5)).nonzero().flatten().tolist() == [0, 2, 3, 5, 6]


def test_an_offset_beyond_a_short_document_selects_nothing_there() -> None:
    pattern = Pattern((Branch(4, 3, 2),), documents=(2, 3))
    assert pairs(pattern, 5) == ["00000", "00000", "00000", "00000", "00001"]
    x = drawn(5)
    out, lse = attention(x, x, x, pattern)
    assert not out[:, :4].any() and (lse[:, :, :4] == -torch.inf).all() and (out[:, 4] == x[:, 4]).all()


def test_positions_are_those_of_the_packed_sequence() -> None:
    pattern = Pattern.dense(causal=True, documents=(2, 3))
    found = multiplicity(pattern, torch.tensor([4, 1]), torch.tensor([3, 2, 1, 4, 0]), 1)[0]
    assert found.tolist() == [[1, 1, 0, 1, 0], [0, 0, 1, 0, 1]]


# --- what it equals ---------------------------------------------------------------------------------------------------


@budget
@given(PACKED, st.sampled_from(("attached", "detached")))
def test_each_document_is_attended_to_by_itself(packed: Pattern, weights: str) -> None:
    documents, alone = packed.documents or (), replace(packed, documents=None)
    n = sum(documents)
    q, k, v, dout = (drawn(n, 2 if i in (0, 3) else 1, seed=i) for i in range(4))
    found = (*attention(q, k, v, packed), *gradients(q, k, v, packed, dout, weights=weights))
    for start, stop in pairwise(accumulate(documents, initial=0)):
        one, two, three, four = (x[:, start:stop] for x in (q, k, v, dout))
        expected = (*attention(one, two, three, alone), *gradients(one, two, three, alone, four, weights=weights))
        for name, x, whole in zip(QUANTITIES, expected, found, strict=True):
            there = whole[:, :, start:stop] if name == "lse" else whole[:, start:stop]
            torch.testing.assert_close(there, x, rtol=1e-12, atol=1e-12)


@budget
@given(PACKED)
@example(Pattern.dense(documents=(7,), window=2))  # keys on both sides of a query
def test_the_twin_has_the_same_mask_and_the_count_of_pairs_bounds_it(packed: Pattern) -> None:
    documents = packed.documents or ()
    n = sum(documents)
    c = multiplicity(packed, torch.arange(n), torch.arange(n), 2).numpy()
    assert (counted(packed, 2, n) == c).all()
    keys, rows = most_seen(packed, n, 2, 1)
    assert c.sum(2).max(initial=0) <= keys <= 2 * max(documents, default=1) + 1
    assert c.sum((0, 1)).max(initial=0) <= rows


def test_the_twin_has_the_same_results() -> None:
    pattern = Pattern.longnet([4, None], [1, 2], 2, causal=True, documents=(3, 0, 6, 1))
    q, k, v, dout = (drawn(10, 2, seed=i) for i in range(4))
    arithmetic = Arithmetic.of("float64", "math", 3, 3**-0.5, Counts(10, 10))
    inputs = Inputs(q.numpy(), k.numpy(), v.numpy(), dout.numpy(), None, pattern, 3**-0.5)
    found = evaluate(inputs, arithmetic).exact
    for name, expected in zip(QUANTITIES, attention_and_gradients(q, k, v, pattern, dout), strict=True):
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-12, atol=1e-12)


# --- cost -------------------------------------------------------------------------------------------------------------


@budget
@given(st.data(), PACKED, st.integers(1, 4))
def test_needs_and_pairs_are_those_of_the_mask(data: st.DataObject, pattern: Pattern, p: int) -> None:
    n = sum(pattern.documents or ())
    cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1)))
    positions = np.split(np.array(data.draw(st.permutations(range(n))), np.int64), cuts)
    setting = Setting(pattern, positions, 1, 2, 1, 1)
    c = counted(pattern, 2, n)
    assert flops(setting).pairs == tuple(int(c[:, held].sum()) for held in positions)
    slots = np.zeros((p, p), np.int64)
    for branch in pattern.branches:
        one = Setting(replace(pattern, branches=(branch,)), positions, 1, 2, 1, 1)
        for block in blocks(one, 0):
            grid = replace(branch, offset=block.offset, heads=None)
            sees = counted(replace(pattern, branches=(grid,)), 1, n)[0] > 0
            for reader, mine in enumerate(positions):
                for owner, theirs in enumerate(positions):
                    if reader != owner:
                        slots[owner, reader] += sees[mine][:, theirs].any(0).sum() * block.width
    assert (setting.slots == slots).all()


def test_nothing_is_sent_for_documents_that_lie_within_a_rank() -> None:
    for order in (np.arange(8), np.arange(8)[::-1]):
        setting = Setting(Pattern.dense(True, (3, 1, 0, 2, 2)), np.split(order, 2), 1, 1, 1, 1)
        assert not sent(setting, "direct").forward.any() and not sent(setting, "ring").backward.any()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "told"),
    [
        (3, "got 3"),
        ("12", "got '12'"),
        ((3, -1), r"got -1 as number 1 of \(3, -1\)"),
        ((True, 2), r"got True as number 0 of \(True, 2\)"),
        ([1, 2.0], r"got 2.0 as number 1"),
        ((1, None), r"got None as number 1"),
        ((1, (2,)), r"got a tuple as number 1 of \(1, a tuple\)"),
        (np.array([1, 2]), "got a numpy.ndarray"),
        (torch.tensor([0, 2]), "got a torch.Tensor; of cu_seqlens, documents_from_cu_seqlens makes them"),
        ((np.int64(1),), "got a numpy.int64 as number 0"),
        ((1,) * 8 + (-1,), r"got -1 as number 8 of \(1, 1, 1, 1, 1, 1, ...\)$"),
    ],
)
def test_other_documents_are_refused(documents: Any, told: str) -> None:
    makers: tuple[Callable[..., Pattern], ...] = (
        lambda **given: Pattern((Branch(),), **given),
        Pattern.dense,
        lambda **given: Pattern.longnet([4], [1], 2, **given),
        lambda **given: Pattern.head_groups([4], [1], 2, **given),
    )
    for make in makers:
        with pytest.raises(ValueError, match=f"^documents must be None or a tuple of lengths.*{told}"):
            make(documents=documents)


def test_documents_that_do_not_add_up_are_refused() -> None:
    x, pattern = drawn(5), Pattern.dense(documents=(2, 2))
    told = r"^documents must add up to the 5 tokens of the sequence, got 4 in 2 documents, \(2, 2\)$"
    arithmetic = Arithmetic.of("float64", "math", 3, 1.0, Counts(5, 5))
    numbers = x.numpy()
    calls: tuple[Callable[[], object], ...] = (
        lambda: attention(x, x, x, pattern),
        lambda: gradients(x, x, x, pattern, x),
        lambda: attention(x[:, :2], x, x, pattern, q_positions=torch.arange(2)),
        lambda: evaluate(Inputs(numbers, numbers, numbers, numbers, None, pattern, 1.0), arithmetic),
        lambda: Setting(pattern, [np.arange(5)], 1, 1, 1, 1),
        lambda: pattern.validate_tokens(5),
    )
    for call in calls:
        with pytest.raises(ValueError, match=told):
            call()
    with pytest.raises(ValueError, match="documents must add up to the 5 tokens .* an integer of too many digits"):
        Pattern.dense(documents=(10**5000,)).validate_tokens(5)
    edges = (
        r"got 7 in 3 documents, \(0, 2, 5\); these are cu_seqlens\? Write documents_from_cu_seqlens\(documents, 5\)$"
    )
    with pytest.raises(ValueError, match=edges):
        attention(x, x, x, Pattern.dense(documents=(0, 2, 5)))
    with pytest.raises(ValueError, match="documents must hold every position, got position 4 and 4 tokens"):
        attention(x, x, x, pattern, q_positions=torch.arange(5), k_positions=torch.arange(5))


def test_documents_are_compared_as_the_tuple_of_their_lengths() -> None:
    one, other = Pattern.dense(documents=(3, 0)), Pattern.dense(documents=[3, 0])  # type: ignore[arg-type]
    assert one == other and one.documents == (3, 0) and (3, 0) == one.documents and hash(one.documents) == hash((3, 0))
    for pattern in (Pattern.dense(), Pattern.dense(documents=(3,)), Pattern.dense(documents=(0, 3))):
        assert one != pattern and one.documents != pattern.documents


# --- from what trainers have ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5)))
def test_lengths_of_cu_seqlens(documents: list[int]) -> None:
    edges = list(accumulate(documents, initial=0))
    for given_edges in (edges, tuple(edges), np.array(edges, np.uint16), torch.tensor(edges, dtype=torch.int32)):
        found = documents_from_cu_seqlens(given_edges, sum(documents))
        assert found == tuple(documents) and all(type(length) is int for length in found)


@given(st.lists(st.integers(1, 5)))
def test_lengths_of_positions(documents: list[int]) -> None:
    positions = [p for length in documents for p in range(length)]
    for given_positions in (positions, np.array(positions, np.int32), torch.tensor(positions, dtype=torch.int64)):
        found = documents_from_positions(given_positions)
        assert found == tuple(documents) and all(type(length) is int for length in found)


@pytest.mark.parametrize(
    ("given_edges", "told"),
    [
        ([], r"must go from 0 to the number of tokens, 7, got \(\)"),
        ([1, 7], r"must go from 0 to the number of tokens, 7, got \(1, 7\)"),
        ([0, 4, 3, 7], "must ascend, got 4 and then 3 at number 2"),
        (np.array([0, 4, 3, 7], np.uint32), "must ascend, got 4 and then 3 at number 2"),
        ([0, 8], r"must go from 0 to the number of tokens, 7, got \(0, 8\)"),
        ([0.0, 7.0], "must be one row of integers, got 1 dimensions of float64"),
        ([[0, 7]], "must be one row of integers, got 2 dimensions of int64"),
        ([False, 7.5], "must be one row of integers"),
        ("07", "must be one row of integers, got 0 dimensions of <U2"),
    ],
)
def test_other_cu_seqlens_are_refused(given_edges: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^cu_seqlens {told}"):
        documents_from_cu_seqlens(given_edges, 7)


@pytest.mark.parametrize(
    ("positions", "told"),
    [
        ([1, 2], "must be 0 or one more than the one before, got 1 as the first at number 0"),
        ([0, 1, 3], "must be 0 or one more than the one before, got 1 and then 3 at number 2"),
        ([0, 1, 1], "must be 0 or one more than the one before, got 1 and then 1 at number 2"),
        ([0, -1], "must be 0 or one more than the one before, got 0 and then -1 at number 1"),
        (torch.tensor([[0, 1], [0, 1]]), "must be one row of integers, got 2 dimensions of int64"),
        (torch.tensor([True, False]), "must be one row of integers, got 1 dimensions of bool"),
    ],
)
def test_other_positions_are_refused(positions: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^positions {told}"):
        documents_from_positions(positions)


def test_positions_of_a_flattened_batch() -> None:
    """(1, N), as collators give them."""
    assert documents_from_positions(torch.tensor([[0, 1, 0, 0, 1, 2]])) == (2, 1, 3)
