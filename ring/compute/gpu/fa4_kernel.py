"""FlashAttention-4 on GPUs, forward and backward, for tiles of one length or of several sequences.

It takes (batch, tokens, heads, head dim), or (tokens, heads, head dim) with cumulative lengths. Operands are batched
(`ring.strided_view`), results are shaped as in `ring.compute.math_kernel`. The package's own functions are called,
because torch's switch does not take its version. `ring.compute.kernel_limits` has what it was found right for.

The first call of a kind compiles for some seconds: forward or backward, dtype, head dims, query heads per key/value
head, mask, softcap, one or several sequences. The logger "ring" says so, at level INFO. The package keeps compiled
kernels on disk if FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch

from ring.compute.gpu.varlen_kernel import by_row, edges_of, heads_first, heads_first_results, operands, window
from ring.compute.math_kernel import Into, SavedRows, Tensors3
from ring.compute.scores import Scores
from ring.plan.tile import Mask, Tile
from ring.strided_view import tile_shape

_logger = logging.getLogger("ring")
_SLOW = 0.5  # seconds on the host: a call that took so long has compiled
_called: set[Hashable] = set()


@lru_cache(maxsize=1)
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the package's forward and backward."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scoring: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a full or causal tile; lse in fp32."""
    query, key, value = operands(tile, q, k, v)
    attend, _ = _functions()
    out, lse, *_ = _timed(
        ("forward", *_kind(tile, q, k, v, scoring)),
        lambda: attend(
            query, key, value, softmax_scale=scoring.scale, softcap=scoring.softcap, causal=tile.mask is Mask.CAUSAL,
            return_lse=True, **window(tile), **_lengths(tile, q),
        ),
    )  # fmt: skip
    return heads_first_results(out, lse, tile, q)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scoring: Scores, into: Into
) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v. In a fixed order under
    `torch.use_deterministic_algorithms`. into: memory for them, (B, H, L, D), of a tile of one length; None: new."""
    query, key, value, out, dout = operands(tile, q, k, v, saved.out, saved.dout)
    lse, dlse = (None if x is None else by_row(tile, x) for x in (saved.lse, saved.dlse))
    repeatable = torch.are_deterministic_algorithms_enabled()
    _, differentiate = _functions()
    grads = _timed(
        ("backward", repeatable, dlse is None, *_kind(tile, q, k, v, scoring)),
        lambda: differentiate(
            query, key, value, out, dout, lse, softmax_scale=scoring.scale, softcap=scoring.softcap or 0.0,
            causal=tile.mask is Mask.CAUSAL, deterministic=repeatable, dlse=dlse,
            **{name: x.transpose(1, 2) for name, x in zip(("dq", "dk", "dv"), into, strict=True) if x is not None},
            **window(tile), **_lengths(tile, q),
        ),
    )[:3]  # fmt: skip
    dq, dk, dv = (heads_first(x, tile, q.shape[0]) for x in grads)
    query_shape = tile_shape(tile.query_rows, tile.query_heads, q)
    key_shape = tile_shape(tile.key_rows, tile.key_heads, k)
    return dq.view(query_shape), dk.view(key_shape), dv.view(*key_shape[:-1], v.shape[3])


def _lengths(tile: Tile, q: torch.Tensor) -> dict[str, Any]:
    if tile.sequences is None:
        return {}
    edges = edges_of(tile, q)
    longest_query, longest_key = edges.longest
    return {
        "cu_seqlens_q": edges.query, "cu_seqlens_k": edges.key,
        "max_seqlen_q": longest_query, "max_seqlen_k": longest_key,
    }  # fmt: skip


def _kind(tile: Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scores) -> tuple[Hashable, ...]:
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
