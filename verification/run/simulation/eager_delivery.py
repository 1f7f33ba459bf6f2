"""A delivery policy by which `verification.search.diagnose` names a receive buffer that is read too early.

A simulation sees wrong numbers, not the early read. If every message arrives before `post` returns, a missing wait does
no harm. With one message held back until its wait, the numbers are wrong exactly if its buffer is read too early.
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
