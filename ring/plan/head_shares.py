"""The division of heads among ranks, for an exchange that gives each rank some heads of the whole sequence.

Query heads are cut evenly into a share for each rank. A share is cut into blocks, in each of which every key/value head
serves equally many query heads: whole groups of query heads, or a part of one group. Key/value heads whose group lies
on several ranks are in a block of each.

Six query heads with three key/value heads, over four ranks, at most one group a block:

    rank  query heads  blocks (query heads: key/value heads) of stages 0 and 1
    0     0            0: 0
    1     1 2          1: 0    2: 1
    2     3            3: 1
    3     4 5          4 5: 2
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple


class HeadBlock(NamedTuple):
    """Heads that one rank computes in one stage."""

    queries: range
    keys: range


NO_HEADS = HeadBlock(range(0), range(0))


@lru_cache(maxsize=128)
def head_shares(heads: int, kv_heads: int, ranks: int, most: int) -> tuple[tuple[HeadBlock, ...], ...]:
    """Return the stages: the block of every rank, NO_HEADS where it has none. most: key/value heads of a block."""
    shares = [range(rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks)]
    blocks = [_blocks(share, heads // kv_heads, most) for share in shares]
    return tuple(zip_longest(*blocks, fillvalue=NO_HEADS))


def shares_keys(stages: Sequence[Sequence[HeadBlock]]) -> bool:
    """True if a key/value head is in blocks of several ranks."""
    heads = [head for stage in stages for block in stage for head in block.keys]
    return len(set(heads)) < len(heads)


def _blocks(share: range, group: int, most: int) -> list[HeadBlock]:
    """Cut a share of query heads into blocks. group: query heads of a key/value head."""
    blocks, head = [], share.start
    while head < share.stop:
        first, whole = head // group, min((share.stop - head) // group, most)
        if head % group or not whole:
            end, last = min(share.stop, (first + 1) * group), first + 1
        else:
            end, last = head + whole * group, first + whole
        blocks.append(HeadBlock(range(head, end), range(first, last)))
        head = end
    return blocks
