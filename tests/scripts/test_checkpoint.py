"""scripts/checkpoint.py: runs go on at another number of ranks and under another wrapper, with all that they had."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import checkpoint
import pytest
import torch
from torch import Tensor, nn

from ring.integrations.wrappers import ddp, fsdp
from ring.nn import LongNetBlock
from tests.support.framework_example import (
    Example,
    Result,
    SmallModel,
    assert_near,
    dense,
    mesh_of,
    optimizer_for,
    trained,
    whole,
)
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def _train_a_part(example: Example, wrapper: str, folder: Path, first: int, last: int) -> Result:
    """Make the steps first .. last - 1: resumed from the folder unless first is 0, and saved there."""
    inner, mesh = SmallModel(seed=3 + first), example.device_mesh  # a resumed model starts with other parameters
    model: Any = ddp.wrap(inner, mesh) if wrapper == "ddp" else fsdp.shard(inner, mesh, LongNetBlock)
    optimizer = optimizer_for(model)
    if first:
        progress = checkpoint.load(folder / str(first), model, optimizer)
        assert progress == {"step": first, "words": ["as", "JSON"]}
    result = trained(example, inner, model, optimizer, steps=range(first, last))
    checkpoint.save(folder / str(last), model, optimizer, step=last, words=["as", "JSON"])
    return result


@pytest.mark.parametrize(("first", "second", "grows"), [("ddp", "fsdp", True), ("fsdp", "ddp", False)])
def test_resumed_at_another_number_of_ranks(ranks: Ranks, tmp_path: Path, first: str, second: str, grows: bool) -> None:
    """Two steps on two ranks and one on four, or the other way round: another layout, the same global batch."""
    small = Example("short", "zigzag", sequences=4, steps=3, silent=False)
    large = Example("apart", "striped", sequences=2, steps=3, silent=False)
    before, after = (small, large) if grows else (large, small)
    begun = ranks(before.world).run(_train_a_part, before, first, tmp_path, 0, 2)
    ended = ranks(after.world).run(_train_a_part, after, second, tmp_path, 2, 3)
    for result in ended:
        result.losses = begun[0].losses + result.losses
    assert_near(ended, dense(small))


def test_the_former_place_names_this_one() -> None:
    with pytest.raises(ModuleNotFoundError, match="is now scripts/checkpoint.py, beside scripts/train.py: copy it"):
        importlib.import_module("ring.nn.frameworks.checkpoint")


PROGRESS: dict[str, Any] = {"step": 3, "name": "run", "rates": [0.5, None], "nested": {"model": [True]}}
WAYS = ("plain", "ddp", "fsdp", "descending fsdp", "replicated fsdp")
Run = tuple[nn.Module, torch.optim.Optimizer]


def begun(way: str, adam: bool, value: float) -> Run:
    """A model with a buffer and parameters within and outside of layers, from that value up, and its optimizer."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 5)), nn.Sequential(nn.Linear(5, 3)), nn.Linear(3, 1))
    model.register_buffer("seen", torch.full((3,), value))
    for x in model.parameters():
        x.data.copy_(torch.linspace(value, 2.0 * value, x.numel()).view(x.shape))  # a shard differs from each other one
    wrapped: Any = model
    if way == "ddp":
        wrapped = ddp.wrap(model, mesh_of(((0, 1), (2, 3))))
    elif way != "plain":
        mesh = mesh_of(((3, 2), (1, 0)) if way == "descending fsdp" else ((0, 1), (2, 3)))
        fsdp.shard(model, mesh, nn.Sequential, replicate="data" if way == "replicated fsdp" else ())
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
    assert_same(saved, loaded)
    make_a_step(*saved)  # in its own memory still
    make_a_step(*loaded)
    assert_same(saved, loaded, exactly=False)


def assert_same(saved: Run, loaded: Run, exactly: bool = True) -> None:
    (ours, our_numbers), (theirs, their_numbers) = held(*saved), held(*loaded)
    assert their_numbers == our_numbers
    assert len(ours) == len(theirs) > 7
    for x, y in zip(ours, theirs, strict=True):  # wrappers average gradients in another order
        torch.testing.assert_close(x, y, rtol=0.0 if exactly else 1e-6, atol=0.0 if exactly else 1e-6)


@pytest.mark.parametrize(("saved_as", "loaded_as"), list(zip(WAYS, (*WAYS[2:], *WAYS[:2]), strict=True)))
def test_a_run_taken_up_has_all_that_the_saved_one_had(
    ranks: Ranks, tmp_path: Path, saved_as: str, loaded_as: str
) -> None:
    """AdamW is new, SGD in use when it is loaded."""
    for adam in (True, False):
        ranks(4).run(_take_up, saved_as, loaded_as, adam, not adam, f"{tmp_path}/{adam}")


class Named(nn.Module):
    """A module whose parts are named like a checkpoint's own."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.optimizer = nn.Parameter(torch.full((2,), 1.0 + depth))
        if depth:
            self.model = Named(depth - 1)
            self.progress = nn.Linear(2, 2)


def _save_names(folder: Path) -> None:
    torch.manual_seed(0)  # ranks save shares of the same weights
    saved, loaded, deeper = Named(2), Named(2), Named(3)
    for x in loaded.parameters():
        nn.init.zeros_(x)
    checkpoint.save(folder, saved, optimizer_for(saved), progress="model.progress")
    assert checkpoint.load(folder, loaded, optimizer_for(loaded)) == {"progress": "model.progress"}
    for name, x in saved.named_parameters():
        assert torch.equal(x, loaded.get_parameter(name)), name
    for other in (deeper, saved.model):
        with pytest.raises(ValueError, match="'model' must be that of the checkpoint"):
            checkpoint.load(folder, other, optimizer_for(other))


def test_names_like_those_of_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_save_names, tmp_path / "1")


def a_linear(extra: str = "", used: bool = False) -> Run:
    """extra: the names of its buffers. used: whether there are gradients."""
    model = nn.Linear(2, 2)
    for name in extra:
        model.register_buffer(name, torch.zeros(1))
    if used:
        model(torch.ones(1, 2)).sum().backward()
    return model, optimizer_for(model)


def _refuse(folder: Path) -> None:
    checkpoint.save(folder / "saved", *a_linear())
    checkpoint.save(str(folder / "wider"), *a_linear("dcba"))
    for name, run, words in (
        ("saved", a_linear("ba"), "'model.a' is missing there, torch.float32 .1. here"),
        ("wider", a_linear(), "'model.a' is torch.float32 .1. there, missing here"),
        ("saved", a_linear(used=True), "optimizer must be loaded before backward"),
        (
            "saved",
            (wide := nn.Linear(2, 3), optimizer_for(wide)),
            r"'model.bias' is torch.float32 .2. there, .* .3. here",
        ),
        (
            "saved",
            (fine := nn.Linear(2, 2).double(), optimizer_for(fine)),
            r"float32 .2. there, torch.float64 .2. here",
        ),
        ("saved", (other := nn.Linear(2, 2), torch.optim.SGD(other.parameters(), 0.1)), "'optimizer' must be that of"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoint.load(folder / name, *run)
    with pytest.raises(ValueError, match="folder must be new"):
        checkpoint.save(folder / "saved", *a_linear())


def test_partial_reads_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_refuse, tmp_path)
