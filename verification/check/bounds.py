"""A-priori rounding bounds for out, lse, dq, dk, dv of an implementation, against exact values on the inputs as
rounded.

A first-order model, derived for this project: no published theorem states it as a whole. Its parts are standard:
Higham, "Accuracy and Stability of Numerical Algorithms", section 2.8 (underflow) and chapter 3 (gamma_k);
Blanchard, Higham, Higham, "Accurately computing the log-sum-exp and softmax functions", IMA J. Numer. Anal. 41(4),
2021. Nothing in it is tuned: every term is a count of roundings. It assumes no TF32, and exp and log as good as
`u_exp` says.

Notation: P exact probabilities (with the count c of branches in them), s scores, m their row maximum, L the lse,
t = dP - D + dlse, dP = dO V^T, D = rowsum(dO * O), |X| entrywise, a = |scale|, d = head dim; g(k) = k u / (1 - k u);
b keys per row, b' rows per key, p and p' partial results merged; the rest as in `Arithmetic`.

    base = g(d+2) a |Q||K|^T + u_exp
    eps  = base + u |s - m|                                  relative error of exp(s - m)
    mu   = p u (2|L| + 2|m| + 4)                             p merges by lse
    T_L  = rowsum(P eps) + g(b+1) + mu + u |L|
    T_O  = [P * (eps + rowsum(P eps) + 2 g(b+2) + mu + 2 u_prob + u_partial) + c eta] |V| + u_out |O| + floor

    e    = base + u |s - L| + T_L                            relative error of exp(s - L), lse global
    T_D  = g(d) (|dO| . |O|) + |dO| . T_O + u (|D| + |dlse|)
    T_dS = P * (e |t| + g(d) |dO||V|^T + T_D + 3u |t|) + u_prob |dS| + c eta (1 + |t|)
    T_dQ = a [T_dS + (g(b) + p u_buf + 2u + k u_partial) |dS|] |K| + u_out |dQ| + floor
    T_dK = a [T_dS + (g(b') + p' u_buf + 2u + k' u_partial + u_home) |dS|]^T |Q| + u_out |dK| + floor
    T_dV = [P * (e + u_prob + g(b') + p' u_buf + k' u_partial + u_home) + c eta]^T |dO| + u_out |dV| + floor

Where a score's error is not small, x above is replaced by e^x - 1 and rowsum(P eps) by log(1 + rowsum(P (e^eps -
1))): the exact effect of relative errors on a softmax, so scores of any size are compared rightly. Where x is beyond
all meaning, or a bound passes the largest number, the bound is infinite and promises nothing. It is never NaN.

Terms that need a word:
dlse        joins D, so two more roundings: forming D - dlse (or dP - D), hence u (|D| + |dlse|) and 3u where 2u would
            do. Without dlse both are left out.
u_partial   a fused kernel that works in 16 bits rounds its partial output before the merge: once per row, since the
            merge is convex. Its dq, dk, dv it also accumulates in 16 bits, block by block inside one call: k, k'
            blocks per call. They are summed, not averaged, so each counts; but the sizes of the summands add up to at
            most a |dS||K|.
u_home      between GPUs `direct` sends what a rank has summed for a key of another's home in 16 bits, rounded once.
c eta       underflow of P and dS, once for each branch that sees the pair: each computes its own.
floor       underflow: eta_out for every rounding to a result's type (u_out, u_partial, u_home), eta_mul for every
            product that makes it up.
fp64        the exact values come from fp64 as well: their own error obeys the same bound (with p = 1), hence `sides`
            = 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verification.case import Case

Array = NDArray[np.float64]

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

# On GPUs fused kernels take exp2 of scores times log2 e: ex2.approx is good to 2 units in the last place (CUDA C++
# Programming Guide, mathematical functions), the factor and the product are rounded: 8 u in all. They accumulate
# gradients in fp32 and round them once, those of keys that several query heads share once more: k = 1, k' = 2.
#
# Torch's fused CPU kernel (ATen/native/cpu/FlashAttentionKernel.cpp) takes exp from Vectorized::exp_u20, by its name
# within 20 units in the last place (40 u), and where it works in 16 bits from fexp_u20, a cubic whose relative error
# stays below 2^-13 (1.12e-4 over its whole range). Keys go by 512, rows by 32, 64 from 192 rows on, 256 from 768 on.
KERNELS = ("math", "flash", "half", "gpu")
_EXP_ROUNDINGS = {"math": 2, "flash": 40, "gpu": 8}
_EXP_HALF = 2.0**-13
_KEY_BLOCK = 512
_ROW_BLOCKS = ((32, 191), (64, 767), (256, None))

_SMALL = 2.0**-10  # below it, e^x - 1 is x up to one part in 2000
_LARGE = 600.0  # beyond it nothing is known any more: e^x is taken for infinite


@dataclass(frozen=True)
class Arithmetic:
    """How the implementation computes, as far as the bounds need it. Counts are upper bounds, u are unit roundoffs."""

    dim: int
    scale: float
    u: float  # of the working type: fp32, or fp64 for fp64
    u_out: float  # of the results
    u_exp: float  # relative error of exp
    u_prob: float  # of the probabilities that go into the second product; 0 where they stay in the working type
    u_partial: float  # of partial results before they are merged; 0 where they stay in the working type
    u_buf: float  # of the accumulator of gradients
    eta: float  # underflow of probabilities
    eta_out: float  # of results
    eta_mul: float  # of products in the working type
    keys: int  # b
    rows: int  # b'
    merges: int  # p
    row_merges: int  # p'
    key_blocks: int  # k
    row_blocks: int  # k'
    sides: int = 1  # 2 where the exact values are computed in the same type
    u_home: float = 0.0  # of sums of gradients on their way to the key's owner; 0 where they stay in the working type

    @classmethod
    def of(cls, case: Case) -> Arithmetic:
        """The arithmetic that a Case allows. "auto" may use either kernel, so it has the bounds of "flash"."""
        keys, rows = most_seen(case)
        pieces = most_pieces(case)
        merges = min(keys, pieces)
        row_merges = min(rows, pieces * (case.heads // case.kv_heads))
        kernel = _kernel_of(case)
        blocks = (1, 2) if kernel == "gpu" else (-(-case.tokens // _KEY_BLOCK), _row_blocks(case.tokens))
        made = cls.make(
            case.dtype, kernel, case.head_dim, case.softmax_scale, keys, rows, merges, row_merges, *blocks,
        )  # fmt: skip
        return replace(made, u_home=made.u_out) if case.narrow else made

    @classmethod
    def make(
        cls,
        dtype: str,
        kernel: str,
        dim: int,
        scale: float,
        keys: int,
        rows: int,
        merges: int = 1,
        row_merges: int = 1,
        key_blocks: int = 1,
        row_blocks: int = 1,
    ) -> Arithmetic:
        """kernel "math": everything in the working type, results rounded once; "flash": the same with the exponential
        of torch's fused CPU kernel; "half": that kernel on 16-bit operands; "gpu": fused kernels on GPUs, on 16-bit
        operands too.
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
            u_exp=_EXP_HALF if kernel == "half" else UNIT[work] * _EXP_ROUNDINGS[_exponential(kernel, dtype)],
            u_prob=half,
            u_partial=half,
            u_buf=UNIT[work],
            eta=UNDERFLOW[dtype] if half else UNDERFLOW[work],
            eta_out=UNDERFLOW[dtype],
            eta_mul=UNDERFLOW[work],
            keys=keys,
            rows=rows,
            merges=merges,
            row_merges=row_merges,
            key_blocks=key_blocks,
            row_blocks=row_blocks,
            sides=2 if dtype == "float64" else 1,
        )

    def gamma(self, k: int) -> float:
        return k * self.u / (1 - k * self.u)

    @property
    def floor_out(self) -> float:
        roundings = 2 if self.u_partial else 1  # of the partial results, whose weights add up to 1, and of the merged
        return roundings * self.eta_out + self.keys * self.eta_mul

    @property
    def floor_dq(self) -> float:
        roundings = 1 + (self.merges * self.key_blocks if self.u_partial else 0)
        return roundings * self.eta_out + self.scale * self.keys * self.eta_mul

    @property
    def floor_dk(self) -> float:
        return self._roundings_of_keys * self.eta_out + self.scale * self.rows * self.eta_mul

    @property
    def floor_dv(self) -> float:
        return self._roundings_of_keys * self.eta_out + self.rows * self.eta_mul

    @property
    def _roundings_of_keys(self) -> int:
        """To the type of a result: of partial results, of those that go home, which are no more, and of the whole."""
        return 1 + self.row_merges * ((self.row_blocks if self.u_partial else 0) + bool(self.u_home))


