"""A ring in one process, in plain torch: forward by hops, backward by hand; every step can be changed by a mistake."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference import pattern
from verification.case import Case
from verification.run.observation import LayoutAnswers, Observation, Observations, to_numpy


class Grads(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Ring:
    """A right ring. Shards are heads first: q, out (B, H, L, D), k, v (B, Hk, L, D), lse (B, H, L).

    A mistake is a subclass, or a function put in the place of a method. backward: True in the backward.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.size = case, len(case.ranks)
        self.at = [torch.tensor(positions) for positions in case.shards().positions]
        q, k, v, dout, dlse, *self.sinks = case.tensors()
        self.q, self.k, self.v, self.dout = ([x[:, at].transpose(1, 2) for at in self.at] for x in (q, k, v, dout))
        self.dlse = [dlse[:, :, at] for at in self.at]

    def count(self, rank: int, owner: int, backward: bool) -> Tensor:
        """Return the multiplicities (H, L, keys)."""
        return self.masked(self.at[rank], self.at[owner])

    def masked(self, rows: Tensor, keys: Tensor, **changes: Any) -> Tensor:
        chosen = self.case.pattern if not changes else type(self.case.pattern)(
            changes.get("branches", self.case.pattern.branches), changes.get("causal", self.case.pattern.causal),
            changes.get("documents", self.case.pattern.documents),
        )  # fmt: skip
        return pattern.multiplicity(chosen, rows, keys, self.case.heads).to(self.q[0].dtype)

    def hops(self, rank: int, backward: bool) -> Iterable[int]:
        return [(rank - step) % self.size for step in range(self.size)]

    def scale(self, backward: bool) -> float:
        return self.case.softmax_scale

    def kv_head(self) -> Tensor:
        return torch.arange(self.case.heads) // (self.case.heads // self.case.kv_heads)

    def scores(self, rank: int, owner: int, backward: bool) -> Tensor:
        scores = self.capped(self.q[rank] @ self.k[owner][:, self.kv_head()].mT * self.scale(backward))
        return scores + self.count(rank, owner, backward).log()

    def capped(self, scores: Tensor) -> Tensor:
        cap = self.case.softcap
        return scores if cap is None else cap * (scores / cap).tanh()

    def slope(self, scores: Tensor) -> Tensor:
        """Return the derivative of the softcap, any finite number where scores are -inf."""
        cap = self.case.softcap
        return torch.ones_like(scores) if cap is None else 1 - (finite(scores) / cap) ** 2

    def part(self, rank: int, owner: int) -> tuple[Tensor, Tensor]:
        """Return out and lse of one rank's keys alone."""
        scores = self.scores(rank, owner, False)
        lse = scores.logsumexp(-1)
        return (scores - finite(lse)[..., None]).exp() @ self.v[owner][:, self.kv_head()], lse

    def merge(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse from those of the hops, (hops, B, H, L, D) and (hops, B, H, L)."""
        lse = lses.logsumexp(0)
        return ((lses - finite(lse)).exp()[..., None] * outs).sum(0), lse

    def forward(self, rank: int) -> tuple[Tensor, Tensor]:
        outs, lses = zip(*(self.part(rank, owner) for owner in self.hops(rank, False)), strict=True)
        return self.merge(*self.with_sinks(torch.stack(outs), torch.stack(lses)))

    def with_sinks(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of the hops, and that of the sinks."""
        for sinks in self.sinks:
            outs = torch.cat((outs, torch.zeros_like(outs[:1])))
            lses = torch.cat((lses, sinks.to(lses.dtype)[:, None].expand_as(lses[:1])))
        return outs, lses

    def delta(self, rank: int, out: Tensor) -> Tensor:
        return (self.dout[rank] * out).sum(-1) - self.dlse[rank]

    def saved_lse(self, rank: int, owner: int, lse: Tensor) -> Tensor:
        return lse

    def grads(self, rank: int, owner: int, out: Tensor, lse: Tensor) -> Grads:
        """Return dq of a rank from one rank's keys, and dk and dv of these from the rank's queries, by head."""
        kv, delta = self.kv_head(), self.delta(rank, out)[..., None]
        scores = self.scores(rank, owner, True)
        p = (scores - finite(self.saved_lse(rank, owner, lse), math.inf)[..., None]).exp()
        slope = self.slope(scores - self.count(rank, owner, True).clamp(min=1).log())
        ds = p * (self.dout[rank] @ self.v[owner][:, kv].mT - delta) * self.scale(True) * slope
        return Grads(ds @ self.k[owner][:, kv], ds.mT @ self.q[rank], p.mT @ self.dout[rank])

    def added_to(self, rank: int, owner: int) -> int:
        """Return the rank to whose dk and dv the part of a rank's queries is added."""
        return owner

    def summed(self, grads: Tensor) -> Tensor:
        shape = grads.shape[0], self.case.kv_heads, *grads.shape[2:]
        return grads.new_zeros(shape).index_add_(1, self.kv_head(), grads)

    def results(self) -> list[list[Tensor]]:
        """Return out, lse, dq, dk, dv and, with sinks, dsinks of each rank."""
        forward = [self.forward(rank) for rank in range(self.size)]
        dk, dv = [torch.zeros_like(x) for x in self.k], [torch.zeros_like(x) for x in self.v]
        dq = [torch.zeros_like(x) for x in self.q]
        for rank, (out, lse) in enumerate(forward):
            for owner in self.hops(rank, True):
                grads = self.grads(rank, owner, out, lse)
                dq[rank] = dq[rank] + grads.dq
                to = self.added_to(rank, owner)
                dk[to], dv[to] = dk[to] + self.summed(grads.dk), dv[to] + self.summed(grads.dv)
        dsinks = [[self.dsinks(rank, *forward[rank])] if self.sinks else [] for rank in range(self.size)]
        return [[*forward[rank], dq[rank], dk[rank], dv[rank], *dsinks[rank]] for rank in range(self.size)]

    def dsinks(self, rank: int, out: Tensor, lse: Tensor) -> Tensor:
        return -((self.sinks[0][:, None] - lse).exp() * self.delta(rank, out)).sum((0, 2))


class DenseRing(Ring):
    """A wrong forward of the whole sequence whose gradients are autograd's. `attend` takes and returns shards."""

    def attend(self, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        self.q, self.k, self.v = list(q), list(k), list(v)
        return [self.forward(rank) for rank in range(self.size)]

    def results(self) -> list[list[Tensor]]:
        leaves = [[x.clone().requires_grad_() for x in shards] for shards in (self.q, self.k, self.v)]
        forward = self.attend(*leaves)
        every = [x for shards in leaves for x in shards]
        through = zip(forward, self.dout, self.dlse, strict=True)
        loss = torch.stack([(out * dout).sum() + (lse * dlse).sum() for (out, lse), dout, dlse in through]).sum()
        grads = torch.autograd.grad(loss, every, allow_unused=True, materialize_grads=True)
        return [[*(x.detach() for x in forward[r]), *grads[r :: self.size]] for r in range(self.size)]


def finite(lse: Tensor, instead: float = 0.0) -> Tensor:
    return lse.masked_fill(lse == -math.inf, instead)


def observed(case: Case, ring: Ring) -> Observations:
    """Run the ring, and return what each rank would be seen to give."""
    return [_observation(case, rank, *results) for rank, results in enumerate(ring.results())]


def _observation(case: Case, rank: int, out: Tensor, lse: Tensor, *grads: Tensor) -> Observation:
    place, positions = case.shards().place, case.shards().positions[rank]
    dq, dk, dv = (to_numpy(x.transpose(1, 2)) for x in grads[:3])
    return Observation(
        LayoutAnswers(positions, case.shards().counts, positions, place, 0), to_numpy(out.transpose(1, 2)),
        None if case.lse == "unused" else to_numpy(lse), dq, dk, dv, (case.dtype,) * 6,
        (), (), (), (), 0, 0, inputs_unchanged=True, repeat_equal=True, workspace_forward=None, workspace_backward=None,
        dsinks=to_numpy(grads[3]) if case.sinks else None,
    )  # fmt: skip
