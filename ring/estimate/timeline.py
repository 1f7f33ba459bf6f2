"""Draws the predicted time of a call: kernels and messages of each rank, stage by stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from reference import validators
from reference.pattern import Pattern
from reference.svg import Picture
from ring.estimate.estimates import EstimatedCall, check_call, check_rates, checked_layouts
from ring.estimate.rates import Rates
from ring.estimate.stages import stage_seconds, stages_of
from ring.layout import Layout
from ring.plan.exchange import parse, with_number
from ring.plan.timeline import seconds_picture

_LANES = 16  # at most; then as many ranks at equal distances


def timeline(
    pattern: Pattern, layout: Layout, *, heads: int, kv_heads: int | None = None, head_dim: int,
    value_dim: int | None = None, batch: int = 1, dtype: torch.dtype = torch.bfloat16, exchange: str = "ring",
    bucket: int | None = None, device: str = "cuda", key_layout: Layout | None = None, rates: Rates,
    backward: bool = False,
) -> Picture:  # fmt: skip
    """Draw when the kernels and messages of each rank run, in the time that `estimate` predicts.

    Stages are those of `ring.estimate.stages`. By heads, rows travel before the kernels of their block of heads, and
    results after them. Between two blocks they take the time in which the link is free first.

    Args:
        pattern, layout, heads, kv_heads, head_dim, value_dim, batch: as in `estimate`.
        dtype, exchange, bucket, device, key_layout: as in `estimate`.
        rates: of the machine.
        backward: True for the backward.

    Returns:
        Two lanes for each rank; of more than 16 ranks, for 16.

    Raises:
        ValueError: an argument is invalid, or cannot be counted exactly.
    """
    kv_heads, value_dim = heads if kv_heads is None else kv_heads, head_dim if value_dim is None else value_dim
    call = EstimatedCall(pattern, heads, kv_heads, head_dim, value_dim, batch, dtype, exchange, bucket, device)
    check_rates(rates)
    check_call(call, rates)
    validators.flag("backward", backward)
    layouts = checked_layouts(layout, key_layout, pattern)
    hosts = rates.hosts(layout.world_size)
    call = replace(call, exchange=with_number(exchange, hosts))
    problem, bucket = call.problem(*layouts), call.bucket_of(*layouts)
    spec, p = parse(call.exchange, layout.world_size), layout.world_size
    shown = sorted({i * (p - 1) // (_LANES - 1) for i in range(_LANES)}) if p > _LANES else list(range(p))
    work, slots = call.work(rates, bucket, strict=True), problem.slot_bytes(call.narrow)
    spent = {
        rank: stage_seconds(
            stages_of(problem, spec, bucket, rank, hosts, work), backward, call.operations, slots, rates
        )
        for rank in {*shown, *problem.counted_ranks}
    }
    total, stages = max(x.total for x in spent.values()), max(len(x.computing) for x in spent.values())
    computing, messages = (
        np.stack([np.pad(part, (0, stages - len(part))) for part in parts], axis=1)
        for parts in zip(*(spent[rank] for rank in shown), strict=True)
    )
    name = "backward" if backward else "forward"
    title = f"{call.exchange}, {name}, predicted: {1e3 * total:.4g} ms on the slowest of {p} ranks"
    return seconds_picture(title, [f"rank {rank}" for rank in shown], computing, messages)
