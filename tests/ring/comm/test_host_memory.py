"""Ranks of one machine agree in its memory: every answer is seen by all, and ranks that do not come are named."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ring.comm.host_memory import machine
from tests.support import host_memory_tasks as tasks
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3, preload=("torch", "torch._dynamo", tasks.__name__)) as ranks:
        yield ranks


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_see_the_same_answers(pool: Pool, seed: int) -> None:
    """399 questions, of which every fifth is answered differently by one rank."""
    wanted = [number % 5 != 0 for number in range(1, 400)]
    assert pool.run(tasks.many_questions, f"many {seed}", seed) == [wanted] * 3


@pytest.mark.parametrize("absent", [(2,), (0,), (0, 1)])
def test_ranks_that_do_not_come_are_named_and_late_ones_are_told(pool: Pool, absent: tuple[int, ...]) -> None:
    for rank, (ranks, said, seconds) in enumerate(pool.run(tasks.one_stays_away, f"away {absent}", absent)):
        if rank in absent:
            assert ranks == () and said == "another rank has given up"
        else:
            assert ranks == absent and said == "the group's timeout of 0:00:01.500000 is over"
            assert tasks.TIMEOUT <= seconds < tasks.TIMEOUT + 10


def test_a_rank_whose_process_ended_is_named_long_before_the_timeout(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=tasks.one_is_killed, args=(rank, str(tmp_path))) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    assert [process.exitcode for process in ranks] == [0, -9, 0]
    said = [(tmp_path / f"said {rank}").read_text() for rank in (0, 2)]
    assert "(1,) its process has ended True" in said
    # The other one may have heard of it from the first.
    assert set(said) <= {"(1,) its process has ended True", "() another rank has given up True"}


def test_no_file_is_left(pool: Pool, tmp_path: Path) -> None:
    pool.run(tasks.many_questions_in, str(tmp_path), "files", 9)
    assert os.listdir(tmp_path) == []


def test_a_group_over_gloo_agrees_in_memory_after_its_first_question(pool: Pool) -> None:
    assert pool.run(tasks.where_the_group_agrees, 5) == [[True, False, True]] * 3


@pytest.mark.parametrize(("what", "where"), [("machine", 2), ("FOLDER", 0), ("FOLDER", 1)])
def test_ranks_on_several_machines_or_without_a_folder_have_no_page_on_any_rank(
    pool: Pool, what: str, where: int, tmp_path: Path
) -> None:
    """The folder matters on rank 0, which makes the file; the others find it by its name."""
    kind = "HostMemory" if (what, where) == ("FOLDER", 1) else "NoneType"
    assert pool.run(tasks.page_where, "page", what, where, str(tmp_path)) == [kind] * 3
    assert os.listdir(tmp_path) == []


def test_a_page_that_one_rank_cannot_open_is_taken_by_none(pool: Pool) -> None:
    assert pool.run(tasks.page_that_one_cannot_open, "closed") == ["NoneType"] * 3


def test_a_rank_that_does_not_come_to_where_the_page_is_made_is_named(pool: Pool) -> None:
    assert pool.run(tasks.one_does_not_come, "made") == [((1,), "in time"), (None, "stays away"), ((1,), "in time")]


def test_a_machine_is_told_by_its_boot_and_its_memory(tmp_path: Path) -> None:
    assert machine() == machine() and len(machine().split()) == 2
    missing = machine(str(tmp_path / "missing"))
    assert missing.split()[1:] == ["alone", str(os.getpid())] and missing != machine()
