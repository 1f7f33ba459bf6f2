"""What the average of gradients and their clip promise beside what a step asks of them: every type, every mesh."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ring.nn.gradients
from ring.nn import average_gradients, clip_grad_norm
from verification.training.rank.meshes import descending_mesh_of
from verification.training.rank.other_calls import CallPlace, OtherCall, must, must_be, must_be_near

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((2, 3), (), (0, 2), (5,), (1, 2, 2))


def _averaged_in_any_type(s: CallPlace) -> str:
    """Gradients of many types and shapes in buckets of some size, some of which a rank or all ranks lack. Numbers in
    16 bits are summed in fp32: of 60000 on two ranks the sum, and of 1 and many 2^-9 each summand, would not fit."""
    draws, world = s.draws(), s.case.world
    parameters: list[nn.Parameter] = []
    wanted: list[Tensor | None] = []
    before: list[Tensor | None] = []
    for _ in range(int(draws.integers(1, 7))):
        dtype, shape = DTYPES[draws.integers(4)], SHAPES[draws.integers(len(SHAPES))]
        values = draws.integers(-64, 65, (world, *shape)).astype(np.float64)
        values *= 937.5 if dtype == torch.float16 else 2.0**-9
        values[0] += 0.0 if dtype == torch.float16 else 1.0
        held = torch.from_numpy(values).to(dtype)  # (world, ...), as each rank has it
        lacking = draws.integers(0, 3, world) == 0
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=s.device))
        parameter.grad = None if lacking[s.rank] else held[s.rank].to(s.device)
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        exact = held.to(kind)[torch.from_numpy(~lacking)].double().sum(0).div(world)
        parameters.append(parameter)
        before.append(parameter.grad)
        wanted.append(None if lacking.all() else exact)
    with patch.object(ring.nn.gradients, "BUCKET", int(draws.choice((1, 24, 2**25)))):  # one that models exceed
        average_gradients((x for x in parameters), s.mesh)
    for number, (x, average, grad_before) in enumerate(zip(parameters, wanted, before, strict=True)):
        grad: Tensor | None = x.grad
        what = f"the average of gradient {number}, in {x.dtype} of shape {tuple(x.shape)},"
        if average is None or grad is None:
            must(average is None and grad is None, f"{what} must be {average}, got {grad}")
            continue
        must(grad.dtype == x.dtype and grad.shape == x.shape, f"{what} has {grad.dtype}, {grad.shape}")
        must(grad_before is None or grad is grad_before, f"{what} must be written into the gradient that was there")
        # The sum of world numbers, and a division, in fp32 at least; then one rounding to the type.
        eps = (world + 1) * 2.0**-24 + torch.finfo(x.dtype).eps / 2
        most = eps * 60000 if x.dtype == torch.float16 else eps * 1.25
        must_be_near(what, grad, average, most if average.numel() else 0.0)
    average_gradients([], s.mesh)
    return ""


def _clipped_together(s: CallPlace) -> str:
    """Plain gradients and DTensors on several meshes, some shards of which are on several ranks, in one call."""
    draws = s.draws()
    for _ in range(2):
        most, dtype = (1e-3, 1.0, 50.0, 1e5)[draws.integers(4)], DTYPES[draws.integers(3)]
        wholes = [
            torch.from_numpy(draws.normal(size=(int(draws.integers(1, 6)), 2))).to(dtype)
            for _ in range(int(draws.integers(0, 5)))
        ]
        parameters, ways = [], draws.integers(0, 5, len(wholes))
        for whole, way in zip(wholes, ways, strict=True):
            parameter = nn.Parameter(_laid(s, torch.zeros_like(whole), way).to(s.device))
            parameter.grad = _laid(s, whole.clone(), way).to(s.device)
            parameters.append(parameter)
        parameters += [nn.Parameter(torch.zeros(3, device=s.device)), *parameters[:1]]  # without gradient; listed twice
        given = parameters[0] if len(wholes) == 1 and draws.integers(2) else parameters
        norm = clip_grad_norm(given, most, s.mesh)
        exact = sum(float(x.double().square().sum()) for x in wholes) ** 0.5
        must(norm.dtype == torch.float64 and norm.device.type == "cpu", f"the norm must be fp64 on the CPU: {norm!r}")
        must_be_near(
            "the norm of all gradients", norm, torch.tensor(exact, dtype=torch.float64), 1e-13 * max(1.0, exact)
        )
        factor = min(1.0, most / (exact + 1e-6))
        for whole, way, parameter in zip(wholes, ways, parameters, strict=False):
            assert parameter.grad is not None
            found, wanted = (_local(x) for x in (parameter.grad, _laid(s, whole, way)))
            what = f"a gradient of norm {exact}, clipped at {most},"
            if factor == 1.0:
                must_be(what, found, wanted)
            else:
                must_be_near(what, found, wanted.double() * factor, torch.finfo(dtype).eps * 8 * factor)
    return ""


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _laid(s: CallPlace, x: Tensor, way: int) -> Tensor:
    """x (m, 2): plain, or this rank's part of a DTensor over some mesh, placed in some way."""
    if way == 0:
        return x
    context = s.mesh["context"]
    choices: tuple[tuple[DeviceMesh, list[Shard | Replicate]], ...] = (
        (s.mesh, [Replicate(), Shard(0)]), (s.mesh, [Shard(0), Replicate()]), (context, [Shard(0)]),
        (descending_mesh_of(s.case), [Replicate(), Shard(0)]),
    )  # fmt: skip
    mesh, placements = choices[way - 1]
    dim = next(i for i, placement in enumerate(placements) if placement.is_shard())
    mine = mesh[mesh.mesh_dim_names[dim]] if mesh.ndim > 1 and mesh.mesh_dim_names else mesh
    share, at = -(-len(x) // mine.size()), mine.get_local_rank()
    part = x[at * share : (at + 1) * share]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


GRADIENT_CALLS: dict[str, OtherCall] = {
    "gradients of any type, averaged": OtherCall(_averaged_in_any_type, ""),
    "gradients on several meshes, clipped": OtherCall(_clipped_together, ""),
}
