"""What simulated ranks are made to do by several tests, and how a run of them fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ring.comm.transport import Message
from verification.failures import RankFailure
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

SEEDS = range(40)  # every policy, both kinds of sends, early and late deliveries


def ring_pass(transport: SimulatedTransport, hops: int) -> list[float]:
    """Every rank's number travels round; two buffers in turn, as `ring.comm.exchange` has them."""
    p, rank = transport.world_size, transport.rank
    buffers, seen = [torch.full((3,), float(rank)), torch.empty(3)], []
    for hop in range(hops):
        here, there = buffers[hop % 2], buffers[1 - hop % 2]
        pending = transport.post(
            [Message((rank + 1) % p, here, f"hop {hop}")], [Message((rank - 1) % p, there, f"hop {hop}")]
        )
        pending.wait()
        seen.append(float(there[0]))
    return seen


def failure_of(size: int, seed: int, function: Callable[[SimulatedTransport], Any]) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        Simulation(size, seed).run(function)
    return caught.value


def neighbours(transport: SimulatedTransport) -> tuple[int, int]:
    return (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
