"""What a call tells of its messages beforehand, held against what it posts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from ring.comm.transport import Message, Outgoing
from verification.failures import BrokenContract
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks


def told(*ranges: tuple[int, int], size: int = 32) -> Callable[[SimulatedTransport], None]:
    """Every rank sends bytes 16 to 32 of its send buffer to the next, and tells the others of these ranges instead."""

    def step(transport: SimulatedTransport) -> None:
        after, before = (transport.rank + 1) % 3, (transport.rank - 1) % 3
        transport.prepare("call", lambda: [Outgoing("send buffer", size, "keys 1", after, *one) for one in ranges])
        send_buffer = transport.empty("send buffer", (8,), torch.float32, torch.device("cpu"))
        got = transport.empty("receive buffer", (4,), torch.float32, torch.device("cpu"))
        transport.post([Message(after, send_buffer[4:].fill_(1.0), "keys 1")], [Message(before, got, "keys 1")]).wait()

    return step


def test_messages_come_from_where_the_call_told() -> None:
    Simulation(3, 1).run(told((16, 32)))
    Simulation(3, 1).run(told((16, 32), (0, 16)))  # told of more
    for ranges, size, words in (
        (((0, 16),), 32, "from byte 16 of 'send buffer', told were bytes 0 to 16"),
        (((16, 24),), 32, "from byte 16 of 'send buffer', told were bytes 16 to 24"),
        ((), 32, "which its call did not tell of"),
        (((16, 32),), 64, "made the buffer 'send buffer' of 32 bytes, told were 64"),
    ):
        with pytest.raises(BrokenContract, match=re.escape(words)):
            Simulation(3, 1).run(told(*ranges, size=size))


def test_ranks_that_prepare_unlike_calls_are_told_apart() -> None:
    with pytest.raises(BrokenContract, match="prepares another kind of call"):
        Simulation(2, 1).run(lambda transport: transport.prepare(transport.rank, list))
