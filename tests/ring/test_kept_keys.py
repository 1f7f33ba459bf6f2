"""`exchange="direct-kept"`: the backward takes the keys that the forward received, as tensors that autograd saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from reference.pattern import Pattern
from ring import Layout
from ring.comm.buffer_meter import measure
from tests.support.attention_cases import plain
from verification.run.recording_transport import RecordingTransport
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks

RANKS, TOKENS = 3, 24
LAYOUT, PATTERN = Layout.zigzag(TOKENS, RANKS), Pattern.longnet([8, None], [1, 2], 4, causal=True)
SAVING = {
    "use_reentrant": False,
    "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.ring.attention.default]),
}
Tensors = list[torch.Tensor]


def drawn(rank: int) -> Tensors:
    """q, k, v."""
    torch.manual_seed(rank)
    return [torch.randn(2, LAYOUT.counts[rank], heads, 4, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]


def attended(transport: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
    """The output of a call."""
    return plain(q, k, v, PATTERN, LAYOUT, group=transport, **{"exchange": "direct-kept", "bucket": 2} | settings)


def on_ranks(step: Callable[..., Any]) -> list[Any]:
    return Simulation(RANKS, 5).run(step)


def gradients(out: torch.Tensor, leaves: Tensors, keep: bool = False) -> Tensors:
    return list(torch.autograd.grad(out.square().sum(), leaves, retain_graph=keep))


def same(found: Tensors, wanted: Tensors) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("same_bits", [None, 16])
def test_backward_sends_no_keys_and_equals_direct(same_bits: int | None) -> None:
    """With `same_bits` bit for bit."""
    layout = Layout.whole_chunks(96, RANKS, 16)

    def step(transport: SimulatedTransport) -> None:
        torch.manual_seed(transport.rank)
        leaves = [torch.randn(1, 32, heads, 4, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
        found, labels = {}, {}
        for exchange in ("direct", "direct-kept"):
            recording = RecordingTransport(transport)
            out = plain(
                *leaves, Pattern.dense(causal=True), layout, group=recording, exchange=exchange, same_bits=same_bits
            )
            before = len(recording.sent)
            found[exchange] = [out, *gradients(out, leaves)]
            labels[exchange] = [
                {label.split(" ")[0] for *_, label in part}
                for part in (recording.sent[:before], recording.sent[before:])
            ]
        assert labels["direct"][0] == labels["direct-kept"][0] <= {"keys"}
        assert "keys" not in labels["direct-kept"][1]
        if same_bits:
            assert same(found["direct-kept"], found["direct"])
        for x, y in zip(found["direct-kept"], found["direct"], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)

    on_ranks(step)


def test_calls_of_several_layers_keep_their_own_keys() -> None:
    """Backwards run in reverse order, twice, after other calls have received keys."""

    def step(transport: SimulatedTransport) -> None:
        leaves = drawn(transport.rank)
        layers = [[x * number for x in leaves] for number in (1.0, 0.5)]
        outs = [attended(transport, *layer) for layer in layers]
        for number in (1, 0, 1, 0):
            alone = attended(transport, *(x * (1.0, 0.5)[number] for x in leaves), exchange="direct")
            for x, y in zip(gradients(outs[number], leaves, keep=True), gradients(alone, leaves), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)

    on_ranks(step)


def test_without_a_backward_nothing_is_kept() -> None:
    """The buffers are those of "direct", and the forward of a checkpoint keeps nothing either."""

    def step(transport: SimulatedTransport) -> tuple[int, int]:
        leaves, held = drawn(transport.rank), {}
        with torch.no_grad():
            for exchange in ("direct", "direct-kept"):
                with measure(transport) as measured:
                    attended(transport, *leaves, exchange=exchange)
                held[exchange] = measured.bytes
        with measure(transport) as measured:
            attended(transport, *leaves)
        assert held["direct"] == held["direct-kept"]
        return held["direct"], measured.bytes

    assert any(kept > direct for direct, kept in on_ranks(step))


@pytest.mark.parametrize(
    "how", [{"use_reentrant": True}, {"use_reentrant": False}, SAVING], ids=["old", "new", "selective"]
)
def test_checkpoints_take_the_keys_of_their_last_forward(how: dict[str, Any]) -> None:
    def step(transport: SimulatedTransport) -> None:
        leaves = drawn(transport.rank)
        recording = RecordingTransport(transport)
        wanted = gradients(attended(transport, *leaves), leaves)
        out = checkpoint(partial(attended, recording), *leaves, **how)
        forward = len(recording.sent)
        out.square().sum().backward()
        assert same([x.grad for x in leaves if x.grad is not None], wanted)
        again = any("keys" in label for *_, label in recording.sent[forward:])
        assert again == ("context_fn" not in how and forward > 0)

    on_ranks(step)


def test_kept_keys_are_saved_tensors() -> None:
    """Hooks of saved tensors, by which they are moved to a CPU, see them."""

    def step(transport: SimulatedTransport) -> None:
        leaves, packed = drawn(transport.rank), dict[int, int]()

        def pack(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
            def copied(x: torch.Tensor) -> torch.Tensor:
                packed[number] = packed.get(number, 0) + 1
                return x.clone()

            return copied

        found = []
        for number, exchange in enumerate(("direct", "direct-kept")):
            with torch.autograd.graph.saved_tensors_hooks(pack(number), lambda x: x):
                out = attended(transport, *leaves, exchange=exchange)
            found.append(gradients(out, leaves))
        assert packed[1] == packed[0] + 1
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)

    on_ranks(step)


def test_no_exchange_by_heads_takes_it() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    for name in ("all-to-all+direct-kept", "direct-kept+all-to-all:1", "ring:1+direct-kept"):
        with pytest.raises(ValueError, match=r"exchange must be one of .*'direct-kept'.* got '"):
            plain(q, k, v, Pattern.dense(), Layout.contiguous(8, 1), exchange=name)
