"""The messages that a rank announces before a call, compared with those that it then posts.

A call announces to `Transport.prepare` from which bytes of which buffer it will send each message. A transport whose
receivers copy out of the sender's memory (`ring.comm.symmetric_memory`) relies on that: with a wrong offset it copies
wrong rows. The simulation copies from the message itself, so it must compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ring.comm.transport import Message, Outgoing
from verification.failures import BrokenContract
from verification.run.simulation.in_flight import described


class Announced:
    """The messages that one rank announced for the call under way."""

    def __init__(self, rank: str, outgoing: Sequence[Outgoing]) -> None:
        self._rank = rank
        self._announced: dict[tuple[str, int], list[Outgoing]] = {}
        for message in outgoing:
            self._announced.setdefault((message.label, message.peer), []).append(message)
        self._sizes = {message.buffer: message.size for message in outgoing}
        self._addresses: dict[str, int] = {}  # by buffer
        self._sent: Counter[tuple[str, int]] = Counter()

    def check_buffer(self, name: str, buffer: torch.Tensor) -> None:
        """Register a new buffer of the call. Raises BrokenContract if another size was announced for it."""
        size = buffer.numel() * buffer.element_size()
        if self._sizes.get(name, size) != size:
            raise BrokenContract(
                f"{self._rank} made the buffer {name!r} of {size} bytes; it announced {self._sizes[name]}"
            )
        self._addresses[name] = buffer.data_ptr()

    def check_sends(self, sends: Sequence[Message]) -> None:
        """Raise BrokenContract for a message that was not announced, or is sent from another place."""
        for message in sends:
            route = message.label, message.peer
            announced, number = self._announced.get(route, []), self._sent[route]
            self._sent[route] += 1
            if number >= len(announced):
                raise BrokenContract(
                    f"{self._rank} sends {described(message)} to {message.peer}, which its call did not announce"
                )
            plan = announced[number]
            address = self._addresses.get(plan.buffer)
            offset = None if address is None else message.tensor.data_ptr() - address
            if (offset, message.bytes) != (plan.start, plan.stop - plan.start):
                raise BrokenContract(
                    f"{self._rank} sends {described(message)} to {message.peer} from byte {offset} of {plan.buffer!r}; "
                    f"it announced bytes {plan.start} to {plan.stop}"
                )
