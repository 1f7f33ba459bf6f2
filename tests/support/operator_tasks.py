"""A small model on two ranks whose activations are kept, or computed again, in several ways: an importable function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ring import Layout, Pattern, Transport, ring_attention
from ring.comm.group import transport_over
from ring.comm.transport import RecordingTransport

WAYS = ("kept", "selective", "computed again", "reentrant")
PATTERN = Pattern.longnet((4, None), (1, 2), 2, causal=True)
TOKENS = 12
SAVED = torch.ops.ring.attention.default


@dataclass(frozen=True)
class Trace:
    """forwards: of the ring that ran, by their first messages. number: of the latest call on the group."""

    gradients: list[Tensor]
    forwards: int
    number: int


class Counting(RecordingTransport):
    """Counts the forwards that ask for buffers."""

    forwards = 0

    def prepare(self, key: Any, outgoing: Any) -> None:
        self.forwards += "forward" in key
        super().prepare(key, outgoing)


def train(group: Transport | None, way: str) -> Trace:
    """Task: forward and backward of three layers, on this rank."""
    transport = Counting(transport_over(group, 2))
    draw = torch.Generator().manual_seed(transport.rank)
    weights = [torch.randn(8, 24, dtype=torch.float64, generator=draw).requires_grad_() for _ in range(3)]
    x = torch.randn(1, TOKENS // 2, 8, dtype=torch.float64, generator=draw).requires_grad_()
    y = x
    for number, weight in enumerate(weights):
        y = _WAYS[way](partial(_layer, transport, f"layer {number}"), y, weight)
    y.square().sum().backward()
    found = [leaf.grad for leaf in (x, *weights) if leaf.grad is not None]
    assert len(found) == 4
    return Trace(found, transport.forwards, transport.calls.number)


def _layer(transport: Transport, name: str, x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (x @ weight).view(1, -1, 3, 2, 4).unbind(2)
    layout = Layout.striped(TOKENS, 2)
    out = ring_attention(q, k, v, PATTERN, layout, group=transport, exchange="direct", name=name)
    assert isinstance(out, Tensor)
    return x + out.flatten(2).tanh()


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    def policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator is SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    found: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = create_selective_checkpoint_contexts(
        policy
    )
    return found


Layer = Callable[[Tensor, Tensor], Tensor]
_WAYS: dict[str, Callable[[Layer, Tensor, Tensor], Any]] = {
    "kept": lambda layer, x, weight: layer(x, weight),
    "selective": lambda layer, x, weight: checkpoint(layer, x, weight, use_reentrant=False, context_fn=_contexts),
    "computed again": lambda layer, x, weight: checkpoint(layer, x, weight, use_reentrant=False),
    "reentrant": lambda layer, x, weight: checkpoint(layer, x, weight, use_reentrant=True),
}
