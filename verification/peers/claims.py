"""Steps of a claim: each takes a Case to the nearest one with a certain property.

A step changes as little as it can and never makes a small Case large, so that Cases that Hypothesis shrank stay small.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise

from reference.pattern import Pattern
from verification.case import Case


def without_own_settings(case: Case) -> Case:
    """The settings that only this project's own implementation has, exchange, bucket and kernel, at fixed values."""
    return dataclasses.replace(case, exchange="ring", bucket=None, kernel="math")


def window(case: Case) -> int | None:
    """Of the first of the Case's branches that have one; None if none has."""
    return next((branch.window for branch in case.pattern.branches if branch.window is not None), None)


def dense(case: Case, causal: bool | None = None, *, windows: bool = False) -> Case:
    """Plain attention, without documents. causal: True for always, False for never, None as the Case has it. windows:
    whether the Case's `window` is kept."""
    causal = case.pattern.causal if causal is None else causal
    return dataclasses.replace(case, pattern=Pattern.dense(causal, window=window(case) if windows else None))


def packed(case: Case, causal: bool | None = None, *, windows: bool = False) -> Case:
    """Plain attention of one sequence, within its documents if it has some. causal, windows: as for `dense`."""
    pattern = dataclasses.replace(dense(case, causal, windows=windows).pattern, documents=case.pattern.documents)
    return dataclasses.replace(case, batch=1, pattern=pattern)


def all_ranks(case: Case) -> Case:
    """All ranks take part: for implementations that use the default group."""
    return dataclasses.replace(case, group=None, cuts=None)


def two_ranks_or_more(case: Case) -> Case:
    """A subgroup of at least two ranks: in a ring of one, a rank sends to itself, which NCCL can and gloo cannot."""
    return all_ranks(case) if len(case.ranks) == 1 else case


def even_shards(case: Case, order: str, chunks: int = 1) -> Case:
    """Shards of one length, a multiple of `chunks`, in that order."""
    unit = len(case.ranks) * chunks
    tokens = max(1, -(-case.tokens // unit)) * unit
    return case.lengthened(tokens, order=order, cuts=None)


def even_parts(case: Case, order: str, chunks: int = 1) -> Case:
    """Shards of one length, to which every document gives as many tokens, a multiple of `chunks`; in that order, by
    document. Where documents meet goes down to a multiple of chunks * ranks; those of which nothing is left go."""
    unit, before = len(case.ranks) * chunks, case.pattern.documents
    case = even_shards(case, order, chunks)
    if before is None:
        return case
    edges = (0, *(edge // unit * unit for edge in accumulate(before[:-1])), case.tokens)
    lengths = zip((b - a for a, b in pairwise(edges)), before, strict=True)
    documents = tuple(length for length, had in lengths if length or not had)  # empty ones that were drawn stay
    return dataclasses.replace(case, pattern=dataclasses.replace(case.pattern, documents=documents))


def one_process(case: Case) -> Case:
    """One process: the whole sequence, in its own order."""
    return dataclasses.replace(case, group=None, cuts=None, order="contiguous")


def plain_process(case: Case) -> Case:
    """One process in fp32 or fp64, with equal heads, the default scale and no lse: what single-process layers take."""
    case = equal_heads(default_scale(without_lse(one_process(without_own_settings(case)))))
    return in_dtypes(case, "float32", "float64")


def equal_heads(case: Case) -> Case:
    """As many key/value heads as query heads."""
    return dataclasses.replace(case, kv_heads=case.heads)


def in_dtypes(case: Case, *dtypes: str) -> Case:
    """The Case's own dtype if it is one of these, else the first."""
    return case if case.dtype in dtypes else dataclasses.replace(case, dtype=dtypes[0])


def default_scale(case: Case) -> Case:
    """head_dim ** -0.5: for implementations that take no other scale."""
    return dataclasses.replace(case, scale=None)


def without_lse(case: Case) -> Case:
    return dataclasses.replace(case, lse="unused")


def lse_returned(case: Case) -> Case:
    """lse is compared, but no gradient flows through it."""
    return dataclasses.replace(case, lse="unused" if case.lse == "unused" else "returned")
