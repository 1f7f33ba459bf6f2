"""The loss helpers against torch's own cross entropy on the whole batch: the value on every rank, and the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from reference import Pattern
from ring.nn import IGNORED, SelfAttention, average_gradients, count_labels, cross_entropy, gather, token_mean
from ring.nn.loss import _check_shapes
from tests.support.nn_ranks import (
    OVERS,
    TOKENS,
    VOCABULARY,
    apart,
    context_of,
    data_index,
    drawn,
    far,
    grad_of,
    in_fp64,
    mesh_of,
    over_of,
    said,
    summed,
)
from tests.support.ranks import Ranks
from verification.run.programs import in_second_thread

EXACT = 1e-13  # fp64, of values and gradients of the order of 1
DIM = 5

# --- several micro-batches on data x context, whose labels lie unevenly -----------------------------------------------

KINDS = ("all", "some", "one", "one data rank", "first tokens", "none")


def _labels(kind: str, data: int, micro: int) -> Tensor:
    """Labels of the whole sequences of one data rank: (2, n)."""
    draw = torch.Generator().manual_seed(100 * data + micro)
    labels = torch.randint(VOCABULARY, (2, TOKENS), generator=draw)
    some = torch.rand(2, TOKENS, generator=draw)
    if kind == "some":
        labels[some < 0.4 + 0.2 * data] = IGNORED
    elif kind == "one":  # in the global batch
        labels[:] = IGNORED
        if (data, micro) == (0, 0):
            labels[1, 4] = 3
    elif kind == "one data rank":
        labels[:] = labels if data == 0 else IGNORED
    elif kind == "first tokens":  # the ranks that hold the others have none
        labels[:, 2:] = IGNORED
    elif kind == "none":
        labels[:] = IGNORED
    return labels


def _input(data: int, micro: int) -> Tensor:
    return drawn(1000 + 10 * data + micro, 2, TOKENS, DIM)


def _model() -> nn.Linear:
    return in_fp64(lambda: nn.Linear(DIM, VOCABULARY))


def _step(kind: str, mesh: str, shards: str, micros: int, wrapped: bool) -> list[float]:
    """Compare the sum of the losses, and the averaged gradients, with torch's on the whole batch; return the losses."""
    over = mesh_of(mesh)
    context, data = context_of(shards, over["context"]), data_index(mesh)
    plain = _model()
    model = DistributedDataParallel(plain) if wrapped else plain
    labels = [context.shard(_labels(kind, data, micro)) for micro in range(micros)]
    labelled = count_labels(labels, over) if micros > 1 else None
    losses = []
    for micro in range(micros):
        last = micro == micros - 1
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            logits = model(context.shard(_input(data, micro)))
            loss = cross_entropy(logits, labels[micro], over, labelled=labelled)
            loss.backward()
        losses.append(loss.item())
    grads = [x.grad if wrapped else summed(grad_of(x)) / 4 for x in plain.parameters()]

    whole = [(_input(d, m), _labels(kind, d, m)) for d in range(over.size(0)) for m in range(micros)]
    x, every = (torch.cat(each) for each in zip(*whole, strict=True))
    exact = _model()
    count = int((every != IGNORED).sum())
    wanted = torch_cross_entropy(exact(x).flatten(0, 1), every.flatten(), reduction="sum") / max(1, count)
    wanted.backward()
    assert apart(sum(losses), wanted) < EXACT and far(grads, [y.grad for y in exact.parameters()]) < EXACT
    assert micros == 1 or labelled == count
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_with_and_without_ddp(ranks: Ranks, kind: str, wrapped: bool) -> None:
    losses = ranks(4).run(_step, kind, "2x2 apart", "empty", 3, wrapped)
    assert losses == [losses[0]] * 4  # the same bits


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh", "shards"), [("1x4", "even"), ("2x2", "uneven"), ("4x1", "one"), ("2x2 turned", "one")]
)
def test_meshes_and_shards(ranks: Ranks, mesh: str, shards: str) -> None:
    ranks(4).run(_step, "some", mesh, shards, 1, False)


# --- every type, over ranks that are named in every way ---------------------------------------------------------------

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
            "labelled": None if more is None else count + more, "averaged_over": averaged_over, "ignored": ignored,
        }  # fmt: skip
        loss = cross_entropy(mine, labels, over, **given)
        (grad,) = torch.autograd.grad(3.0 * loss, mine)

        whole = [(x.to(dtype).double().requires_grad_(), theirs) for x, theirs in everyone]
        each = [torch_cross_entropy(x.flatten(0, 1), y.flatten(), None, None, ignored, None, "sum") for x, y in whole]
        total = torch.stack(each).sum()
        counted = count + (more or 0)
        scale = 3.0 * (len(members) if averaged_over is None else averaged_over) / counted
        (exact,) = torch.autograd.grad(scale * total, whole[members.index(dist.get_rank())][0])
        assert loss.dtype == kept and grad.dtype == dtype
        assert apart(loss, total / counted) < 32 * torch.finfo(kept).eps
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
def test_every_type_over_ranks_that_are_named_in_every_way(ranks: Ranks, name: str) -> None:
    ranks(4).run(_by_the_formula, name)


def _too_few(labelled: int) -> str:
    labels = torch.zeros(2, 3, dtype=torch.int64)
    answer = said(lambda: cross_entropy(drawn(0, 2, 3, VOCABULARY), labels, labelled=labelled))
    cross_entropy(drawn(0, 2, 3, VOCABULARY), labels)
    return answer


