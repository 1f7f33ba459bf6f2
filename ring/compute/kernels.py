"""Choice and calls of kernels: partial attention of a tile, forward and backward, with lse. Kernels know no ranks.

`ring.compute.math_kernel` defines the shapes of tiles and the arguments of a backward.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ring.compute import fused_kernels, kernel_counts, math_kernel
from ring.compute.math_kernel import SavedRows, Tensors3
from ring.compute.scores import Scores
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
    dims: tuple[int, int],
    tile: Tile,
    scoring: Scores,
    dlse: bool = False,
    repeatable: bool = False,
) -> str:
    """Return the kernel for a tile: "math", "flash" or "cudnn". dims: head dims of keys and of values.

    Only the math kernel takes a mask by position, a gradient through lse, or a scale that is not positive: fused
    kernels multiply masked scores, -inf, by the scale. On GPUs FlashAttention-2 takes sequences of several lengths:
    cuDNN would prepare anew for each list of lengths. repeatable: sum in the same order in every run; in torch (2.13)
    the backward of "flash" has such a mode, that of cuDNN has none.
    """
    if kernel == "math" or dlse or scoring.scale <= 0 or tile.mask is Mask.POSITION:
        return "math"
    varlen = tile.sequences is not None
    name = fused("flash" if repeatable or varlen else kernel, device, dtype, dims, scoring.softcap)
    if device.type == "cpu":  # below a vector of keys flash returns finite numbers for a row of NaN scores
        return name if tile.key_rows.length >= VECTOR and not varlen else "math"
    single = tile.query_rows.length == tile.key_rows.length == 1  # cuDNN's backward refuses it
    return "math" if name == "cudnn" and single else name


def fused(
    kernel: str, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], softcap: float | None = None
) -> str:
    """Return the kernel for full and causal tiles: on CPUs torch's fused kernel. On GPUs, in 16 bits and for head dims
    up to 128 that are multiples of 8, torch's cuDNN, or with "flash" its FlashAttention-2. Else "math". dims: of keys
    and of values. None of them takes a softcap, and only cuDNN takes values with another head dim than keys.
    """
    if kernel == "math" or softcap is not None or device.type not in ("cpu", "cuda"):
        return "math"
    name = "flash" if kernel == "flash" or device.type == "cpu" else "cudnn"
    if name == "flash" and dims[0] != dims[1]:
        return "math"
    if device.type == "cuda" and (dtype not in HALF or any(dim % 8 or dim > 128 for dim in dims)):
        return "math"
    return name


def max_varlen_tokens(
    kernel: str, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], scoring: Scores
) -> int:
    """Return the most rows and keys of documents of several lengths that share a call; 0: the kernel takes one each."""
    if device.type == "cpu" or kernel in ("math", "cudnn") or scoring.scale <= 0:
        return 0
    return 0 if fused("flash", device, dtype, dims, scoring.softcap) == "math" else MAX_VARLEN_TOKENS


def forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scoring: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse), lse in the accumulator's type. A row that sees no key of the tile has out 0, lse -inf."""
    kernel_counts.count(name)
    if name == "math":
        return math_kernel.forward(q, k, v, tile, scoring)
    return fused_kernels.forward(name, q, k, v, tile, scoring)


def backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scoring: Scores
) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v."""
    kernel_counts.count(name)
    if name == "math":
        return math_kernel.backward(q, k, v, saved, tile, scoring)
    return fused_kernels.backward(name, q, k, v, saved, tile, scoring)


def portions(name: str, tile: Tile, q: torch.Tensor, value_dim: int) -> list[Tile]:
    """Split a tile by groups of heads, to bound the memory of a fused backward: it holds dq in fp32, and dk and dv of
    every query head in 16 bits. q: the whole (B, N, H, D).
    """
    query, key = tile.query_heads, tile.key_heads
    if name == "math" or not q.is_cuda or query.ids is not None or key.ids is not None:
        return [tile]
    rows, keys = (x.folds * x.length for x in (tile.query_rows, tile.key_rows))
    head_bytes = 4 * rows * q.shape[3] + 2 * keys * (q.shape[3] + value_dim)
    most = max(1, MAX_WORKSPACE // (head_bytes * q.shape[0] * query.per_group))
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
