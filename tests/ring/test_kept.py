"""Exchanges that keep for the backward what the forward received: "direct-kept" and "all-to-all-kept"."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from reference import cost
from reference.pattern import Pattern
from ring import Layout, execute
from ring.adjacent import adjacent, joined
from ring.comm.buffer_meter import measure
from tests.support.attention_cases import plain
from verification.run.recording_transport import RecordingTransport
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = [pytest.mark.ranks, pytest.mark.parametrize("exchange", ["direct", "all-to-all"])]

RANKS, TOKENS = 3, 24
LAYOUT, PATTERN = Layout.zigzag(TOKENS, RANKS), Pattern.longnet([8, None], [1, 2], 4, causal=True)
SAVING = {
    "use_reentrant": False,
    "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.ring.attention.default]),
}
DENSE = Pattern.dense(causal=True)
Tensors = list[torch.Tensor]


def drawn(rank: int) -> Tensors:
    """q, k, v."""
    torch.manual_seed(rank)
    return [torch.randn(2, LAYOUT.counts[rank], heads, 4, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]


def attended(transport: Any, exchange: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output of a call in several steps, or stages."""
    return plain(q, k, v, PATTERN, LAYOUT, group=transport, exchange=exchange, bucket=2)


def on_ranks(step: Callable[..., Any]) -> list[Any]:
    return Simulation(RANKS, 5).run(step)


def gradients(out: torch.Tensor, leaves: Tensors, keep: bool = False) -> Tensors:
    return list(torch.autograd.grad(out.square().sum(), leaves, retain_graph=keep))


def assert_near(found: Tensors, wanted: Tensors) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads", "same_bits"), [(4, 2, None), (12, 12, None), (2, 1, None), (12, 12, 16)])
def test_backward_sends_gradients_alone(exchange: str, heads: int, kv_heads: int, same_bits: int | None) -> None:
    """With the same results; with `same_bits` bit for bit. Of 2 heads one rank of three has none."""
    layout = Layout.whole_chunks(96, RANKS, 16)

    def step(transport: SimulatedTransport) -> None:
        torch.manual_seed(transport.rank)
        leaves = [torch.randn(1, 32, h, 4, dtype=torch.float64).requires_grad_() for h in (heads, kv_heads, kv_heads)]
        found, sent = [], []
        for name in (exchange, f"{exchange}-kept"):
            recording = RecordingTransport(transport)
            out = plain(
                *leaves, DENSE, layout, group=recording, exchange=name, bucket=16,
                same_bits=same_bits,
            )  # fmt: skip
            forward = len(recording.sent)
            found.append([out, *gradients(out, leaves)])
            sent.append((recording.sent[:forward], recording.sent[forward:]))
        assert sent[0][0] == sent[1][0]
        assert all(label.startswith("gradients") for *_, label in sent[1][1])
        assert_near(*found)
        assert not same_bits or all(torch.equal(x, y) for x, y in zip(*found, strict=True))
        assert sum(map(len, sent[0])) > sum(map(len, sent[1])) or not sent[0][1]

    on_ranks(step)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_buffers_are_those_of_the_reference(exchange: str, order: str) -> None:
    """In several steps, or more stages than there are buffers by turns; in contiguous order rank 0 receives no keys."""
    layout = getattr(Layout, order)(TOKENS, RANKS)
    given = [layout.positions(rank).numpy() for rank in range(RANKS)]
    wanted = cost.buffers(cost.Setting(DENSE, given, 1, 12, 12, 4, 8, 3), f"{exchange}-kept", 2)

    def step(transport: SimulatedTransport) -> None:
        torch.manual_seed(transport.rank)
        leaves = [torch.randn(1, 8, 12, dim, dtype=torch.float64).requires_grad_() for dim in (4, 4, 3)]
        outs = [
            plain(*leaves, DENSE, layout, group=transport, exchange=name, bucket=2)
            for name in (exchange, f"{exchange}-kept")
        ]
        with measure(transport) as forward:
            plain(*leaves, DENSE, layout, group=transport, exchange=f"{exchange}-kept", bucket=2)
        plainly = gradients(outs[0], leaves)
        with measure(transport) as backward:
            kept = gradients(outs[1], leaves)
        assert_near([outs[1], *kept], [outs[0], *plainly])
        assert forward.bytes == wanted.forward[transport.rank]
        assert backward.bytes == wanted.backward[transport.rank]

    on_ranks(step)


def test_calls_of_several_layers_keep_their_own(exchange: str) -> None:
    """Backwards run in reverse order, twice, after other calls have received theirs."""

    def step(transport: SimulatedTransport) -> None:
        leaves, factors = drawn(transport.rank), (1.0, 0.5)
        outs = [attended(transport, f"{exchange}-kept", *(x * factor for x in leaves)) for factor in factors]
        for number in (1, 0, 1, 0):
            alone = attended(transport, exchange, *(x * factors[number] for x in leaves))
            assert_near(gradients(outs[number], leaves, keep=True), gradients(alone, leaves))

    on_ranks(step)


