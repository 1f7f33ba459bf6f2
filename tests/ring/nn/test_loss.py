"""The loss helper against torch's own cross entropy on the whole batch: the value on every rank, and the gradient."""

from __future__ import annotations

import math

import pytest
import torch

from ring.nn import IGNORED, count_labels, cross_entropy, token_mean
from ring.nn.loss import _check_shapes
from tests.support.nn_loss_tasks import (
    KINDS,
    counted,
    evaluated,
    from_a_second_thread,
    in_type,
    loss_error,
    loss_within_a_checkpoint,
    scales,
    too_few_labelled,
)
from tests.support.nn_ranks import MESHES, UNEVEN
from verification.run.processes.pool import Pool

EXACT = 1e-13  # fp64, of values and gradients of the order of 1


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", UNEVEN)
def test_value_and_gradient(pool: Pool, kind: str, shards: str) -> None:
    answers = pool.run(loss_error, kind, shards, "2x2", 1, False)
    assert max(max(value, grad) for value, grad, _ in answers) < EXACT
    assert len({tuple(values) for *_, values in answers}) == 1  # the same bits on every rank


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapped", [True, False])
def test_micro_batches(pool: Pool, kind: str, wrapped: bool) -> None:
    answers = pool.run(loss_error, kind, "empty", "2x2 apart", 3, wrapped)
    assert max(max(value, grad) for value, grad, _ in answers) < EXACT
    assert len({tuple(values) for *_, values in answers}) == 1


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(pool: Pool, mesh: str) -> None:
    answers = pool.run(loss_error, "some", "uneven", mesh, 1, True)
    assert max(max(value, grad) for value, grad, _ in answers) < EXACT


@pytest.mark.ranks
def test_count_labels(pool: Pool) -> None:
    assert pool.run(counted, "all", "2x2") == [(2 * 2 * 2 * 13, 2 * 2 * 13, 0)] * 4
    assert pool.run(counted, "one", "2x2") == [(1, 1, 0)] * 4
    assert pool.run(counted, "none", "1x4") == [(0, 0, 0)] * 4


@pytest.mark.ranks
def test_scales(pool: Pool) -> None:
    for errors in pool.run(scales):
        assert max(errors) < EXACT


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(pool: Pool, dtype: torch.dtype) -> None:
    for value_type, grad_type, value, grad in pool.run(in_type, dtype):
        assert value_type == "torch.float32" and grad_type == str(dtype)
        assert value < 32 * torch.finfo(torch.float32).eps  # some operations of fp32, on values up to 4
        assert grad < torch.finfo(dtype).eps  # of gradients below 1, rounded once to dtype


@pytest.mark.ranks
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_second_thread_is_refused(pool: Pool, culprit: int) -> None:
    answers = pool.run(from_a_second_thread, culprit)
    assert answers == [answers[0]] * 4
    assert answers[0][0].startswith(
        f"ValueError: rank {culprit}: calls on a group must come from one thread: got cross"
    )


@pytest.mark.ranks
def test_a_count_that_is_too_small_is_refused(pool: Pool) -> None:
    answers = pool.run(too_few_labelled)
    assert answers == [answers[0]] * 4
    assert "labelled must be the number of labelled tokens of the whole step" in answers[0]
    assert "got 2 where this call alone has 26" in answers[0]


@pytest.mark.ranks
def test_without_gradients(pool: Pool) -> None:
    for requires_grad, error in pool.run(evaluated):
        assert not requires_grad and error < EXACT


@pytest.mark.ranks
def test_within_a_checkpoint(pool: Pool) -> None:
    assert pool.run(loss_within_a_checkpoint) == [0.0] * 4


def test_one_process() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (2, 5))
    labels[0, 2:] = IGNORED
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    found = cross_entropy(logits, labels)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=EXACT)
    pair = (torch.autograd.grad(loss, logits)[0] for loss in (found, wanted))
    torch.testing.assert_close(*pair, rtol=0.0, atol=EXACT)
    assert count_labels(labels) == 7 and count_labels([labels, labels], ignored=0) == 20 - 2 * int((labels == 0).sum())


def test_a_loss_that_is_not_finite_is_shown() -> None:
    labels = torch.zeros(1, 2, dtype=torch.int64)
    assert math.isinf(token_mean(torch.tensor([[math.inf, 1.0]]), labels))
    assert math.isnan(token_mean(torch.tensor([[math.nan, 1.0]]), labels))


def test_another_ignored_label() -> None:
    logits, labels = torch.randn(1, 3, 4), torch.tensor([[0, 1, 2]])
    found = cross_entropy(logits, labels, ignored=1)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits[0, ::2], labels[0, ::2]))


def test_over_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="over must be a process group, a DeviceMesh or None, got 4"):
        count_labels(torch.zeros(2, dtype=torch.int64), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 9), (3, 9), (2, 4), (2, 9, 1)])
def test_the_hint_is_for_labels_of_the_whole_sequence(shape: tuple[int, ...]) -> None:
    """Of as many sequences, and longer."""
    labels = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=r"labels must have the shape \(2, 5\) of x, got [^:]*$"):
        _check_shapes("x", torch.zeros(2, 5), labels, (2, 5))
    with pytest.raises(ValueError, match="are they those of the whole sequence"):
        _check_shapes("x", torch.zeros(2, 5), torch.zeros(2, 9, dtype=torch.long), (2, 5))
