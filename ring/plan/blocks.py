"""The pattern as blocks: one branch and one offset, with the heads that share it.

All heads of a block select the same rows, so one set of integers plans for all of them. Offsets go by query head; a
key/value head serves the query heads h with h // (H / Hk) equal to it, and may stand in several blocks of a branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from reference.pattern import Pattern


@dataclass(frozen=True)
class Heads:
    """A rectangle of heads, (groups, per_group): `per_group` query heads for each of `groups` key/value heads.

    Regular heads lie at start + i * step + j * inner, and are a strided view; others are listed in `ids`.
    """

    groups: int
    per_group: int
    start: int
    step: int
    inner: int
    ids: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, ids: tuple[tuple[int, ...], ...]) -> Heads:
        groups, per_group = len(ids), len(ids[0])
        start = ids[0][0]
        step = ids[1][0] - start if groups > 1 else 1
        inner = ids[0][1] - start if per_group > 1 else 1
        regular = all(ids[i][j] == start + i * step + j * inner for i in range(groups) for j in range(per_group))
        return cls(groups, per_group, start, step, inner, None if regular else ids)

    def listed(self) -> tuple[tuple[int, ...], ...]:
        if self.ids is not None:
            return self.ids
        rows, columns = range(self.groups), range(self.per_group)
        return tuple(tuple(self.start + i * self.step + j * self.inner for j in columns) for i in rows)


@dataclass(frozen=True)
class HeadGroup:
    """Query heads of a block whose key/value heads serve equally many of them: what one kernel call can take."""

    query: Heads  # (groups, per_group)
    key: Heads  # (groups, 1): the key/value heads, where a shard or a gathered copy is read
    column: Heads  # (groups, 1): the same heads as columns of the block, where packed slots are read


@dataclass(frozen=True)
class Block:
    """A branch and an offset: the grid offset, offset + dilation_rate, ... of every segment."""

    segment_length: int
    dilation_rate: int
    offset: int
    key: Heads  # (width, 1): every key/value head that a query head of the block reads
    head_groups: tuple[HeadGroup, ...]

    @property
    def width(self) -> int:
        """Slots that a row of the block takes in a message: its key/value heads."""
        return self.key.groups


@lru_cache(maxsize=256)
def blocks_of(pattern: Pattern, n: int, heads: int, kv_heads: int) -> tuple[Block, ...]:
    """The blocks of a pattern over n tokens; a branch without a segment length has one segment, the whole."""
    blocks = []
    for branch in pattern.branches:
        by_offset: dict[int, list[int]] = {}
        for head, offset in enumerate(branch.offsets(heads)):
            if offset is not None:
                by_offset.setdefault(offset, []).append(head)
        whole = max(n, 1)
        length = whole if branch.segment_length is None else min(branch.segment_length, whole)
        # No larger than it takes to see one row of a segment, or none: so that 64 bits hold every product.
        rate = min(branch.dilation_rate, 2 * length + 1)
        for offset, served in sorted(by_offset.items()):
            blocks.append(_block(length, rate, min(offset, length), served, heads // kv_heads))
    return tuple(blocks)


def _block(length: int, rate: int, offset: int, query_heads: list[int], share: int) -> Block:
    readers: dict[int, list[int]] = {}
    for head in query_heads:
        readers.setdefault(head // share, []).append(head)
    kv = sorted(readers)
    groups = []
    for size in sorted({len(r) for r in readers.values()}):
        members = [h for h in kv if len(readers[h]) == size]
        groups.append(
            HeadGroup(
                query=Heads.of(tuple(tuple(readers[h]) for h in members)),
                key=Heads.of(tuple((h,) for h in members)),
                column=Heads.of(tuple((kv.index(h),) for h in members)),
            )
        )
    return Block(length, rate, offset, Heads.of(tuple((h,) for h in kv)), tuple(groups))
