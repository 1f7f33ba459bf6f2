"""What `ring.nn.frameworks` promises of checkpoints, wrappers, their meshes and policies, beside what a step shows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as computed_again

from ring.nn.frameworks import checkpoint, ddp, fsdp, recompute
from ring.nn.frameworks.mesh import averaging_mesh
from verification.training.rank.meshes import descending_mesh_of
from verification.training.rank.other_calls import CallPlace, OtherCall, must, must_be, must_be_near
from verification.training.rank.resuming import set_otherwise, shared_folder

WAYS = ("plain", "ddp", "fsdp", "descending fsdp", "hsdp")


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()


def _model(s: CallPlace, draws: np.random.Generator) -> nn.Sequential:
    """Two units of a layer each, and what is the root's own: a linear one and a buffer."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 5)), nn.Sequential(nn.Linear(5, 3)), nn.Linear(3, 1))
    model.register_buffer("seen", torch.from_numpy(draws.normal(size=3)))
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.from_numpy(draws.normal(size=x.shape)))
    return model.to(s.device)


def _wrapped(s: CallPlace, model: nn.Sequential, way: str) -> nn.Module:
    if way == "plain":
        return model
    if way == "ddp":
        return ddp.wrap(model, s.mesh)
    mesh = descending_mesh_of(s.case) if way == "descending fsdp" else s.mesh
    fsdp.shard(model, mesh, nn.Sequential, replicate=way == "hsdp")  # in place
    return model


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _run(
    s: CallPlace, draws: np.random.Generator, way: str, kind: type[Any]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _wrapped(s, _model(s, draws), way)
    numbers: dict[str, Any] = {"lr": 0.125, "weight_decay": 0.25}
    numbers |= {"momentum": 0.5} if kind is torch.optim.SGD else {"betas": (0.5, 0.75), "eps": 0.01}
    return model, kind(model.parameters(), **numbers)


def _one_step(s: CallPlace, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3, device=s.device)).sum().backward()  # alike on all ranks
    optimiser.step()
    optimiser.zero_grad()


