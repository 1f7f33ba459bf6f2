"""One kernel call for heads whose grids are shifted against each other.

LongNet gives head h the offset h mod r: from r = 16 on, a block of its published setting serves a head or two, and as
many calls as there are blocks leave most of a GPU idle. But row i of head h with offset h lies i * r + h rows and h
heads into the tensor, which is linear in h: such heads are one strided view, whose step from head to head takes some
rows along (`Rows.head_step`).

The example (see `ring.plan`): on rank 0 the calls of the blocks 0 and 1 become one, for own keys (where a head's keys
lie one row further on) as for received ones (where they lie two slots further on, both in column 0 of their slots).

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
    """Where one head of a tile begins."""

    query_head: int
    query_row: int
    key_head: int
    key_row: int

    def step(self, after: _HeadStart) -> _HeadStart:
        return _HeadStart(*(b - a for a, b in zip(self, after, strict=True)))


def along_diagonals(tiles: Sequence[Tile], most: int, packed: bool) -> list[Tile]:
    """The tiles of a stage in fewer calls, where that can be. most: keys of a call, rows times heads. packed: every
    block has slots of its own, so that no two tiles of different heads read the same.
    """
    alike: dict[object, list[Tile]] = {}
    for number, tile in enumerate(tiles):
        alike.setdefault(_shape(tile) or number, []).append(tile)
    found = []
    for several in alike.values():
        runs = list(_runs(several, most, packed)) if len(several) > 1 else several
        found += runs if len(runs) < len(several) else several
    return found


def _shape(tile: Tile) -> tuple[object, ...] | None:
    """Equal for tiles that differ only in where they begin. None for a tile that must stay as it is: its heads are
    listed, or every head would need a mask of its own, or several query heads share a key/value head (and those of two
    branches may overlap).
    """
    heads, key_heads = tile.query_heads, tile.key_heads
    if tile.mask is Mask.POSITION or heads.ids is not None or key_heads.ids is not None or heads.per_group > 1:
        return None
    sequences = None if tile.sequences is None else tile.sequences.described
    return (tile.mask, sequences, *_grid(tile.query_rows), *_grid(tile.key_rows))


def _grid(rows: Rows) -> tuple[object, ...]:
    index = None if rows.index is None else (rows.index - rows.index[0, 0]).numpy().tobytes()
    return rows.step, rows.length, rows.fold_step, rows.folds, index


def _runs(tiles: Sequence[Tile], most: int, packed: bool) -> Iterator[Tile]:
    """Tiles of one shape, head by head, as runs of heads at equal steps: one tile for each run."""
    model = tiles[0]
    limit = most // (model.key_rows.folds * model.key_rows.length)
    for places in _layers(tiles):
        run = places[:1]
        for place in places[1:]:
            step = run[-1].step(place)
            goes_on = min(step) >= 0 and (len(run) == 1 or step == run[-2].step(run[-1]))
            own_keys = packed or _own_keys(model.key_rows, step, len(run))
            if goes_on and own_keys and len(run) < limit:
                run.append(place)
            else:
                yield _tile(model, run)
                run = [place]
        yield _tile(model, run)


def _layers(tiles: Sequence[Tile]) -> list[list[_HeadStart]]:
    """Where the heads of all tiles begin, ascending. Several tiles may have parts of one head's rows: a layer takes the
    first of every head, the next layer the second of every head, and so on.
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
    seen: dict[int, int] = {}
    for place in places:
        layer = seen.get(place.query_head, 0)
        seen[place.query_head] = layer + 1
        if layer == len(layers):
            layers.append([])
        layers[layer].append(place)
    return layers


def _own_keys(rows: Rows, step: _HeadStart, count: int) -> bool:
    """Whether one more head after `count` heads reads no key that the first reads, since a call may write each key's
    gradient only once. The heads between lie as far from the new one as earlier ones did from the first.
    """
    if step.key_head:
        return True
    listed = np.sort(rows.listed(), axis=None)
    moved = listed + count * step.key_row
    found = np.searchsorted(listed, moved)  # a table of the shard's rows, or sorting both, would take longer
    return not (listed[np.minimum(found, listed.size - 1)] == moved).any()


def _tile(model: Tile, run: Sequence[_HeadStart]) -> Tile:
    """One call for a run of heads at equal steps, shaped like the model."""
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
