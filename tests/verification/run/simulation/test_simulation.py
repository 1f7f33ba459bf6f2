"""The simulation is adversarial, fair and repeatable; broken contracts and deadlocks are named, the ring's own too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from reference.pattern import Pattern
from ring.comm.transport import Message, Outgoing, Pending
from tests.support.backends import shared
from tests.support.plain_case import plain
from tests.support.planted import plant, plant_receive_first
from verification.experiments import EXAMPLES, LARGER_ERRORS, check_case
from verification.failures import BrokenContract, Deadlock, MismatchedMessages, RankError, RankFailure, RankHang
from verification.run.backends import SimBackend
from verification.run.simulation.scheduler import POLICIES
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation
from verification.search.experiment import Experiment

pytestmark = pytest.mark.ranks

SEEDS = range(40)  # every policy, both kinds of sends, early and late deliveries
Step = Callable[[SimulatedTransport], Any]


def keys(peer: int, label: str = "keys 1", size: int = 4) -> Message:
    return Message(peer, torch.ones(size), label)


def pass_on(transport: SimulatedTransport, x: torch.Tensor, y: torch.Tensor, label: str = "keys 1") -> Pending:
    """x to the next rank, y from the one before."""
    p, rank = transport.world_size, transport.rank
    return transport.post([Message((rank + 1) % p, x, label)], [Message((rank - 1) % p, y, label)])


def ring_pass(transport: SimulatedTransport, hops: int) -> list[float]:
    """Every rank's number travels round; two buffers in turn, as `ring.comm.exchange` has them."""
    buffers, seen = [torch.full((3,), float(transport.rank)), torch.empty(3)], []
    for hop in range(hops):
        here, there = buffers[hop % 2], buffers[1 - hop % 2]
        pass_on(transport, here, there, f"hop {hop}").wait()
        seen.append(float(there[0]))
    return seen


def failure_of(size: int, seed: int, step: Step) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        Simulation(size, seed).run(step)
    return caught.value


def test_runs_repeat_with_their_seed() -> None:
    def interleaving(seed: int) -> tuple[str, bool, tuple[int, ...]]:
        order: list[int] = []

        def step(transport: SimulatedTransport) -> None:
            for _ in range(4):
                order.append(transport.rank)
                ring_pass(transport, 1)

        simulation = Simulation(4, seed)
        simulation.run(step)
        return simulation.scheduler.policy, simulation.buffered, tuple(order)

    policies, buffered, orders = zip(*map(interleaving, SEEDS), strict=True)
    assert [*zip(policies, buffered, orders, strict=True)] == [*map(interleaving, SEEDS)]
    assert set(policies) == set(POLICIES) and set(buffered) == {True, False} and len(set(orders)) > len(SEEDS) // 2


def one_batch(spoil: Callable[[torch.Tensor, torch.Tensor], object] | None, arrive: bool = False) -> Step:
    """Ranks pass numbers round; rank 1 spoils its buffers before its wait, or never waits (None)."""

    def step(transport: SimulatedTransport) -> None:
        x, y = torch.ones(4), torch.empty(4)
        pending = pass_on(transport, x, y)
        if arrive:
            pending.arrive()
        if transport.rank == 1 and spoil is None:
            return
        if transport.rank == 1 and spoil is not None:
            spoil(x, y)
        pending.wait()

    return step


def share_a_buffer(transport: SimulatedTransport) -> None:
    x = torch.ones(8)
    pass_on(transport, x[:5], x[3:]).wait()


def share_with_an_older_batch(transport: SimulatedTransport) -> None:
    x, y = torch.ones(4), torch.empty(4)
    for pending in [pass_on(transport, x, y), pass_on(transport, torch.ones(4), x, "keys 2")]:
        pending.wait()


KEYS = "'keys 1' (16 bytes of float32)"
SHARED = "shares bytes between the buffers of the send of 'keys 1' and the receive of"
CHANGED = f"rank 1 changed the send buffer of {KEYS} to rank 2 before its wait was over"
WROTE = f"rank 1 wrote to the receive buffer of {KEYS} from rank 0 before its wait was over"
NEVER = f"rank 1 never waited for batch 0: send of {KEYS} to rank 2, receive of {KEYS} from rank 0"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (one_batch(lambda x, y: x.zero_()), CHANGED),
        (one_batch(lambda x, y: x.zero_(), arrive=True), CHANGED),
        (one_batch(lambda x, y: y.fill_(7.0)), WROTE),
        (one_batch(None), NEVER),
        (one_batch(None, arrive=True), NEVER),
        (share_a_buffer, f"{SHARED} 'keys 1'"),
        (share_with_an_older_batch, f"{SHARED} 'keys 2'"),
    ],
)
def test_broken_contracts_are_named_on_every_schedule(step: Step, said: str) -> None:
    for seed in SEEDS:
        failure = failure_of(3, seed, step)
        assert type(failure) is BrokenContract and said in str(failure), str(failure)


