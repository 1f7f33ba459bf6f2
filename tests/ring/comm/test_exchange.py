"""An exchange in the simulation: how much its buffers hold, what a call tells of its messages, how gradients travel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from reference.pattern import Pattern
from ring import Layout, ring_attention
from ring.comm.buffer_meter import measure
from ring.comm.exchange import Exchange, _gradient_views, _packs_in_one_pass
from ring.comm.transport import Outgoing
from ring.plan.exchanges import KEY_EXCHANGES
from ring.plan.plan import Plan, plan_of
from ring.strided_view import Slot
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks

LAYOUT, DENSE = Layout.from_cuts(range(6), (0, 2, 6)), Pattern.dense()
EXCHANGES = ("ring", "direct", "gather")


def attend(
    transport: SimulatedTransport, heads: int = 1, batch: int = 1, dim: int = 4, value_dim: int = 4,
    exchange: str = "ring",
) -> None:  # fmt: skip
    """Forward and backward of one call on a rank of two."""
    tokens = LAYOUT.counts[transport.rank]
    q, k, v = (torch.randn(batch, tokens, heads, d).requires_grad_() for d in (dim, dim, value_dim))
    out = ring_attention(q, k, v, DENSE, LAYOUT, group=transport, exchange=exchange)
    assert isinstance(out, torch.Tensor)
    torch.autograd.grad(out.sum(), (q, k, v))


def test_rows_beyond_32_bits_are_packed_by_views() -> None:
    found = []
    for rows, slots, on_gpu in ((2**30, 2**30, True), (2**30 + 1, 1, True), (1, 2**30 + 1, True), (1, 1, False)):
        k: Any = SimpleNamespace(is_cuda=on_gpu, shape=(1, rows, 1, 1))
        found.append(_packs_in_one_pass(k, torch.empty((slots, 2), device="meta")))
    assert found == [True, False, False, False]


def test_buffers_are_counted_and_returned_after_each_call() -> None:
    """A measure goes on when one inside it ends, though both show the same until then."""

    def step(transport: SimulatedTransport) -> list[int]:
        with measure(transport) as nothing:
            pass
        with measure(transport) as outer, measure() as everybody:
            with measure(transport) as first:
                attend(transport)
            attend(transport)
            with measure(transport) as last:
                attend(transport, heads=2)
        assert nothing.bytes == first.held == outer.held == 0
        assert outer.bytes == last.bytes == 2 * first.bytes > 0, "the peak of some calls is that of the largest"
        return [outer.bytes, everybody.bytes]

    for seed in range(8):
        (a, a_all), (b, b_all) = Simulation(2, seed).run(step)
        assert a != b and max(a_all, b_all) > max(a, b), "both ranks are in this process"


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("changes", ({"heads": 2}, {"batch": 3}, {"dim": 8}, {"value_dim": 6}))
def test_calls_of_other_sizes_are_of_other_kinds(exchange: str, changes: dict[str, int]) -> None:
    """The simulation holds a call against what the first of its kind told; a kind without the batch would be wrong."""

    def step(transport: SimulatedTransport) -> None:
        for sizes in ({}, changes, {}):
            attend(transport, exchange=exchange, **sizes)

    Simulation(2, 0).run(step)


def told(plan: Plan, gpu: bool, backward: bool) -> list[Outgoing]:
    """Return what a call with batch 3 and head dim 8 in bf16, which ends there, tells of its messages."""
    k: Any = SimpleNamespace(is_cuda=gpu, dtype=torch.bfloat16, shape=(3, plan.tokens, 2, 8))
    transport: Any = Mock(rank=plan.rank, prepare=Mock(side_effect=InterruptedError))
    exchange, nowhere = Exchange(plan, transport, k, k), SimpleNamespace()
    walk: Any = exchange.round_trips(nowhere, nowhere) if backward else exchange.arrivals()
    with pytest.raises(InterruptedError):
        next(walk)
    found: list[Outgoing] = transport.prepare.call_args.args[1]()
    return found


@pytest.mark.parametrize("gpu", (False, True))
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gradients_travel_in_fp32_unless_complete_on_gpus(exchange: str, gpu: bool) -> None:
    plan = plan_of(DENSE, LAYOUT, 0, 2, 2, KEY_EXCHANGES[exchange], 64)
    there, back = told(plan, gpu, backward=False), told(plan, gpu, backward=True)
    keys = [one for one in back if one.label.startswith("keys")]
    gradients = [one for one in back if one.label.startswith("gradients")]
    assert there == keys and keys and gradients
    # All 4 rows of rank 1, in 2 heads: 8 slots of K and V, each of 3 batches and 8 dims.
    width = 2 if gpu and exchange == "direct" else 4
    assert {one.stop - one.start for one in gradients} == {8 * 2 * 3 * 8 * width}
    assert {one.stop - one.start for one in keys} == {4 * 2 * 3 * 8 * 2}  # the 2 rows of rank 0


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_gradients_of_slots_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """1 and 256 times 2**-9: in bf16, of which 1 has a last place of 2**-7, nothing would be added."""
    step: Any = SimpleNamespace(once=False)
    grad = torch.full((1, 2), 7.0, dtype=dtype)
    with _gradient_views(step, grad, Slot(1, 1, 1)) as sums:
        for one in sums:
            one.x += 1.0
            for _ in range(256):
                one.x += 2**-9
    assert grad.flatten().tolist() == [1.5, 1.5]
