"""The pool of ranks: real processes, real gloo, real deaths; and nothing of a call that failed reaches a later one."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Ranks
from verification.failures import MismatchedMessages, RankCrash, RankError, RankFailure, RankHang
from verification.run.processes import rendezvous, worker
from verification.run.processes.pool import Pool, PoolError
from verification.run.processes.process_tree import alive
from verification.run.processes.stacks import is_answering

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[4]
FOREVER = 3600.0  # a timeout that a test which passes never meets
BRIEF = 0.2  # for calls that are known to hang already when it begins
PR_SET_NAME = 15  # of prctl(2)


def echo(*args: object) -> tuple[object, ...]:
    return (dist.get_rank(), *args)


def total(value: float) -> float:
    """Sum over the ranks of rank + value: works only if all ranks are one working group."""
    tensor = torch.tensor(dist.get_rank() + value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def surroundings() -> tuple[list[object], set[str]]:
    """Numbers of threads and the main module; addresses (hexadecimal, as in /proc) that the process listens on."""
    descriptors = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = {os.readlink(fd) for fd in descriptors if os.path.lexists(fd)}
    tables = "".join(Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [row.split() for row in tables.splitlines()]
    addresses = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}
    threads = [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]]
    return [*threads, sys.modules["__main__"].__name__], addresses


def fail_on(culprits: tuple[int, ...], kind: type[Exception] = ZeroDivisionError) -> None:
    if dist.get_rank() in culprits:
        raise kind(f"no luck on {dist.get_rank()}")
    dist.barrier()


def meet(folder: str, culprit: int, deed: str) -> None:
    """All wait for each other in gloo, but the culprit, last to leave its mark in the folder, first does its deed."""
    if guilty := dist.get_rank() == culprit:
        until(lambda: len(os.listdir(folder)) == dist.get_world_size() - 1)
    Path(folder, str(dist.get_rank())).touch()
    if guilty and deed == "leave":
        return
    if guilty and deed == "exit":
        os._exit(7)
    if guilty and deed == "sleep":
        time.sleep(FOREVER)
    elif guilty:
        os.kill(os.getpid(), getattr(signal, deed))
    dist.barrier()


def start_child(file: str, deed: str) -> None:
    if deed != "forks":
        pid = subprocess.Popen(["sleep", "3600"], start_new_session=deed == "leaves").pid
    elif not (pid := os.fork()):
        time.sleep(FOREVER)
    Path(file).write_text(str(pid))
    if deed == "dies":
        os._exit(7)


def compute_for(seconds: float) -> None:
    """Without a pause, so many seconds of processor time, however long that takes."""
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def compute_in_a_thread(seconds: float, name: bytes) -> None:
    """`compute_for` in a thread of that name, as torch runs backwards on GPUs, while the main one waits."""

    def compute() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name)
        compute_for(seconds)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()


class Poisoned:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return int, ("not a number",)


def neighbours(members: tuple[int, ...]) -> tuple[int, list[int]] | None:
    """(own group rank, global ranks in the order of the group), learnt by an all-gather within the group."""
    group = rendezvous.subgroup(members)
    if group is None:
        return None
    assert rendezvous.subgroup(members) is group
    own = torch.tensor([dist.get_rank()])
    gathered = [torch.zeros_like(own) for _ in members]
    dist.all_gather(gathered, own, group=group)
    return dist.get_rank(group), [int(one) for one in gathered]


def go_through_subgroups(limit: int) -> tuple[int, int]:
    """(subgroups held, open descriptors) after a use of all three groups of two, with room for so many."""
    rendezvous.MAX_SUBGROUPS = limit
    for members in ((0, 1), (0, 2), (1, 2)):
        neighbours(members)
    return len(rendezvous._subgroups), len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool]) -> None:
    """Wait for it: fails only after a time that no machine needs."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


