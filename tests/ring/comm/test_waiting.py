"""Ranks that do not come are named, ranks that come late are no error, and an unreachable store ends nothing."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ring.comm import waiting
from ring.comm.host_memory import _StoreGather
from ring.comm.transport import Absent
from ring.comm.waiting import done_by_event, done_by_work, timeout_of, wait_for_all
from tests.support import waiting_tasks
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3, preload=("torch", "torch._dynamo", waiting_tasks.__name__)) as ranks:
        yield ranks


def test_a_rank_that_is_late_is_no_error_and_leaves_no_mark(pool: Pool) -> None:
    """It comes when the others have left their marks, but before the group's timeout."""
    for said, marks in pool.run(waiting_tasks.one_rank_is_late):
        assert said == "fine" and marks == []


@pytest.mark.parametrize("absent", ((2,), (0,), (0, 1)))
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_ranks_that_never_come_are_named_after_the_timeout(pool: Pool, direction: str, absent: tuple[int, ...]) -> None:
    name = "rank 2" if absent == (2,) else "rank 0" if absent == (0,) else "ranks 0, 1"
    for rank, (said, seconds) in enumerate(pool.run(waiting_tasks.some_never_come, direction, absent)):
        if rank in absent:
            assert said == "stayed away"
        else:
            assert said.startswith(f"RuntimeError: {name} did not come to the {direction} of call 2 ('layer 3'): ")
            assert waiting_tasks.TIMEOUT <= seconds < waiting_tasks.TIMEOUT + 10


def test_a_rank_that_comes_too_late_is_told_so(pool: Pool) -> None:
    first, late, third = pool.run(waiting_tasks.one_comes_too_late)
    for said in (first, third):
        assert said.startswith("RuntimeError: rank 1 did not come to the forward of call 1: ")
    assert late.startswith("RuntimeError: not all ranks came in time to the forward of call 1: ")


@pytest.mark.slow
@pytest.mark.parametrize("killed", (1, 2))
def test_a_rank_that_was_killed_is_named(tmp_path: Path, killed: int) -> None:
    assert exit_codes(tmp_path, killed, False) == [-9 if rank == killed else 0 for rank in range(3)]
    for rank in {0, 1, 2} - {killed}:
        said = (tmp_path / f"said {rank}").read_text()
        assert said.startswith(f"rank {killed} did not come to the forward of call 2: ")


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_middle_of_a_call_is_named(tmp_path: Path) -> None:
    """By who waits for its message. The others wait for ranks that have ended with an error of their own."""
    assert exit_codes(tmp_path, 1, True) == [0, -9, 0]
    said = (tmp_path / "said 2").read_text()
    assert re.match(r"the message 'keys and values \d' from rank 1 did not come: .+$", said)


@pytest.mark.slow
def test_a_message_over_a_broken_connection_is_named(tmp_path: Path) -> None:
    """The first one fails in its wait, later ones where they are posted."""
    assert ended([(waiting_tasks.one_ends_after_a_message, (rank, str(tmp_path))) for rank in range(2)]) == [0, -9]
    *received, sent = (tmp_path / "said").read_text().splitlines()
    assert len(received) == 3
    for said in received:
        assert said.startswith("RuntimeError: the message 'a message' from rank 1 did not come: ")
    assert sent.startswith("RuntimeError: rank 1 did not take the message 'a message': ")


def exit_codes(folder: Path, killed: int, agreed: bool) -> list[int | None]:
    return ended([(waiting_tasks.one_dies, (rank, killed, str(folder), agreed)) for rank in range(3)])


