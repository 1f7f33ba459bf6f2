"""Lengths of documents, several lists at a time, for what is cheap to look at: a Case has one list of few documents."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Lengths = tuple[int, ...]


def lists_for(ranks: int, seed: int) -> Iterator[Lengths]:
    """Such as show how documents are dealt out among ranks: whole ones of less than 2 p tokens, by turns, beside long
    ones of which ranks have unequal shares. One list of each kind; none is without documents.
    """
    rng, whole = np.random.default_rng(seed), 2 * ranks
    unequal = whole * rng.integers(1, 4, 3) + rng.integers(0, whole, 3)
    short = rng.integers(1, whole, rng.integers(4, 16))
    yield _mixed(rng, unequal, short)
    yield _mixed(rng, unequal, np.full(rng.integers(2, 3 * ranks + 2), rng.integers(1, whole)))  # ranks are level often
    yield _mixed(rng, rng.integers(max(whole - 2, 0), whole + 3, rng.integers(2, 9)))
    yield _mixed(rng, np.zeros(2, np.int64), short, rng.integers(0, 2, 3), unequal[:1])
    yield tuple([int(rng.integers(1, 3 * whole))] * int(rng.integers(1, 9)))
    yield tuple(sorted(_mixed(rng, short, unequal), reverse=bool(seed % 2)))


def even_list(ranks: int, seed: int) -> Lengths:
    """As many documents of each length on every rank, if whole ones are dealt; but the long ones come first, so that
    contiguous shards of equal tokens have unequal work.
    """
    rng = np.random.default_rng(seed)
    long, short = int(rng.integers(20, 60)), int(rng.integers(1, 8))
    times, more = int(rng.integers(1, 3)), int(rng.integers(4, 12))
    return (long,) * (ranks * times) + (short,) * (ranks * more)


def _mixed(rng: np.random.Generator, *parts: np.ndarray) -> Lengths:
    return tuple(rng.permutation(np.concatenate(parts)).tolist())
