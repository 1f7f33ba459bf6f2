"""Attention in chunks, by the contract of `ring/SAME_BITS.md` for the math kernel: a ring on CPUs has the same bits.

The formulas are those of `reference.oracle`. Bits depend on shapes and on the order of operations, too. So a part is
computed for one batch entry and one key/value head, with the P query heads that read it, in blocks of rows, from fresh
tensors: q (1, 1, 1, P, L, D), k (1, 1, 1, 1, Lk, D), v (1, 1, 1, 1, Lk, Dv), in fp32, or fp64 for fp64.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain, groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from reference.documents import begins
from reference.pattern import Branch, Pattern, check_pattern, multiplicity, selected, slices_seen
from reference.slices import EVERYTHING, Slice
from reference.validators import integer, optional, positive

T = TypeVar("T")
Tensors = Sequence[Tensor]
Join = Callable[[Tensors, Tensors], Tensors]
Scoring = tuple[float, float | None]  # scale, softcap
Readers = dict[int, list[int]]  # query heads of each key/value head
Places = tuple[slice, slice]  # of queries and of keys, each in its range


class Part(NamedTuple):
    """A range of queries with one of keys: the positions of each, the places of the part, and hidden (rows, keys)."""

    ranges: tuple[Tensor, Tensor]
    places: Places
    hidden: Tensor


@torch.no_grad()
def attention_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, chunk: int, *, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, dout: Tensor | None = None, dlse: Tensor | None = None,
) -> Tensors:  # fmt: skip
    """Return out, lse and, with dout, dq, dk, dv, shaped as by `reference.oracle`; all but lse in the dtype of q.

    Tensors are whole sequences on a CPU. chunk: in tokens, at least 1. Raises ValueError for arguments that do not fit.
    """
    check_pattern(pattern)
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[::3] == k.shape[::3] and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[2] % max(1, k.shape[2]) or not q.dtype == k.dtype == v.dtype:
        given = [(tuple(x.shape), x.dtype) for x in (q, k, v)]
        raise ValueError(f"q, k, v must be (B, Nq, Hq, D), (B, Nk, Hk, D), (B, Nk, Hk, Dv) of one dtype, got {given}")
    if dout is None and dlse is not None:
        raise ValueError("dlse must come with dout, got it alone: write zeros for dout")
    heads, tokens, dtype = (q.shape[2], k.shape[2]), (q.shape[1], k.shape[1]), q.dtype
    pattern.validate_tokens(*tokens)
    blocks = [*blocks_in_chunks(pattern, heads, tokens, integer("chunk", chunk, 1))]
    scoring = q.shape[3] ** -0.5 if scale is None else scale, optional(positive, "softcap", softcap)
    q, k, v = (x.transpose(1, 2).to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))  # (B, H, N, D)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
    if sinks is not None:
        lse.copy_(sinks[:, None])
    total = torch.zeros(*lse.shape, v.shape[3], dtype=q.dtype), lse
    _join_parts(blocks, ([q], [k, v]), [total], partial(_forward, scoring), _merge, (0.0, -torch.inf))
    out = total[0].transpose(1, 2).contiguous().to(dtype)
    if dout is None:
        return out, lse
    dout = dout.to(q.dtype).contiguous()  # the order of a sum may depend on strides
    delta = (dout * out.to(q.dtype)).sum(-1).transpose(1, 2)
    saved = dout.transpose(1, 2), lse, delta if dlse is None else delta - dlse
    sums = [torch.zeros_like(q)], [torch.zeros_like(k), torch.zeros_like(v)]
    _join_parts(blocks, ([q, *saved], [k, v]), sums, partial(_backward, scoring), _add, (0.0, 0.0))
    return out, lse, *(x.transpose(1, 2).contiguous().to(dtype) for x in (*sums[0], *sums[1]))


def blocks_in_chunks(
    pattern: Pattern, heads: Sequence[int], tokens: Sequence[int], chunk: int
) -> Iterator[tuple[Readers, list[Part]]]:
    """Yield the readers and parts of each branch and offset, ascending. heads, tokens: of queries and of keys."""
    for branch in pattern.branches:
        offsets = branch.offsets(heads[0])
        for offset in sorted({x for x in offsets if x is not None}):
            served = [head for head, x in enumerate(offsets) if x == offset]
            readers = {kv: [*own] for kv, own in groupby(served, lambda head: head // (heads[0] // heads[1]))}
            slices = slices_seen(branch, pattern.causal)
            window = next((-one.low for one in slices if _is_whole(one) and one.low is not None), None)
            grid = replace(branch, offset=offset, heads=None, window=window, slices=(EVERYTHING,))
            queries, keys = (_ranges(grid, offset, pattern, n, chunk) for n in tokens)
            yield readers, [*_parts(grid, pattern, slices, queries, keys)]


def _is_whole(one: Slice) -> bool:
    """Return True for a slice without ends that is all pairs, causality or a window. A branch has at most one."""
    bounds = one.low is None if one.high is None else one.high in (0, -(one.low or 0))
    return one[:4] == EVERYTHING[:4] and bounds


def _ranges(branch: Branch, offset: int, pattern: Pattern, tokens: int, chunk: int) -> list[Tensor]:
    """Split a grid by document, segment, chunk and, with a window, cut of the segment."""
    positions = torch.arange(tokens)
    positions = positions[selected(branch, positions, offset, pattern.documents)]
    begin = torch.zeros_like(positions) if pattern.packed is None else begins(pattern.packed, positions)
    place, length, rate = positions - begin, branch.segment_length or max(1, tokens), branch.dilation_rate
    cut = length if branch.window is None else branch.window // rate * rate + rate
    names = torch.stack([begin, place // length, place // chunk, place % length // cut])
    return [*positions.split(torch.unique_consecutive(names, dim=1, return_counts=True)[1].tolist())]


def _parts(
    grid: Branch, pattern: Pattern, slices: Sequence[Slice], queries: list[Tensor], keys: list[Tensor]
) -> Iterator[Part]:
    """Yield the parts of slices by queries, then keys; those of two ranges by kind, then slice, then stretch."""
    on_grid = Pattern((replace(grid, window=None),), documents=pattern.documents)
    for rows in queries:
        alike = multiplicity(on_grid, rows, torch.cat([rows[:0], *keys]), 1)[0] > 0
        for key, same in zip(keys, alike.split([len(x) for x in keys], 1), strict=True):
            seen_by = [(one, same & one.sees(rows[:, None], key)) for one in slices if same.any()]
            some = [_pieces(one, grid.dilation_rate, rows, key, seen) for one, seen in seen_by if seen.any()]
            for _, seen in sorted(chain.from_iterable(some), key=lambda piece: piece[0]):
                places = _places(seen)
                yield Part((rows, key), places, ~seen[places])


_WHOLE, _ALL, _UP_TO, _UP_TO_CUT, _FROM, _FROM_CUT = range(6)  # kinds of parts, by the keys that a query sees


def _pieces(one: Slice, rate: int, rows: Tensor, keys: Tensor, seen: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the kind and the pairs of each part of a slice: of one part or, where a band hides on both sides, of two a
    stretch. seen: pairs of the slice, at least one.
    """
    distance, (low, high), places = keys - rows[:, None], one.limits[4:], _places(seen)
    below, above = bool((distance[places] < low).any()), bool((distance[places] > high).any())
    if not (below and above):
        yield _WHOLE if _is_whole(one) else _FROM if below else _UP_TO if above else _ALL, seen
        return
    stretch = rows // (high // rate * rate - -(-low // rate) * rate + rate)
    for number in stretch[places[0]].unique():
        own = seen & (stretch == number)[:, None]
        middle = rows[_places(own)[0]][0] + high  # the last key of the first query
        for kind, part in (_FROM_CUT, own & (keys <= middle)), (_UP_TO_CUT, own & (keys > middle)):
            if part.any():
                yield kind, part


