"""A hang has torch's own analysis of the ranks' last collectives, on gloo too."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from verification.failures import RankHang
from verification.run.processes.flight_record import analysis
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks


def _one_does_not_sum(culprit: int) -> None:
    group = dist.new_group([0, 1])  # one of a part of the ranks, which gloo's record does not describe
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(torch.ones(3), group=group)
    if dist.get_rank() != culprit:
        dist.all_reduce(torch.ones(5))
    time.sleep(3600)


def test_hangs_name_the_collective_and_the_missing_rank() -> None:
    with Pool(3, timeout=2.0, flight_records=True) as pool:
        with pytest.raises(RankHang) as hang:
            pool.run(_one_does_not_sum, 1)
        (note,) = hang.value.__notes__
        assert note.startswith("torch's analysis of the flight records:\n")
        assert "collective: gloo:all_reduce\n" in note and "missing ranks: {1}\n" in note
        assert "input sizes: [[5]]\n" in note
        assert " in serve\n" not in str(hang.value), "the thread that answers is no part of a stack"


def test_missing_flight_records_are_reported() -> None:
    assert analysis({}) == "no rank gave its flight record"
    assert analysis({0: b"no pickle"}).startswith("torch could not analyse the flight records: ")
