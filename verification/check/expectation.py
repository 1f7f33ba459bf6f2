"""The expectation of a Case: exact results of its tensors, and bounds for the arithmetic that it allows.

`reference.fast_oracle` and `reference.bounds` compute all of it; this module translates a Case into their arguments.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from reference import roundoff
from reference.fast_oracle import Expectation, Inputs, evaluate
from reference.head_groups import groups_of
from reference.roundoff import Arithmetic, Counts
from verification.case import Case
from verification.check.numbered_exchange import with_number
from verification.check.supported import FUSED, fused


def expect(case: Case) -> Expectation:
    """Return the exact results and bounds of a Case."""
    return evaluate(inputs_of(case, case.tensors()), arithmetic_of(case))


def inputs_of(case: Case, tensors: tuple[Tensor, ...]) -> Inputs:
    """Return `tensors` (those of `case.tensors()`, or edited ones) as NumPy inputs; dlse is None unless it is used."""
    q, k, v, dout, dlse, *sinks = (x.double().numpy() for x in tensors)
    return Inputs(
        q, k, v, dout, dlse if case.through_lse else None, case.pattern, case.softmax_scale,
        None if case.keys is None else np.arange(case.tokens),
        sinks=sinks[0] if case.sinks else None, softcap=case.softcap,
    )  # fmt: skip


def arithmetic_of(case: Case) -> Arithmetic:
    """Return the arithmetic that a Case allows. "auto" may use either kernel, so it has the bounds of "flash"."""
    case = with_number(case)
    kernel = bounding_kernel(case)
    arithmetic = make_arithmetic(case, kernel, sum_lengths(case, kernel))
    return replace(arithmetic, u_returned=arithmetic.u_out) if case.narrow else arithmetic


def make_arithmetic(case: Case, kernel: str, counts: Counts) -> Arithmetic:
    """Return the arithmetic of that kernel of `roundoff.KERNELS`."""
    sinks = str(case.sinks_dtype).removeprefix("torch.")
    return Arithmetic.of(case.dtype, kernel, case.head_dim, case.softmax_scale, counts, sinks=sinks)


def sum_lengths(case: Case, kernel: str) -> Counts:
    """Return the lengths of the sums, for calls of that kernel of `roundoff.KERNELS`."""
    tokens, ranks = max(case.tokens, case.key_tokens), len(case.ranks)
    keys, rows = roundoff.max_pairs(case.pattern, tokens, case.heads, case.kv_heads)
    mask = roundoff.mask_parts(case.pattern, tokens)
    order, cut = (case.order, case.cuts is not None) if case.keys is None else (None, True)
    exchange = groups_of(case.exchange, ranks).exchange
    parts = roundoff.max_run_parts(exchange, order, cut, ranks, mask.beside, mask.ranges)
    of_queries, of_keys = (
        roundoff.max_partials(order, cuts is not None, ranks, tokens, case.tokens_per_call, factor, parts)
        for factor, (order, cuts) in (
            (mask.keys, (case.order, case.cuts)),
            (mask.rows, case.key_division()[0:4:3]),
        )
    )
    if case.same_bits is not None:  # each part is of one chunk; a window or segment cuts one more at either end
        of_queries, of_keys = (factor * (tokens // case.same_bits + 2) for factor in (mask.keys, mask.rows))
    merges, row_merges = min(keys, of_keys), min(rows, of_queries * (case.heads // case.kv_heads))
    key_blocks, row_blocks = (1, 2) if kernel == "gpu" else roundoff.max_call_blocks(tokens)
    return Counts(keys, rows, merges, row_merges, key_blocks, row_blocks)


def bounding_kernel(case: Case) -> str:
    """Return the kernel whose bounds apply to a Case."""
    if case.kernel == "math":
        return "math"
    if case.device == "cpu":
        return "flash"
    return "gpu" if any(fused(case, kernel) for kernel in FUSED) else "math"
