"""Partial attention of one tile, forward and backward, with lse. No kernel knows of ranks.

Tiles: q, out, dout (F, B, G, P, Lq, D): folds, batch, key/value heads, query heads of each, rows, head dim;
k, v (F, B, G, 1, Lk, D); lse, delta (F, B, G, P, Lq). On the CPU, and in the math kernel, everything is computed in the
accumulator's type, whatever the inputs', and partial results come back in it. Fused kernels on GPUs work on 16-bit
operands, accumulate in fp32, and round what they return to the inputs' type, lse apart.

The backward of a partial takes the *global* out and lse of its rows: dS = P (dO V^T - delta), P = exp(S - lse),
delta = rowsum(dO out) - dlse, and its dQ, dK, dV are summands of the whole (FlashAttention-2, arXiv 2307.08691,
algorithm 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Tile
from ring.precision import accumulator_dtype

KERNELS = ("auto", "math", "flash", "cudnn")
HALF = (torch.bfloat16, torch.float16)
Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Numbers in the widest vector of a CPU, 512 bits of fp32.
VECTOR = 16
# The math kernel takes at least so many query rows at a time.
_LEAST_ROWS = 8
# Bytes that a fused backward on a GPU may take beyond what it reads and returns; more only for a single group of heads.
MOST_WORKSPACE = 2**28


@dataclass(frozen=True)
class Saved:
    """What the backward of a tile takes besides q, k, v: the tile's rows of dout, out, lse and delta."""

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor | None  # which only the math kernel takes


_counters: list[Counter[str]] = []


@contextmanager
def picked() -> Iterator[Counter[str]]:
    """Count the kernel calls made inside by name: what "auto" picked."""
    found: Counter[str] = Counter()
    _counters.append(found)
    try:
        yield found
    finally:
        _counters[:] = [counter for counter in _counters if counter is not found]


def _count(name: str) -> None:
    for counter in _counters:
        counter[name] += 1


def choose(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    tile: Tile,
    scale: float,
    dlse: bool = False,
    repeatable: bool = False,
) -> str:
    """The kernel that takes a tile: "math", "flash" or "cudnn".

    A mask by position, a gradient through lse, and a scale that is not positive (fused kernels multiply masked scores,
    which are -inf, by it) are the math kernel's, whatever was asked for. repeatable: sums must come in the same order
    in every run; the backward of cuDNN has no such mode in torch (2.13), that of "flash" has.
    """
    if kernel == "math" or dlse or scale <= 0 or tile.mask is Mask.POSITION:
        return "math"
    if device.type == "cpu":  # with fewer keys than fill a vector it returns finite numbers for a row of NaN scores
        return "flash" if tile.key_rows.length >= VECTOR else "math"
    name = fused("flash" if repeatable else kernel, device, dtype, dim)
    alone = tile.query_rows.length == tile.key_rows.length == 1  # which cuDNN's backward refuses
    return "math" if name == "cudnn" and alone else name


def fused(kernel: str, device: torch.device, dtype: torch.dtype, dim: int) -> str:
    """What takes full and causal tiles: on CPUs torch's fused kernel; on GPUs, in 16 bits and for head dims up to 128
    that are multiples of 8, cuDNN's, or with "flash" FlashAttention-2, as they come with torch; else "math".
    """
    if kernel == "math" or device.type not in ("cpu", "cuda"):
        return "math"
    if device.type == "cpu":
        return "flash"
    if dtype not in HALF or dim % 8 or dim > 128:
        return "math"
    return "flash" if kernel == "flash" else "cudnn"


def forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the tile, lse in the accumulator's type. A row that sees no key of the tile: out 0, lse -inf."""
    _count(name)
    if name == "math":
        return _math_forward(q, k, v, tile, scale)
    return _flash_forward(q, k, v, tile, scale) if q.device.type == "cpu" else _gpu_forward(name, q, k, v, tile, scale)


def backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: Saved, tile: Tile, scale: float
) -> Tensors3:
    """The tile's summands of dq, dk, dv, shaped like q, k, v."""
    _count(name)
    if name == "math":
        return _math_backward(q, k, v, saved, tile, scale)
    if q.device.type == "cpu":
        return _flash_backward(q, k, v, saved, tile, scale)
    return _gpu_backward(name, q, k, v, saved, tile, scale)