def ended(tasks: Sequence[tuple[Callable[..., None], tuple[object, ...]]]) -> list[int | None]:
    """The exit status of each, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=function, args=arguments) for function, arguments in tasks]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("exchange", ("direct", "ring"))
def test_nothing_is_called_after_a_call_that_ended_in_the_middle(pool: Pool, exchange: str) -> None:
    """On the rank itself at once; the others wait in that call, or for the next one, for the group's timeout.

    One that waits for the next call may find that the other, which still waited in this one, did not come either.
    """
    said = pool.run(waiting_tasks.one_ends_in_the_middle, exchange)
    assert said[1] == [
        "MemoryError: no room\nfor anything",
        (
            "RuntimeError: nothing can be called on this group any more, since on this rank the forward of call 2 "
            "('layer 3') ended in the middle: MemoryError: no room"
        ),
    ]
    for rank in (0, 2):
        first, second = said[rank]
        if first == "fine":  # it had all messages
            both = f"ranks {min(1, 2 - rank)}, {max(1, 2 - rank)}"
            assert re.match(
                rf"RuntimeError: (rank 1|{both}) did not come to the forward of call 3 \('layer 4'\): ", second
            )
        else:
            assert first.startswith("RuntimeError: ") and "the message 'keys and values " in first
            assert second.startswith("RuntimeError: nothing can be called on this group any more, since on this rank")


# --- one process ------------------------------------------------------------------------------------------------------


class Lost(dist.Store):
    """Is there when the group is made, and gone later."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.gone = dist.HashStore(), False

    def _there(self) -> dist.Store:
        if self.gone:
            raise dist.DistNetworkError("the store is gone")
        return self.kept

    def set(self, key: str, value: Any) -> None:
        self._there().set(key, value)

    def get(self, key: str) -> bytes:
        return self._there().get(key)

    def add(self, key: str, value: int) -> int:
        return self._there().add(key, value)

    def wait(self, *arguments: Any) -> None:
        self._there().wait(*arguments)

    def check(self, keys: list[str]) -> bool:
        return self._there().check(keys)

    def delete_key(self, key: str) -> bool:
        return self._there().delete_key(key)


@pytest.fixture
def store() -> Iterator[Lost]:
    """Of a group of one rank."""
    made = Lost()
    dist.init_process_group("gloo", store=made, rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield made
    dist.destroy_process_group()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "GRACE", 0.01)


def late(seconds: float | None) -> bool:
    return seconds is None


def never(seconds: float | None) -> bool:
    if seconds is None:
        raise RuntimeError("connection reset\nand much more")
    return False


def test_a_store_that_is_gone_does_not_end_what_gets_done(store: Lost) -> None:
    store.gone = True
    wait_for_all(late, world(), 1)


def test_without_a_store_nobody_can_tell_who_is_missing(store: Lost) -> None:
    store.gone = True
    with pytest.raises(Absent, match="some rank did not come to where the others wait: connection reset$") as caught:
        wait_for_all(never, world(), 1)
    assert caught.value.ranks is None


def test_a_question_by_a_store_that_is_gone_says_why(store: Lost) -> None:
    store.gone = True
    asked = _StoreGather(store, 0, 2, timedelta(seconds=1))
    with pytest.raises(Absent, match="some rank did not come .*: the store is gone$"):
        asked.gather("the file", "mine")


def test_what_is_done_soon_needs_no_store(store: Lost) -> None:
    store.gone = True
    wait_for_all(lambda seconds: True, world(), 1)


def test_a_wait_whose_time_is_over_names_the_timeout(store: Lost) -> None:
    with pytest.raises(Absent, match="not all ranks came in time .*: the group's timeout of 0:01:17 is over"):
        wait_for_all(lambda seconds: False, world(), 1)
    assert timeout_of(world()) == timedelta(seconds=77)


class Work:
    """Waits are answered in turn; an exception is raised."""

    def __init__(self, *answers: Any, completed: bool) -> None:
        self.answers, self.completed = list(answers), completed

    def wait(self, timeout: timedelta | None = None) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    def is_completed(self) -> bool:
        return self.completed


OVER = RuntimeError("Operation timed out!")


def test_a_work_that_takes_longer_is_not_done() -> None:
    done = done_by_work(Work(OVER, True, completed=False))  # type: ignore[arg-type]
    assert not done(1.0) and done(None)


def test_a_work_that_ends_while_its_wait_does_is_done() -> None:
    assert done_by_work(Work(OVER, True, completed=True))(1.0)  # type: ignore[arg-type]


def test_a_work_that_failed_raises() -> None:
    failed = RuntimeError("connection reset")
    with pytest.raises(RuntimeError, match="connection reset"):
        done_by_work(Work(failed, failed, completed=True))(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("after", "seconds", "done"), [(0, 1.0, True), (3, 1.0, True), (10**9, 0.01, False)])
def test_the_host_looks_at_an_event_and_does_not_wait_in_it(after: int, seconds: float, done: bool) -> None:
    seen = iter(range(10**9 + 1))
    event: Any = SimpleNamespace(query=lambda: next(seen) >= after)
    assert done_by_event(event, timedelta(days=1))(seconds) is done


def test_an_event_is_given_up_before_nccl_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """At nine tenths of the timeout, by a clock that moves on by a second at each look."""
    now = iter(range(1000, 2000))
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda seconds: None))
    event: Any = SimpleNamespace(query=lambda: False)
    assert not done_by_event(event, timedelta(seconds=100))(None)
    assert next(now) == 1000 + 90 + 2  # the look that was beyond it was the last
