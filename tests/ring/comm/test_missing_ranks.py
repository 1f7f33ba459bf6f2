"""Ranks that do not come are named, ranks that come late are no error, and an unreachable store ends nothing."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from ring import Layout, Pattern, ring_attention
from ring.comm import missing_ranks
from ring.comm.missing_ranks import SLOW, done_by_event, done_by_work, wait_for_all
from ring.comm.process_group import _tell
from ring.comm.shared_page import _StoreGather
from ring.comm.transport import MissingRanks
from ring.compute import kernel_calls
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

TIMEOUT = 3.5  # seconds, of a group: no whole number, and longer than SLOW, so that ranks leave their marks


def new_group(seconds: float = TIMEOUT) -> dist.ProcessGroup:
    dist.barrier()  # its timeout holds for the making of it, too
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def end(group: dist.ProcessGroup) -> None:
    """End the groups of all ranks together: gloo's other ends would see a broken connection."""
    dist.barrier()
    dist.destroy_process_group(group)


def forward(
    group: dist.ProcessGroup | None, name: str | None = None, exchange: str = "ring"
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (torch.ones(1, 2, 1, 4, requires_grad=True) for _ in range(3))
    layout = Layout.contiguous(6, 3)
    out = ring_attention(q, k, v, Pattern.dense(), layout, group=group, name=name, exchange=exchange)
    assert isinstance(out, torch.Tensor)
    return out, q


def said_by(act: Callable[..., object], *arguments: Any) -> str:
    """Return its error; "fine" if there is none."""
    try:
        act(*arguments)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def _one_rank_is_late() -> None:
    """It comes when the others have left their marks, but before the group's timeout."""
    group = new_group(60.0)
    for _ in range(2):
        if dist.get_rank() == 1:
            time.sleep(SLOW + 0.7)
        forward(group)
    dist.barrier()
    store = group.get_group_store()
    marks = [f"ring/waits/{number}/{rank}" for number in range(6) for rank in range(3)]
    assert not [mark for mark in marks if store.check([mark])]
    end(group)


def test_late_ranks_raise_nothing(ranks: Ranks) -> None:
    ranks(3).run(_one_rank_is_late)


def _some_come_too_late(direction: str, number: int, absent: tuple[int, ...]) -> str:
    group = new_group()
    for _ in range(1, number):
        forward(group)
    act: Callable[[], object] = partial(forward, group, "layer 3")
    if direction == "backward":
        out, q = forward(group, "layer 3")
        act = partial(torch.autograd.grad, out.sum(), q)
    rank, store = dist.get_rank(), group.get_group_store()
    if rank in absent:
        store.wait([f"{other} has given up" for other in range(3) if other not in absent], timedelta(seconds=50))
    began, said = time.monotonic(), said_by(act)
    assert rank in absent or time.monotonic() - began >= TIMEOUT
    store.set(f"{rank} has given up", "")
    end(group)
    return said


@pytest.mark.parametrize(
    ("direction", "number", "absent", "name"),
    [("forward", 1, (1,), "rank 1"), ("forward", 3, (0, 1), "ranks 0, 1"), ("backward", 2, (2,), "rank 2")],
)
def test_missing_ranks_are_named_after_the_timeout(
    ranks: Ranks, direction: str, number: int, absent: tuple[int, ...], name: str
) -> None:
    """The ranks meet in the group's store in the first call, in the machine's memory later."""
    for rank, said in enumerate(ranks(3).run(_some_come_too_late, direction, number, absent)):
        who = "not all ranks came in time" if rank in absent else f"{name} did not come"
        assert said.startswith(f"RuntimeError: {who} to the {direction} of call {number} ('layer 3'): ")


def _one_is_in_its_own_collective(waits: bool) -> tuple[str, float]:
    """Rank 1 sums before its first forward: it waits for the sum, or starts it, and the others sum afterwards."""
    group, mine = new_group(), torch.tensor([dist.get_rank() + 1.0])
    said = "fine"
    if dist.get_rank() != 1:
        said = said_by(forward, group)
    if dist.get_rank() == 1 and waits:
        said = said_by(dist.all_reduce, mine, dist.ReduceOp.SUM, group)
    elif not waits:
        work = dist.all_reduce(mine, group=group, async_op=True)
        if dist.get_rank() == 1:
            said = said_by(forward, group)
        work.wait()
    end(group)
    return said, mine.item()


def test_first_calls_and_collectives_share_no_numbers(ranks: Ranks) -> None:
    first, own, third = ranks(3).run(_one_is_in_its_own_collective, True)
    for said, _ in (first, third):
        assert said.startswith("RuntimeError: rank 1 did not come to the forward of call 1: ")
    assert own[0].startswith("RuntimeError: ") and own[1] == 2.0
    assert ranks(3).run(_one_is_in_its_own_collective, False) == [("fine", 6.0)] * 3


def _one_ends_in_the_middle(error: BaseException, place: str, exchange: str) -> list[str]:
    """Return the errors of the step in which rank 1 is interrupted, and of the next forward."""
    group, rank = new_group(60.0), dist.get_rank()

    def step() -> None:
        out, q = forward(group, "layer 3", exchange)
        torch.autograd.grad(out.sum(), q)

    step()
    if rank != 1:
        time.sleep(0.3)  # so that rank 1 waits for consensus
    began = time.monotonic()
    with patch(place, side_effect=error) if rank == 1 else nullcontext():
        said = [said_by(step), said_by(forward, group, "layer 4", exchange)]
    assert time.monotonic() - began < 20.0, "long before the timeout"
    end(group)
    return said


@pytest.mark.parametrize(
    ("error", "place", "direction", "exchange"),
    [
        (KeyboardInterrupt(), "ring.comm.shared_page.SharedPage.has_come", "forward", "ring"),
        (MemoryError("no room\nfor anything"), "ring.attend.accumulator_for", "forward", "direct"),
        (torch.OutOfMemoryError("no room"), "ring.comm.transport.LocalBuffers.empty", "forward", "all-to-all"),
        (SystemExit(3), "ring.compute.kernel_calls.forward", "forward", "direct"),
        (KeyboardInterrupt(), "ring.consensus._compare", "forward", "gather"),
        (torch.OutOfMemoryError("no room"), "ring.attend.sum_class_for", "backward", "ring"),
        (KeyboardInterrupt(), "ring.compute.kernel_calls.backward", "backward", "direct"),
    ],
)
def test_interrupted_calls_close_their_group_on_all_ranks(
    ranks: Ranks, error: BaseException, place: str, direction: str, exchange: str
) -> None:
    """On the rank itself at once; the others name it in that call or, if they had all messages, in the next one."""
    kind, text = type(error).__name__, str(error).partition("\n")[0]
    ended = f"the {direction} of call 2 ('layer 3') ended in the middle: {kind}" + (f": {text}" if text else "")
    first, broken, third = ranks(3).run(_one_ends_in_the_middle, error, place, exchange)
    closed = "RuntimeError: nothing can be called on this group any more, since on this rank"
    assert broken[0].startswith(kind) and broken[1] == f"{closed} {ended}"
    for said in (first, third):
        named = said[0] if said[0] != "fine" else said[1]
        assert re.fullmatch(rf"RuntimeError: rank 1 did not come to the .*: there {re.escape(ended)}", named), said


def _one_dies(rank: int, folder: str, killed: int, number: int, agreed: bool) -> None:
    """It is killed before its call of this number, or when it has agreed to it."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    for _ in range(1, number):
        forward(None)
    if rank == killed and agreed:
        kernel_calls.forward = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    elif rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    Path(folder, f"said {rank}").write_text(said_by(forward, None))
    assert time.monotonic() - began < 30, "long before the timeout"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "number", "agreed"), [(1, 2, False), (2, 2, False), (1, 2, True), (1, 1, False), (0, 1, True)]
)
def test_killed_ranks_are_named(tmp_path: Path, killed: int, number: int, agreed: bool) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_one_dies, args=(rank, str(tmp_path), killed, number, agreed)) for rank in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [-9 if rank == killed else 0 for rank in range(3)]
    where = f"the end of the forward of call {number}" if agreed else f"the forward of call {number}"
    for rank in {0, 1, 2} - {killed}:
        said = f"RuntimeError: rank {killed} did not come to {where}: its process has ended"
        assert (tmp_path / f"said {rank}").read_text() == said


LOST = Mock(side_effect=dist.DistNetworkError("the store is gone"))
GONE: Any = SimpleNamespace(set=LOST, check=LOST, delete_key=LOST)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A group of one rank, whose marks come soon, and whose store is gone."""
    monkeypatch.setattr(missing_ranks, "GRACE", 0.01)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    monkeypatch.setattr(dist.ProcessGroup, "get_group_store", lambda _: GONE)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def answering(*answers: bool | str) -> Callable[[float], bool]:
    """Return what answers in turn, by exceptions too."""
    turns = iter(answers)

    def done(seconds: float) -> bool:
        answer = next(turns)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    return done


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (answering(True), ""),
        (answering(False, False, True), ""),  # late
        (
            answering(False, "connection reset\nand much more"),
            "some rank did not come to where the others wait: connection reset",
        ),
    ],
)
def test_without_a_store_no_missing_rank_is_named(
    alone: dist.ProcessGroup, done: Callable[[float], bool], said: str
) -> None:
    """But what gets done does not end."""
    assert said_by(wait_for_all, done, alone, 1) == (f"MissingRanks: {said}" if said else "fine")
    with pytest.raises(MissingRanks, match="some rank did not come .*: the store is gone$"):
        _StoreGather(GONE, 0, 2, timedelta(seconds=1)).gather("the file", "mine")


