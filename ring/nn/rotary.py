"""Rotary positions (arXiv 2104.09864), in the convention of Llama: dimensions i and i + D / 2 are rotated together.

    angle(p, i) = p theta^(-2 i / D)                                    0 <= i < D / 2
    x'[i]         = x[i] cos - x[i + D / 2] sin
    x'[i + D / 2] = x[i + D / 2] cos + x[i] sin

Positions are global: counted from the start of the shard, a token would be rotated as if it were elsewhere in the
sequence. Angles are computed in fp64, since in fp32 the error at position 10^6 would be up to 0.03.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from ring.nn.context import ContextParallel
from ring.nn.same_weights.pointwise import WholeVectors
from ring.precision import accumulator_dtype

THETA = 10000.0


def rotary(x: Tensor, positions: Tensor, theta: float = THETA) -> Tensor:
    """Return x, rotated by the global positions of its tokens in the convention of Llama (arXiv 2104.09864).

    Args:
        x: (B, N, H, D), D even, in fp64, fp32, bf16 or fp16; 16 bits are rotated in fp32.
        positions: (N,) or (B, N), int64 or int32, on x's device.
        theta: base of the angles.

    Raises:
        ValueError: D is odd, positions have another shape, dtype or device, or theta is not positive and finite.
    """
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x))
        raise ValueError(f"x must be a real (batch, tokens, heads, head dim) tensor, got {got}")
    check_rotation(x.shape[3], theta)
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        got = str(positions.dtype) if isinstance(positions, Tensor) else repr(type(positions))
        raise ValueError(f"positions must be an int64 or int32 tensor, got {got}")
    if not has_token_shape(positions, x):
        allowed = f"{tuple(x.shape[1:2])} or {tuple(x.shape[:2])}"
        raise ValueError(
            f"positions must have the shape {allowed}, a position for each token of x, got {tuple(positions.shape)}"
        )
    if positions.device != x.device:
        raise ValueError(f"positions must be on x's device {x.device}, got {positions.device}")
    return rotate(x, *_angles(positions, x.shape[3], theta, accumulator_dtype(x.dtype)))


def has_token_shape(positions: Tensor, x: Tensor) -> bool:
    """True if positions are (N,) or (B, N) for x (B, N, ...). Compares number by number: under torch.compile `in` does
    not find a shape with a dynamic length among equal shapes.
    """
    if positions.dim() not in (1, 2) or positions.shape[-1] != x.shape[1]:
        return False
    return positions.dim() == 1 or positions.shape[0] == x.shape[0]


def check_rotation(head_dim: int, theta: float) -> None:
    """Raise ValueError unless head_dim is even and theta a positive finite number."""
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not 0 < theta < math.inf:
        raise ValueError(f"theta must be a positive finite number, got {theta!r}")


def cached_angles(context: ContextParallel, x: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin for x (B, N, H, D) of this rank's tokens, computed once for all layers of a sequence."""
    dim, kind = x.shape[3], accumulator_dtype(x.dtype)
    return context.cached(
        ("rotary", dim, theta, kind, x.device),
        lambda: _angles(context.positions_of(x), dim, theta, kind),
    )


def _angles(positions: Tensor, head_dim: int, theta: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions (N,) or (B, N) -> cos, sin (N, 1, D / 2) or (B, N, 1, D / 2)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions[..., None, None] * float(theta) ** -exponents
    # A position has the same angle on any number of ranks, but in a graph.
    with nullcontext() if torch.compiler.is_compiling() else WholeVectors():
        return angles.cos().to(kind), angles.sin().to(kind)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, N, H, D) by angles that broadcast to (B, N, H, D / 2); the result is like x."""
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
