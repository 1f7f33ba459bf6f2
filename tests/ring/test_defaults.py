"""An argument that is left out is the one that documentation names, in results, messages and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reference.pattern import Branch, Pattern
from reference.shards import default_bucket
from ring import Layout, ring_attention
from ring.comm.buffer_meter import measure
from ring.comm.transport import SoloTransport
from ring.nn import ContextParallel, LongNetBlock, SelfAttention
from verification.run.recording_transport import RecordingTransport
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

TOKENS = 1400  # of the larger of two shards, which is longer than the least default bucket
LAYOUT = Layout.from_cuts(range(TOKENS + 3), (0, TOKENS, TOKENS + 3))
# The default bucket lies between the least one and the whole shard: messages tell what it is made of.
SHAPES = ((40, 1, torch.float32), (64, 1, torch.float16))
GIVEN: dict[str, Any] = {"exchange": "gather", "bucket": 600, "kernel": "math", "scale": -0.5}


@pytest.mark.parametrize("left_out", [*((name,) for name in GIVEN), tuple(GIVEN)], ids="+".join)
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), SHAPES)
def test_defaults_are_as_documented(heads: int, kv_heads: int, dtype: torch.dtype, left_out: tuple[str, ...]) -> None:
    """Only the first of many heads is served: the others count for the bucket, and cost nothing."""
    pattern, draw = Pattern((Branch(heads=range(1)),)), torch.Generator().manual_seed(0)
    shapes = [(1, LAYOUT.n, h, 2) for h in (heads, kv_heads, kv_heads, heads)]
    tensors = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    documented: dict[str, Any] = {
        "exchange": "ring",
        "bucket": default_bucket(TOKENS, heads, kv_heads, dtype.itemsize),
        "kernel": "auto",
        "scale": 2**-0.5,
    }

    def step(transport: SimulatedTransport, arguments: dict[str, Any]) -> tuple[list[Tensor], object]:
        log = RecordingTransport(transport)
        q, k, v, dout = (LAYOUT.shard(x, transport.rank) for x in tensors)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with measure(log) as forward:
            out = ring_attention(q, k, v, pattern, LAYOUT, group=log, **arguments)
        assert isinstance(out, Tensor)
        with measure(log) as backward:
            grads = torch.autograd.grad(out, leaves, dout)
        return [out.detach(), *grads], (log.sent, log.received, forward.bytes, backward.bytes)

    short = {name: value for name, value in GIVEN.items() if name not in left_out}
    without, stated = (
        Simulation(2, 0).run(partial(step, arguments=arguments))
        for arguments in (short, short | {name: documented[name] for name in left_out})
    )
    for (found, costs), (wanted, wanted_costs) in zip(without, stated, strict=True):
        assert all(x.equal(y) for x, y in zip(found, wanted, strict=True)) and costs == wanted_costs


def test_ranks_compare_their_calls_unless_told_otherwise() -> None:
    x, layout = torch.ones(1, 2, 1, 1), Layout.contiguous(4, 2)

    def step(transport: SimulatedTransport) -> None:
        with pytest.raises(ValueError, match="must come in the same order on every rank"):
            ring_attention(x, x, x, Pattern.dense(), layout, group=transport, name=f"layer {transport.rank}")

    Simulation(2, 0).run(step)


ALONE = ContextParallel(Layout.contiguous(9, 1), SoloTransport())
MODULES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    # As many key/value heads as heads, which share the dimension; Llama's, but for its norms.
    "SelfAttention": (
        partial(SelfAttention, 12, 3, Pattern.dense(causal=True)),
        {
            "kv_heads": 3, "head_dim": 4, "bias": False, "rotary_theta": 10000.0, "qk_norm": False,
            "inner_norm_eps": None,
        },
    ),
    # A decoder's, with the feed-forward and the norms of torchscale.
    "LongNetBlock": (
        partial(LongNetBlock, 12, 3, (4, 8), (1, 2)),
        {"ffn_dim": 48, "kv_heads": 3, "causal": True, "subln": True, "rotary_theta": 10000.0, "norm_eps": 1e-5},
    ),
}  # fmt: skip


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("make", "documented"), MODULES.values(), ids=MODULES)
def test_modules_without_arguments_are_as_documented(
    make: Callable[..., nn.Module], documented: dict[str, Any]
) -> None:
    """They compute the same when all parameters have the same numbers; small inputs show which epsilon a norm has."""
    found = []
    for module in (make(), make(**documented)):
        for parameter in module.parameters():
            parameter.data = numbers(*parameter.shape)
        shapes = [(name, x.shape) for name, x in module.state_dict().items()]
        found.append((shapes, module(0.01 * numbers(1, 9, 12), ALONE).detach().flatten().tolist()))
    assert found[0] == found[1]
