"""StepPeer: an attention or a wrapper of another package in a training step.

An attention is a `verification.peers.Peer`, unchanged. Its claim takes Cases of a single call. So the claim is applied
to the Case of a TrainingCase's calls, and the TrainingCase is changed to make the claimed calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ring.comm.transport import Transport
from ring.nn import ContextParallel
from verification.case import Case
from verification.models.meshes import mesh_of
from verification.models.step_case import STEP_DTYPES
from verification.peers.peer import Peer, outputs_of, version_of
from verification.training.rank.own_setup import OwnSetup
from verification.training.rank.rank_step import train_on_rank
from verification.training.step_observation import StepObservation
from verification.training.training_case import TrainingCase

Claims = Callable[[TrainingCase], TrainingCase | None]


@dataclass(frozen=True)
class StepPeer:
    """A replacement for a part of the step, and the TrainingCases that it claims to support.

    name, supported, package, prepare: as for a Peer
    claims     any drawn TrainingCase -> the nearest one of the same world that is supported, or None. It must return
               its own results unchanged.
    train      (transport, case) -> StepObservation: `train_on_rank` with the peer
    worlds     world sizes to run it on
    preload    modules that take long to import, preloaded into ranks
    """

    name: str
    supported: str
    claims: Claims
    train: Callable[[Transport, TrainingCase], StepObservation]
    worlds: tuple[int, ...] = (2, 3, 4, 8)
    package: str | None = None
    prepare: Callable[[], object] = lambda: None
    preload: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        return version_of(self.package)


def in_dtype(case: TrainingCase, dtype: str) -> TrainingCase:
    """Return the TrainingCase in that dtype. Below fp64 a model with norms that may be steps is made twice as wide."""
    if dtype != "float64" and case.model.has_steps:
        case = replace(case, model=replace(case.model, dim=2 * case.model.dim, head_dim=2 * case.model.head_dim))
    return replace(case, dtype=dtype)


def in_step(peer: Peer) -> StepPeer:
    """Return the StepPeer that uses the Peer as the inner attention."""

    def train(transport: Transport, case: TrainingCase) -> StepObservation:
        return train_on_rank(transport, case, partial(OwnSetup, inner=partial(PeerAttention, peer)))

    return StepPeer(peer.name, peer.supported, partial(nearest, peer), train, peer.worlds, peer.package, peer.prepare)


class PeerAttention(nn.Module):
    """Replacement for `ring.nn.RingAttention` that calls a Peer."""

    def __init__(self, peer: Peer, case: TrainingCase, name: str) -> None:
        super().__init__()
        self.peer, self.case, self.dtype = peer, case, case.torch_dtype

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, context: ContextParallel
    ) -> Tensor:
        """(B, H, N, D), (B, Hk, N, D) -> (B, H, N, D). Inputs are cast to the Case's dtype, as by autocast."""
        q, k, v = (x.transpose(1, 2).to(self.dtype) for x in (query, key, value))  # (B, N, H, D)
        group = None if self.case.world == 1 else mesh_of(self.case)["context"].get_group()
        case = attention_case(self.case, self.case.coordinates(dist.get_rank())[0])
        heads_first = self.peer.heads_first
        if heads_first:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        result = self.peer.attend(q, k, v, case, group)
        out, _ = outputs_of(result, case, q.shape, query.shape[:3])
        return out if heads_first else out.transpose(1, 2)


def attention_case(case: TrainingCase, data_rank: int = 0) -> Case:
    """Return the Case of an attention call in the model, on the context group of that data rank."""
    model = case.model
    return Case(
        world=case.world, group=None if case.data == 1 else case.mesh[data_rank], tokens=case.tokens, order=case.order,
        cuts=case.cuts, pattern=case.pattern, batch=case.batch, heads=model.heads, kv_heads=model.kv_heads,
        head_dim=model.head_dim, dtype=case.dtype, scale=None, score_scale=1.0, values="normal", seed=case.seed,
        exchange=case.exchange, bucket=case.bucket, kernel="math", lse="unused", strided=False,
    )  # fmt: skip


def nearest(peer: Peer, case: TrainingCase) -> TrainingCase | None:
    """Return the nearest TrainingCase whose calls the Peer claims: kind "sdpa", not compiled, the same documents in all
    steps, no selective checkpointing, since there is no ring forward to save. It is resumed, in the same order, if the
    calls of its second part are claimed too. None if no step can have the claimed calls: another scale, float16, no
    gradients, or arrays that are not tensors."""
    if peer.arrays != "torch":
        return None
    model = replace(case.model, kind="sdpa", qk_norm=False, subln=False, scale=None)
    checkpointing = "non-reentrant" if case.checkpointing == "selective" else case.checkpointing
    changes: dict[str, Any] = {"compiled": "no", "later_documents": None, "own_documents": None}
    case = replace(case, model=model, checkpointing=checkpointing, **changes)
    for dtype in dict.fromkeys((case.dtype, *STEP_DTYPES)):
        candidate = in_dtype(case, dtype)
        call = attention_case(candidate)
        claimed = peer.claims(call)
        if claimed is not None and claimed.backward and claimed.dtype == dtype and claimed.group in (None, call.group):
            candidate = with_call(candidate, claimed)
            variants = (replace(candidate, resumed=x) for x in (candidate.order if candidate.resumed else None, None))
            for variant in variants:
                if all(peer.claims(call) == call for call in map(attention_case, variant.parts)):
                    return variant
            return None
    return None


def with_call(case: TrainingCase, call: Case) -> TrainingCase:
    """Return the TrainingCase with calls like this one, as far as a step can have them."""
    sizes = {name: getattr(call, name) for name in ("heads", "kv_heads", "head_dim")}
    odd = case.model.positions == "rotary" and call.head_dim % 2
    model = replace(case.model, **sizes | ({"positions": "none"} if odd else {}))
    shared = ("tokens", "order", "cuts", "pattern", "batch", "dtype", "exchange", "bucket")
    changes: dict[str, Any] = {name: getattr(call, name) for name in shared} | {"model": model}
    return replace(case, **changes, data=case.data if call.group is not None else 1)
