"""Steps under FSDP2 equal those of one dense process; units, options and policies, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from ring.nn.frameworks import fsdp
from tests.support.framework_example import APART, SHORT, TOGETHER, Example, assert_near, dense, mesh_of, whole
from tests.support.ranks import Ranks
from tests.support.torch_wrapper_tasks import under_fsdp

pytestmark = pytest.mark.ranks

EXAMPLES = [
    (Example(SHORT), False),
    (Example(SHORT, "without rank 0", accumulation=2), False),
    (Example(TOGETHER, accumulation=3, clip=0.1), True),
    (Example(APART, "striped", clip=0.1), False),
    (Example(((2, 0, 3, 1),), "contiguous", accumulation=2), False),
    (Example(APART, "striped", clip=0.1), True),
]


@pytest.mark.parametrize(("example", "replicate"), EXAMPLES)
def test_it_trains_as_one_process(ranks: Ranks, example: Example, replicate: bool) -> None:
    assert_near(ranks(example.world).run(under_fsdp, example, None, None, replicate), dense(example))


def test_mixed_precision_trains_to_within_16_bits(ranks: Ranks) -> None:
    """Parameters stay fp64, and what is computed in bf16 differs by its rounding, which is 2^-9 for each operation."""
    example = Example(APART, accumulation=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact = dense(example)
    for result in ranks(4).run(under_fsdp, example, None, policy):
        assert all(x.dtype == torch.float64 for x in result.parameters.values())
        assert 1e-6 < abs(result.losses[0] - exact.losses[0]) < 0.02 * exact.losses[0]
        assert 1e-6 < abs(result.norms[0] - exact.norms[0]) < 0.05 * exact.norms[0]


# --- units, options and policies --------------------------------------------------------------------------------------


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
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.first, self.second = Layer(), nn.Sequential(DerivedLayer())
            self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.second(self.first(x)).float()) + self.scale


X = torch.linspace(-1.0, 1.0, 12).view(3, 4)
UNITS: dict[str, Callable[[Any], Any]] = {
    "root": lambda model: model, "first": lambda model: model.first, "second": lambda model: model.second[0],
}  # fmt: skip
IGNORED = ("first.scale", "second.0.linear.weight", "linear.bias")


def sharded_again(model: nn.Module) -> dict[str, bool]:
    """Whether the units' parameters are sharded after a forward."""
    model(X)
    return {name: isinstance(unit(model).linear.weight, DTensor) for name, unit in UNITS.items()}


def _shard_with(option: str, replicate: bool) -> None:
    model, unsharded = Model(), Model()
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
    sharded: Any = fsdp.shard(model, mesh, Layer, replicate=replicate, **every[option])
    assert sharded is model
    for name, x in model.named_parameters():
        if option == "ignored" and name in IGNORED:
            assert x is before[name], name
            continue
        dim = 1 if option == "placed" and x.dim() == 2 else 0
        assert isinstance(x, DTensor) and x.placements[-1] == Shard(dim), name
        assert x.device_mesh.mesh.tolist() == ([[0, 1]] if replicate else [0, 1]), name
        assert len(x.placements) == 1 + replicate and all(placement.is_replicate() for placement in x.placements[:-1])
    units = {name: unit(sharded) for name, unit in UNITS.items()}
    assert all(isinstance(unit, FSDPModule) for unit in units.values()) and not isinstance(sharded.second, FSDPModule)
    again = sharded_again(sharded)
    if option == "ignored":
        assert not again["second"]
    elif option in ("reshard", "no reshard"):
        assert again == dict.fromkeys(UNITS, option == "reshard")
    else:
        assert again == {"root": False, "first": True, "second": True}, "torch's own: the root's stay gathered"
    for name, unit in units.items():
        held = unit._get_fsdp_state()._fsdp_param_group.offload_policy
        assert isinstance(held, CPUOffloadPolicy) is (option == "offload"), name
    out, expected = sharded(X), unsharded(X)
    assert out.dtype == (torch.float64 if option == "policy" else torch.float32)
    torch.testing.assert_close(out, expected, check_dtype=False)
    out.sum().backward()
    expected.sum().backward()
    for name, x in unsharded.named_parameters():
        grad = sharded.get_parameter(name).grad
        assert x.grad is not None and grad is not None, name
        torch.testing.assert_close(whole(grad), x.grad, msg=name)


@pytest.mark.parametrize("option", ["none", "reshard", "no reshard", "ignored", "placed", "offload", "policy"])
@pytest.mark.parametrize("replicate", [False, True], ids=["sharded", "replicated"])
def test_options_hold_for_every_unit(ranks: Ranks, option: str, replicate: bool) -> None:
    """Results stay as without FSDP, and layers and the root have their parameters where and as options say."""
    ranks(2).run(_shard_with, option, replicate)


def _sum_in_fp32(dtype: torch.dtype, replicate: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1, bias=False)), nn.Linear(1, 1, bias=False))
    seen: list[torch.dtype] = []
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        nn.init.ones_(linear.weight)
        linear.register_forward_hook(lambda layer, given, out: seen.extend((given[0].dtype, layer.weight.dtype)))
    mesh = mesh_of(((0, 1), (2, 3)))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    sharded: Any = fsdp.shard(model, mesh, (nn.Sequential, nn.Conv1d), policy=policy, replicate=replicate)
    small = 1.0 if torch.distributed.get_rank() == 0 else 2.0**-12
    (sharded(torch.ones(1, 1)).float().sum() * small).backward()
    assert seen == [dtype] * 4
    for x in sharded.parameters():
        assert x.dtype == x.grad.dtype == torch.float32
        assert abs(whole(x.grad).item() - (1 + 3 * 2.0**-12) / 4) < 2.0**-22


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("replicate", [False, True], ids=["sharded", "replicated"])
def test_gradients_of_16_bits_are_summed_in_fp32(ranks: Ranks, dtype: torch.dtype, replicate: bool) -> None:
    """1 on one rank and 2^-12 on the others: nothing is lost, in a layer and in the root."""
    ranks(4).run(_sum_in_fp32, dtype, replicate)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": ({"policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "policy must name reduce_dtype"),
    "fp16": ({"policy": MixedPrecisionPolicy(param_dtype=torch.float16)}, "policy must name reduce_dtype"),
    "a policy of torch's name": ({"mp_policy": None}, "mp_policy must be left out"),
    "a mesh of its own": ({"dp_mesh_dims": None}, "dp_mesh_dims must be left out"),
    "no such layer": ({"layers": nn.Conv2d}, "layers must name classes of which the model has modules, got Conv2d"),
    "no layer": ({"layers": ()}, "layers must be classes of modules, got none"),
}


def _refuse(name: str) -> None:
    options, words = REFUSED[name]
    model, mesh = Model(), mesh_of(((0, 1),))
    with pytest.raises(ValueError, match=words):
        fsdp.shard(model, mesh, **{"layers": Layer} | options)
    with pytest.raises(ValueError, match="mesh must have the dimensions"):
        fsdp.shard(model, mesh["data"], Layer)
    with pytest.raises(ValueError, match="to replicate over"):
        fsdp.shard(model, mesh["context"], Layer, replicate=True)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_wrong_is_refused(ranks: Ranks, name: str) -> None:
    ranks(2).run(_refuse, name)
