"""StepPeer: an attention, or a wrapper, that is not this project's, in a training step.

An attention is a `verification.peers.Peer`, unchanged. Its claim speaks of Cases of a single call. So a TrainingCase is
taken to the Case of its calls, that to the nearest one that is claimed, and the TrainingCase to the one whose calls are
these.
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
from verification.peers.peer import Peer, version_of
from verification.training.rank.meshes import mesh_of
from verification.training.rank.rank_step import train_on_rank
from verification.training.step_observation import StepObservation
from verification.training.training_case import TRAINING_DTYPES, TrainingCase

Claims = Callable[[TrainingCase], TrainingCase | None]


@dataclass(frozen=True)
class StepPeer:
    """What takes the place of a part of the step, and the TrainingCases that it claims to support.

    name, supported, package, prepare: as of a Peer
    claims     any drawn TrainingCase -> the nearest one of the same world that is supported, or None if there is none.
               Given a TrainingCase that it returned, it must return that one unchanged.
    train      (transport, case) -> what the rank saw: as `train_on_rank`, with the peer in its place
    worlds     the world sizes that it can be run on
    preload    modules that take long to import: the ranks come with them
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
    """The TrainingCase in that dtype, in a lower one than fp64 with a model that is drawn in it: twice as wide where
    its norms would be steps."""
    if dtype != "float64" and case.model.has_steps:
        case = replace(case, model=replace(case.model, dim=2 * case.model.dim, head_dim=2 * case.model.head_dim))
    return replace(case, dtype=dtype)


def in_step(peer: Peer) -> StepPeer:
    """The Peer as one of training steps."""

    def train(transport: Transport, case: TrainingCase) -> StepObservation:
        return train_on_rank(transport, case, inner=partial(PeerAttention, peer))

    return StepPeer(peer.name, peer.supported, partial(nearest, peer), train, peer.worlds, peer.package, peer.prepare)


class PeerAttention(nn.Module):
    """Takes the place of `ring.nn.RingAttention`."""

    def __init__(self, peer: Peer, case: TrainingCase, name: str) -> None:
        super().__init__()
        self.peer, self.case, self.dtype = peer, case, case.torch_dtype

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, context: ContextParallel
    ) -> Tensor:
        """(B, H, N, D), (B, Hk, N, D) -> (B, H, N, D). Inputs are taken in the Case's type, as autocast does it."""
        q, k, v = (x.transpose(1, 2).to(self.dtype) for x in (query, key, value))  # (B, N, H, D)
        # The part of the run to which the handle belongs: another one has its mesh after a resume.
        part = next(part for part in self.case.parts if part.context == context.world_size)
        group = None if part.world == 1 else mesh_of(part)["context"].get_group()
        found = self.peer.attend(q, k, v, call_of(part, part.coordinates(dist.get_rank())[0]), group)
        out = found[0] if isinstance(found, tuple) else found
        if out.shape != q.shape:
            raise ValueError(f"attend returned out of shape {tuple(out.shape)}; it must be {tuple(q.shape)}")
        return out.transpose(1, 2)


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
    """The TrainingCase whose calls the Peer claims, of plain modules of kind "sdpa", not compiled, with the same
    documents in all steps; no forward of the ring is there to be saved. It is resumed, in the same order, if the calls
    of its second part are claimed too. None where the Peer claims other than a step can have: a scale of its own,
    float16 alone, and so on."""
    model = replace(case.model, kind="sdpa", qk_norm=False, subln=False, scale=None)
    checkpointing = "non-reentrant" if case.checkpointing == "selective" else case.checkpointing
    changes: dict[str, Any] = {"compiled": "no", "later_documents": None, "own_documents": None}
    case = replace(case, model=model, checkpointing=checkpointing, **changes)
    for dtype in dict.fromkeys((case.dtype, *TRAINING_DTYPES)):
        asked = in_dtype(case, dtype)
        call = call_of(asked)
        found = peer.claims(call)
        if found is not None and found.dtype == dtype and found.group in (None, call.group):
            asked = with_call(asked, found)
            ends = (replace(asked, resumed=order) for order in (asked.order if asked.resumed else None, None))
            for end in ends:
                if all(peer.claims(call) == call for call in map(call_of, end.parts)):
                    return end
            return None
    return None


def with_call(case: TrainingCase, call: Case) -> TrainingCase:
    """The TrainingCase with calls like this one, as far as a step can have them."""
    sizes = {name: getattr(call, name) for name in ("heads", "kv_heads", "head_dim")}
    odd = case.model.positions == "rotary" and call.head_dim % 2
    model = replace(case.model, **sizes | ({"positions": "none"} if odd else {}))
    same = ("tokens", "order", "cuts", "pattern", "batch", "dtype", "exchange", "bucket")
    fitting: dict[str, Any] = {name: getattr(call, name) for name in same} | {"model": model}
    return replace(case, **fitting, data=case.data if call.group is not None else 1)
