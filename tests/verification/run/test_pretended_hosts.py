"""Ranks on one machine that pretend the hosts of a Case."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from reference.head_groups import BY_HOST
from reference.pattern import Pattern
from ring.comm.transport import Transport
from ring.estimate import choice
from tests.support.plain_case import plain
from verification.case import Case
from verification.check.checks import costs
from verification.check.numbered_exchange import with_number
from verification.experiments import check_case
from verification.failures import WrongResult
from verification.faults.inject import shorten_timeout
from verification.run.backends import Backend, GlooBackend, SimBackend
from verification.run.pretended_hosts import pretending

pytestmark = pytest.mark.ranks
case = partial(plain, 4, tokens=13, order="zigzag", pattern=Pattern.dense(True), heads=4, kv_heads=2, kernel="auto")


@pytest.fixture(scope="module", params=[GlooBackend, SimBackend])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made: Backend = request.param()
    with closing(made):
        made.start(4)
        yield made


def hosts(transport: Transport, case: Case) -> tuple[tuple[int, ...], str | None]:
    """Task: return the hosts of the ranks, and what tells NCCL of them."""
    return transport.hosts, os.environ.get("NCCL_HOSTID")


def found(backend: Backend, given: Case) -> list[Any]:
    backend.submit(hosts, given)
    return backend.collect()


def test_ranks_are_on_the_hosts_of_their_case(backend: Backend) -> None:
    for changes, expected in (
        ({"hosts": 2}, (0, 0, 1, 1)),
        ({"hosts": 4}, (0, 1, 2, 3)),
        ({"hosts": 1}, (0, 0, 0, 0)),
        ({"hosts": 2}, (0, 0, 1, 1)),
        ({"hosts": 2, "group": (0, 3)}, (0, 1)),
        ({"hosts": 3, "group": (1, 2, 3)}, (0, 1, 2)),
        ({"hosts": 1, "group": (1, 2, 3)}, (0, 0, 0)),
    ):
        given = case(exchange="ring+direct", **changes)
        assert found(backend, given) == [(expected, None)] * len(given.ranks)


def meet_again(transport: Transport, case: Case) -> tuple[int, ...]:
    """Task: return the hosts of ranks that meet again for a fault."""
    shorten_timeout(transport)
    with pretending(case, transport.rank):
        return type(transport)(transport.group).hosts  # type: ignore[attr-defined, call-arg]


def test_ranks_that_meet_again_are_on_the_same_hosts() -> None:
    given = case(exchange="all-to-all+ring", hosts=2)
    with closing(GlooBackend()) as backend:
        backend.start(4)
        for _ in range(2):
            assert found(backend, given) == [((0, 0, 1, 1), None)] * 4
            backend.submit(meet_again, given)
            assert backend.collect() == [(0, 0, 1, 1)] * 4


@pytest.mark.parametrize("exchange", BY_HOST)
@pytest.mark.parametrize("again", ("alike", "group"))
def test_exchanges_by_hosts_hold(backend: Backend, exchange: str, again: str) -> None:
    sent = {}
    for number in (1, 2, 4):
        for seed in (number, 8):  # ranks that agree as on several machines, too
            given = case(exchange=exchange, hosts=number, again=again, seed=seed)
            check_case(backend, given)
            sent[costs(given).sent_forward.tobytes()] = number
    assert len(sent) == 3


def test_a_group_of_some_ranks(backend: Backend) -> None:
    check_case(backend, case(exchange="ring+direct", group=(0, 3), hosts=2))
    check_case(backend, case(exchange="all-to-all+gather", group=(1, 2, 3), hosts=3, again="group", seed=1))


@pytest.mark.parametrize("order", ["zigzag", "contiguous", "hilbert"])
def test_auto_is_judged_as_the_chosen_exchange(backend: Backend, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(exchange="auto", order=order, seed=100)
    check_case(backend, given)
    chosen = with_number(given).exchange
    other = next(exchange for exchange in ("direct", "all-to-all") if exchange != chosen)
    monkeypatch.setattr(choice, "candidates", lambda ranks: [other])  # in this process, not on the ranks
    with pytest.raises(WrongResult, match="^traffic: forward, "):
        check_case(backend, replace(given, batch=2))
