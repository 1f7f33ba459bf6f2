"""Packed documents in modules and batches: each is computed as if alone, with positions and labels of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reference.pattern import Pattern
from ring import Layout
from ring.nn import (
    IGNORED,
    ContextParallel,
    LongNetBlock,
    SelfAttention,
    gather,
    next_tokens,
    shard_batch,
)
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

N, DOCUMENTS = 19, (4, 0, 1, 9, 5)
PATTERN = Pattern.longnet([4, None], [1, 2], 2, causal=True)


def on_ranks(p: int, step: Callable[[ContextParallel], Any], order: str = "zigzag") -> list[Any]:
    def run(transport: SimulatedTransport) -> Any:
        return step(ContextParallel(getattr(Layout, order)(N, p), transport))

    return Simulation(p, 0).run(run)


def alone(call: Callable[[Tensor, ContextParallel], Tensor], x: Tensor) -> Tensor:
    """The documents one by one, each with a context of its own."""
    edges = pairwise(accumulate(DOCUMENTS, initial=0))
    parts = [(x[:, start:stop], stop - start) for start, stop in edges if stop > start]
    return torch.cat([call(part, ContextParallel(Layout.contiguous(n, 1))) for part, n in parts], 1)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "SelfAttention": lambda: SelfAttention(8, 2, PATTERN),
    "SelfAttention, whose pattern has other documents": lambda: SelfAttention(
        8, 2, Pattern(PATTERN.branches, True, (N,))
    ),
    "LongNetBlock": lambda: LongNetBlock(8, 2, [4, 16], [1, 2]),
}


@pytest.mark.parametrize("p", (1, 3))
@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_each_document_as_if_it_were_alone(name: str, p: int) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name]().double(), torch.randn(2, N, 8, dtype=torch.float64)
    single = module
    if "other" in name:
        single = SelfAttention(8, 2, PATTERN).double()
        single.load_state_dict(module.state_dict())
    with torch.no_grad():
        wanted = alone(single, x)

        def step(context: ContextParallel) -> Tensor:
            packed = context.with_documents(DOCUMENTS)
            return gather(packed, module(packed.shard(x), packed, packed.positions))

        for found in on_ranks(p, step):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", (1, 3))
@pytest.mark.parametrize("whose", ("the batch's", "the context's", "the batch's before the context's"))
def test_batches_have_positions_and_labels_by_document(whose: str, p: int) -> None:
    tokens = torch.arange(100, 100 + 2 * N).reshape(2, N)
    within = torch.tensor([0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4])
    labels = next_tokens(tokens)
    wanted = labels.clone()
    wanted[:, [3, 4, 13, 18]] = IGNORED

    def step(context: ContextParallel) -> tuple[Tensor, ...]:
        given: dict[str, Any] = {"documents": DOCUMENTS}
        if whose == "the context's":
            context, given = context.with_documents(DOCUMENTS), {}
        elif "before" in whose:
            context = context.with_documents((N,))
        batch = shard_batch(context, tokens, labels, positions=within, **given)
        assert batch.context.documents == DOCUMENTS and batch.labels is not None
        assert (batch.context is context) == (whose == "the context's")
        assert batch.positions is batch.context.positions_on(tokens.device)
        return gather(context, batch.tokens), gather(context, batch.labels), gather(context, batch.positions, dim=0)

    for found in on_ranks(p, step):
        assert all(torch.equal(x, y) for x, y in zip(found, (tokens, wanted, within), strict=True))
    assert torch.equal(labels, next_tokens(tokens))


def test_positions_of_the_whole_sequence_are_refused_beside_documents() -> None:
    context = ContextParallel(Layout.contiguous(N, 1)).with_documents(DOCUMENTS)
    with pytest.raises(ValueError, match="positions must be None or 0, 1, ... in each document"):
        shard_batch(context, torch.arange(N)[None], positions=torch.arange(N))
    with pytest.raises(ValueError, match=r"positions must be .* those within each document: at \(4,\) it is 0, got 4"):
        SelfAttention(8, 2, PATTERN)(torch.randn(1, N, 8), context, torch.arange(N))


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What torch.compile learns of lengths here, it does not know in later tests."""
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("forgetful")
def test_compiled_modules_take_documents_that_change() -> None:
    torch.manual_seed(0)
    module, x = SelfAttention(8, 2, PATTERN), torch.randn(1, N, 8)
    graphs = []

    def counted(graph: torch.fx.GraphModule, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=counted)
    with torch.no_grad():
        for documents in (DOCUMENTS, (N,), (3, 16), (1,) * N):
            context = ContextParallel(Layout.contiguous(N, 1), documents=documents)
            context.positions_on(x.device)  # as shard_batch does
            torch.testing.assert_close(compiled(x, context), module(x, context))
    assert len(graphs) <= 2
