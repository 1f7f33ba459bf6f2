"""Gradients of received keys that a kernel, here one on CPUs, writes into the buffer in which they return."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ring.execute
from ring import Layout, Pattern, ring_attention
from ring.caching.bounded_cache import BoundedCache
from ring.compute import kernel_choice
from ring.compute.kernels import MATH
from ring.compute.kernels.kernel import SavedRows, Scores, Tensors3
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Tile
from ring.strided_view import OverwritingView, tile_shape
from tests.support.attention_cases import PATTERNS
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks

TOKENS, HEADS, KV_HEADS = 24, 4, 2


def _of_tile(tile: Tile, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor) -> list[Tensor]:
    """View batched operands as the math kernel takes them."""
    keys = tile.key_rows, tile.key_heads
    queries = tile.query_rows, tile.query_heads
    return [
        q.reshape(tile_shape(*queries, q)), *(x.reshape(tile_shape(*keys, x)) for x in (k, v)),
        *(x.reshape(tile_shape(*queries, x)) for x in rows),
    ]  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scoring: Scores) -> tuple[Tensor, Tensor]:
    q, k, v = _of_tile(tile, q, k, v)
    return MATH.forward(q, k, v, tile, scoring)


def _backward(q: Tensor, k: Tensor, v: Tensor, saved: SavedRows, tile: Tile, scoring: Scores) -> Tensors3:
    q, k, v, dout, out, lse = _of_tile(tile, q, k, v, saved.dout, saved.out, saved.lse)
    rows = SavedRows(dout, out, lse.squeeze(-1), (dout * out).sum(-1))
    found = []
    for grad, into in zip(MATH.backward(q, k, v, rows, tile, scoring), saved.into, strict=True):
        if into is not None:
            into.copy_(grad.reshape(into.shape))
            grad = into.unflatten(1, grad.shape[2:4]).unflatten(0, grad.shape[:2])  # noqa: PLW2901
        found.append(grad)
    return found[0], found[1], found[2]


IN_PLACE = replace(MATH, forward=_forward, backward=_backward, batched=True, reads_delta=False, in_place=True)


def gradients(
    transport: SimulatedTransport, pattern: Pattern, layout: Layout, exchange: str, bucket: int | None
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(transport.rank)
    shapes = [(layout.counts[transport.rank], heads) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (torch.randn(2, *shape, 8, generator=generator) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(q, k, v, pattern, layout, group=transport, exchange=exchange, bucket=bucket)
    assert isinstance(out, Tensor)
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("bucket", (None, 3))
@pytest.mark.parametrize("name", ("causal", "longnet causal", "dense"))
@pytest.mark.parametrize("exchange", ("direct", "ring"))
@pytest.mark.parametrize("p", (2, 3))
def test_gradients_of_received_keys(
    p: int, exchange: str, name: str, bucket: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They equal those that are copied, bit for bit. By `ring` they are added to those of other ranks. Listed rows of
    some LongNet tiles have no place.
    """
    pattern, layout, copies = PATTERNS[name], Layout.zigzag(TOKENS, p), Counter[bool]()
    put = OverwritingView.put

    def counted(view: OverwritingView, rows: Rows, heads: Heads, tile: Tensor) -> None:
        copies[in_place] += 1
        put(view, rows, heads, tile)

    monkeypatch.setattr(OverwritingView, "put", counted)
    found: dict[bool, Any] = {}
    for in_place in (False, True):
        monkeypatch.setattr(ring.execute, "_programs", BoundedCache(8))
        kernel = IN_PLACE if in_place else replace(IN_PLACE, in_place=False)
        monkeypatch.setattr(kernel_choice, "choose", lambda *_, kernel=kernel: kernel)
        run = partial(gradients, pattern=pattern, layout=layout, exchange=exchange, bucket=bucket)
        found[in_place] = Simulation(p, 0).run(run)
    assert all(torch.equal(a, b) for ranks in zip(*found.values(), strict=True) for a, b in zip(*ranks, strict=True))
    if exchange == "direct":
        assert copies[False] > copies[True] and (copies[True] == 0 or name == "longnet causal")