@pytest.mark.parametrize(
    "wrong", [(torch.ones(3), "k"), (torch.ones(4), "other"), (torch.ones(4, dtype=torch.int32), "k")]
)
def test_messages_and_meetings_that_do_not_fit_are_named(wrong: tuple[torch.Tensor, str]) -> None:
    def step(transport: SimulatedTransport) -> None:
        after, before = (transport.rank + 1) % 3, (transport.rank - 1) % 3
        sent = keys(after, "k") if transport.rank else Message(after, wrong[0].clone(), wrong[1])
        transport.post([sent], [keys(before, "k")]).wait()

    for seed in SEEDS:
        failure = failure_of(3, seed, step)
        assert type(failure) is MismatchedMessages and "rank 0 sends" in str(failure) and "rank 1" in str(failure)
    failure = failure_of(3, 0, lambda t: t.all_equal(b"12345678") if t.rank else t.all_gather(b"12345678"))
    assert type(failure) is MismatchedMessages and "calls" in str(failure)


@pytest.mark.parametrize("message", [*map(keys, (-1, 0, 3)), Message(1, torch.ones(4, 4).t()[1:], "k")])
def test_a_message_that_the_contract_forbids_is_refused(message: Message) -> None:
    failure = failure_of(3, 0, lambda t: t.post([message], []).wait() if t.rank == 0 else None)
    said = "must be contiguous" if message.peer == 1 else f"got {message.peer} on rank 0"
    assert type(failure) is RankError and said in failure.headline


def told(*ranges: tuple[int, int], size: int = 32) -> Step:
    """Every rank sends bytes 16 to 32 of its send buffer to the next, and tells the others of these ranges instead."""

    def step(transport: SimulatedTransport) -> None:
        after, cpu = (transport.rank + 1) % 3, torch.device("cpu")
        transport.prepare("call", lambda: [Outgoing("send buffer", size, "keys 1", after, *one) for one in ranges])
        send_buffer = transport.empty("send buffer", (8,), torch.float32, cpu)
        got = transport.empty("receive buffer", (4,), torch.float32, cpu)
        pass_on(transport, send_buffer[4:].fill_(1.0), got).wait()

    return step


def test_messages_come_from_their_declared_rank() -> None:
    Simulation(3, 1).run(told((16, 32), (0, 16)))  # told of more
    for step, said in (
        (told((0, 16)), "from byte 16 of 'send buffer'; it announced bytes 0 to 16"),
        (told((16, 24)), "from byte 16 of 'send buffer'; it announced bytes 16 to 24"),
        (told(), "which its call did not announce"),
        (told((16, 32), size=64), "made the buffer 'send buffer' of 32 bytes; it announced 64"),
        (lambda transport: transport.prepare(transport.rank, list), "prepares another kind of call"),
    ):
        failure = failure_of(3, 1, step)
        assert type(failure) is BrokenContract and said in str(failure)


def blocking_ring(transport: SimulatedTransport) -> None:
    p, rank = transport.world_size, transport.rank
    transport.post([], [keys((rank - 1) % p)]).wait()
    transport.post([keys((rank + 1) % p)], []).wait()


def test_deadlocks_name_waiting_ranks() -> None:
    failure = failure_of(8, 1, blocking_ring)
    assert type(failure) is Deadlock and failure.kind == "rank hang" and failure.ranks("blocked") == tuple(range(8))
    ring = " waits for ".join(f"rank {r}" for r in (0, 7, 6, 5, 4, 3, 2, 1, 0))
    assert failure.headline == f"deadlock of 8 ranks: {ring}"
    text = str(failure)
    assert f"rank 3 waited for rank 2 to send {KEYS}, at" in text and "blocking_ring" in text
    for state in failure.states:
        assert state.trace.lstrip().startswith(f'File "{__file__}"'), "stacks begin with the rank's own function"
    with pytest.raises(Deadlock, match="deadlock of 2 ranks: rank 2 waits for rank 5 waits for rank 2"):
        Simulation(2, 0, names=(2, 5)).run(blocking_ring)