def test_without_a_backward_nothing_is_kept(exchange: str) -> None:
    def held(transport: SimulatedTransport, name: str) -> int:
        with measure(transport) as measured:
            attended(transport, name, *drawn(transport.rank))
        return measured.bytes

    def step(transport: SimulatedTransport) -> tuple[int, int]:
        with torch.no_grad():
            plainly, nothing = held(transport, exchange), held(transport, f"{exchange}-kept")
        assert plainly == nothing
        return plainly, held(transport, f"{exchange}-kept")

    assert any(kept > plainly for plainly, kept in on_ranks(step))


@pytest.mark.parametrize(
    "how", [{"use_reentrant": True}, {"use_reentrant": False}, SAVING], ids=["old", "new", "selective"]
)
def test_checkpoints_take_what_their_last_forward_received(exchange: str, how: dict[str, Any]) -> None:
    def step(transport: SimulatedTransport) -> None:
        leaves, recording = drawn(transport.rank), RecordingTransport(transport)
        wanted = gradients(attended(transport, f"{exchange}-kept", *leaves), leaves)
        out = checkpoint(partial(attended, recording, f"{exchange}-kept"), *leaves, **how)
        forward = len(recording.sent)
        out.square().sum().backward()
        assert all(torch.equal(x.grad, y) for x, y in zip(leaves, wanted, strict=True) if x.grad is not None)
        again = any(not label.startswith("gradients") for *_, label in recording.sent[forward:])
        assert again == ("context_fn" not in how and forward > 0)

    on_ranks(step)


def test_hooks_of_saved_tensors_see_what_is_kept(exchange: str) -> None:
    """Hooks of saved tensors, by which they are moved to a CPU, see them, and may return other strides. The backward
    frees them.
    """

    def step(transport: SimulatedTransport) -> None:
        leaves, found, counts, left = drawn(transport.rank), [], [], []
        for name in (exchange, f"{exchange}-kept"):
            saved: list[weakref.ref[torch.Tensor]] = []

            def pack(x: torch.Tensor, saved: list[weakref.ref[torch.Tensor]] = saved) -> torch.Tensor:
                saved.append(weakref.ref(x))
                return x.clone()

            def unpack(x: torch.Tensor) -> torch.Tensor:
                return x.mT.contiguous().mT if x.dim() > 1 else x

            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = attended(transport, name, *leaves)
            found.append(gradients(out, leaves))
            counts.append(len(saved))
            left.append(sum(x() is not None for x in saved))
        assert_near(*found)
        assert counts[1] > counts[0] and left[1] == left[0]

    on_ranks(step)


def test_forms_are_those_of_what_is_kept(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph finds them in its buffer: of several stages, of a rank without heads, of one that receives no keys."""

    def checked(run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any) -> Any:
        results = execute.forward(run, q, k, v, sinks)
        forms = [(x.shape, x.dtype) for x in results[2]]
        assert forms == execute.kept_forms(run, q, k, v)
        for found, kept in zip(adjacent(joined(results[2], q), forms), results[2], strict=True):
            assert torch.equal(found, kept)
        return results

    def step(transport: SimulatedTransport) -> None:
        for heads, kv_heads in ((12, 6), (2, 1)):
            q, k = (torch.randn(2, 32, h, 4).bfloat16().requires_grad_() for h in (heads, kv_heads))
            v = torch.randn(2, 32, kv_heads, 3).bfloat16()
            plain(q, k, v, DENSE, Layout.contiguous(96, RANKS), group=transport, exchange=f"{exchange}-kept", bucket=16)

    monkeypatch.setattr("ring.attention.forward", checked)
    on_ranks(step)


def test_beside_another_exchange_nothing_is_kept(exchange: str) -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    for name in (f"{exchange}-kept+ring", f"ring:1+{exchange}-kept", f"ring+{exchange}-kept:1"):
        with pytest.raises(ValueError, match=rf"exchange must be one of .*'{exchange}-kept'.* got '"):
            plain(q, k, v, Pattern.dense(), Layout.contiguous(8, 1), exchange=name)


def test_within_a_graph_one_rank_computes_the_same(exchange: str) -> None:
    """`tests/ring/test_torch_compile.py` has two ranks."""
    layout, leaves = Layout.contiguous(8, 1), [x.requires_grad_() for x in torch.randn(3, 1, 8, 2, 4).unbind()]
    call = partial(plain, pattern=DENSE, layout=layout, exchange=f"{exchange}-kept")
    wanted, found = (f(*leaves) for f in (call, torch.compile(call, backend="aot_eager", fullgraph=True)))
    assert_near([found, *gradients(found, leaves)], [wanted, *gradients(wanted, leaves)])
