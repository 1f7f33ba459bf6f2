"""A simulation that cannot go on, or in which a rank raises, says so at once: who waits for whom, and where."""

from __future__ import annotations

import time

import pytest
import torch

from ring.comm.transport import Message
from tests.support.simulated_tasks import SEEDS, failure_of, neighbours, ring_pass
from verification.failures import Deadlock, MismatchedMessages, RankError
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks


def blocking_ring(transport: SimulatedTransport) -> None:
    after, before = neighbours(transport)
    transport.post([], [Message(before, torch.empty(4), "keys 1")]).wait()
    transport.post([Message(after, torch.ones(4), "keys 1")], []).wait()


def test_a_deadlock_is_found_at_once_and_says_who_waits_for_whom() -> None:
    failure_of(8, 0, blocking_ring)  # what Python imports on the way is not measured
    started = time.perf_counter()
    failure = failure_of(8, 1, blocking_ring)
    spent = time.perf_counter() - started
    assert type(failure) is Deadlock and failure.kind == "rank hang" and failure.ranks("blocked") == tuple(range(8))
    ring = " waits for ".join(f"rank {r}" for r in (0, 7, 6, 5, 4, 3, 2, 1, 0))
    assert failure.headline == f"deadlock of 8 ranks: {ring}"
    text = str(failure)
    assert "rank 3 waited for rank 2 to send 'keys 1' (16 bytes of float32), at" in text and "blocking_ring" in text
    for state in failure.states:
        assert state.trace.lstrip().startswith(f'File "{__file__}"'), "stacks begin with the rank's own function"
    print(f"deadlock of 8 ranks reported in {1000 * spent:.1f} ms")


def test_a_rank_that_leaves_early_leaves_the_others_waiting_for_it() -> None:
    def step(transport: SimulatedTransport) -> None:
        if transport.rank != 1:
            ring_pass(transport, 1)

    for seed in SEEDS:
        failure = failure_of(3, seed, step)
        assert type(failure) is Deadlock and 1 in failure.ranks("answered") and 2 in failure.ranks("blocked")
        assert failure.headline.endswith("waits for rank 1, which had answered"), failure.headline


def test_a_message_that_nobody_takes_is_named_even_if_its_send_was_buffered() -> None:
    def step(transport: SimulatedTransport) -> None:
        if transport.rank == 0:
            transport.post([Message(1, torch.ones(4), "keys 1")], []).wait()

    kinds = set()
    for seed in SEEDS:
        failure = failure_of(2, seed, step)
        kinds.add(type(failure))
        assert "'keys 1' (16 bytes of float32)" in str(failure)
    assert kinds == {Deadlock, MismatchedMessages}


def test_a_rank_that_does_not_come_to_a_meeting_is_named() -> None:
    failure = failure_of(3, 0, lambda t: t.all_gather(b"x") if t.rank else None)
    assert type(failure) is Deadlock and "waited for rank 0 to call all_gather" in str(failure)


def test_an_exception_of_one_rank_is_told_apart_from_who_waits_for_it() -> None:
    def step(transport: SimulatedTransport) -> None:
        if transport.rank == 1:
            raise KeyError("mine")
        ring_pass(transport, 1)

    for seed in SEEDS:
        failure = failure_of(3, seed, step)
        assert type(failure) is RankError and "rank 1 raised: KeyError: 'mine'" in failure.headline
        assert failure.ranks("raised") == (1,) and 1 <= len(failure.ranks("blocked")) <= 2


def test_names_are_those_of_the_group() -> None:
    with pytest.raises(Deadlock, match="deadlock of 2 ranks: rank 2 waits for rank 5 waits for rank 2"):
        Simulation(2, 0, names=(2, 5)).run(blocking_ring)


@pytest.mark.parametrize("last", ("post", "wait", "all_equal", "all_gather"))
def test_ranks_that_talk_while_they_clean_up_are_stuck_all_the_same(last: str) -> None:
    def step(transport: SimulatedTransport) -> None:
        peer = 1 - transport.rank
        try:
            transport.post([], [Message(peer, torch.empty(1), "keys")]).wait()
        finally:
            if last == "all_equal":
                transport.all_equal(b"8 bytes!")
            elif last == "all_gather":
                transport.all_gather(b"x")
            else:
                pending = transport.post([Message(peer, torch.ones(1), "keys")], [])
                if last == "wait":
                    pending.wait()

    for seed in SEEDS:
        assert type(failure_of(2, seed, step)) is Deadlock


def test_a_rank_that_swallows_its_end_does_not_hide_the_deadlock() -> None:
    def step(transport: SimulatedTransport) -> str:
        try:
            blocking_ring(transport)
        except BaseException:  # as broad as it gets
            return "never mind"
        return "fine"

    for seed in SEEDS:
        assert type(failure_of(3, seed, step)) is Deadlock
