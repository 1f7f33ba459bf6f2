"""Remote rows: for each branch, the rows of one rank that a query of another rank sees.

The vocabulary is that of `reference.cost`, which counts the messages that these rows need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
    def query_rows(self) -> Ints: ...
    @property
    def query_owner(self) -> Ints: ...
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
    """Remote rows of one branch; the n rows in the order of `Setting.rows`, queries in that of `Setting.query_rows`.

    A branch puts a row into one block at most: the grids of its offsets, all below its rate, are disjoint.
    """

    offset: Ints  # (n,) of the block that selects the row; -1 if none does
    width: Ints  # (n,) slots of the row; 0 if no block selects it
    needed: Flags  # (p, n) True if the rank needs the row and is not its owner
    pairs: Ints  # (n_q,) (query head, key) pairs that each query sees


def blocks(setting: SettingView, index: int) -> list[Block]:
    """The blocks of branch `index` of the pattern, by offset."""
    group = setting.heads // setting.kv_heads
    served: dict[int, list[int]] = {}  # offset -> key/value head of each query head
    for head, offset in enumerate(setting.pattern.branches[index].offsets(setting.heads)):
        if offset is not None:
            served.setdefault(offset, []).append(head // group)
    return [Block(index, o, tuple(dict.fromkeys(kv)), len(kv)) for o, kv in sorted(served.items())]


def branch_need(setting: SettingView, index: int, branch: Branch) -> Need:
    """Remote rows of branch `index`."""
    p, queries, keys = setting.world, setting.query_rows, setting.rows
    n = max(queries.size, keys.size)
    length = max(1, min(branch.segment_length or n, n))  # a segment longer than the sequence changes nothing
    rate = min(branch.dilation_rate, length)  # nor does a rate beyond the segment: one row per phase
    (query_begin, query_end), (key_begin, _) = (_segments(setting.pattern, rows, n, length) for rows in (queries, keys))
    # A block selects the rows whose phase is its offset, because 0 <= offset < rate.
    query_phase, key_phase = (queries - query_begin) % rate, (keys - key_begin) % rate

    by_phase = np.zeros((3, rate), np.int64)
    by_phase[2] = -1
    for block in blocks(setting, index):
        if block.offset < rate:  # the others select nothing
            by_phase[:, block.offset] = block.width, block.query_heads, block.offset
    width, _, offset = by_phase[:, key_phase]  # (3, n_k)

    # (rows,): the first position of a grid names it
    asking, asked = _OnGrid(queries, query_begin + query_phase), _OnGrid(keys, key_begin + key_phase)
    if branch.window is None:
        needed = _needed_without_window(asking, setting.query_owner, asked, p, n, setting.pattern.causal)
    else:
        needed = _needed_within_window(asking, setting.query_owner, asked, p, n, setting.pattern.causal, branch.window)
    needed &= (width > 0) & (setting.owner != np.arange(p)[:, None])

    # Keys on the grid of a query's segment: local indices phase, phase + rate, ...; number `place` is at the query.
    place = (queries - query_begin - query_phase) // rate
    last = (np.minimum(query_end, keys.size) - query_begin - 1 - query_phase) // rate
    reach = n if branch.window is None else branch.window // rate
    ahead = place if setting.pattern.causal else place + reach
    seen = np.maximum(np.minimum(ahead, last) - np.maximum(place - reach, 0) + 1, 0)
    return Need(offset, width, needed, by_phase[1, query_phase] * seen)


class _OnGrid(NamedTuple):
    """Positions, and the grid of each, both (rows,)."""

    position: Ints
    grid: Ints


def _needed_without_window(queries: _OnGrid, owner: Ints, keys: _OnGrid, p: int, n: int, causal: bool) -> Flags:
    """(p, n_k): a rank sees a key if its last query on the key's grid exists and, if causal, is not before the key."""
    last = np.full(p * n, -1, np.int64)
    np.maximum.at(last, owner * n + queries.grid, queries.position)
    return last.reshape(p, n)[:, keys.grid] >= (keys.position if causal else 0)


def _needed_within_window(
    asking: _OnGrid, owner: Ints, keys: _OnGrid, p: int, n: int, causal: bool, window: int
) -> Flags:
    """(p, n_k): the same with a window: the rank's next query on the key's grid is within it or, if not causal, the
    last.

    Sorting by (grid, position) keeps the positions of one grid together.
    """
    seen = np.zeros((p, keys.grid.size), bool)
    place, grid = keys.grid * n + keys.position, keys.grid
    for rank in range(p):
        queries = np.sort((asking.grid * n + asking.position)[owner == rank])
        if queries.size:
            behind = np.searchsorted(queries, place)
            for index in (behind,) if causal else (behind, behind - 1):
                query = queries[np.clip(index, 0, queries.size - 1)]
                near = (query // n == grid) & (abs(query - place) <= window)
                seen[rank] |= near & (query >= place if causal else True)
    return seen


def _segments(pattern: Pattern, rows: Ints, n: int, length: int) -> tuple[Ints, Ints]:
    """Begin and end of the segment of each row, each (rows,), of n positions. Segments restart in each document."""
    documents = pattern.documents
    lengths = np.array((n,) if documents is None else documents, np.int64)
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, rows, side="right")  # skips empty documents
    start, end = (ends - lengths)[document], ends[document]
    begin = start + (rows - start) // length * length
    return begin, np.minimum(begin + length, end)
