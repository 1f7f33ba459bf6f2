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
from reference.slices import Slice, keys_seen

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
    begin, end = _segments(setting.pattern, n, length)
    query_begin, key_begin = begin[queries], begin[keys]
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
    slices = slices_seen(branch, setting.pattern.causal)
    needed = _needed(slices, asking, setting.query_owner, asked, p, n)
    needed &= (width > 0) & (setting.owner != np.arange(p)[:, None])
    seen = keys_seen(slices, begin[: queries.size], np.minimum(end[: queries.size], keys.size), rate)
    return Need(offset, width, needed, by_phase[1, query_phase] * seen[queries])


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


def _segments(pattern: Pattern, n: int, length: int) -> tuple[Ints, Ints]:
    """Begin and end of the segment of each position, each (n,). Segments restart in each document."""
    lengths = np.array((n,) if pattern.documents is None else pattern.documents, np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)
    start = ends - np.repeat(lengths, lengths)
    begin = start + (np.arange(n) - start) // length * length
    return begin, np.minimum(begin + length, ends)
