"""The pool when ranks raise, die or hang, and that nothing of such a call reaches a later one."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.pool_tasks import (
    BRIEF,
    PRELOAD,
    WORLDS,
    Pools,
    compute_for,
    die_on,
    echo,
    fail_on,
    failure_of,
    hang_in_gloo,
    hang_in_python,
    hang_of,
    mismatch,
    poisoned,
    stop_itself,
    total,
    unpicklable,
    until,
    works,
)
from verification import failures
from verification.failures import MismatchedMessages, RankCrash, RankError, RankHang, WrongResult
from verification.run.processes import worker
from verification.run.processes.pool import Pool, PoolError

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools()) as pools:
        yield pools


# --- a rank raises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_an_exception_on_every_rank(pools: Pools, world: int) -> None:
    failure = failure_of(RankError, pools(world), fail_on, tuple(range(world)), False)
    assert failure.ranks("raised") == tuple(range(world))
    for state in failure.states:
        assert "in fail_on" in state.trace and f"ZeroDivisionError: no luck on {state.rank}" in state.trace
        assert "run_request" not in state.trace
        assert f"rank {state.rank} raised ZeroDivisionError: no luck on {state.rank}" in str(failure)


def test_the_others_wait_for_the_rank_that_raised(pools: Pools) -> None:
    failure = failure_of(RankError, pools(3), fail_on, (1,), True)  # with FOREVER as the timeout
    assert failure.ranks("raised") == (1,)
    assert failure.ranks("blocked") == (0, 2)
    for rank in (0, 2):
        assert "in barrier" in failure.states[rank].trace and "in fail_on" in failure.states[rank].trace
    assert "ranks 0, 2 had not answered; it stood at" in str(failure)


def test_mismatched_messages_keep_their_kind(pools: Pools) -> None:
    failure = failure_of(MismatchedMessages, pools(2), mismatch)
    assert failure.kind == "mismatched messages"
    assert "40 bytes arrived, 48 were expected" in str(failure)


def test_a_result_that_cannot_be_pickled_is_the_rank_s_error(pools: Pools) -> None:
    assert "pickle" in str(failure_of(RankError, pools(2), unpicklable))


def test_a_result_that_cannot_be_unpickled_is_raised_here(pools: Pools) -> None:
    pool = pools(2)
    with pytest.raises(ValueError, match="not a number"):
        pool.run(poisoned)
    assert works(pool)


# --- a rank dies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", ["exit", "SIGKILL", "SIGSEGV"])
def test_a_death_is_noticed_at_once_and_named(pools: Pools, tmp_path: Path, world: int, way: str) -> None:
    culprit = world // 2
    failure = failure_of(RankCrash, pools(world), die_on, str(tmp_path), culprit, way)  # with FOREVER as the timeout
    assert failure.ranks("died") == (culprit,)
    expected = "ended with exit code 7" if way == "exit" else f"was killed by {way}"
    assert f"rank {culprit} {expected} in {die_on.__module__}.die_on (world of {world})" in failure.headline
    for state in failure.states:
        if state.rank != culprit:  # it stood in the barrier still, or raised in it as the connection broke
            assert state.outcome in ("blocked", "raised") and "in die_on" in state.trace
    if way == "SIGSEGV":
        assert "Fatal Python error" in failure.states[culprit].trace
        assert "in die_on" in failure.states[culprit].trace


def test_a_death_between_calls_is_not_laid_to_the_next_call(pools: Pools) -> None:
    pool = pools(2)
    assert works(pool)
    os.kill(pool.pids[0], signal.SIGKILL)
    until(lambda: any(died for _, died in pool._live().events(0)))
    failure = failure_of(RankCrash, pool, total, 0.0)
    assert failure.ranks("died") == (0,)
    assert "dead before the call: rank 0" in failure.headline


# --- a rank hangs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_a_hang_in_gloo_shows_every_stack(pools: Pools, tmp_path: Path, world: int) -> None:
    failure = hang_of(pools(world), tmp_path, hang_in_gloo, 0)
    assert failure.ranks("answered") == (0,)
    assert failure.ranks("blocked") == tuple(range(1, world))
    for state in failure.states[1:]:
        assert "in hang_in_gloo" in state.trace
        assert "exit_with_parent" not in state.trace and "run_request" not in state.trace


@pytest.mark.parametrize("world", [1, 2])
def test_a_hang_in_python_shows_its_stack(pools: Pools, tmp_path: Path, world: int) -> None:
    failure = hang_of(pools(world), tmp_path, hang_in_python, 0)
    assert failure.ranks("blocked") == (0,)
    assert "in hang_in_python" in failure.states[0].trace
    assert "no answer within 0.2 s from rank 0" in failure.headline


def test_a_rank_that_computes_for_longer_than_the_timeout_does_not_hang(pools: Pools) -> None:
    (spent,) = pools(1).run(compute_for, 1.1, timeout=1.0)
    assert spent >= 1.1


def test_a_stopped_rank_is_named_as_stopped_and_killed_nevertheless(pools: Pools, tmp_path: Path) -> None:
    failure = hang_of(pools(3), tmp_path, stop_itself, 1)
    assert failure.ranks("stopped") == (1,) and failure.ranks("blocked") == (0, 2)
    assert failure.headline.endswith("; stopped by a signal: rank 1") and "ranks 0, 1, 2" in failure.headline
    assert "--- rank 1 was stopped by a signal" in str(failure) and "in barrier" in failure.states[0].trace


def test_a_stopped_rank_does_not_block_the_sender(tmp_path: Path) -> None:
    with Pool(2, timeout=BRIEF, preload=PRELOAD) as pool:
        os.kill(pool.pids[1], signal.SIGSTOP)
        with pytest.raises(RankHang) as caught:
            pool.run(echo, bytes(1 << 24))
        assert caught.value.ranks("stopped") == (1,)


# --- nothing of an earlier call reaches a later one -----------------------------------------------------------------


def test_a_call_never_collected_is_lost_and_the_next_is_right(pools: Pools) -> None:
    pool = pools(3)
    forgotten = pool.submit(echo, "old")
    ticket = pool.submit(echo, "new")
    with pytest.raises(ValueError, match="ticket: "):
        pool.collect(forgotten)
    assert pool.collect(ticket) == [(rank, "new") for rank in range(3)]
    with pytest.raises(ValueError, match="ticket: "):
        pool.collect(ticket)


def test_an_answer_to_another_call_is_refused(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools(2)
    true_receive = worker.Ranks.receive

    def stale(ranks: worker.Ranks, rank: int) -> tuple[int, int, bytes] | None:
        received = true_receive(ranks, rank)
        return received and (received[0] - (received[0] > 0), *received[1:])

    monkeypatch.setattr(worker.Ranks, "receive", stale)
    with pytest.raises(PoolError, match="answered call"):
        pool.run(echo)
    monkeypatch.undo()
    assert works(pool)


def test_an_interrupt_leaves_a_whole_pool(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools(2)
    ticket = pool.submit(total, 1.0)

    def interrupted(ranks: worker.Ranks, timeout: float) -> list[tuple[int, bool]]:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(worker.Ranks, "events", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.collect(ticket)
    assert works(pool)


def test_a_call_that_cannot_be_sent_changes_nothing(pools: Pools) -> None:
    pool = pools(2)
    pids = pool.pids
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pool.run(lambda: None)
    assert works(pool) and pool.pids == pids


# --- kinds ----------------------------------------------------------------------------------------------------------


def test_kinds_are_distinct_and_failures_survive_pickling() -> None:
    kinds: list[type[failures.VerificationFailure]]
    kinds = [WrongResult, RankCrash, RankError, RankHang, MismatchedMessages]
    assert len({kind.kind for kind in kinds}) == len(kinds)
    assert all(issubclass(kind, failures.VerificationFailure) and issubclass(kind, AssertionError) for kind in kinds)
    states = [failures.RankState(0, "raised", "raised X", "trace"), failures.RankState(1, "answered")]
    copy = pickle.loads(pickle.dumps(RankError("headline", states)))
    assert (str(copy), copy.states, copy.kind) == (str(RankError("headline", states)), tuple(states), "rank error")
