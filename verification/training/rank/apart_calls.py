"""Ranks that were found apart, each in another call on a group, are told, and go on together: no later call is refused
for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reference.pattern import Pattern
from ring.nn import (
    LongNetBlock,
    RingAttention,
    SelfAttention,
    average_gradients,
    clip_grad_norm,
    count_labels,
    cross_entropy,
    gather,
    shard_batch,
    token_mean,
)
from verification.training.rank.other_calls import CallPlace, OtherCall, held, must, must_be, must_be_near, refused

TRIED = 2
APART = ("calls on a group must come in the same order on every rank",)
ROUNDINGS = 64 * 2.0**-52  # of a mean of at most 24 numbers of 1, and of as many summands of a gradient
Right = Callable[[], None]  # a call, with what comes out of it checked


def _attention(s: CallPlace, backward_apart: bool) -> tuple[Right, Right]:
    """What is called apart; what all call afterwards. Queries of 0 see all keys alike: of values of 1 the mean is 1,
    and each value has a gradient of one n-th from each of n queries."""
    shape = (1, 1, s.context.tokens, 2)
    q = torch.zeros(shape, dtype=torch.float64, device=s.device)
    v = torch.ones_like(q).requires_grad_()
    attend: Any = RingAttention(Pattern.dense(), name="apart")
    kept: list[Tensor] = []

    def backward(out: Tensor) -> None:
        (found,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
        must_be_near("the gradient of values after ranks were apart", found, torch.ones(shape), ROUNDINGS)

    def right() -> None:
        out = kept.pop() if kept else attend(q, q, v, context=s.context)
        must_be_near("attention after ranks were apart", out.detach(), torch.ones(shape), ROUNDINGS)
        backward(out)

    if backward_apart:
        kept.append(attend(q, q, v, context=s.context))  # by all, before they are apart
        return partial(backward, kept[0]), right
    return partial(attend, q, q, v, context=s.context), right


def _of_a_sequence(s: CallPlace) -> list[tuple[str, Callable[[], tuple[Right, Right]]]]:
    """Calls on the ranks that share a sequence, which are numbered: whoever is apart makes one, and then all do."""
    n = s.case.tokens
    x = torch.zeros(1, s.context.tokens, 4, device=s.device)
    layers = SelfAttention(4, 1, Pattern.dense()).to(s.device), LongNetBlock(4, 1, [2], [1]).to(s.device)
    tokens = torch.arange(n, device=s.device)[None]

    def whole() -> None:
        must_be("what was gathered after ranks were apart", gather(s.context, s.shard()[None]), torch.arange(n)[None])

    def batch() -> None:
        must_be("tokens after ranks were apart", shard_batch(s.context, tokens).tokens, s.shard()[None])

    def layer(made: Any) -> None:
        must(made(x, s.context).shape == x.shape, "a layer must give what has the shape of x")

    return [
        ("attention", lambda: _attention(s, False)), ("the backward of attention", lambda: _attention(s, True)),
        ("gather", lambda: (whole, whole)), ("shard_batch", lambda: (batch, batch)),
        *((type(made).__name__, lambda made=made: (partial(layer, made),) * 2) for made in layers),
    ]  # fmt: skip


def _of_a_batch(s: CallPlace, over: Any) -> list[tuple[str, Right]]:
    """Calls on the ranks that share a batch, which are not numbered: here on the same ones."""
    p = s.context.world_size
    labels = torch.zeros(1, s.context.rank + 1, dtype=torch.int64, device=s.device)
    ones = torch.ones(labels.shape, dtype=torch.float64, device=s.device)
    one, labelled = torch.ones((), dtype=torch.float64), p * (p + 1) // 2

    def parameter() -> torch.nn.Parameter:
        found = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64, device=s.device))
        found.grad = torch.ones_like(found)
        return found

    def entropy() -> None:  # of one word, that is sure
        must_be("a loss after ranks were apart", cross_entropy(ones[..., None], labels, over), 0 * one)

    def mean() -> None:
        must_be_near("a mean after ranks were apart", token_mean(ones, labels, over), one, ROUNDINGS)

    def count() -> None:
        found = count_labels(labels, over)
        must(found == labelled, f"after ranks were apart {labelled} labels must be counted, got {found}")

    def average() -> None:
        given = parameter()
        average_gradients([given], over)
        assert given.grad is not None
        must_be("an average after ranks were apart", given.grad, one[None])

    def clip() -> None:
        must_be("a norm after ranks were apart", clip_grad_norm([parameter()], 2.0, over), one)

    return [
        ("cross_entropy", entropy), ("token_mean", mean), ("count_labels", count), ("average_gradients", average),
        ("clip_grad_norm", clip),
    ]  # fmt: skip


def _together_again(s: CallPlace) -> str:
    """One rank is in a call of the sequence and the others in one of the batch, or the other way round."""
    draws, said = s.draws(), []
    if s.context.world_size == 1:
        return ""
    over = (s.context.group, s.mesh["context"])[draws.integers(2)]
    of_sequence, of_batch = _of_a_sequence(s), _of_a_batch(s, over)
    for _ in range(TRIED):
        (name, make), (_, other) = (
            of_sequence[draws.integers(len(of_sequence))],
            of_batch[draws.integers(len(of_batch))],
        )
        culprit, swapped = int(draws.integers(s.context.world_size)), bool(draws.integers(2))
        apart, right = make()
        mine = apart if (s.context.rank == culprit) != swapped else other
        said.append(f"{name}: {refused(APART, mine)}")
        after = [right, other, *(of_batch[i][1] for i in draws.permutation(len(of_batch))[:2])]
        after.append(_attention(s, False)[1])
        for i in draws.permutation(len(after)):
            held("calls after ranks were apart", after[i])
    return "; ".join(said)


APART_CALLS: dict[str, OtherCall] = {"calls after ranks were apart": OtherCall(_together_again, "context")}
