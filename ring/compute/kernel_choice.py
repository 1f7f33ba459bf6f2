"""Choice of the kernel of a tile: the fastest of those that take it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ring.compute.gpu.kernel_times import Work, fastest
from ring.compute.kernel_limits import GPU_LIMITS, HALF, fa4_missing, takes_dims
from ring.compute.scores import Scores
from ring.plan.tile import Mask, Tile

KERNELS = ("auto", "math", "flash", "cudnn", "fa4")

VECTOR = 16  # fp32 numbers in the widest vector of a CPU, 512 bits
# Most rows and keys of documents that share a call on GPUs, by its kernel. Longer ones keep a GPU busy for longer than
# the host needs for their call, and cuDNN takes less time for them than FlashAttention-2 for several lengths.
MAX_VARLEN_TOKENS = {"flash": 2048, "fa4": 2**40}
# Longest windows, in rows, that are computed as such, by kernel. On an H200 FlashAttention-2 took 0.79 of cuDNN's time
# for parts without a window at 1023 and 1.07 of it at 2047; FlashAttention-4 0.35, 0.48, 0.60, 0.72 and 0.78 of it from
# 255 to 8191.
MAX_WINDOW = {"flash": 1536, "fa4": 2**40}


class KernelSetting(NamedTuple):
    """Properties of a call that its kernels depend on, besides tiles.

    kernel      argument of `ring_attention`
    device      type of the device
    capability  compute capability of the GPU, (0, 0) without one
    dtype       of q, k and v
    dims        head dims of keys and of values
    share       query heads of a key/value head
    batch       batch size
    scoring     scale and softcap
    """

    kernel: str
    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    dims: tuple[int, int]
    share: int
    batch: int
    scoring: Scores


def setting_of(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scores) -> KernelSetting:
    """Return the setting of a call. q (B, N, H, D), k (B, N, Hk, D), v (B, N, Hk, Dv)."""
    batch, _, heads, dim = q.shape
    capability = _capability(q.device) if q.is_cuda else (0, 0)
    share = heads // max(1, k.shape[2])
    return KernelSetting(kernel, q.device.type, capability, q.dtype, (dim, v.shape[3]), share, batch, scoring)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def choose(
    setting: KernelSetting, tile: Tile, backward: bool = False, dlse: bool = False, repeatable: bool = False
) -> str:
    """Return the kernel of a tile: "math", "flash", "cudnn" or "fa4".

    Only the math kernel takes a mask by position, or a scale that is not positive.

    Args:
        setting: of the call.
        tile: rows, keys and mask.
        backward: True for the backward.
        dlse: True if lse has a gradient.
        repeatable: sum in the same order in every run.
    """
    if tile.mask is Mask.POSITION or (setting.device == "cpu" and (tile.sequences or tile.needs_window or dlse)):
        return "math"
    names = fused_kernels(setting)
    if setting.device == "cpu":  # below a vector of keys flash returns finite numbers for a row of NaN scores
        return names[0] if names and tile.key_rows.length >= VECTOR else "math"
    if setting.kernel == "cudnn" and not repeatable:
        names = names[:1]
    names = taking(names, tile, dlse, repeatable)
    passed = "forward" if not backward else "repeatable backward" if repeatable else "backward"
    return fastest(names, setting.capability, work_of(tile, passed, setting.dims, setting.batch)) if names else "math"


def taking(names: Sequence[str], tile: Tile, dlse: bool = False, repeatable: bool = False) -> tuple[str, ...]:
    """Return those of some fused kernels of GPUs that take a tile with these head dims, unless masked by position.

    Args:
        names: of "cudnn", "flash" and "fa4".
        tile, dlse, repeatable: as in `choose`.
    """
    varlen, windowed = tile.sequences is not None, tile.needs_window
    single = tile.query_rows.length == tile.key_rows.length == 1
    return tuple(
        name
        for name, limits in ((name, GPU_LIMITS[name]) for name in names)
        if not (
            (varlen and not limits.sequences) or (windowed and not limits.windows) or (dlse and not limits.dlse)
            or (single and not limits.single) or (repeatable and not limits.repeatable)
        )
    )  # fmt: skip


def fused_kernels(setting: KernelSetting) -> tuple[str, ...]:
    """Return the fused kernels that a call may use: "flash" on CPUs, "cudnn", "flash" or "fa4" on GPUs.

    With "cudnn" the second one, "flash", is for backwards that repeat their bits.
    """
    kernel, (dim, value_dim), softcap = setting.kernel, setting.dims, setting.scoring.softcap
    if kernel == "math" or setting.scoring.scale <= 0:
        return ()
    if setting.device == "cpu":
        return ("flash",) if dim == value_dim and softcap is None else ()
    if setting.device != "cuda" or setting.dtype not in HALF:
        return ()
    names = {"auto": ("cudnn", "flash", "fa4"), "cudnn": ("cudnn", "flash")}.get(kernel, (kernel,))
    names = tuple(
        name
        for name in names
        if takes_dims(name, setting.capability, dim, value_dim, setting.share)
        and (softcap is None or GPU_LIMITS[name].softcap)
        and (name != "fa4" or fa4_missing() is None)
    )
    return () if kernel == "cudnn" and "cudnn" not in names else names


def max_varlen_tokens(setting: KernelSetting) -> int:
    """Return the most rows and keys of documents of several lengths that share a call; 0: the kernel takes one each."""
    if setting.device != "cuda" or setting.kernel == "cudnn":
        return 0
    return max((MAX_VARLEN_TOKENS.get(name, 0) for name in fused_kernels(setting)), default=0)


def max_window(setting: KernelSetting) -> int:
    """Return the longest window, in rows, that a kernel computes as such; 0: none does."""
    if setting.device != "cuda" or setting.kernel == "cudnn":
        return 0
    return max((MAX_WINDOW.get(name, 0) for name in fused_kernels(setting)), default=0)


def work_of(tile: Tile, passed: str, dims: tuple[int, int], batch: int) -> Work:
    """Return the sizes of a tile's call. passed, dims: as in `Work`, of keys and of values."""
    count = 1 if tile.sequences is None else len(tile.sequences.query) - 1
    heads = tile.query_rows.folds * batch * tile.query_heads.groups * tile.query_heads.per_group * count
    length = (tile.query_rows.length * tile.key_rows.length) ** 0.5 / count
    return Work(passed, *dims, tile.is_triangle, tile.sequences is not None, length, heads)
