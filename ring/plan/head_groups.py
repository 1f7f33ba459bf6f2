"""The division of ranks for an exchange by heads: some exchange heads, those with the same heads exchange keys.

Six ranks, two of which divide the heads, with a ring between those that have the same:

    exchange               divide the heads     have the same heads
    all-to-all:2+ring      0 1 | 2 3 | 4 5      0 2 4 | 1 3 5
    ring+all-to-all:2      0 3 | 1 4 | 2 5      0 1 2 | 3 4 5

The first exchange goes between neighbours, which is the faster link where hosts hold neighbours.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ring.plan.plan import EXCHANGES
from ring.plan.relay_groups import is_by_group, relay_groups

ALL_TO_ALL = "all-to-all"
_BY_HEAD = re.compile(rf"{ALL_TO_ALL}:([1-9][0-9]{{0,8}})")


class HeadGroups(NamedTuple):
    """degree: ranks that divide the heads of their rows. between: the exchange of keys among ranks with the same heads.
    neighbours: True if those that divide the heads are neighbours.
    """

    ranks: int
    degree: int
    between: str
    neighbours: bool

    def dividing(self, rank: int) -> range:
        """Return the ranks that divide the heads with this one."""
        if self.neighbours:
            first = rank - rank % self.degree
            return range(first, first + self.degree)
        return range(rank % self.others, self.ranks, self.others)

    def alike(self, rank: int) -> range:
        """Return the ranks that have the same heads as this one."""
        if self.neighbours:
            return range(rank % self.degree, self.ranks, self.degree)
        first = rank - rank % self.others
        return range(first, first + self.others)

    @property
    def others(self) -> int:
        """Number of ranks that have the same heads."""
        return self.ranks // self.degree


def is_exchange(exchange: object) -> bool:
    """True for a name in EXCHANGES, "all-to-all", both, as "all-to-all:2+ring", and "ring:2+direct"."""
    if not isinstance(exchange, str):
        return False
    return exchange in (*EXCHANGES, ALL_TO_ALL) or is_by_group(exchange) or _parts(exchange) is not None


def _parts(exchange: str) -> tuple[int, str, bool] | None:
    """Return (degree, between, neighbours) of "all-to-all:2+ring" and the like; None for any other text."""
    names = exchange.split("+")
    for here, there in ((0, 1), (1, 0)):
        if len(names) == 2 and (found := _BY_HEAD.fullmatch(names[here])) and names[there] in EXCHANGES:
            return int(found[1]), names[there], here == 0
    return None


def head_groups(exchange: str, ranks: int) -> HeadGroups | None:
    """Return the groups of an exchange among so many ranks; None for an exchange of keys alone.

    Raises ValueError if groups of that size do not divide the ranks.
    """
    if exchange in EXCHANGES:
        return None
    if is_by_group(exchange):
        relay_groups(exchange, ranks)
        return None
    degree, between, neighbours = (
        (ranks, "direct", True) if exchange == ALL_TO_ALL else _parts(exchange) or (0, "", True)
    )
    if not degree or ranks % degree:
        raise ValueError(
            f"exchange must divide the {ranks} ranks of the group into groups of one size, got {exchange!r}; "
            f"allowed after {ALL_TO_ALL}: are divisors of {ranks}"
        )
    return HeadGroups(ranks, degree, between, neighbours)
