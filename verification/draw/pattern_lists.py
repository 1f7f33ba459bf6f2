"""Patterns with every field of every kind, several at a time, for what is cheap to look at."""

from __future__ import annotations

import numpy as np

from reference.pattern import Branch, Pattern

MOST = 12  # of what is counted in tokens


def some_pattern(rng: np.random.Generator, heads: int) -> Pattern:
    """One that fits so many heads."""
    branches = tuple(some_branch(rng, heads) for _ in range(rng.integers(1, 4)))
    documents = tuple(rng.integers(0, MOST, rng.integers(0, 6)).tolist()) if rng.integers(2) else None
    return Pattern(branches, bool(rng.integers(2)), documents)


def some_branch(rng: np.random.Generator, heads: int) -> Branch:
    rate = int(rng.integers(1, 6))
    first = int(rng.integers(heads))
    served = range(first, int(rng.integers(first, heads)) + 1) if rng.integers(2) else None
    each = rng.integers(rate, size=heads if served is None else len(served)).tolist()
    return Branch(
        segment_length=_maybe(rng, 1),
        dilation_rate=rate,
        offset=tuple(each) if rng.integers(2) else each[0],
        heads=served,
        window=_maybe(rng, 0),
    )


def _maybe(rng: np.random.Generator, least: int) -> int | None:
    """Every third is none, every third the least."""
    kind = int(rng.integers(3))
    return None if kind == 0 else least if kind == 1 else int(rng.integers(least, MOST))
