"""Building blocks of a claim: each returns the nearest Case with a certain property.

A block changes as little as possible and never makes a small Case large, so that shrunk Cases stay small.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from reference import validators
from reference.pattern import Branch, Pattern
from reference.slices import Slice
from verification.case import Case, Keys
from verification.strategies.slices import clipped

Claim = Callable[[Case], Case | None]
OPTIONAL = ("sinks", "softcap", "value_dim", "keys", "same_bits")  # fields of Case that few implementations support
TAKEN = (*OPTIONAL, "slices")


def takes(*names: str) -> Callable[[Claim], Claim]:
    """Return a decorator of claims, which are given no Cases with sinks, a softcap, values of another head dim, keys
    of another sequence, chunks of the same bits or slices without it.

    Args:
        names: some of "sinks", "softcap", "value_dim", "keys", "same_bits" and "slices".

    Raises:
        ValueError: another name.
    """
    for name in names:
        validators.choice("a name of takes", name, TAKEN)

    def decorated(claim: Claim) -> Claim:
        taking = functools.partial(claim)
        taking.takes = names  # type: ignore[attr-defined]
        return taking

    return decorated


def applied(claim: Claim, case: Case) -> Case | None:
    """Return `claim(case)`, of the Case without what the claim does not take.

    Args:
        claim: any.
        case: any Case.
    """
    taken = getattr(claim, "takes", ())
    left_out: dict[str, Any] = {name: None for name in OPTIONAL if name not in taken}
    if case.same_bits is not None and "same_bits" not in taken:
        left_out |= {"order": "contiguous", "keys": Keys(case.keys.tokens) if case.keys and "keys" in taken else None}
    if "slices" not in taken and case.pattern.has_slices:
        branches = tuple(dataclasses.replace(branch, slices=None) for branch in case.pattern.branches)
        left_out["pattern"] = dataclasses.replace(case.pattern, branches=branches)
    elif case.keys is not None and "keys" not in taken:
        left_out["pattern"] = clipped(case.pattern, case.tokens, case.tokens)
    return claim(dataclasses.replace(case, **left_out))


def without_own_settings(case: Case) -> Case:
    """Return the Case without the settings that only this project has: exchange, bucket and kernel.

    Args:
        case: any Case.
    """
    return dataclasses.replace(case, exchange="ring", bucket=None, kernel="math")


def window(case: Case) -> int | None:
    """Return the window of the first branch that has one; None if none has.

    Args:
        case: any Case.
    """
    return next((branch.window for branch in case.pattern.branches if branch.window is not None), None)


def slices(case: Case) -> tuple[Slice, ...] | None:
    """Return the slices of the first branch that has some; None if none has.

    Args:
        case: any Case.
    """
    return next((branch.slices for branch in case.pattern.branches if branch.slices is not None), None)


def dense(case: Case, causal: bool | None = None, *, windows: bool = False, sliced: bool = False) -> Case:
    """Return a Case of dense attention without documents.

    Args:
        case: any Case.
        causal: None: the Case's.
        windows: True keeps the Case's `window`.
        sliced: True keeps the Case's `slices`.
    """
    causal = case.pattern.causal if causal is None else causal
    branch = Branch(window=window(case) if windows else None, slices=slices(case) if sliced else None)
    return dataclasses.replace(case, pattern=Pattern((branch,), causal))


def packed(case: Case, causal: bool | None = None, *, windows: bool = False, sliced: bool = False) -> Case:
    """Return a Case of dense attention within its documents, which one sequence has; without documents, of its batch.

    Args:
        case: any Case.
        causal: None: the Case's.
        windows: True keeps the Case's `window`.
        sliced: True keeps the Case's `slices`.
    """
    attended = dense(case, causal, windows=windows, sliced=sliced).pattern
    pattern = dataclasses.replace(attended, documents=case.pattern.documents)
    return dataclasses.replace(case, batch=case.batch if pattern.documents is None else 1, pattern=pattern)


def all_ranks(case: Case) -> Case:
    """Return the Case on all ranks: for implementations that need the default group. A Case that has them keeps its
    cuts.

    Args:
        case: any Case.
    """
    if len(case.ranks) == case.world:
        return dataclasses.replace(case, group=None)
    return dataclasses.replace(case.for_any_ranks(), group=None, cuts=None)


def two_ranks_or_more(case: Case) -> Case:
    """Return the Case on at least two ranks: in a ring of one, a rank sends to itself, which gloo does not support.

    Args:
        case: any Case.
    """
    return all_ranks(case) if len(case.ranks) == 1 else case


def even_shards(case: Case, order: str, chunks: int = 1) -> Case:
    """Return the Case with shards of equal length, at least as many tokens as before.

    Args:
        case: any Case.
        order: of the tokens, as in `Case`.
        chunks: the length of a shard is a multiple of it.
    """
    unit = len(case.ranks) * chunks
    tokens = max(1, -(-case.tokens // unit)) * unit
    return case.lengthened(tokens, order=order, cuts=None)


def even_parts(case: Case, order: str, chunks: int = 1) -> Case:
    """Return the Case with every document divided evenly among the ranks. Boundaries of documents are rounded down to
    multiples of chunks * ranks; documents that become empty are dropped.

    Args:
        case: any Case.
        order: of the tokens, as in `Case`.
        chunks: the length of a part is a multiple of it.
    """
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
    """Return the Case in one process, with the whole sequence in order.

    Args:
        case: any Case.
    """
    keys = None if case.keys is None else Keys(case.keys.tokens)
    return dataclasses.replace(case.for_any_ranks(), group=None, cuts=None, order="contiguous", keys=keys)


def plain_process(case: Case) -> Case:
    """Return the Case in one process in fp32 or fp64, with equal heads, the default scale and no lse, for
    single-process layers.

    Args:
        case: any Case.
    """
    case = equal_heads(default_scale(without_lse(one_process(without_own_settings(case)))))
    return in_dtypes(case, "float32", "float64")


def equal_heads(case: Case) -> Case:
    """Return the Case with as many key/value heads as query heads.

    Args:
        case: any Case.
    """
    return dataclasses.replace(case, kv_heads=case.heads)


def in_dtypes(case: Case, *dtypes: str) -> Case:
    """Return the Case in its dtype if the implementation supports it, else in the first that it supports.

    Args:
        case: any Case.
        dtypes: names of torch dtypes, as "float32".
    """
    return case if case.dtype in dtypes else dataclasses.replace(case, dtype=dtypes[0])


def default_scale(case: Case) -> Case:
    """Return the Case with the scale head_dim ** -0.5: for implementations without a scale argument.

    Args:
        case: any Case.
    """
    return dataclasses.replace(case, scale=None)


def divisible_heads(case: Case, ranks: int) -> Case:
    """Return the Case with the next number of key/value heads that so many ranks divide, and its query heads to each.

    Args:
        case: any Case.
        ranks: that share the heads, in an all-to-all.
    """
    kv_heads = -(-case.kv_heads // ranks) * ranks
    return dataclasses.replace(case, kv_heads=kv_heads, heads=kv_heads * (case.heads // case.kv_heads))


def positive_scale(case: Case) -> Case:
    """Return the Case with head_dim ** -0.5 in place of a scale of zero or less.

    Args:
        case: any Case.
    """
    return case if case.scale is None or case.scale > 0 else default_scale(case)


def without_lse(case: Case) -> Case:
    """Return the Case without lse: for implementations that return only the output.

    Args:
        case: any Case.
    """
    return dataclasses.replace(case, lse="unused")


def forward_only(case: Case) -> Case:
    """Return the Case without backward: out is compared, and lse if the Case uses it, but no gradients.

    Args:
        case: any Case.
    """
    return dataclasses.replace(lse_returned(case), backward=False)


def of_sizes(
    case: Case, *, tokens: Sequence[int], heads: Sequence[tuple[int, int]] = (), head_dims: Sequence[int] = (),
    batches: Sequence[int] = (),
) -> Case:  # fmt: skip
    """Return the Case in one of a few sizes, for implementations that compile each anew: JAX, Triton, torch.compile.

    Call it after `dense` or `packed`: a pattern with heads of its own does not fit other numbers of heads.

    Args:
        case: any Case.
        tokens, batches: sizes to choose from; the smallest one that is not below the Case's, else the largest. A longer
            last document takes further tokens; a shorter sequence loses documents and cuts. None: the Case's.
        heads: pairs of query and key/value heads to choose from, likewise by the query heads.
        head_dims: to choose from; the Case's own if it is one of them, else one by its seed.
    """
    length = _fitting(tokens, case.tokens)
    if length < case.tokens:
        pattern = dataclasses.replace(
            clipped(case.pattern, length, length if case.keys is None else case.key_tokens), documents=None
        )
        case = dataclasses.replace(case, tokens=length, cuts=None, pattern=pattern)
    elif length > case.tokens:
        case = case.lengthened(length, cuts=None)
    head_dim = case.head_dim
    if head_dims and head_dim not in head_dims:
        head_dim = head_dims[(case.seed + head_dim) % len(head_dims)]
    query_heads = _fitting([pair[0] for pair in heads], case.heads)
    by_query_heads = dict(heads) if (case.heads, case.kv_heads) not in heads else {}
    return dataclasses.replace(
        case, batch=_fitting(batches, case.batch), head_dim=head_dim,
        heads=query_heads, kv_heads=by_query_heads.get(query_heads, case.kv_heads),
    )  # fmt: skip


def _fitting(sizes: Sequence[int], size: int) -> int:
    """Return the smallest of the sizes that is not below this one, else the largest; this one if there are none."""
    return min((x for x in sizes if x >= size), default=max(sizes, default=size))


def lse_returned(case: Case) -> Case:
    """Return the Case with lse compared if it uses it, but no gradient through it.

    Args:
        case: any Case.
    """
    return dataclasses.replace(case, lse="unused" if case.lse == "unused" else "returned")
