"""Packed documents: the definition written out by hand, what it equals, what is refused, and how lengths are found."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference import Branch, Inputs, Pattern, attention, documents_from_cu_seqlens, documents_from_positions, evaluate
from reference.cost import Setting
from reference.fast_oracle import multiplicity as counted
from reference.oracle import gradients
from reference.pattern import multiplicity
from reference.roundoff import Arithmetic, Counts, max_pairs
from tests.support import drawn_patterns

budget = settings(max_examples=80, deadline=None)
BRANCHES = st.lists(drawn_patterns.branches(2, longest=8), min_size=1, max_size=2).map(tuple)
PACKED = st.builds(Pattern, BRANCHES, st.booleans(), drawn_patterns.documents())
GRID = Branch(None, 2, 1)


@pytest.mark.parametrize(
    ("branch", "causal", "documents", "seen"),
    [
        (Branch(), False, (2, 3), "11000 11000 00111 00111 00111"),
        (Branch(), True, (2, 3), "10000 11000 00100 00110 00111"),
        (Branch(), True, (0, 1, 0, 0, 2, 1, 0), "1000 0100 0110 0001"),
        (Branch(), False, (0, 0), ""),
        (Branch(), False, (), ""),
        # Documents 0 1 2 | 3 4 5 6 7, segments of 2 in them: 0 1 | 2, and 3 4 | 5 6 | 7.
        (Branch(2), False, (3, 5), "11000000 11000000 00100000 00011000 00011000 00000110 00000110 00000001"),
        # Positions within the documents are 0 1 2 | 0 1 2 3 4; offset 1 of rate 2 selects 1 | 1 3.
        (GRID, False, (3, 5), "00000000 01000000 00000000 00000000 00001010 00000000 00001010 00000000"),
        (Branch(4, 3, 2), False, (2, 3), "00000 00000 00000 00000 00001"),  # the offset lies beyond the first document
    ],
)
def test_on_paper(branch: Branch, causal: bool, documents: tuple[int, ...], seen: str) -> None:
    """A line of digits for each query; the oracle's twin must have the same."""
    pattern, at = Pattern((branch,), causal, documents), torch.arange(sum(documents))
    c = multiplicity(pattern, at, at, 1)[0]
    assert (counted(pattern, 1, len(at))[0] == c.numpy()).all()
    assert ["".join(map(str, row)) for row in c.tolist()] == seen.split()


@budget
@given(PACKED)
@example(Pattern.dense(documents=(7,), window=2))  # keys on both sides of a query
def test_twin_has_the_same_mask_and_pairs_bound_it(packed: Pattern) -> None:
    documents = packed.documents or ()
    n = sum(documents)
    c = multiplicity(packed, torch.arange(n), torch.arange(n), 2).numpy()
    assert (counted(packed, 2, n) == c).all()
    keys, rows = max_pairs(packed, n, 2, 1)
    assert c.sum(2).max(initial=0) <= keys <= 2 * max(documents, default=1) + 1
    assert c.sum((0, 1)).max(initial=0) <= rows


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
        (torch.tensor([0, 2]), "got a torch.Tensor; for cu_seqlens use documents_from_cu_seqlens"),
        ((np.int64(1),), "got a numpy.int64 as number 0"),
        ((1,) * 8 + (-1,), r"got -1 as number 8 of \(1, 1, 1, 1, 1, 1, ...\)$"),
    ],
)
def test_other_documents_are_refused(documents: Any, told: str) -> None:
    makers: list[Callable[..., Pattern]] = [
        partial(Pattern, (Branch(),)), Pattern.dense, partial(Pattern.longnet, [4], [1], 2),
        partial(Pattern.head_groups, [4], [1], 2),
    ]  # fmt: skip
    for make in makers:
        with pytest.raises(ValueError, match=f"^documents must be None or a tuple of lengths.*{told}"):
            make(documents=documents)


X, AT = torch.ones(2, 5, 1, 3, dtype=torch.float64), torch.arange(5)
NUMBERS, ARITHMETIC = (X.numpy(),) * 4, Arithmetic.of("float64", "math", 3, 1.0, Counts(5, 5))
EDGES = r"\(0, 2, 5\); these are cu_seqlens\? Write documents_from_cu_seqlens\(documents, 5\)$"


