"""The loss helpers against torch's own cross entropy on the whole batch: the value on every rank, and the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ring.nn import IGNORED, average_gradients, count_labels, cross_entropy, gather, token_mean
from tests.support.nn_ranks import OVERS, TOKENS, VOCABULARY, context_of, drawn, far, over_of, said, whole_tokens
from tests.support.ranks import Ranks
from verification.run.in_flight_calls import in_second_thread

# Types of logits and labels, the label to ignore, how many are labelled in other micro-batches, averaged_over.
SETTINGS = (
    (torch.float64, torch.int64, IGNORED, None, None),
    (torch.float64, torch.int32, 0, 3, 1),
    (torch.float32, torch.int32, 2, 0, 2.5),
    (torch.bfloat16, torch.int64, -1, None, None),
    (torch.float16, torch.int64, 9, 2, 3),
)


def _scores(seed: int, ignored: int) -> tuple[Tensor, Tensor]:
    """logits (2, N, V) and labels (2, N), a third of them left out; N is another one on each rank, and 0 on one."""
    logits = drawn(seed, 2, seed % 4, VOCABULARY)
    labels = torch.randint(VOCABULARY, logits.shape[:2], generator=torch.Generator().manual_seed(seed))
    return logits, labels.masked_fill(drawn(seed + 1, *labels.shape) < -0.4, ignored)


def _by_the_formula(name: str) -> None:
    over, members = over_of(name)
    if dist.get_rank() not in members:
        assert "over must contain the calling process" in said(lambda: count_labels(torch.zeros(1).long(), over))
        return
    for number, (dtype, kind, ignored, more, averaged_over) in enumerate(SETTINGS):
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        everyone = [_scores(4 * number + rank, ignored) for rank in members]
        logits, labels = everyone[members.index(dist.get_rank())]
        mine, labels = logits.to(dtype).requires_grad_(), labels.to(kind)
        count = sum(int((theirs != ignored).sum()) for _, theirs in everyone)
        assert count_labels([labels, labels[:, :0], labels], over, ignored) == 2 * count
        assert count_labels([], over) == 0
        given: dict[str, Any] = {
            "labelled": None if more is None else count + more,
            "averaged_over": averaged_over,
            "ignored": ignored,
        }
        loss = cross_entropy(mine, labels, over, **given)
        (grad,) = torch.autograd.grad(3.0 * loss, mine)

        whole = [(x.to(dtype).double().requires_grad_(), theirs) for x, theirs in everyone]
        each = [torch_cross_entropy(x.flatten(0, 1), y.flatten(), None, None, ignored, None, "sum") for x, y in whole]
        total = torch.stack(each).sum()
        counted = count + (more or 0)
        scale = 3.0 * (len(members) if averaged_over is None else averaged_over) / counted
        (exact,) = torch.autograd.grad(scale * total, whole[members.index(dist.get_rank())][0])
        assert loss.dtype == kept and grad.dtype == dtype
        assert far([loss.double()], [total / counted]) < 32 * torch.finfo(kept).eps
        assert far([grad.double()], [exact]) < 12 * torch.finfo(dtype).eps  # of numbers up to 12, rounded once

        ones = torch.full(labels.shape, 2.0, dtype=dtype).masked_fill(labels == ignored, torch.nan).requires_grad_()
        before = ones.detach().clone()
        mean = token_mean(ones, labels, over, averaged_over=1, ignored=ignored)
        (grad,) = torch.autograd.grad(mean, ones)
        assert mean.dtype == kept and mean == 2.0
        assert grad.dtype == dtype and torch.equal(grad, ((labels != ignored).double() / count).to(dtype))
        assert torch.equal(ones.detach().nan_to_num(), before.nan_to_num())


@pytest.mark.ranks
@pytest.mark.parametrize("name", OVERS)
def test_loss_takes_every_type_and_name_of_ranks(ranks: Ranks, name: str) -> None:
    ranks(4).run(_by_the_formula, name)


def _too_few(labelled: int) -> str:
    logits, labels = drawn(0, 2, 3, VOCABULARY), torch.zeros(2, 3, dtype=torch.int64)
    answer = said(lambda: cross_entropy(logits, labels, labelled=labelled))
    cross_entropy(logits, labels)
    return answer


@pytest.mark.ranks
@pytest.mark.parametrize("labelled", [6, 23])  # a rank has 6, all have 24
def test_fewer_labelled_than_this_call_has_are_refused(ranks: Ranks, labelled: int) -> None:
    (answer,) = set(ranks(4).run(_too_few, labelled))
    assert "labelled must be the number of labelled tokens of the whole step" in answer
    assert f"got {labelled} where this call alone has 24" in answer


def _computed_again() -> None:
    """A block that saves nothing for backward ends a recomputation early."""
    context = context_of("uneven")
    labels = context.shard(whole_tokens().masked_fill(drawn(5, 2, TOKENS) < 0.0, IGNORED))
    head, start = drawn(1, 4, VOCABULARY).requires_grad_(), context.shard(drawn(2, 2, TOKENS, 4))

    def averaged(x: Tensor) -> Tensor:
        scale = nn.Parameter(x.new_ones(1))
        scale.grad = x.detach().sum().reshape(1)
        average_gradients([scale])
        return token_mean((x * scale.grad).square().sum(2), labels)

    losses: list[Callable[[Tensor], Tensor]] = [
        lambda x: cross_entropy(x @ head, labels, labelled=count_labels([labels, labels])),
        lambda x: cross_entropy(x @ head, labels).square() + token_mean(x.sin().sum(2), labels).exp(),
        lambda x: cross_entropy((x - gather(context, x).mean(1, keepdim=True)) @ head, labels),
        averaged,
    ]
    for loss, way in product(losses, ("reentrant", "non-reentrant", "to its end")):
        first, again = (start.clone().requires_grad_() for _ in range(2))
        with nullcontext() if way != "to its end" else set_checkpoint_early_stop(False):
            found = checkpoint(loss, again, use_reentrant=way == "reentrant")
        (3.0 * found).backward()
        (3.0 * loss(first)).backward()
        assert torch.equal(found, loss(first)) and far([again.grad], [first.grad]) == 0.0


@pytest.mark.ranks
def test_a_loss_that_is_computed_again_has_the_same_bits(ranks: Ranks) -> None:
    ranks(4).run(_computed_again)


def _from_a_second_thread() -> tuple[str, bool]:
    logits, labels = drawn(1, 2, 3, VOCABULARY), torch.zeros(2, 3, dtype=torch.int64)

    def lossy() -> Tensor:
        with torch.no_grad():
            return cross_entropy(logits, labels, dist.group.WORLD)

    lossy()
    answer = said(lambda: in_second_thread(lossy) if dist.get_rank() == 2 else lossy())
    return answer, lossy().requires_grad


@pytest.mark.ranks
def test_a_second_thread_is_refused(ranks: Ranks) -> None:
    ((answer, requires_grad),) = set(ranks(4).run(_from_a_second_thread))
    assert answer.startswith("ValueError: rank 2: calls on a group must come from one thread: got cross")
    assert not requires_grad


def test_one_process() -> None:
    logits, labels = torch.randn(1, 3, 4), torch.tensor([[0, IGNORED, 2]])
    wanted = torch_cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(cross_entropy(logits, labels), wanted)
    assert count_labels([labels, labels]) == 4 and cross_entropy(logits, torch.full_like(labels, IGNORED)) == 0.0


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_shown(number: float) -> None:
    mean = token_mean(torch.tensor([[number, 1.0]]), torch.zeros(1, 2, dtype=torch.int64))
    torch.testing.assert_close(mean, torch.tensor(number), equal_nan=True)


@pytest.mark.parametrize("over", [4, [0]])
def test_over_something_else_is_refused(over: Any) -> None:
    with pytest.raises(ValueError, match="over must be a process group, a DeviceMesh or None, got "):
        count_labels(torch.zeros(2, dtype=torch.int64), over)
