"""Remote rows: for each branch, the rows of one rank that a query of another rank sees.

The vocabulary is that of `reference.cost`, which counts the messages that these rows need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reference.pattern import Branch, Pattern

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class SettingView(Protocol):
    """The part of `reference.cost.Setting` that remote rows depend on."""

    @property
    def pattern(self) -> Pattern: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def rows(self) -> Ints: ...
    @property
    def owner(self) -> Ints: ...
    @property
    def needs(self) -> tuple[Need, ...]: ...


@dataclass(frozen=True)
class Block:
    branch: int  # index in the pattern
    offset: int
    kv_heads: tuple[int, ...]
    query_heads: int  # number of them

    @property
    def width(self) -> int:
        return len(self.kv_heads)


@dataclass(frozen=True)
class Need:
    """Remote rows of one branch; the n rows in the order of `Setting.rows`.

    A branch puts a row into one block at most: the grids of its offsets, all below its rate, are disjoint.
    """

    offset: Ints  # (n,) of the block that selects the row; -1 if none does
    width: Ints  # (n,) slots of the row; 0 if no block selects it
    needed: Flags  # (p, n) True if the rank needs the row and is not its owner
    travel: Ints  # (n,) largest distance round the ring to a rank that needs the row
    pairs: Ints  # (n,) (query head, key) pairs that the row sees as a query


def blocks(setting: SettingView, index: int) -> list[Block]:
    """The blocks of branch `index` of the pattern, by offset."""
    group = setting.heads // setting.kv_heads
    served: dict[int, list[int]] = {}  # offset -> key/value head of each query head
    for head, offset in enumerate(setting.pattern.branches[index].offsets(setting.heads)):
        if offset is not None:
            served.setdefault(offset, []).append(head // group)
    return [Block(index, o, tuple(dict.fromkeys(kv)), len(kv)) for o, kv in sorted(served.items())]


def branch_need(setting: SettingView, index: int, branch: Branch, distance: Ints) -> Need:
    """Remote rows of branch `index`. distance: (p, n), round the ring from a row's owner to each rank."""
    p, rows, owner, n = setting.world, setting.rows, setting.owner, setting.rows.size
    length = max(1, min(branch.segment_length or n, n))  # a segment longer than the sequence changes nothing
    rate = min(branch.dilation_rate, length)  # nor does a rate beyond the segment: one row per phase
    begin, end = _segments(setting, length)
    local = rows - begin
    phase = local % rate  # a block selects the rows whose phase is its offset, because 0 <= offset < rate

    by_phase = np.zeros((3, rate), np.int64)
    by_phase[2] = -1
    for block in blocks(setting, index):
        if block.offset < rate:  # the others select nothing
            by_phase[:, block.offset] = block.width, block.query_heads, block.offset
    width, query_heads, offset = by_phase[:, phase]  # (3, n)

    grid = begin + phase  # (n,): the first position of a grid names it
    if branch.window is None:
        needed = _needed_without_window(rows, owner, grid, p, setting.pattern.causal)
    else:
        needed = _needed_within_window(rows, owner, grid, p, setting.pattern.causal, branch.window)
    needed &= (width > 0) & (distance > 0)
    travel = distance.max(axis=0, where=needed, initial=0)

    # Keys on the grid of the row's segment: local indices phase, phase + rate, ..., of which the row is number `place`.
    place, last = (local - phase) // rate, (end - begin - 1 - phase) // rate
    reach = n if branch.window is None else branch.window // rate
    before, behind = np.minimum(place, reach), np.minimum(last - place, reach)
    seen = before + 1 if setting.pattern.causal else before + 1 + behind
    return Need(offset, width, needed, travel, query_heads * seen)


def _needed_without_window(rows: Ints, owner: Ints, grid: Ints, p: int, causal: bool) -> Flags:
    """(p, n): a rank sees a row if its last query on the row's grid exists and, if causal, is not before the row."""
    n = rows.size
    last = np.full(p * n, -1, np.int64)
    np.maximum.at(last, owner * n + grid, rows)
    return last.reshape(p, n)[:, grid] >= (rows if causal else 0)


def _needed_within_window(rows: Ints, owner: Ints, grid: Ints, p: int, causal: bool, window: int) -> Flags:
    """(p, n): the same with a window: the rank's next query on the row's grid is within it or, if not causal, the last.

    Sorting by (grid, position) keeps the positions of one grid together.
    """
    n, seen = rows.size, np.zeros((p, rows.size), bool)
    place = grid * n + rows
    for rank in range(p):
        queries = np.sort(place[owner == rank])
        if queries.size:
            behind = np.searchsorted(queries, place)
            for index in (behind,) if causal else (behind, behind - 1):
                query = queries[np.clip(index, 0, queries.size - 1)]
                near = (query // n == grid) & (abs(query - place) <= window)
                seen[rank] |= near & (query >= place if causal else True)
    return seen


def _segments(setting: SettingView, length: int) -> tuple[Ints, Ints]:
    """Begin and end of the segment of each row, each (n,). Segments restart in each document."""
    documents, rows = setting.pattern.documents, setting.rows
    lengths = np.array((rows.size,) if documents is None else documents, np.int64)
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, rows, side="right")  # skips empty documents
    start, end = (ends - lengths)[document], ends[document]
    begin = start + (rows - start) // length * length
    return begin, np.minimum(begin + length, end)
