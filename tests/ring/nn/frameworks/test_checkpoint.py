"""Checkpoints: runs go on at another number of ranks and under another wrapper, with all that they had."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ring.nn import cross_entropy
from ring.nn.frameworks import checkpoint, ddp, fsdp
from ring.nn.frameworks.checkpoint import _some
from ring.nn.frameworks.mesh import averaging_mesh
from tests.support.framework_example import (
    APART,
    SHORT,
    DecoderLayer,
    Example,
    Result,
    SmallLlama,
    assert_near,
    dense,
    labels_of,
    mesh_of,
    optimizer_for,
    plain,
    whole,
)
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def _train_a_part(example: Example, wrapper: str, folder: Path, first: int, last: int) -> Result:
    """Make the steps first .. last - 1: resumed from the folder unless first is 0, and saved there."""
    mesh = example.device_mesh()
    context = example.handle(mesh)
    inner = SmallLlama(seed=3 + first)  # a resumed model starts with other parameters
    model: Any = ddp.wrap(inner, mesh) if wrapper == "ddp" else fsdp.shard(inner, mesh, DecoderLayer)
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
    result.parameters = plain(dict(inner.named_parameters()))
    return result


@pytest.mark.parametrize(
    ("first", "second", "grows"),
    [("fsdp", "fsdp", True), ("ddp", "ddp", False), ("ddp", "fsdp", True), ("fsdp", "ddp", False)],
)
def test_resumed_at_another_number_of_ranks(ranks: Ranks, tmp_path: Path, first: str, second: str, grows: bool) -> None:
    """Two steps on two ranks and one on four, or the other way round: another layout, the same global batch."""
    small = Example(SHORT, "zigzag", sequences=4, steps=3, silent=False)
    large = Example(APART, "striped", sequences=2, steps=3, silent=False)
    before, after = (small, large) if grows else (large, small)
    begun = ranks(before.world).run(_train_a_part, before, first, tmp_path, 0, 2)
    ended = ranks(after.world).run(_train_a_part, after, second, tmp_path, 2, 3)
    for result in ended:
        result.losses = begun[0].losses + result.losses
    assert_near(ended, dense(small))


# --- what is in a checkpoint ------------------------------------------------------------------------------------------

PROGRESS: dict[str, Any] = {"step": 3, "name": "run", "rates": [0.5, None], "nested": {"model": [True]}}
WAYS = ("plain", "ddp", "fsdp", "descending fsdp", "replicated fsdp")
Run = tuple[nn.Module, torch.optim.Optimizer]


def begun(way: str, adam: bool, value: float) -> Run:
    """A model with a buffer and parameters within and outside of layers, all of that value, and its optimizer."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 5)), nn.Sequential(nn.Linear(5, 3)), nn.Linear(3, 1))
    model.register_buffer("seen", torch.full((3,), value))
    for x in model.parameters():
        nn.init.constant_(x, value)
    wrapped: Any = model
    if way == "ddp":
        wrapped = ddp.wrap(model, mesh_of(((0, 1), (2, 3))))
    elif way != "plain":
        mesh = mesh_of(((3, 2), (1, 0)) if way == "descending fsdp" else ((0, 1), (2, 3)))
        fsdp.shard(model, mesh, nn.Sequential, replicate=way == "replicated fsdp")
    numbers: dict[str, Any] = {"lr": value / 8, "weight_decay": value / 4}
    if adam:
        return wrapped, torch.optim.AdamW(wrapped.parameters(), betas=(value / 2, value / 3), eps=value / 5, **numbers)
    return wrapped, torch.optim.SGD(wrapped.parameters(), momentum=value / 2, **numbers)


def make_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(6.0).view(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Parameters, buffers and the optimizer's state, whole; the numbers of its groups."""
    tensors = [*model.parameters(), *model.buffers()]
    for x in model.parameters():
        tensors += [state for _, state in sorted(optimizer.state[x].items()) if isinstance(state, Tensor)]
    numbers = [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]
    return [whole(x) for x in tensors], copy.deepcopy(numbers)


def _take_up(saved_as: str, loaded_as: str, adam: bool, in_use: bool, folder: str) -> None:
    saved, loaded = begun(saved_as, adam, 1.0), begun(loaded_as, adam, 0.75)
    make_a_step(*saved)
    if in_use:
        make_a_step(*loaded)
    checkpoint.save(folder, *saved, **PROGRESS)
    assert checkpoint.load(folder, *loaded) == PROGRESS
    (ours, our_numbers), (theirs, their_numbers) = held(*saved), held(*loaded)
    assert their_numbers == our_numbers
    assert len(ours) == len(theirs) > 7
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("saved_as", "loaded_as"), list(zip(WAYS, (*WAYS[2:], *WAYS[:2]), strict=True)))
@pytest.mark.parametrize(("adam", "in_use"), [(True, False), (False, True)], ids=["new AdamW", "SGD in use"])
def test_a_run_taken_up_has_all_that_the_saved_one_had(
    ranks: Ranks, tmp_path: Path, saved_as: str, loaded_as: str, adam: bool, in_use: bool
) -> None:
    ranks(4).run(_take_up, saved_as, loaded_as, adam, in_use, f"{tmp_path}/1")