@pytest.mark.ranks
@pytest.mark.parametrize("labelled", [5, 6, 23])  # a rank has 6, all have 24
def test_fewer_labelled_than_this_call_has_are_refused(ranks: Ranks, labelled: int) -> None:
    (answer,) = set(ranks(4).run(_too_few, labelled))
    assert "labelled must be the number of labelled tokens of the whole step" in answer
    assert f"got {labelled} where this call alone has 24" in answer


# --- recomputation, threads, one process ------------------------------------------------------------------------------

Loss = Callable[[Tensor], Tensor]  # of x (2, N, 4), this rank's tokens


def _losses() -> dict[str, Loss]:
    """What is often computed again with losses: what saves nothing for backward ends a recomputation early."""
    context = context_of("uneven")
    head, labels = drawn(1, 4, VOCABULARY).requires_grad_(), context.shard(_labels("some", 0, 0))
    layer = in_fp64(lambda: SelfAttention(4, 1, Pattern.dense()))

    def averaged(x: Tensor) -> Tensor:
        scale = nn.Parameter(x.new_ones(1))
        scale.grad = x.detach().sum().reshape(1)
        average_gradients([scale])
        return token_mean((x * scale.grad).square().sum(2), labels)

    return {
        "cross_entropy": lambda x: cross_entropy(x @ head, labels),
        "token_mean": lambda x: token_mean(x.square().sum(2), labels, averaged_over=1),
        "a share": lambda x: cross_entropy(x @ head, labels, labelled=count_labels([labels, labels])),
        "followed by more": lambda x: (
            cross_entropy(x @ head, labels).square() + token_mean(x.sin().sum(2), labels).exp()
        ),
        "attention": lambda x: cross_entropy(layer(x, context) @ head, labels),
        "gather": lambda x: cross_entropy((x - gather(context, x).mean(1, keepdim=True)) @ head, labels),
        "average_gradients": averaged,
    }


def _computed_again(name: str) -> None:
    loss = _losses()[name]
    start = context_of("uneven").shard(drawn(2, 2, TOKENS, 4))

    def evaluated(way: str) -> list[Tensor]:
        x = start.clone().requires_grad_()
        with nullcontext() if way != "to its end" else set_checkpoint_early_stop(False):
            found = loss(x) if way == "plain" else checkpoint(loss, x, use_reentrant=way == "reentrant")
        (3.0 * found).backward()
        return [found.detach(), grad_of(x)]

    wanted = evaluated("plain")
    for way in ("reentrant", "non-reentrant", "to its end"):
        assert all(torch.equal(x, y) for x, y in zip(evaluated(way), wanted, strict=True)), way


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["cross_entropy", "token_mean", "a share", "followed by more", "attention", "gather", "average_gradients"]
)
def test_a_loss_that_is_computed_again_has_the_same_bits(ranks: Ranks, name: str) -> None:
    ranks(4).run(_computed_again, name)


def _from_a_second_thread(culprit: int) -> tuple[str, bool]:
    logits, labels = drawn(1, 2, 3, VOCABULARY), torch.zeros(2, 3, dtype=torch.int64)

    def lossy() -> Tensor:
        with torch.no_grad():
            return cross_entropy(logits, labels, dist.group.WORLD)

    lossy()
    answer = said(lambda: in_second_thread(lossy) if dist.get_rank() == culprit else lossy())
    return answer, lossy().requires_grad


@pytest.mark.ranks
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_second_thread_is_refused(ranks: Ranks, culprit: int) -> None:
    ((answer, requires_grad),) = set(ranks(4).run(_from_a_second_thread, culprit))
    assert answer.startswith(f"ValueError: rank {culprit}: calls on a group must come from one thread: got cross")
    assert not requires_grad


def test_one_process() -> None:
    logits, labels = torch.randn(1, 3, 4), torch.tensor([[0, IGNORED, 2]])
    wanted = torch_cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(cross_entropy(logits, labels), wanted)
    assert count_labels([labels, labels]) == 4


def test_a_loss_that_is_not_finite_is_shown() -> None:
    labels = torch.zeros(1, 2, dtype=torch.int64)
    assert math.isinf(token_mean(torch.tensor([[math.inf, 1.0]]), labels))
    assert math.isnan(token_mean(torch.tensor([[math.nan, 1.0]]), labels))


@pytest.mark.parametrize("over", [4, [0]])
def test_over_something_else_is_refused(over: Any) -> None:
    with pytest.raises(ValueError, match="over must be a process group, a DeviceMesh or None, got "):
        count_labels(torch.zeros(2, dtype=torch.int64), over)


@pytest.mark.parametrize("shape", [(1, 9), (3, 9), (2, 4), (2, 9, 1)])
def test_the_hint_is_for_labels_of_the_whole_sequence(shape: tuple[int, ...]) -> None:
    """Such labels are of as many sequences, and longer."""
    with pytest.raises(ValueError, match=r"labels must have the shape \(2, 5\) of x, got [^:]*$"):
        _check_shapes("x", torch.zeros(2, 5), torch.zeros(shape, dtype=torch.long), (2, 5))
    with pytest.raises(ValueError, match="are they those of the whole sequence"):
        _check_shapes("x", torch.zeros(2, 5), torch.zeros(2, 9, dtype=torch.long), (2, 5))
