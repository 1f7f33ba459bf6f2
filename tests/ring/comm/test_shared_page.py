"""Ranks of one machine agree in its memory: every answer is seen by all, and ranks that do not come are named."""

from __future__ import annotations

import os
import random
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ring.comm import shared_page
from ring.comm.shared_page import PAYLOAD, SharedPage, machine, meet, page_size
from ring.comm.transport import MissingRanks
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

TIMEOUT = 1.5  # seconds


def page_of(name: str, seconds: float = 60.0) -> SharedPage | None:
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore(name, group.get_group_store())
    return meet(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=seconds)).page


def answer(value: int) -> bytes:
    return value.to_bytes(PAYLOAD, "little")


def _many_questions(name: str) -> list[bool]:
    """To every fifth question one rank, another one each time, gives another answer. Ranks come at different times."""
    page, rank, equal = page_of(name), dist.get_rank(), []
    assert page is not None
    draw = random.Random(rank)
    for number in range(1, 400):
        apart = number % 5 == 0 and number // 5 % 3 == rank
        equal.append(page.all_equal(answer(1000 + rank if apart else number), number))
        if draw.random() < 0.1:
            time.sleep(draw.choice((0.0, 1e-4, 3e-3)))
    return equal


def test_all_ranks_see_the_same_answers(ranks: Ranks) -> None:
    wanted = [number % 5 != 0 for number in range(1, 400)]
    assert ranks(3).run(_many_questions, "many") == [wanted] * 3


def _page_where(what: str, where: int) -> str:
    """Return what kind of page a group gets of which one rank cannot have it."""
    changes: dict[str, dict[str, Any]] = {
        "machine": {"new": lambda: "another"},
        "_new_file": {"return_value": None},
        "SharedPage": {"side_effect": OSError(24, "Too many open files")},
    }
    here = patch.object(shared_page, what, **changes[what]) if dist.get_rank() == where else nullcontext()
    with here:
        return type(page_of(f"page without {what} on {where}")).__name__


@pytest.mark.parametrize(
    ("what", "where", "kind"),
    [
        ("machine", 2, "NoneType"),
        ("_new_file", 0, "NoneType"),  # rank 0 makes the file; the others open it
        ("_new_file", 1, "SharedPage"),
        ("SharedPage", 1, "NoneType"),
    ],
)
def test_page_refused_by_one_rank_is_used_by_none(ranks: Ranks, what: str, where: int, kind: str) -> None:
    assert ranks(3).run(_page_where, what, where) == [kind] * 3


def _one_does_not_come(name: str) -> None:
    if dist.get_rank() != 1:
        with pytest.raises(MissingRanks, match="rank 1 did not come"):
            page_of(name, TIMEOUT)


def test_ranks_missing_at_the_making_of_the_page_are_named(ranks: Ranks) -> None:
    ranks(3).run(_one_does_not_come, "made")


def _one_ends_and_one_is_slow(name: str) -> tuple[int, ...] | None:
    """Rank 1 loses its lock, as when its process ends, and rank 2 comes a second later."""
    page = page_of(name)
    assert page is not None
    dist.barrier()
    if dist.get_rank() == 1:
        page.close()
        return None
    if dist.get_rank() == 2:
        time.sleep(1.0)
    with pytest.raises(MissingRanks) as missing:
        page.all_equal(answer(1), 1)
    return missing.value.ranks


def test_ended_ranks_are_named_without_slow_ones(ranks: Ranks) -> None:
    assert ranks(3).run(_one_ends_and_one_is_slow, "ended") == [(1,), None, (1,)], "rank 2 learns it from rank 0"


def test_ranks_that_end_after_arriving_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    size = page_size(2)
    file = shared_page._new_file(size)
    assert file is not None
    own, other = (SharedPage(os.dup(file), size, rank, 2, timedelta(seconds=60)) for rank in range(2))
    os.close(file)

    def comes_and_ends(rank: int) -> bool:
        begin = other._begin(1, 1)
        other._page[begin : begin + shared_page._SLOT] = shared_page._pack_slot(1, answer(7))
        return True

    monkeypatch.setattr(own, "has_ended", comes_and_ends)
    monkeypatch.setattr(shared_page, "_LOOK", 0.0)
    assert own.all_equal(answer(7), 1)
    own.leave(MissingRanks([0], "first"))
    own.leave(MissingRanks([0], "second"))
    assert (said := other.read()) is not None and said.waited == "first", "the first note stays"


def test_a_page_has_no_name_that_could_outlive_its_ranks() -> None:
    file = shared_page._new_file(page_size(2))
    assert file is not None and os.fstat(file).st_nlink == 0
    os.close(file)


def test_machines_differ_by_boot_and_processes() -> None:
    assert machine() == machine() and len(machine().split()) == 2