def test_stacks_come_without_frames_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("sys._current_frames")  # it can deadlock before Python 3.11.9 (python/cpython#106883)
    assert "blocking_ring" in str(failure_of(3, 1, blocking_ring))


def test_ranks_that_leave_early_deadlock_the_others() -> None:
    for seed in SEEDS:
        failure = failure_of(3, seed, lambda t: ring_pass(t, 1) if t.rank != 1 else None)
        assert type(failure) is Deadlock and 1 in failure.ranks("answered") and 2 in failure.ranks("blocked")
        assert failure.headline.endswith("waits for rank 1, which had answered"), failure.headline
    failure = failure_of(3, 0, lambda t: t.all_gather(b"x") if t.rank else None)
    assert type(failure) is Deadlock and "waited for rank 0 to call all_gather" in str(failure)


def test_unreceived_messages_are_named() -> None:
    failures = [failure_of(2, seed, lambda t: t.post([keys(1)], []).wait() if t.rank == 0 else None) for seed in SEEDS]
    assert all(KEYS in str(failure) for failure in failures)
    assert {type(failure) for failure in failures} == {Deadlock, MismatchedMessages}


def test_exceptions_differ_from_waiting() -> None:
    def step(transport: SimulatedTransport) -> None:
        if transport.rank == 1:
            raise KeyError("mine")
        ring_pass(transport, 1)

    for seed in SEEDS:
        failure = failure_of(3, seed, step)
        assert type(failure) is RankError and "rank 1 raised: KeyError: 'mine'" in failure.headline
        assert failure.ranks("raised") == (1,) and 1 <= len(failure.ranks("blocked")) <= 2


@pytest.mark.parametrize("swallow", (False, True))
@pytest.mark.parametrize(
    "say",
    [
        lambda transport, peer: None,
        lambda transport, peer: transport.post([keys(peer)], []),
        lambda transport, peer: transport.post([keys(peer)], []).wait(),
        lambda transport, peer: transport.all_equal(b"8 bytes!"),
        lambda transport, peer: transport.all_gather(b"x"),
    ],
)
def test_ranks_that_swallow_their_end_are_stuck(
    say: Callable[[SimulatedTransport, int], object], swallow: bool
) -> None:
    def step(transport: SimulatedTransport) -> None:
        peer = 1 - transport.rank
        try:
            transport.post([], [keys(peer)]).wait()
        except BaseException:  # as broad as it gets
            say(transport, peer)
            if not swallow:
                raise

    for seed in SEEDS:
        assert type(failure_of(2, seed, step)) is Deadlock


backend = shared(SimBackend, 1)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
@pytest.mark.parametrize("world", (1, 3, 40))
def test_cases_hold_on_one_backend_for_any_world(backend: SimBackend, world: int, exchange: str) -> None:
    longnet = {"tokens": 45, "pattern": Pattern.longnet((4, 16), (1, 3), 2, causal=True), "bucket": 3}
    for changes in ({}, longnet):
        assert 0 < max(check_case(backend, plain(world, exchange=exchange, **changes)).values()) <= 1


@pytest.mark.parametrize("experiment", [EXAMPLES, LARGER_ERRORS], ids=lambda experiment: experiment.name)
def test_chunks_of_slices_hold(backend: SimBackend, experiment: Experiment) -> None:
    slices = Pattern.slices([((0, 50), (0, 40), "causal"), ((30, 96), (40, 96), (-30, 12))])
    experiment.check(backend, plain(3, tokens=96, pattern=slices, order="dealt chunks", same_bits=32))


def plant_endless_loop() -> None:
    def loop_in_call(*_: Any) -> Any:
        while True:
            pass

    plant(loop_in_call)


def test_a_defect_of_the_ring_is_named() -> None:
    """A deadlock without waiting for the timeout."""
    circle = r"^deadlock of 8 ranks: rank 0 waits for rank 7[^$]*to send 'keys and values 1'[^$]*in arrivals"
    with closing(SimBackend(600.0, plant_receive_first)) as backend, pytest.raises(Deadlock, match=circle) as caught:
        backend.start(8)
        check_case(backend, plain(8, tokens=16))
    assert "threading.py" not in str(caught.value) and "scheduler.py" not in str(caught.value)
    with closing(SimBackend(1.0, plant_endless_loop)) as backend, pytest.raises(RankHang, match="loop_in_call"):
        backend.start(2)
        check_case(backend, plain(2))
