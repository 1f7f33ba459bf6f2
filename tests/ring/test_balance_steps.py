"""The divisions of a balanced layout, each stated once more by loops over tokens, documents and chunks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.documents import documents_from_cu_seqlens
from reference.pattern import Branch, Pattern
from ring import balance

QUIET = settings(database=None, deadline=None)
SMALL = 4  # tokens of a chunk here, so that a few hundred tokens are many chunks
Owners = list[int]  # the rank of each position


@st.composite
def packed(draw: Any) -> tuple[Pattern, int]:
    n = draw(st.integers(1, 120))
    edges = sorted(draw(st.lists(st.integers(0, n), max_size=9)))
    branches = draw(st.sampled_from(((Branch(),), (Branch(16), Branch(None, 4)), (Branch(50, 2, 1),))))
    return Pattern(branches, draw(st.booleans()), documents_from_cu_seqlens([0, *edges, n], n)), n


@given(packed(), st.integers(2, 5))
@settings(QUIET, max_examples=100)
def test_divisions_are_those_of_the_page(drawn: tuple[Pattern, int], p: int) -> None:
    pattern, n = drawn
    cost = balance.work(pattern, n)
    assert pattern.documents is not None
    with patch.object(balance, "CHUNK", SMALL):
        found = [owner.tolist() for owner in balance._divisions(pattern, cost, p)]
    work = cost.tolist()
    wanted = [equal_tokens(n, p), equal_work(work, p)]
    wanted += [whole_documents(pattern.documents, work, p, part) for part in (1, 2, 4, 8, 16)]
    assert found == [*wanted, dealt_chunks(work, p)]


@given(packed(), st.integers(2, 5))
@settings(QUIET, max_examples=100)
def test_the_first_that_is_even_enough_is_taken_or_the_best(drawn: tuple[Pattern, int], p: int) -> None:
    pattern, n = drawn
    cost = balance.work(pattern, n)
    tried = [owner.tolist() for owner in balance._divisions(pattern, cost, p)]

    def unevenness(owner: Owners) -> tuple[float, float]:
        work, tokens = [0] * p, [0] * p
        for rank, one in zip(owner, cost.tolist(), strict=True):
            work[rank] += one
            tokens[rank] += 1
        return max(1.05, max(work) * p / sum(work) if sum(work) else 1.0), max(1.25, max(tokens) * p / n)

    assert balance.owners(pattern, n, p).tolist() == min(tried, key=unevenness)


def test_an_exchange_gives_chunks_away_that_were_dealt_badly() -> None:
    """All chunks of one rank, and none left to take: every step is a gift, the first by chunk 0."""
    costs = np.array([5, 1, 1, 1])
    owner, loads = np.zeros(4, np.int64), np.array([8, 0])
    balance._exchange(costs, owner, loads)
    assert owner.tolist() == [1, 0, 0, 0] and loads.tolist() == [3, 5]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(2, 4), st.data())
@settings(QUIET, max_examples=100)
def test_exchanges_are_the_best_ones(costs: list[int], p: int, data: st.DataObject) -> None:
    """From any division, not only from one that is nearly even."""
    owner = data.draw(st.lists(st.integers(0, p - 1), min_size=len(costs), max_size=len(costs)))
    loads = np.bincount(owner, weights=costs, minlength=p).astype(np.int64)
    held = np.array(owner)
    balance._exchange(np.array(costs), held, loads)
    assert held.tolist() == exchanged(costs, owner, p)
    assert loads.tolist() == np.bincount(held, weights=costs, minlength=p).tolist()


# --- the same by loops ------------------------------------------------------------------------------------------------


def equal_tokens(n: int, p: int) -> Owners:
    """The cuts are at n / p, 2 n / p, ..., rounded down."""
    return [sum(position >= cut * n // p for cut in range(1, p)) for position in range(n)]


def equal_work(work: list[int], p: int) -> Owners:
    """A position goes by the middle of its own work."""
    whole = max(2 * sum(work), 1)
    return [min((2 * sum(work[:at]) + one) * p // whole, p - 1) for at, one in enumerate(work)]


def whole_documents(documents: tuple[int, ...], work: list[int], p: int, part: int) -> Owners:
    """Those of more than 1 / part of a share are divided among all, the others go to the least loaded rank."""
    tokens, total = sum(documents), max(sum(work), 1)
    begins = [sum(documents[:number]) for number in range(len(documents))]
    costs = [sum(work[begin : begin + length]) for begin, length in zip(begins, documents, strict=True)]
    weights = [max(length * p / tokens, cost * p / total) for length, cost in zip(documents, costs, strict=True)]
    of_work, of_tokens = [0.0] * p, [0.0] * p
    owner = [-1] * tokens
    for number in sorted(range(len(documents)), key=lambda number: -weights[number]):
        begin, length, share = begins[number], documents[number], costs[number] * p / total
        if weights[number] > 1.0 / part:
            for rank in range(p):
                of_work[rank] += share / p
            edges = [chunk * length // (2 * p) for chunk in range(2 * p + 1)]
            for chunk in range(2 * p):
                rank = min(chunk, 2 * p - 1 - chunk)  # head and tail
                of_tokens[rank] += (edges[chunk + 1] - edges[chunk]) * p / tokens
                owner[begin + edges[chunk] : begin + edges[chunk + 1]] = [rank] * (edges[chunk + 1] - edges[chunk])
            continue
        loaded = [max(of_work[rank] + share, of_tokens[rank] + length * p / tokens) for rank in range(p)]
        rank = loaded.index(min(loaded))
        of_work[rank] += share
        of_tokens[rank] += length * p / tokens
        owner[begin : begin + length] = [rank] * length
    return owner


def dealt_chunks(work: list[int], p: int) -> Owners:
    """Those of most work first, each to the least loaded rank, then exchanged."""
    costs = [sum(work[begin : begin + SMALL]) for begin in range(0, len(work), SMALL)]
    loads, owner = [0] * p, [0] * len(costs)
    for chunk in sorted(range(len(costs)), key=lambda chunk: -costs[chunk]):
        owner[chunk] = loads.index(min(loads))
        loads[owner[chunk]] += costs[chunk]
    owner = exchanged(costs, owner, p)
    return [owner[position // SMALL] for position in range(len(work))]


def exchanged(costs: list[int], owner: Owners, p: int) -> Owners:
    """A chunk of the most loaded rank is given away, or exchanged, where that makes the greater load smallest.

    Of equal exchanges, the one with the first rank, and there the first chunk given and the first one taken, where
    "none" comes last.
    """
    owner = list(owner)
    for _ in range(200):
        loads = [sum(cost for cost, rank in zip(costs, owner, strict=True) if rank == mine) for mine in range(p)]
        most = loads.index(max(loads))
        best, exchange = loads[most], None
        for other in range(p):
            if other == most:
                continue
            for given_away in [*(i for i, rank in enumerate(owner) if rank == most), None]:
                for taken in [*(i for i, rank in enumerate(owner) if rank == other), None]:
                    moved = sum(costs[x] for x in [given_away] if x is not None)
                    moved -= sum(costs[x] for x in [taken] if x is not None)
                    greater = max(loads[most] - moved, loads[other] + moved)
                    if greater < best:
                        best, exchange = greater, (other, given_away, taken)
        if exchange is None:
            return owner
        other, given_away, taken = exchange
        for chunk, there in ((given_away, other), (taken, most)):
            if chunk is not None:
                owner[chunk] = there
    return owner
