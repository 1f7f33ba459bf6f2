"""The schedule of an exchange of keys as integers: the messages of one rank, stage by stage.

A slot holds one row of one key/value head of a block; a message is a row of slots in a buffer. All ranks run the same
number of stages, and a message is sent and received in the same stage. So messages between two ranks match by their
order alone. `ring.plan.exchanges` makes schedules.

The example (see `ring.plan`): the one stage of `direct`, on rank 0. It sends its own ranges 0 and 4 from the send
buffer, and reads rank 1's ranges 3 and 7 in the receive buffer. Gradients return the same way.

    slots     range  elements  first slot
    sent      0      0 1       0
    sent      4      0 1       2
    received  3      0 1       0
    received  7      0 1       2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ring.layout import Layout
from ring.plan.chunks import SlotRanges
from ring.plan.ranges import Ranges

NOTHING = SlotRanges.join(())


class KeyRows(NamedTuple):
    """The rows of keys that an exchange moves, seen from one rank.

    Args:
        ranges: of queries and keys on all ranks.
        layout: of the keys.
        rank: whose schedule is made.
        kv_heads: key/value heads of a row.
        bucket: most tokens of a message.
    """

    ranges: Ranges
    layout: Layout
    rank: int
    kv_heads: int
    bucket: int

    @property
    def most(self) -> int:
        """Most slots of a message."""
        return self.bucket * self.kv_heads


@dataclass(frozen=True)
class Transfer:
    """A message: slots start .. stop - 1 of a buffer, to or from a peer (rank in the group)."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of one rank. The gradient of a received slot has the same number in the gradient buffer."""

    gathers: SlotRanges  # own rows to copy into the send buffer
    sends: tuple[Transfer, ...]  # from the send buffer or, if relayed, from the receive buffer of the stage before
    relayed: bool
    receives: tuple[Transfer, ...]  # into this stage's receive buffer
    received: SlotRanges  # the remote rows in it
    return_sends: tuple[Transfer, ...]  # gradients of these
    return_receives: tuple[Transfer, ...]  # into the buffer of returned gradients
    carried: int  # leading returned slots: added to the next stage's gradients, which travel on
    scatters: SlotRanges  # own rows to add returned gradients to


@dataclass(frozen=True)
class Sizes:
    """Slots of the buffers that a schedule needs, and the number of receive buffers, used in turn. As many buffers have
    gradients of received slots: of so many; None: as many as are received.
    """

    receive: int
    send: int
    returned: int
    receive_buffers: int = 2
    gradients: int | None = None

    @property
    def sent_back(self) -> int:
        """Slots of a buffer of gradients that return."""
        return self.receive if self.gradients is None else self.gradients


@dataclass(frozen=True, eq=False)
class Schedule:
    """The stages of one rank and its buffers. `whole`: shards travel whole, addressed by row and head, not by block."""

    stages: tuple[Stage, ...]
    sizes: Sizes
    whole: bool = False


def transfers(*messages: tuple[int, int, int]) -> tuple[Transfer, ...]:
    """Build the transfers (peer, start, stop) that are not empty."""
    return tuple(Transfer(peer, start, stop) for peer, start, stop in messages if stop > start)
