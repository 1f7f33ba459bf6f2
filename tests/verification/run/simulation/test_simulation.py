"""The simulation is adversarial, fair and repeatable; what breaks the transport's contract is named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from ring.comm.transport import Message
from tests.support.simulated_tasks import SEEDS, failure_of, neighbours, ring_pass
from verification.failures import BrokenContract, MismatchedMessages, RankError
from verification.run.simulation.scheduler import POLICIES
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("size", (2, 3, 8, 64))
def test_numbers_travel_round_the_ring(size: int) -> None:
    for seed in range(8):
        answers = Simulation(size, seed).run(lambda t: ring_pass(t, size - 1))
        assert answers == [[float((rank - 1 - hop) % size) for hop in range(size - 1)] for rank in range(size)]


def interleaving(seed: int) -> tuple[str, bool, list[int]]:
    order: list[int] = []

    def step(transport: SimulatedTransport) -> None:
        for _ in range(4):
            order.append(transport.rank)
            ring_pass(transport, 1)

    simulation = Simulation(4, seed)
    simulation.run(step)
    return simulation.scheduler.policy, simulation.buffered, order


def test_the_same_seed_gives_the_same_run_and_others_give_others() -> None:
    runs = [interleaving(seed) for seed in SEEDS]
    assert runs == [interleaving(seed) for seed in SEEDS]
    assert {policy for policy, _, _ in runs} == set(POLICIES) and {buffered for _, buffered, _ in runs} == {True, False}
    assert len({tuple(order) for _, _, order in runs}) > len(SEEDS) // 2


def test_messages_between_two_ranks_keep_their_order() -> None:
    def step(transport: SimulatedTransport) -> list[float]:
        tensors = [torch.full((2,), float(10 * transport.rank + i)) for i in range(3)]
        got = [torch.empty(2) for _ in range(3)]
        peer = 1 - transport.rank
        pending = [
            transport.post([Message(peer, x, "x")], [Message(peer, y, "x")]) for x, y in zip(tensors, got, strict=True)
        ]
        for one in reversed(pending):
            one.wait()
        return [float(y[0]) for y in got]

    for seed in SEEDS:
        assert Simulation(2, seed).run(step) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def test_what_has_arrived_can_be_used_while_sends_are_read() -> None:
    """Every rank receives into one buffer again and again, and sends from buffers that are waited for at the end."""

    def step(transport: SimulatedTransport) -> list[float]:
        after, before = neighbours(transport)
        into, seen, posted = torch.empty(2), [], []
        for number in range(3):
            sent = torch.full((2,), float(10 * transport.rank + number))
            posted.append(transport.post([Message(after, sent, "x")], [Message(before, into, "x")]))
            posted[-1].arrive()
            posted[-1].arrive()
            seen.append(float(into[0]))
            into.zero_()
        for pending in posted:
            pending.wait()
        return seen

    for seed in SEEDS:
        assert Simulation(2, seed).run(step) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def test_who_awaits_arrivals_does_not_wait_for_receivers() -> None:
    """Rank 1 receives what rank 0 sends only once a word of rank 0, given after the arrival, has come round."""

    def step(transport: SimulatedTransport) -> None:
        def word(peer: int) -> list[Message]:
            return [Message(peer, torch.ones(1), "word")]

        if transport.rank == 0:
            both = transport.post([Message(1, torch.ones(1), "keys")], [Message(1, torch.empty(1), "keys")])
            both.arrive()
            transport.post(word(2), []).wait()
            both.wait()
        elif transport.rank == 2:
            transport.post([], word(0)).wait()
            transport.post(word(1), []).wait()
        else:
            transport.post([Message(0, torch.ones(1), "keys")], []).wait()
            transport.post([], word(2)).wait()
            transport.post([], [Message(0, torch.empty(1), "keys")]).wait()

    for seed in SEEDS:
        Simulation(3, seed).run(step)


def test_all_ranks_meet() -> None:
    def step(transport: SimulatedTransport) -> tuple[bool, bool, list[bytes]]:
        same, other = transport.all_equal(b"8 bytes!"), transport.all_equal(bytes([transport.rank] * 8))
        return same, other, transport.all_gather(bytes([transport.rank]))

    for seed in SEEDS:
        assert Simulation(3, seed).run(step) == [(True, False, [b"\0", b"\1", b"\2"])] * 3
    assert Simulation(1, 0).run(step) == [(True, True, [b"\0"])]


# --- what breaks the contract -----------------------------------------------------------------------------------------


def one_batch(
    spoil: Callable[[torch.Tensor, torch.Tensor], object] | None, arrive: bool = False
) -> Callable[[SimulatedTransport], None]:
    """Ranks pass numbers round; rank 1 spoils its buffers before its wait, or never waits (None)."""

    def step(transport: SimulatedTransport) -> None:
        after, before = neighbours(transport)
        x, y = torch.ones(4), torch.empty(4)
        pending = transport.post([Message(after, x, "keys 1")], [Message(before, y, "keys 1")])
        if arrive:
            pending.arrive()
        if transport.rank == 1 and spoil is None:
            return
        if transport.rank == 1 and spoil is not None:
            spoil(x, y)
        pending.wait()

    return step


def share_a_buffer(transport: SimulatedTransport) -> None:
    after, before = neighbours(transport)
    x = torch.ones(8)
    pending = transport.post([Message(after, x[:5], "keys 1")], [Message(before, x[3:], "keys 1")])
    pending.wait()


def share_with_an_older_batch(transport: SimulatedTransport) -> None:
    after, before = neighbours(transport)
    x, y = torch.ones(4), torch.empty(4)
    first = transport.post([Message(after, x, "keys 1")], [Message(before, y, "keys 1")])
    second = transport.post([Message(after, torch.ones(4), "keys 2")], [Message(before, x, "keys 2")])
    first.wait()
    second.wait()


KEYS = "'keys 1' (16 bytes of float32)"
SHARED = "shares bytes between the buffers of the send of 'keys 1' and the receive of"
CHANGED = f"rank 1 changed the send buffer of {KEYS} to rank 2 before its wait was over"
NEVER = f"rank 1 never waited for batch 0: send of {KEYS} to rank 2, receive of {KEYS} from rank 0"
BROKEN: dict[str, tuple[Callable[[SimulatedTransport], None], str]] = {
    "send buffer": (one_batch(lambda x, y: x.zero_()), CHANGED),
    "send buffer on arrival": (one_batch(lambda x, y: x.zero_(), arrive=True), CHANGED),
    "receive buffer": (
        one_batch(lambda x, y: y.fill_(7.0)),
        f"rank 1 wrote to the receive buffer of {KEYS} from rank 0 before its wait was over",
    ),
    "no wait": (one_batch(None), NEVER),
    "arrival and no wait": (one_batch(None, arrive=True), NEVER),
    "one buffer": (
        share_a_buffer,
        f"{SHARED} 'keys 1'",
    ),
    "an older batch's buffer": (
        share_with_an_older_batch,
        f"{SHARED} 'keys 2'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_contract_is_named_whatever_the_schedule(name: str) -> None:
    function, said = BROKEN[name]
    for seed in SEEDS:
        failure = failure_of(3, seed, function)
        assert type(failure) is BrokenContract and said in str(failure), str(failure)


def test_who_reads_before_its_wait_gets_wrong_numbers_on_some_schedule() -> None:
    def step(transport: SimulatedTransport) -> float:
        after, before = neighbours(transport)
        y = torch.zeros(4)
        pending = transport.post([Message(after, torch.ones(4), "k")], [Message(before, y, "k")])
        early = float(y.sum())
        pending.wait()
        return early

    seen = [Simulation(3, seed).run(step) for seed in SEEDS]
    assert any(math.isnan(value) for answers in seen for value in answers), "NaN: the buffer had been scribbled over"


@pytest.mark.parametrize(
    ("dtype", "length", "label"), [(torch.float32, 3, "k"), (torch.float32, 4, "other"), (torch.int32, 4, "k")]
)
def test_messages_that_do_not_fit_are_named(dtype: torch.dtype, length: int, label: str) -> None:
    def step(transport: SimulatedTransport) -> None:
        after, before = neighbours(transport)
        wrong = Message(after, torch.ones(length, dtype=dtype), label)
        right = Message(after, torch.ones(4), "k")
        transport.post([right if transport.rank else wrong], [Message(before, torch.empty(4), "k")]).wait()

    for seed in SEEDS:
        failure = failure_of(3, seed, step)
        assert type(failure) is MismatchedMessages and "rank 0 sends" in str(failure) and "rank 1" in str(failure)


def test_meetings_of_two_kinds_are_named() -> None:
    failure = failure_of(3, 0, lambda t: t.all_equal(b"12345678") if t.rank else t.all_gather(b"12345678"))
    assert type(failure) is MismatchedMessages and "calls" in str(failure)


@pytest.mark.parametrize(
    ("peer", "tensor", "said"),
    [
        *((peer, torch.ones(1), f"got {peer} on rank 0") for peer in (-1, 0, 3)),
        (1, torch.ones(4, 4).t()[1:], "must be contiguous"),
    ],
)
def test_a_message_that_the_contract_forbids_is_refused(peer: int, tensor: torch.Tensor, said: str) -> None:
    failure = failure_of(3, 0, lambda t: t.post([Message(peer, tensor, "k")], []).wait() if t.rank == 0 else None)
    assert type(failure) is RankError and said in failure.headline
