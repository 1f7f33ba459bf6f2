"""The ring's own code on simulated ranks: the Cases of real ones, many more ranks, and defects planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from reference.pattern import Pattern
from ring.comm.exchange import Exchange
from ring.comm.transport import RecordingTransport
from tests.support.plain_case import plain
from tests.support.planted import plant, plant_receive_first
from verification.case import Case
from verification.failures import BrokenContract, Deadlock, RankFailure, RankHang
from verification.run.backends import SimBackend, observe_on
from verification.runner import check_case

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def simulation() -> Iterator[SimBackend]:
    with closing(SimBackend()) as backend:
        backend.start(1)
        yield backend


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather"))
@pytest.mark.parametrize("world", (1, 3, 40))
def test_cases_hold_on_one_backend_for_any_world(simulation: SimBackend, world: int, exchange: str) -> None:
    longnet = {"tokens": 45, "pattern": Pattern.longnet((4, 16), (1, 3), 2, causal=True), "bucket": 3}
    for changes in ({}, longnet):
        assert 0 < max(check_case(simulation, plain(world, exchange=exchange, **changes)).values()) <= 1


def test_a_group_is_part_of_the_world(simulation: SimBackend) -> None:
    seen = observe_on(simulation, plain(7, group=(1, 4, 6)))
    assert len(seen) == 3 and {peer for x in seen for peer, _, _ in x.sent_forward} == {0, 1, 2}


# --- defects, planted in the simulating process -----------------------------------------------------------------------


class Done:
    def arrive(self) -> None: ...

    def wait(self) -> None: ...


def plant_no_wait() -> None:
    """What a wait is for is taken to have happened."""
    real = RecordingTransport.post

    def post(self: Any, sends: Any, receives: Any) -> Any:
        real(self, sends, receives)
        return Done()

    RecordingTransport.post = post  # type: ignore[method-assign]


def plant_one_receive_buffer() -> None:
    """The receive buffer in use is also the one that the next step fills."""
    real, known = Exchange._allocate, dict[int, Any]()

    def allocate(self: Any, name: str, slots: int, dtype: Any) -> Any:
        if slots != self.plan.sizes.receive:
            return real(self, name, slots, dtype)
        if id(self) not in known:
            known.clear()
            known[id(self)] = real(self, name, slots, dtype)
        return known[id(self)]

    Exchange._allocate = allocate  # type: ignore[method-assign]


def plant_endless_loop() -> None:
    def loop_in_call(*_: Any) -> Any:
        while True:
            pass

    plant(loop_in_call)


@pytest.mark.parametrize(
    ("plant", "case", "kind", "said"),
    [
        (plant_receive_first, plain(8, tokens=16), Deadlock,
         r"^deadlock of 8 ranks: rank 0 waits for rank 7[^$]*to send 'keys and values 1'[^$]*in arrivals"),
        (plant_no_wait, plain(3), BrokenContract, "keys and values 1"),
        (plant_one_receive_buffer, plain(3), BrokenContract, "shares bytes between the buffers"),
        (plant_endless_loop, plain(2), RankHang, "loop_in_call"),
    ],
)  # fmt: skip
def test_a_defect_of_the_ring_is_named(
    plant: Callable[[], None], case: Case, kind: type[RankFailure], said: str
) -> None:
    """A deadlock without waiting for the timeout."""
    with closing(SimBackend(1.0 if kind is RankHang else 600.0, plant)) as backend:
        backend.start(case.world)
        with pytest.raises(kind, match=said) as caught:
            check_case(backend, case)
    assert type(caught.value) is kind
    if kind is Deadlock:
        for state in caught.value.states:
            assert "threading.py" not in state.trace and "scheduler.py" not in state.trace, state.trace