def _places(seen: Tensor) -> Places:
    """Return the rows and keys from the first to the last of a pair."""
    return _first_to_last(seen.any(1)), _first_to_last(seen.any(0))


def _first_to_last(flags: Tensor) -> slice:
    places = flags.nonzero()
    return slice(int(places[0]), int(places[-1]) + 1)


def tree(values: Sequence[T], join: Callable[[T, T], T]) -> T:
    """Join neighbours, then pairs of neighbours, and so on, left to right; an odd one waits."""
    while len(values) > 1:
        values = [reduce(join, values[at : at + 2]) for at in range(0, len(values), 2)]
    return values[0]


def _join_parts(
    blocks: list[tuple[Readers, list[Part]]], tensors: Sequence[Tensors], totals: Sequence[Tensors],
    compute: Callable[[Tensors, Tensors, Tensor], Sequence[Tensors]], join: Join, empty: Sequence[float],
) -> None:  # fmt: skip
    """Join the roots of all ranges, of what `compute` returns for parts, into `totals`. tensors, totals: of queries and
    of keys, (B, H, N, ...). empty: for rows of a range that a part lacks.
    """
    for readers, parts, kv, b in ((*x, kv, b) for x in blocks for kv in x[0] for b in range(len(totals[0][0]))):
        heads = torch.tensor(readers[kv])[:, None], torch.tensor([[kv]])
        found: dict[tuple[int, int], tuple[Tensor, list[Tensors]]] = {}  # by side and first position of the range
        for part in parts:
            at = [positions[places] for positions, places in zip(part.ranges, part.places, strict=True)]
            rows, keys = ([x[b, heads[side], at[side]][None, None, None] for x in tensors[side]] for side in (0, 1))
            for side, values in enumerate(compute(rows, keys, part.hidden)):
                own = found.setdefault((side, int(part.ranges[side][0])), (part.ranges[side], []))
                own[1].append([_spread(x, part, side, fill) for x, fill in zip(values, empty, strict=False)])
        for (side, _), (positions, of_range) in found.items():
            index = b, heads[side], positions
            joined = join([x[index][None, None, None] for x in totals[side]], tree(of_range, join))
            for total, x in zip(totals[side], joined, strict=True):
                total[index] = x[0, 0, 0]


