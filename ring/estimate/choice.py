"""The exchange that takes the least time by the model of `ring.estimate.stages`: `choose`, and `exchange="auto"`.

Rates by default, of device types, so that all ranks choose the same:
- cuda: those of `Rates.of("NVIDIA H200")`.
- cpu: one core a rank and gloo, by `python -m verification.cli.validate --backend gloo` on two.

No rate between hosts was measured. So `exchange="auto"` is refused where ranks are on several; `choose` takes yours.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from reference import validators
from reference.pattern import Pattern
from ring import validation
from ring.estimate.estimates import DEVICES, Estimate, EstimatedCall, Estimates, check_rates, layouts_of, row_of
from ring.estimate.rates import Rates
from ring.estimate.tile_seconds import GPU
from ring.layout import Layout
from ring.plan.exchange import DIRECT, candidates

_logger = logging.getLogger("ring")
_CPU: dict[str, Any] = {"forward": 2e10, "backward": 2e10, "link": 5e8, "latency": 3e-4, "stage": 3e-4, "packing": 2e9}


def default_rates(device: str) -> Rates:
    """Return the rates by which `exchange="auto"` chooses.

    Args:
        device: "cuda" or "cpu".

    Returns:
        Rates of the device type, within a host.

    Raises:
        ValueError: the device is another.
    """
    validators.choice("device", device, DEVICES)
    return Rates(**_CPU) if device == "cpu" else Rates.of(GPU)


def choose(
    pattern: Pattern, layout: Layout | None = None, *, tokens: int | None = None, ranks: int | None = None,
    order: str | None = None, heads: int, kv_heads: int | None = None, head_dim: int, value_dim: int | None = None,
    batch: int = 1, dtype: torch.dtype = torch.bfloat16, bucket: int | None = None, device: str = "cuda",
    key_layout: Layout | None = None, rates: Rates | None = None, backward: bool = True,
) -> Estimates:  # fmt: skip
    """Estimate every exchange, and order them by time: `ring_attention(exchange="auto")` takes the first.

    Args:
        pattern, layout, order, heads, kv_heads, head_dim, value_dim, batch: as in `estimate`.
        dtype, bucket, device, key_layout: as in `estimate`.
        tokens, ranks: of the sequence, and p; one of each.
        rates: of the machine; None: those of `default_rates`. With ranks_per_host exchanges across hosts are ordered
            by rates that you know, which is experimental.
        backward: True to order by forward and backward together, False by forward alone.

    Returns:
        A row for each exchange but those that hold all keys. Times are compared in whole percents of the least. Calls
        that no measured kernel takes are ordered by the times of those that one takes.

    Raises:
        ValueError: an argument is invalid, or cannot be counted exactly.
    """
    kv_heads, value_dim = heads if kv_heads is None else kv_heads, head_dim if value_dim is None else value_dim
    call = EstimatedCall(pattern, heads, kv_heads, head_dim, value_dim, batch, dtype, DIRECT.name, bucket, device)
    validators.flag("backward", backward)
    for name, given in (("tokens", tokens), ("ranks", ranks)):
        validators.optional(validators.integer, name, given, 1)
    order, ((queries, keys),) = layouts_of(pattern, layout, tokens, ranks, order, key_layout)
    if rates is None:
        rates = default_rates(device)
    check_rates(rates)
    return _ordered(call, order, queries, keys, rates, backward)


def chosen(call: validation.Call, hosts: tuple[int, ...]) -> str:
    """Return the exchange of a valid call with `exchange="auto"`. The logger "ring" shows the times, at level INFO.

    Args:
        call: of this rank. Only what is equal on all ranks is used, so that every rank chooses the same.
        hosts: number of each rank's host.

    Returns:
        An exchange with numbers.

    Raises:
        ValueError: the call cannot be counted, or ranks are on several hosts.
    """
    (batch, _, heads, head_dim), (_, _, kv_heads, value_dim) = call.q.shape, call.v.shape
    device = "cuda" if call.q.is_cuda else "cpu"
    sizes = heads, kv_heads, head_dim, value_dim, batch, call.q.dtype
    if len(names := candidates(call.layout.world_size)) == 1:
        return names[0]
    if (count := len(set(hosts))) > 1:
        raise ValueError(
            f"exchange 'auto' must have all ranks on one host, got ranks on {count}, between which no rate was "
            "measured: write the first name of ring.estimate.choose(..., rates=) with rates of yours, or one, as "
            "'direct'"
        )
    try:
        estimated = EstimatedCall(call.pattern, *sizes, DIRECT.name, call.settings.bucket, device)
        rows = _ordered(estimated, "given", call.layout, call.key_layout, default_rates(device), call.differentiated)
    except ValueError as error:
        raise ValueError(f"exchange 'auto' cannot predict this call: {error}; name one, as 'direct'") from error
    seconds = ", ".join(f"{row.exchange} {_seconds(row, call.differentiated):.3g}" for row in rows)
    _logger.info("exchange 'auto' takes %s; predicted seconds: %s", rows[0].exchange, seconds)
    return rows[0].exchange


def _ordered(call: EstimatedCall, order: str, layout: Layout, keys: Layout, rates: Rates, backward: bool) -> Estimates:
    problem = call.problem(layout, keys)
    rows = [
        row_of(replace(call, exchange=name), order, layout, keys, rates, problem=problem)
        for name in candidates(layout.world_size)
    ]
    seconds = {row.exchange: _seconds(row, backward) for row in rows}
    least = max(min(seconds.values()), 1e-30)  # above 0, for a sequence without pairs
    return Estimates(sorted(rows, key=lambda row: round(seconds[row.exchange] / least, 2)))


def _seconds(row: Estimate, backward: bool) -> float:
    assert row.forward.seconds is not None and row.backward.seconds is not None
    return row.forward.seconds + (row.backward.seconds if backward else 0.0)