def _held(model: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Parameters, buffers and the optimizer's state, whole; the numbers of its groups."""
    tensors = [*model.parameters(), *model.buffers()]
    states = [optimiser.state[x] for group in optimiser.param_groups for x in group["params"]]
    tensors += [x for state in states for _, x in sorted(state.items()) if isinstance(x, Tensor)]
    numbers = [{name: x for name, x in group.items() if name != "params"} for group in optimiser.param_groups]
    return [_whole(x).clone() for x in tensors], copy.deepcopy(numbers)


def _taken_up(s: CallPlace) -> str:
    """A run that is saved under one wrapper and taken up under another, by a new optimizer or one that is in use, with
    other numbers: parameters, buffers, states, numbers and progress are those of the checkpoint."""
    draws = s.draws()
    kind = (torch.optim.SGD, torch.optim.AdamW)[draws.integers(2)]
    from_way, to_way = (WAYS[draws.integers(len(WAYS))] for _ in range(2))
    said = {"step": int(draws.integers(9)), "name": "run", "rates": [0.5, None], "nested": {"done": True}}
    saved, before = _run(s, draws, from_way, kind)
    _one_step(s, saved, before)
    loaded, after = _run(s, draws, to_way, kind)
    in_use = bool(draws.integers(2))
    if in_use:
        _one_step(s, loaded, after)
    set_otherwise(after)
    what = f"from {from_way} to {to_way}, {kind.__name__} {'in use' if in_use else 'new'}"
    with shared_folder() as shared:
        folder = Path(shared) / "1" if draws.integers(2) else f"{shared}/1"
        checkpoint.save(folder, saved, before, **said)
        found = checkpoint.load(folder, loaded, after)
        wrong = _said_of(lambda: checkpoint.save(folder, saved, before), ValueError)
        unsayable = _said_of(lambda: checkpoint.save(f"{shared}/2", saved, before, step=object()), TypeError)
        unused = kind(loaded.parameters(), lr=1.0)
        loaded(torch.ones(2, 3, device=s.device)).sum().backward()
        with_gradients = _said_of(lambda: checkpoint.load(folder, loaded, unused), ValueError)
    must(found == said, f"progress {what} must be {said}, got {found}")
    (ours, our_numbers), (theirs, their_numbers) = _held(saved, before), _held(loaded, after)
    must(our_numbers == their_numbers, f"numbers of the optimizer {what} must be {our_numbers}, got {their_numbers}")
    must(len(ours) == len(theirs), f"{what}: {len(theirs)} tensors in place of {len(ours)}")
    for number, (x, y) in enumerate(zip(theirs, ours, strict=True)):
        must_be(f"tensor {number} of a run {what}", x, y)
    must("folder must hold no checkpoint" in wrong, f"a folder that is taken must be refused, got {wrong}")
    must("JSON" in unsayable, f"progress that JSON cannot hold must be refused, got {unsayable}")
    must("optimizer must have no gradients" in with_gradients, f"gradients must be refused, got {with_gradients}")
    return ""


def _said_of(call: Any, kind: type[Exception]) -> str:
    """The error, looked at where all ranks have left the folder."""
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing"


# --- wrappers ---------------------------------------------------------------------------------------------------------


def _averaged_by_wrappers(s: CallPlace) -> str:
    """Gradients are averaged over all ranks of a mesh of one or two dimensions, whose ranks ascend or not. Under DDP
    all of them begin with the parameters of the first."""
    draws = s.draws()
    descending = bool(draws.integers(2))
    mesh = descending_mesh_of(s.case) if descending else s.mesh
    alone = bool(draws.integers(2))
    if alone:
        mesh = mesh["context"]
    ranks = sorted(int(x) for x in mesh.mesh.flatten())
    flat = averaging_mesh(mesh)
    must(flat.ndim == 1 and flat.mesh.tolist() == ranks, f"averaging_mesh must have ranks {ranks}, got {flat}")
    way = ("ddp", "fsdp")[draws.integers(2)]
    model = _model(s, draws)
    wanted = [x.detach().clone().cpu() for x in model.parameters()]
    if way == "ddp":  # which gives all ranks the first one's
        _begin_apart(model, s.rank - ranks[0])
    made: Any = (
        ddp.wrap(model, mesh, gradient_as_bucket_view=True) if way == "ddp" else fsdp.shard(model, mesh, nn.Sequential)
    )
    must(isinstance(made, DistributedDataParallel if way == "ddp" else FSDPModule), f"{way} gave a {type(made)}")
    if isinstance(made, DistributedDataParallel):
        must(
            made.module is model and made.gradient_as_bucket_view, "ddp.wrap must hold the model and take DDP's options"
        )
    else:
        must(made is model, "fsdp.shard must return the same model")
    parameters = list(made.parameters())
    held = [_whole(x) for x in parameters]
    (made(torch.zeros(1, 3, device=s.device)).sum() * (s.rank + 1.0)).backward()  # of the last bias 1, times that
    grad = parameters[-1].grad
    assert grad is not None
    for number, (x, found, right) in enumerate(zip(parameters, held, wanted, strict=True)):
        must_be(f"parameter {number} under {way}", found, right)
        if isinstance(x, DTensor):
            must(x.device_mesh.mesh.tolist() == ranks, f"parameter {number} must be over {ranks}, got {x.device_mesh}")
    average = sum(rank + 1.0 for rank in ranks) / len(ranks)
    must_be_near(f"the gradient under {way} over {ranks}", _whole(grad), torch.tensor([average]), 1e-6 * average)
    return ""


def _begin_apart(model: nn.Module, number: int) -> None:
    """Parameters that differ from those of the rank of number 0."""
    with torch.no_grad():
        for x in model.parameters():
            x.add_(number)


def _units_of_a_policy(s: CallPlace) -> str:
    """Every unit, the root too, computes in the policy's type and sums gradients in the other one: of 1 on one rank and
    little on the others nothing is lost. The optimizer sees fp32."""
    draws = s.draws()
    dtype, replicate = (torch.bfloat16, torch.float16)[draws.integers(2)], bool(draws.integers(2))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1, bias=False)), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for x in model.parameters():
            x.fill_(1.0)
    model = model.to(s.device)
    seen: dict[int, set[torch.dtype]] = {0: set(), 1: set()}
    for number, linear in enumerate(x for x in model.modules() if isinstance(x, nn.Linear)):
        linear.register_forward_pre_hook(lambda _, given, number=number: seen[number].add(given[0].dtype))
        linear.register_forward_hook(lambda layer, *_, number=number: seen[number].add(layer.weight.dtype))
    layers = (nn.Sequential, nn.Conv1d) if draws.integers(2) else nn.Sequential
    again = bool(draws.integers(2))
    made: Any = fsdp.shard(model, s.mesh, layers, policy=policy, replicate=replicate, reshard_after_forward=again)
    must(isinstance(made[0], FSDPModule), "a layer must be a unit of its own")
    small = 1.0 if s.rank == 0 else 2.0**-12
    (made(torch.ones(1, 1, device=s.device)).float().sum() * small).backward()
    must(seen == {0: {dtype}, 1: {dtype}}, f"the layer, and what is the root's, must be computed in {dtype}: {seen}")
    average = torch.tensor([[(1.0 + (s.case.world - 1) * 2.0**-12) / s.case.world]])
    for number, x in enumerate(made.parameters()):
        grad = x.grad
        must(x.dtype == torch.float32 and grad.dtype == torch.float32, f"parameter {number} is in {x.dtype}")
        must_be_near(f"the gradient of unit {number}, summed in fp32,", _whole(grad), average, 2.0**-22)
        mesh = x.device_mesh
        wanted = s.mesh.mesh.tolist() if replicate else sorted(s.mesh.mesh.flatten().tolist())
        must(mesh.mesh.tolist() == wanted, f"replicate={replicate} must shard over {wanted}, got {mesh}")
        kinds = ["replicate", "shard"] if replicate else ["shard"]
        found = ["shard" if placement.is_shard() else "replicate" for placement in x.placements]
        must(found == kinds, f"replicate={replicate} must place parameters {kinds}, got {x.placements}")
    return ""