def works(pool: Pool) -> bool:
    world = pool.world_size
    return pool.run(total, 0.5) == [world * (world - 1) / 2 + world * 0.5] * world


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def failure_of(
    kind: type[RankFailure], pool: Pool, function: Callable[..., object], *args: object, folder: Path | None = None
) -> RankFailure:
    """The failure of this call, soon after all have left their mark in the folder: its ranks are dead, others work."""
    pids, ticket = pool.pids, pool.submit(function, *args)
    if folder is not None:
        until(lambda: len(list(folder.iterdir())) == pool.world_size)
    with pytest.raises(kind) as caught:
        pool.collect(ticket, timeout=FOREVER if folder is None else BRIEF)
    assert type(caught.value) is kind and all(map(gone, pids)) and works(pool)
    return caught.value


@pytest.mark.parametrize("world", (1, 3))
def test_ranks_answer_in_order(ranks: Ranks, world: int) -> None:
    pool = ranks(world)
    assert pool.run(echo, "a", 1) == [(rank, "a", 1) for rank in range(world)] and works(pool)
    assert pool.run(surroundings) == [([1, "1", "1", "__main__"], {"0100007F"})] * world, "on loopback only"


@pytest.mark.parametrize("deed", ["execs", "forks", "leaves", "dies"])
def test_children_of_ranks_end_with_the_command(tmp_path: Path, deed: str) -> None:
    with worker.ending_children(), Pool(1) as pool, suppress(RankCrash):
        pool.run(start_child, str(tmp_path / "pid"), deed)
    until(lambda: not alive([int((tmp_path / "pid").read_text())]))


def test_closing_ends_ranks_and_restores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    before = dict(os.environ)
    with Pool(3) as pool:
        pids, ticket = pool.pids, pool.submit(os.getpid)
        assert dict(os.environ) == before
    assert all(map(gone, pids))
    for attempt in (lambda: pool.run(os.getpid), lambda: pool.collect(ticket), lambda: pool.pids):
        with pytest.raises(PoolError, match="closed"):
            attempt()
    pool.close()


def test_bad_arguments_and_preloads_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(9)")
    monkeypatch.syspath_prepend(str(tmp_path))
    for world, options, kind, said in (
        (0, {}, ValueError, "world_size: got 0"),
        (1, {"timeout": 0}, ValueError, "timeout: got 0"),
        (1, {"preload": "torch"}, ValueError, "preload: got 'torch'"),
        (1, {"preload": ("numpy",)}, ValueError, "preload: got "),
        (1, {"joined_by": "mpi"}, ValueError, "joined_by: got 'mpi'"),
        (1, {"preload": ("torch", "no_such")}, PoolError, "did not preload no_such .*No module named 'no_such'"),
        (1, {"preload": ("torch", "deadly")}, PoolError, "forkserver died"),
    ):
        with pytest.raises(kind, match=said):
            Pool(world, **options)


MAIN = """
import torch.distributed as dist
from verification.run.processes.pool import Pool
print("main runs")
pool = Pool(2)
print(pool.run(dist.get_rank))
def local(): pass
try:
    pool.run(local)
except ValueError as error:
    print("refused" if "__main__" in str(error) else error)
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.verification.run.processes.test_pool import Pool, meet, until
idle, busy = Pool(2), Pool(3)
server, *_ = idle.run(os.getppid)
busy.submit(meet, sys.argv[1], 0, "sleep")
until(lambda: len(os.listdir(sys.argv[1])) == 3)
print(server, *idle.pids, *busy.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def python(*args: str, cwd: Path, script: str = "") -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, with all that its ranks printed until they were gone."""
    return subprocess.run(
        [sys.executable, *args], input=script, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=cwd, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["heredoc", "script", "-m"])