def _kernel_of(case: Case) -> str:
    """Whose bounds a Case has. On a GPU, fused kernels take head dims up to 128 that are multiples of 8."""
    if case.kernel == "math":
        return "math"
    if case.device == "cpu":
        return "flash"
    fused = case.dtype in ("bfloat16", "float16") and case.head_dim % 8 == 0 and case.head_dim <= 128
    return "gpu" if fused else "math"


def _exponential(kernel: str, dtype: str) -> str:
    """The entry of _EXP_ROUNDINGS. The double version of exp_u20 is exp."""
    return "math" if kernel == "flash" and dtype == "float64" else kernel


# --- counts from the Case alone ---------------------------------------------------------------------------------------


def most_seen(case: Case) -> tuple[int, int]:
    """(b, b'): pairs in the fullest row of a query head, and rows that see a key in the fullest group of query heads.

    A segment of min(w, n) positions holds len(range(offset, min(w, n), r)) selected ones. A row sees at most those,
    once through each branch that serves its head; and a key of that head is seen by at most as many rows.
    """
    seen = [0] * case.heads
    for branch in case.pattern.branches:
        length = min(branch.segment_length or case.tokens, case.tokens)
        for head, offset in enumerate(branch.offsets(case.heads)):
            if offset is not None:
                seen[head] += len(range(offset, length, branch.dilation_rate))
    group = case.heads // case.kv_heads
    return max(1, *seen), max(1, *(sum(seen[h : h + group]) for h in range(0, case.heads, group)))


