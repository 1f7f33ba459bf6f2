"""Groups of ranks in an exchange: which divide the heads of their rows, which have the same heads, the blocks of heads,
and which pass keys round.

Written without any ring code. "all-to-all:2+ring" among six ranks: ranks 0 1, 2 3 and 4 5 divide the heads, and keys go
round the rings 0 2 4 and 1 3 5. "ring+all-to-all:2": rings 0 1 2 and 3 4 5; ranks 0 3, 1 4 and 2 5 divide the heads.
"ring:2+direct": keys go round 0 1, 2 3 and 4 5; rank 0 sends its own to 2 and 4, too.

Names without a number are of hosts: the first exchange is among the ranks of a host, the second between hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
KEY_EXCHANGES = ("ring", "direct", "gather")
ALL_TO_ALL = "all-to-all"
BY_HOST = (
    *(f"{ALL_TO_ALL}+{keys}" for keys in KEY_EXCHANGES), *(f"{keys}+{ALL_TO_ALL}" for keys in KEY_EXCHANGES),
    "ring+direct",
)  # fmt: skip
DIRECT_KEPT = "direct-kept"  # as "direct"; backward has the keys that forward received
ALL_TO_ALL_KEPT = "all-to-all-kept"  # as "all-to-all"; backward has the rows that forward received and computed
KEPT = (DIRECT_KEPT, ALL_TO_ALL_KEPT)
AUTO = "auto"  # the exchange that `ring.estimate.choice` predicts to take the least time
_DIVIDING = re.compile(f"{ALL_TO_ALL}:([1-9][0-9]{{0,8}})")
_ROUND = re.compile(r"ring:([1-9][0-9]{0,8})\+direct")


@dataclass(frozen=True)
class Groups:
    """The ranks of each group.

    Args:
        exchange: of keys, among the ranks with the same heads.
        dividing: ranks that divide the heads of their rows, group by group.
        alike: ranks with the same heads, one list for each member of a group of `dividing`.
        round: number of neighbours among `alike` that pass keys round; 0 where keys go straight to their readers.
        kept: True if received keys, or rows of the own heads and their results, are kept for the backward.
    """

    exchange: str
    dividing: tuple[tuple[int, ...], ...]
    alike: tuple[tuple[int, ...], ...]
    round: int
    kept: bool = False

    @property
    def straight(self) -> bool:
        """True if gradients of keys return straight to their owner: between GPUs in the working type."""
        return self.exchange == "direct"

    @property
    def degree(self) -> int:
        """Number of ranks that divide the heads; 1 for an exchange of keys alone."""
        return len(self.dividing[0])


def groups_of(exchange: str, p: int) -> Groups:
    """Return the groups of an exchange.

    Args:
        exchange: "ring", "direct", "direct-kept", "gather", "all-to-all", "all-to-all-kept", or two, as
            "all-to-all:2+ring", "ring+all-to-all:2" and "ring:2+direct".
        p: number of ranks.

    Raises:
        ValueError: the exchange is unknown, or does not divide the ranks.
    """
    if isinstance(exchange, str) and (in_groups := _ROUND.fullmatch(exchange)) and p % int(in_groups[1]) == 0:
        return replace(groups_of("ring", p), round=int(in_groups[1]))
    if isinstance(exchange, str) and exchange in KEPT:
        return replace(groups_of(exchange.removesuffix("-kept"), p), kept=True)
    parts = exchange.split("+") if isinstance(exchange, str) else []
    if parts == [ALL_TO_ALL]:
        parts = [f"{ALL_TO_ALL}:{p}", "direct"]
    degrees = [int(found[1]) for part in parts if (found := _DIVIDING.fullmatch(part))]
    keys = [part for part in parts if part in KEY_EXCHANGES]
    if len(parts) > 2 or len(keys) != 1 or len(degrees) != len(parts) - 1 or any(p % degree for degree in degrees):
        names = (*KEY_EXCHANGES, DIRECT_KEPT, ALL_TO_ALL, ALL_TO_ALL_KEPT)
        raise ValueError(f"exchange is {exchange!r}; it must be one of {names}, or two that divide {p} ranks, as "
                         "'all-to-all:2+ring' and 'ring:2+direct'")  # fmt: skip
    degree, neighbours = degrees[0] if degrees else 1, parts[0] not in KEY_EXCHANGES
    ranks = np.arange(p)
    grid = ranks.reshape(-1, degree) if neighbours else ranks.reshape(degree, -1).T
    dividing, alike = (tuple(tuple(row) for row in x.tolist()) for x in (grid, grid.T))
    return Groups(keys[0], dividing, alike, round=len(alike[0]) if keys == ["ring"] else 0)


def numbered(exchange: str, p: int, hosts: int) -> str:
    """Return the exchange with a number of ranks in place of their hosts; any but those of BY_HOST as it is.

    Args:
        exchange: as of `groups_of`, or one of BY_HOST.
        p: number of ranks, the first p / hosts of which are on the first host, and so on.
        hosts: their number, which divides p.
    """
    if exchange not in BY_HOST:
        return exchange
    within, between = exchange.split("+")
    if hosts == 1:
        return within
    if hosts == p:
        return between
    if within == ALL_TO_ALL or between == "direct":
        return f"{within}:{p // hosts}+{between}"
    return f"{within}+{between}:{hosts}"


def head_blocks(heads: int, kv_heads: int, ranks: int, most: int) -> list[list[tuple[range, int]]]:
    """Return the blocks of heads of each rank of a group: query heads, and the number of their key/value heads.

    Rank r computes the query heads from r H // ranks up to (r + 1) H // ranks, in blocks: whole groups of the query
    heads of a key/value head, at most so many, or a part of one group.

    Args:
        heads, kv_heads: their numbers.
        ranks: that divide the heads.
        most: key/value heads in a block, at least 1.
    """
    group, shares = heads // kv_heads, []
    for r in range(ranks):
        first, last = r * heads // ranks, (r + 1) * heads // ranks
        blocks: list[tuple[range, int]] = []
        room = 0  # key/value heads that the last block can still take
        for size in np.bincount(np.arange(first, last) // group):
            if not size:
                continue
            if room and size == group:
                queries, keys = blocks.pop()
                blocks.append((range(queries.start, queries.stop + group), keys + 1))
                room -= 1
            else:
                blocks.append((range(first, first + int(size)), 1))
                room = most - 1 if size == group else 0
            first += int(size)
        shares.append(blocks)
    return shares


def ways(p: int, size: int) -> Iterator[tuple[int, int, Ints, Ints]]:
    """Return an iterator over every hop of slots that are passed round groups of neighbours: groups away, number of the
    hop, and for each owner the rank that sends and the one that receives, (p,).

    Args:
        p: number of ranks.
        size: ranks of a group.
    """
    owners = np.arange(p)
    for away in range(p // size):
        at, first = owners // size + away, int(away == 0)
        group, sender = at % (p // size) * size, owners
        for hop in range(1, size + (away > 0)):
            receiver = group + (owners + hop - 1 + first) % size
            yield away, hop, sender, receiver
            sender = receiver
