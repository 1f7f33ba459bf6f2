"""Options that `fsdp.shard` hands on to torch hold for every unit: for the layers, and for what is the root's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from ring.nn.frameworks import fsdp
from verification.training.rank.meshes import descending_mesh_of
from verification.training.rank.other_calls import CallPlace, OtherCall, must, must_be, must_be_near

TRIED = 2
ROUNDING = 2.0**-16  # of sums of some tens of products of numbers below 4, in fp32


class _ShardedLayer(nn.Module):
    """A unit of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x)) * self.scale


class _DerivedLayer(_ShardedLayer):
    """A unit by the class that it is derived from."""


class _ShardedModel(nn.Module):
    """Layers, and what is outside of them: before them, behind them, and a parameter of the root itself."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.before, self.head = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.layers, self.shift = (
            nn.ModuleList((_ShardedLayer, _DerivedLayer)[i % 2](width) for i in range(layers)),
            nn.Parameter(torch.ones(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x.float())  # a policy may give what comes out another type
        return torch.sin(self.head(x.float())) + self.shift


def _made(s: CallPlace, draws: np.random.Generator, width: int) -> _ShardedModel:
    model = _ShardedModel(width, int(draws.integers(1, 3)))
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.from_numpy(draws.normal(size=x.shape) / width))
    return model.to(s.device)


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()


def _options_of_units(s: CallPlace) -> str:
    """Several options at a time, in several models: parameters are where and as options say, in every unit; what comes
    out, and its gradients, are as without."""
    draws, width = s.draws(), 2 * s.case.world
    for _ in range(TRIED):
        model = _made(s, draws, width)
        x = torch.from_numpy(draws.normal(size=(3, width))).float().to(s.device)
        wanted = model(x)
        wanted.sum().backward()  # alike on all ranks, so that averages are the same
        right = {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}
        model.zero_grad()
        ignored, options, policy = _drawn(s, draws, model)
        replicate = bool(draws.integers(2))
        what = f"options {sorted(options)}, ignoring {sorted(ignored)}, replicate={replicate}"
        before = dict(model.named_parameters())
        mesh = descending_mesh_of(s.case) if draws.integers(2) and not replicate else s.mesh
        made: Any = fsdp.shard(model, mesh, _ShardedLayer, policy=policy, replicate=replicate, **options)
        units = {"the root": made} | {f"layer {number}": layer for number, layer in enumerate(made.layers)}
        for name, p in made.named_parameters():
            if name in ignored:
                must(p is before[name] and not isinstance(p, DTensor), f"{what}: {name} must be left as it was")
                continue
            must(isinstance(p, DTensor), f"{what}: {name} must be sharded, got {type(p)}")
            dim = 1 if "shard_placement_fn" in options and p.dim() == 2 else 0
            must(p.placements[-1] == Shard(dim), f"{what}: {name} must be sharded along {dim}, got {p.placements}")
        must(
            all(isinstance(unit, FSDPModule) for unit in units.values()),
            f"{what}: every layer and the root must be units",
        )
        found = made(x)
        for place, unit in units.items():
            _check_unit(f"{what}: {place}", unit, ignored, before, options)
        kind = (policy or MixedPrecisionPolicy()).output_dtype or torch.float32
        must(found.dtype == kind, f"{what}: what comes out must be {kind}, got {found.dtype}")
        must_be_near(f"{what}: what comes out", found.detach(), wanted.detach(), ROUNDING * width)
        found.sum().backward()
        for name, p in made.named_parameters():
            value, grad = right[name]
            assert grad is not None
            must_be(f"{what}: the value of {name}", _whole(p), value)
            must(p.grad is not None, f"{what}: {name} must have a gradient")
            must_be_near(f"{what}: the gradient of {name}", _whole(p.grad), grad, ROUNDING * width)
    return ""


def _drawn(
    s: CallPlace, draws: np.random.Generator, model: nn.Module
) -> tuple[set[str], dict[str, Any], MixedPrecisionPolicy | None]:
    """The names of ignored parameters, the options, and a policy."""
    options: dict[str, Any] = {}
    names = [name for name, _ in model.named_parameters()]
    chosen = draws.integers(0, 3, len(names)) == 0 if draws.integers(2) else np.zeros(len(names), dtype=bool)
    ignored = {name for name, take in zip(names, chosen, strict=True) if take}
    if ignored or draws.integers(2):
        options["ignored_params"] = {p for name, p in model.named_parameters() if name in ignored}
    if draws.integers(4):
        options["reshard_after_forward"] = bool(draws.integers(2))
    if draws.integers(2):
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 2 else None
    if draws.integers(2) and s.case.device == "cpu":  # else ignored parameters would have to be on CPUs as well
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    policy = MixedPrecisionPolicy(output_dtype=(None, torch.float64)[draws.integers(2)]) if draws.integers(2) else None
    return ignored, options, policy


def _check_unit(
    what: str, unit: Any, ignored: set[str], before: dict[str, nn.Parameter], options: dict[str, Any]
) -> None:
    """After a forward: whether the unit's own parameters are sharded again, and what torch does with them."""
    left = {id(before[name]) for name in ignored}
    linear = unit.linear if isinstance(unit, _ShardedLayer) else unit.head
    own = [
        p for p in (linear.weight, unit.scale if isinstance(unit, _ShardedLayer) else unit.shift) if id(p) not in left
    ]
    # Of torch: left out, layers are sharded again, and the root is not, which backward needs first.
    again = options.get("reshard_after_forward", isinstance(unit, _ShardedLayer))
    found = [isinstance(p, DTensor) for p in own]
    must(found == [again] * len(own), f"{what} must be {'' if again else 'not '}sharded again after forward: {found}")
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None and "offload_policy" in options:  # on CPUs nothing else shows it
        held = group.offload_policy
        must(isinstance(held, CPUOffloadPolicy) and not held.pin_memory, f"{what} must be offloaded, has {held}")


OPTION_CALLS: dict[str, OtherCall] = {"options of units": OtherCall(_options_of_units, "")}
