"""Arithmetic of an implementation of attention: the properties that its rounding errors depend on.

The bounds in `reference.bounds` take an `Arithmetic`: unit roundoffs of the types, and the number of roundings and
summands. These counts are upper bounds that follow from the pattern, the sizes and the bucket alone, so they hold for
every implementation that respects the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from reference.pattern import Pattern, slices_seen
from reference.slices import Slice, transposed

# Unit roundoff of a type, its largest finite number, and the absolute error where a number of the type underflows:
# half the smallest subnormal for fp16; for the others the smallest normal number, so that flushing to zero is allowed.
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
UNDERFLOW = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-25}
LARGEST = {
    "float64": float(np.finfo(np.float64).max),
    "float32": float(np.finfo(np.float32).max),
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float16": 65504.0,
}

# On GPUs fused kernels compute exp2 of scores times log2 e: ex2.approx has an error of 2 units in the last place (CUDA
# C++ Programming Guide, mathematical functions), the factor and the product are rounded: 8 u in all. They accumulate
# gradients in fp32 and round them once, those of keys that several query heads share once more: k = 1, k' = 2.
#
# Torch's fused CPU kernel (ATen/native/cpu/FlashAttentionKernel.cpp) takes exp from Vectorized::exp_u20, by its name
# within 20 units in the last place (40 u), and in 16 bits from fexp_u20, a cubic whose relative error stays below 2^-13
# (1.12e-4 over its whole range). Blocks have 512 keys, and 32 rows, 64 from 192 rows on, 256 from 768 on.
#
# The softcap: tanh is assumed to be within 4 units in the last place (8 u), as it is on CPUs and CUDA's tanhf is (same
# guide). Fused GPU kernels take tanh.approx.f32, whose relative error is at most 2^-11 (PTX ISA).
KERNELS = ("math", "flash", "half", "gpu")
_EXP_ROUNDINGS = {"math": 2, "flash": 40, "gpu": 8}
_EXP_HALF = 2.0**-13
_TANH_ROUNDINGS = 8
_TANH_APPROX = 2.0**-11
_KEY_BLOCK = 512
_ROW_BLOCKS = ((32, 191), (64, 767), (256, None))
_NEIGHBOUR_ORDERS = ("contiguous", "zigzag", "contiguous by document", "zigzag by document")  # runs hold neighbours


@dataclass(frozen=True)
class Counts:
    """Upper bounds on the number of summands and merges. With g query heads to a key/value head:

    keys        pairs in a row, with multiplicity (b)
    rows        pairs of a key, with multiplicity, over its g query heads (b')
    merges      partial results of a row (p)
    row_merges  partial gradients of a key (p')
    key_blocks  blocks of keys in one kernel call (k)
    row_blocks  blocks of rows in one kernel call (k')
    """

    keys: int
    rows: int
    merges: int = 1
    row_merges: int = 1
    key_blocks: int = 1
    row_blocks: int = 1


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic of an implementation. Counts are upper bounds; u, u_... are unit roundoffs.

    dim         head dim of q and k
    scale       size of the factor on q . k
    u           of the working type: fp32, or fp64 for fp64
    u_out       of the results
    u_exp       relative error of exp
    u_tanh      relative error of tanh, in the softcap
    u_prob      of the probabilities in the second product; 0 if they stay in the working type
    u_partial   of partial results before the merge; 0 if they stay in the working type
    u_buf       of the accumulator of gradients
    u_sinks     of the gradient of sinks
    eta         underflow of probabilities
    eta_out     underflow of results
    eta_sinks   underflow of the gradient of sinks
    eta_mul     underflow of products in the working type
    counts      numbers of summands and merges
    sides       2 if the exact values are computed in the same type, else 1
    u_returned  of sums of gradients that are returned to the key's owner; 0 if they stay in the working type
    """

    dim: int
    scale: float
    u: float
    u_out: float
    u_exp: float
    u_tanh: float
    u_prob: float
    u_partial: float
    u_buf: float
    u_sinks: float
    eta: float
    eta_out: float
    eta_sinks: float
    eta_mul: float
    counts: Counts
    sides: int = 1
    u_returned: float = 0.0

    @classmethod
    def of(
        cls, dtype: str, kernel: str, dim: int, scale: float, counts: Counts, *, sinks: str | None = None
    ) -> Arithmetic:
        """The arithmetic of a kernel whose operands and results have that dtype. sinks: their dtype, if it is another.
        kernel:

        math    computes in the working type, rounds results once
        flash   the same with the exponential of torch's fused CPU kernel
        half    torch's fused CPU kernel on 16-bit operands
        gpu     fused GPU kernels on 16-bit operands

        Raises ValueError for another kernel, or for "half" and "gpu" on wider operands.
        """
        if kernel not in KERNELS or (kernel in ("half", "gpu") and dtype not in ("bfloat16", "float16")):
            raise ValueError(
                f"kernel is {kernel!r} for {dtype}; it must be one of {KERNELS}, half and gpu in 16 bits only"
            )
        work = "float64" if dtype == "float64" else "float32"
        half = UNIT[dtype] if kernel in ("half", "gpu") else 0.0
        return cls(
            dim=dim,
            scale=abs(scale),
            u=UNIT[work],
            u_out=UNIT[dtype],
            u_tanh=_TANH_APPROX if kernel == "gpu" else UNIT[work] * _TANH_ROUNDINGS,
            u_exp=_EXP_HALF if kernel == "half" else UNIT[work] * _EXP_ROUNDINGS[_exponential(kernel, dtype)],
            u_prob=half,
            u_partial=half,
            u_buf=UNIT[work],
            u_sinks=UNIT[sinks or dtype],
            eta=UNDERFLOW[dtype] if half else UNDERFLOW[work],
            eta_out=UNDERFLOW[dtype],
            eta_sinks=UNDERFLOW[sinks or dtype],
            eta_mul=UNDERFLOW[work],
            counts=counts,
            sides=2 if dtype == "float64" else 1,
        )

    def with_sink(self) -> Arithmetic:
        """The arithmetic with one more key in each row, which is one more partial result."""
        counts = replace(self.counts, keys=self.counts.keys + 1, merges=self.counts.merges + 1)
        return replace(self, counts=counts)

    def gamma(self, k: int) -> float:
        """g(k) = k u / (1 - k u): the error of k successive roundings."""
        return k * self.u / (1 - k * self.u)

    @property
    def floor_out(self) -> float:
        roundings = 2 if self.u_partial else 1  # of the partial results, whose weights add up to 1, and of the merged
        return roundings * self.eta_out + self.counts.keys * self.eta_mul

    @property
    def floor_dq(self) -> float:
        roundings = 1 + (self.counts.merges * self.counts.key_blocks if self.u_partial else 0)
        return roundings * self.eta_out + self.scale * self.counts.keys * self.eta_mul

    @property
    def floor_dk(self) -> float:
        return self._roundings_of_keys * self.eta_out + self.scale * self.counts.rows * self.eta_mul

    @property
    def floor_dv(self) -> float:
        return self._roundings_of_keys * self.eta_out + self.counts.rows * self.eta_mul

    @property
    def _roundings_of_keys(self) -> int:
        """Number of roundings to a result's type: partial results, at most as many returned sums, and the total."""
        partial = self.counts.row_blocks if self.u_partial else 0
        return 1 + self.counts.row_merges * (partial + bool(self.u_returned))


def _exponential(kernel: str, dtype: str) -> str:
    """Key of _EXP_ROUNDINGS. In fp64 exp_u20 is exp."""
    return "math" if kernel == "flash" and dtype == "float64" else kernel


# --- counts -----------------------------------------------------------------------------------------------------------


def max_pairs(pattern: Pattern, tokens: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """(b, b'): most pairs in a row of a query head, and most rows of a group of query heads that see one key.

    A segment of min(w, n) positions holds len(range(offset, min(w, n), r)) selected ones, with documents n being the
    longest. A row sees at most those, once through each branch that serves its head; a key of that head is seen by at
    most as many rows. Nor does it see more than its slices hold: `_reach` of each slice over the row, or over the key.
    """
    longest = tokens if pattern.documents is None else max(pattern.documents, default=0)
    seen = np.zeros((2, heads), object)
    for branch in pattern.branches:
        length, rate = min(branch.segment_length or longest, longest), branch.dilation_rate
        slices = slices_seen(branch, pattern.causal)
        within = [_most_over(side, [_reach(one, rate, tokens) for one in side])
                  for side in (slices, [transposed(one) for one in slices])]  # fmt: skip
        for head, offset in enumerate(branch.offsets(heads)):
            if offset is not None:
                on_grid = len(range(offset, length, rate))
                seen[:, head] += [min(on_grid, most) for most in within]
    group = heads // kv_heads
    return max(1, *seen[0]), max(1, *(sum(seen[1, h : h + group]) for h in range(0, heads, group)))


def _reach(one: Slice, rate: int, tokens: int) -> int:
    """Most keys of a slice that one row sees on a grid of that rate.

    On a grid all distances are multiples of the rate. Row i sees the keys max(k0, i + low) to min(k1 - 1, i + high).
    Their number is concave in i, so it is largest where an end changes from one to the other, or beside it.
    """
    q0, q1, k0, k1, low, high = one.limits
    low, high, q1, k1 = -(-low // rate) * rate, high // rate * rate, min(q1, tokens), min(k1, tokens)
    rows = (max(q0, min(q1 - 1, i)) for i in (k0 - low, k1 - 1 - high))
    return max(-(-(min(k1 - 1, i + high) - max(k0, i + low) + 1) // rate) for i in rows)


def _most_over(slices: Sequence[Slice], weights: Sequence[int]) -> int:
    """Return the largest sum of the weights of slices over one row."""
    edges = [(one.q0, max(0, weight)) for one, weight in zip(slices, weights, strict=True)]
    edges += [(one.limits[1], -max(0, weight)) for one, weight in zip(slices, weights, strict=True)]
    return max(accumulate((weight for _, weight in sorted(edges)), initial=0))


@dataclass(frozen=True)
class MaskParts:
    """Number of calls into which a mask cuts what would be one without it, for `max_partials`.

    rows      sum over the branches of the most parts of one row
    keys      the same of one key
    beside    True if a slice has a bound beside the diagonal, as causal attention has
    ranges    most ranges of a run of keys that a rank needs; 0: the run, or from its begin on, or up to its end
    """

    rows: int
    keys: int
    beside: bool
    ranges: int


def mask_parts(pattern: Pattern, tokens: int) -> MaskParts:
    """Return the parts of the mask of a pattern.

    A row's keys in one run meet each slice over the row. A slice's share of them is a part. One more of keys that all
    rows of the call see may be beside it for each bound, and one of keys that some rows see:

        bounds                  parts
        none                    1   a rectangle
        beside the diagonal     1   in a square on it: it crosses the pairs of a run with itself alone, and these in
                                    one triangle
        any other               + 2 for each: a triangle, and the rectangle beside it that all rows see

    On a grid of rate r, bounds are multiples of r. The ones beside the diagonal let a key see itself, or only the next.
    Bounds that hide no pair of a segment count as none. So causality has 1 part, a causal window 3, a window both ways
    5.

    A window that covers the whole sequence cuts runs into parts of a window and one step (`ring.plan.blocks`). Other
    slices of its branch then meet these, in each run one more than their length holds.
    """
    rows, keys, beside, ranges = 0, 0, False, 0
    for branch in pattern.branches:
        length, rate = min(branch.segment_length or tokens, tokens), branch.dilation_rate
        slices, parts = slices_seen(branch, pattern.causal), list[tuple[int, int]]()
        windows = [max(-one.low, one.high) // rate * rate + rate for one in slices
                   if one.low is not None and one.high is not None and _is_whole(one, tokens)]  # fmt: skip
        part = min([length, *windows])
        for one in slices:
            far, near = _bounds(one, rate, length, tokens)
            beside |= near
            whole = _is_whole(one, tokens)
            if far or not whole:
                ranges = max(ranges, 1 if branch.slices is None else 2 * len(slices))
            q0, q1, k0, k1 = (min(end, tokens) for end in one.limits[:4])
            cuts = (0, 0) if whole or part == length else (1 + (k1 - k0) // part, 1 + (q1 - q0) // part)
            parts.append(((1 + 2 * far) * (1 + cuts[0]), (1 + 2 * far) * (1 + cuts[1])))
        of_rows, of_keys = zip(*parts, strict=True) if parts else ((), ())
        rows += max(1, _most_over(slices, of_rows))
        keys += max(1, _most_over([transposed(one) for one in slices], of_keys))
    return MaskParts(rows, keys, beside, ranges)


def _is_whole(one: Slice, tokens: int) -> bool:
    """Return True if the ranges of a slice hold all tokens."""
    q0, q1, k0, k1, *_ = one.limits
    return not q0 and not k0 and min(q1, k1) >= tokens


def _bounds(one: Slice, rate: int, length: int, tokens: int) -> tuple[int, bool]:
    """Return the number of bounds that hide something and are not beside the diagonal, and True if one is beside it."""
    q0, q1, k0, k1, low, high = one.limits
    q1, k1, low, high = min(q1, tokens), min(k1, tokens), -(-low // rate), high // rate  # in steps of the grid
    hides = (low - 1) * rate > max(k0 - q1, -length), (high + 1) * rate < min(k1 - q0, length)
    square = (q0, q1) == (k0, k1)
    near = square and low in (0, 1), square and high in (0, -1)
    return sum(hidden and not aside for hidden, aside in zip(hides, near, strict=True)), any(near)


def max_run_parts(exchange: str, order: str | None, cut: bool, ranks: int, beside: bool, ranges: int) -> int:
    """Most parts of a rank's keys, or rows, of one run, for any bucket. order, cut: as in `max_partials`; None for
    queries and keys of different layouts, whose runs may overlap in any way. beside, ranges: of `MaskParts`.

    Causal, or with another bound beside the diagonal, and with tokens of several ranks interleaved: a run begins with
    keys that all rows see, or ends with rows that see all keys, and a separate call may take these beside the causal
    square. In striped order there are none, since every key lies within one turn of a row of each rank. Orders whose
    runs hold neighbours do not interleave.

    The exchange "ring" sends keys separately for each of the p - 1 distances that they travel. A rank needs all keys of
    a run or, causal, the keys up to its last row. Distances differ only in interleaved orders, and in striped order
    only for the last key. With a window a rank needs a range of keys, which has two ends. With slices it needs one for
    each slice and each of its runs of queries, of which it has two.
    """
    turns = beside and order not in _NEIGHBOUR_ORDERS
    uneven = turns and (order != "striped" or cut)
    distances = 1
    if exchange == "ring" and ranges:
        distances = 2 * (ranks - 1) * ranges
    elif exchange == "ring" and turns:
        distances = ranks - 1 if uneven else min(2, ranks - 1)
    return max(1, distances) + uneven


def max_partials(order: str, cut: bool, ranks: int, tokens: int, bucket: int, branches: int, parts: int = 1) -> int:
    """Most partial results of the keys of one row, or of the rows of one key.

    order, cut: the order of the tokens, and True if its shards are not cut by the order's own rule.
    branches: `rows` or `keys` of `MaskParts`. parts: of a run, from `max_run_parts`.

    Per branch: the order of the tokens is a list of arithmetic runs (1 contiguous; p striped, and in each document p
    contiguous by document; 2 p zigzag; any other has at most 2 p runs, or else is handled by position, one part per
    shard). The p - 1 cuts between shards add a part each, unless they coincide with the ends of runs: in these four
    orders, where the shards are not cut otherwise, but not in a permuted one. Each of these
    consists of `parts`. A bucket cuts shard i, of n_i tokens, at most ceil(n_i / bucket) times, in all n / bucket + p,
    and not at all if it holds the tokens of all branches. The fused kernel takes 512 keys at a time: n / 512 more. A
    row's keys are in one document, so documents add no parts.
    """
    if not cut and order in ("contiguous", "striped", "contiguous by document"):
        runs = ranks
    else:
        aligned = order in ("contiguous", "striped", "zigzag", "zigzag by document") and not cut
        runs = {"contiguous": 1, "striped": ranks}.get(order, 2 * ranks) + (0 if aligned else ranks - 1)
    chunks = 0 if branches * tokens <= bucket else tokens // bucket + ranks
    return branches * (runs * parts + chunks + tokens // _KEY_BLOCK)


def max_call_blocks(tokens: int) -> tuple[int, int]:
    """(k, k'): most blocks of keys, and of rows, of torch's fused CPU kernel for up to so many tokens."""
    rows = max(-(-(tokens if last is None else min(tokens, last)) // size) for size, last in _ROW_BLOCKS)
    return -(-tokens // _KEY_BLOCK), rows
