"""Limits of the fused kernels of GPUs: which calls each takes.

On a GPU every fused kernel takes fp16 and bf16, full and causal masks, and a scale above 0: they multiply masked
scores, -inf, by the scale. The limits on head dims are those with which drawn Cases held.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from typing import NamedTuple

import torch

HALF = (torch.bfloat16, torch.float16)
FA4_VERSION = "4.0.0b36"
HOPPER = (9, 0)
# Head dims (of keys, of values) of FlashAttention-4 on Hopper. With others its gradients were wrong, without an error:
# 40, 48, 72, 80, 104, 112.
_FA4_DIMS = {(dim, dim) for dim in (32, 64, 96, 128, 160, 192, 256)}


class Limits(NamedTuple):
    """Calls that a fused kernel takes on GPUs.

    softcap      scores with a softcap
    dlse         a backward with a gradient through lse
    sequences    sequences of several lengths in one call
    windows      a window
    repeatable   a backward that sums in the same order in every run
    single       calls on one row and one key
    """

    softcap: bool
    dlse: bool
    sequences: bool
    windows: bool
    repeatable: bool
    single: bool


GPU_LIMITS = {
    # cuDNN would prepare anew for each list of lengths, and its backward refuses a single row and key
    "cudnn": Limits(softcap=False, dlse=False, sequences=False, windows=False, repeatable=False, single=False),
    "flash": Limits(softcap=False, dlse=False, sequences=True, windows=True, repeatable=True, single=True),
    "fa4": Limits(softcap=True, dlse=True, sequences=True, windows=True, repeatable=True, single=True),
}


def takes_dims(name: str, capability: tuple[int, int], dim: int, value_dim: int, share: int) -> bool:
    """Return True if a fused kernel of GPUs takes these head dims.

    Args:
        name: "cudnn", "flash" or "fa4".
        capability: of the GPU, as (9, 0) for Hopper.
        dim, value_dim: head dims of keys and of values.
        share: query heads of a key/value head.
    """
    if name == "fa4":
        equal_heads = (dim, value_dim) == (192, 128) and share == 1
        return capability == HOPPER and ((dim, value_dim) in _FA4_DIMS or equal_heads)
    if dim % 8 or value_dim % 8:
        return False
    if name == "flash":
        return dim == value_dim <= 256
    if max(dim, value_dim) <= 128:
        return True
    return capability == HOPPER and (dim == value_dim <= 256 or (dim, value_dim) == (192, 128))


def describe_limits(name: str, device: str) -> str:
    """Return the dtypes and head dims of a fused kernel in words, for errors. device: type of the device."""
    if device == "cpu":
        return "one head dim of keys and values"
    if name == "fa4":
        dims = ", ".join(str(dim) for dim, _ in sorted(_FA4_DIMS))
        dims = f"on GPUs of compute capability 9.0 head dims {dims}, or 192 with values of 128 and equal heads"
    elif name == "flash":
        dims = "head dims up to 256 that are multiples of 8, the same for keys and values"
    else:
        dims = (
            "head dims up to 128 that are multiples of 8; on GPUs of compute capability 9.0 also up to 256, the same "
            "for keys and values, or 192 with values of 128"
        )
    return f"dtype float16 or bfloat16 and {dims}"


@lru_cache(maxsize=1)
def fa4_missing() -> str | None:
    """Return why FlashAttention-4 cannot be called, with what to do; None if it can."""
    try:
        version = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return f"flash-attn-4 is not installed: pip install --pre flash-attn-4=={FA4_VERSION}"
    if version != FA4_VERSION:
        return f"flash-attn-4 {version} is installed; the version that was verified is {FA4_VERSION}"
    return None
