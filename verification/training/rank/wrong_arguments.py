"""Arguments that no function of `ring.nn` takes: of each kind many, some of which every example tries.

One rank makes the mistake, or all do; every rank that it concerns must say so in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from ring.layout import Layout
from ring.nn import (
    ContextParallel,
    average_gradients,
    clip_grad_norm,
    count_labels,
    cross_entropy,
    gather,
    shard_batch,
    token_mean,
)
from verification.training.rank.other_calls import CallPlace, OtherCall, refused
from verification.training.training_case import VOCABULARY

Mistake = Callable[[CallPlace, bool], object]  # the call; whether this rank makes it wrongly
TRIED = 12  # of each list


def some(wrong: Sequence[tuple[str, Mistake]], within: str) -> OtherCall:
    """Some mistakes of a list, each with what its refusal names. Wrong whatever other ranks do."""

    def make(s: CallPlace) -> str:
        said = []
        for turn, number in enumerate(s.draws().permutation(len(wrong))[:TRIED]):
            (word, call), place = wrong[number], s.at(turn)
            said.append(refused((word,), lambda: call(place, place.is_wrong(within))))  # noqa: B023
        return "; ".join(said)

    return OtherCall(make, within)


def some_beside(wrong: Sequence[tuple[str, Mistake]], within: str) -> OtherCall:
    """Wrong because one rank differs from the others; nothing where it has none beside it."""

    def make(s: CallPlace) -> str:
        said = []
        for turn, number in enumerate(s.draws().permutation(len(wrong))[:TRIED]):
            (word, call), place = wrong[number], s.at(turn)
            if s.place(within)[1] > 1:
                said.append(refused((word,), lambda: call(place, place.is_other(within))))  # noqa: B023
        return "; ".join(said)

    return OtherCall(make, within)


def all_of(wrong: Sequence[tuple[str, Callable[[CallPlace], object]]]) -> OtherCall:
    """What this rank is told without asking the others."""
    return OtherCall(lambda s: "; ".join(refused((word,), lambda: call(s)) for word, call in wrong), "mesh")  # noqa: B023


def replicated(s: CallPlace, x: Tensor) -> Tensor:
    """A DTensor that every rank has whole."""
    return DTensor.from_local(x, s.mesh, [Replicate(), Replicate()], run_check=False)


# --- losses -----------------------------------------------------------------------------------------------------------


def _loss(name: str, wrong_value: Callable[[CallPlace], Any]) -> Mistake:
    """cross_entropy with one wrong argument."""

    def call(s: CallPlace, wrong: bool) -> object:
        given: dict[str, Any] = {"logits": torch.zeros(1, 2, VOCABULARY, device=s.device)}
        given["labels"] = torch.ones(1, 2, dtype=torch.int64, device=s.device)
        return cross_entropy(**given | ({name: wrong_value(s)} if wrong else {}), over=s.mesh)

    return call


def _losses(name: str, wrong_value: Callable[[CallPlace], Any]) -> Mistake:
    """token_mean with one wrong argument."""

    def call(s: CallPlace, wrong: bool) -> object:
        given: dict[str, Any] = {"losses": torch.zeros(1, 2, device=s.device)}
        given["labels"] = torch.ones(1, 2, dtype=torch.int64, device=s.device)
        return token_mean(**given | ({name: wrong_value(s)} if wrong else {}), over=s.mesh)

    return call


def _counted(wrong_value: Callable[[CallPlace], Any]) -> Mistake:
    right = torch.ones(2, dtype=torch.int64)
    return lambda s, wrong: count_labels(wrong_value(s) if wrong else right.to(s.device), s.mesh)


def _logits(s: CallPlace, *shape: int) -> Tensor:
    return torch.zeros(shape or (1, 2, VOCABULARY), device=s.device)


def _ones(s: CallPlace, *shape: int) -> Tensor:
    return torch.ones(shape or (1, 2), dtype=torch.int64, device=s.device)


LOSSES: list[tuple[str, Mistake]] = [
    ("ignored", _loss("ignored", lambda s: True)), ("ignored", _loss("ignored", lambda s: -100.0)),
    ("labelled", _loss("labelled", lambda s: -1)), ("labelled", _loss("labelled", lambda s: 99.0)),
    ("averaged_over", _loss("averaged_over", lambda s: float("inf"))),
    ("averaged_over", _loss("averaged_over", lambda s: float("nan"))),
    ("averaged_over", _loss("averaged_over", lambda s: -2)),
    ("averaged_over", _loss("averaged_over", lambda s: True)),
    ("logits", _loss("logits", lambda s: _logits(s).long())), ("logits", _loss("logits", lambda s: [0.0])),
    ("logits", _loss("logits", lambda s: _logits(s)[..., :0])),
    ("logits", _loss("logits", lambda s: replicated(s, _logits(s)))),
    ("logits", _loss("logits", lambda s: _logits(s).to(torch.complex64))),
    ("labels", _loss("labels", lambda s: _ones(s).bool())), ("labels", _loss("labels", lambda s: [[1, 1]])),
    ("labels", _loss("labels", lambda s: replicated(s, _ones(s)))),
    ("labels", _loss("labels", lambda s: _ones(s, 2, 1))), ("labels", _loss("labels", lambda s: _ones(s, 2))),
    ("losses", _losses("losses", lambda s: torch.zeros(2))), ("losses", _losses("losses", _ones)),
    ("losses", _losses("losses", lambda s: replicated(s, torch.zeros(1, 2)))),
    ("labels", _losses("labels", lambda s: _ones(s, 1, 3))), ("labels", _losses("labels", lambda s: _logits(s, 1, 2))),
    ("labels", _counted(_logits)), ("labels", _counted(lambda s: [_ones(s), None])),
    ("labels", _counted(lambda s: iter([_ones(s)]))), ("labels", _counted(lambda s: 3)),
    ("labels", _counted(lambda s: [replicated(s, _ones(s))])),
]  # fmt: skip
OUT_OF_RANGE: list[tuple[str, Mistake]] = [
    ("labels", _loss("labels", lambda s: _ones(s) * VOCABULARY)), ("labels", _loss("labels", lambda s: -_ones(s))),
]  # fmt: skip


def _beyond_the_vocabulary(s: CallPlace) -> str:
    """On CPUs: on a GPU torch ends the process."""
    return "" if s.case.device == "cuda" else some(OUT_OF_RANGE, "mesh").make(s)


def _over_what_is_no_group(s: CallPlace) -> object:
    return cross_entropy(_logits(s), _ones(s), over=[0])  # type: ignore[arg-type]


UNLIKE_LOSSES: list[tuple[str, Mistake]] = [
    ("averaged_over", _loss("averaged_over", lambda s: 3)),
    ("dtype", _loss("logits", lambda s: _logits(s).double())),
    ("dtype", _losses("losses", lambda s: torch.zeros(1, 2, device=s.device).half())),
    ("ignored", lambda s, other: count_labels(_ones(s), s.mesh, 5 if other else 6)),
]


# --- gradients --------------------------------------------------------------------------------------------------------


def _parameter(s: CallPlace, dtype: torch.dtype = torch.float32, size: int = 2) -> nn.Parameter:
    found = nn.Parameter(torch.zeros(size, dtype=dtype, device=s.device))
    found.grad = torch.ones_like(found)
    return found


def _sharded(s: CallPlace, partial: bool = False) -> nn.Parameter:
    """A DTensor with a gradient."""
    placed: Any = [Partial(), Replicate()] if partial else [Replicate(), Replicate()]
    found = nn.Parameter(replicated(s, torch.zeros(2, device=s.device)))
    found.grad = DTensor.from_local(torch.ones(2, device=s.device), s.mesh, placed, run_check=False)
    return found


def _averaged(wrong_value: Callable[[CallPlace], Any]) -> Mistake:
    return lambda s, wrong: average_gradients(wrong_value(s) if wrong else [_parameter(s)], s.mesh)


def _clipped(wrong_value: Callable[[CallPlace], Any]) -> Mistake:
    return lambda s, wrong: clip_grad_norm(wrong_value(s) if wrong else [_parameter(s)], 1.0, s.mesh)


def _clipped_at(most: Any) -> Mistake:
    return lambda s, wrong: clip_grad_norm([_parameter(s)], most if wrong else 1.0, s.mesh)


def _sparse(s: CallPlace) -> nn.Parameter:
    found = _parameter(s)
    found.grad = torch.ones(2, device=s.device).to_sparse()
    return found


GRADIENTS: list[tuple[str, Mistake]] = [
    ("gradients must be real", _averaged(lambda s: [_parameter(s, torch.complex64)])),
    ("got a DTensor as number 1", _averaged(lambda s: [_parameter(s), _sharded(s)])),
    ("parameters must be tensors", _averaged(lambda s: [_parameter(s), "weight"])),
    ("gradients must be dense", _averaged(lambda s: [_sparse(s)])),
    ("parameters", _averaged(lambda s: iter(()))),
    ("gradients must be real", _clipped(lambda s: [_parameter(s, torch.complex128)])),
    ("gradients must be averaged", _clipped(lambda s: [_sharded(s, partial=True)])),
    ("gradients must be dense", _clipped(_sparse)),
    ("parameters", _clipped(lambda s: iter(()))),
    ("parameters must be tensors", _clipped(lambda s: [None])),
    *(("max_norm", _clipped_at(most)) for most in (float("inf"), float("nan"), -1.0, True, "1", None)),
]
UNLIKE_GRADIENTS: list[tuple[str, Mistake]] = [
    ("parameters", _averaged(lambda s: [_parameter(s, torch.float64)])),
    ("parameters", _averaged(lambda s: [_parameter(s), _parameter(s)])),
    ("number of gradients", _clipped(lambda s: [])),
    ("gradients", _clipped(lambda s: [_parameter(s, size=3)])),
]  # fmt: skip


# --- batches ----------------------------------------------------------------------------------------------------------


def _batch(**wrong_values: Callable[[CallPlace, Tensor], Any]) -> Mistake:
    """shard_batch with wrong arguments, made of tokens (2, n)."""

    def call(s: CallPlace, wrong: bool) -> object:
        tokens = torch.arange(2 * s.case.tokens, device=s.device).view(2, -1)
        given = {name: value(s, tokens) for name, value in wrong_values.items()} if wrong else {}
        return shard_batch(s.context, **{"tokens": tokens} | given)

    return call


def _gather(make: Callable[[CallPlace], Any], dim: Any = 1) -> Mistake:
    def call(s: CallPlace, wrong: bool) -> object:
        right = torch.zeros(1, s.context.tokens, 2, device=s.device)
        return gather(s.context, make(s), dim) if wrong else gather(s.context, right)

    return call


def _right(s: CallPlace) -> Tensor:
    return torch.zeros(1, s.context.tokens, 2, device=s.device)


BATCHES: list[tuple[str, Mistake]] = [
    ("tokens", _batch(tokens=lambda s, x: x.double())), ("tokens", _batch(tokens=lambda s, x: x[0])),
    ("tokens", _batch(tokens=lambda s, x: x[:, 1:])), ("tokens", _batch(tokens=lambda s, x: x[:0])),
    ("tokens", _batch(tokens=lambda s, x: x.tolist())), ("tokens", _batch(tokens=replicated)),
    ("labels", _batch(labels=lambda s, x: x)), ("labels", _batch(labels=lambda s, x: x[:1])),
    ("labels", _batch(labels=lambda s, x: x.half())), ("labels", _batch(labels=replicated)),
    ("positions", _batch(positions=lambda s, x: x[0] + 1)), ("positions", _batch(positions=lambda s, x: x[:, None])),
    ("positions", _batch(positions=lambda s, x: x[0].double())), ("positions", _batch(positions=lambda s, x: x)),
    ("weights", _batch(weights=lambda s, x: x[0])), ("weights", _batch(weights=lambda s, x: x[:, 1:])),
    ("weights", _batch(weights=lambda s, x: x.to_sparse())), ("weights", _batch(weights=lambda s, x: None)),
    ("documents", _batch(documents=lambda s, x: (s.case.tokens + 1, -1))),
    ("documents", _batch(documents=lambda s, x: 3)), ("documents", _batch(documents=lambda s, x: (1.5,))),
    ("positions", _batch(positions=lambda s, x: x[0], documents=lambda s, x: (1, s.case.tokens - 1))),
    ("x must", _gather(_right, 3)), ("x must", _gather(_right, -4)),
    ("x must", _gather(_right, "1")), ("x must", _gather(lambda s: [1.0])),
    ("x must", _gather(lambda s: torch.zeros(1, s.case.tokens + 1, device=s.device))),
    ("x must", _gather(lambda s: replicated(s, _right(s)))),
]  # fmt: skip


def _shards_of(s: CallPlace, other: bool) -> object:
    """Equal tensors over layouts that differ: here the tokens the other way round."""
    n = s.case.tokens
    layout = s.context.layout
    cuts = [0, *torch.tensor(layout.counts).cumsum(0).tolist()]
    order = range(n - 1, -1, -1) if other else range(n)
    handle = ContextParallel(Layout.from_cuts(order, cuts), s.context.group)
    return shard_batch(handle, torch.zeros(1, n, dtype=torch.int64, device=s.device))


UNLIKE_BATCHES: list[tuple[str, Mistake]] = [
    ("labels", _batch(labels=lambda s, x: x * 0 + 5)), ("tensors given", _batch(weights=lambda s, x: x)),
    ("documents", _batch(documents=lambda s, x: (1, s.case.tokens - 1))),
    ("tokens", _batch(tokens=lambda s, x: x.int())), ("tokens", _batch(tokens=lambda s, x: x[:1])),
    ("layout", _shards_of), ("dim", lambda s, other: gather(s.context, _square(s), 0 if other else 1)),
    ("other dimensions", _gather(lambda s: torch.zeros(1, s.context.tokens, 1, 2, device=s.device))),
]  # fmt: skip


def _square(s: CallPlace) -> Tensor:
    return torch.zeros(s.context.tokens, s.context.tokens, device=s.device)


ARGUMENT_CALLS: dict[str, OtherCall] = {
    "arguments of losses": some(LOSSES, "mesh"),
    "labels beyond the vocabulary": OtherCall(_beyond_the_vocabulary, "mesh"),
    "arguments of losses unlike the others'": some_beside(UNLIKE_LOSSES, "mesh"),
    "a loss over what is no group": all_of([("over must be", _over_what_is_no_group)]),
    "gradients that cannot be averaged or clipped": some(GRADIENTS, "mesh"),
    "gradients unlike the others'": some_beside(UNLIKE_GRADIENTS, "mesh"),
    "batches that cannot be sharded or gathered": some(BATCHES, "context"),
    "batches unlike the others'": some_beside(UNLIKE_BATCHES, "context"),
}
