"""What ranks do to save a run and to resume it: the first step on some ranks, the second on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from ring.nn import cross_entropy
from ring.nn.frameworks import checkpoint, ddp, fsdp
from ring.nn.frameworks.mesh import averaging_mesh
from tests.support.framework_example import APART, SHORT, Example, Result, labels_of, optimizer_for
from tests.support.framework_llama import DecoderLayer, SmallLlama
from tests.support.sharded_training import plain


def part(example: Example, wrapper: str, folder: Path, first: int, last: int) -> Result:
    """The steps first .. last - 1: resumed from the folder unless first is 0, and saved there."""
    mesh = example.device_mesh()
    context = example.handle(mesh)
    model = wrapped(wrapper, mesh, seed=3 + first)  # a resumed model starts with other parameters
    optimizer, result = optimizer_for(model), Result([], [], {}, {})
    if first:
        progress = checkpoint.load(folder / str(first), model, optimizer)
        assert progress == {"step": first, "words": ["as", "JSON"]}
    for step in range(first, last):
        (batch,) = example.batches(step, mesh, context)
        loss = cross_entropy(model(batch.tokens, batch.context), labels_of(batch), mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(loss.item())
    checkpoint.save(folder / str(last), model, optimizer, step=last, words=["as", "JSON"])
    result.parameters = plain({name.removeprefix("module."): x for name, x in model.named_parameters()})
    return result


def wrapped(wrapper: str, mesh: Any, seed: int) -> nn.Module:
    model = SmallLlama(seed)
    if wrapper == "ddp":
        return ddp.wrap(model, mesh)
    fsdp.shard(model, mesh, DecoderLayer)
    return model


def refused(folder: Path) -> list[str]:
    """What is said to another model, a first load after backward, a folder in use, progress that is no JSON."""
    mesh = Example(SHORT).device_mesh()
    model = wrapped("fsdp", mesh, 3)
    optimizer = optimizer_for(model)
    checkpoint.save(folder, model, optimizer)
    smaller = SmallLlama()
    del smaller.layers[1]
    fresh = wrapped("fsdp", mesh, 3)
    late = optimizer_for(fresh)
    for x in fresh.parameters():
        x.grad = torch.zeros_like(x)
    said = []
    calls = [
        lambda: checkpoint.load(folder, smaller, optimizer_for(smaller)),
        lambda: checkpoint.load(folder, fresh, late),
        lambda: checkpoint.save(folder, model, optimizer),
        lambda: checkpoint.save(folder / "other", model, optimizer, step=dist.group.WORLD),
    ]
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (ValueError, TypeError) as error:
            said.append(str(error))
    return said


def shards_as_torch_saves_them(folder: Path, mesh: Any) -> tuple[list[float], list[float]]:
    """A parameter that FSDP has sharded over a mesh, and what torch reads of it where it saved it."""
    model = nn.Linear(1, 8, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.arange(8.0)[:, None])
    fully_shard(model, mesh=mesh)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    found = {"weight": torch.empty(8, 1, dtype=torch.float64)}
    dcp.load(found, checkpoint_id=folder)
    return plain({"weight": model.weight})["weight"].flatten().tolist(), found["weight"].flatten().tolist()


def both_meshes(folder: Path) -> list[tuple[list[float], list[float]]]:
    mesh = Example(APART).device_mesh()
    return [
        shards_as_torch_saves_them(folder / "torch", mesh._flatten("all")),
        shards_as_torch_saves_them(folder / "ours", averaging_mesh(mesh)),
    ]
