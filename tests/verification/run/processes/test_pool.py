"""The pool of ranks: real processes, real gloo, real deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.pool_tasks import (
    FOREVER,
    PRELOAD,
    WORLDS,
    Pools,
    echo,
    failure_of,
    go_through_subgroups,
    gone,
    hang_in_gloo,
    neighbours,
    shift,
    surroundings,
    until,
    works,
)
from verification.failures import RankError
from verification.run.processes.pool import Pool, PoolError

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools()) as pools:
        yield pools


def run_python(*args: str, script: str = "", cwd: Path = ROOT) -> str:
    """What a fresh interpreter prints, which must end well."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, *args]
    done = subprocess.run(command, input=script, env=environment, cwd=cwd, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# --- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_results_come_in_rank_order_and_the_ranks_are_one_group(pools: Pools, world: int) -> None:
    pool = pools(world)
    assert pool.run(echo, "a", 1) == [(rank, "a", 1) for rank in range(world)]
    assert works(pool)
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    for rank, got in enumerate(pool.run(shift, array)):
        np.testing.assert_array_equal(got, array + (rank - 1) % world)


def test_the_caller_is_free_between_submit_and_collect(pools: Pools, tmp_path: Path) -> None:
    pool = pools(2)
    ticket = pool.submit(hang_in_gloo, str(tmp_path), -1)
    until(lambda: len(list(tmp_path.iterdir())) == 2)  # the ranks have begun, nobody collects yet
    assert pool.collect(ticket) == [None, None]


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_have_one_thread_and_listen_on_loopback_only(pools: Pools, world: int) -> None:
    for found in pools(world).run(surroundings):
        assert found["threads"] == [1, "1", "1"]
        assert found["main"] == "__main__"
        addresses = found["listening"]
        assert isinstance(addresses, list)
        assert addresses == ["0100007F"] * len(addresses) and addresses


def test_the_environment_of_the_caller_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    before = dict(os.environ)
    with Pool(1, preload=PRELOAD):
        assert dict(os.environ) == before


# --- beginning and end ----------------------------------------------------------------------------------------------


def test_closing_ends_the_ranks_and_a_closed_pool_says_so() -> None:
    with Pool(3, preload=PRELOAD) as pool:
        pids = pool.pids
        ticket = pool.submit(echo)
    assert all(map(gone, pids))
    for attempt in (lambda: pool.run(echo), lambda: pool.collect(ticket), lambda: pool.pids):
        with pytest.raises(PoolError, match="closed"):
            attempt()
    pool.close()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="world_size: got 0"):
        Pool(0)
    with pytest.raises(ValueError, match="timeout: got 0"):
        Pool(1, timeout=0)
    with pytest.raises(ValueError, match="preload: got 'torch'"):
        Pool(1, preload="torch")
    with pytest.raises(ValueError, match="preload: got "):
        Pool(1, preload=("numpy",))


def test_a_module_that_was_not_preloaded_is_an_error() -> None:
    with pytest.raises(PoolError, match="did not preload no_such_module .*No module named 'no_such_module'"):
        Pool(1, preload=("torch", "no_such_module"))


def test_a_preload_that_kills_the_forkserver_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(9)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PoolError, match="forkserver died"):
        Pool(1, preload=("torch", "deadly"))


MAIN = """
from verification.run.processes.pool import Pool
from tests.support import pool_tasks
print("main runs")
pool = Pool(2)
print(pool.run(pool_tasks.total, 1.0))
def local(): pass
try:
    pool.run(local)
except ValueError as error:
    print("refused" if "__main__" in str(error) else error)
"""
MAIN_PRINTS = "main runs\n[3.0, 3.0]\nrefused\n"


@pytest.mark.parametrize("how", ["heredoc", "script", "-m"])
def test_any_main_will_do(tmp_path: Path, how: str) -> None:
    """Not guarded by `if __name__ == "__main__"`, and left open at the end: it runs once, and ends without a word."""
    package = tmp_path / "some_main"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(MAIN)
    arguments = {"heredoc": ["-"], "script": [str(package / "__main__.py")], "-m": ["-m", "some_main"]}
    assert run_python(*arguments[how], script=MAIN if how == "heredoc" else "", cwd=tmp_path) == MAIN_PRINTS


def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """Neither idle ones, nor ones blocked in gloo, nor the forkserver."""
    script = f"""
        import os, signal, sys, time
        from pathlib import Path
        from verification.run.processes.pool import Pool
        from tests.support import pool_tasks
        idle, busy = Pool(2), Pool(3)
        server, *_ = idle.run(os.getppid)
        busy.submit(pool_tasks.hang_in_a_circle, {str(tmp_path)!r})
        while len(os.listdir({str(tmp_path)!r})) < 3:
            time.sleep(0.01)
        print(server, *idle.pids, *busy.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 6
    for pid in pids:
        until(lambda pid=pid: gone(pid))  # type: ignore[misc]


# --- subgroups ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(1,), (0, 2), (1, 2), (0, 1, 2)])
def test_a_subgroup_has_its_ranks(pools: Pools, ranks: tuple[int, ...]) -> None:
    expected = [(ranks.index(rank), list(ranks)) if rank in ranks else None for rank in range(3)]
    assert pools(3).run(neighbours, ranks) == expected
    assert pools(3).run(neighbours, ranks) == expected
    assert works(pools(3))


@pytest.mark.parametrize("ranks", [(), (0, 0), (2, 0), (3,), (-1,)])
def test_ranks_that_form_no_subgroup_are_refused(pools: Pools, ranks: tuple[int, ...]) -> None:
    assert "ValueError: ranks: got" in str(failure_of(RankError, pools(3), neighbours, ranks))


def test_only_so_many_subgroups_are_kept() -> None:
    with Pool(3, timeout=FOREVER, preload=PRELOAD) as pool:
        rounds = [pool.run(go_through_subgroups, 2) for _ in range(8)]
        assert {held for found in rounds for held, _ in found} == {2}
        for rank in range(3):  # a group given up gives back its sockets, sooner or later
            assert rounds[-1][rank][1] <= rounds[0][rank][1] + 8