class Named(nn.Module):
    """A module whose parts are named like a checkpoint's own."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.optimizer = nn.Parameter(torch.full((2,), 1.0 + depth))
        if depth:
            self.model = Named(depth - 1)
            self.progress = nn.Linear(2, 2)


def _save_names(folder: Path) -> None:
    saved, loaded, deeper = Named(2), Named(2), Named(3)
    for x in loaded.parameters():
        nn.init.zeros_(x)
    checkpoint.save(folder, saved, optimizer_for(saved), progress="model.progress")
    assert checkpoint.load(folder, loaded, optimizer_for(loaded)) == {"progress": "model.progress"}
    for name, x in saved.named_parameters():
        assert torch.equal(x, loaded.get_parameter(name)), name
    for other in (deeper, saved.model):
        with pytest.raises(ValueError, match="model must have the parameters of the checkpoint"):
            checkpoint.load(folder, other, optimizer_for(other))


def test_names_like_those_of_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_save_names, tmp_path / "1")


# --- what is refused --------------------------------------------------------------------------------------------------


def a_linear(wider: bool = False) -> Run:
    model = nn.Linear(2, 2)
    if wider:
        model.register_buffer("more", torch.zeros(1))
    return model, optimizer_for(model)


def with_gradients() -> Run:
    model, optimizer = a_linear()
    model(torch.ones(1, 2)).sum().backward()
    return model, optimizer


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a buffer more": (
        lambda folder: checkpoint.load(folder / "saved", *a_linear(True)), "nothing is only in the checkpoint, more is"
    ),
    "a buffer less": (
        lambda folder: checkpoint.load(folder / "wider", *a_linear()), "more is only in the checkpoint, nothing is"
    ),
    "gradients": (lambda folder: checkpoint.load(folder / "saved", *with_gradients()), "optimizer must have no grad"),
    "a folder in use": (lambda folder: checkpoint.save(folder / "saved", *a_linear()), "folder must hold no checkp"),
    "no JSON": (lambda folder: checkpoint.save(folder / "new", *a_linear(), step=torch.int8), "not JSON serializable"),
}  # fmt: skip


def _refuse(folder: Path) -> None:
    checkpoint.save(folder / "saved", *a_linear())
    checkpoint.save(str(folder / "wider"), *a_linear(True))
    for name, (call, words) in REFUSED.items():
        with pytest.raises(TypeError if name == "no JSON" else ValueError, match=words):
            call(folder)


def test_what_would_be_read_in_part_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_refuse, tmp_path)


def _save_shards(folder: Path, by_torch: bool) -> tuple[list[float], list[float]]:
    """A parameter that FSDP has sharded over a mesh whose ranks do not ascend, and what torch reads of it."""
    mesh = mesh_of(APART)
    model = nn.Linear(1, 8, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(8.0)[:, None])
    fully_shard(model, mesh=mesh._flatten("all") if by_torch else averaging_mesh(mesh))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    read = {"weight": torch.empty(8, 1)}
    dcp.load(read, checkpoint_id=folder)
    return whole(model.weight).flatten().tolist(), read["weight"].flatten().tolist()


@pytest.mark.parametrize("by_torch", [True, False])
def test_torch_saves_swapped_parts_where_ranks_are_not_in_ascending_order(
    ranks: Ranks, tmp_path: Path, by_torch: bool
) -> None:
    """A flattened mesh of the ranks 0, 2, 1, 3 (torch 2.13): it saves other values than the ranks have."""
    right = [float(row) for row in range(8)]
    swapped = [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]
    assert ranks(4).run(_save_shards, tmp_path, by_torch) == [(right, swapped if by_torch else right)] * 4


@pytest.mark.parametrize(("names", "said"), [("", "nothing is"), ("ba", "a, b is"), ("dcba", "a, b, c and 1 more are")])
def test_up_to_three_names_are_said(names: str, said: str) -> None:
    assert _some(set(names)) == said
