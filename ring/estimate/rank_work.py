"""Predicts the GPU time of one rank in a call, without messages: kernels of tiles, copies, starts of kernels.

Only one rank's plan is made, that of the rank with most pairs. The seconds that its pairs take, of own keys and of the
others', are those of all ranks.

Where ranks that divide the heads have many runs of positions, as 64 shards in zigzag order, a plan has thousands of
tiles. None is made for more than 32 runs without documents; their pairs then take the time of large calls on sequences
as long as a run.

Besides kernels of tiles are counted:

    keys     rows that are packed for messages, in forward and again in backward
    returns  gradients of received keys, copied to the buffer in which they return, or added to it; not those that
             FlashAttention-4 writes there
    merges   partial results that become the output, or summands that become gradients: all are read, and the result is
             written. If one of them covers everything, or several that FlashAttention-4 writes in place, only what
             others cover as well is read and written (`ring.compute.gpu.gpu_accumulator`).
    starts   of all these kernels
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from ring.compute.gpu.kernel_times import PASSES
from ring.compute.kernels import MEASURED
from ring.compute.kernels.kernel import Kernel
from ring.default_bucket import default_local_bucket
from ring.estimate.counting import Problem
from ring.estimate.rates import Kernels, Rates
from ring.estimate.tile_seconds import call_seconds, tile_seconds
from ring.plan.blocks import Heads
from ring.plan.cover import cover
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.plan import Plan, plan_of
from ring.plan.rows import Rows
from ring.plan.tile import Mask, is_everything

_MOST_RUNS, _MANY = 32, 2**10


class RankWork(NamedTuple):
    """Seconds, each forward and backward.

    own, others: of a pair of own keys, and of the others' keys. besides: of copies and starts of kernels.
    """

    own: tuple[float, float]
    others: tuple[float, float]
    besides: tuple[float, float]


def rank_work(
    problem: Problem, exchange: KeyExchange, *, bucket: int, by_default: bool, narrow: bool, strict: bool, rates: Rates
) -> RankWork:
    """Return the work of a problem whose keys travel by an exchange.

    by_default: the bucket is not the caller's. narrow: gradients travel in the working type. strict: raise ValueError
    for tiles that only the math kernel takes, whose times are not measured; otherwise they count as fused ones.
    """
    assert rates.kernels is not None
    rank, listed = int(problem.pairs.argmax()), problem.layout.listed is not None
    if not listed and problem.pattern.documents is None and (runs := _runs(problem, rank)) > _MOST_RUNS:
        return _of_runs(problem, int(problem.rows[rank, 0]) // runs, rates.kernels)
    plan = rank_plan(problem, exchange, bucket, by_default, rates.kernels, rank)
    tiles, kernels = plan.tiles, kernels_for(problem, rates.kernels)
    in_place = any(kernel.in_place for kernel in kernels)
    if strict and any(tile.mask is Mask.POSITION for tile in tiles):
        raise ValueError(
            "rates have no time of masks by position, which queries and keys at unequal distances need here: give "
            "Rates(forward=, backward=, link=) in place of rates with kernels"
        )
    own_pairs = float(problem.stages(exchange, bucket, rank).pairs[0])
    own, others = (
        [
            sum(tile_seconds(tile, passed, problem.dims, problem.batch, kernels) for tile in some) / max(1, pairs)
            for passed in PASSES[:2]
        ]
        for some, pairs in ((plan.local, own_pairs), (tiles[len(plan.local) :], int(problem.pairs[rank]) - own_pairs))
    )
    besides = [
        packed / (rates.packing or inf) + merged / (rates.kernels.merging or inf) + starts * rates.kernels.launch
        for packed, merged, starts in zip(
            _packed(plan, problem, narrow, in_place),
            _merged(plan, problem, narrow, in_place),
            _starts(plan, in_place),
            strict=True,
        )
    ]
    return RankWork((own[0], own[1]), (others[0], others[1]), (besides[0], besides[1]))


def _runs(problem: Problem, rank: int) -> int:
    """Count the runs of positions at equal distances in a rank's queries."""
    steps = np.diff(problem.layout.positions(rank).numpy())
    return 1 + int((steps[1:] != steps[:-1]).sum()) // 2


def _of_runs(problem: Problem, length: int, kernels: Kernels) -> RankWork:
    """Return the work of large calls on sequences as long as a run."""
    areas, heads = np.array([max(1, length) ** 2]), problem.batch * problem.heads * _MANY
    forward, backward = (
        call_seconds(areas, heads, False, passed, problem.dims, kernels_for(problem, kernels))
        / (heads / problem.batch * areas[0])
        for passed in PASSES[:2]
    )
    return RankWork((forward, backward), (forward, backward), (0.0, 0.0))