def most_pieces(case: Case) -> int:
    """Into how many partial results the keys of one row, or the rows of one key, can fall.

    Per branch: the order of the tokens is a list of arithmetic runs (1 contiguous; p striped; 2 p zigzag; any other is
    kept as at most 2 p runs, or else handled by position, one piece per shard). The p - 1 cuts between shards add a
    piece each, where they do not coincide with the ends of runs. A bucket of tokens cuts shard i, of n_i tokens, at
    most ceil(n_i / bucket) times, in all n / bucket + p, and not at all if it holds all branches' tokens. The fused
    kernel takes 512 keys at a time: n / 512 more.
    """
    p, n = len(case.ranks), case.tokens
    if case.cuts is None and case.order in ("contiguous", "striped"):
        runs = p
    else:
        runs = {"contiguous": 1, "striped": p}.get(case.order, 2 * p) + (p - 1 if case.cuts is not None else 0)
    bucket = case.tokens_per_call
    branches = len(case.pattern.branches)
    chunks = 0 if branches * n <= bucket else n // bucket + p
    return branches * (runs + chunks + n // _KEY_BLOCK)


def _row_blocks(rows: int) -> int:
    """The most blocks into which the fused kernel divides any number of rows up to this one."""
    return max(-(-(rows if last is None else min(rows, last)) // size) for size, last in _ROW_BLOCKS)


# --- the formulas -----------------------------------------------------------------------------------------------------
# Shapes: R rows, N keys, D head dim; "..." are batch and key/value heads; R may hold the query heads of a group one
# after another. Rows that see nothing have P = 0, any finite top and lse, and get the bound 0 from the caller.


# Arrays may be torch tensors too, of one type on one device: for problems that are too long for a CPU.

_overflows = np.errstate(over="ignore", invalid="ignore")  # where bounds become infinite, on purpose


def _growth(x: Array) -> Array:
    """e^x - 1, or x where that is the same to first order; infinite beyond _LARGE."""
    if 0 in x.shape or not (largest := x.max()) > _SMALL:
        return x
    library = _library(x)
    grown: Array = library.expm1(library.clip(x, None, _LARGE))
    if largest > _LARGE:
        grown[x > _LARGE] = np.inf
    return grown


def _weigh(x: Array, p: Array, count: Array) -> Array:
    """x * p in x's place. Where x is infinite, so is that if the pair is seen, however small its P, and 0 if not."""
    x *= p
    unknown = _library(x).isnan(x)
    if unknown.any():
        x[unknown] = 0.0
        x[unknown & (count > 0)] = np.inf
    return x


def _library(x: Array) -> Any:
    return np if isinstance(x, np.ndarray) else torch


@_overflows
def product(weights: Array, sizes: Array) -> Array:
    """weights @ sizes. An infinite weight times 0 is infinite too: what overflows there may do so in the
    implementation, where that product is none either."""
    found: Array = weights @ sizes
    found[_library(found).isnan(found)] = np.inf
    return found


def base_error(r: Arithmetic, size: Array) -> Array:
    """Error of a score and of the exponential of it. size: a |Q||K|^T (..., R, N)."""
    base = size * r.gamma(r.dim + 2)
    base += r.u_exp
    return base


@_overflows
def forward(
    r: Arithmetic, base: Array, p: Array, s: Array, top: Array, lse: Array, count: Array, v: Array, out: Array
) -> tuple[Array, Array]:
    """T_L (..., R) and T_O (..., R, D), not yet times `sides`.

    base, p, s (..., R, N); top, lse (..., R); count (..., R, N): c; v (..., N, D), out
    (..., R, D) are absolute values.
    """
    eps = abs(s - top[..., None])
    eps *= r.u
    eps += base
    growth = _growth(eps)
    core = _library(p).einsum("...rn,...rn->...r", p, growth)
    if growth is not eps:
        if _library(core).isnan(core).any():  # something is unseen, or of P = 0, whose growth is infinite
            core = _weigh(growth, p, count).sum(-1)
        core = _library(p).log1p(core)
    mu = (abs(lse) + abs(top)) * (2 * r.merges * r.u) + 4 * r.merges * r.u
    t_lse = core + mu + abs(lse) * r.u + r.gamma(r.keys + 1)
    eps += core[..., None]
    weights = _growth(eps)
    weights += (mu + (2 * r.gamma(r.keys + 2) + 2 * r.u_prob + r.u_partial))[..., None]
    weights = _weigh(weights, p, count)
    weights += count * r.eta
    t_out = product(weights, v)
    t_out += r.u_out * out + r.floor_out
    return t_lse, t_out


@_overflows
def backward(
    r: Arithmetic, base: Array, p: Array, s: Array, lse: Array, count: Array, t_lse: Array, t_delta: Array,
    products: Array, t: Array, ds: Array, dlse: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(W_q, W_k, W_v), each (..., R, N): T_dQ = W_q |K|, T_dK = W_k^T |Q|, T_dV = W_v^T |dO|, by `product` and
    before `settle`.

    t_delta: T_D (..., R); products: |dO||V|^T; t: |dP - D + dlse|; ds: |dS|, all (..., R, N). dlse: whether it takes
    part.
    """
    e = abs(s - lse[..., None])
    e *= r.u
    e += base
    e += t_lse[..., None]
    e = _growth(e)
    other = products * r.gamma(r.dim)
    other += (t_delta + r.dim * r.eta_mul)[..., None]
    other += t * ((3 if dlse else 2) * r.u)
    t_ds = other + t
    t_ds *= e
    t_ds += other
    t_ds = _weigh(t_ds, p, count)
    if r.u_prob:
        t_ds += r.u_prob * ds
    t_ds += (t + 1) * (count * r.eta)
    w_q = ds * (r.gamma(r.keys) + r.merges * r.u_buf + 2 * r.u + r.key_blocks * r.u_partial)
    w_q += t_ds
    w_q *= r.scale
    w_k = ds * (r.gamma(r.rows) + r.row_merges * r.u_buf + 2 * r.u + r.row_blocks * r.u_partial + r.u_home)
    w_k += t_ds
    w_k *= r.scale
    e += r.u_prob + r.gamma(r.rows) + r.row_merges * r.u_buf + r.row_blocks * r.u_partial + r.u_home
    e = _weigh(e, p, count)
    e += count * r.eta
    return w_q, w_k, e


@_overflows
def delta_error(r: Arithmetic, dout: Array, out: Array, t_out: Array, delta: Array, dlse: Array | None) -> Array:
    """T_D (..., R). dout, out (..., R, D) absolute values; t_out (..., R, D); delta, dlse (..., R)."""
    t_delta: Array = _library(dout).einsum("...rd,...rd->...r", dout, r.gamma(r.dim) * out + t_out)
    t_delta[_library(t_delta).isnan(t_delta)] = np.inf
    if dlse is not None:
        t_delta += r.u * (abs(delta) + abs(dlse))
    return t_delta


def refuse_nan(found: Mapping[str, Any]) -> None:
    """Raises ValueError for a bound, by quantity, that is somewhere NaN: with that nothing compares."""
    for name, bound in found.items():
        if _library(bound).isnan(bound).any():
            raise ValueError(f"the bound of {name} is NaN; it must be a number, infinite where nothing is promised")


@_overflows
def settle(r: Arithmetic, bound: Array, exact: Array, floor: float) -> Array:
    """A gradient's bound from the part that its products gave: + u_out |exact| + floor, times `sides`."""
    settled = abs(exact) * r.u_out
    settled += bound
    settled += floor
    settled *= r.sides
    return settled
