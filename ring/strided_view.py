"""Tensors addressed by a plan's rows and heads: a strided view where both are regular, else a gathered copy."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Protocol

import torch

from ring.plan.blocks import Heads
from ring.plan.rows import Rows

_WORD = torch.complex128


class StridedView:
    """A (B, N, H, D) tensor whose tiles are (folds, B, groups, per_group, length, D).

    `StridedView(x)` is a shard: rows are tokens. `StridedView.of_slots(buffer, half)` is the keys (half 0) or values
    (half 1) of a buffer, (slots, 2, B, D): row and head together name a slot.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._whole, self._strides, self._begin, self._slots = x, x.stride(), x.storage_offset(), False
        self._batch, _, _, self._dim = x.shape

    @classmethod
    def of_slots(cls, buffer: torch.Tensor, half: int) -> StridedView:
        found = cls.__new__(cls)
        slot, side, batch, dim = buffer.stride()
        found._whole, found._strides, found._slots = buffer, (batch, slot, slot, dim), True
        found._begin = buffer.storage_offset() + half * side
        _, _, found._batch, found._dim = buffer.shape
        return found

    @cached_property
    def x(self) -> torch.Tensor:
        """All of it, (B, N, H, D); of slots (B, slots, 1, D)."""
        if not self._slots:
            return self._whole
        sizes = self._batch, self._whole.shape[0], 1, self._dim
        return self._whole.as_strided(sizes, self._strides, self._begin)

    def view(self, rows: Rows, heads: Heads) -> torch.Tensor:
        """The tile, (F, B, groups, per_group, L, D); writing to it writes to the tensor only if both are regular."""
        if rows.index is None and heads.ids is None:
            batch, row, head, dim = self._strides
            return self._whole.as_strided(
                (rows.folds, self._batch, heads.groups, heads.per_group, rows.length, self._dim),
                (
                    rows.fold_step * row,
                    batch,
                    heads.step * head + rows.head_step * row,
                    heads.inner * head,
                    rows.step * row,
                    dim,
                ),  # fmt: skip
                self._begin + rows.start * row + heads.start * head,
            )
        return self.x[:, *self._index(rows, heads)].permute(1, 0, 3, 4, 2, 5)

    def put(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Write a tile."""
        if rows.index is None and heads.ids is None:
            _copy(self.view(rows, heads), tile)
        else:
            self.x[:, *self._index(rows, heads)] = tile.permute(1, 0, 4, 2, 3, 5).to(self.x.dtype)

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Add a tile; its rows and heads are all different."""
        if rows.index is None and heads.ids is None:
            self.view(rows, heads).add_(tile)
        else:
            self.put(rows, heads, self.view(rows, heads) + tile)

    def _index(self, rows: Rows, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of dims 1 and 2 that broadcast to (F, L, groups, per_group)."""
        device = self._whole.device
        row, head = _row_index(rows, heads.groups, device)[..., None], _head_index(heads, device)
        return (row + head, torch.zeros_like(head)) if self._slots else (row, head)


class OverwritingView(StridedView):
    """A view whose tiles never overlap: a tile that is added is written instead, over whatever was there."""

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        self.put(rows, heads, tile)


class GradientSum(Protocol):
    """Gradients of rows of the own shard, added up tile by tile."""

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Add a summand, (F, B, groups, per_group, L, D)."""
        ...

    def settle(self) -> None:
        """After this, tiles that were added may change."""
        ...


def _copy(to: torch.Tensor, tile: torch.Tensor) -> None:
    """On GPUs by words of 16 bytes where both allow it: a copy number by number took more than twice as long."""
    if to.is_cuda and to.dtype == tile.dtype and _has_words(to) and _has_words(tile):
        to, tile = to.view(_WORD), tile.view(_WORD)
    to.copy_(tile)


def _has_words(x: torch.Tensor) -> bool:
    """Whether torch takes the last dim as words; it looks at the strides of dims of size 1 too."""
    numbers = _WORD.itemsize // x.itemsize
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % _WORD.itemsize == 0 and all(step % numbers == 0 for step in steps)


@lru_cache(maxsize=4096)
def _row_index(rows: Rows, groups: int, device: torch.device) -> torch.Tensor:
    """(F, L, groups or 1), copied to a GPU once: a copy at every call would be waited for, and cannot be captured."""
    index = (rows.index if rows.index is not None else torch.from_numpy(rows.listed())).unsqueeze(2)
    heads = torch.arange(groups, device=index.device)  # whatever the default device
    return (index + rows.head_step * heads if rows.head_step else index).to(device)


@lru_cache(maxsize=256)
def _head_index(heads: Heads, device: torch.device) -> torch.Tensor:
    return torch.tensor(heads.listed(), device=device)
