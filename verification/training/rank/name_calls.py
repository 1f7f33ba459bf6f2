"""Checkpoints of models whose modules and parameters are named like a checkpoint's own parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ring.nn.frameworks import checkpoint, ddp, fsdp
from verification.training.rank.other_calls import CallPlace, OtherCall, held, must, must_be
from verification.training.rank.resuming import set_otherwise, shared_folder

NAMES = ("model", "optimizer", "progress", "state", "param_groups", "metadata", "optim", "weight")
WAYS = ("plain", "ddp", "fsdp")


class _Named(nn.Module):
    """A module that adds what it holds, under names that are given: parameters, a buffer, modules."""

    def forward(self, x: Tensor) -> Tensor:
        for p in self.parameters(recurse=False):
            x = x * p
        for module in self.children():
            x = x + module(x)
        return x


class _Unit(_Named):
    """One that FSDP gathers by itself."""


def _nested(draws: np.random.Generator, depth: int, kind: type[_Named] = _Named) -> _Named:
    """Modules within one another to some depth, a parameter in each, by names that may repeat from one to the next."""
    found = kind()
    names = [NAMES[i] for i in draws.permutation(len(NAMES))]
    if depth and draws.integers(2):
        names.remove("model")
        names.insert(0, "model")  # as Llama of transformers has it
    if depth:
        for name in names[: int(draws.integers(1, 3))]:
            found.add_module(name, _nested(draws, depth - 1, _Unit))
    found.register_parameter(names[-1], nn.Parameter(torch.from_numpy(draws.normal(size=3)).float()))
    found.register_buffer(names[-2], torch.from_numpy(draws.normal(size=2)))
    return found


def _run(s: CallPlace, seed: list[int], way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same names and numbers by the same seed."""
    draws = np.random.default_rng(seed)
    model = _nested(draws, int(draws.integers(1, 4))).to(s.device)
    made: Any = ddp.wrap(model, s.mesh) if way == "ddp" else model
    if way == "fsdp":
        fsdp.shard(model, s.mesh, _Unit)
    return made, torch.optim.Adam(made.parameters(), lr=0.125, betas=(0.5, 0.75))


def _step(s: CallPlace, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3, device=s.device)).sum().backward()
    optimiser.step()
    optimiser.zero_grad()


def _tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, p in model.named_parameters():
        found += [(f"{kind} of {name}", x) for kind, x in sorted(optimiser.state[p].items())]
    return [(name, (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu().clone()) for name, x in found]


def _named_like_a_checkpoint(s: CallPlace) -> str:
    """A model with such names is saved and read, under any wrapper. Read into a model that has the same parameters a
    module deeper, by the name of "model", or less deep, it is refused: the names are others."""
    draws = s.draws()
    from_way, to_way = (WAYS[draws.integers(len(WAYS))] for _ in range(2))
    seed = [s.case.seed, s.case.tokens]
    saved, before = _run(s, seed, from_way)
    loaded, after = _run(s, seed, to_way)
    _step(s, saved, before)
    for p in loaded.parameters():
        p.detach().zero_()
    for x in loaded.buffers():
        x.zero_()
    set_otherwise(after)
    deeper = bool(draws.integers(2))
    inner, outer = _run(s, seed, "plain")[0], _Named()
    outer.add_module("model", inner)
    given, other = (inner, outer) if deeper else (outer, inner)
    said: dict[str, Any] = {"model": 1, "optimizer": {"model.model": [2]}, "progress": "model.progress"}
    refusal, what = "nothing", f"of a run from {from_way} to {to_way}"
    with shared_folder() as folder:
        checkpoint.save(f"{folder}/1", saved, before, **{k: x for k, x in said.items() if k == "progress"}, step=said)
        found = held(f"loading {what}", partial(checkpoint.load, f"{folder}/1", loaded, after))
        checkpoint.save(f"{folder}/2", given, torch.optim.SGD(given.parameters(), 0.1))
        try:
            checkpoint.load(f"{folder}/2", other, torch.optim.SGD(other.parameters(), 0.1))
        except ValueError as error:  # looked at where all ranks have left the folder
            refusal = str(error)
    must(found == {"progress": said["progress"], "step": said}, f"progress {what} must be as it was given, got {found}")
    ours, theirs = (
        [(name.removeprefix("module."), x) for name, x in _tensors(*run)] for run in ((saved, before), (loaded, after))
    )
    must(len(ours) == len(theirs), f"{len(theirs)} tensors {what} in place of {len(ours)}")
    for (name, right), (_, x) in zip(ours, theirs, strict=True):
        must_be(f"{name} {what}", x, right)
    must(
        "model must have the parameters of the checkpoint" in refusal,
        f"a checkpoint with the names of a model {'less deep' if deeper else 'deeper'} must be refused, got {refusal}",
    )
    return ""


NAME_CALLS: dict[str, OtherCall] = {"names like a checkpoint's own": OtherCall(_named_like_a_checkpoint, "")}
