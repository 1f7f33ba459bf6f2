"""A training step of the Llama-shaped model under FSDP2, with and without recomputation, its sequence over all ranks.

A step is forward, backward and the reduction of gradients, in bf16 with fp32 sums.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ring import Layout
from ring.nn import ContextParallel, shard_batch, token_mean
from ring.nn.frameworks import fsdp, recompute
from verification.benchmarks.rank_group import RankGroup
from verification.benchmarks.results import BenchRecord
from verification.benchmarks.step_models import SHAPES, LlamaStepLayer, made
from verification.benchmarks.step_ways import ALONE, StepProblem, ring_attend, way_of

WAYS = ("none", "all", "attention-kept")  # which layers are computed again


def measure(
    ranks: RankGroup, record: BenchRecord, tokens: tuple[int, ...], ways: tuple[str, ...], steps: int, compare: bool
) -> None:
    """Adds a row for each number of tokens, of the whole sequence, and each of WAYS. compare: whether rank 0 computes
    the loss with torch's own attention, too."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("context",))
    for total in tokens:
        alone = loss_alone(_problem(total, ranks, 1)) if compare and ranks.rank == 0 else None
        for way in ways:
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            row = _times(_problem(total, ranks, ranks.world), way, mesh, steps)
            if alone is not None:
                row |= {"loss_of_one_gpu": alone, "relative_difference": abs(row["loss"] - alone) / alone}
            record.add(**row)


def _problem(total: int, ranks: RankGroup, world: int) -> StepProblem:
    return StepProblem("llama", SHAPES[ranks.device.type], total // world, ranks.rank, world, ranks.device)


def _times(problem: StepProblem, way: str, mesh: DeviceMesh, steps: int) -> dict[str, Any]:
    """The median of `steps` steps after two more, on the slowest rank."""
    device, total = problem.device, problem.tokens * problem.world
    model = made("llama", problem.shape, device, torch.float32)
    if way != "none":
        recompute.wrap(model, LlamaStepLayer, keep_attention=way == "attention-kept")
    fsdp.shard(model, mesh, LlamaStepLayer, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    context = ContextParallel(Layout.zigzag(total, problem.world), mesh)
    batch = shard_batch(context, *problem.whole())
    assert batch.labels is not None
    attend = ring_attend(context, problem.workload)
    times, losses = [], []
    for _ in range(steps + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        loss = token_mean(model(batch.tokens, batch.labels, context, attend), batch.labels, mesh)
        loss.backward()
        losses.append(loss.item())
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
        model.zero_grad()
    slowest = torch.tensor(statistics.median(times[2:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"tokens": total, "recompute": way, "ms": slowest.item(), "loss": losses[0], "peak_bytes": peak}


@torch.no_grad()
def loss_alone(problem: StepProblem) -> float:
    """Of one GPU with the whole sequence, its parameters in bf16 as FSDP's policy has them."""
    model = made("llama", problem.shape, problem.device, torch.bfloat16)
    way = way_of(ALONE, problem)
    with way.inside():
        losses = model(way.batch.tokens, way.batch.labels, way.context, way.attend)
    return (losses.double().sum() / (problem.tokens - 1)).item()
