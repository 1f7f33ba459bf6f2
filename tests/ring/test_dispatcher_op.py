"""A forward is one operator to those who watch operators: what selective checkpointing makes of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ring import Layout, Pattern, Transport, ring_attention
from ring.comm.group import transport_over
from ring.dispatcher_op import _prepared
from tests.support.attention_cases import PATTERNS, inputs, plain
from tests.support.drawn_patterns import patterns
from tests.support.ranks import Ranks
from verification.run.recording_transport import RecordingTransport
from verification.run.simulation.simulation import Simulation

LAYOUT = Layout.contiguous(17, 1)
SAVED = torch.ops.ring.attention.default


class Names(TorchDispatchMode):
    """Counts operators by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("differentiated", (False, True))
@pytest.mark.parametrize("lse", (False, True))
def test_a_forward_is_one_operator(lse: bool, differentiated: bool) -> None:
    """Nothing is kept for it when it has run."""
    q, k, v, *_ = inputs()
    with Names() as seen:
        ring_attention(q.requires_grad_(differentiated), k, v, PATTERNS["longnet"], LAYOUT, return_lse=lse)
    assert seen.count["ring.attention.default"] == 1 and not _prepared
    assert not [name for name in seen.count if "bmm" in name or ("attention" in name and "ring" not in name)]


@pytest.mark.parametrize("exchange", ("direct", "all-to-all", "ring+all-to-all:2"))
def test_a_new_plan_takes_no_operators(exchange: str) -> None:
    """Selective checkpointing wants the same ones in a recomputation, whose plan is there already."""

    def names(transport: Transport) -> list[Counter[str]]:
        layout, found = Layout.striped(29, 4), []
        q, k, v = (torch.ones(1, layout.counts[transport.rank], 2, 4) for _ in range(3))
        for _ in range(2):
            with Names() as seen:
                ring_attention(q, k, v, Pattern.dense(window=11), layout, group=transport, exchange=exchange)
            found.append(seen.count)
        return found

    for first, second in Simulation(4, 0).run(names):
        assert first == second


@pytest.mark.parametrize("number", (10**9, 0, -1, 2**62))
def test_the_operator_is_no_way_to_call(number: int) -> None:
    q, k, v, *_ = inputs()
    plain(q, k, v, Pattern.dense(), LAYOUT)  # whose number was there, and is no more
    with pytest.raises(ValueError, match=f"prepared must be the number of a forward .* begun.* got {number}"):
        torch.ops.ring.attention(q, k, v, None, number)


@given(patterns(3), patterns(3))
def test_a_text_stands_for_one_pattern(one: Pattern, other: Pattern) -> None:
    """In graphs, which take a pattern's text in its place."""
    again = Pattern.from_dict(json.loads(one.text))
    assert again == one and repr(again) == repr(one)
    assert (one.text == other.text) == (one == other)


PATTERN, TOKENS = Pattern.longnet((4, None), (1, 2), 2, causal=True), 12


# Gradients, forwards of the ring that ran (by their first messages), and the number of the latest call on the group.
Trace = tuple[list[Tensor], int, int]


class Counting(RecordingTransport):
    """Counts the forwards that ask for buffers."""

    forwards = 0

    def prepare(self, key: Any, outgoing: Any) -> None:
        self.forwards += "forward" in key
        super().prepare(key, outgoing)


SAVING = partial(create_selective_checkpoint_contexts, [SAVED])
WAYS: dict[str, tuple[int, dict[str, Any] | None]] = {  # forwards of three layers, and arguments of `checkpoint`
    "kept": (3, None),
    "selective": (3, {"use_reentrant": False, "context_fn": SAVING}),
    "computed again": (6, {"use_reentrant": False}),
    "reentrant": (6, {"use_reentrant": True}),
}


def _layer(transport: Transport, name: str, x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (x @ weight).view(1, -1, 3, 2, 4).unbind(2)
    out = plain(q, k, v, PATTERN, Layout.striped(TOKENS, 2), group=transport, exchange="direct", name=name)
    return x + out.flatten(2).tanh()


def _train(group: Transport | None, way: str) -> Trace:
    transport = Counting(transport_over(group, 2))
    draw = torch.Generator().manual_seed(transport.rank)
    weights = [torch.randn(8, 24, dtype=torch.float64, generator=draw).requires_grad_() for _ in range(3)]
    x = torch.randn(1, TOKENS // 2, 8, dtype=torch.float64, generator=draw).requires_grad_()
    y, options = x, WAYS[way][1]
    for number, weight in enumerate(weights):
        layer = partial(_layer, transport, f"layer {number}")
        y = layer(y, weight) if options is None else checkpoint(layer, y, weight, **options)
    y.square().sum().backward()
    found = [leaf.grad for leaf in (x, *weights) if leaf.grad is not None]
    assert len(found) == 4
    return found, transport.forwards, transport.calls.number


@pytest.fixture(params=("gloo", "sim"))
def run(request: pytest.FixtureRequest) -> Callable[[str], list[Trace]]:
    """Two ranks train."""
    if request.param == "sim":
        return lambda way: Simulation(2, 0).run(lambda transport: _train(transport, way))
    ranks: Ranks = request.getfixturevalue("ranks")
    return lambda way: ranks(2).run(_train, None, way)


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_forwards_run_as_often_as_needed(run: Callable[[str], list[Trace]], way: str) -> None:
    """Selective checkpointing runs none twice, the others all. Calls are numbered alike on both ranks."""
    kept, found = run("kept"), run(way)
    for (exact, _, _), (gradients, forwards, number) in zip(kept, found, strict=True):
        assert forwards == WAYS[way][0] and number == found[0][2]
        assert all(x.equal(y) for x, y in zip(exact, gradients, strict=True))
