"""Call: what one rank of a server is told of a call, beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One call. Tensors hold the new tokens of all slots, one slot after the other.

    number      of the call, from 0
    new         tokens of each slot, 0 for a slot that has none in this call
    before      tokens of each slot's request that earlier calls brought
    starts      for each slot, True if a new request begins in it, in place of a finished one or in an empty slot
    rank, world  index of this rank, and number of the ranks
    block       position p belongs to rank (p // block) % world
    replicated  True if every rank keeps all keys instead
    scale       factor on q . k
    """

    number: int
    new: tuple[int, ...]
    before: tuple[int, ...]
    starts: tuple[bool, ...]
    rank: int
    world: int
    block: int
    replicated: bool
    scale: float

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each slot's request with the new ones: the last query is at the last of these positions."""
        return tuple(before + new for before, new in zip(self.before, self.new, strict=True))

    def owns(self, position: int, rank: int | None = None) -> bool:
        """Return True if a rank keeps the key at that position. rank: None for this one."""
        rank = self.rank if rank is None else rank
        return self.replicated or position // self.block % self.world == rank
