"""`ring_attention` over packed documents against the oracle, both ways, on one rank and on simulated ones."""

from __future__ import annotations

import pytest
import torch

from reference import Pattern
from reference.oracle import attention_and_gradients
from ring import Layout
from ring.compute import kernel_choice
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
    q, k, v, dout, _ = inputs(N)
    layout = layout_of(order, p, lengths)
    dilated = Pattern.longnet((4, None), (1, 3), 4, causal=True, documents=lengths)
    for pattern in (
        Pattern.dense(True, lengths),
        dilated,
        Pattern.head_groups((5, None), (2, 1), 4, documents=lengths),
    ):
        wanted = attention_and_gradients(q, k, v, pattern, dout)

        def step(transport: SimulatedTransport, pattern: Pattern = pattern) -> list[torch.Tensor]:
            leaves = [layout.shard(x, transport.rank).requires_grad_() for x in (q, k, v)]
            out, lse = call(*leaves, pattern, layout, group=transport, exchange=exchange, bucket=7)
            grads = torch.autograd.grad(out, leaves, layout.shard(dout, transport.rank))
            return [out.detach(), lse.detach(), *grads]

        for rank, found in enumerate(Simulation(p, 0).run(step)):
            for x, y, dim in zip(found, wanted, (1, 2, 1, 1, 1), strict=True):
                torch.testing.assert_close(x, layout.shard(y, rank, dim), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
@pytest.mark.parametrize("order", ("contiguous", "zigzag", "striped", "hilbert"))
def test_documents_of_several_lengths_in_one_call(order: str, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the calls of GPUs with the math kernel in place of that for variable lengths."""
    monkeypatch.setattr(kernel_choice, "max_varlen_tokens", lambda *_: 6)
    for lengths in DOCUMENTS:
        test_the_oracle_agrees(lengths, order, 2, exchange)
