"""What ranks of a pool are asked to do with `ring_attention`, called as a user would: importable functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from reference import Pattern, attention, gradients
from ring import Layout, ring_attention
from verification.run.processes.rendezvous import subgroup

PATTERN = Pattern.longnet((6, None), (1, 2), 4, causal=True)
TOKENS = 23


def whole() -> list[torch.Tensor]:
    """q, k, v, dout of the whole sequence, the same on every rank."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(2, TOKENS, heads, 8, dtype=torch.float64, generator=draw) for heads in (4, 2, 2, 4)]


def worst_error(group: dist.ProcessGroup | None) -> float:
    """The greatest error of this rank's output and gradients against the oracle."""
    layout = Layout.zigzag(TOKENS, dist.get_world_size(group))
    rank = dist.get_rank(group)
    tensors = whole()
    q, k, v, dout = (layout.shard(x, rank) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(leaves[0], leaves[1], leaves[2], PATTERN, layout, group=group)
    assert isinstance(out, torch.Tensor)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    whole_q, whole_k, whole_v, whole_dout = tensors
    exact = [
        attention(whole_q, whole_k, whole_v, PATTERN)[0],
        *gradients(whole_q, whole_k, whole_v, PATTERN, whole_dout),
    ]
    pairs = zip(found, exact, strict=True)
    return max(float((x - layout.shard(y, rank)).abs().max()) for x, y in pairs)


def on_the_default_group() -> float:
    return worst_error(None)


def on_a_subgroup(ranks: tuple[int, ...]) -> float | str:
    """A bare process group, made by torch; on ranks outside it, what the call says to them."""
    group = subgroup(ranks)
    if group is not None:
        return worst_error(group)
    q, k, v, _ = whole()
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # what torch gives to those who are no members
    try:
        ring_attention(q, k, v, PATTERN, Layout.contiguous(TOKENS, len(ranks)), group=outside)
    except ValueError as error:
        return str(error)
    return "nothing"


def second_derivative(on_rank: int) -> str:
    """Differentiate a gradient on one rank only; every rank then makes another call."""
    rank, layout = dist.get_rank(), Layout.contiguous(TOKENS, dist.get_world_size())
    q, k, v, _ = (layout.shard(x, rank) for x in whole())
    out = ring_attention(q.requires_grad_(), k, v, PATTERN, layout)
    assert isinstance(out, torch.Tensor)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    said = "nothing"
    if rank == on_rank:
        try:
            torch.autograd.grad(dq.sum(), q)
        except NotImplementedError as error:
            said = str(error)
    assert worst_error(None) < 1e-12
    return said


def gradients_on_some_ranks_only() -> str:
    """Rank 0 wants gradients, the others do not: without a word they would wait for each other in backward."""
    rank, layout = dist.get_rank(), Layout.contiguous(TOKENS, dist.get_world_size())
    q, k, v, _ = (layout.shard(x, rank) for x in whole())
    try:
        ring_attention(q.requires_grad_(rank == 0), k, v, PATTERN, layout)
    except ValueError as error:
        assert worst_error(None) < 1e-12
        return str(error)
    return "nothing"
