"""The fast oracle: exact results and their rounding bounds, in one computation that shares the probabilities.

It is independent of `reference.oracle`, with its own mask and order of sums, and with the sink as one more key, so that
each can check the other. Every
example is compared with it while the ranks compute; a property of `verification` compares it with the oracle. It takes
NumPy arrays, or torch tensors on a GPU for problems that are too long for a CPU.

Query heads that share a key/value head are stacked as rows of one matrix, (B, Hk, G * R, ...), so that matrix products
sum dk and dv over them. Long sequences are cut into blocks of rows of one query head; keys and rows of a block that
have no partner in it are left out.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reference import bounds, validators
from reference.bounds import Array, Softmax, array_module
from reference.pattern import Branch, Pattern
from reference.roundoff import Arithmetic

Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]
QUANTITIES = ("out", "lse", "dq", "dk", "dv")

# Elements of one (B, Hk, R, N) matrix. About twenty exist at a time: with 2**17 elements each they stay in the caches.
WHOLE = 2**17
BLOCK = {"cpu": 2**19, "cuda": 2**24}


@dataclass(frozen=True, eq=False)
class Inputs:
    """Attention of R queries to N keys, and gradients of sum(dout * out) + sum(dlse * lse).

    All tensors are fp64 and finite, NumPy arrays or torch tensors on one device.

    Args:
        q, dout: (B, R, H, D) and (B, R, H, Dv).
        k, v: (B, N, Hk, D) and (B, N, Hk, Dv); query head h reads head h // (H / Hk).
        dlse: (B, H, R), or None for zeros: the bounds then leave it out.
        pattern: the mask; key j is at position j.
        scale: factor on q . k.
        rows: (R,) ascending positions of the queries, which may lie behind the keys; None: those of the keys, R = N.
        counted: (Hk, N) bool, False for keys that are treated as if no branch selected them; None: all True.
        sinks: (H,), score of one more key, of value 0, in each row of a query head; -inf for a head without one. None:
            no head has one.
        softcap: t > 0, by which scores become t tanh(score / t); None: they are not capped.
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
    sinks: Array | None = None
    softcap: float | None = None

    @property
    def heads(self) -> int:
        """Number of query heads, H."""
        return self.q.shape[2]

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, Hk."""
        return self.k.shape[2]


@dataclass(frozen=True, eq=False)
class Expectation:
    """Exact results of some inputs, and bounds on the error of an implementation.

    Where nothing is selected, out and gradients are 0, lse is -inf and the bound is 0. With a sink such a row's lse is
    the sink's score, within a bound. An infinite bound guarantees nothing.

    Args:
        inputs: the problem.
        exact: fp64 arrays by quantity: "out", "dq", "dk", "dv", in the shapes of dout, q, k, v; "lse" (B, H, R); with
            sinks, "dsinks" (H,).
        bound: of the error of each entry, in the same form.
        dead_rows: (H, R) True for rows that see no key.
        dead_keys: (Hk, N) True for keys that no row sees.

    Raises:
        ValueError: a bound is NaN.
    """

    inputs: Inputs
    exact: dict[str, Array]
    bound: dict[str, Array]
    dead_rows: Flags
    dead_keys: Flags

    def __post_init__(self) -> None:
        bounds.refuse_nan(self.bound)


def evaluate(inputs: Inputs, r: Arithmetic) -> Expectation:
    """Return exact results and bounds; 0.4 ms for 24 tokens, 4 heads of 16. `reference.bounds` derives the bounds.

    Args:
        inputs: the problem.
        r: arithmetic of the implementation that is bounded.

    Raises:
        ValueError: the pattern does not fit N keys or the heads, or softcap is not a positive number.
    """
    q, k = inputs.q, inputs.k
    batch, queries, heads, _ = q.shape
    n, kv_heads = k.shape[1], k.shape[2]
    inputs.pattern.validate_tokens(n if inputs.rows is None else None, n)
    if inputs.softcap is not None:
        validators.positive("softcap", inputs.softcap)
    group = heads // kv_heads

    def fold(x: Array) -> Array:  # (B, R, H, D) -> (B, Hk, G * R, D), query heads of a group stacked
        return x.swapaxes(1, 2).reshape(batch, kv_heads, -1, x.shape[-1])

    def unfold(x: Array, length: int) -> Array:  # the inverse
        return x.reshape(batch, -1, length, x.shape[-1]).swapaxes(1, 2)

    dlse = None if inputs.dlse is None else inputs.dlse.reshape(batch, kv_heads, group * queries)
    sinks = None
    if inputs.sinks is not None:
        sinks = (inputs.sinks[:, None] + _filled(k, (queries,), 0.0)).reshape(kv_heads, group * queries)
        r = r.with_sink()
    whole = _RowBlock(fold(q), fold(k), fold(inputs.v), fold(inputs.dout), dlse, inputs.scale, r, sinks, inputs.softcap)
    if batch * heads * queries * n <= WHOLE:
        solved = whole.solve(_multiplicity(inputs, range(heads), slice(None)).reshape(kv_heads, group * queries, n))
    else:
        solved = _solve_by_blocks(whole, inputs)
    exact, bound = (
        {name: unfold(x[name], n if name in ("dk", "dv") else queries) for name in ("out", "dq", "dk", "dv")}
        | {"lse": x["lse"].reshape(batch, heads, queries)}
        for x in (solved.exact, solved.bound)
    )
    if inputs.sinks is not None:
        ds, t_ds = (x["sink"].reshape(batch, heads, queries) for x in (solved.exact, solved.bound))
        exact["dsinks"] = ds.sum((0, 2))
        bound["dsinks"] = bounds.sinks_error(r, abs(ds), t_ds) * (inputs.sinks > -np.inf)
    return Expectation(inputs, exact, bound, solved.dead_rows.reshape(heads, queries), solved.dead_keys)


# --- the mask ---------------------------------------------------------------------------------------------------------


def multiplicity(pattern: Pattern, heads: int, n: int, keys: int | None = None) -> Array:
    """c (heads, n, keys) as fp64: how many branches see the pair of positions (i, j) for a query head. keys: their
    number; None: n."""
    return _count(pattern, np.arange(n), np.arange(n if keys is None else keys), range(heads), heads)


def _multiplicity(inputs: Inputs, served: range, selection: slice) -> Array:
    """c (query heads served, selected rows, N)."""
    like, n = inputs.k, inputs.k.shape[1]
    position = np.arange(n) if isinstance(like, np.ndarray) else torch.arange(n, device=like.device)
    rows = position if inputs.rows is None else inputs.rows
    count = _count(inputs.pattern, rows[selection], position, served, inputs.heads)
    if inputs.counted is not None:
        share = inputs.heads // inputs.kv_heads
        count *= inputs.counted[[head // share for head in served]][:, None]
    return count


def _count(pattern: Pattern, rows: Any, position: Any, served: range, heads: int) -> Array:
    queries, n = len(rows), len(position)
    total = _filled(position, (len(served), queries, n), 0.0)
    end = max(n, int(rows[-1]) + 1 if queries else 0)
    begin = _document_begins(pattern, end, position)
    origins = (rows, begin[rows]), (position, begin[:n])
    for branch in pattern.branches:
        length = end if branch.segment_length is None else branch.segment_length
        offsets = [-1 if o is None else o for o in branch.offsets(heads)]
        distinct = sorted({offsets[h] for h in served})
        pairs = _filled(position, (len(distinct), queries, n), False)
        for at, offset in enumerate(distinct):
            if offset >= 0:
                # Equal labels: both selected and in the same segment. Unselected rows have -1, unselected keys -2.
                query_label, key_label = (
                    _label(*origin, length, branch.dilation_rate, offset, no)
                    for origin, no in zip(origins, (-1, -2), strict=True)
                )
                pairs[at] = query_label[:, None] == key_label
        if pattern.causal or branch.window is not None or branch.slices is not None:
            pairs &= _in_slices(branch, pattern.causal, rows, position)
        if len(distinct) == 1:
            total += pairs
        else:
            total += pairs[[distinct.index(offsets[h]) for h in served]]
    return total


def _in_slices(branch: Branch, causal: bool, rows: Any, position: Any) -> Flags:
    """True for the keys in a row's intervals, (rows, n): a row has one in each slice, which moves along with the row.

    `rows` ascend and key j is at position j, so that the ranges of a slice are indices.
    """
    seen: Flags = _filled(position, (len(rows), len(position)), False)
    whole = ((0, None, 0, None, None, 0 if causal else None),)
    reach = None if branch.window is None else min(branch.window, int(rows[-1]) + len(position) if len(rows) else 0)
    for q0, q1, k0, k1, low, high in whole if branch.slices is None else branch.slices:
        first, end = int((rows < q0).sum()), None if q1 is None else int((rows < q1).sum())
        row, key = rows[first:end, None], position[k0:k1]
        inside = _filled(position, (len(row), len(key)), True)
        for before, behind in ((low, high), (reach and -reach, reach)):
            if before is not None:
                inside &= row + before <= key
            if behind is not None:
                inside &= key <= row + behind
        seen[first:end, k0:k1] |= inside
    return seen


def _document_begins(pattern: Pattern, n: int, like: Any) -> Any:
    """Start of the document of each position 0, 1, ... n - 1: (n,), on the device of `like`."""
    lengths = np.array((n,) if pattern.documents is None else pattern.documents, np.int64)
    begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return begins if isinstance(like, np.ndarray) else torch.from_numpy(begins).to(like.device)


def _label(position: Any, begin: Any, length: int, rate: int, offset: int, unselected: int) -> Any:
    """Start of each position's segment if the grid of that offset selects the position, else `unselected`."""
    within = (position - begin) % length
    return array_module(position).where(within % rate == offset, position - within, unselected)


