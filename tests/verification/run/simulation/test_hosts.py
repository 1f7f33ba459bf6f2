"""Messages between hosts of the simulation come last; a host that stops is named; attention over many hosts holds."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from reference.pattern import Pattern
from ring.comm.transport import Message, Pending
from tests.support.plain_case import plain
from verification.case import Case
from verification.check.properties import check, prepare
from verification.failures import Deadlock, RankError
from verification.run.backends import simulate
from verification.run.rank import observe
from verification.run.recording_transport import RecordingTransport
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks

SEEDS = range(40)  # every order of ranks, both kinds of sends
EXCHANGES = ("ring", "direct", "all-to-all:2+direct", "ring+all-to-all:2")


def swap(transport: SimulatedTransport, peer: int, label: str) -> tuple[Pending, torch.Tensor]:
    """Exchange this rank's number for the peer's."""
    incoming = torch.empty(1)
    sent = Message(peer, torch.full((1,), float(transport.rank)), label)
    return transport.post([sent], [Message(peer, incoming, label)]), incoming


def test_hosts_hold_equal_ranks_in_order() -> None:
    def step(transport: SimulatedTransport) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        some = transport.subgroup((5, 1, 4))
        return transport.hosts, None if some is None else some.hosts

    hosts = (0, 0, 1, 1, 2, 2)
    assert Simulation(6, 0, hosts=3).run(step) == [
        (hosts, (2, 0, 2) if rank in (1, 4, 5) else None) for rank in range(6)
    ]
    assert Simulation(2, 0).run(lambda transport: transport.hosts) == [(0, 0)] * 2
    for wrong in (0, 4):
        with pytest.raises(ValueError, match=f"hosts must divide the 6 ranks, got {wrong}"):
            Simulation(6, 0, hosts=wrong)


def test_messages_between_hosts_come_last() -> None:
    def arrivals(seed: int) -> list[tuple[str, int]]:
        order: list[tuple[str, int]] = []

        def step(transport: SimulatedTransport) -> None:
            rank = transport.rank
            far, incoming = swap(transport, (rank + 2) % 4, "far")
            for number in range(3):
                swap(transport, rank ^ 1, f"near {number}")[0].wait()
                order.append(("near", rank))
            far.wait()
            order.append(("far", rank))
            assert incoming == (rank + 2) % 4

        Simulation(4, seed, hosts=2).run(step)
        return order

    orders = [arrivals(seed) for seed in SEEDS]
    assert all([kind for kind, _ in order] == ["near"] * 12 + ["far"] * 4 for order in orders)
    assert orders == [arrivals(seed) for seed in SEEDS]
    assert len({tuple(order[12:]) for order in orders}) > 8


@pytest.mark.parametrize("hosts", (1, 2))
def test_reads_of_an_unawaited_peer_are_found(hosts: int) -> None:
    def step(transport: SimulatedTransport) -> float:
        far, incoming = swap(transport, (transport.rank + 2) % 4, "far")
        swap(transport, transport.rank ^ 1, "near")[0].wait()
        early = float(incoming)
        far.wait()
        return early

    early = [Simulation(4, seed, hosts=hosts).run(step)[0] for seed in SEEDS]
    assert any(map(math.isnan, early))
    assert (2.0 in early) is (hosts == 1), "on one host, some schedules hide it"


def test_ranks_of_a_host_leave_meetings_first() -> None:
    def leaving(seed: int, hosts: int) -> list[int]:
        order: list[int] = []

        def step(transport: SimulatedTransport) -> None:
            assert transport.all_equal(b"8 bytes!")
            order.append(transport.rank // 2)
            swap(transport, transport.rank ^ 1, "near")[0].wait()

        Simulation(4, seed, hosts=hosts).run(step)
        return order

    for seed in SEEDS:
        first, second, *_ = leaving(seed, 2)
        assert first == second
    assert any(order[0] != order[1] for order in (leaving(seed, 1) for seed in SEEDS))


def stop_in_a_ring(transport: SimulatedTransport) -> None:
    rank = transport.rank
    for hop in range(4):
        if rank == 2 and hop == 1:
            transport.stop_host()
        sent, received = (Message((rank + step) % 4, torch.ones(1), "hop") for step in (1, -1))
        transport.post([sent], [received]).wait()


def test_stopped_hosts_are_named_with_waiting_ranks() -> None:
    for seed in SEEDS:
        with pytest.raises(Deadlock) as caught:
            Simulation(4, seed, names=(1, 3, 4, 6), hosts=2).run(stop_in_a_ring)
        failure = caught.value
        assert failure.ranks("stopped") == (4, 6) and failure.ranks("blocked") == (1, 3), str(failure)
        assert failure.headline.startswith("host 1 stopped, ranks 4, 6; deadlock of 4 ranks: rank 1 waits for rank ")
        assert failure.headline.endswith(", which had stopped")
        assert "ranks 4, 6 stopped with host 1" in str(failure)


def test_stopped_hosts_are_named_after_answers_and_errors() -> None:
    def meet(transport: SimulatedTransport, raising: bool = False) -> None:
        transport.all_gather(b"x")
        if transport.rank == 2:
            transport.stop_host()
        if transport.rank == 1 and raising:
            raise KeyError("mine")

    headlines = set()
    for seed in SEEDS:
        with pytest.raises(Deadlock) as caught:
            Simulation(4, seed, hosts=2).run(meet)
        headlines.add(caught.value.headline)
        assert {0, 1} <= {*caught.value.ranks("answered")}
        with pytest.raises(RankError, match=r"rank 1 raised: KeyError: 'mine'[^$]*stopped with host 1"):
            Simulation(4, seed, hosts=2).run(partial(meet, raising=True))
    assert headlines == {"host 1 stopped, rank 2", "host 1 stopped, ranks 2, 3"}, "rank 3 may have answered before"


class StopsAt(RecordingTransport):
    """Stops the host of index 2 at its post of that number."""

    def __init__(self, inner: SimulatedTransport, number: int) -> None:
        super().__init__(inner)
        self.left = number if inner.rank == 2 else -1

    def post(self, sends: Any, receives: Any) -> Pending:
        if self.left == 0:
            self.inner.stop_host()  # type: ignore[attr-defined]
        self.left -= 1
        return super().post(sends, receives)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_stopped_hosts_give_no_numbers(exchange: str) -> None:
    group = (1, 3, 4, 6)
    case, posts = plain(7, group=group, tokens=16, exchange=exchange, hosts=2), 0
    while not isinstance(answer := simulate(stopped_at, case, (None, posts))[0], list):
        assert isinstance(answer, Deadlock) and answer.headline.startswith("host 1 stopped, rank")
        assert {4} <= {*answer.ranks("stopped")} <= {4, 6}, str(answer)
        posts += 1
    assert posts > 1, "at least one of the forward and one of the backward"


def stopped_at(transport: SimulatedTransport, case: Case, number: int) -> object:
    return observe(transport, case, repeat=False, record=lambda inner: StopsAt(inner, number))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ("ring", "direct", "all-to-all:8+direct", "ring+all-to-all:8"))
@pytest.mark.parametrize("pattern", (Pattern.dense(causal=True), Pattern.longnet((32, 128), (1, 4), 8, causal=True)))
def test_64_ranks_on_8_hosts_hold(pattern: Pattern, exchange: str) -> None:
    case = plain(64, tokens=128, heads=8, kv_heads=8, pattern=pattern, exchange=exchange, hosts=8)
    answers, _ = simulate(observe, case, (None,))
    assert isinstance(answers, list) and 0 < max(check(case, prepare(case), answers).values()) <= 1, str(answers)
