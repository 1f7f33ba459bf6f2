"""What `ring.nn.frameworks` refuses: meshes, options, layers and plans that do not fit, DTensors placed otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from reference.pattern import Pattern
from ring.layout import Layout
from ring.nn import ContextParallel, RingAttention
from ring.nn.frameworks import ddp, fsdp, recompute
from ring.nn.frameworks.mesh import averaging_mesh, replicating_mesh
from ring.nn.frameworks.parallel_style import RingParallel, dtensor_layout
from verification.training.rank.meshes import descending_mesh_of, reversed_mesh_of, turned_mesh_of, wide_mesh_of
from verification.training.rank.other_calls import CallPlace, OtherCall, refused
from verification.training.rank.wrong_arguments import Mistake, some


def _model(s: CallPlace) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, device=s.device))


def _refusals(s: CallPlace) -> list[tuple[str, Callable[[], object]]]:
    """What every rank is told without asking the others."""
    wrap, shard, again = (
        partial(ddp.wrap, _model(s)),
        partial(fsdp.shard, _model(s)),
        partial(recompute.wrap, _model(s)),
    )
    context, p = s.mesh["context"], s.mesh["context"].size()
    handle = ContextParallel(_descending(s.case.tokens, p), context)
    others = s.mesh["data"] if s.case.data > 1 or p > 1 else s.mesh
    wrappers: list[Callable[..., object]] = [wrap, partial(shard, layers=nn.Linear)]
    not_a_mesh: Any = [0]
    attention = RingAttention(Pattern.dense())
    found: list[tuple[str, Callable[[], object]]] = [
        *((f"{name} must be left out", partial(wrap, s.mesh, **{name: None})) for name in ddp.OURS),
        *(
            (f"{name} must be left out", partial(shard, s.mesh, nn.Linear, **{name: None}))
            for name in ("mp_policy", "dp_mesh_dims")
        ),
        *((word, call) for call in wrappers for word, call in _without_names(s, call)),
        ("mesh must be a DeviceMesh", partial(averaging_mesh, not_a_mesh)),
        ("to replicate over", partial(replicating_mesh, context)),
        ("to replicate over", lambda: replicating_mesh(turned_mesh_of(s.case))),
        ("to replicate over", partial(shard, context, nn.Linear, replicate=True)),
        *(("layers must", partial(shard, s.mesh, wrong)) for wrong in ((), nn.Conv1d, "Linear", (nn.Linear, int))),
        *(("layers must", partial(again, wrong)) for wrong in ((), nn.Conv1d, nn.Sequential, nn.Linear(1, 1))),
        ("keep_attention=True needs reentrant=False", partial(again, nn.Linear, keep_attention=True, reentrant=True)),
        ("module must take the keyword context", lambda: parallelize_module(_model(s), context, RingParallel(handle))),
        (
            "use_local_output=False needs",
            lambda: parallelize_module(attention, context, RingParallel(handle, use_local_output=False)),
        ),
    ]  # fmt: skip
    if p > 1:
        found.append(("mesh must have ascending ranks", lambda: replicating_mesh(descending_mesh_of(s.case))))
        found.append(("device_mesh must have", lambda: parallelize_module(attention, others, RingParallel(handle))))
    return found


def _without_names(s: CallPlace, call: Callable[..., object]) -> list[tuple[str, Callable[[], object]]]:
    wrong = (s.mesh["data"], reversed_mesh_of(s.case), wide_mesh_of(s.case))
    return [("mesh must have the dimensions", partial(call, mesh=mesh)) for mesh in wrong]


def _told_alone(s: CallPlace) -> str:
    return "; ".join(refused((word,), call) for word, call in _refusals(s))


# --- DTensors ---------------------------------------------------------------------------------------------------------


def _descending(n: int, p: int) -> Layout:
    """As many tokens as a DTensor has them, the last one first."""
    counts = torch.tensor(dtensor_layout(n, p).counts)
    return Layout.from_cuts(range(n - 1, -1, -1), [0, *counts.cumsum(0).tolist()])


def _planned(make: Callable[[CallPlace, Tensor], dict[str, Any]], descending: bool = False) -> Mistake:
    """A module in a plan, given shards that are right, and by who is wrong some other tensors, made of these."""

    def call(s: CallPlace, wrong: bool) -> object:
        mesh, n = s.mesh["context"], s.case.tokens
        p = mesh.size()
        handle = ContextParallel(_descending(n, p) if descending else dtensor_layout(n, p), mesh)
        module = parallelize_module(RingAttention(Pattern.dense()), mesh, RingParallel(handle))
        x = torch.zeros(1, 2, handle.tokens, 4, device=s.device)
        return module(**{"query": x, "key": x, "value": x} | (make(s, x) if wrong else {}))

    return call


def _dtensor(s: CallPlace, x: Tensor, placement: Placement, n: int | None = None, mesh: Any = None) -> DTensor:
    """x: this rank's part; n: the tokens of the whole, along dimension 2."""
    whole = torch.empty((1, 2, x.shape[2] if n is None else n, 4), device="meta")
    mesh = s.mesh["context"] if mesh is None else mesh
    return DTensor.from_local(x, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def _of_others(s: CallPlace, x: Tensor) -> dict[str, Any]:
    """Over ranks in another order, where there are several; else not sharded."""
    if s.case.world == 1:
        return {"key": _dtensor(s, x, Replicate())}
    return {"key": _dtensor(s, x, Shard(2), s.case.tokens, reversed_mesh_of(s.case))}


DTENSORS: list[tuple[str, Mistake]] = [
    ("query must be sharded along", _planned(lambda s, x: {"query": _dtensor(s, x, Replicate())})),
    ("key must be sharded along", _planned(lambda s, x: {"key": _dtensor(s, x, Shard(1))})),
    ("value must have the", _planned(lambda s, x: {"value": _dtensor(s, x, Shard(2), s.case.tokens + 1)})),
    ("key must be", _planned(_of_others)),
    (
        "hold on each rank the tokens that the layout gives it",
        _planned(lambda s, x: {"query": _dtensor(s, x, Shard(2), s.case.tokens)}, descending=True),
    ),
    ("context must be left out", _planned(lambda s, x: {"context": s.context})),
]


FRAMEWORK_MISTAKES: dict[str, OtherCall] = {
    "meshes, options, layers and plans that do not fit": OtherCall(_told_alone, ""),
    "DTensors that are placed otherwise": some(DTENSORS, "context"),
}