@pytest.mark.parametrize(
    "call",
    [
        lambda pattern: attention(X, X, X, pattern),
        lambda pattern: gradients(X, X, X, pattern, X),
        lambda pattern: attention(X[:, :2], X, X, pattern, q_positions=AT[:2]),
        lambda pattern: evaluate(Inputs(*NUMBERS, None, pattern, 1.0), ARITHMETIC),
        lambda pattern: Setting(pattern, [np.arange(5)], 1, 1, 1, 1),
        lambda pattern: pattern.validate_tokens(5),
    ],
)
def test_wrong_sums_of_documents_are_refused(call: Callable[[Pattern], object]) -> None:
    for documents, told in (
        ((2, 2), r"4 in 2 documents, \(2, 2\)$"),
        ((0, 2, 5), f"7 in 3 documents, {EDGES}"),
        ((10**5000,), "an integer of too many digits"),
    ):
        with pytest.raises(ValueError, match=f"^documents must add up to the 5 tokens of the sequence, got {told}"):
            call(Pattern.dense(documents=documents))


def test_positions_behind_the_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="documents must hold every position, got position 4 and 4 tokens"):
        attention(X, X, X, Pattern.dense(documents=(2, 2)), q_positions=AT, k_positions=AT)


def test_documents_compare_by_their_lengths() -> None:
    one, other = Pattern.dense(documents=(3, 0)), Pattern.dense(documents=[3, 0])  # type: ignore[arg-type]
    assert one == other and one.documents == (3, 0) and (3, 0) == one.documents and hash(one.documents) == hash((3, 0))
    for pattern in (Pattern.dense(), Pattern.dense(documents=(3,)), Pattern.dense(documents=(0, 3))):
        assert one != pattern and one.documents != pattern.documents


@given(st.lists(st.integers(0, 5)))
def test_lengths_of_cu_seqlens_and_of_positions(documents: list[int]) -> None:
    """Positions cannot tell of an empty document; collators give (1, N) of them."""
    edges, full = list(accumulate(documents, initial=0)), tuple(filter(None, documents))
    positions = [p for length in full for p in range(length)]
    for given_ in (edges, tuple(edges), np.array(edges, np.uint16), torch.tensor(edges, dtype=torch.int32)):
        found = documents_from_cu_seqlens(given_, sum(documents))
        assert found == tuple(documents) and all(type(length) is int for length in found)
    for flat in (positions, np.array(positions, np.int32), torch.tensor([positions], dtype=torch.int64)):
        found = documents_from_positions(flat)
        assert found == full and all(type(length) is int for length in found)


ROW, EDGE = "must be one row of integers", "cu_seqlens must go from 0 to the number of tokens, 7, got"
STEP = "positions must be 0 or the previous one plus 1, got"


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ([], rf"{EDGE} \(\)"),
        ([1, 7], rf"{EDGE} \(1, 7\)"),
        ([0, 8], rf"{EDGE} \(0, 8\)"),
        ([0, 4, 3, 7], "cu_seqlens must ascend, got 4 and then 3 at number 2"),
        (np.array([0, 4, 3, 7], np.uint32), "cu_seqlens must ascend, got 4 and then 3 at number 2"),
        ([0.0, 7.0], f"cu_seqlens {ROW}, got 1 dimensions of float64"),
        ([[0, 7]], f"cu_seqlens {ROW}, got 2 dimensions of int64"),
        ([False, 7.5], f"cu_seqlens {ROW}"),
        ("07", f"cu_seqlens {ROW}, got 0 dimensions of <U2"),
        ([1, 2], f"{STEP} 1 as the first at number 0"),
        ([0, 1, 3], f"{STEP} 1 and then 3 at number 2"),
        ([0, 1, 1], f"{STEP} 1 and then 1 at number 2"),
        ([0, -1], f"{STEP} 0 and then -1 at number 1"),
        (torch.tensor([[0, 1], [0, 1]]), f"positions {ROW}, got 2 dimensions of int64"),
        (torch.tensor([True, False]), f"positions {ROW}, got 1 dimensions of bool"),
    ],
)
def test_other_cu_seqlens_and_positions_are_refused(given_: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        documents_from_cu_seqlens(given_, 7) if told.startswith("cu_seqlens") else documents_from_positions(given_)
