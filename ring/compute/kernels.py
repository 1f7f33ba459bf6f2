"""Choice and calls of kernels: partial attention of a tile, forward and backward, with lse. Kernels know no ranks.

`ring.compute.math_kernel` defines the shapes of tiles and the arguments of a backward.
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

VECTOR = 16  # fp32 numbers in the widest vector of a CPU, 512 bits
# Most rows and keys of documents that share a call on GPUs. Longer ones keep a GPU busy for longer than the host needs
# for their call, and cuDNN takes less time for them than the variable-length kernel.
MAX_VARLEN_TOKENS = 2048
# Bytes of a fused backward on a GPU beyond its operands and results; a single group of heads may take more.
MAX_WORKSPACE = 2**28


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
    """Return the kernel for a tile: "math", "flash" or "cudnn".

    Only the math kernel takes a mask by position, a gradient through lse, or a scale that is not positive: fused
    kernels multiply masked scores, -inf, by the scale. On GPUs FlashAttention-2 takes sequences of several lengths:
    cuDNN would prepare anew for each list of lengths. repeatable: sum in the same order in every run; in torch (2.13)
    the backward of "flash" has such a mode, that of cuDNN has none.
    """
    if kernel == "math" or dlse or scale <= 0 or tile.mask is Mask.POSITION:
        return "math"
    varlen = tile.sequences is not None
    if device.type == "cpu":  # below a vector of keys flash returns finite numbers for a row of NaN scores
        return "flash" if tile.key_rows.length >= VECTOR and not varlen else "math"
    name = fused("flash" if repeatable or varlen else kernel, device, dtype, dim)
    single = tile.query_rows.length == tile.key_rows.length == 1  # cuDNN's backward refuses it
    return "math" if name == "cudnn" and single else name


def fused(kernel: str, device: torch.device, dtype: torch.dtype, dim: int) -> str:
    """Return the kernel for full and causal tiles: on CPUs torch's fused kernel. On GPUs, in 16 bits and for head dims
    up to 128 that are multiples of 8, torch's cuDNN, or with "flash" its FlashAttention-2. Else "math".
    """
    if kernel == "math" or device.type not in ("cpu", "cuda"):
        return "math"
    if device.type == "cpu":
        return "flash"
    if dtype not in HALF or dim % 8 or dim > 128:
        return "math"
    return "flash" if kernel == "flash" else "cudnn"


def max_varlen_tokens(kernel: str, device: torch.device, dtype: torch.dtype, dim: int, scale: float) -> int:
    """Return the most rows and keys of documents of several lengths that share a call; 0: the kernel takes one each."""
    if device.type == "cpu" or kernel == "cudnn" or scale <= 0 or fused(kernel, device, dtype, dim) == "math":
        return 0
    return MAX_VARLEN_TOKENS


def forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse), lse in the accumulator's type. A row that sees no key of the tile has out 0, lse -inf."""
    kernel_counts.count(name)
    if name == "math":
        return math_kernel.forward(q, k, v, tile, scale)
    return fused_kernels.forward(name, q, k, v, tile, scale)


def backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scale: float
) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v."""
    kernel_counts.count(name)
    if name == "math":
        return math_kernel.backward(q, k, v, saved, tile, scale)
    return fused_kernels.backward(name, q, k, v, saved, tile, scale)


def portions(name: str, tile: Tile, q: torch.Tensor) -> list[Tile]:
    """Split a tile by groups of heads, to bound the memory of a fused backward: it holds dq in fp32, and dk and dv of
    every query head. q: the whole (B, N, H, D).
    """
    query, key = tile.query_heads, tile.key_heads
    if name == "math" or not q.is_cuda or query.ids is not None or key.ids is not None:
        return [tile]
    tokens = tile.query_rows.folds * tile.query_rows.length + tile.key_rows.folds * tile.key_rows.length
    most = max(1, MAX_WORKSPACE // (4 * tokens * q.shape[0] * query.per_group * q.shape[3]))
    if most >= query.groups:
        return [tile]
    return [_portion(tile, first, min(most, query.groups - first)) for first in range(0, query.groups, most)]


def _portion(tile: Tile, first: int, count: int) -> Tile:
    def rows(x: Rows) -> Rows:
        skip = first * x.head_step
        return replace(x, start=x.start + skip, index=None if x.index is None else x.index + skip)

    def heads(x: Heads) -> Heads:
        return x._replace(groups=count, start=x.start + first * x.step)

    return replace(
        tile, query_rows=rows(tile.query_rows), key_rows=rows(tile.key_rows), query_heads=heads(tile.query_heads),
        key_heads=heads(tile.key_heads),
    )  # fmt: skip
