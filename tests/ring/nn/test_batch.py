"""What runs along the sequence is sharded together and put together again; labels are shifted before that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring import Layout
from ring.nn import IGNORED, ContextParallel, gather, next_tokens, shard_batch
from tests.support.nn_batch_tasks import a_batch_without_labels, gathered, sharded_and_gathered, without_agreement
from tests.support.nn_ranks import MESHES, UNEVEN
from verification.run.processes.pool import Pool


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
def test_a_batch_without_labels(pool: Pool) -> None:
    assert all(pool.run(a_batch_without_labels))


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
    assert shard_batch(context(0), torch.zeros(2, 0, dtype=torch.int64)).tokens.shape == (2, 0)


def test_errors_without_check() -> None:
    unchecked = ContextParallel(Layout.contiguous(4, 1), check=False)
    with pytest.raises(ValueError, match="^tokens must have the layout's 4 tokens"):
        shard_batch(unchecked, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="^x must be"):
        gather(unchecked, torch.zeros(1, 3))
