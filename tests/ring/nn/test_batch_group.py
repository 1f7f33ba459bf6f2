"""The ranks of a mesh that is a part of the world: what they agree on goes along one dimension after another."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring import Layout
from ring.comm.transport import MissingRanks
from ring.nn import ContextParallel, count_labels
from ring.nn.batch_group import BatchRanks, _MeshAxis
from tests.support.nn_ranks import drawn, far, mesh_of, said
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

MESH = [4, 1, 0, 3]  # row by row: world ranks; world rank 2 is not among them


@cache
def _meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Four of five ranks: in two dimensions, not in their order, and in one."""
    square = DeviceMesh("cpu", torch.tensor(MESH).view(2, 2), mesh_dim_names=("data", "context"))
    return square, DeviceMesh("cpu", torch.tensor(sorted(MESH)), mesh_dim_names=("context",))


def _among_some_ranks() -> Any:
    """Return the sum on the four, on the fifth what it is told. A handle of a mesh of the four is made as well."""
    mesh, line = _meshes()
    if dist.get_rank() == 2:
        return said(lambda: BatchRanks(mesh)), said(lambda: ContextParallel(Layout.contiguous(4, 4), line))
    ranks = BatchRanks(mesh)
    ContextParallel(Layout.contiguous(4, 4), line)
    x = drawn(ranks.rank, 3)
    total = x.clone()
    ranks.add(total)
    assert (MESH[ranks.rank], ranks.world_size) == (dist.get_rank(), 4)
    assert ranks.gather(torch.tensor(dist.get_rank())).tolist() == MESH
    assert ranks.all_gather(f"rank {ranks.rank}".encode()) == [f"rank {other}".encode() for other in range(4)]
    assert far([total], [ranks.gather(x).sum(0)]) < 1e-14
    return total.tolist()


def test_numbers_sums_and_what_is_gathered(ranks: Ranks) -> None:
    totals = ranks(5).run(_among_some_ranks)
    for told, name in zip(totals.pop(2), ("over", "group"), strict=True):
        assert told.startswith(f"ValueError: {name} must contain the calling process; world rank 2 is not in")
    assert totals == [totals[0]] * 4  # the same bits


class UnexpectedError(Exception):
    """One that Python does not have."""


ERRORS = {
    "ValueError": ValueError("labels are wrong"), "TypeError": TypeError("no labels"), "KeyError": KeyError("labels"),
    "another": UnexpectedError("labels"),
}  # fmt: skip


def _agreed(wrong: int | None, how: str) -> str:
    """One rank of the mesh has an error, another signature, or does something else."""
    mesh, _ = _meshes()
    if dist.get_rank() == 2:
        return "not asked"
    ranks = BatchRanks(mesh)
    mine = how if ranks.rank == wrong else ""

    def compute() -> tuple[dict[str, object], str]:
        if mine in ERRORS:
            raise ERRORS[mine]
        return {"size": 2 if mine == "signature" else 1}, "fine"

    answer = said(lambda: ranks.agree("cross_entropy" if mine == "call" else "count_labels", compute))
    assert ranks.agree("count_labels", lambda: ({}, ranks.rank)) == ranks.rank
    return answer


@pytest.mark.parametrize("wrong", [0, 3])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("ValueError", "ValueError: rank {0}: labels are wrong"),
        ("TypeError", "TypeError: rank {0}: no labels"),
        ("KeyError", "KeyError: \"rank {0}: 'labels'\""),
        ("another", "RuntimeError: rank {0}: UnexpectedError: labels"),
        ("signature", "ValueError: size must be the same on every rank: rank 0 has {1}, rank {2} {3}"),
        ("call", "ValueError: calls on a group must come in the same order on every rank: rank 0 is in "),
    ],
)
def test_differences_of_one_rank_raise_on_all(ranks: Ranks, wrong: int, how: str, told: str) -> None:
    answers = ranks(5).run(_agreed, wrong, how)
    assert answers.pop(2) == "not asked" and answers == [answers[0]] * 4
    first, other, second = (2, 1, 1) if wrong == 0 else (1, wrong, 2)
    assert answers[0].startswith(told.format(wrong, first, other, second))
    assert ranks(5).run(_agreed, None, "").count("fine") == 4


