"""A delivery policy that names a receive buffer that is read too early: all messages but some arrive at once.

A simulation sees the wrong numbers of such a read, but not the read. If every message arrives before `post` returns, a
missing wait does no harm. Hold back one message until its wait, and the numbers are wrong exactly if its buffer is read
before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ring.comm.transport import Message

Route = tuple[int, int, str]  # from, to (ranks of the group), label


@dataclass
class DeliveryPolicy:
    """A delivery at once of all but the late messages, which arrive at their wait. received: all messages, in words."""

    late: frozenset[Route] = frozenset()
    received: dict[Route, str] = field(default_factory=dict)

    def holds_back(self, receive: Message, target: int) -> bool:
        return (receive.peer, target, receive.label) in self.late
