"""Messages that arrive as soon as they can, all but some: how a receive buffer that is read too early is named.

The simulation at its worst cannot see a rank read: it sees wrong numbers. Where everything arrives before `post`
returns, a missing wait does no harm; hold back one message until its wait, and the numbers are wrong again exactly if
its buffer is read before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ring.comm.transport import Message

Route = tuple[int, int, str]  # from, to (ranks of the group), label


@dataclass
class DeliveryPolicy:
    """late: messages that arrive only when they are waited for. met: all that were received, in words."""

    late: frozenset[Route] = frozenset()
    met: dict[Route, str] = field(default_factory=dict)

    def holds_back(self, receive: Message, target: int) -> bool:
        return (receive.peer, target, receive.label) in self.late
