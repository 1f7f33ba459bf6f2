"""Layouts by document, of several generated lists each: a mistake in how documents are dealt out shows in few lists."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from reference import shards
from reference.documents import documents_from_cu_seqlens, documents_from_positions
from reference.pattern import Pattern
from ring.balance import ENOUGH, ENOUGH_TOKENS
from ring.layout import Layout
from verification.case import Case
from verification.draw.document_lists import Lengths, even_list, lists_for

MOST_RANKS = 7  # of lists that are dealt out: unevenness shows among more ranks than there are


def zigzags(case: Case, ranks: int) -> Iterator[str]:
    """Against the ranks of all positions as `reference.shards` has them, document by document."""
    rng = np.random.default_rng(case.seed)
    for p in (ranks, *rng.integers(2, MOST_RANKS + 1, 2).tolist()):
        for number, lengths in enumerate(lists_for(p, int(rng.integers(2**32)))):
            n = sum(lengths)
            made = Layout.zigzag(n, p, documents=list(lengths) if number % 2 else lengths)
            wanted = shards.shards("zigzag" + shards.BY_DOCUMENT, n, p, None, 0, lengths).positions
            found = [made.positions(rank).numpy() for rank in range(made.world_size)]
            if [mine.tolist() for mine in found] != [mine.tolist() for mine in wanted]:
                yield f"zigzag of the documents {lengths} on {p} ranks gives {_told(found)}, must be {_told(wanted)}"


def balanced(case: Case, ranks: int) -> Iterator[str]:
    """Of dense attention, whose work a formula counts, over documents long enough for chunks of them."""
    rng, p = np.random.default_rng(case.seed), max(ranks, 2)
    seeds = rng.integers(2**32, size=3).tolist()
    lists = [(even_list(p, seed), True) for seed in seeds]
    lists += [(tuple(16 * x for x in lengths), False) for lengths in (*lists_for(p, seeds[0]),)[:: 1 + seeds[1] % 3]]
    for lengths, even in lists:
        causal, window = bool(rng.integers(3)), None if rng.integers(2) else int(rng.integers(40))
        made = Layout.balanced(Pattern.dense(causal, lengths, window), sum(lengths), p)
        what = f"a balanced layout of {p} ranks for the documents {lengths}, causal {causal}, window {window},"
        yield from (f"{what} {wrong}" for wrong in _uneven(made, _work(lengths, causal, window), lengths, even))
    n = 3 * p + int(rng.integers(200))
    if Layout.balanced(Pattern.dense(), n, p) != Layout.contiguous(n, p) and -(-n // p) <= ENOUGH * n / p:
        yield f"a balanced layout of {n} tokens of equal work on {p} ranks must be contiguous, so as to send least"


def _uneven(made: Layout, work: np.ndarray, lengths: Lengths, even: bool) -> Iterator[str]:
    """even: whether there is a division into whole documents that gives all ranks the same."""
    p, n = made.world_size, len(work)
    held = [made.positions(rank).numpy() for rank in range(p)]
    if sorted(np.concatenate(held).tolist()) != list(range(n)):
        yield f"has the positions {_told(held)}"
        return
    if any((np.diff(mine) < 1).any() for mine in held):
        yield f"gives ranks positions that do not ascend: {_told(held)}"
    loads, tokens = np.array([work[mine].sum() for mine in held]) * p / work.sum(), np.array(made.counts) * p / n
    if loads.max() > max(ENOUGH, 1 + p * work.max() / work.sum()):
        yield f"gives ranks {loads.round(3).tolist()} of the mean work"
    if even and (loads.max() > ENOUGH or tokens.max() > ENOUGH_TOKENS):
        yield f"gives ranks {loads.round(3).tolist()} of the mean work and {tokens.round(3).tolist()} of the tokens"
    contiguous = all(len(mine) == 0 or mine[-1] - mine[0] == len(mine) - 1 for mine in held)
    if even and not contiguous and (cut := _cut(held, lengths)):
        yield f"divides the documents number {cut}, where whole ones can be dealt evenly"
    plain = [work[rank * n // p : (rank + 1) * n // p].sum() * p / work.sum() for rank in range(p)]
    if max(plain) <= ENOUGH and -(-n // p) * p <= ENOUGH_TOKENS * n and made != Layout.contiguous(n, p):
        yield "must be contiguous, since that is even enough and sends least"


def _cut(held: list[np.ndarray], lengths: Lengths) -> list[int]:
    """The documents that lie on several ranks."""
    number = np.repeat(np.arange(len(lengths)), lengths)
    together = np.concatenate([np.unique(number[mine]) for mine in held])
    return np.flatnonzero(np.bincount(together) > 1).tolist()


def _work(lengths: Lengths, causal: bool, window: int | None) -> np.ndarray:
    """Of each token, how many keys it sees: those before it and itself and, unless causal, those behind it."""
    within = np.concatenate([np.arange(length) for length in lengths])
    last = np.repeat(np.array(lengths) - 1, lengths)
    before, behind = within, last - within
    if window is not None:
        before, behind = np.minimum(before, window), np.minimum(behind, window)
    return before + 1 + (0 if causal else behind)


def helpers(case: Case, ranks: int) -> Iterator[str]:
    """What trainers have, of the same lists."""
    for lengths in lists_for(ranks, case.seed):
        ends = np.cumsum([0, *lengths])
        if (edges := documents_from_cu_seqlens(ends.astype(np.uint16), int(ends[-1]))) != lengths:
            yield f"documents_from_cu_seqlens makes {edges} of {ends.tolist()}, must be {lengths}"
        within = np.concatenate([np.arange(length) for length in lengths])[None]
        if (found := documents_from_positions(within)) != tuple(length for length in lengths if length):
            yield f"documents_from_positions makes {found} of the positions in {lengths}"


def _told(held: object) -> list[list[int]]:
    return [mine.tolist() for mine in held]  # type: ignore[attr-defined]
