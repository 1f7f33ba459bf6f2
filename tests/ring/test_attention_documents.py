"""`ring_attention` over packed documents against the oracle, both ways, on one rank and on simulated ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import ring.execute
from reference import Branch, Pattern
from reference.oracle import attention_and_gradients
from ring import Layout
from ring.caching.bounded_cache import BoundedCache
from ring.compute import kernel_calls, kernel_choice
from ring.compute.kernels.kernel import Kernel, Scores
from ring.plan.tile import Tile
from tests.support.attention_cases import call, inputs
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

N = 29
DOCUMENTS = (
    (5, 9, 12, 3),  # across every boundary
    (6, 17, 6),  # across three ranks
    (0, 1, 8, 0, 1, 1, 13, 0, 4, 1),
    (4,) * 7 + (1,),
)
ORDERS = ("contiguous", "zigzag", "striped", "hilbert", "zigzag of documents", "balanced")


def layout_of(order: str, p: int, lengths: tuple[int, ...]) -> Layout:
    if order == "zigzag of documents":
        return Layout.zigzag(N, p, documents=lengths)
    if order == "balanced":
        return Layout.balanced(Pattern.dense(True, lengths), N, p)
    return getattr(Layout, order)(N, p)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
@pytest.mark.parametrize("p", (1, 2, 4))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_the_oracle_agrees(lengths: tuple[int, ...], order: str, p: int, exchange: str) -> None:
    dilated = Pattern.longnet((4, None), (1, 3), 4, causal=True, documents=lengths)
    grouped = Pattern.head_groups((5, None), (2, 1), 4, documents=lengths)
    check((Pattern.dense(True, lengths), dilated, grouped), layout_of(order, p, lengths), exchange)


def check(patterns: Sequence[Pattern], layout: Layout, exchange: str, bucket: int = 7) -> None:
    """Hold outputs and gradients of simulated ranks to the oracle's."""
    q, k, v, dout, _ = inputs(N)
    for pattern in patterns:
        wanted = attention_and_gradients(q, k, v, pattern, dout)

        def step(transport: SimulatedTransport, pattern: Pattern = pattern) -> list[torch.Tensor]:
            leaves = [layout.shard(x, transport.rank).requires_grad_() for x in (q, k, v)]
            out, lse = call(*leaves, pattern, layout, group=transport, exchange=exchange, bucket=bucket)
            grads = torch.autograd.grad(out, leaves, layout.shard(dout, transport.rank))
            return [out.detach(), lse.detach(), *grads]

        for rank, found in enumerate(Simulation(layout.world_size, 0).run(step)):
            for x, y, dim in zip(found, wanted, (1, 2, 1, 1, 1), strict=True):
                torch.testing.assert_close(x, layout.shard(y, rank, dim), rtol=1e-11, atol=1e-11)


@pytest.fixture
def tiles_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """Plan calls for kernels that take several lengths and windows, computed by the math kernel; return their tiles."""
    monkeypatch.setattr(kernel_choice, "max_window", lambda *_: 4)
    monkeypatch.setattr(kernel_choice, "max_varlen_tokens", lambda *_: 6)
    monkeypatch.setattr(ring.execute, "_programs", BoundedCache(128))  # without plans for other kernels
    forward, tiles = kernel_calls.forward, []

    def noted(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scoring: Scores) -> tuple[Tensor, Tensor]:
        tiles.append(tile)
        return forward(kernel, q, k, v, tile, scoring)

    monkeypatch.setattr(kernel_calls, "forward", noted)
    return tiles


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
@pytest.mark.parametrize("order", ("contiguous", "zigzag", "striped", "hilbert"))
def test_documents_of_several_lengths_in_one_call(order: str, exchange: str, tiles_as_on_gpus: list[Tile]) -> None:
    for lengths in DOCUMENTS:
        test_the_oracle_agrees(lengths, order, 2, exchange)
    assert any(tile.sequences is not None for tile in tiles_as_on_gpus) or order == "hilbert"


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
@pytest.mark.parametrize("order", ("contiguous", "zigzag", "striped", "hilbert"))
def test_windows_in_one_call(order: str, exchange: str, tiles_as_on_gpus: list[Tile]) -> None:
    for lengths in (None, *DOCUMENTS):
        near = Pattern((Branch(None, 1, window=3), Branch(12, 2, window=5)), causal=True, documents=lengths)
        both = Pattern.dense(False, lengths, window=2)
        check((near, both), layout_of(order, 2, lengths or (N,)), exchange, bucket=12)
    several = [tile.sequences is not None for tile in tiles_as_on_gpus if tile.window is not None]
    assert (True in several and False in several) or order == "hilbert"
