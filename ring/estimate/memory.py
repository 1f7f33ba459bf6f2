"""The bytes that a rank holds in a call: shards, sums, and buffers for communication."""

from __future__ import annotations

import numpy as np

from ring.estimate.counting import Heads, Problem
from ring.estimate.stages import row_bytes
from ring.plan.exchange import ExchangeSpec
from ring.plan.ranges import Ints


def memory_of(
    problem: Problem, exchange: ExchangeSpec, bucket: int, rank: int, narrow: bool, one_sided: bool
) -> dict[str, int]:
    """Return the terms of a rank's memory in bytes, by their names in `Estimate`.

    narrow: gradients of keys travel in the working dtype. one_sided: ranks write into each other's memory.
    """
    stages, own = problem.head_stages(exchange, bucket), exchange.dividing(rank).index(rank)
    place = exchange.same_heads(rank).index(rank)
    blocks = [problem.of_heads(exchange, stage[own]) for stage in stages if stage[own].queries]
    buffers, held, kept = np.zeros(2, np.int64), np.zeros(2, np.int64), 0
    for block in blocks:
        keys = block.stages(exchange.keys, bucket, place)
        sizes, (slot, gradient) = keys.sizes, block.slot_bytes(narrow)
        received = keys.received if exchange.keys.kept else sizes.receive_buffers * sizes.receive
        forward = (received + sizes.send) * slot
        kept = received * slot if exchange.keys.kept else 0
        again = kept if exchange.keys.kept else forward
        backward = again + (sizes.receive_buffers * sizes.receive + sizes.returned) * gradient
        buffers = np.maximum(buffers, (forward, backward))
        held = np.maximum(held, _sums(block, place))
    if exchange.degree > 1:
        kept = _kept_rows(problem, exchange, stages, rank)
        buffers = buffers + _row_buffers(problem, exchange, stages, rank, one_sided) + kept
        own_rows = problem.rows[rank] * np.array([problem.heads, problem.kv_heads])
        held[1] += own_rows @ row_bytes(problem, stages)[3]
    (queries, keys), batch, item = problem.rows[rank].tolist(), problem.batch, problem.itemsize
    of_values = batch * queries * problem.heads * problem.value_dim
    inputs = batch * queries * problem.heads * problem.head_dim + keys * problem.kv_heads * batch * sum(problem.dims)
    shards = (inputs + of_values) * item + batch * queries * problem.heads * problem.wide
    terms = {
        "shards": shards, "accumulator": held[0], "gradients": held[1], "incoming": of_values * item,
        "kept": kept, "forward_buffers": buffers[0], "backward_buffers": buffers[1],
        "forward_memory": shards + held[0] + buffers[0],
        "backward_memory": shards + of_values * item + held[1] + buffers[1],
    }  # fmt: skip
    return {name: int(term) for name, term in terms.items()}


def _sums(problem: Problem, rank: int) -> tuple[int, int]:
    """Count the bytes of out and lse, and of dq, dk and dv, in the accumulator's dtype."""
    queries, keys = (problem.rows[rank] * (problem.heads, problem.kv_heads) * problem.batch * problem.wide).tolist()
    return queries * (problem.value_dim + 1), queries * problem.head_dim + keys * sum(problem.dims)


def _row_buffers(problem: Problem, exchange: ExchangeSpec, stages: Heads, rank: int, one_sided: bool) -> Ints:
    """Count the bytes of the buffers for rows of heads, forward and backward, as `ring.comm.head_exchange` allocates.

    By head a tensor has all rows of the widest own block; by owner the own rows of the other ranks' blocks in the
    widest stage. What goes to the heads has both twice if there are several stages. If one-sided, a tensor has only the
    buffer in which it arrives, by owner with the own block, too.
    """
    dividing = exchange.dividing(rank)
    widths = np.array([[(len(block.queries), len(block.keys)) for block in stage] for stage in stages])
    own = widths[:, dividing.index(rank)]
    others = widths.sum(1) - (0 if one_sided else own)
    by_head = own.max(0) * problem.rows[list(dividing)].sum(0)
    by_owner = others.max(0) * problem.rows[rank]
    there, back, again, gradients = row_bytes(problem, stages, exchange.keeps_heads)
    to_heads, to_owners = min(2, len(stages)) * np.array([there, again]), np.array([back, gradients])
    if one_sided:
        buffers: Ints = to_heads @ by_head + to_owners @ by_owner
    else:
        buffers = (to_heads + to_owners) @ (by_head + by_owner)
    return buffers


def _kept_rows(problem: Problem, exchange: ExchangeSpec, stages: Heads, rank: int) -> int:
    """Count the bytes of the rows of own heads, and of their results, that are kept for the backward, if any."""
    dividing = exchange.dividing(rank)
    own = [stage[dividing.index(rank)] for stage in stages] if exchange.keeps_heads else []
    heads = np.array([sum(len(block.queries) for block in own), sum(len(block.keys) for block in own)])
    return int(heads * problem.rows[list(dividing)].sum(0) @ row_bytes(problem, stages)[:2].sum(0))
