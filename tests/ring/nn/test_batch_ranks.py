"""The ranks of a mesh that is a part of the world: what they agree on goes along one dimension after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ring.comm.transport import Absent
from ring.nn.batch_ranks import BatchRanks, _Line
from tests.support.nn_gradient_tasks import among_some_ranks, doing_something_else, some_ranks_agree
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks

MESH = [4, 1, 0, 3]  # row by row: world ranks; world rank 2 is not among them


@pytest.fixture(scope="module")
def five() -> Iterator[Pool]:
    with Pool(
        5, preload=("torch", "torch.distributed.tensor", "tests.support.nn_gradient_tasks"), timeout=60.0
    ) as ranks:
        yield ranks


def test_numbers_sums_and_what_is_gathered(five: Pool) -> None:
    answers = five.run(among_some_ranks)
    told = answers.pop(2)
    assert isinstance(told, tuple)
    assert str(told[0]).startswith("ValueError: over must contain the calling process; world rank 2 is not in")
    assert str(told[1]).startswith("ValueError: group must contain the calling process; world rank 2 is not in")
    numbers = dict(zip([0, 1, 3, 4], answers, strict=True))
    totals = set()
    for number, world in enumerate(MESH):
        found = numbers[world]
        assert isinstance(found, tuple)
        rank, size, gathered, texts, error, total = found
        assert (rank, size, gathered) == (number, 4, MESH)
        assert texts == [f"rank {other}" for other in range(4)] and error < 1e-14
        totals.add(tuple(total))
    assert len(totals) == 1  # the same bits


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_the_error_of_one_is_that_of_all(five: Pool, wrong: int) -> None:
    answers = five.run(some_ranks_agree, wrong, "error")
    assert answers.pop(2) == "not asked"
    assert answers == [f"ValueError: rank {wrong}: labels are wrong on {wrong}"] * 4


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_another_signature_is_found_by_all(five: Pool, wrong: int) -> None:
    answers = five.run(some_ranks_agree, wrong, "signature")
    assert answers.pop(2) == "not asked"
    assert answers == [f"ValueError: size must be the same on every rank: rank 0 has 1, rank {wrong} 2"] * 4


class _Alone:
    """A transport in whose group some ranks do not come."""

    rank, world_size = 1, 3

    def __init__(self, absent: tuple[int, ...] | None) -> None:
        self.absent = absent

    def all_equal(self, payload: bytes) -> bool:
        raise Absent(self.absent, "for 3 s")


@pytest.mark.parametrize("absent, told", [((0,), "rank 7 did not come"), ((0, 2), "ranks 1, 7"), (None, "some rank")])
def test_ranks_that_do_not_come_go_by_their_numbers_in_the_mesh(absent: tuple[int, ...] | None, told: str) -> None:
    ranks = BatchRanks(None)
    transport: Any = _Alone(absent)
    ranks._lines = (_Line(transport, members=(2, 1, 0), stride=3),)  # this rank is the second along its dimension
    ranks.rank, ranks.world_size = 4, 9
    with pytest.raises(RuntimeError, match=f"{told}.* to cross_entropy: for 3 s"):
        ranks.agree("cross_entropy", {}, None)


def test_they_agree(five: Pool) -> None:
    assert five.run(some_ranks_agree, None, "").count("fine") == 4


def test_ranks_that_do_something_else(five: Pool) -> None:
    answers = five.run(doing_something_else)
    assert answers.pop(2) == "not asked"
    assert answers == [answers[0]] * 4
    assert "must come in the same order on every rank: rank 0 is in count_labels, rank 1 in cross_entropy" in answers[0]
