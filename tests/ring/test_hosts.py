"""Exchanges by hosts on processes of one machine, which NCCL_HOSTID places on several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from reference import Pattern, attention
from ring import Layout
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import SoloTransport
from tests.support.attention_cases import normal, plain
from tests.support.ranks import Ranks
from verification.run.recording_transport import RecordingTransport

pytestmark = pytest.mark.ranks
N, HEADS = 12, 4
PATTERN = Pattern.dense(causal=True)


@contextmanager
def group_on(hosts: Sequence[str], members: Sequence[int] | None = None) -> Iterator[dist.ProcessGroup | None]:
    """Yield a new group whose ranks are on these hosts, by world rank; None on a rank outside."""
    group = dist.new_group(members, timeout=timedelta(seconds=20))
    with patch.dict("os.environ", NCCL_HOSTID=hosts[dist.get_rank()]):
        inside = members is None or dist.get_rank() in members
        yield group if inside else None
    if inside:
        dist.destroy_process_group(group)


def call(group: Any, exchange: str, **options: Any) -> tuple[list[torch.Tensor], list[tuple[int, int, str]]]:
    """Return out and the gradients of q, k and v of this rank, and the messages that it sent."""
    transport = RecordingTransport(ProcessGroupTransport(group))
    layout, rank = Layout.zigzag(N, transport.world_size), transport.rank
    q, k, v = (normal(1, N, heads, 4, seed=seed) for seed, heads in enumerate((HEADS, 2, 2)))
    leaves = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]
    out = plain(*leaves, PATTERN, layout, group=transport, exchange=exchange, **options)
    torch.testing.assert_close(out.detach(), layout.shard(attention(q, k, v, PATTERN)[0], rank), rtol=0, atol=1e-12)
    return [out, *torch.autograd.grad(out.sum(), leaves)], transport.sent


def _same(hosts: Sequence[str], members: Sequence[int] | None, names: dict[str, str], check: bool) -> tuple[int, ...]:
    """Compare each exchange with its numbered name: results and messages are equal. Return the hosts of the ranks."""
    with group_on(hosts, members) as group:
        if group is None:
            return ()
        for name, number in names.items():
            (by_host, sent), (by_number, expected) = (call(group, x, check=check) for x in (name, number))
            assert sent == expected
            for x, y in zip(by_host, by_number, strict=True):
                assert torch.equal(x, y)
        return ProcessGroupTransport(group).hosts


@pytest.mark.parametrize(
    ("hosts", "members", "numbers", "names"),
    [
        (
            "aabb", None, (0, 0, 1, 1),
            {"all-to-all+ring": "all-to-all:2+ring", "ring+all-to-all": "ring+all-to-all:2",
             "all-to-all+direct": "all-to-all:2+direct", "ring+direct": "ring:2+direct"},
        ),
        ("aaaa", None, (0, 0, 0, 0), {"all-to-all+ring": "all-to-all", "ring+direct": "ring"}),
        ("abcd", None, (0, 1, 2, 3), {"all-to-all+ring": "ring", "ring+direct": "direct"}),
        ("abba", (1, 2), (0, 0), {"all-to-all+gather": "all-to-all"}),
        ("abbc", (0, 3), (0, 1), {"ring+all-to-all": "all-to-all"}),
        ("abab", (3, 1), (0, 0), {"ring+all-to-all": "ring"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("check", (True, False))
def test_groups_are_the_ranks_that_share_a_host(
    ranks: Ranks, hosts: str, members: tuple[int, ...] | None, numbers: tuple[int, ...], names: dict[str, str],
    check: bool,
) -> None:  # fmt: skip
    found = ranks(4).run(_same, hosts, members, names, check)
    assert found == [numbers if members is None or rank in members else () for rank in range(4)]


def _refused(hosts: str, exchange: str, other: str) -> list[str]:
    """Return the errors of two calls; the last rank names another exchange. Then the group is still usable."""
    errors = []
    with group_on(hosts) as group:
        assert group is not None
        for _ in range(2):
            with pytest.raises(ValueError) as error:
                call(group, other if dist.get_rank() == 2 else exchange)
            errors.append(str(error.value))
        call(group, "direct")
    return errors


@pytest.mark.parametrize(
    ("hosts", "exchange", "other", "said"),
    [
        ("aab", "all-to-all+ring", "all-to-all+ring", "got hosts of 2, 1 ranks: write a number that divides 3"),
        ("abab", "ring+direct", "ring+direct", "side by side in the group, got ranks on hosts 0, 1, 0, 1: make"),
        ("aab", "all-to-all+ring", "ring", "got hosts of 2, 1 ranks"),
        ("aaa", "all-to-all+ring", "ring", "exchange must be the same on every rank: rank 0 has all-to-all, rank 2"),
        ("aaa", "ring+ring", "ring+ring", "exchange must be one of 'ring'"),
    ],
)
def test_every_rank_refuses_in_the_same_words(ranks: Ranks, hosts: str, exchange: str, other: str, said: str) -> None:
    first, *others = ranks(len(hosts)).run(_refused, hosts, exchange, other)
    assert said in first[0] and all(errors == first for errors in others) and first[0] == first[1]


class Believing(ProcessGroupTransport):
    """A transport whose last rank believes in other hosts than the others."""

    @property
    def hosts(self) -> tuple[int, ...]:
        return (0, 0, 1, 1) if self.rank < 3 else (0, 0, 0, 0)


def _disagreeing() -> str:
    x = torch.ones(1, 2, 4, 4)
    with group_on("aaaa") as group, pytest.raises(ValueError) as error:
        plain(x, x, x, PATTERN, Layout.zigzag(8, 4), group=Believing(group), exchange="all-to-all+ring")
    return str(error.value)


def test_ranks_that_disagree_on_hosts_are_refused(ranks: Ranks) -> None:
    said = "exchange must be the same on every rank: rank 0 has all-to-all:2+ring, rank 3 all-to-all"
    assert ranks(4).run(_disagreeing) == [said] * 4


def _missing(late: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == late:
        return ""
    x = torch.ones(1, 2, 2, 4)
    with pytest.raises(RuntimeError) as error:
        plain(x, x, x, PATTERN, Layout.zigzag(6, 3), group=group, exchange="all-to-all+ring", name="a layer")
    return str(error.value)


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    said = "rank 1 did not come to the forward of call 1 ('a layer'): the group's timeout of 0:00:01 is over"
    first, absent, last = ranks(3).run(_missing, 1)
    assert (first, absent) == (said, "") and "did not come" in last + "did not come" * ("another rank" in last)


@pytest.mark.parametrize("make", (lambda: None, SoloTransport))
def test_one_rank_needs_no_group(make: Callable[[], SoloTransport | None]) -> None:
    q, k, v = (normal(1, N, 2, 4, seed=seed) for seed in range(3))
    for exchange in ("all-to-all+ring", "ring+all-to-all", "ring+direct"):
        out = plain(q, k, v, PATTERN, Layout.contiguous(N, 1), group=make(), exchange=exchange)
        torch.testing.assert_close(out, attention(q, k, v, PATTERN)[0], rtol=0, atol=1e-12)
