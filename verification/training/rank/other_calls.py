"""Calls of `ring.nn` beside the steps of a training run: rare ones that are right, and wrong ones that are refused.

A step makes one call of each function, and all of them are right. What a training program may do otherwise is made
here, after the last step, on the same ranks: a call each by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring.nn import ContextParallel
from verification.run.layouts import layout_of
from verification.training.rank.meshes import mesh_of
from verification.training.step_observation import SeenCall
from verification.training.training_case import TrainingCase

Made = TypeVar("Made")


class Unlike(Exception):
    """A call did not do what it must; the text says what."""


@dataclass(frozen=True)
class CallPlace:
    """Where this rank makes its call. context: a handle of its own over the ranks that share a sequence. turn: counts
    the mistakes of a call that makes several, each by another rank."""

    case: TrainingCase
    mesh: DeviceMesh
    context: ContextParallel
    turn: int = 0

    def at(self, turn: int) -> CallPlace:
        return replace(self, turn=turn)

    def draws(self) -> np.random.Generator:
        """What a call that tries variations chooses by: the same on every rank."""
        return np.random.default_rng([self.case.seed, self.case.tokens, self.turn])

    def shard(self) -> Tensor:
        """The positions of the tokens that this rank holds, by the definition of the layout: (tokens,) int64."""
        return torch.from_numpy(self.case.shards().positions[self.context.rank].copy()).to(self.device)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def device(self) -> torch.device:
        return torch.device(self.case.device)

    def place(self, within: str) -> tuple[int, int]:
        """This rank's number among those that share the batch ("mesh") or a sequence ("context"), and how many those
        are."""
        if within == "context":
            return self.context.rank, self.context.world_size
        return self.rank, self.case.world

    def culprit(self, within: str) -> int | None:
        """The number of the rank that makes the mistake; for some seeds None: all do."""
        size = self.place(within)[1]
        found = (self.case.seed + self.turn) % (size + 1)
        return None if found == size else found

    def is_wrong(self, within: str) -> bool:
        """Whether this rank makes the mistake."""
        return self.culprit(within) in (None, self.place(within)[0])

    def is_other(self, within: str) -> bool:
        """Whether this rank is the one that differs from the others."""
        number, size = self.place(within)
        return (self.case.seed + self.turn) % size == number


@dataclass(frozen=True)
class OtherCall:
    """make: makes the call on this rank and returns what was said of it; raises Unlike. alike: the ranks on which this
    must be the same: those of the "mesh", those of a "context" group; "" for none."""

    make: Callable[[CallPlace], str]
    alike: str


def must(right: bool, what: str) -> None:
    if not right:
        raise Unlike(what)


def must_be(what: str, found: Tensor, wanted: Tensor) -> None:
    """Of the same type, and equal."""
    if found.dtype != wanted.dtype or not torch.equal(found.cpu(), wanted.cpu()):
        raise Unlike(f"{what} must be {wanted.dtype} {wanted.tolist()}, got {found.dtype} {found.tolist()}")


def must_be_near(what: str, found: Tensor, wanted: Tensor, most: float) -> None:
    """Of the same shape, and off by at most that."""
    near = found.shape == wanted.shape and bool(((found.double().cpu() - wanted.double().cpu()).abs() <= most).all())
    if not near:
        raise Unlike(f"{what} must be {wanted.tolist()} within {most:.3g}, got {found.dtype} {found.tolist()}")


def held(what: str, call: Callable[[], Made]) -> Made:
    """What the call gives. Raises Unlike where it is refused, as it must not be."""
    try:
        return call()
    except (ValueError, RuntimeError) as error:
        raise Unlike(f"{what} must hold, got {type(error).__name__}: {error}") from error


Kinds = tuple[type[Exception], ...]


def refused(
    words: tuple[str, ...], call: Callable[[], object], kinds: Kinds = (ValueError, NotImplementedError)
) -> str:
    """What the refusal says, with the type of the error. Raises Unlike where there is none, or a word is missing."""
    try:
        made = call()
    except kinds as error:
        for word in words:
            if word not in str(error):
                raise Unlike(f"the error must name {word!r}, got {type(error).__name__}: {error}") from error
        return f"{type(error).__name__}: {error}"
    raise Unlike(f"it must be refused by an error that names {words[0]!r}, got {made!r}")


def make_calls(case: TrainingCase, calls: dict[str, OtherCall]) -> list[SeenCall]:
    """Those of the Case, one after the other. Every rank calls it."""
    mesh = mesh_of(case)
    found = []
    for name in case.calls:
        setting = CallPlace(case, mesh, ContextParallel(layout_of(case), mesh["context"]))
        try:
            found.append(SeenCall(name, calls[name].alike, calls[name].make(setting)))
        except Unlike as wrong:
            found.append(SeenCall(name, "", "", str(wrong)))
    return found
