"""The groups of neighbouring ranks in which keys are passed round, and the way of a key through them.

By "ring" all ranks are one group. By "ring:N+direct" a group is N neighbours, such as those of a host. An owner sends a
key to one rank of each group, the one at its own place in it, and that group passes it on. So a key goes to a host
once, and all ranks of a host receive at the same time.

Six ranks in groups of three; the keys of rank 1:

    groups away   visited, hop by hop
    0             2 0
    1             4 5 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ring.plan.ranges import Ints

Rank = TypeVar("Rank", int, Ints)


@dataclass(frozen=True)
class RelayGroups:
    """Groups of `size` neighbours among so many ranks. A key visits the groups in the order of the ranks, `away` being
    0 for the owner's own, 1 for the next. Ranks may be arrays.
    """

    ranks: int
    size: int

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.ranks // self.size

    @property
    def hops(self) -> int:
        """Most hops of a key to the ranks of a group: one less in the owner's own."""
        return self.size - (self.count == 1)

    def visited(self, owner: Rank, away: int, hop: int) -> Rank:
        """Return the rank that the keys of an owner reach at a hop, from 1 on."""
        return self._moved(owner, away, hop - (away > 0))

    def source(self, rank: int, away: int, hop: int) -> int:
        """Return the owner whose keys reach this rank at a hop."""
        return self._moved(rank, -away, (away > 0) - hop)

    def neighbour(self, rank: Rank, places: int) -> Rank:
        """Return the rank so many places further round the group."""
        return self._moved(rank, 0, places)

    def hop(self, owner: Ints, reader: Ints) -> tuple[Ints, Ints]:
        """Return the groups away, and the hop, of other ranks that the keys of the owners reach."""
        away = (reader // self.size - owner // self.size) % self.count
        return away, (reader - owner) % self.size + (away > 0)

    def message(self, away: int, owner: Rank) -> Rank:
        """Return the number of the message to the group so far away."""
        return away * self.ranks + owner

    def _moved(self, rank: Rank, groups: int, places: int) -> Rank:
        return (rank // self.size + groups) % self.count * self.size + (rank + places) % self.size
