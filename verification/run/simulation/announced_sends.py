"""The messages that a rank announces before a call, compared with those that it then posts.

`Transport.prepare` is told from which buffer, and from which bytes of it, every message of the call will be sent. A
transport whose receivers copy out of the sender's memory (`ring.comm.symmetric_memory`) relies on that: a wrong number
there is a wrong row here. The simulation copies from the message itself, so it has to compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ring.comm.transport import Message, Outgoing
from verification.failures import BrokenContract
from verification.run.simulation.in_flight import described


class Announced:
    """What one rank announced for the call under way."""

    def __init__(self, rank: str, outgoing: Sequence[Outgoing]) -> None:
        self._rank = rank
        self._told: dict[tuple[str, int], list[Outgoing]] = {}
        for one in outgoing:
            self._told.setdefault((one.label, one.peer), []).append(one)
        self._sizes = {one.buffer: one.size for one in outgoing}
        self._begins: dict[str, int] = {}  # buffer -> its address
        self._sent: Counter[tuple[str, int]] = Counter()

    def made(self, name: str, buffer: torch.Tensor) -> None:
        """A buffer of the call was made. Raises BrokenContract if another size was announced for it."""
        size = buffer.numel() * buffer.element_size()
        if self._sizes.get(name, size) != size:
            raise BrokenContract(
                f"{self._rank} made the buffer {name!r} of {size} bytes, told were {self._sizes[name]}"
            )
        self._begins[name] = buffer.data_ptr()

    def keep(self, sends: Sequence[Message]) -> None:
        """Raises BrokenContract for a message that was not announced, or is sent from another place."""
        for message in sends:
            route = message.label, message.peer
            told, number = self._told.get(route, []), self._sent[route]
            self._sent[route] += 1
            if number >= len(told):
                raise BrokenContract(
                    f"{self._rank} sends {described(message)} to {message.peer}, which its call did not tell of"
                )
            one = told[number]
            begin = self._begins.get(one.buffer)
            at = None if begin is None else message.tensor.data_ptr() - begin
            if (at, message.bytes) != (one.start, one.stop - one.start):
                raise BrokenContract(
                    f"{self._rank} sends {described(message)} to {message.peer} from byte {at} of {one.buffer!r}, "
                    f"told were bytes {one.start} to {one.stop}"
                )
