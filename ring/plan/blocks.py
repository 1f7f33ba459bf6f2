"""The pattern as blocks. A block is one branch and one offset, with all heads that the branch gives this offset.

All heads of a block select the same rows, so one set of integers plans for all of them. A branch gives offsets to query
heads. Key/value head h // (heads / kv_heads) serves query head h. If its query heads have different offsets, it is in
several blocks of the branch.

The example (see `ring.plan`): the only branch has two offsets, with one head each.

    block  segment_length  dilation_rate  offset  query heads  key heads
    0      8               2              0       0            0
    1      8               2              1       1            1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from reference.pattern import Branch, Pattern, slices_seen
from reference.slices import Slice, holds_a_pair, meet


class Heads(NamedTuple):
    """A rectangle of heads, (groups, per_group): `per_group` query heads for each of `groups` key/value heads.

    If every head (i, j) is start + i * step + j * inner, the heads are a strided view of a tensor. If not, they are
    listed in `ids`. A tuple, because tiles are looked up by their heads in every call and tuples hash fast.
    """

    groups: int
    per_group: int
    start: int
    step: int
    inner: int
    ids: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, ids: tuple[tuple[int, ...], ...]) -> Heads:
        """Build from the heads listed in `ids`, (groups, per_group), as a strided view if they are one."""
        groups, per_group = len(ids), len(ids[0])
        start = ids[0][0]
        step = ids[1][0] - start if groups > 1 else 1
        inner = ids[0][1] - start if per_group > 1 else 1
        regular = all(ids[i][j] == start + i * step + j * inner for i in range(groups) for j in range(per_group))
        return cls(groups, per_group, start, step, inner, None if regular else ids)

    @classmethod
    def column(cls, ids: Sequence[int]) -> Heads:
        """Build groups of one head each: (len(ids), 1)."""
        return cls.of(tuple((head,) for head in ids))

    def listed(self) -> tuple[tuple[int, ...], ...]:
        """Return all heads by number, (groups, per_group)."""
        if self.ids is not None:
            return self.ids
        rows, columns = range(self.groups), range(self.per_group)
        return tuple(tuple(self.start + i * self.step + j * self.inner for j in columns) for i in rows)


@dataclass(frozen=True)
class HeadSet:
    """Query heads of a block whose key/value heads serve equally many of them: one kernel call can take them all."""

    query: Heads  # (groups, per_group)
    key: Heads  # (groups, 1): the key/value heads, to read a shard or a gathered copy
    column: Heads  # (groups, 1): the same heads as columns of the block, to read packed slots


@dataclass(frozen=True)
class Block:
    """A branch and an offset: the grid offset, offset + dilation_rate, ... within every segment.

    A block that covers its segments sees every pair of them or, if causal, the keys up to each query; and all pairs of
    its slices besides, whose bounds are multiples of the dilation rate.

    With a window, segments of the block are parts of the branch's segments: the positions that a query reaches, plus
    one step. So a query sees keys of its own part, of the part before it or behind it, and of no other but by a slice.
    """

    segment_length: int
    dilation_rate: int
    offset: int
    key: Heads  # (width, 1): every key/value head that a query head of the block reads
    head_sets: tuple[HeadSet, ...]
    window: int | None = None  # farthest distance on the grid that a query sees; None: no limit
    whole_segment: int = 0  # with a window, the branch's segment length
    causal: bool = False
    covers: bool = True
    slices: tuple[Slice, ...] = ()

    @property
    def width(self) -> int:
        """Slots of a row of the block in a message: one for each of the block's key/value heads."""
        return self.key.groups


@lru_cache(maxsize=256)
def blocks_of(
    pattern: Pattern, n: int, heads: int, kv_heads: int, for_any_length: bool = False
) -> tuple[Block, ...]:  # fmt: skip
    """Return the blocks of a pattern over n tokens. A branch without a segment length has one segment of n tokens.

    for_any_length: with more tokens, blocks see the pairs of these n alike. A slice that ends where the sequence does
    is then one of the block's slices, as it would be in a longer sequence.
    """
    blocks = []
    for branch in pattern.branches:
        by_offset: dict[int, list[int]] = {}
        for head, offset in enumerate(branch.offsets(heads)):
            if offset is not None:
                by_offset.setdefault(offset, []).append(head)
        whole = max(n, 1)
        length = whole if branch.segment_length is None else min(branch.segment_length, whole)
        # A larger rate selects the same: one row of a segment, or none. So no rate exceeds 2^41 + 1.
        rate = min(branch.dilation_rate, 2 * length + 1)
        cover, slices = _covering(branch, pattern.causal, n, for_any_length)
        on_grid = tuple(x for one in slices if holds_a_pair(x := _on_grid(one, rate)))
        for offset, query_heads in sorted(by_offset.items()):
            block = _block(length, rate, min(offset, length), query_heads, share=heads // kv_heads)
            block = replace(
                block, causal=cover is not None and cover.high == 0, covers=cover is not None, slices=on_grid
            )
            window = None if cover is None or cover.low is None else -cover.low
            blocks.append(block if window is None else _with_window(block, window))
    return tuple(blocks)


def _covering(branch: Branch, causal: bool, n: int, open_alone: bool) -> tuple[Slice | None, list[Slice]]:
    """Return the slice of a branch that covers all n tokens, and the others, which end within them. A slice covers them
    if it is all pairs, causality, or a window. open_alone: and has no end.
    """
    cover, others, square = None, [], Slice(0, n, 0, n)
    for one in slices_seen(branch, causal):
        within = meet(one, square)
        if within is None:
            continue
        low, high = (None if x is None or abs(x) >= n else x for x in (within.low, within.high))
        as_before = low is None if high is None else high == 0 or low == -high  # all pairs, causality, or a window
        covers = within[:4] == square[:4] and not (open_alone and (one.q1 is not None or one.k1 is not None))
        if cover is None and covers and as_before and (low or 0) <= 0:
            cover = Slice(low=low, high=high)
        else:
            others.append(within)
    return cover, others


def _on_grid(one: Slice, rate: int) -> Slice:
    """Return the slice with its bounds at distances that occur on a grid."""
    return one._replace(
        low=None if one.low is None else -(-one.low // rate) * rate,
        high=None if one.high is None else one.high // rate * rate,
    )


def _with_window(block: Block, window: int) -> Block:
    """Cut the segments of a block into parts if they are longer than the window reaches."""
    reach = window // block.dilation_rate * block.dilation_rate
    part = reach + block.dilation_rate
    if part >= block.segment_length:
        return block
    return replace(block, segment_length=part, window=reach, whole_segment=block.segment_length)


def _block(length: int, rate: int, offset: int, query_heads: list[int], share: int) -> Block:
    """Build a block. share: query heads that a key/value head serves."""
    readers: dict[int, list[int]] = {}
    for head in query_heads:
        readers.setdefault(head // share, []).append(head)
    kv = sorted(readers)
    groups = []
    for size in sorted({len(r) for r in readers.values()}):
        members = [h for h in kv if len(readers[h]) == size]
        groups.append(
            HeadSet(
                query=Heads.of(tuple(tuple(readers[h]) for h in members)),
                key=Heads.column(members),
                column=Heads.column([kv.index(h) for h in members]),
            )
        )
    return Block(
        segment_length=length, dilation_rate=rate, offset=offset, key=Heads.column(kv), head_sets=tuple(groups)
    )
