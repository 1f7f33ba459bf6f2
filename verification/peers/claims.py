"""Building blocks of a claim: each returns the nearest Case with a certain property.

A block changes as little as possible and never makes a small Case large, so that shrunk Cases stay small.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise

from reference.pattern import Pattern
from verification.case import Case


def without_own_settings(case: Case) -> Case:
    """Fix the settings that only this project's implementation has: exchange, bucket and kernel."""
    return dataclasses.replace(case, exchange="ring", bucket=None, kernel="math")


def window(case: Case) -> int | None:
    """Return the window of the first branch that has one; None if none has."""
    return next((branch.window for branch in case.pattern.branches if branch.window is not None), None)


def dense(case: Case, causal: bool | None = None, *, windows: bool = False) -> Case:
    """Dense attention without documents. causal: None keeps the Case's. windows: True keeps the Case's `window`."""
    causal = case.pattern.causal if causal is None else causal
    return dataclasses.replace(case, pattern=Pattern.dense(causal, window=window(case) if windows else None))


def packed(case: Case, causal: bool | None = None, *, windows: bool = False) -> Case:
    """Dense attention of one sequence, within its documents if it has some. causal, windows: as for `dense`."""
    pattern = dataclasses.replace(dense(case, causal, windows=windows).pattern, documents=case.pattern.documents)
    return dataclasses.replace(case, batch=1, pattern=pattern)


def all_ranks(case: Case) -> Case:
    """Use all ranks: for implementations that need the default group."""
    return dataclasses.replace(case, group=None, cuts=None)


def two_ranks_or_more(case: Case) -> Case:
    """Use at least two ranks: in a ring of one, a rank sends to itself, which gloo does not support."""
    return all_ranks(case) if len(case.ranks) == 1 else case


def even_shards(case: Case, order: str, chunks: int = 1) -> Case:
    """Use shards of equal length, a multiple of `chunks`, in that order."""
    unit = len(case.ranks) * chunks
    tokens = max(1, -(-case.tokens // unit)) * unit
    return case.lengthened(tokens, order=order, cuts=None)


def even_parts(case: Case, order: str, chunks: int = 1) -> Case:
    """Divide every document evenly among the ranks, in that order, in multiples of `chunks`. Boundaries of documents
    are rounded down to multiples of chunks * ranks; documents that become empty are dropped."""
    unit, before = len(case.ranks) * chunks, case.pattern.documents
    case = even_shards(case, order, chunks)
    if before is None:
        return case
    edges = (0, *(edge // unit * unit for edge in accumulate(before[:-1])), case.tokens)
    lengths = zip((b - a for a, b in pairwise(edges)), before, strict=True)
    # Drop documents that rounding made empty, but not those that were drawn empty.
    documents = tuple(length for length, drawn in lengths if length or not drawn)
    return dataclasses.replace(case, pattern=dataclasses.replace(case.pattern, documents=documents))


def one_process(case: Case) -> Case:
    """Use one process, with the whole sequence in order."""
    return dataclasses.replace(case, group=None, cuts=None, order="contiguous")


def plain_process(case: Case) -> Case:
    """Use one process in fp32 or fp64, with equal heads, the default scale and no lse, for single-process layers."""
    case = equal_heads(default_scale(without_lse(one_process(without_own_settings(case)))))
    return in_dtypes(case, "float32", "float64")


def equal_heads(case: Case) -> Case:
    """Use as many key/value heads as query heads."""
    return dataclasses.replace(case, kv_heads=case.heads)


def in_dtypes(case: Case, *dtypes: str) -> Case:
    """Keep the Case's dtype if it is one of these; else use the first."""
    return case if case.dtype in dtypes else dataclasses.replace(case, dtype=dtypes[0])


def default_scale(case: Case) -> Case:
    """Use head_dim ** -0.5: for implementations without a scale argument."""
    return dataclasses.replace(case, scale=None)


def divisible_heads(case: Case, ranks: int) -> Case:
    """Use the next number of key/value heads that so many ranks divide, with as many query heads to each."""
    kv_heads = -(-case.kv_heads // ranks) * ranks
    return dataclasses.replace(case, kv_heads=kv_heads, heads=kv_heads * (case.heads // case.kv_heads))


def positive_scale(case: Case) -> Case:
    """Use head_dim ** -0.5 instead of a scale of zero or less."""
    return case if case.scale is None or case.scale > 0 else default_scale(case)


def without_lse(case: Case) -> Case:
    return dataclasses.replace(case, lse="unused")


def lse_returned(case: Case) -> Case:
    """Compare lse if the Case uses it, but send no gradient through it."""
    return dataclasses.replace(case, lse="unused" if case.lse == "unused" else "returned")
