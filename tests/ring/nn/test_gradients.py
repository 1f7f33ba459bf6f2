"""Gradients averaged as DDP averages them, and clipped by the norm of all of them, plain and sharded ones together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ring.nn import average_gradients, clip_grad_norm
from ring.nn.gradients import BUCKET, _buckets, _square_of_plain
from tests.support.nn_gradient_tasks import (
    PLACEMENTS,
    averaged,
    clipped,
    infinite_on_one_rank,
    like_ddp,
    local_gradients_are_noticed,
    refused_dtensors,
)
from verification.run.processes.pool import Pool


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mesh", [None, "2x2", "2x2 apart"])
def test_the_average(pool: Pool, dtype: torch.dtype, mesh: str | None) -> None:
    # Gradients up to 4; the sum of four in the accumulator's type and one rounding to the dtype.
    assert max(pool.run(averaged, dtype, mesh)) < 8


@pytest.mark.ranks
def test_the_average_is_that_of_ddp(pool: Pool) -> None:
    assert max(pool.run(like_ddp)) < 1e-13  # fp64; gradients of the order of 10


@pytest.mark.ranks
@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("plain", [0, 2])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_the_norm_and_the_clipped_gradients(pool: Pool, kind: str, plain: int, max_norm: float) -> None:
    answers = pool.run(clipped, kind, max_norm, plain)
    assert max(max(norm, grad) for norm, grad, _ in answers) < 1e-13
    assert len({exact for *_, exact in answers}) == 1


@pytest.mark.ranks
def test_gradients_that_were_not_averaged_are_refused(pool: Pool) -> None:
    answers = pool.run(local_gradients_are_noticed)
    assert answers == [answers[0]] * 4
    assert "gradients of plain parameters must be alike on all ranks: average them first" in answers[0]


@pytest.mark.ranks
def test_infinite_gradients_on_one_rank_are_refused(pool: Pool) -> None:
    answers = pool.run(infinite_on_one_rank)
    assert answers == [answers[0]] * 4 and "must be alike on all ranks" in answers[0]


@pytest.mark.ranks
def test_dtensors_that_are_refused(pool: Pool) -> None:
    answers = pool.run(refused_dtensors)
    assert answers == [answers[0]] * 4
    average, clip = answers[0]
    assert average.startswith(
        "NotImplementedError: rank 0: parameters must be plain tensors, got a DTensor as number 0"
    )
    assert clip.startswith("NotImplementedError: rank 0: gradients must be averaged before they are clipped")


def with_grad(grad: Any) -> nn.Parameter:
    x = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    x.grad = grad
    return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_process(dtype: torch.dtype) -> None:
    grads = [torch.randn(4, 3).to(dtype), torch.randn(5).to(dtype)]
    mine, theirs = ([with_grad(grad.clone()) for grad in grads] for _ in range(2))
    average_gradients(mine)
    found, wanted = clip_grad_norm(mine, 0.1), torch.nn.utils.clip_grad_norm_(theirs, 0.1)
    assert found.dtype is torch.float64
    precision = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted.double(), rtol=precision, atol=0.0)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=precision, atol=0.0)


def test_buckets_have_one_dtype_and_a_size() -> None:
    half = BUCKET // 16  # of these, two in fp64 fill a bucket
    sizes = [
        (half, torch.float64),
        (3, torch.float32),
        (half, torch.float64),
        (1, torch.float64),
        (3 * half, torch.float64),
    ]
    given = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes]
    found = [[(x.numel(), x.dtype) for x in bucket] for bucket in _buckets(given)]
    assert found == [[sizes[0], sizes[2]], [sizes[3]], [sizes[4]], [sizes[1]]]


class Unlike:
    """Ranks whose squares of norms are as many roundings apart."""

    def __init__(self, roundings: int) -> None:
        self.roundings = roundings

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.stack([mine, mine * (1 + self.roundings * 2.0**-52)])


def test_ranks_may_sum_the_squares_in_another_order() -> None:
    """Of n entries, which makes n roundings."""
    grads: Any = [torch.ones(4, dtype=torch.float64), torch.ones(3)]
    assert _square_of_plain(grads, Unlike(6)) == 7.0  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be alike on all ranks"):
        _square_of_plain(grads, Unlike(10))  # type: ignore[arg-type]


def test_nothing_to_clip() -> None:
    assert clip_grad_norm([], 1.0) == 0.0
    assert clip_grad_norm(nn.Parameter(torch.zeros(3)), 1.0) == 0.0
    average_gradients([])


def test_a_norm_that_is_not_finite() -> None:
    x = with_grad(torch.tensor([1.0, torch.inf]))
    assert torch.isinf(clip_grad_norm(x, 1.0))
    assert x.grad is not None and x.grad[0] == 0.0 and x.grad[1].isnan()
    y = with_grad(torch.tensor([1.0, torch.nan]))
    assert torch.isnan(clip_grad_norm([y], 1.0)) and y.grad is not None and y.grad.isnan().all()


def test_sparse_gradients_are_refused() -> None:
    x = nn.Parameter(torch.zeros(3))
    x.grad = torch.zeros(3).to_sparse()
    with pytest.raises(ValueError, match="gradients must be dense, got that of parameter 0"):
        average_gradients([x])
    with pytest.raises(ValueError, match="gradients must be dense, got one in torch.sparse_coo"):
        clip_grad_norm([x], 1.0)


def test_complex_gradients_are_refused() -> None:
    x = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    x.grad = torch.ones_like(x)
    for call in (average_gradients, lambda xs: clip_grad_norm(xs, 1.0)):
        with pytest.raises(NotImplementedError, match="gradients must be real, got one in torch.complex64"):
            call([x])


def test_a_parameter_that_is_listed_twice_counts_once() -> None:
    x = nn.Parameter(torch.zeros(2))
    x.grad = torch.tensor([3.0, 4.0])
    average_gradients([x, x])
    assert clip_grad_norm([x, x], 1.0).item() == 5.0
    assert torch.allclose(x.grad, torch.tensor([0.6, 0.8]))


def test_an_iterator_at_its_end_is_refused() -> None:
    parameters = nn.Linear(2, 2).parameters()
    average_gradients(parameters)
    with pytest.raises(ValueError, match="parameters must hold a tensor, got an iterator at its end"):
        clip_grad_norm(parameters, 1.0)
