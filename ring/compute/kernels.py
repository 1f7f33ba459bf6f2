"""Chooses the kernel for each tile and calls it: partial attention, forward and backward, with lse. No kernel knows of
ranks.

`ring.compute.math_kernel` says how tiles are shaped, and what a backward takes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ring.compute import fused_kernels, kernel_counts, math_kernel
from ring.compute.math_kernel import SavedRows, Tensors3
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Tile

KERNELS = ("auto", "math", "flash", "cudnn")
HALF = (torch.bfloat16, torch.float16)

# Numbers in the widest vector of a CPU, 512 bits of fp32.
VECTOR = 16
# Rows and keys of documents that share a call on GPUs, at most. Longer ones keep a GPU busy for longer than their call
# takes the host, in cuDNN's kernel, which takes less time than the one with variable lengths.
MOST_TOGETHER = 2048
# Bytes that a fused backward on a GPU may take beyond what it reads and returns; more only for a single group of heads.
MOST_WORKSPACE = 2**28


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
    which are -inf, by it) are the math kernel's, whatever was asked for. Sequences of several lengths are, on GPUs,
    FlashAttention-2's: cuDNN would prepare anew for each list of lengths. repeatable: sums must come in the same order
    in every run; the backward of cuDNN has no such mode in torch (2.13), that of "flash" has.
    """
    if kernel == "math" or dlse or scale <= 0 or tile.mask is Mask.POSITION:
        return "math"
    several = tile.sequences is not None
    if device.type == "cpu":  # with fewer keys than fill a vector it returns finite numbers for a row of NaN scores
        return "flash" if tile.key_rows.length >= VECTOR and not several else "math"
    name = fused("flash" if repeatable or several else kernel, device, dtype, dim)
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


def max_varlen_tokens(kernel: str, device: torch.device, dtype: torch.dtype, dim: int, scale: float) -> int:
    """Rows and keys of documents of several lengths that share a call, at most; 0: none do, since what takes them one
    after the other gains nothing.
    """
    if device.type == "cpu" or kernel == "cudnn" or scale <= 0 or fused(kernel, device, dtype, dim) == "math":
        return 0
    return MOST_TOGETHER


def forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the tile, lse in the accumulator's type. A row that sees no key of the tile: out 0, lse -inf."""
    kernel_counts.count(name)
    if name == "math":
        return math_kernel.forward(q, k, v, tile, scale)
    return fused_kernels.forward(name, q, k, v, tile, scale)


def backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scale: float
) -> Tensors3:
    """The tile's summands of dq, dk, dv, shaped like q, k, v."""
    kernel_counts.count(name)
    if name == "math":
        return math_kernel.backward(q, k, v, saved, tile, scale)
    return fused_kernels.backward(name, q, k, v, saved, tile, scale)


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
        return x._replace(groups=count, start=x.start + first * x.step)

    return replace(
        tile, query_rows=rows(tile.query_rows), key_rows=rows(tile.key_rows), query_heads=heads(tile.query_heads),
        key_heads=heads(tile.key_heads),
    )  # fmt: skip