def _spread(x: Tensor, part: Part, side: int, fill: float) -> Tensor:
    whole = x.new_full((*x.shape[:4], len(part.ranges[side]), *x.shape[5:]), fill)
    whole[:, :, :, :, part.places[side]] = x
    return whole


def _add(a: Tensors, b: Tensors) -> Tensors:
    return [x + y for x, y in zip(a, b, strict=True)]


def _merge(a: Tensors, b: Tensors) -> Tensors:
    """Merge (out, lse) of disjoint keys; either may have none."""
    top = torch.maximum(a[1], b[1])
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(a[1] - top), torch.exp(b[1] - top)
    total = weights[0] + weights[1]
    shares = [(x / total.masked_fill(total == 0.0, 1.0)).unsqueeze(-1) for x in weights]
    return shares[0] * a[0] + shares[1] * b[0], top + torch.log(total)


def _scores(scoring: Scoring, q: Tensor, k: Tensor, hidden: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks of rows: their places, queries, and scores (1, 1, 1, P L, Lk), no larger than q beyond 8 rows."""
    (scale, softcap), length = scoring, q.shape[4]
    step = max(8, length * q.shape[5] // k.shape[3])
    for rows in (slice(start, start + step) for start in range(0, length, step)):
        query = q[..., rows, :]
        scores = (query.flatten(3, 4) @ k.mT).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores.unflatten(3, query.shape[3:5]).masked_fill_(hidden[rows], -torch.inf)
        yield rows, query, scores


def _forward(scoring: Scoring, of_rows: Tensors, of_keys: Tensors, hidden: Tensor) -> Sequence[Tensors]:
    """Return (out, lse) of a part. of_rows: q."""
    (q,), (k, v) = of_rows, (x.squeeze(3) for x in of_keys)
    out, lse = q.new_empty(*q.shape[:5], v.shape[4]), q.new_empty(q.shape[:5])
    for rows, _, scores in _scores(scoring, q, k, hidden):
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        average = (weights @ v).div_(total.masked_fill(total == 0.0, 1.0))
        out[..., rows, :] = average.view(out[..., rows, :].shape)
        lse[..., rows] = (top + total.log()).view(lse[..., rows].shape)
    return ((out, lse),)


def _backward(scoring: Scoring, of_rows: Tensors, of_keys: Tensors, hidden: Tensor) -> Sequence[Tensors]:
    """Return summands (dq) and (dk, dv) of a part. of_rows: q, dout, lse, and delta = rowsum(dout out) - dlse."""
    (q, dout, lse, delta), (k, v), (scale, softcap) = of_rows, (x.squeeze(3) for x in of_keys), scoring
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, query, scores in _scores(scoring, q, k, hidden):
        row_dout = dout[..., rows, :].flatten(3, 4)
        row_lse, row_delta = (x[..., rows].flatten(3, 4).unsqueeze(-1) for x in (lse, delta))
        slope = 1.0 if softcap is None else (scores / softcap).clamp_(min=-1).square_().neg_().add_(1)  # 0 where hidden
        weights = scores.sub_(row_lse.masked_fill(row_lse == -torch.inf, 0.0)).exp_()
        dv += weights.mT @ row_dout
        dscores = (row_dout @ v.mT).sub_(row_delta).mul_(weights).mul_(scale).mul_(slope)
        dq[..., rows, :] = (dscores @ k).view(query.shape)
        dk += dscores.mT @ query.flatten(3, 4)
    return (dq,), (dk.unsqueeze(3), dv.unsqueeze(3))