def _filled(like: Any, shape: tuple[int, ...], value: float | bool) -> Any:
    """An array filled with one value, fp64 or bool, on the device of `like`."""
    if isinstance(like, np.ndarray):
        return np.full(shape, value)
    return torch.full(shape, value, dtype=torch.bool if isinstance(value, bool) else torch.float64, device=like.device)


# --- one block --------------------------------------------------------------------------------------------------------


@dataclass
class _Solved:
    """Results of a block, rows folded. dk and dv are sums over its rows; `settle_keys` completes their bounds.

    "sink" is the gradient that each row passes to its sink, (B, Hk, R).
    """

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
    """Some rows against some keys: q, dout (B, Hk, R, D or Dv); k, v (B, Hk, N, D or Dv); dlse (B, Hk, R) or None.

    sinks (Hk, R) or None. A sink is one more column of scores, behind those of the keys, and one more row of v, 0.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None
    scale: float
    r: Arithmetic
    sinks: Array | None
    softcap: float | None

    def solve(self, count: Array) -> _Solved:
        solved = self.rows(count)
        solved.settle_keys(self.r)
        return solved

    def softmax(self, count: Array, seen: Flags, live: Flags) -> Softmax:
        """count: c (Hk, R, N), with a column for the sinks; seen: count > 0; live (Hk, R): rows that see a key or sink.
        The others get P = 0 and a finite lse."""
        lib, slope = array_module(self.q), None
        s = self.q @ self.k.swapaxes(-1, -2)
        s *= self.scale
        size = abs(self.q) @ abs(self.k.swapaxes(-1, -2))
        size *= self.r.scale
        if self.softcap is None:
            base = bounds.base_error(self.r, size)
        else:
            x, capped, f = _softcapped(s, self.softcap)
            base, t_f = bounds.softcap_error(self.r, size, self.softcap, abs(x), abs(capped), f)
            slope = f, t_f
            s = self.softcap * capped
        if self.sinks is not None:
            sinks = lib.where(self.sinks > -np.inf, self.sinks, 0.0)
            s, base = _with_column(s, sinks), _with_column(base, bounds.sink_error(self.r, abs(sinks)))
            if slope is not None:
                slope = _with_column(f, 1.0), _with_column(t_f, 0.0)
        top = lib.amax(lib.where(seen, s, -np.inf), -1)  # (B, Hk, R)
        top[:, ~live] = 0.0
        p = s - top[..., None]
        lib.minimum(p, _filled(p, (), 0.0), out=p)  # exp of unseen scores stays finite, and exp(-inf) is slow
        lib.exp(p, out=p)
        p *= count
        total = p.sum(-1)
        total[:, ~live] = 1.0
        p /= total[..., None]
        return Softmax(base, p, s, top, top + lib.log(total), count, slope)

    def rows(self, count: Array) -> _Solved:
        """Results of these rows, without the complete bounds of keys. count: c (Hk, R, N)."""
        r, q, k, v, dout, keys = self.r, self.q, self.k, self.v, self.dout, self.k.shape[-2]
        seen: Any = count > 0
        served: Flags = seen.any(-1)  # (Hk, R): rows that see a key
        dead_keys: Flags = ~seen.any(-2)  # (Hk, N)
        live = served
        if self.sinks is not None:
            count, v = _with_column(count, self.sinks > -np.inf), _with_column(v.swapaxes(-1, -2), 0.0).swapaxes(-1, -2)
            seen = count > 0
            live = seen.any(-1)
        q_size, k_size, v_size, dout_size = abs(q), abs(k), abs(v), abs(dout)
        x = self.softmax(count, seen, live)

        out = x.p @ v
        out_size = abs(out)
        t_lse, t_out = bounds.forward(r, x, v_size, out_size)

        delta = array_module(out).einsum("...rd,...rd->...r", dout, out)
        t_delta = bounds.delta_error(r, dout_size, out_size, t_out, delta, self.dlse)
        t = dout @ v.swapaxes(-1, -2)
        t -= (delta if self.dlse is None else delta - self.dlse)[..., None]
        ds = x.p * t
        w_q, w_k, w_v, t_ds = bounds.backward(
            r, x, t_lse, t_delta, dout_size, v_size, abs(t), abs(ds), self.dlse is not None
        )
        if x.slope is not None:
            ds *= x.slope[0]
        to_keys = ds[..., :keys]
        dq = (to_keys @ k) * self.scale
        dk = (to_keys.swapaxes(-1, -2) @ q) * self.scale
        dv = x.p[..., :keys].swapaxes(-1, -2) @ dout

        alive, where = served[..., None], array_module(out).where
        x.lse[:, ~live] = -np.inf
        exact = {"out": out, "lse": x.lse, "dq": dq, "dk": dk, "dv": dv}
        bound = {
            "out": where(alive, t_out * r.sides, 0.0),
            "lse": where(live, t_lse * r.sides, 0.0),
            "dq": bounds.settle(r, bounds.product(w_q[..., :keys], k_size), dq, r.floor_dq) * alive,
            "dk": bounds.product(w_k[..., :keys].swapaxes(-1, -2), q_size),
            "dv": bounds.product(w_v[..., :keys].swapaxes(-1, -2), dout_size),
        }
        if self.sinks is not None:
            exact["sink"], bound["sink"] = ds[..., -1], t_ds[..., -1]
        return _Solved(exact, bound, ~served, dead_keys)


@np.errstate(over="ignore")
def _softcapped(s: Array, softcap: float) -> tuple[Array, Array, Array]:
    """x = s / softcap, tanh x and 1 - tanh^2 x, without cancellation: 4 w / (1 + w)^2 with w = e^{-2 |x|}."""
    lib, x = array_module(s), s / softcap
    w = lib.exp(-2 * abs(x))
    return x, lib.tanh(x), 4 * w / (1 + w) ** 2


def _with_column(x: Array, column: Any) -> Array:
    """(..., R, N) -> (..., R, N + 1): x and one more column, (R,), one that broadcasts to (..., R), or a number."""
    lib = array_module(x)
    last = _filled(x, (*x.shape[:-1], 1), 0.0)
    last[..., 0] = column
    return lib.concatenate((x, last), -1)


# --- long sequences ---------------------------------------------------------------------------------------------------


def _solve_by_blocks(whole: _RowBlock, inputs: Inputs) -> _Solved:
    """Solve a few rows of one query head at a time."""
    batch, kv_heads, folded, _ = whole.q.shape
    n, group = whole.k.shape[2], inputs.heads // kv_heads
    queries = folded // group
    like = whole.q
    exact, bound = (
        {
            "out": _filled(like, whole.dout.shape, 0.0),
            "lse": _filled(like, (batch, kv_heads, folded), lse),
            "dq": _filled(like, whole.q.shape, 0.0),
            "dk": _filled(like, whole.k.shape, 0.0),
            "dv": _filled(like, whole.v.shape, 0.0),
            "sink": _filled(like, (batch, kv_heads, folded), 0.0),
        }
        for lse in (-np.inf, 0.0)
    )
    total = _Solved(exact, bound, _filled(like, (kv_heads, folded), True), _filled(like, (kv_heads, n), True))
    device = "cpu" if isinstance(like, np.ndarray) else like.device.type
    step = max(1, BLOCK[device] // (batch * n))

    def solve(kv: int) -> None:
        for head in range(kv * group, (kv + 1) * group):
            for start in range(0, queries, step):
                count = _multiplicity(inputs, range(head, head + 1), slice(start, start + step))[0]
                first = (head % group) * queries + start
                live = count.any(1)
                if whole.sinks is not None:
                    live = live | (whole.sinks[kv, first : first + len(live)] > -np.inf)
                row, column = _indices(live), _indices(count.any(0))
                if len(row):
                    place = first + row
                    _accumulate(total, whole, kv, place, column, count[row[:, None], column])

    # Key/value heads are independent: use a thread for each core of a CPU.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if device == "cpu" else 1) as threads:
        list(threads.map(solve, range(kv_heads)))
    total.settle_keys(whole.r)
    return total


def _indices(flags: Any) -> Any:
    """Indices of the flags that are set."""
    return np.flatnonzero(flags) if isinstance(flags, np.ndarray) else torch.nonzero(flags).flatten()


def _accumulate(total: _Solved, whole: _RowBlock, kv: int, place: Ints, column: Ints, count: Array) -> None:
    """Add the results of rows `place` of key/value head kv against the keys `column`: each has a partner, or a sink."""
    q, dout = whole.q[:, kv, place][:, None], whole.dout[:, kv, place][:, None]  # (B, 1, R, D)
    k, v = whole.k[:, kv, column][:, None], whole.v[:, kv, column][:, None]  # (B, 1, keys, D)
    dlse = None if whole.dlse is None else whole.dlse[:, kv, place][:, None]
    sinks = None if whole.sinks is None else whole.sinks[kv, place][None]
    block = _RowBlock(q, k, v, dout, dlse, whole.scale, whole.r, sinks, whole.softcap).rows(count[None])
    for values, addend in ((total.exact, block.exact), (total.bound, block.bound)):
        for name in addend.keys() - {"dk", "dv"}:
            values[name][:, kv, place] = addend[name][:, 0]
        for name in ("dk", "dv"):
            values[name][:, kv, column] += addend[name][:, 0]
    total.dead_rows[kv, place] = block.dead_rows[0]
    total.dead_keys[kv, column] = False
