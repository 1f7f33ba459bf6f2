"""Rotary positions (arXiv 2104.09864), in the convention of Llama: dimension i is turned together with i + D / 2.

    angle(p, i) = p theta^(-2 i / D)                                    0 <= i < D / 2
    x'[i]         = x[i] cos - x[i + D / 2] sin
    x'[i + D / 2] = x[i + D / 2] cos + x[i] sin

Positions are the global ones: counted from the start of its shard, a token would be turned as if it stood elsewhere.
Angles are computed in fp64, since in fp32 those of position 10^6 would be off by up to 0.03.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ring.nn.context import ContextParallel
from ring.precision import accumulator_dtype

THETA = 10000.0


def rotary(x: Tensor, positions: Tensor, theta: float = THETA) -> Tensor:
    """x (B, N, H, D) turned by the global positions of its tokens, (N,) or (B, N): like x.

    x: fp64, fp32, bf16 or fp16; in 16 bits it is turned in fp32. positions: int64 or int32, on x's device.

    Raises ValueError for an odd D, for positions of another number, dtype or device, and unless theta is positive and
    finite.
    """
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        given = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x))
        raise ValueError(f"x must be a real (batch, tokens, heads, head dim) tensor, got {given}")
    check_turn(x.shape[3], theta)
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        given = str(positions.dtype) if isinstance(positions, Tensor) else repr(type(positions))
        raise ValueError(f"positions must be an int64 or int32 tensor, got {given}")
    if not one_for_each(positions, x):
        allowed = f"{tuple(x.shape[1:2])} or {tuple(x.shape[:2])}"
        raise ValueError(f"positions must have the shape {allowed}, a position for each token of x, "
                         f"got {tuple(positions.shape)}")  # fmt: skip
    if positions.device != x.device:
        raise ValueError(f"positions must be on x's device {x.device}, got {positions.device}")
    return turned(x, *_angles(positions, x.shape[3], theta, accumulator_dtype(x.dtype)))


def one_for_each(positions: Tensor, x: Tensor) -> bool:
    """Whether positions are (N,) or (B, N) for x (B, N, ...). Number by number: within torch.compile a shape with a
    length that may change is not found among shapes of plain numbers, not even beside the same.
    """
    if positions.dim() not in (1, 2) or positions.shape[-1] != x.shape[1]:
        return False
    return positions.dim() == 1 or positions.shape[0] == x.shape[0]


def check_turn(head_dim: int, theta: float) -> None:
    """ValueError unless head vectors of this size can be turned with this theta."""
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not 0 < theta < math.inf:
        raise ValueError(f"theta must be a positive finite number, got {theta!r}")


def angles_of(context: ContextParallel, x: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin for x (B, N, H, D), which this rank's tokens have; computed once for all layers of a sequence."""
    dim, kind = x.shape[3], accumulator_dtype(x.dtype)
    return context.cached(
        ("rotary", dim, theta, kind, x.device),
        lambda: _angles(context.positions_on(x.device), dim, theta, kind),
    )


def _angles(positions: Tensor, head_dim: int, theta: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions (N,) or (B, N) -> cos, sin (N, 1, D / 2) or (B, N, 1, D / 2)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions[..., None, None] * float(theta) ** -exponents
    return angles.cos().to(kind), angles.sin().to(kind)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, N, H, D) by angles that broadcast to (B, N, H, D / 2): like x."""
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