def test_pool_starts_from_any_main(tmp_path: Path, how: str) -> None:
    """Not guarded by `if __name__ == "__main__"`, and left open at the end: it runs once, and ends without a word."""
    (tmp_path / "some_main").mkdir()
    file = tmp_path / "some_main" / "__main__.py"
    file.write_text(MAIN)
    arguments = {"heredoc": ["-"], "script": [str(file)], "-m": ["-m", "some_main"]}[how]
    done = python(*arguments, cwd=tmp_path, script=MAIN if how == "heredoc" else "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "main runs\n[0, 1]\nrefused\n", "")


def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """Neither idle ones, nor ones blocked in gloo, nor the forkserver."""
    done = python("-c", KILLED, str(tmp_path), cwd=ROOT)
    pids = done.stdout.split()
    assert done.returncode == -signal.SIGKILL and len(pids) == 6
    until(lambda: all(gone(int(pid)) for pid in pids))


@pytest.mark.parametrize(("world", "culprits"), [(1, (0,)), (3, (0, 1, 2)), (3, (1,))])
def test_exceptions_name_waiting_ranks(ranks: Ranks, world: int, culprits: tuple[int, ...]) -> None:
    failure = failure_of(RankError, ranks(world), fail_on, culprits)
    assert failure.ranks("raised") == culprits and len(failure.ranks("blocked")) == world - len(culprits)
    for state in failure.states:
        assert "run_request" not in state.trace
        assert ("in fail_on" if state.rank in culprits else "in barrier") in state.trace
        said = f"rank {state.rank} raised ZeroDivisionError: no luck on {state.rank}"
        assert (said in str(failure)) == (state.rank in culprits)
    assert ("ranks 0, 2 had not answered; it stood at" in str(failure)) == (culprits == (1,))


def test_mismatched_messages_and_unpicklable_results_raise(ranks: Ranks) -> None:
    pool = ranks(2)
    failure = failure_of(MismatchedMessages, pool, fail_on, (0, 1), MismatchedMessages)
    assert failure.kind == "mismatched messages" and "no luck on 1" in str(failure)
    copy = pickle.loads(pickle.dumps(failure))
    assert (str(copy), copy.states, copy.kind) == (str(failure), failure.states, failure.kind)
    assert "pickle" in str(failure_of(RankError, pool, open, os.devnull))
    with pytest.raises(ValueError, match="not a number"):
        pool.run(Poisoned)
    assert works(pool)


@pytest.mark.parametrize(("world", "deed"), [(1, "exit"), (3, "exit"), (3, "SIGKILL"), (3, "SIGSEGV")])
def test_a_death_is_noticed_at_once_and_named(ranks: Ranks, tmp_path: Path, world: int, deed: str) -> None:
    culprit = world // 2
    failure = failure_of(RankCrash, ranks(world), meet, str(tmp_path), culprit, deed)
    assert failure.ranks("died") == (culprit,)
    expected = "ended with exit code 7" if deed == "exit" else f"was killed by {deed}"
    assert f"rank {culprit} {expected} in {__name__}.meet (world of {world})" in failure.headline
    for state in failure.states:
        if state.rank != culprit:  # it stood in the barrier still, or raised in it as the connection broke
            assert state.outcome in ("blocked", "raised") and "in meet" in state.trace
    if deed == "SIGSEGV":
        assert "Fatal Python error" in failure.states[culprit].trace and "in meet" in failure.states[culprit].trace


def test_deaths_between_calls_spare_the_next_call(ranks: Ranks) -> None:
    pool = ranks(2)
    os.kill(pool.pids[0], signal.SIGKILL)
    until(lambda: any(died for _, died in pool._open_ranks().events(0)))
    failure = failure_of(RankCrash, pool, total, 0.0)
    assert failure.ranks("died") == (0,) and "dead before the call: rank 0" in failure.headline


@pytest.mark.parametrize(("world", "deed"), [(3, "leave"), (1, "sleep")])
def test_a_hang_shows_every_stack(ranks: Ranks, tmp_path: Path, world: int, deed: str) -> None:
    failure = failure_of(RankHang, ranks(world), meet, str(tmp_path), 0, deed, folder=tmp_path)
    answered, blocked = ((0,), (1, 2)) if deed == "leave" else ((), (0,))
    assert (failure.ranks("answered"), failure.ranks("blocked")) == (answered, blocked)
    for rank in blocked:
        trace = failure.states[rank].trace
        assert "in meet" in trace and "exit_with_parent" not in trace and "run_request" not in trace
    assert f"no answer within 0.2 s from rank{'s 1, 2' if deed == 'leave' else ' 0'}" in failure.headline


def test_computing_beyond_the_timeout_is_no_hang(ranks: Ranks) -> None:
    assert ranks(1).run(compute_for, 1.1, timeout=1.0) == [None]
    assert ranks(1).run(compute_in_a_thread, 3.0, b"pt_autograd_0", timeout=1.0) == [None]


def test_answers_at_the_timeout_are_no_hang(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ranks(1)
    opened = pool._open_ranks()

    def answers_meanwhile(waiting: set[int]) -> bool:
        until(lambda: opened.has_answer(0, BRIEF))
        return False

    monkeypatch.setattr(opened, "any_runnable", answers_meanwhile)
    assert pool.run(time.sleep, 2 * BRIEF, timeout=BRIEF) == [None]


def test_stopped_ranks_are_named_and_killed(ranks: Ranks, tmp_path: Path) -> None:
    failure = failure_of(RankHang, ranks(3), meet, str(tmp_path), 1, "SIGSTOP", folder=tmp_path)
    assert (failure.ranks("stopped"), failure.ranks("blocked")) == ((1,), (0, 2))
    assert failure.headline.endswith("; stopped by a signal: rank 1") and "ranks 0, 1, 2" in failure.headline
    assert "--- rank 1 was stopped by a signal" in str(failure) and "in barrier" in failure.states[0].trace
    with Pool(2, timeout=BRIEF) as pool:  # the sender is not blocked
        os.kill(pool.pids[1], signal.SIGSTOP)
        with pytest.raises(RankHang) as caught:
            pool.run(echo, bytes(1 << 24))
        assert caught.value.ranks("stopped") == (1,)


def test_ranks_after_their_call_are_about_to_answer() -> None:
    head = 'Thread 0x01 (most recent call first):\n  File "worker.py", line 9 in exit_with_parent\n\nCurrent thread:\n'
    for frames, answering in (
        (("barrier", "run_request", "main"), False),
        (("run_request", "main"), True),  # done, or between the exception and its description
        (("format", "describe", "run_request", "main"), True),
        (("send_bytes", "main"), True),
        (("barrier",), True),  # it breaks off: the rank may run on
    ):
        stack = "".join(f'  File "/x/worker.py", line 7 in {name}\n' for name in frames)
        assert is_answering(head + stack) is answering and is_answering("")


@pytest.mark.parametrize("name", ("receive", "events"))
def test_interrupts_and_stale_answers_leave_the_pool_whole(
    ranks: Ranks, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def happen(*_: object) -> tuple[int, int, bytes]:
        monkeypatch.undo()
        if name == "events":
            raise KeyboardInterrupt
        return 0, 0, b""

    pool = ranks(2)
    ticket = pool.submit(echo)
    monkeypatch.setattr(worker.Ranks, name, happen)
    with pytest.raises(KeyboardInterrupt if name == "events" else PoolError, match="answered call 0|^$"):
        pool.collect(ticket)
    assert works(pool)


def test_uncollected_and_unsendable_calls_are_dropped(ranks: Ranks) -> None:
    pool = ranks(3)
    forgotten, ticket = pool.submit(echo, "old"), pool.submit(echo, "new")
    with pytest.raises(ValueError, match="ticket: "):
        pool.collect(forgotten)
    assert pool.collect(ticket) == [(rank, "new") for rank in range(3)]
    with pytest.raises(ValueError, match="ticket: "):
        pool.collect(ticket)
    pids = pool.pids
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pool.run(lambda: None)
    assert works(pool) and pool.pids == pids


def test_subgroups_are_checked_and_bounded(ranks: Ranks) -> None:
    for members in ((1,), (0, 2), (0, 1, 2)):
        expected = [(members.index(rank), list(members)) if rank in members else None for rank in range(3)]
        assert ranks(3).run(neighbours, members) == ranks(3).run(neighbours, members) == expected and works(ranks(3))
    for refused in ((), (0, 0), (2, 0), (3,), (-1,)):
        assert "ValueError: ranks: got" in str(failure_of(RankError, ranks(3), neighbours, refused))
    with Pool(3) as pool:
        rounds = [pool.run(go_through_subgroups, 2) for _ in range(8)]
        assert {held for found in rounds for held, _ in found} == {2}
        for rank in range(3):  # a group given up gives back its sockets, sooner or later
            assert rounds[-1][rank][1] <= rounds[0][rank][1] + 8
