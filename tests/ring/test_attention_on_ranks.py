"""`ring_attention` on real ranks, as a user calls it: the default group, bare process groups, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from reference import Pattern, attention, gradients
from ring import Layout
from tests.support.attention_cases import inputs, plain
from tests.support.ranks import Ranks
from verification.run.processes.rendezvous import subgroup

pytestmark = pytest.mark.ranks

PATTERN = Pattern.longnet((6, None), (1, 2), 4, causal=True)
TOKENS = 23


def _check(group: dist.ProcessGroup | None) -> None:
    """Output and gradients of this rank are those of the oracle."""
    layout, rank = Layout.zigzag(TOKENS, dist.get_world_size(group)), dist.get_rank(group)
    q, k, v, dout, _ = inputs(TOKENS)
    leaves = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]
    out = plain(*leaves, PATTERN, layout, group=group)
    found = [out, *torch.autograd.grad(out, leaves, layout.shard(dout, rank))]
    exact = [attention(q, k, v, PATTERN)[0], *gradients(q, k, v, PATTERN, dout)]
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x, layout.shard(y, rank), rtol=0, atol=1e-12)


def _on_a_subgroup(members: tuple[int, ...]) -> None:
    """A bare process group, made by torch; ranks outside it are told so."""
    group = subgroup(members)
    if group is not None:
        return _check(group)
    q, k, v, *_ = inputs(TOKENS)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # what torch gives to those who are no members
    with pytest.raises(ValueError, match="group must"):
        plain(q, k, v, PATTERN, Layout.contiguous(TOKENS, len(members)), group=outside)


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 2), (1,)])
def test_a_bare_process_group(ranks: Ranks, members: tuple[int, ...]) -> None:
    ranks(3).run(_on_a_subgroup, members)


def _second_derivative(on_rank: int) -> None:
    """Differentiate a gradient on one rank only; every rank then makes another call."""
    rank, layout = dist.get_rank(), Layout.contiguous(TOKENS, dist.get_world_size())
    q, k, v = (layout.shard(x, rank) for x in inputs(TOKENS)[:3])
    out = plain(q.requires_grad_(), k, v, PATTERN, layout)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    if rank == on_rank:
        with pytest.raises(NotImplementedError, match="double backward"):
            torch.autograd.grad(dq.sum(), q)
    _check(None)


@pytest.mark.parametrize("rank", range(3))
def test_a_second_derivative_is_refused_and_nobody_waits(ranks: Ranks, rank: int) -> None:
    ranks(3).run(_second_derivative, rank)
