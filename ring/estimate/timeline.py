"""Draws the predicted time of a call: kernels and messages of each rank, stage by stage."""

from __future__ import annotations

from dataclasses import replace

import torch

from reference import validators
from reference.pattern import Pattern
from reference.svg import Picture
from ring.estimate.estimates import Call, check_call, check_rates, checked_layouts
from ring.estimate.rates import Rates
from ring.estimate.stages import stage_seconds, stages_of
from ring.layout import Layout
from ring.plan.exchange import with_number
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
    call = Call(pattern, heads, kv_heads, head_dim, value_dim, batch, dtype, exchange, bucket, device)
    check_rates(rates)
    check_call(call, rates)
    validators.flag("backward", backward)
    layouts = checked_layouts(layout, key_layout, pattern)
    hosts = rates.hosts(layout.world_size)
    call = replace(call, exchange=with_number(exchange, hosts))
    setting, bucket = call.counted(*layouts), call.bucket_of(*layouts)
    blocks = stages_of(setting, call.exchange, bucket, hosts, call.work(rates, bucket, strict=True))
    spent = stage_seconds(blocks, backward, call.operations, setting.slot_bytes(call.narrow), rates)
    total = spent.slowest()["seconds"]
    p = layout.world_size
    shown = sorted({i * (p - 1) // (_LANES - 1) for i in range(_LANES)}) if p > _LANES else list(range(p))
    name = "backward" if backward else "forward"
    title = f"{call.exchange}, {name}, predicted: {1e3 * total:.4g} ms on the slowest of {p} ranks"
    return seconds_picture(
        title, [f"rank {rank}" for rank in shown], spent.computing[:, shown], spent.messages[:, shown]
    )
