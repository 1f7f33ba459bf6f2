"""What runs along the sequence is sharded together and put together again; labels are shifted before that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference import Pattern, attention
from ring import Layout
from ring.nn import IGNORED, ContextParallel, gather, next_tokens, shard_batch
from tests.support.nn_batch_tasks import (
    a_batch_without_labels,
    gathered,
    gathered_in_a_second_thread,
    sharded_and_gathered,
    without_agreement,
)
from tests.support.nn_ranks import MESHES, UNEVEN, drawn, layout_of
from verification.run.processes.pool import Pool
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation


@pytest.mark.ranks
@pytest.mark.parametrize("shards", UNEVEN)
@pytest.mark.parametrize("mesh", MESHES)
def test_shards_and_the_whole(pool: Pool, shards: str, mesh: str) -> None:
    assert all(pool.run(sharded_and_gathered, shards, mesh))


@pytest.mark.ranks
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_tensor_is_gathered(pool: Pool, dim: int) -> None:
    assert all(pool.run(gathered, "empty", dim))


@pytest.mark.ranks
def test_without_check_ranks_do_not_compare(pool: Pool) -> None:
    assert all(pool.run(without_agreement))


@pytest.mark.ranks
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_second_thread_is_refused_on_two_ranks(pool: Pool, culprit: int) -> None:
    answers = pool.run(gathered_in_a_second_thread, culprit)
    assert answers == 2 * [(0, answers[0][1]), (1, answers[0][1])]
    assert answers[0][1].startswith(f"ValueError: rank {culprit}: calls on a group must come from one thread: got ")


@pytest.mark.ranks
def test_a_batch_without_labels(pool: Pool) -> None:
    assert all(pool.run(a_batch_without_labels))


@pytest.mark.ranks
@pytest.mark.parametrize("seed", range(8))
def test_over_a_transport_that_does_the_worst(seed: int) -> None:
    """Batches, attention and gathering in turn, by simulated ranks; one of them has no tokens."""
    layout, pattern = layout_of((4, 0, 5)), Pattern.dense(causal=True)
    q, tokens = drawn(0, 2, 9, 2, 4), torch.arange(18).view(2, 9)

    def step(transport: SimulatedTransport) -> list[torch.Tensor]:
        context = ContextParallel(layout, transport)
        found = []
        for number in range(2):
            batch = shard_batch(context, tokens + number, next_tokens(tokens + number), q=q)
            mine = batch.others["q"]
            found += [gather(context, batch.tokens), gather(context, context.attention(mine, mine, mine, pattern))]
        return found

    exact = attention(q, q, q, pattern)[0]
    for found in Simulation(3, seed).run(step):
        assert torch.equal(found[0], tokens) and torch.equal(found[2], tokens + 1)
        for out in (found[1], found[3]):
            torch.testing.assert_close(out, exact, rtol=0.0, atol=1e-13)


def test_next_tokens() -> None:
    tokens = torch.tensor([[5, 6, 7], [1, 2, 3]], dtype=torch.int32)
    wanted = torch.tensor([[6, 7, IGNORED], [2, 3, IGNORED]])
    found = next_tokens(tokens)
    assert torch.equal(found, wanted) and found.dtype is torch.int64
    assert torch.equal(next_tokens(tokens[:, :1]), torch.full((2, 1), IGNORED))
    assert next_tokens(tokens[:, :0]).shape == (2, 0)
    assert next_tokens(tokens, ignored=-1)[0, 2] == -1


@pytest.mark.parametrize("tokens", [torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3), [[1, 2]], None])
def test_next_tokens_of_nothing_else(tokens: Any) -> None:
    with pytest.raises(ValueError, match="tokens must be a \\(batch, tokens\\) int64 or int32 tensor, got"):
        next_tokens(tokens)


def context(n: int = 4) -> ContextParallel:
    return ContextParallel(Layout.contiguous(n, 1))


@pytest.mark.parametrize(
    "tokens, labels, noticed",
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], True),
        ([1, 2, 3, 4], [IGNORED, 2, 3, IGNORED], True),
        ([1, 2, 3, 4], [2, 3, 4, IGNORED], False),
        ([1, 2, 3, 4], [IGNORED] * 4, False),
        ([7, 7, 7, 7], [7, 7, 7, IGNORED], False),  # the next tokens are the tokens
        ([7, 7, 7, 3], [7, 7, 7, 3], True),
        ([1, 7, 7, 4], [IGNORED, 7, IGNORED, IGNORED], False),
        ([1, 2, 3, 4], [1, IGNORED, IGNORED, IGNORED], False),  # one label alone may be anything
        ([1, 2, 3, 4], [1, 2, 3, 5], False),
    ],
)
def test_labels_that_were_not_shifted_are_refused(tokens: list[int], labels: list[int], noticed: bool) -> None:
    given = torch.tensor([tokens]), torch.tensor([labels])
    if noticed:
        with pytest.raises(ValueError, match="labels must be the next tokens, shifted before they are sharded"):
            shard_batch(context(), *given)
    else:
        assert torch.equal(shard_batch(context(), *given).tokens, given[0])


def test_one_process() -> None:
    x = torch.randn(2, 4, 3)
    assert torch.equal(gather(context(), x), x)
    assert shard_batch(context(), torch.zeros(2, 4).long(), call=x).others["call"].equal(x)
    assert shard_batch(context(0), torch.zeros(2, 0, dtype=torch.int64)).tokens.shape == (2, 0)


def test_errors_without_check() -> None:
    unchecked = ContextParallel(Layout.contiguous(4, 1), check=False)
    with pytest.raises(ValueError, match="^tokens must have the layout's 4 tokens"):
        shard_batch(unchecked, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="^x must be"):
        gather(unchecked, torch.zeros(1, 3))


@pytest.mark.parametrize("shape", [(1, 3), (1, 5), (4,), ()])
def test_the_hint_is_for_tensors_that_are_sharded_already(shape: tuple[int, ...]) -> None:
    context, whole = ContextParallel(Layout.contiguous(4, 1)), torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"mask must have the layout's 4 tokens along dimension 1, got [^:]*$"):
        shard_batch(context, whole, mask=torch.ones(shape))
