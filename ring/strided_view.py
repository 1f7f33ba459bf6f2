"""Tensors addressed by a plan's rows and heads: a strided view where both are regular, else a gathered copy."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, Self

import torch

from ring.caching.graph_keepalive import keep_alive_in_graph
from ring.caching.weak_cache import cached_on
from ring.plan.blocks import Heads
from ring.plan.rows import Rows

_WORD = torch.complex128


class Slot(NamedTuple):
    """The sizes of a slot of a buffer: the key, (B, Dk), then the value, (B, Dv), of one row and key/value head."""

    batch: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        return self.batch * (self.key_dim + self.value_dim)


class StridedView:
    """A (B, N, H, D) tensor whose tiles are (folds, B, groups, per_group, length, D).

    `StridedView(x)` views a shard: rows are tokens. `StridedView.of_slots(buffer, slot)` views the keys and the values
    of a buffer, (slots, numbers of a slot): row and head together address a slot.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._whole, self._strides, self._begin, self._slots = x, x.stride(), x.storage_offset(), False
        self._skip = 0  # bytes from the first element of the tensor to that of the view
        self._batch, _, _, self._dim = x.shape

    @classmethod
    def of_slots(cls, buffer: torch.Tensor, slot: Slot) -> tuple[Self, Self]:
        batch, key_dim, value_dim = slot
        return cls._of_slots(buffer, 0, batch, key_dim), cls._of_slots(buffer, batch * key_dim, batch, value_dim)

    @classmethod
    def _of_slots(cls, buffer: torch.Tensor, first: int, batch: int, dim: int) -> Self:
        """View (batch, dim) of every slot, from its number `first` on."""
        view = cls.__new__(cls)
        slot, _ = buffer.stride()
        view._whole, view._strides, view._slots = buffer, (dim, slot, slot, 1), True
        view._begin, view._skip = buffer.storage_offset() + first, first * buffer.itemsize
        view._batch, view._dim = batch, dim
        return view

    @cached_property
    def x(self) -> torch.Tensor:
        """The whole tensor, (B, N, H, D); for slots (B, slots, 1, D)."""
        if not self._slots:
            return self._whole
        sizes = self._batch, self._whole.shape[0], 1, self._dim
        return self._whole.as_strided(sizes, self._strides, self._begin)

    def view(self, rows: Rows, heads: Heads) -> torch.Tensor:
        """Return a tile, (F, B, groups, per_group, L, D): a view if rows and heads are regular, else a copy."""
        if rows.index is None and heads.ids is None:
            shape, strides, offset = _tile(rows, heads, self._batch, self._dim, self._strides)
            return self._whole.as_strided(shape, strides, self._begin + offset)
        return self.x[:, *self._index(rows, heads)].permute(1, 0, 3, 4, 2, 5)

    def batched(self, rows: Rows, heads: Heads, aligned: bool = True) -> torch.Tensor:
        """Return a tile to read, (F B, groups per_group, L, D). aligned: so that 16-byte loads can read it."""
        x, place = self._whole, None
        if rows.index is None and heads.ids is None:
            place = _place(rows, heads, self._batch, self._dim, self._strides, x.itemsize, aligned)
        if place is None or (aligned and (x.data_ptr() + self._skip + place.skip) % 16):
            return batched(self.view(rows, heads))
        return x.as_strided(place.sizes, place.strides, self._begin + place.offset)

    def place(self, rows: Rows, heads: Heads) -> torch.Tensor | None:
        """Return a tile to write, (F B, groups per_group, L, D), in 16-byte words; None if there is no view."""
        if rows.index is not None or heads.ids is not None:
            return None
        place = _place(rows, heads, self._batch, self._dim, self._strides, self._whole.itemsize, True)
        if place is None or (self._whole.data_ptr() + self._skip + place.skip) % 16:
            return None
        return self._whole.as_strided(place.sizes, place.strides, self._begin + place.offset)

    def put(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Write a tile."""
        if rows.index is None and heads.ids is None:
            copy(self.view(rows, heads), tile)
        else:
            self.x[:, *self._index(rows, heads)] = tile.permute(1, 0, 4, 2, 3, 5).to(self.x.dtype)

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Add a tile, whose rows and heads are distinct."""
        if rows.index is None and heads.ids is None:
            self.view(rows, heads).add_(tile)
        else:
            self.put(rows, heads, self.view(rows, heads) + tile)

    def _index(self, rows: Rows, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of dims 1 and 2 that broadcast to (F, L, groups, per_group)."""
        device = self._whole.device
        row, head = _row_index(rows, heads.groups, device)[..., None], _head_index(heads, device)
        keep_alive_in_graph(row, head)
        return (row + head, torch.zeros_like(head)) if self._slots else (row, head)


class OverwritingView(StridedView):
    """A view whose tiles never overlap: `add` overwrites. A tile that lies in its place already is not copied."""

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        if tile.untyped_storage().data_ptr() != self._whole.untyped_storage().data_ptr():
            self.put(rows, heads, tile)


class GradientSum(Protocol):
    """Sums of gradients of local rows, added tile by tile."""

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Add a summand, (F, B, groups, per_group, L, D)."""
        ...

    def place(self, rows: Rows, heads: Heads) -> torch.Tensor | None:
        """Return memory of the sum for a summand that is then added, (F B, heads, L, D); None: there is none."""
        ...

    def materialize(self) -> None:
        """Finish the additions: afterwards the added tiles may be overwritten."""
        ...


def tile_shape(rows: Rows, heads: Heads, x: torch.Tensor) -> tuple[int, ...]:
    """Shape (F, B, G, P, L, D) of a batched tile."""
    return rows.folds, x.shape[0] // rows.folds, heads.groups, heads.per_group, rows.length, x.shape[3]


def copy(to: torch.Tensor, tile: torch.Tensor) -> None:
    """Copy a tensor, on GPUs by words of 16 bytes where possible: by elements it took more than twice as long."""
    if to.is_cuda and to.dtype == tile.dtype and _is_aligned(to) and _is_aligned(tile):
        to, tile = to.view(_WORD), tile.view(_WORD)
    to.copy_(tile)


def _is_aligned(x: torch.Tensor) -> bool:
    """Return True if torch can view the last dim as words; it checks strides of dims of size 1 too."""
    numbers = _WORD.itemsize // x.itemsize
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % _WORD.itemsize == 0 and all(step % numbers == 0 for step in steps)


def batched(tile: torch.Tensor) -> torch.Tensor:
    """Reshape (F, B, G, P, L, D) to (F B, G P, L, D) for kernels with 16-byte loads: a view, or a copy if rows are not
    aligned. `contiguous` would not do: it does not copy a contiguous tensor at an unaligned address.
    """
    four = _aligned_four_dims(tile.shape, tile.stride(), tile.element_size())
    if four is not None and not tile.data_ptr() % 16:
        return tile.as_strided(*four)
    folds, batch, groups, share, length, dim = tile.shape
    return tile.clone(memory_format=torch.contiguous_format).view(folds * batch, groups * share, length, dim)


class _Place(NamedTuple):
    """The view of a batched tile in its tensor. offset: in elements; skip: in bytes."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    skip: int


@lru_cache(maxsize=8192)
def _place(
    rows: Rows, heads: Heads, batch: int, dim: int, strides: tuple[int, ...], size: int, aligned: bool
) -> _Place | None:
    """Return the view of a tile, or None if there is none. size: bytes per element; aligned: for 16-byte loads."""
    shape, steps, offset = _tile(rows, heads, batch, dim, strides)
    four = _aligned_four_dims(shape, steps, size) if aligned else _as_four_dims(shape, steps)
    return None if four is None else _Place(*four, offset, offset * size)


@lru_cache(maxsize=8192)
def _tile(
    rows: Rows, heads: Heads, batch: int, dim: int, strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape (F, B, G, P, L, D), strides and offset of a tile of regular rows and heads in a (B, N, H, D) tensor."""
    batch_step, row, head, dim_step = strides
    shape = rows.folds, batch, heads.groups, heads.per_group, rows.length, dim
    steps = (
        rows.fold_step * row, batch_step, heads.step * head + rows.head_step * row, heads.inner * head,
        rows.step * row, dim_step,
    )  # fmt: skip
    return shape, steps, rows.start * row + heads.start * head


def _as_four_dims(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of a tile (F, B, G, P, L, D) viewed as (F B, G P, L, D); None if no view exists."""
    folds, batch, groups, share, length, dim = shape
    outer = _merged_stride(folds, strides[0], batch, strides[1])
    heads = _merged_stride(groups, strides[2], share, strides[3])
    if outer is None or heads is None:
        return None
    return (folds * batch, groups * share, length, dim), (outer, heads, strides[4], strides[5])


@lru_cache(maxsize=8192)
def _aligned_four_dims(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """`_as_four_dims`, but None also if strides are not multiples of 16 bytes. size: bytes per element.

    The stride of a dim of size 1 is arbitrary, but cuDNN uses that of a single row or head, and was seen to omit
    results. So set these strides as in a contiguous tensor.
    """
    four = _as_four_dims(shape, strides)
    if four is None or (strides[5] != 1 and shape[5] != 1):
        return None
    sizes, steps = four[0], [*four[1][:3], 1]
    if any(steps[i] * size % 16 for i in range(3) if sizes[i] > 1):
        return None
    whole = 1
    for i in (3, 2, 1, 0):
        if sizes[i] == 1:
            steps[i] = whole
        whole = max(whole, steps[i] * sizes[i])
    return sizes, tuple(steps)


def _merged_stride(outer: int, outer_step: int, inner: int, inner_step: int) -> int | None:
    """Stride of two dims viewed as one; None if no view exists."""
    if inner == 1:
        return outer_step
    return inner_step if outer == 1 or outer_step == inner * inner_step else None


@cached_on
def _row_index(rows: Rows, groups: int, device: torch.device) -> torch.Tensor:
    """(F, L, groups or 1), cached on the GPU: a copy in every call would synchronise, and cannot be captured."""
    index = (rows.index if rows.index is not None else torch.from_numpy(rows.listed())).unsqueeze(2)
    heads = torch.arange(groups, device=index.device)  # whatever the default device
    return (index + rows.head_step * heads if rows.head_step else index).to(device)


@lru_cache(maxsize=256)
def _head_index(heads: Heads, device: torch.device) -> torch.Tensor:
    return torch.tensor(heads.listed(), device=device)
