"""Assigns the tokens of a packed batch to ranks with balanced work. Integers only, no messages.

The work of a token is the number of (head, key) pairs that it sees as a query. Documents differ in length, and dense
work grows quadratically with it, so equal numbers of tokens can mean very unequal work: if one document has half the
tokens and the others are short, contiguous shards give one rank several times the mean.

`owners` tries divisions in the order of their communication. It takes the first in which no rank exceeds ENOUGH times
the mean work and ENOUGH_TOKENS times the mean number of tokens:

1. contiguous shards, of equal tokens or of equal work: only documents at a cut are divided;
2. whole documents, each to the least loaded rank. A document longer than a part of a rank's share is divided among all
   ranks, head and tail; the parts tried are 1, 1/2, ... of a share;
3. arcs, for patterns with slices: the sequence is closed to a circle. One rank after another takes an arc of the mean
   tokens and the mean work, and the circle closes behind it. For causal work these are a head and a tail;
4. chunks of CHUNK tokens, in descending order of work, each to the least loaded rank; then exchanged between ranks.

If there is none, it takes the division with the smallest maximum work; among those balanced enough in work, the one
with the smallest maximum of tokens. In step 2 the load of a rank is the larger of its work and its tokens, relative to
the mean: memory, and all work but attention, depend on tokens. Step 4 considers work alone.

With several hosts it divides the tokens among the hosts in this way, then those of each host among its ranks: a
document that fits into a host sends nothing to another.

Sources: WLB-LLM (arXiv 2503.17924) divides each document head and tail; MagiAttention deals chunks by their area.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import chain, pairwise

import numpy as np

from reference.pattern import Pattern, slices_seen
from reference.slices import keys_seen

Ints = np.ndarray  # int64
CHUNK = 64  # tokens of an indivisible chunk in step 4
UNITS = 2**15  # in step 3: at most so many, or CHUNK a rank, are told apart
ENOUGH, ENOUGH_TOKENS = 1.05, 1.2  # maximum over mean that is accepted, of work and of tokens
PARTS = (1, 2, 4, 8, 16)  # step 2 divides documents longer than 1 / part of a rank's share
MOST_SWAPS = 200  # in step 4


def owners(pattern: Pattern, n: int, p: int, heads: int | None = None, hosts: int = 1) -> Ints:
    """Return the rank of each position, (n,). hosts: of equally many neighbouring ranks."""
    if p == 1 or n == 0:
        return np.zeros(n, np.int64)
    cost = _fitted(work(pattern, n, heads), p)
    documents = np.array((n,) if pattern.documents is None else pattern.documents, np.int64)
    if hosts == 1:
        return _divided(documents, cost, p, pattern.has_slices)
    document, ranks = np.repeat(np.arange(len(documents)), documents), p // hosts
    owner = _divided(documents, cost, hosts, pattern.has_slices) * ranks
    for first in range(0, p, ranks):
        own = np.flatnonzero(owner == first)
        pieces = np.bincount(document[own], minlength=len(documents))
        owner[own] += _divided(pieces, cost[own], ranks, pattern.has_slices)
    return owner


def _fitted(cost: Ints, p: int) -> Ints:
    """Divide costs by the power of two, if any, that keeps 2 p times their sum within 63 bits."""
    excess = math.frexp(2.0 * p * float(cost.sum(dtype=np.float64)))[1] - 62
    return cost >> excess if excess > 0 else cost


def _divided(documents: Ints, cost: Ints, p: int, by_arcs: bool) -> Ints:
    """Return the rank of each token, (n,).

    documents: their tokens; cost: the work of each token, (n,); by_arcs: True to try step 3.
    """
    n = len(cost)
    best, owner = (np.inf, np.inf), np.zeros(n, np.int64)
    for division in _divisions(documents, cost, p, by_arcs):
        imbalances = _imbalance(division, cost, p), _imbalance(division, np.ones(n), p)
        penalty = max(imbalances[0], ENOUGH), max(imbalances[1], ENOUGH_TOKENS)
        if penalty < best:
            best, owner = penalty, division
        if best == (ENOUGH, ENOUGH_TOKENS):
            break
    return owner


def _imbalance(owner: Ints, weights: np.ndarray, p: int) -> float:
    """Load of the most loaded rank, as a multiple of the mean."""
    total = weights.sum()
    return float(np.bincount(owner, weights=weights, minlength=p).max() * p / total) if total else 1.0


def work(pattern: Pattern, n: int, heads: int | None = None) -> Ints:
    """Number of (query head, key) pairs that each position sees as a query, (n,). heads: query heads; None: the number
    that the pattern implies.

    Raises ValueError if the pattern does not fit that number.
    """
    heads, total, at = pattern.fewest_heads if heads is None else heads, np.zeros(n, np.int64), np.arange(n)
    lengths = np.array((n,) if pattern.documents is None else pattern.documents, np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)
    begins = ends - np.repeat(lengths, lengths)
    for branch in pattern.branches:
        segment, rate, begin, end = branch.segment_length, branch.dilation_rate, begins, ends
        if segment is not None:
            begin = begins + (at - begins) // segment * segment
            end = np.minimum(ends, begin + segment)
        served = np.zeros(min(rate, n), np.int64)  # query heads by offset
        for offset in branch.offsets(heads):
            if offset is not None and offset < len(served):
                served[offset] += 1
        total += keys_seen(slices_seen(branch, pattern.causal), begin, end, rate) * served[(at - begin) % rate]
    return total


def zigzag_owners(documents: Sequence[int], p: int) -> Ints:
    """Return the rank of each position, (n,). Each document of 2 p tokens or more is divided into 2 p chunks, head and
    tail. Shorter ones stay whole: the longest first, each goes to the rank with the fewest tokens so far.
    """
    pieces = [_zigzag(length, p) if length >= 2 * p else [] for length in documents]
    tokens = [0] * p
    for rank, count in chain.from_iterable(pieces):
        tokens[rank] += count
    fewest = [(count, rank) for rank, count in enumerate(tokens)]
    heapify(fewest)
    short = [number for number, length in enumerate(documents) if length < 2 * p]
    for number in sorted(short, key=lambda number: -documents[number]):
        count, rank = fewest[0]
        heapreplace(fewest, (count + documents[number], rank))
        pieces[number] = [(rank, documents[number])]
    flat = np.array(list(chain.from_iterable(pieces)), np.int64).reshape(-1, 2)
    return np.repeat(flat[:, 0], flat[:, 1])


def _zigzag(length: int, p: int) -> list[tuple[int, int]]:
    """Return (rank, tokens) of the chunks of one document, in order."""
    edges = [chunk * length // (2 * p) for chunk in range(2 * p + 1)]
    ranks = [*range(p), *reversed(range(p))]
    return [(rank, end - begin) for rank, (begin, end) in zip(ranks, pairwise(edges), strict=True)]


# --- divisions --------------------------------------------------------------------------------------------------------


def _divisions(documents: Ints, cost: Ints, p: int, by_arcs: bool) -> Iterator[Ints]:
    """Yield the rank of each position, (n,), for one division after another."""
    n = len(cost)
    cuts = np.arange(1, p) * n // p
    yield np.searchsorted(cuts, np.arange(n), side="right")
    yield _by_cuts(cost, p)
    begins = np.cumsum([0, *documents])
    costs = np.diff(np.concatenate(([0], np.cumsum(cost)))[begins])
    for part in PARTS:
        yield _by_documents(documents.tolist(), costs, p, part)
    if by_arcs:
        yield _by_arcs(cost, p)
    yield _by_chunks(cost, p)


def _by_cuts(cost: Ints, p: int) -> Ints:
    """Contiguous shards of equal work: the midpoint of a position's work decides."""
    twice = 2 * np.cumsum(cost) - cost
    return np.minimum(twice * p // max(2 * int(cost.sum()), 1), p - 1)


def _by_documents(documents: Sequence[int], costs: Ints, p: int, part: int) -> Ints:
    tokens, total = sum(documents), max(int(costs.sum()), 1)
    weights = [max(length * p / tokens, int(c) * p / total) for length, c in zip(documents, costs, strict=True)]
    loads = np.zeros((p, 2))  # of work and of tokens, in means
    pieces: list[list[tuple[int, int]]] = [[] for _ in documents]
    for number in sorted(range(len(documents)), key=lambda number: (-weights[number], number)):
        length, share = documents[number], int(costs[number]) * p / total
        if weights[number] * part > 1.0:
            pieces[number] = _zigzag(length, p)
            loads += (share / p, 0.0)  # to within a chunk
            for rank, count in pieces[number]:
                loads[rank, 1] += count * p / tokens
            continue
        rank = int(np.argmin(np.maximum(loads[:, 0] + share, loads[:, 1] + length * p / tokens)))
        loads[rank] += (share, length * p / tokens)
        pieces[number] = [(rank, length)]
    flat = np.array([piece for document in pieces for piece in document], np.int64).reshape(-1, 2)
    return np.repeat(flat[:, 0], flat[:, 1])


def _by_arcs(cost: Ints, p: int) -> Ints:
    """Take an arc of the circle of tokens for one rank after another, and close the circle behind it.

    Arcs of the mean number of tokens have the mean work on average over where they begin, and neighbours differ by two
    tokens. So one of them has the mean work, but for a token's. Each adds two ends, so there are at most 2 p - 1 runs.
    """
    unit = max(1, len(cost) // max(UNITS, CHUNK * p))
    costs = np.add.reduceat(cost, np.arange(0, len(cost), unit))
    left, owner = np.arange(len(costs)), np.zeros(len(costs), np.int64)
    for rank in range(p - 1, 0, -1):
        tokens = len(left) // (rank + 1)
        before = np.cumsum(np.concatenate(([0], costs[left], costs[left[:tokens]])))  # of the circle, and on
        arcs = before[tokens:][: len(left)] - before[: len(left)]
        begin = int(np.argmin(np.abs(arcs - before[len(left)] // (rank + 1))))
        arc = (begin + np.arange(tokens)) % len(left)
        owner[left[arc]] = rank
        left = np.delete(left, arc)
    _, first, named = np.unique(owner, return_index=True, return_inverse=True)
    return np.repeat(np.argsort(np.argsort(first))[named], unit)[: len(cost)]  # the first tokens to the first rank


def _by_chunks(cost: Ints, p: int) -> Ints:
    n = len(cost)
    costs = np.add.reduceat(cost, np.arange(0, n, CHUNK))
    loads, owner = np.zeros(p, np.int64), np.zeros(len(costs), np.int64)
    for chunk in np.argsort(-costs, kind="stable"):
        rank = int(np.argmin(loads))
        owner[chunk], loads[rank] = rank, loads[rank] + costs[chunk]
    _exchange(costs, owner, loads)
    return np.repeat(owner, CHUNK)[:n]


def _exchange(costs: Ints, owner: Ints, loads: Ints) -> None:
    """Move chunks of the most loaded rank to others, or swap them for smaller ones, as long as that helps."""
    for _ in range(MOST_SWAPS):
        most = int(np.argmax(loads))
        mine = np.append(np.flatnonzero(owner == most), -1)
        best = (int(loads[most]), -1, -1, -1)  # the greater load of the pair, the other rank, the two chunks
        for other in range(len(loads)):
            theirs = np.append(np.flatnonzero(owner == other), -1)
            if other == most:
                continue
            moved = np.where(mine >= 0, costs[mine], 0)[:, None] - np.where(theirs >= 0, costs[theirs], 0)
            greater = np.maximum(loads[most] - moved, loads[other] + moved)
            i, j = np.unravel_index(int(np.argmin(greater)), greater.shape)
            best = min(best, (int(greater[i, j]), other, int(mine[i]), int(theirs[j])))
        if best[1] < 0:
            return
        _, other, sent, received = best
        for chunk, receiver in ((sent, other), (received, most)):
            if chunk >= 0:
                loads[owner[chunk]] -= costs[chunk]
                loads[receiver] += costs[chunk]
                owner[chunk] = receiver
