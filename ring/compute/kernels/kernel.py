"""The record of a kernel: its calls, and all that the rest of the project asks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ring.plan.tile import Mask, Tile

HALF = (torch.bfloat16, torch.float16)
HOPPER = (9, 0)
ANY_LENGTH = 2**40
Tensors3 = tuple[Tensor, Tensor, Tensor]
Into = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class SavedRows:
    """Arguments of a tile's backward besides q, k, v: its rows of dout, out, lse, delta and the gradient of lse, and
    memory for its results. For batched kernels all are batched (`ring.strided_view`), lse with a last dim of 1.
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None  # None for a kernel that does not read it
    dlse: Tensor | None = None  # None if lse has no gradient; for a kernel that reads delta it is a part of it
    into: Into = (None, None, None)  # for dq, dk, dv; None: new memory


class Scores(NamedTuple):
    """Factor of q . k, and softcap t (Gemma 2, arXiv 2408.00118) or None: the score is t tanh(scale q . k / t)."""

    scale: float
    softcap: float | None = None


class KernelSetting(NamedTuple):
    """Properties of a call that its kernels depend on, besides tiles."""

    candidates: tuple[Kernel, ...]  # fused kernels, by the argument of `ring_attention`
    device: str  # its type
    capability: tuple[int, int]  # of the GPU, (0, 0) without one
    dtype: torch.dtype  # of q, k and v
    dims: tuple[int, int]  # head dims of keys and of values
    share: int  # query heads of a key/value head
    batch: int
    scoring: Scores


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel: partial attention of one tile. `ring.compute.kernels.math` defines shapes and arguments.

    takes_dims: compute capability, head dims of keys and of values, query heads of a key/value head -> True if it takes
    them. workspace: rows, keys, head dims of keys and of values -> bytes of a query head's backward beyond operands and
    results; None if they are few.
    """

    name: str  # argument of `ring_attention`, and name in counts; of one kernel a device
    device: str | None  # type of its devices; None: any
    forward: Callable[[Tensor, Tensor, Tensor, Tile, Scores], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, SavedRows, Tile, Scores], Tensors3]
    takes_dims: Callable[[tuple[int, int], int, int, int], bool]
    limits: str  # dtypes and head dims in words, for errors
    dtypes: tuple[torch.dtype, ...] | None = HALF  # of q, k and v; None: any
    softcap: bool = False  # it takes scores with a softcap
    any_scale: bool = False  # it takes a scale that is not positive
    positions: bool = False  # it takes a mask by position
    dlse: bool = False  # it takes a gradient through lse
    single: bool = True  # it takes tiles of one row and one key
    least_keys: int = 1  # fewest key rows of a tile
    max_varlen_tokens: int = 0  # most rows and keys of documents that share a call; 0: it takes no such tile
    max_window: int = 0  # longest window, in rows, that it computes as such; 0: it takes no such tile
    repeatable: bool = True  # its backward can sum in the same order in every run
    fixed_bits: bool = (
        False  # bits of a row depend on its tile's rows, keys and mask alone, not on other heads or folds
    )
    alone: bool = False  # but only if a call has one batch entry and key/value head
    repeated_by: Kernel | None = None  # the kernel in its place where it must and cannot
    batched: bool = True  # its operands are batched (`ring.strided_view`)
    reads_delta: bool = False  # its backward reads delta
    in_place: bool = False  # its backward writes gradients of a tile of one length into memory that it is given
    workspace: Callable[[int, int, int, int], int] | None = None
    compiles: bool = False  # the first call of a kind takes some seconds
    measured: bool = False  # its times are in `ring/compute/gpu/kernel_times.json`
    missing: Callable[[], str | None] = lambda: None  # why it cannot be called, with what to do; None if it can

    def takes(self, setting: KernelSetting) -> bool:
        """Return True if it takes some tiles of a call."""
        return (
            self.device in (None, setting.device)
            and (self.dtypes is None or setting.dtype in self.dtypes)
            and (self.softcap or setting.scoring.softcap is None)
            and (self.any_scale or setting.scoring.scale > 0)
            and self.takes_dims(setting.capability, *setting.dims, setting.share)
            and self.missing() is None
        )

    def takes_tile(self, tile: Tile, dlse: bool = False, repeatable: bool = False) -> bool:
        """Return True if it takes a tile of a call that it takes. dlse, repeatable: see `kernel_choice.choose`."""
        keys, single = tile.key_rows.length, tile.query_rows.length == tile.key_rows.length == 1
        return (
            (self.positions or tile.mask is not Mask.POSITION)
            and (self.max_window > 0 or not tile.needs_window)
            and (self.max_varlen_tokens > 0 or tile.sequences is None)
            and (self.repeatable or not repeatable)
            and (self.dlse or not dlse)
            and (self.single or not single)
            and keys >= self.least_keys
        )

    def writes_in_place(self, tile: Tile) -> bool:
        """Return True if its backward can write a tile's gradients into memory that it is given."""
        return self.in_place and tile.sequences is None
