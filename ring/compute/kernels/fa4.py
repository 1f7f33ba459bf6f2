"""FlashAttention-4 on GPUs, forward and backward, for tiles of one length or of several sequences.

The package's own functions are called, because torch's switch does not take its version. The record, at the end, has
what it was found right for.

The first call of a kind compiles for some seconds: forward or backward, dtype, head dims, query heads per key/value
head, mask, softcap, one or several sequences. The logger "ring" says so, at level INFO. The package keeps compiled
kernels on disk if FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from ring.compute.kernels.kernel import ANY_LENGTH, HOPPER, Kernel, SavedRows, Scores, Tensors3
from ring.compute.kernels.operands import (
    by_row,
    heads_first_gradients,
    heads_first_results,
    make_edges,
    rows_first,
    window,
    workspace,
)
from ring.extras import how_to_install
from ring.plan.tile import Mask, Tile

VERSION = "4.0.0b36"
_logger = logging.getLogger("ring")
_SLOW = 0.5  # seconds on the host: a call that took so long has compiled
_called: set[Hashable] = set()


@lru_cache(maxsize=1)
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the package's forward and backward."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scoring: Scores) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a full or causal tile; lse in fp32."""
    query, key, value = rows_first(tile, q, k, v)
    attend, _ = _functions()
    out, lse, *_ = _timed(
        ("forward", *_kind(tile, q, k, v, scoring)),
        lambda: attend(
            query, key, value, softmax_scale=scoring.scale, softcap=scoring.softcap, causal=tile.mask is Mask.CAUSAL,
            return_lse=True, **window(tile), **_lengths(tile, q),
        ),
    )  # fmt: skip
    return heads_first_results(out, lse, tile, q)


def backward(q: Tensor, k: Tensor, v: Tensor, saved: SavedRows, tile: Tile, scoring: Scores) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v. In a fixed order under
    `torch.use_deterministic_algorithms`.
    """
    query, key, value, out, dout = rows_first(tile, q, k, v, saved.out, saved.dout)
    lse, dlse = (None if x is None else by_row(tile, x) for x in (saved.lse, saved.dlse))
    repeatable = torch.are_deterministic_algorithms_enabled()
    _, differentiate = _functions()
    grads = _timed(
        ("backward", repeatable, dlse is None, *_kind(tile, q, k, v, scoring)),
        lambda: differentiate(
            query, key, value, out, dout, lse, softmax_scale=scoring.scale, softcap=scoring.softcap or 0.0,
            causal=tile.mask is Mask.CAUSAL, deterministic=repeatable, dlse=dlse,
            **{x: y.transpose(1, 2) for x, y in zip(("dq", "dk", "dv"), saved.into, strict=True) if y is not None},
            **window(tile), **_lengths(tile, q),
        ),
    )[:3]  # fmt: skip
    return heads_first_gradients(grads, tile, q)


def _lengths(tile: Tile, q: Tensor) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return {} if tile.sequences is None else dict(zip(names, make_edges(tile.sequences, q), strict=True))


def _kind(tile: Tile, q: Tensor, k: Tensor, v: Tensor, scoring: Scores) -> tuple[Hashable, ...]:
    share = q.shape[1] // k.shape[1]
    sort = tile.mask is Mask.CAUSAL, tile.needs_window, tile.sequences is not None
    return str(q.dtype), q.shape[3], v.shape[3], share, scoring.softcap, *sort


def _timed(kind: tuple[Hashable, ...], call: Callable[[], Any]) -> Any:
    """Return the results of a call, and log if it has compiled."""
    if kind in _called:
        return call()
    begun = time.monotonic()
    results = call()
    _called.add(kind)
    if (seconds := time.monotonic() - begun) > _SLOW:
        _logger.info("FlashAttention-4 compiled a kernel in %.1f s: %s", seconds, kind)
    return results


@lru_cache(maxsize=1)
def installed_version() -> str | None:
    """Return the package's version; None without the package."""
    return next((package.version for package in metadata.distributions(name="flash-attn-4")), None)


def _missing() -> str | None:
    version = installed_version()
    if version is None:
        return f"flash-attn-4 {VERSION} is not installed{how_to_install('flash_attn')}"
    wrong = f"flash-attn-4 {version} is installed; the version that was verified is {VERSION}"
    return None if version == VERSION else wrong


# Head dims on Hopper, of keys and of values alike. With others its gradients were wrong, without an error: 40, 48, 72,
# 80, 104, 112.
_DIMS = (32, 64, 96, 128, 160, 192, 256)


def _takes_dims(capability: tuple[int, int], dim: int, value_dim: int, share: int) -> bool:
    equal_heads = (dim, value_dim) == (192, 128) and share == 1
    return capability == HOPPER and ((dim == value_dim and dim in _DIMS) or equal_heads)


# Windows on an H200: it took 0.35, 0.48, 0.60, 0.72 and 0.78 of cuDNN's time for parts without a window, from 255 to
# 8191.
FA4 = Kernel(
    name="fa4", device="cuda", forward=forward, backward=backward, takes_dims=_takes_dims,
    limits="dtype float16 or bfloat16 and on GPUs of compute capability 9.0 head dims "
    f"{', '.join(map(str, _DIMS))}, or 192 with values of 128 and equal heads",
    softcap=True, dlse=True, max_varlen_tokens=ANY_LENGTH, max_window=ANY_LENGTH, in_place=True, workspace=workspace,
    compiles=True, measured=True, fixed_bits=True, missing=_missing,
)  # fmt: skip
