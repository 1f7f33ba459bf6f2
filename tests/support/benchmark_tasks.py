"""Functions that the ranks of a pool call with the benchmark's parts: they can be imported there."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from reference import attention, gradients
from ring import Layout
from verification.benchmarks import baselines, longest, published
from verification.benchmarks.contender import Contender
from verification.benchmarks.rank_group import Failed, RankGroup
from verification.benchmarks.workload import AttentionShape, Workload

HEADS = AttentionShape(8, 2, 4, 2, "float64")


def ranks() -> RankGroup:
    return RankGroup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)


def longnet(tokens: int, world: int) -> Workload:
    """A segment inside a shard, one over all shards, one whose rate exceeds the heads."""
    return Workload.longnet(tokens, world, HEADS, (4, 16 * world, 16 * world), (1, 4, 16))


def errors(workload: Workload, method: str, rank: int) -> dict[str, float]:
    """The greatest errors of a rank's forward and training against the oracle; the shards are contiguous."""
    layout = Layout.contiguous(workload.total, workload.world)
    whole = workload.draw(torch.device("cpu"), 5, workload.total)
    q, k, v, dout = (layout.shard(x.detach(), rank) for x in whole)
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout
    contender = made(workload, method, inputs, rank)
    (forward,), found = contender.forward(), contender.training()
    with torch.no_grad():
        exact, _ = attention(*whole[:3], workload.pattern)
        exact_gradients = gradients(*whole[:3], workload.pattern, whole[3])
    names = ("forward", "out", "dq", "dk", "dv")
    pairs = zip(names, (forward, *found), (exact, exact, *exact_gradients), strict=True)
    return {name: float((x - layout.shard(y, rank)).abs().max()) for name, x, y in pairs}


def made(workload: Workload, method: str, inputs: Any, rank: int) -> Contender:
    if method == "all-to-all":
        return baselines.all_to_all(workload, inputs)
    return published.longnet(workload, inputs, rank)


def errors_on_ranks(workload: Workload, method: str) -> dict[str, float]:
    return errors(workload, method, dist.get_rank())


def one_fails(wrong: tuple[int, ...], memory: bool) -> tuple[str, bool, bool, list[int]]:
    """(what Failed says, its fields), and what an attempt after that gives."""
    here = ranks()

    def call() -> int:
        if here.rank in wrong:
            raise torch.OutOfMemoryError("none left\nmore") if memory else ValueError("no good")
        return here.rank

    try:
        here.attempt(call)
    except Failed as failure:
        return str(failure), failure.everywhere, failure.memory, here.attempt(lambda: 10 + here.rank)
    raise AssertionError("the attempt did not fail")


def follow(scripts: tuple[str, ...], deadline: float) -> dict[str, Any]:
    """`longest.followed` with a program for every rank."""
    here = ranks()
    return longest.followed(here, [sys.executable, "-c", scripts[here.rank]], dict(os.environ), deadline)