@pytest.mark.parametrize("absent, told", [((0,), "rank 7 did not come"), ((0, 2), "ranks 1, 7"), (None, "some rank")])
def test_missing_ranks_are_named_by_mesh_numbers(absent: tuple[int, ...] | None, told: str) -> None:
    ranks, transport = BatchRanks(None), Mock(rank=1, world_size=3)
    transport.all_equal.side_effect = MissingRanks(absent, "for 3 s")
    ranks._axes = (_MeshAxis(transport, members=(2, 1, 0), stride=3),)  # this rank is the second along its dimension
    ranks.rank, ranks.world_size = 4, 9
    with pytest.raises(RuntimeError, match=f"{told}.* to cross_entropy: for 3 s"):
        ranks.agree("cross_entropy", lambda: ({}, None))


COUNTED = torch.arange(3)


def _parts(fresh: bool) -> dist.ProcessGroup:
    """Return this rank's half of four ranks. fresh: made anew, so that its ranks have not met yet."""
    if not fresh:
        return mesh_of("2x2")["context"].get_group()
    halves = [dist.new_group(half) for half in ([0, 1], [2, 3])]
    return halves[dist.get_rank() // 2]


def _wrong_over(wrong: Sequence[int], late: int, among: str) -> list[str]:
    """Return the answer where ranks give no group, and those of right calls."""
    part = None if among == "world" else _parts(among == "a new part")
    over: Any = "context" if dist.get_rank() in wrong else part
    if among == "a part":
        assert count_labels(COUNTED, part) == 6
    if dist.get_rank() == late:
        time.sleep(0.3)
    answers = [said(lambda: count_labels(COUNTED, over))]
    return answers + [str(count_labels(COUNTED, group)) for group in (part, None, part)]


@pytest.mark.parametrize("late", [2, 3])
@pytest.mark.parametrize(
    ("wrong", "among", "told"),
    [
        ((2,), "world", [2] * 4),
        ((0, 1, 2, 3), "world", [0] * 4),
        ((0, 2), "world", [0] * 4),
        ((2,), "a part", [None, None, 0, 0]),
        ((2,), "a new part", [None, None, 0, 0]),
        ((1, 3), "a new part", [1] * 4),
    ],
)
def test_missing_group_raises_on_waiting_ranks(
    ranks: Ranks, wrong: Sequence[int], among: str, told: list[int | None], late: int
) -> None:
    words = "over must be a process group, a DeviceMesh or None, got 'context'"
    sums = ["12"] * 3 if among == "world" else ["6", "12", "6"]
    expected = [["fine" if rank is None else f"ValueError: rank {rank}: {words}", *sums] for rank in told]
    assert ranks(4).run(_wrong_over, wrong, late, among) == expected


def _not_a_member() -> str:
    """Ranks 2 and 3 get from torch what is no group."""
    half = dist.new_group([0, 1])
    answer = said(lambda: count_labels(COUNTED, half))
    dist.barrier()
    return answer


def test_outsiders_of_the_group_raise_alone_and_at_once(ranks: Ranks) -> None:
    answers = ranks(4).run(_not_a_member)
    told = "ValueError: over must contain the calling process; world rank {0} is not in -100"
    assert answers == ["fine", "fine", told.format(2), told.format(3)]


def _other_ranks() -> str:
    """Rank 2 gives a part, the others all; each of them valid."""
    dist.barrier()
    world, part = (dist.new_group(some, timeout=timedelta(seconds=2)) for some in ([0, 1, 2, 3], [2, 3]))
    for group in (world, part):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            count_labels(COUNTED, group)
    answer = said(lambda: count_labels(COUNTED, part if dist.get_rank() == 2 else world))
    dist.barrier()
    for group in (world, part):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return answer


def test_deadlocks_across_two_groups_name_their_ranks(ranks: Ranks) -> None:
    answers = ranks(4).run(_other_ranks)
    said_by_two, said_by_three = answers[2:]
    wait = "; world ranks [{}] wait for this one among {}, which waits for them among"
    assert wait.format(3, [0, 1, 2, 3]) in said_by_two and wait.format(2, [2, 3]) in said_by_three
    assert all(
        re.match("RuntimeError: (rank 2 did not come|not all ranks came in time) to count_labels: ", x)
        for x in answers[:2]
    )
