"""The ring's own code on simulated ranks: the Cases of real ones, many more ranks, and defects planted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reference.pattern import Pattern
from tests.support.plain_case import plain
from verification.case import Case
from verification.failures import BrokenContract, Deadlock, RankError, RankFailure, RankHang
from verification.run.backends import SimBackend, observe_on
from verification.runner import check_case

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def simulation() -> Iterator[SimBackend]:
    backend = SimBackend()
    backend.start(1)
    yield backend
    backend.close()


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather"))
@pytest.mark.parametrize("world", (1, 2, 3, 8, 40))
def test_cases_hold_on_one_backend_for_any_world(simulation: SimBackend, world: int, exchange: str) -> None:
    pattern = Pattern.longnet((4, 16), (1, 3), 2, causal=True)
    for case in (
        plain(world, exchange=exchange),
        plain(world, exchange=exchange, tokens=45, pattern=pattern, bucket=3),
    ):
        assert 0 < max(check_case(simulation, case).values()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ("ring", "direct", "gather"))
def test_256_ranks_forward_and_backward(simulation: SimBackend, exchange: str) -> None:
    """Segments of 8 to 32 tokens, two tokens on each rank, so that a key travels to up to 15 others; of `gather`, which
    sends all to all, a quarter of the ranks have tokens.
    """
    pattern = Pattern.longnet((8, 32), (1, 4), 2, causal=True)
    case = plain(256, tokens=64 if exchange == "gather" else 512, pattern=pattern, exchange=exchange)
    assert 0 < max(check_case(simulation, case).values()) <= 1


def test_a_group_is_part_of_the_world(simulation: SimBackend) -> None:
    seen = observe_on(simulation, plain(7, group=(1, 4, 6)))
    assert len(seen) == 3 and {peer for x in seen for peer, _, _ in x.sent_forward} == {0, 1, 2}


def test_the_same_case_gives_the_same_bits(simulation: SimBackend) -> None:
    case = plain(4, tokens=40, dtype="bfloat16")
    first, second = (observe_on(simulation, case) for _ in range(2))
    assert [x.out.tobytes() for x in first] == [x.out.tobytes() for x in second]


# --- defects, planted in the simulating process -----------------------------------------------------------------------


def plant_receive_first() -> None:
    """Nothing is sent before what is to come has come."""
    from ring.comm.transport import RecordingTransport

    def post(self: Any, sends: Any, receives: Any) -> Any:
        self.inner.post([], receives).wait()
        return self.inner.post(sends, [])

    RecordingTransport.post = post  # type: ignore[method-assign]


def plant_no_wait() -> None:
    """What a wait is for is taken to have happened."""
    from ring.comm.transport import RecordingTransport

    real = RecordingTransport.post

    class Done:
        def arrive(self) -> None: ...

        def wait(self) -> None: ...

    def post(self: Any, sends: Any, receives: Any) -> Any:
        real(self, sends, receives)
        return Done()

    RecordingTransport.post = post  # type: ignore[method-assign]


def plant_one_receive_buffer() -> None:
    """The receive buffer in use is also the one that the next step fills."""
    from ring.comm.exchange import Exchange

    real = Exchange._allocate
    known: dict[int, Any] = {}

    def allocate(self: Any, name: str, slots: int, dtype: Any) -> Any:
        if slots != self.plan.sizes.receive:
            return real(self, name, slots, dtype)
        if id(self) not in known:
            known.clear()
            known[id(self)] = real(self, name, slots, dtype)
        return known[id(self)]

    Exchange._allocate = allocate  # type: ignore[method-assign]


def plant_endless_loop() -> None:
    from verification.run import rank as execute

    def ring_attention(*args: Any, **kwargs: Any) -> Any:
        while True:
            pass

    execute.ring_attention = ring_attention


def plant_exception() -> None:
    from ring.compute.accumulator import Accumulator

    def merge(self: Any, *args: Any) -> None:
        raise ArithmeticError("nothing adds up")

    Accumulator.merge = merge  # type: ignore[method-assign, assignment]


def failure_of(prepare: Callable[[], None], case: Case, timeout: float = 10.0) -> RankFailure:
    backend = SimBackend(timeout, prepare)
    backend.start(case.world)
    try:
        with pytest.raises(RankFailure) as caught:
            check_case(backend, case)
    finally:
        backend.close()
    return caught.value


def test_a_deadlock_of_the_ring_is_reported_without_waiting() -> None:
    failure = failure_of(plant_receive_first, plain(8, tokens=16), timeout=600.0)
    assert isinstance(failure, Deadlock) and failure.headline.startswith("deadlock of 8 ranks: rank 0 waits for rank 7")
    assert "to send 'keys and values 1'" in str(failure) and "in arrivals" in str(failure), "the stack is there"
    for state in failure.states:
        assert "threading.py" not in state.trace and "scheduler.py" not in state.trace, state.trace


def test_a_missing_wait_is_named() -> None:
    failure = failure_of(plant_no_wait, plain(3))
    assert isinstance(failure, BrokenContract) and "keys and values 1" in failure.headline, failure.headline


def test_a_buffer_in_use_that_is_filled_again_is_named() -> None:
    failure = failure_of(plant_one_receive_buffer, plain(3, exchange="ring"))
    assert isinstance(failure, BrokenContract) and "shares bytes between the buffers" in failure.headline


@pytest.mark.slow
def test_an_endless_loop_is_a_hang() -> None:
    started = time.perf_counter()
    failure = failure_of(plant_endless_loop, plain(2), timeout=1.0)
    assert type(failure) is RankHang and "ring_attention" in str(failure)
    assert time.perf_counter() - started < 30


def test_an_exception_names_its_ranks() -> None:
    failure = failure_of(plant_exception, plain(2))
    assert isinstance(failure, RankError) and "ranks 0, 1 raised: ArithmeticError: nothing adds up" in failure.headline
