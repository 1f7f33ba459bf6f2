"""One kernel call for heads whose grids are shifted against each other.

LongNet gives head h the offset h mod r. From r = 16 on a block of its published setting serves one or two heads, and
one call per block leaves most of a GPU idle. But row i of head h with offset h lies i * r + h rows and h heads into the
tensor, which is linear in h. So these heads are one strided view, whose step from head to head includes some rows
(`Rows.head_step`).

The example (see `ring.plan`): on rank 0 the calls of the blocks 0 and 1 become one. Keys of head 1 lie one row after
those of head 0 in the own shard, two slots after them when received; both heads are in column 0 of their slots.

    keys      query heads  query rows of head 0  query rows of head 1  key rows of head 0  key rows of head 1
    own       0 1          0 2 4 6               1 3 5 7               0 2 4 6             1 3 5 7
    received  0 1          4 6                   5 7                   0 1                 2 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Tile


class _HeadStart(NamedTuple):
    """The first row and the number of one head of a tile, for queries and keys."""

    query_head: int
    query_row: int
    key_head: int
    key_row: int

    def step(self, after: _HeadStart) -> _HeadStart:
        return _HeadStart(*(b - a for a, b in zip(self, after, strict=True)))


def merge_diagonals(tiles: Sequence[Tile], most: int, packed: bool) -> list[Tile]:
    """Merge the tiles of a stage into fewer calls where possible. most: keys of a call, rows times heads. packed: every
    block has its own slots, so that no two tiles of different heads read the same slot.
    """
    by_shape: dict[object, list[Tile]] = {}
    for number, tile in enumerate(tiles):
        by_shape.setdefault(_shape(tile) or number, []).append(tile)
    merged = []
    for several in by_shape.values():
        runs = list(_runs(several, most, packed)) if len(several) > 1 else several
        merged += runs if len(runs) < len(several) else several
    return merged


def _shape(tile: Tile) -> tuple[object, ...] | None:
    """Return a key that is equal for tiles that differ only in where they begin. None for a tile that cannot be merged:
    its heads are listed, every head needs its own mask, or several query heads share a key/value head (and those of
    two branches may overlap).
    """
    heads, key_heads = tile.query_heads, tile.key_heads
    if tile.mask is Mask.POSITION or heads.ids is not None or key_heads.ids is not None or heads.per_group > 1:
        return None
    sequences = None if tile.sequences is None else tile.sequences.key_bytes
    return (tile.mask, tile.window, sequences, *_grid(tile.query_rows), *_grid(tile.key_rows))


def _grid(rows: Rows) -> tuple[object, ...]:
    index = None if rows.index is None else (rows.index - rows.index[0, 0]).numpy().tobytes()
    return rows.step, rows.length, rows.fold_step, rows.folds, index


def _runs(tiles: Sequence[Tile], most: int, packed: bool) -> Iterator[Tile]:
    """Merge tiles of one shape, head by head, into runs of heads at equal steps: one tile for each run."""
    model = tiles[0]
    limit = most // (model.key_rows.folds * model.key_rows.length)
    for places in _layers(tiles):
        run = places[:1]
        for place in places[1:]:
            step = run[-1].step(place)
            continues = min(step) >= 0 and (len(run) == 1 or step == run[-2].step(run[-1]))
            disjoint = packed or _disjoint_keys(model.key_rows, step, len(run))
            if continues and disjoint and len(run) < limit:
                run.append(place)
            else:
                yield _tile(model, run)
                run = [place]
        yield _tile(model, run)


def _layers(tiles: Sequence[Tile]) -> list[list[_HeadStart]]:
    """Return the starts of all heads, ascending. Several tiles may have parts of one head's rows: the first layer takes
    the first part of every head, the next layer the second part, and so on.
    """
    places = sorted(
        _HeadStart(
            query_head=tile.query_heads.start + i * tile.query_heads.step,
            query_row=tile.query_rows.start,
            key_head=tile.key_heads.start + i * tile.key_heads.step,
            key_row=tile.key_rows.start,
        )
        for tile in tiles
        for i in range(tile.query_heads.groups)
    )
    layers: list[list[_HeadStart]] = []
    parts: dict[int, int] = {}
    for place in places:
        layer = parts.get(place.query_head, 0)
        parts[place.query_head] = layer + 1
        if layer == len(layers):
            layers.append([])
        layers[layer].append(place)
    return layers


def _disjoint_keys(rows: Rows, step: _HeadStart, count: int) -> bool:
    """Return True if one more head after `count` heads reads no key of the first. A call writes each key's gradient
    once. The heads between were checked before, at the same distances from the first.
    """
    if step.key_head:
        return True
    listed = np.sort(rows.listed(), axis=None)
    moved = listed + count * step.key_row
    index = np.searchsorted(listed, moved)  # a table of the shard's rows, or sorting both, would take longer
    return not (listed[np.minimum(index, listed.size - 1)] == moved).any()


def _tile(model: Tile, run: Sequence[_HeadStart]) -> Tile:
    """Return one tile for a run of heads at equal steps, shaped like the model."""
    first = run[0]
    step = first.step(run[1]) if len(run) > 1 else _HeadStart(query_head=1, query_row=0, key_head=1, key_row=0)
    return replace(
        model,
        query_rows=_moved(model.query_rows, first.query_row, step.query_row),
        key_rows=_moved(model.key_rows, first.key_row, step.key_row),
        query_heads=Heads(groups=len(run), per_group=1, start=first.query_head, step=step.query_head, inner=1),
        key_heads=Heads(groups=len(run), per_group=1, start=first.key_head, step=step.key_head, inner=1),
    )


def _moved(rows: Rows, start: int, head_step: int) -> Rows:
    index = None if rows.index is None else rows.index + (start - rows.start)
    return replace(rows, start=start, index=index, head_step=head_step)