def kernels_for(problem: Problem, kernels: Kernels) -> tuple[Kernel, ...]:
    """Return the kernels that take the head dims; all of them if none does, as for calls that are only ordered."""
    usable = kernels.taking(problem.dims, problem.heads // problem.kv_heads)
    return usable or tuple(kernel for kernel in MEASURED if kernel.name in kernels.names)


def rank_plan(
    problem: Problem, exchange: KeyExchange, bucket: int, by_default: bool, kernels: Kernels, rank: int
) -> Plan:
    """Return the plan of a rank on GPUs. by_default: the bucket is not the caller's."""
    sizes, usable = (problem.batch, problem.heads, max(problem.dims)), kernels_for(problem, kernels)
    return plan_of(
        problem.pattern, problem.layout, rank, problem.heads, problem.kv_heads, exchange, bucket,
        default_local_bucket(*sizes, bucket, "cuda") if by_default else None,
        varlen=max(kernel.max_varlen_tokens for kernel in usable),
        window=max(kernel.max_window for kernel in usable), key_layout=problem.key_layout,
    )  # fmt: skip


def _starts(plan: Plan, in_place: bool) -> tuple[int, int]:
    """Count the kernels that are started, forward and backward."""
    tiles, packs = len(plan.tiles), sum(bool(step.gathers) for step in plan.steps)
    # A received tile's gradients of keys and of values are written, or added to a buffer that was zeroed.
    returns = sum(
        2 * len(step.tiles) * (not (step.once and in_place)) + (not step.once) + bool(step.carried)
        for step in plan.steps
    )
    again = 0 if plan.exchange.kept else packs
    return tiles + packs + 1, tiles + again + returns + 2  # merges of out; of dq, and of dk and dv


def _packed(plan: Plan, problem: Problem, narrow: bool, in_place: bool) -> tuple[float, float]:
    """Count the bytes of rows that are copied for messages, forward and backward."""
    slot, gradient = problem.slot_bytes(narrow)
    keys = sum(size_of(x.rows, x.heads) for step in plan.steps for x in step.gathers) * slot
    copied = (step.tiles for step in plan.steps if not (step.once and in_place))
    written = sum(size_of(x.key_rows, x.key_heads) for tiles in copied for x in tiles)
    zeroed = sum(x.stop - x.start for step in plan.steps if not step.once for x in step.receives)
    # A copy reads and writes; zeroing writes, and a sum reads twice.
    return keys, keys * (not plan.exchange.kept) + written * (slot + gradient) / 2 + zeroed * gradient / 2 + (
        written * gradient / 2 if zeroed else 0
    )


def _merged(plan: Plan, problem: Problem, narrow: bool, in_place: bool) -> tuple[int, int]:
    """Count the bytes that merges read and write, forward and backward."""
    (dim, value_dim), item = problem.dims, problem.batch * problem.itemsize
    slot, gradient = problem.slot_bytes(narrow)
    tokens, keys = problem.rows[plan.rank].tolist()
    of_queries = [(x.query_rows, x.query_heads) for x in plan.tiles]
    of_keys = [(x.key_rows, x.key_heads) for x in plan.local]
    returned = sum(size_of(x.rows, x.heads) for step in plan.steps for x in step.scatters)
    of_out = _rows_merged(of_queries, tokens, problem.heads, False) * value_dim * item
    of_dq = _rows_merged(of_queries, tokens, problem.heads, in_place) * dim * item
    of_dk = _rows_merged(of_keys, keys, problem.kv_heads, in_place) * slot + returned * gradient
    return of_out, of_dq + of_dk + 2 * min(returned, keys * problem.kv_heads) * slot


def _rows_merged(parts: Sequence[tuple[Rows, Heads]], tokens: int, heads: int, in_place: bool) -> int:
    """Count the rows of heads that a merge of these parts reads and writes.

    in_place: parts that cover everything once are written where the result is.
    """
    every, total = tokens * heads, sum(size_of(*part) for part in parts)
    whole = any(is_everything(*part, tokens, heads) for part in parts)
    if whole or (in_place and cover(parts, tokens, heads)):
        return total - every + 2 * min(total - every, every)
    return total + every


def size_of(rows: Rows, heads: Heads) -> int:
    """Count the rows of all heads."""
    return rows.folds * rows.length * heads.groups * heads.per_group
