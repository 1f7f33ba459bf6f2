"""A peer of attention as the attention of a training step: a `verification.peers.Peer`, unchanged.

Its claim speaks of Cases of a single call. So a TrainingCase is taken to the Case of its calls, that to the nearest one
that is claimed, and the TrainingCase to the one whose calls are these.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ring.comm.transport import Transport
from ring.nn import ContextParallel
from verification.case import Case
from verification.peers.peer import Peer
from verification.peers.training.step_peer import StepPeer, in_dtype
from verification.training.rank.meshes import mesh_of
from verification.training.rank.rank_step import train_on_rank
from verification.training.step_observation import StepObservation
from verification.training.training_case import TRAINING_DTYPES, TrainingCase


def in_step(peer: Peer) -> StepPeer:
    """The Peer as one of training steps."""
    return StepPeer(
        name=peer.name,
        supported=peer.supported,
        claims=partial(nearest, peer),
        train=partial(train, peer),
        worlds=peer.worlds,
        package=peer.package,
        prepare=peer.prepare,
    )


# --- on a rank --------------------------------------------------------------------------------------------------------


def train(peer: Peer, transport: Transport, case: TrainingCase) -> StepObservation:
    return train_on_rank(transport, case, inner=partial(PeerAttention, peer))


class PeerAttention(nn.Module):
    """In the place of `ring.nn.RingAttention`."""

    def __init__(self, peer: Peer, case: TrainingCase, name: str) -> None:
        super().__init__()
        self.peer, self.case, self.dtype = peer, case, case.torch_dtype

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, context: ContextParallel
    ) -> Tensor:
        """(B, H, N, D), (B, Hk, N, D) -> (B, H, N, D). Inputs are taken in the Case's type, as autocast does it."""
        q, k, v = (x.transpose(1, 2).to(self.dtype) for x in (query, key, value))  # (B, N, H, D)
        part = self._part(context)
        group = None if part.world == 1 else mesh_of(part)["context"].get_group()
        found = self.peer.attend(q, k, v, call_of(part, part.coordinates(dist.get_rank())[0]), group)
        out = found[0] if isinstance(found, tuple) else found
        if out.shape != q.shape:
            raise ValueError(f"attend returned out of shape {tuple(out.shape)}; it must be {tuple(q.shape)}")
        return out.transpose(1, 2)

    def _part(self, context: ContextParallel) -> TrainingCase:
        """The part of the run to which the handle belongs: another one has its mesh after a resume."""
        return next(part for part in self.case.parts if part.context == context.world_size)


# --- what is claimed --------------------------------------------------------------------------------------------------


def call_of(case: TrainingCase, data_rank: int = 0) -> Case:
    """The Case of a call of attention in the model, on the ranks that share the sequences of that data rank."""
    model = case.model
    return Case(
        world=case.world, group=None if case.data == 1 else case.mesh[data_rank], tokens=case.tokens, order=case.order,
        cuts=case.cuts, pattern=case.pattern, batch=case.batch, heads=model.heads, kv_heads=model.kv_heads,
        head_dim=model.head_dim, dtype=case.dtype, scale=None, score_scale=1.0, values="normal", seed=case.seed,
        exchange=case.exchange, bucket=case.bucket, kernel="math", lse="unused", strided=False,
    )  # fmt: skip


def nearest(peer: Peer, case: TrainingCase) -> TrainingCase | None:
    """The TrainingCase whose calls the Peer claims, of kind "sdpa". None where it claims other than a step can have: a
    scale of its own, float16 alone, and so on."""
    case = plain(case)
    for dtype in dict.fromkeys((case.dtype, *TRAINING_DTYPES)):
        asked = in_dtype(case, dtype)
        call = call_of(asked)
        found = peer.claims(call)
        if found is not None and found.dtype == dtype and found.group in (None, call.group):
            return kept(peer, with_call(asked, found))
    return None


def plain(case: TrainingCase) -> TrainingCase:
    """Of plain modules, not compiled, with the same documents in all steps; and no forward of the ring is there to be
    saved."""
    model = replace(case.model, kind="sdpa", qk_norm=False, subln=False, scale=None)
    checkpointing = "non-reentrant" if case.checkpointing == "selective" else case.checkpointing
    changes: dict[str, Any] = {"compiled": "no", "later_documents": None, "own_documents": None}
    return replace(case, model=model, checkpointing=checkpointing, **changes)


def with_call(case: TrainingCase, call: Case) -> TrainingCase:
    """The TrainingCase with calls like this one, as far as a step can have them."""
    sizes = {name: getattr(call, name) for name in ("heads", "kv_heads", "head_dim")}
    odd = case.model.positions == "rotary" and call.head_dim % 2
    model = replace(case.model, **sizes | ({"positions": "none"} if odd else {}))
    same = ("tokens", "order", "cuts", "pattern", "batch", "dtype", "exchange", "bucket")
    fitting: dict[str, Any] = {name: getattr(call, name) for name in same} | {"model": model}
    return replace(case, **fitting, data=case.data if call.group is not None else 1)


def kept(peer: Peer, case: TrainingCase) -> TrainingCase | None:
    """The TrainingCase, if its calls are claimed as they are. It is resumed, in the same order, if those of its second
    part are claimed too."""
    for resumed in dict.fromkeys((case.order if case.resumed else None, None)):
        found = replace(case, resumed=resumed)
        if all(is_claimed(peer, part) for part in found.parts):
            return found
    return None


def is_claimed(peer: Peer, case: TrainingCase) -> bool:
    call = call_of(case)
    return peer.claims(call) == call
