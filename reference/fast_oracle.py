"""The oracle's fast twin: exact results, and the rounding bounds for them, in one computation that shares the
probabilities.

It says a second time, independently, what `reference.oracle` says: its own mask, its own order of sums, so that either
can be checked by the other. Every example is judged by it, while the ranks are at work; `verification` compares it
with the oracle as a property of its own. It takes NumPy arrays, or torch tensors on a GPU for problems that are too
long for a CPU.

Query heads that share a key/value head lie one after another as rows of one matrix, (B, Hk, G * R, ...), so that the
sums of dk and dv over them are part of the products. Long sequences are cut into blocks of rows of one query head; keys
and rows of a block that have no partner in it are left out.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reference import bounds
from reference.bounds import Array, Softmax, library
from reference.pattern import Pattern
from reference.roundoff import Arithmetic

Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]
QUANTITIES = ("out", "lse", "dq", "dk", "dv")

# Of one (B, Hk, R, N) matrix. About twenty are alive at a time: 2**17 numbers of each stay near the caches.
WHOLE = 2**17
BLOCK = {"cpu": 2**19, "cuda": 2**24}


@dataclass(frozen=True, eq=False)
class Inputs:
    """What is computed: attention of R queries to N keys, and gradients of sum(dout * out) + sum(dlse * lse).

    q, dout  (B, R, H, D)
    k, v     (B, N, Hk, D)
    dlse     (B, H, R), or None for zeros: then the bounds know that it takes no part
    pattern  who sees whom; key j is at position j
    scale    factor on q . k
    rows     (R,) ascending positions of the queries; None: they are those of the keys, R = N
    counted  (Hk, N) bool, which keys count at all: for rows, the others are as if nothing selected them. None: all

    All fp64 and finite, NumPy arrays or torch tensors on one device.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None
    pattern: Pattern
    scale: float
    rows: Ints | None = None
    counted: Flags | None = None

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, eq=False)
class Expectation:
    """Exact results of `inputs`, and how far from them an implementation's may be.

    exact, bound: fp64 arrays by quantity: out, dq (B, R, H, D); dk, dv (B, N, Hk, D); lse (B, H, R).

    Where nothing is selected out and gradients are 0, lse is -inf and the bound is 0. An infinite one promises nothing.
    dead_rows (H, R), dead_keys (Hk, N): rows that see nothing, keys that no row sees.

    Raises ValueError, at construction, for a bound that is NaN.
    """

    inputs: Inputs
    exact: dict[str, Array]
    bound: dict[str, Array]
    dead_rows: Flags
    dead_keys: Flags

    def __post_init__(self) -> None:
        bounds.refuse_nan(self.bound)


def evaluate(inputs: Inputs, r: Arithmetic) -> Expectation:
    """Exact results, and bounds for an implementation that computes like that. Raises ValueError where the documents of
    the pattern do not add up to N.

    One core takes 0.4 ms for 24 tokens and 4 heads of 16.
    """
    q, k = inputs.q, inputs.k
    batch, count, heads, dim = q.shape
    n, kv_heads = k.shape[1], k.shape[2]
    inputs.pattern.validate_tokens(n)
    group = heads // kv_heads

    def folded(x: Array) -> Array:  # (B, R, H, D) -> (B, Hk, G * R, D), query heads of a group one after another
        return x.swapaxes(1, 2).reshape(batch, kv_heads, -1, dim)

    def unfolded(x: Array, length: int) -> Array:  # the other way round
        return x.reshape(batch, -1, length, dim).swapaxes(1, 2)

    dlse = None if inputs.dlse is None else inputs.dlse.reshape(batch, kv_heads, group * count)
    whole = _RowBlock(folded(q), folded(k), folded(inputs.v), folded(inputs.dout), dlse, inputs.scale, r)
    if batch * heads * count * n <= WHOLE:
        found = whole.solve(_multiplicity(inputs, range(heads), slice(None)).reshape(kv_heads, group * count, n))
    else:
        found = _by_blocks(whole, inputs)
    exact, bound = (
        {name: unfolded(x[name], n if name in ("dk", "dv") else count) for name in ("out", "dq", "dk", "dv")}
        | {"lse": x["lse"].reshape(batch, heads, count)}
        for x in (found.exact, found.bound)
    )
    return Expectation(inputs, exact, bound, found.dead_rows.reshape(heads, count), found.dead_keys)


# --- the mask ---------------------------------------------------------------------------------------------------------


def multiplicity(pattern: Pattern, heads: int, n: int) -> Array:
    """c (heads, n, n) as fp64: how many branches see the pair of positions (i, j) for a query head."""
    position = np.arange(n)
    return _count(pattern, position, position, range(heads), heads)


