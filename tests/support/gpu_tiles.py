"""Tiles on a GPU, and fused kernels held to the math kernel in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ring.compute import kernel_calls
from ring.compute.kernels import KERNELS, MATH
from ring.compute.kernels.kernel import SavedRows, Scores
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Sequences, Tile
from ring.strided_view import batched

ON_GPUS = {kernel.name: kernel for kernel in KERNELS if kernel.device != "cpu"}
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WINDOWS = (1, 7, 63, 64, 100, 1000)
LENGTHS_OF_DOCUMENTS = (1, 5, 64, 300, 1, 130, 17)


def tile_of(
    mask: Mask, queries: int, keys: int, folds: int = 1, groups: int = 1, share: int = 1,
    sequences: Sequences | None = None, window: int | None = None,
) -> Tile:  # fmt: skip
    rows, key_rows = Rows(0, 1, queries, queries, folds), Rows(0, 1, keys, keys, folds)
    heads = Heads(groups, share, 0, share, 1), Heads(groups, 1, 0, 1, 1)
    return Tile(rows, key_rows, *heads, mask, sequences=sequences, window=window)


def tensors(
    dtype: torch.dtype, folds: int, batch: int, groups: int, share: int, queries: int, keys: int, dim: int,
    value_dim: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v, dout of a tile, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(queries * 1000 + keys)
    value_dim = value_dim or dim
    sizes = ((share, queries, dim), (1, keys, dim), (1, keys, value_dim), (share, queries, value_dim))
    return tuple(
        torch.randn(folds, batch, groups, *size, device="cuda", generator=generator).to(dtype) for size in sizes
    )


def check_kernel(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, tile: Tile, what: Any,
    softcap: float | None = None, with_dlse: bool = False,
) -> None:  # fmt: skip
    """Hold both ways of a fused kernel to the math kernel in fp64."""
    unit, scoring = UNIT[q.dtype], Scores(q.shape[-1] ** -0.5, softcap)
    doubles, fused = [x.double() for x in (q, k, v)], [batched(x) for x in (q, k, v)]
    out, lse = kernel_calls.forward(ON_GPUS[name], fused[0], fused[1], fused[2], tile, scoring)
    exact, exact_lse = kernel_calls.forward(MATH, doubles[0], doubles[1], doubles[2], tile, scoring)
    assert lse.dtype == torch.float32
    close(out, exact, 4 * unit, what)
    close(lse, exact_lse, 1e-4 if softcap is None else 2.0**-10 * softcap, "lse")  # tanh to some 11 bits
    # The global lse and out of a larger whole, half of which is elsewhere.
    whole, whole_lse = exact.to(q.dtype), exact_lse.float() + 0.7
    beside = torch.empty(whole_lse.numel() + 1, device="cuda")[1:].view(whole_lse.shape)  # begins anywhere
    rows = beside.copy_(whole_lse).flatten(2, 3).flatten(0, 1).unsqueeze(-1)
    dlse = torch.randn_like(whole_lse) if with_dlse else None
    batched_dlse = None if dlse is None else dlse.flatten(2, 3).flatten(0, 1).unsqueeze(-1)
    saved = SavedRows(batched(dout), batched(whole), rows, None, batched_dlse)
    found = kernel_calls.backward(ON_GPUS[name], fused[0], fused[1], fused[2], saved, tile, scoring)
    delta = (dout.float() * whole.float()).sum(-1) - (0 if dlse is None else dlse)
    double = SavedRows(dout.double(), whole.double(), whole_lse.double(), delta.double())
    wanted = kernel_calls.backward(MATH, doubles[0], doubles[1], doubles[2], double, tile, scoring)
    for x, y, which in zip(found, wanted, ("dq", "dk", "dv"), strict=True):
        close(x, y, 8 * unit, (which, what))


def check_windows(
    name: str, lengths: tuple[int, ...] | None, mask: Mask, window: int | None, dims: tuple[int, int], share: int
) -> None:
    """Hold a fused kernel with a window to the math kernel. lengths: of sequences; None: two folds of one. window: None
    for an anticausal mask."""
    rows, folds = (sum(lengths), 1) if lengths is not None else (700, 2)
    sequences = None if lengths is None else Sequences.of(np.array(lengths), np.array(lengths))
    tile = tile_of(mask, rows, rows, folds, 2, share, sequences, window)
    q, k, v, dout = tensors(torch.bfloat16, folds, 2, 2, share, rows, rows, *dims)
    check_kernel(name, q, k, v, dout, tile, (mask, window, dims, share))
    if ON_GPUS[name].dlse:
        check_kernel(name, q, k, v, dout, tile, (mask, window, dims, share, "dlse"), with_dlse=True)


def close(found: torch.Tensor, exact: torch.Tensor, tolerance: float, what: Any) -> None:
    assert found.shape == exact.shape, what
    error = (found.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0)
    assert error <= tolerance, (what, float(error))
