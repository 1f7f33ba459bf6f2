"""Choice of the kernel of a tile: the fastest of those that take it."""

from __future__ import annotations

from functools import lru_cache

import torch

from ring.compute.gpu.kernel_times import Work, fastest
from ring.compute.kernels import MATH, candidates
from ring.compute.kernels.kernel import Kernel, KernelSetting, Scores
from ring.plan.tile import Tile


def make_kernel_setting(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scores
) -> KernelSetting:
    """Return the setting of a call. q (B, N, H, D), k (B, N, Hk, D), v (B, N, Hk, Dv)."""
    batch, _, heads, dim = q.shape
    capability = _capability(q.device) if q.is_cuda else (0, 0)
    share = heads // max(1, k.shape[2])
    dims = (dim, v.shape[3])
    return KernelSetting(candidates(kernel), q.device.type, capability, q.dtype, dims, share, batch, scoring)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def choose(
    setting: KernelSetting, tile: Tile, backward: bool = False, dlse: bool = False, repeatable: bool = False
) -> Kernel:
    """Return the kernel of a tile: the fastest of those that take it, or the math kernel, which takes every tile.

    Args:
        setting: of the call.
        tile: rows, keys and mask.
        backward: True for the backward.
        dlse: True if lse has a gradient.
        repeatable: sum in the same order in every run.
    """
    kernels = tuple(x for x in usable(setting, repeatable) if x.takes_tile(tile, dlse, repeatable))
    passed = "forward" if not backward else "repeatable backward" if repeatable else "backward"
    work = _tile_work(tile, passed, setting.dims, setting.batch)
    return fastest(kernels, setting.capability, work) if kernels else MATH


def choose_fixed(
    setting: KernelSetting, tile: Tile, backward: bool = False, dlse: bool = False, repeatable: bool = False
) -> Kernel:
    """Return the kernel of a part (`ring.plan.parts`), which depends on neither ranks nor batch: the last in the list
    of those with fixed bits that take it. Arguments as of `choose`; the backward is repeatable in any case.
    """
    kernels = [x for x in usable(setting) if x.fixed_bits and x.takes_tile(tile, dlse, backward)]
    return kernels[-1] if kernels else MATH


def usable(setting: KernelSetting, repeatable: bool = False) -> tuple[Kernel, ...]:
    """Return the fused kernels that a call may use. repeatable: those in their places that repeat their bits."""
    kernels = [kernel for kernel in setting.candidates if kernel.takes(setting)]
    if repeatable:
        others = [kernel if kernel.repeatable else kernel.repeated_by for kernel in kernels]
        kernels = [kernel for kernel in dict.fromkeys(others) if kernel is not None and kernel.takes(setting)]
    return tuple(kernels)


def max_varlen_tokens(setting: KernelSetting) -> int:
    """Return the most rows and keys of documents of several lengths that share a call; 0: the kernel takes one each."""
    return max((kernel.max_varlen_tokens for kernel in usable(setting)), default=0)


def max_window(setting: KernelSetting) -> int:
    """Return the longest window, in rows, that a kernel computes as such; 0: none does."""
    return max((kernel.max_window for kernel in usable(setting)), default=0)


def _tile_work(tile: Tile, passed: str, dims: tuple[int, int], batch: int) -> Work:
    """Return the sizes of a tile's call. passed, dims: as in `Work`, of keys and of values."""
    count = 1 if tile.sequences is None else len(tile.sequences.query) - 1
    heads = tile.query_rows.folds * batch * tile.query_heads.groups * tile.query_heads.per_group * count
    length = (tile.query_rows.length * tile.key_rows.length) ** 0.5 / count
    window = 0 if tile.window is None else max(1, tile.window)
    return Work(passed, *dims, tile.is_triangle, tile.sequences is not None, length, heads, window)