def portions(name: str, tile: Tile, q: torch.Tensor) -> list[Tile]:
    """The tile in as many backward calls as keep a fused kernel's own memory within bounds, by groups of heads: it has
    dq in fp32, and dk and dv of every query head. q: the whole (B, N, H, D).
    """
    query, key = tile.query_heads, tile.key_heads
    if name == "math" or not q.is_cuda or query.ids is not None or key.ids is not None:
        return [tile]
    tokens = tile.query_rows.folds * tile.query_rows.length + tile.key_rows.folds * tile.key_rows.length
    most = max(1, MOST_WORKSPACE // (4 * tokens * q.shape[0] * query.per_group * q.shape[3]))
    if most >= query.groups:
        return [tile]
    return [_portion(tile, first, min(most, query.groups - first)) for first in range(0, query.groups, most)]


def _portion(tile: Tile, first: int, count: int) -> Tile:
    def rows(x: Rows) -> Rows:
        on = first * x.head_step
        return replace(x, start=x.start + on, index=None if x.index is None else x.index + on)

    def heads(x: Heads) -> Heads:
        return replace(x, groups=count, start=x.start + first * x.step)

    return replace(
        tile, query_rows=rows(tile.query_rows), key_rows=rows(tile.key_rows), query_heads=heads(tile.query_heads),
        key_heads=heads(tile.key_heads),
    )  # fmt: skip


def _row_blocks(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    """Query rows in blocks whose scores are no larger than q itself: the workspace is O(n / p), whatever the bucket."""
    length, keys = q.shape[-2], k.shape[-2]
    step = max(_LEAST_ROWS, length * q.shape[-1] // keys)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


@lru_cache(maxsize=4096)
def _positions(tile: Tile, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of query rows (F, L) and of keys (F, Lk), copied to a GPU once."""
    assert tile.query_positions is not None and tile.key_positions is not None
    return tile.query_positions.to(device), tile.key_positions.to(device)


def _scores(q: torch.Tensor, k: torch.Tensor, tile: Tile, scale: float, rows: slice) -> torch.Tensor:
    """scale * q k^T, -inf where hidden: (F, B, G, P * L, Lk). q (F, B, G, P, L, D), k (F, B, G, Lk, D)."""
    scores = (q.flatten(3, 4) @ k.mT).mul_(scale)
    if tile.mask is Mask.FULL:
        return scores
    if tile.mask is Mask.CAUSAL:
        keys = torch.arange(k.shape[-2], device=q.device)
        hidden = (keys > keys[rows, None]).unsqueeze(0)  # (1, L, Lk)
    else:
        query, key = _positions(tile, q.device)
        hidden = key[:, None, :] > query[:, rows, None]  # (F, L, Lk)
    scores.unflatten(3, q.shape[3:5]).masked_fill_(hidden[:, None, None, None], -torch.inf)
    return scores


def _math_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    work = accumulator_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=work, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=work, device=q.device)
    k, v = k.squeeze(3).to(work), v.squeeze(3).to(work)  # (F, B, G, Lk, D)
    for rows in _row_blocks(q, k):
        scores = _scores(q[..., rows, :].to(work), k, tile, scale, rows)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) is 0
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        found = (weights @ v).div_(total.masked_fill(total == 0.0, 1.0))
        out[..., rows, :] = found.view(out[..., rows, :].shape)
        lse[..., rows] = (top + total.log()).view(lse[..., rows].shape)
    return out, lse


def _math_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: Saved, tile: Tile, scale: float
) -> Tensors3:
    work = accumulator_dtype(q.dtype)
    k, v = k.squeeze(3).to(work), v.squeeze(3).to(work)  # (F, B, G, Lk, D)
    dq = torch.empty(q.shape, dtype=work, device=q.device)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    safe_lse = saved.lse.masked_fill(saved.lse == -torch.inf, 0.0)
    assert saved.delta is not None
    for rows in _row_blocks(q, k):
        query, dout = q[..., rows, :].to(work), saved.dout[..., rows, :].to(work).flatten(3, 4)  # (F, B, G, P * L, D)
        lse, delta = safe_lse[..., rows].flatten(3, 4), saved.delta[..., rows].flatten(3, 4)  # (F, B, G, P * L)
        weights = _scores(query, k, tile, scale, rows).sub_(lse.unsqueeze(-1)).exp_()  # (F, B, G, P * L, Lk)
        dv += weights.mT @ dout
        dscores = (dout @ v.mT).sub_(delta.unsqueeze(-1)).mul_(weights).mul_(scale)
        dq[..., rows, :] = (dscores @ k).view(query.shape)
        dk += dscores.mT @ query.flatten(3, 4)
    return dq, dk.unsqueeze(3), dv.unsqueeze(3)


def _batched(x: torch.Tensor) -> torch.Tensor:
    """(F, B, G, P, L, D) as the (batch, heads, length, head dim) of torch's kernels.

    Any strides but the head dim's: the fused CPU kernel of torch 2.11 takes it to be 1 without looking (2.13 looks).
    """
    folds, batch, groups, share, length, dim = x.shape
    x = x.reshape(folds * batch, groups * share, length, dim)
    return x if x.stride(3) == 1 or dim == 1 else x.contiguous()


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # In the accumulator's type: on 16-bit operands this kernel rounds probabilities, and sums gradients, in 16 bits.
    work = accumulator_dtype(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(_batched(x.to(work)) for x in (q, k, v)), 0.0, tile.mask is Mask.CAUSAL, scale=scale
    )
    if not lse.all():  # of a row whose scores are all -inf it says lse 0, as of one with a single score of 0
        _count("math")
        return _math_forward(q, k, v, tile, scale)
    return out.view(q.shape), lse.view(q.shape[:-1])


def _flash_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: Saved, tile: Tile, scale: float
) -> Tensors3:
    work = accumulator_dtype(q.dtype)
    lse = saved.lse.reshape(q.shape[0] * q.shape[1], q.shape[2] * q.shape[3], q.shape[4])
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # all scores of such a row are -inf: exp(-inf - 0) is 0
    dout, query, key, value, out = (_batched(x.to(work)) for x in (saved.dout, q, k, v, saved.out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, query, key, value, out, lse.contiguous(), 0.0, tile.mask is Mask.CAUSAL, scale=scale
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A tile for kernels that load 16 bytes at a time: a copy, if its rows do not begin at such addresses. Not what
    `contiguous` gives: of a contiguous tensor that begins elsewhere it makes no copy.

    Where there is only one batch, head or row, any stride is as good; but cuDNN takes that of one row, or one head, at
    its word, and was seen to leave results out. So these are what they would be in a contiguous tensor.
    """
    x = _batched(x)
    if any(step % 16 for step in (x.data_ptr(), *(x.stride(i) * x.element_size() for i in range(3) if x.size(i) > 1))):
        return x.clone(memory_format=torch.contiguous_format)
    strides, whole = list(x.stride()), 1
    for i in (3, 2, 1, 0):
        if x.size(i) == 1:
            strides[i] = whole
        whole = max(whole, strides[i] * x.size(i))
    return x.as_strided(x.shape, strides)


@lru_cache
def _no_dropout(device: torch.device) -> torch.Tensor:
    """The seed, and offset, of random numbers that are not drawn."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _gpu_forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = (_aligned(x) for x in (q, k, v))
    causal = tile.mask is Mask.CAUSAL
    if name == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
    lse = lse.reshape(query.shape[0], query.shape[1], -1)[
        ..., : query.shape[2]
    ]  # it may have a padded, or a fourth, dimension
    return out.view(q.shape), lse.view(q.shape[:-1])


def _alike(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same with one layout for all. Torch (2.11) keeps a cuDNN backward by the strides of q, k and v, and runs it
    with the strides that out and dout had when it was made: with others it reads the wrong rows.
    """
    found = [_aligned(x) for x in tensors]
    return found if len({x.stride() for x in found}) == 1 else [x.contiguous() for x in found]


def _gpu_backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: Saved, tile: Tile, scale: float
) -> Tensors3:
    query, out, dout = _alike(q, saved.out, saved.dout)
    key, value = _aligned(k), _aligned(v)
    lse = saved.lse.reshape(query.shape[:3]).contiguous()
    if lse.data_ptr() % 16:  # a stretch of a contiguous tensor may be contiguous, and begin anywhere
        lse = lse.clone()
    none, causal = _no_dropout(q.device), tile.mask is Mask.CAUSAL
    rows, keys = query.shape[2], key.shape[2]
    if name == "cudnn":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, query, key, value, out, lse.unsqueeze(-1), none, none, None, None, None, rows, keys, 0.0, causal,
            scale=scale,
        )  # fmt: skip
    else:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, query, key, value, out, lse, None, None, rows, keys, 0.0, causal, none, none, scale=scale
        )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
