"""Remote rows: for each branch, the rows of one rank that a query of another rank sees.

The vocabulary is that of `reference.cost`, which counts the messages that these rows need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from reference.pattern import Branch, Pattern, slices_seen
from reference.slices import Slice

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_NO_QUERY = np.iinfo(np.int64).max  # beyond every query


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
    end = np.minimum(query_end, keys.size)
    slices = slices_seen(branch, setting.pattern.causal)
    needed = _needed(slices, asking, setting.query_owner, asked, p, n)
    needed &= (width > 0) & (setting.owner != np.arange(p)[:, None])
    return Need(offset, width, needed, by_phase[1, query_phase] * _keys_seen(slices, asking, end, rate))


class _OnGrid(NamedTuple):
    """Positions, and the grid of each, both (rows,)."""

    position: Ints
    grid: Ints


def _needed(slices: Sequence[Slice], queries: _OnGrid, owner: Ints, keys: _OnGrid, p: int, n: int) -> Flags:
    """(p, n_k): a rank sees a key if a slice sees the rank's next query on the key's grid, from the first in reach on.

    Sorting by (rank, grid, position) keeps the queries of one rank and grid together.
    """
    needed = np.zeros((p, keys.grid.size), bool)
    ordered = np.append(np.sort((owner * n + queries.grid) * n + queries.position), _NO_QUERY)
    for q0, q1, k0, k1, low, high in (one.limits for one in slices):
        at = np.flatnonzero((keys.position >= k0) & (keys.position < k1))
        key, begin = keys.position[at], (np.arange(p)[:, None] * n + keys.grid[at]) * n
        first, last = np.maximum(key - high, q0), np.minimum(key - low, min(q1, n) - 1)  # queries that see the key
        needed[:, at] |= ordered[np.searchsorted(ordered, begin + first)] <= begin + last
    return needed


def _keys_seen(slices: Sequence[Slice], queries: _OnGrid, end: Ints, rate: int) -> Ints:
    """Number of keys that each query sees on its grid, up to the end of its segment: (n_q,)."""
    seen = np.zeros(queries.position.size, np.int64)
    for q0, q1, k0, k1, low, high in (one.limits for one in slices):
        at = np.flatnonzero((queries.position >= q0) & (queries.position < q1))
        query, grid = queries.position[at], queries.grid[at]
        first, behind = np.maximum(query + low, k0), np.minimum(np.minimum(query + high + 1, k1), end[at])
        first, behind = ((np.maximum(x - grid, 0) + rate - 1) // rate for x in (first, behind))  # on the grid
        seen[at] += np.maximum(behind - first, 0)
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