# --- computed again ---------------------------------------------------------------------------------------------------


class _Counted(nn.Module):
    """A layer that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.linear = 0, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.dropout(torch.sin(self.linear(x)), 0.5, self.training)


class _Derived(_Counted):
    """A layer of a class that is derived from the one that is named."""


def _computed_again(s: CallPlace) -> str:
    """Each layer of the classes runs once more in backward, others do not; gradients stay, bit by bit, also where a
    layer draws random numbers."""
    draws = s.draws()
    reentrant, kept = ((True, False), (False, False), (False, True))[draws.integers(3)]
    plain = nn.Sequential((_Derived, _Counted)[draws.integers(2)](), nn.Linear(2, 2), _Derived()).to(s.device)
    wrapped = copy.deepcopy(plain)
    counted = [x for x in wrapped.modules() if isinstance(x, _Counted)]
    layers = (_Counted,) if draws.integers(2) else _Counted
    recompute.wrap(wrapped, layers, keep_attention=kept, reentrant=reentrant)
    x = torch.linspace(-1.0, 1.0, 4, device=s.device).view(2, 2).requires_grad_()
    for model in (plain, wrapped):
        with torch.random.fork_rng():
            torch.manual_seed(s.case.seed)
            model(x).sum().backward()
    must([layer.runs for layer in counted] == [2, 2], f"layers must run twice, got {[x.runs for x in counted]}")
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        must_be("a gradient of a layer that is computed again", ours.grad, theirs.grad)
    layer = _Counted().to(s.device)
    computed_again(layer, x, use_reentrant=False, context_fn=recompute.attention_kept).sum().backward()
    must(layer.runs == 2, f"a checkpoint that keeps attention alone must run a layer twice, got {layer.runs}")
    return ""


FRAMEWORK_CALLS: dict[str, OtherCall] = {
    "a run that is saved and taken up": OtherCall(_taken_up, ""),
    "wrappers over any mesh": OtherCall(_averaged_by_wrappers, ""),
    "units of a policy": OtherCall(_units_of_a_policy, ""),
    "layers that are computed again": OtherCall(_computed_again, ""),
}