def test_numbers_of_other_groups_are_not_named(alone: dist.ProcessGroup) -> None:
    error, cause = RuntimeError("missed"), MissingRanks([1], "late")
    error.__cause__, cause.__cause__ = cause, MissingRanks([0], "late")
    with patch("ring.comm.process_group.find_note") as find_note:
        _tell(ref(alone), "a call ended", error)
    assert find_note.return_value.leave.call_args.args[0].ranks == ()


OVER, FAILED = RuntimeError("Operation timed out!"), RuntimeError("connection reset")


def test_works_are_done_once_waited_for() -> None:
    """Waits are answered in turn, by exceptions that are raised too."""

    def done(waits: list[Any], completed: bool, seconds: float) -> bool:
        work: Any = SimpleNamespace(wait=Mock(side_effect=waits), is_completed=lambda: completed)
        return done_by_work(work)(seconds)

    assert not done([OVER], False, 1.0), "it takes longer"
    assert done([OVER, True], True, 1.0), "it ended while its wait did"
    with pytest.raises(RuntimeError, match="connection reset"):
        done([FAILED, FAILED], True, 1.0)


@pytest.mark.parametrize(
    ("after", "seconds", "done", "looks"),
    [(0, 1.0, True, 1), (3, 1e3, True, 4), (999, 8.0, False, 9), (999, 1e3, None, 90)],
)
def test_events_are_polled_until_nine_tenths_of_the_timeout(
    after: int, seconds: float, done: bool | None, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL then ends the process. The clock moves on by a second at each look."""
    now, seen = count(), count()
    monkeypatch.setattr(missing_ranks, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda seconds: None))
    event: Any = SimpleNamespace(query=lambda: next(seen) >= after)
    with pytest.raises(RuntimeError, match="timeout of 0:01:40 is over") if done is None else nullcontext():
        assert done_by_event(event, timedelta(seconds=100))(seconds) is done
    assert next(seen) == looks