def _multiplicity(inputs: Inputs, served: range, part: slice) -> Array:
    """c (heads served, rows of that part, N)."""
    like, n = inputs.k, inputs.k.shape[1]
    position = np.arange(n) if isinstance(like, np.ndarray) else torch.arange(n, device=like.device)
    rows = position if inputs.rows is None else inputs.rows
    found = _count(inputs.pattern, rows[part], position, served, inputs.heads)
    if inputs.counted is not None:
        share = inputs.heads // inputs.kv_heads
        found *= inputs.counted[[head // share for head in served]][:, None]
    return found


def _count(pattern: Pattern, rows: Any, position: Any, served: range, heads: int) -> Array:
    here, n = len(rows), len(position)
    total = _filled(position, (len(served), here, n), 0.0)
    order = rows[:, None] >= position if pattern.causal else None  # (rows, n)
    begin = _document_begins(pattern, position)
    origins = (rows, begin[rows]), (position, begin)
    for branch in pattern.branches:
        length = n if branch.segment_length is None else branch.segment_length
        offsets = [-1 if o is None else o for o in branch.offsets(heads)]
        distinct = sorted({offsets[h] for h in served})
        pairs = _filled(position, (len(distinct), here, n), False)
        for at, offset in enumerate(distinct):
            if offset >= 0:
                # Selected and in the same segment: equal labels, -1 and -2 for what is not selected.
                mine, theirs = (
                    _label(*origin, length, branch.dilation_rate, offset, no)
                    for origin, no in zip(origins, (-1, -2), strict=True)
                )
                pairs[at] = mine[:, None] == theirs
        if branch.window is not None:
            pairs &= (rows[:, None] <= position + branch.window) & (position <= rows[:, None] + branch.window)
        if order is not None:
            pairs &= order
        if len(distinct) == 1:
            total += pairs
        else:
            total += pairs[[distinct.index(offsets[h]) for h in served]]
    return total


def _document_begins(pattern: Pattern, position: Any) -> Any:
    """Where the document of each position 0, 1, ... n - 1 begins: (n,), where `position` lives."""
    lengths = np.array((len(position),) if pattern.documents is None else pattern.documents, np.int64)
    found = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return found if isinstance(position, np.ndarray) else torch.from_numpy(found).to(position.device)


def _label(position: Any, begin: Any, length: int, rate: int, offset: int, unselected: int) -> Any:
    """Where each position's segment begins, if the grid of that offset selects the position."""
    within = (position - begin) % length
    return library(position).where(within % rate == offset, position - within, unselected)


def _filled(like: Any, shape: tuple[int, ...], value: float | bool) -> Any:
    """fp64, or bool, where `like` lives."""
    if isinstance(like, np.ndarray):
        return np.full(shape, value)
    return torch.full(shape, value, dtype=torch.bool if isinstance(value, bool) else torch.float64, device=like.device)


# --- one block --------------------------------------------------------------------------------------------------------


@dataclass
class _Solved:
    """Results of a block, rows folded. dk and dv are sums over its rows, and their `bound` is not settled yet."""

    exact: dict[str, Array]
    bound: dict[str, Array]
    dead_rows: Flags  # (Hk, R)
    dead_keys: Flags  # (Hk, N)

    def settle_keys(self, r: Arithmetic) -> None:
        live = ~self.dead_keys[..., None]
        for name, floor in (("dk", r.floor_dk), ("dv", r.floor_dv)):
            self.bound[name] = bounds.settle(r, self.bound[name], self.exact[name], floor) * live


@dataclass
class _RowBlock:
    """Some rows against some keys: q, dout (B, Hk, R, D); k, v (B, Hk, N, D); dlse (B, Hk, R) or None."""

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None
    scale: float
    r: Arithmetic

    def solve(self, count: Array) -> _Solved:
        found = self.rows(count)
        found.settle_keys(self.r)
        return found

    def softmax(self, count: Array, seen: Flags, live: Flags) -> Softmax:
        """count: c (Hk, R, N); seen: where it is not 0; live (Hk, R): rows that see something. The others get P = 0 and
        a finite lse."""
        lib = library(self.q)
        s = self.q @ self.k.swapaxes(-1, -2)
        s *= self.scale
        size = abs(self.q) @ abs(self.k.swapaxes(-1, -2))
        size *= self.r.scale
        base = bounds.base_error(self.r, size)
        # A shift within rounding of the maximum of what is seen. No -inf for what is not: `where` and exp(-inf) are
        # slow. What is seen may pass the shift by a rounding, so the limit that keeps exp of the unseen finite lies
        # above 0.
        low = s.min()
        p = s - low
        p *= seen
        top = lib.amax(p, -1) + low  # (B, Hk, R)
        lib.subtract(s, top[..., None], out=p)
        lib.minimum(p, _filled(p, (), 1.0), out=p)
        lib.exp(p, out=p)
        p *= count
        total = p.sum(-1)
        total[:, ~live] = 1.0
        p /= total[..., None]
        return Softmax(base, p, s, top, top + lib.log(total), count)

    def rows(self, count: Array) -> _Solved:
        """count: c (Hk, R, N)."""
        r, q, k, v, dout = self.r, self.q, self.k, self.v, self.dout
        q_size, k_size, v_size, dout_size = abs(q), abs(k), abs(v), abs(dout)
        seen: Any = count > 0
        live: Flags = seen.any(-1)  # (Hk, R)
        dead_keys: Flags = ~seen.any(-2)  # (Hk, N)
        x = self.softmax(count, seen, live)

        out = x.p @ v
        out_size = abs(out)
        t_lse, t_out = bounds.forward(r, x, v_size, out_size)

        delta = library(out).einsum("...rd,...rd->...r", dout, out)
        t_delta = bounds.delta_error(r, dout_size, out_size, t_out, delta, self.dlse)
        t = dout @ v.swapaxes(-1, -2)
        t -= (delta if self.dlse is None else delta - self.dlse)[..., None]
        ds = x.p * t
        products = dout_size @ abs(v.swapaxes(-1, -2))
        w_q, w_k, w_v = bounds.backward(r, x, t_lse, t_delta, products, abs(t), abs(ds), self.dlse is not None)
        dq = (ds @ k) * self.scale
        dk = (ds.swapaxes(-1, -2) @ q) * self.scale
        dv = x.p.swapaxes(-1, -2) @ dout

        alive = live[..., None]
        x.lse[:, ~live] = -np.inf
        exact = {"out": out, "lse": x.lse, "dq": dq, "dk": dk, "dv": dv}
        bound = {
            "out": t_out * (alive * r.sides),
            "lse": t_lse * (live * r.sides),
            "dq": bounds.settle(r, bounds.product(w_q, k_size), dq, r.floor_dq) * alive,
            "dk": bounds.product(w_k.swapaxes(-1, -2), q_size),
            "dv": bounds.product(w_v.swapaxes(-1, -2), dout_size),
        }
        return _Solved(exact, bound, ~live, dead_keys)


# --- long sequences ---------------------------------------------------------------------------------------------------


def _by_blocks(whole: _RowBlock, inputs: Inputs) -> _Solved:
    """The same, a few rows of one query head at a time."""
    batch, kv_heads, folded, _ = whole.q.shape
    n, group = whole.k.shape[2], inputs.heads // kv_heads
    queries = folded // group
    like = whole.q
    exact, bound = (
        {
            "out": _filled(like, whole.q.shape, 0.0),
            "lse": _filled(like, (batch, kv_heads, folded), lse),
            "dq": _filled(like, whole.q.shape, 0.0),
            "dk": _filled(like, whole.k.shape, 0.0),
            "dv": _filled(like, whole.k.shape, 0.0),
        }
        for lse in (-np.inf, 0.0)
    )
    found = _Solved(exact, bound, _filled(like, (kv_heads, folded), True), _filled(like, (kv_heads, n), True))
    device = "cpu" if isinstance(like, np.ndarray) else like.device.type
    step = max(1, BLOCK[device] // (batch * n))

    def solve(kv: int) -> None:
        for head in range(kv * group, (kv + 1) * group):
            for start in range(0, queries, step):
                count = _multiplicity(inputs, range(head, head + 1), slice(start, start + step))[0]
                row, column = _where(count.any(1)), _where(count.any(0))
                if len(row):
                    at = (head % group) * queries + start + row
                    _add(found, whole, kv, at, column, count[row[:, None], column])

    # A thread for each core of a CPU: key/value heads have nothing in common.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if device == "cpu" else 1) as threads:
        list(threads.map(solve, range(kv_heads)))
    found.settle_keys(whole.r)
    return found


def _where(flags: Any) -> Any:
    """The indices of those that are set."""
    return np.flatnonzero(flags) if isinstance(flags, np.ndarray) else torch.nonzero(flags).flatten()


def _add(found: _Solved, whole: _RowBlock, kv: int, at: Ints, column: Ints, count: Array) -> None:
    """Rows `at` of key/value head kv against the keys `column`, none of them without partner."""
    q, dout = whole.q[:, kv, at][:, None], whole.dout[:, kv, at][:, None]  # (B, 1, R, D)
    k, v = whole.k[:, kv, column][:, None], whole.v[:, kv, column][:, None]  # (B, 1, keys, D)
    dlse = None if whole.dlse is None else whole.dlse[:, kv, at][:, None]
    part = _RowBlock(q, k, v, dout, dlse, whole.scale, whole.r).rows(count[None])
    for values, more in ((found.exact, part.exact), (found.bound, part.bound)):
        for name in ("out", "lse", "dq"):
            values[name][:, kv, at] = more[name][:, 0]
        for name in ("dk", "dv"):
            values[name][:, kv, column] += more[name][:, 0]
    found.dead_rows[kv, at] = False
    found.dead_keys[kv, column] = False
