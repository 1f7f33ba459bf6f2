"""Units, options and policies of FSDP2, and what is refused. `test_wrappers.py` trains under it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from ring.integrations.wrappers import fsdp
from tests.support.framework_example import mesh_of, whole
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x.float())) * self.scale  # a policy may give what comes out another type


class DerivedLayer(Layer):
    """A unit by the class that it is derived from."""


class Model(nn.Module):
    """Layers, one of them within another module, and parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = Layer(), nn.Sequential(DerivedLayer())
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.second(self.first(x)).float()) + self.scale


X = torch.linspace(-1.0, 1.0, 12).view(3, 4)
IGNORED = ("first.scale", "second.0.linear.weight", "linear.bias")
RESHARDED = {"reshard": [True] * 3, "no reshard": [False] * 3, "ignored": [False, True, False]}  # after a forward


def _shard_with(option: str, replicate: bool) -> None:
    model: Any = Model()
    unsharded = Model()
    before = dict(model.named_parameters())
    every: dict[str, dict[str, Any]] = {
        "none": {},
        "reshard": {"reshard_after_forward": True},
        "no reshard": {"reshard_after_forward": False},
        "ignored": {"ignored_params": {before[name] for name in IGNORED}},
        "placed": {"shard_placement_fn": lambda x: Shard(1) if x.dim() == 2 else None},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "policy": {"policy": MixedPrecisionPolicy(output_dtype=torch.float64)},
    }
    mesh = mesh_of(((0, 1),)) if replicate else mesh_of(((1, 0),))
    sharded: Any = fsdp.shard(model, mesh, Layer, replicate="data" if replicate else (), **every[option])
    assert sharded is model
    for name, x in model.named_parameters():
        if option == "ignored" and name in IGNORED:
            assert x is before[name], name
            continue
        dim = 1 if option == "placed" and x.dim() == 2 else 0
        assert isinstance(x, DTensor) and x.placements[-1] == Shard(dim), name
        assert x.device_mesh.mesh.tolist() == ([[0, 1]] if replicate else [0, 1]), name
        assert len(x.placements) == 1 + replicate and all(placement.is_replicate() for placement in x.placements[:-1])
    units = [sharded, sharded.first, sharded.second[0]]
    assert all(isinstance(unit, FSDPModule) for unit in units) and not isinstance(sharded.second, FSDPModule)
    out, expected = sharded(X), unsharded(X)
    # By torch's own choice the root's parameters stay gathered. Those that FSDP ignores never were.
    again = RESHARDED.get(option, [False, True, True])
    assert [isinstance(unit.linear.weight, DTensor) for unit in units] == again
    for unit in units:
        held = unit._get_fsdp_state()._fsdp_param_group
        assert isinstance(held.offload_policy, CPUOffloadPolicy) is (option == "offload")
        assert held.mp_policy == every[option].get("policy", MixedPrecisionPolicy())
    assert out.dtype == (torch.float64 if option == "policy" else torch.float32)
    torch.testing.assert_close(out, expected, check_dtype=False)
    out.sum().backward()
    expected.sum().backward()
    for name, x in unsharded.named_parameters():
        grad = sharded.get_parameter(name).grad
        assert x.grad is not None and grad is not None, name
        torch.testing.assert_close(whole(grad), x.grad, msg=name)


@pytest.mark.parametrize(
    ("option", "replicate"),
    [
        *((option, False) for option in ("none", "reshard", "no reshard", "ignored", "placed", "offload", "policy")),
        ("placed", True),
    ],
)
def test_options_hold_for_every_unit(ranks: Ranks, option: str, replicate: bool) -> None:
    """Results stay as without FSDP, and layers and the root have their parameters where and as options say."""
    ranks(2).run(_shard_with, option, replicate)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "policy must name reduce_dtype"),
    ({"policy": MixedPrecisionPolicy(param_dtype=torch.float16)}, "policy must name reduce_dtype"),
    ({"mp_policy": None}, "mp_policy must be left out"),
    ({"dp_mesh_dims": None}, "dp_mesh_dims must be left out"),
    ({"layers": nn.Conv2d}, "layers must be classes of modules in the model, got Conv2d"),
    ({"mesh": "data"}, "mesh must have all ranks with tokens of their own"),
    ({"replicate": "tensor"}, "replicate must name dimensions of mesh"),
]


def _refuse() -> None:
    mesh = mesh_of(((0, 1),))
    for options, words in REFUSED:
        given = {"layers": Layer} | options
        with pytest.raises(ValueError, match=words):
            fsdp.shard(Model(), mesh[given.pop("mesh")] if "mesh" in given else mesh, **given)


def test_wrong_shardings_are_refused(ranks: Ranks) -> None:
    ranks(2).run(_refuse)
