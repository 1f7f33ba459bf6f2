"""Losses, and what else ranks do together, within a function that checkpointing computes again in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from reference.pattern import Pattern
from ring.nn import SelfAttention, average_gradients, count_labels, cross_entropy, gather, token_mean
from verification.training.material import IGNORED
from verification.training.rank.loss_calls import ways_to_name
from verification.training.rank.other_calls import CallPlace, OtherCall, held, must_be
from verification.training.training_case import VOCABULARY

WAYS = ("reentrant", "non-reentrant", "to its end")
Loss = Callable[[Tensor], Tensor]  # of x (1, N, 4)


def _losses(s: CallPlace, draws: np.random.Generator, over: Any, kind: torch.dtype) -> list[tuple[str, Loss]]:
    """With what is often computed again with them: what saves nothing for backward ends a recomputation early, what
    saves something after the loss does not."""
    head = torch.from_numpy(draws.normal(size=(4, VOCABULARY))).to(s.device, kind).requires_grad_()
    every = draws.integers(0, VOCABULARY, (s.case.world, 1, s.case.tokens))
    every = np.where(draws.integers(0, 4, every.shape) == 0, IGNORED, every)
    labels = torch.from_numpy(every[s.rank][:, : s.context.tokens]).to(s.device)
    layer = SelfAttention(4, 1, Pattern.dense()).to(s.device, kind)
    with torch.no_grad():
        for x in layer.parameters():
            x.copy_(torch.from_numpy(draws.normal(size=x.shape)))

    def entropy(x: Tensor) -> Tensor:
        return cross_entropy(x @ head, labels, over)

    def mean(x: Tensor) -> Tensor:
        each = nn.functional.cross_entropy((x @ head).flatten(0, 1), labels.flatten(), reduction="none")
        return token_mean(each.view(labels.shape), labels, over)

    def squares(x: Tensor) -> Tensor:
        return token_mean(x.square().sum(2), labels, over, averaged_over=1)

    def share(x: Tensor) -> Tensor:
        return cross_entropy(x @ head, labels, over, labelled=count_labels([labels, labels], over))

    def followed(x: Tensor) -> Tensor:
        return cross_entropy(x @ head, labels, over).square() + token_mean(x.sin().sum(2), labels, over).exp()

    def with_a_layer(x: Tensor) -> Tensor:
        return cross_entropy(layer(x, s.context) @ head, labels, over)

    def with_what_is_gathered(x: Tensor) -> Tensor:
        whole = gather(s.context, x)
        return cross_entropy((x - whole.mean(1, keepdim=True)) @ head, labels, over)

    def with_an_average(x: Tensor) -> Tensor:
        scale = nn.Parameter(x.new_ones(1))
        scale.grad = x.detach().sum().reshape(1)
        average_gradients([scale], over)
        return token_mean((x * scale.grad).square().sum(2), labels, over)

    return [
        ("cross_entropy", entropy), ("token_mean", mean), ("token_mean of squares", squares),
        ("cross_entropy of a micro-batch", share), ("losses that are followed by more", followed),
        ("attention and cross_entropy", with_a_layer), ("cross_entropy beside gather", with_what_is_gathered),
        ("token_mean beside average_gradients", with_an_average),
    ]  # fmt: skip


def _gradient(loss: Loss, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    ended: AbstractContextManager[None] = nullcontext() if way != "to its end" else set_checkpoint_early_stop(False)
    with ended:
        found = loss(x) if way == "" else checkpoint(loss, x, use_reentrant=way == "reentrant")
    (3.0 * found).backward()
    assert x.grad is not None
    return found.detach(), x.grad


def _computed_again(s: CallPlace) -> str:
    """The loss and its gradient are those of the same function outside of checkpointing, bit by bit."""
    draws = s.draws()
    ways_to_share = list(ways_to_name(s))
    for turn in range(2):
        shared, over, ranks = ways_to_share[draws.integers(len(ways_to_share))]
        kind = (torch.float64, torch.float32)[draws.integers(2)]
        every = draws.normal(size=(s.case.world, 1, s.case.tokens, 4))
        x = torch.from_numpy(every[s.rank][:, : s.context.tokens]).to(s.device, kind)
        losses = _losses(s, draws, over, kind)
        own = len(losses)
        if len(ranks) < s.case.world:
            own -= 3  # the last ones are calls of whole sequences, too
        if s.rank not in ranks:
            continue
        for at in np.random.default_rng([s.case.seed, turn]).permutation(own)[:2]:
            name, loss = losses[at]
            wanted = _gradient(loss, x, "")
            for way in WAYS:
                what = f"of {name} over {shared}, {ranks}, in {kind}, computed again ({way}),"
                value, grad = held(what, partial(_gradient, loss, x, way))
                must_be(f"the value {what}", value, wanted[0])
                must_be(f"the gradient {what}", grad, wanted[1])
    return ""


RECOMPUTED_CALLS: dict[str, OtherCall] = {"losses that are computed again": OtherCall(_computed_again, "")}
