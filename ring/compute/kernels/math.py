"""The math kernel: partial attention of one tile by matrix products. It takes every tile, type and device, and
computes in the accumulator's type.

Tiles: q (F, B, G, P, Lq, D): folds, batch, key/value heads, query heads of each, rows, head dim; k (F, B, G, 1, Lk, D);
v (F, B, G, 1, Lk, Dv), with a head dim of its own; out, dout (F, B, G, P, Lq, Dv); lse, delta (F, B, G, P, Lq).

The backward of a partial takes the *global* out and lse of its rows: dS = P (dO V^T - delta), P = exp(S - lse),
delta = rowsum(dO out) - dlse, and its dQ, dK, dV are summands (FlashAttention-2, arXiv 2307.08691, algorithm 2).
A softcap t gives dS one more factor, 1 - (S / t)^2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ring.caching.graph_keepalive import keep_alive_in_graph
from ring.caching.weak_cache import cached_on
from ring.compute.kernels.kernel import ANY_LENGTH, Kernel, SavedRows, Scores, Tensors3
from ring.plan.tile import Mask, Tile
from ring.precision import accumulator_dtype

_MIN_ROWS = 8  # least query rows of a block


def _blocks(q: Tensor, k: Tensor, tile: Tile) -> Iterator[tuple[slice, slice]]:
    """Split query rows into blocks whose scores are no larger than q: the workspace is O(n / p) for every bucket. Yield
    the rows and the keys of each: all keys, or those that a window lets its rows see.
    """
    length, keys, window = q.shape[-2], k.shape[-2], tile.window
    step = max(_MIN_ROWS, length * q.shape[-1] // keys)
    for start in range(0, length, step):
        stop = min(start + step, length)
        seen = slice(0, keys) if window is None else slice(max(0, start - window), min(stop + window, keys))
        yield slice(start, stop), seen


@cached_on
def _positions(tile: Tile, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions of query rows (F, L) and of keys (F, Lk), copied to a GPU once."""
    assert tile.query_positions is not None and tile.key_positions is not None
    return tile.query_positions.to(device), tile.key_positions.to(device)


def _scores(q: Tensor, k: Tensor, tile: Tile, scoring: Scores, rows: slice, keys: slice) -> Tensor:
    """Return the scores of q k^T, -inf where hidden: (F, B, G, P * L, Lk). q (F, B, G, P, L, D), k (F, B, G, Lk, D) are
    those rows and keys of the tile.
    """
    scores = (q.flatten(3, 4) @ k.mT).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if tile.mask is Mask.FULL and tile.window is None:
        return scores
    if tile.mask is not Mask.POSITION:
        row, key = (torch.arange(x.start, x.stop, device=q.device) for x in (rows, keys))
        after = (key - row[:, None]).unsqueeze(0)  # (1, L, Lk)
        reach = after.shape[-1] if tile.window is None else tile.window
        hidden = after > (0 if tile.mask is Mask.CAUSAL else reach)
        if tile.needs_window:
            hidden |= after < (0 if tile.mask is Mask.ANTICAUSAL else -reach)
    else:
        query, key = _positions(tile, q.device)
        keep_alive_in_graph(query, key)
        hidden = key[:, None, :] > query[:, rows, None]  # (F, L, Lk)
    scores.unflatten(3, q.shape[3:5]).masked_fill_(hidden[:, None, None, None], -torch.inf)
    return scores


def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scoring: Scores) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the tile. A row that sees no key of the tile has out 0, lse -inf."""
    work = accumulator_dtype(q.dtype)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=work, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=work, device=q.device)
    if tile.sequences is not None:
        sequence = replace(tile, sequences=None)
        for rows, keys in tile.sequences.slices():
            part = q[..., rows, :], k[..., keys, :], v[..., keys, :]
            out[..., rows, :], lse[..., rows] = forward(*part, sequence, scoring)
        return out, lse
    k, v = k.squeeze(3).to(work), v.squeeze(3).to(work)  # (F, B, G, Lk, D)
    for rows, keys in _blocks(q, k, tile):
        scores = _scores(q[..., rows, :].to(work), k[..., keys, :], tile, scoring, rows, keys)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) is 0
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        average = (weights @ v[..., keys, :]).div_(total.masked_fill(total == 0.0, 1.0))
        out[..., rows, :] = average.view(out[..., rows, :].shape)
        lse[..., rows] = (top + total.log()).view(lse[..., rows].shape)
    return out, lse


def backward(q: Tensor, k: Tensor, v: Tensor, saved: SavedRows, tile: Tile, scoring: Scores) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v."""
    if tile.sequences is not None:
        return _varlen_backward(q, k, v, saved, tile, scoring)
    work, (scale, softcap) = accumulator_dtype(q.dtype), scoring
    k, v = k.squeeze(3).to(work), v.squeeze(3).to(work)  # (F, B, G, Lk, D)
    dq = torch.empty(q.shape, dtype=work, device=q.device)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    safe_lse = saved.lse.masked_fill(saved.lse == -torch.inf, 0.0)
    assert saved.delta is not None
    for rows, keys in _blocks(q, k, tile):
        key, value = k[..., keys, :], v[..., keys, :]
        query, dout = q[..., rows, :].to(work), saved.dout[..., rows, :].to(work).flatten(3, 4)  # (F, B, G, P * L, D)
        lse, delta = safe_lse[..., rows].flatten(3, 4), saved.delta[..., rows].flatten(3, 4)  # (F, B, G, P * L)
        scores = _scores(query, key, tile, scoring, rows, keys)  # (F, B, G, P * L, Lk)
        slope = (
            None if softcap is None else (scores / softcap).clamp_(min=-1).square_().neg_().add_(1)
        )  # 0 where hidden
        weights = scores.sub_(lse.unsqueeze(-1)).exp_()
        dv[..., keys, :] += weights.mT @ dout
        dscores = (dout @ value.mT).sub_(delta.unsqueeze(-1)).mul_(weights).mul_(scale)
        if slope is not None:
            dscores.mul_(slope)
        dq[..., rows, :] = (dscores @ key).view(query.shape)
        dk[..., keys, :] += dscores.mT @ query.flatten(3, 4)
    return dq, dk.unsqueeze(3), dv.unsqueeze(3)


def _varlen_backward(q: Tensor, k: Tensor, v: Tensor, saved: SavedRows, tile: Tile, scoring: Scores) -> Tensors3:
    """Compute the backward of a tile with sequences, one by one."""
    assert tile.sequences is not None and saved.delta is not None
    work, sequence = accumulator_dtype(q.dtype), replace(tile, sequences=None)
    dq, dk, dv = (torch.empty(x.shape, dtype=work, device=x.device) for x in (q, k, v))
    for rows, keys in tile.sequences.slices():
        part = SavedRows(
            saved.dout[..., rows, :], saved.out[..., rows, :], saved.lse[..., rows], saved.delta[..., rows]
        )
        grads = backward(q[..., rows, :], k[..., keys, :], v[..., keys, :], part, sequence, scoring)
        dq[..., rows, :], dk[..., keys, :], dv[..., keys, :] = grads
    return dq, dk, dv


MATH = Kernel(
    name="math", device=None, forward=forward, backward=backward, takes_dims=lambda *_: True,
    limits="any dtype and head dims", dtypes=None, softcap=True, any_scale=True, positions=True, dlse=True,
    max_varlen_tokens=ANY_LENGTH, max_window=ANY_LENGTH, batched=False, reads_delta=True, fixed_bits=True, alone=True,
)  # fmt: skip
