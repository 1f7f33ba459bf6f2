"""A-priori rounding bounds for out, lse, dq, dk, dv, dsinks of an implementation, against exact values on the inputs as
rounded.

A first-order model, derived for this project: no published theorem states it as a whole. Its parts are standard:
Higham, "Accuracy and Stability of Numerical Algorithms", section 2.8 (underflow) and chapter 3 (gamma_k);
Blanchard, Higham, Higham, "Accurately computing the log-sum-exp and softmax functions", IMA J. Numer. Anal. 41(4),
2021. Nothing in it is tuned: every term is a count of roundings. It assumes no TF32, and exp and log with a relative
error of at most `u_exp`, and tanh with one of at most `u_tanh`.

Notation: P exact probabilities (with the count c of branches in them), s scores, m their row maximum, L the lse,
t = dP - D + dlse, dP = dO V^T, D = rowsum(dO * O), |X| entrywise, a = |scale|, d = head dim of q and k, d_v of v;
g(k) = k u / (1 - k u); b keys per row, b' rows per key, p and p' partial results merged, k and k' blocks in a call:
`roundoff.Counts`; the rest as in `roundoff.Arithmetic`.

    base = g(d+2) a |Q||K|^T + u_exp
    eps  = base + u |s - m|                                  relative error of exp(s - m)
    mu   = p u (2|L| + 2|m| + 4)                             p merges by lse
    T_L  = rowsum(P eps) + g(b+1) + mu + u |L|
    T_O  = [P * (eps + rowsum(P eps) + 2 g(b+2) + mu + 2 u_prob + u_partial) + c eta] |V| + u_out |O| + floor

    e    = base + u |s - L| + T_L                            relative error of exp(s - L), lse global
    T_D  = g(d_v) (|dO| . |O|) + |dO| . T_O + u (|D| + |dlse|)
    T_dS = P * (e |t| + g(d_v) |dO||V|^T + T_D + 3u |t|) + u_prob |dS| + c eta (1 + |t|)
    T_dQ = a [T_dS + (g(b) + p u_buf + 2u + k u_partial) |dS|] |K| + u_out |dQ| + floor
    T_dK = a [T_dS + (g(b') + p' u_buf + 2u + k' u_partial + u_returned) |dS|]^T |Q| + u_out |dK| + floor
    T_dV = [P * (e + u_prob + g(b') + p' u_buf + k' u_partial + u_returned) + c eta]^T |dO| + u_out |dV| + floor

Where a score's error is not small, x above is replaced by e^x - 1 and rowsum(P eps) by log(1 + rowsum(P (e^eps -
1))): the exact effect of relative errors on a softmax, so the bounds hold for scores of any size. Where x is too large
to be meaningful, or a bound overflows, the bound is infinite and guarantees nothing. It is never NaN.

With a softcap C, x the score before it, y = tanh(x / C) = s / C and f = 1 - y^2:

    z    = g(d+2) a |Q||K|^T / C + 3u |x| / C                error of x / C
    T_x  = min(f (e^{2 z} - 1) / 2, 1 + |y|)                 its effect on tanh: at x / C + z, f is at most f e^{2 z}
    base = C T_x + (u_tanh + 2u) |s| + u_exp
    T_y  = T_x + (u_tanh + 4u) |y|                           of y in the derivative, where it may be s / C
    T_f  = T_y (2 |y| + T_y) + u (y^2 + f)                   absolute: where |s| is near C, f is a difference near 0
    T_dX = (f + T_f) T_dS + (T_f + u) |dS|                   for T_dS, and f |dS| for |dS|, in T_dQ and T_dK

With sinks b_h, a row has one more key, of value 0, in b, and one more partial result in p. For this key f = 1, T_f = 0:

    base = 2u |b_h| + u_exp
    T_db = sum over batch and rows of [T_dS + (g(their number) + u_sinks) |dS|] + floor

Notes on single terms:
dlse        joins D and so adds two roundings: forming D - dlse (or dP - D), hence u (|D| + |dlse|), and 3u instead of
            2u. Without dlse both are omitted.
u_partial   a fused kernel that works in 16 bits rounds its partial output before the merge: once per row, since the
            merge is convex. It also accumulates dq, dk, dv in 16 bits, block by block inside one call: k, k' blocks
            per call. Blocks are summed, not averaged, so each one counts; but the sizes of the summands add up to at
            most a |dS||K|.
u_returned  between GPUs `direct` sends the gradients that a rank has summed for another rank's keys in 16 bits, rounded
            once.
u_sinks     rounds the gradient of sinks to their type, once on every rank for its own rows.
c eta       underflow of P and dS, once for each branch that sees the pair: each computes its own.
floor       underflow: eta_out for every rounding to a result's type (u_out, u_partial, u_returned), eta_mul for every
            product that is summed.
fp64        the exact values are computed in fp64 as well: their error obeys the same bound (with p = 1), hence
            `sides` = 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reference.roundoff import Arithmetic

Array = NDArray[np.float64]  # or torch tensors of fp64 on one device, for problems too long for a CPU

_SMALL = 2.0**-10  # below it, e^x - 1 is x up to one part in 2000
_LARGE = 600.0  # beyond it e^x is treated as infinite

# Shapes: R rows, N keys, D head dim; "..." are batch and key/value heads; R may stack the query heads of a group. Rows
# that see no key have P = 0 and any finite top and lse; the caller sets their bound to 0.

_overflows = np.errstate(over="ignore", invalid="ignore")  # bounds become infinite on purpose


@dataclass(frozen=True, eq=False)
class Softmax:
    """Exact softmax of some rows.

    base, p, s  (..., R, N): error of a score and of its exponential (`base_error`), probabilities P, scores s
    top, lse    (..., R): m and L
    count       (..., R, N): c
    slope       twice (..., R, N): f, the derivative of the softcap, and T_f; None without softcap
    """

    base: Array
    p: Array
    s: Array
    top: Array
    lse: Array
    count: Array
    slope: tuple[Array, Array] | None = None


def array_module(x: Array) -> Any:
    """Return numpy or torch, whichever x belongs to."""
    return np if isinstance(x, np.ndarray) else torch


def base_error(r: Arithmetic, size: Array) -> Array:
    """Error of a score and of its exponential. size: a |Q||K|^T (..., R, N)."""
    base = size * r.gamma(r.dim + 2)
    base += r.u_exp
    return base


def sink_error(r: Arithmetic, size: Array) -> Array:
    """Error of a sink, whose base of the exponential may be changed, and of its exponential. size: |sink|."""
    return 2 * r.u * size + r.u_exp


@_overflows
def softcap_error(
    r: Arithmetic, size: Array, softcap: float, x: Array, capped: Array, slope: Array
) -> tuple[Array, Array]:
    """Error of a capped score and of its exponential, and T_f, both (..., R, N). size: a |Q||K|^T; x, capped: |x| / t
    and |s| / t; slope: f."""
    delta = size * (r.gamma(r.dim + 2) / softcap)
    delta += x * (3 * r.u)
    moved = slope * _growth(2 * delta) / 2
    moved = array_module(moved).fmin(moved, 1 + capped)  # 1 + |y| where it is NaN: 0 * inf
    base = softcap * (moved + (r.u_tanh + 2 * r.u) * capped)
    base += r.u_exp
    moved += (r.u_tanh + 4 * r.u) * capped
    return base, moved * (2 * capped + moved) + r.u * (capped * capped + slope)


@_overflows
def forward(r: Arithmetic, x: Softmax, v: Array, out: Array) -> tuple[Array, Array]:
    """T_L (..., R) and T_O (..., R, D), not yet times `sides`. v (..., N, D), out (..., R, D): absolute values."""
    counts = r.counts
    eps = abs(x.s - x.top[..., None])
    eps *= r.u
    eps += x.base
    growth = _growth(eps)
    core = array_module(eps).einsum("...rn,...rn->...r", x.p, growth)
    if growth is not eps:
        if array_module(eps).isnan(core).any():  # 0 * inf: an infinite growth at P = 0 or at an unseen pair
            core = _weigh(growth, x.p, x.count).sum(-1)
        core = array_module(eps).log1p(core)
    mu = (abs(x.lse) + abs(x.top)) * (2 * counts.merges * r.u) + 4 * counts.merges * r.u
    t_lse = core + mu + abs(x.lse) * r.u + r.gamma(counts.keys + 1)
    eps += core[..., None]
    weights = _growth(eps)
    weights += (mu + (2 * r.gamma(counts.keys + 2) + 2 * r.u_prob + r.u_partial))[..., None]
    weights = _weigh(weights, x.p, x.count)
    weights += x.count * r.eta
    t_out = product(weights, v)
    t_out += r.u_out * out + r.floor_out
    return t_lse, t_out


@_overflows
def delta_error(r: Arithmetic, dout: Array, out: Array, t_out: Array, delta: Array, dlse: Array | None) -> Array:
    """T_D (..., R). dout, out (..., R, D) absolute values; t_out (..., R, D); delta, dlse (..., R)."""
    t_delta: Array = array_module(dout).einsum("...rd,...rd->...r", dout, r.gamma(out.shape[-1]) * out + t_out)
    t_delta[array_module(t_delta).isnan(t_delta)] = np.inf
    if dlse is not None:
        t_delta += r.u * (abs(delta) + abs(dlse))
    return t_delta


@_overflows
def backward(
    r: Arithmetic, x: Softmax, t_lse: Array, t_delta: Array, dout: Array, v: Array, t: Array, ds: Array, dlse: bool
) -> tuple[Array, Array, Array, Array]:
    """(W_q, W_k, W_v, T_dS), each (..., R, N): T_dQ = W_q |K|, T_dK = W_k^T |Q|, T_dV = W_v^T |dO|, by `product` and
    before `settle`.

    t_lse, t_delta: T_L, T_D (..., R); dout (..., R, Dv) and v (..., N, Dv): absolute values; t: |dP - D + dlse|; ds:
    |P * t|, both (..., R, N). dlse: True if the gradient of lse is included.
    """
    counts = r.counts
    e = abs(x.s - x.lse[..., None])
    e *= r.u
    e += x.base
    e += t_lse[..., None]
    e = _growth(e)
    dim = v.shape[-1]
    other = dout @ v.swapaxes(-1, -2)
    other *= r.gamma(dim)
    other += (t_delta + dim * r.eta_mul)[..., None]
    other += t * ((3 if dlse else 2) * r.u)
    t_ds = other + t
    t_ds *= e
    t_ds += other
    t_ds = _weigh(t_ds, x.p, x.count)
    if r.u_prob:
        t_ds += r.u_prob * ds
    if x.slope is not None:
        slope, slope_error = x.slope
        t_ds *= slope + slope_error
        t_ds += (slope_error + r.u) * ds
        ds = ds * slope
    t_ds += (t + 1) * (x.count * r.eta)
    w_q = ds * (r.gamma(counts.keys) + counts.merges * r.u_buf + 2 * r.u + counts.key_blocks * r.u_partial)
    w_q += t_ds
    w_q *= r.scale
    sums = r.gamma(counts.rows) + counts.row_merges * r.u_buf
    w_k = ds * (sums + 2 * r.u + counts.row_blocks * r.u_partial + r.u_returned)
    w_k += t_ds
    w_k *= r.scale
    e += r.u_prob + r.gamma(counts.rows) + counts.row_merges * r.u_buf + counts.row_blocks * r.u_partial + r.u_returned
    e = _weigh(e, x.p, x.count)
    e += x.count * r.eta
    return w_q, w_k, e, t_ds


@_overflows
def sinks_error(r: Arithmetic, ds: Array, t_ds: Array) -> Array:
    """T_db (H,), complete. ds, t_ds: |dS| and T_dS of the sinks, (B, H, R)."""
    rows = ds.shape[0] * ds.shape[2]
    bound: Array = (t_ds + (r.gamma(rows) + r.u_sinks) * ds).sum((0, 2))
    bound += rows * (r.eta_sinks + r.eta_mul)
    bound *= r.sides
    return bound


@_overflows
def settle(r: Arithmetic, bound: Array, exact: Array, floor: float) -> Array:
    """Complete the bound of a gradient from that of its products: + u_out |exact| + floor, times `sides`."""
    settled = abs(exact) * r.u_out
    settled += bound
    settled += floor
    settled *= r.sides
    return settled


@_overflows
def product(weights: Array, sizes: Array) -> Array:
    """weights @ sizes, where an infinite weight times 0 is infinite too: the implementation may overflow there as
    well."""
    total: Array = weights @ sizes
    total[array_module(total).isnan(total)] = np.inf
    return total


def refuse_nan(bounds: Mapping[str, Any]) -> None:
    """Raise ValueError if the bound of a quantity contains NaN, with which no comparison is possible."""
    for name, bound in bounds.items():
        if array_module(bound).isnan(bound).any():
            raise ValueError(f"the bound of {name} is NaN; it must be a number, infinite where nothing is guaranteed")


def _growth(x: Array) -> Array:
    """e^x - 1, or x where all of x is small; infinite beyond _LARGE."""
    if 0 in x.shape or not (largest := x.max()) > _SMALL:
        return x
    grown: Array = array_module(x).expm1(array_module(x).clip(x, None, _LARGE))
    if largest > _LARGE:
        grown[x > _LARGE] = np.inf
    return grown


def _weigh(x: Array, p: Array, count: Array) -> Array:
    """x * p, in place. An infinite x gives infinity if the pair is seen, even if its P is 0, and else 0."""
    x *= p
    unknown = array_module(x).isnan(x)
    if unknown.any():
        x[unknown] = 0.0
        x[unknown & (count > 0)] = np.inf
    return x
