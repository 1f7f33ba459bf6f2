"""An example as the hypotheses see it: its tensors, layout, exact and observed results, all in fp64 and heads first.

Tensors of the whole sequence are in global token order: q, out, dq (B, H, N, D); k, v, dk, dv (B, Hk, N, D); lse
(B, H, N). With heads first, tokens are axis 2 of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference import pattern
from reference.fast_oracle import Expectation
from reference.pattern import Pattern
from verification.case import Case
from verification.check.checks import assemble, compared
from verification.run.observation import Observations

# A mistake has other rounding errors than the exact results: allow this multiple of a quantity's largest bound, which
# hundreds of actual errors fit into. Tell nothing from a deviation that does not exceed that by far.
MULTIPLE, LEAST_DEVIATION = 1.0, 25.0

Results = dict[str, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Weights:
    """Arguments of the probabilities.

    count    how often each head's query i sees key j, (H, N, N)
    scale    factor on q . k
    kv_head  key/value head of each head, (H,)
    softcap  t, None for none; slope: False to leave its derivative out of a hand-written backward
    sinks    (H, 1), or (H, N) if they depend on the query; None for none
    key_of, value_of
             place in the bank of the key, and of the value, that query i has for token j, (N, N); None: token j's own
    bank     keys and values, (B, Hk, M, D), behind the N of this call; None for no others
    """

    count: Tensor
    scale: float
    kv_head: Tensor
    softcap: float | None = None
    sinks: Tensor | None = None
    slope: bool = True
    key_of: Tensor | None = None
    value_of: Tensor | None = None
    bank: tuple[Tensor, Tensor] | None = None

    def banked(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of each head, (B, H, N + M, D)."""
        if self.bank is not None:
            k = k if self.key_of is None else torch.cat((k, self.bank[0]), 2)
            v = v if self.value_of is None else torch.cat((v, self.bank[1]), 2)
        return k[:, self.kv_head], v[:, self.kv_head]

    def scores(self, products: Tensor) -> Tensor:
        """Return the scores of products q . k."""
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()


class Candidate(NamedTuple):
    """The predictions of one mistake for an example: results that differ from the exact ones. They are computed when
    they are asked for; the backward's only if the forward's fit.

    name       of the mistake, whatever the example
    sentence   on the example
    """

    name: str
    sentence: str
    forward: Callable[[], Results] = dict
    backward: Callable[[], Results] = dict


class Example:
    """One run of a Case on all ranks.

    size             number of ranks p
    holder           index of the rank that holds each token; local, place: its index there, and in the joined shards;
                     halved: the token in its place if the halves of each shard are swapped
    earlier          keys and values of an earlier call that the ranks ran, of these sizes; None: not known
    exact, observed  results by quantity; `observed` lacks those that the ranks do not return
    allowed          largest rounding error of a prediction
    wrong            True for entries beyond their bounds, for each quantity that has some; deviation: the largest error
    told             wrong quantities whose deviations are far larger than rounding errors
    """

    def __init__(
        self, case: Case, expectation: Expectation, observations: Observations, earlier: Case | None = None
    ) -> None:
        inputs = expectation.inputs
        self.case, self.size, self.shards = case, len(case.ranks), case.shards()
        self.q, self.k, self.v, self.dout = (heads_first(getattr(inputs, x)) for x in ("q", "k", "v", "dout"))
        self.dlse = torch.zeros(self.q.shape[:3]).double() if inputs.dlse is None else torch.tensor(inputs.dlse)
        self.holder, self.place = torch.tensor(self.shards.holder), torch.tensor(self.shards.place)
        counts = torch.tensor(self.shards.counts)
        begin, length = (counts.cumsum(0) - counts)[self.holder], counts[self.holder]
        self.local = self.place - begin
        self.halved = self.place.argsort()[begin + (self.local + length // 2) % length]
        self.earlier: tuple[Tensor, Tensor] | None = None
        if earlier is not None:
            k, v = (x.double().transpose(1, 2) for x in earlier.tensors()[1:3])
            self.earlier = k, v
        group = case.heads // case.kv_heads
        sinks = None if inputs.sinks is None else torch.tensor(inputs.sinks)[:, None]
        kv_head = torch.arange(case.heads) // group
        self.weights = Weights(self.count(), inputs.scale, kv_head, inputs.softcap, sinks)
        self.scores = self.q @ self.k[:, self.weights.kv_head].mT  # without the scale
        returned = [x for x in compared(case) if all(getattr(seen, x, None) is not None for seen in observations)]
        self.exact = {x: heads_first(expectation.exact[x]) for x in expectation.exact}
        bound = {x: heads_first(expectation.bound[x]) for x in returned}
        self.observed = {x: heads_first(assemble(case, observations, x)) for x in returned}
        self.wrong: Results = {}
        self.allowed = {x: MULTIPLE * largest(bound[x]) for x in returned}
        self.deviation: dict[str, float] = {}
        for x, seen in self.observed.items():
            deviation = (seen - self.exact[x]).abs()
            wrong = ~((deviation <= bound[x]) | (seen == self.exact[x]) | bound[x].isposinf())
            if wrong.any():
                self.wrong[x] = wrong
                self.deviation[x] = largest(deviation) if deviation[wrong].isfinite().all() else math.inf
        self.told = {x for x, most in self.deviation.items() if most >= LEAST_DEVIATION * self.allowed[x]}

    def count(self, changed: Pattern | None = None, rows: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Return the multiplicities (H, N, N) of the Case's pattern or another one, with other positions if given."""
        tokens = torch.arange(self.case.tokens)
        at = (tokens if rows is None else rows), (tokens if keys is None else keys)
        return pattern.multiplicity(changed or self.case.pattern, *at, self.case.heads).double()

    def weighted(self, **changes: Any) -> Weights:
        return replace(self.weights, **changes)

    @property
    def these(self) -> str:
        """The wrong quantities, with their verb: `dk and dv are, to rounding,`."""
        return phrase(list(self.wrong))

    @property
    def forward_is_wrong(self) -> bool:
        return not self.wrong.keys().isdisjoint(("out", "lse"))

    @property
    def forward_may_be_wrong(self) -> bool:
        """True unless the gradients alone are wrong. Of an example that holds, every mistake is asked."""
        return self.forward_is_wrong or not self.wrong

    def shown_by(self, candidate: Candidate) -> bool:
        """Return True if the candidate predicts all observed results, wrong and right ones, to rounding; dsinks only if
        nothing else is wrong. If it lets queries see nothing that see something, NaN is accepted, since many rings
        divide by 0 then; not in all of the output, but in all of a gradient, which sums over queries."""
        forward = candidate.forward()
        blind = bool((forward.get("lse", self.exact["lse"]).isneginf() & ~self.exact["lse"].isneginf()).any())
        grads = ("dq", "dk", "dv", *(("dsinks",) if self.wrong.keys() == {"dsinks"} else ()))
        return self._fits(("out", "lse"), forward, blind) and self._fits(grads, candidate.backward(), blind)

    def _fits(self, names: tuple[str, ...], predicted: Results, blind: bool) -> bool:
        given = [name for name in names if name in self.observed and name in predicted]
        return all(name in given for name in names if name in self.wrong) and all(
            self._agrees(self.observed[name], predicted[name], name, blind) for name in given
        )

    def _agrees(self, seen: Tensor, predicted: Tensor, name: str, blind: bool) -> bool:
        growth = largest(predicted) / most if (most := largest(self.exact[name])) else 1.0
        allowed = max(self.allowed[name] * max(1.0, growth), 64 * torch.finfo(self.case.torch_dtype).eps * growth)
        allowed = min(allowed, self.deviation[name] / LEAST_DEVIATION) if name in self.told else allowed
        same = (seen == predicted) | ~seen.isfinite() & predicted.isnan() | seen.isnan() & ~predicted.isfinite()
        same |= seen.isnan() & blind & ~(seen.isnan().all() & (name in ("out", "lse")))
        return bool((same | ((seen - predicted).abs() <= allowed)).all())

    def differs(self, name: str, other: Tensor) -> bool:
        """Return True if an observed result is not another one, by far more than rounding."""
        seen, least = self.observed[name], LEAST_DEVIATION * self.allowed[name]
        same = (seen == other) | seen.isnan() & other.isnan() | ((seen - other).abs() < least)
        return not bool(same.all())

    # --- attention and its gradients --------------------------------------------------------------------------------

    def autograd(self, forward: Forward) -> Results:
        """Return the gradients of a differentiable forward."""
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        out, lse = forward(*leaves)
        loss = (out * self.dout).sum() + (lse.masked_fill(lse.isinf(), 0.0) * self.dlse).sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    def delta(self, out: Tensor, through_lse: float = 1.0) -> Tensor:
        """Return rowsum(dout out) - dlse, (B, H, N)."""
        return (self.dout * out).sum(-1) - through_lse * self.dlse

    def by_head(self, weights: Weights, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv of each query head as a hand-written backward computes them from saved results. lse:
        (B, H, N), or (B, H, N, N) if it depends on the key; so may delta."""
        lse, delta = (x if x.dim() == 4 else x[..., None] for x in (lse, delta))
        unseen, (k, v) = (weights.count == 0) | lse.isneginf(), weights.banked(self.k, self.v)
        scores = weights.scores(taken(self.q @ k.mT, weights.key_of))
        p = weights.count * (scores - lse).masked_fill(unseen, -math.inf).exp()
        ds = p * (taken(self.dout @ v.mT, weights.value_of) - delta) * weights.scale
        if weights.softcap is not None and weights.slope:
            ds = ds * (1 - (scores / weights.softcap) ** 2)
        return given(ds, weights.key_of, k) @ k, ds.mT @ self.q, p.mT @ self.dout

    def by_hand(self, weights: Weights, lse: Tensor, delta: Tensor) -> Results:
        """Return the gradients of a hand-written backward."""
        dq, dk, dv = self.by_head(weights, lse, delta)
        return {"dq": dq, "dk": self.summed(dk, weights.kv_head), "dv": self.summed(dv, weights.kv_head)}

    def summed(self, grads: Tensor, kv_head: Tensor) -> Tensor:
        """Sum gradients of each head over the heads of each key/value head."""
        return grads.new_zeros(grads.shape[0], self.k.shape[1], *grads.shape[2:]).index_add_(1, kv_head, grads)


def attention(q: Tensor, k: Tensor, v: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return out and lse, differentiable; 0 and -inf for queries that see nothing, and no sink."""
    unseen, keys, (k, v) = ~weights.count.any(-1), k.shape[2], weights.banked(k, v)  # (H, N)
    scores = weights.scores(taken(q @ k.mT, weights.key_of)) + weights.count.log()
    if weights.sinks is not None:
        sinks = weights.sinks[..., None].expand(*scores.shape[:-1], 1)
        scores, unseen = torch.cat((scores, sinks), -1), unseen & weights.sinks.isneginf()
    scores = scores.masked_fill(unseen[..., None], 0.0)  # -inf in a whole row makes NaN
    out = given(scores.softmax(-1)[..., :keys], weights.value_of, v) @ v
    return out.masked_fill(unseen[..., None], 0.0), scores.logsumexp(-1).masked_fill(unseen, -math.inf)


def taken(products: Tensor, places: Tensor | None) -> Tensor:
    """Return the products with the bank, (..., N, N + M), that are in these places: (..., N, N)."""
    return products if places is None else products.gather(-1, places.expand(*products.shape[:-2], -1, -1))


def given(weights: Tensor, places: Tensor | None, bank: Tensor) -> Tensor:
    """Return the weights of each place in the bank, from those of the tokens: the transpose of `taken`."""
    if places is None:
        return weights
    return weights.new_zeros(*weights.shape[:-1], bank.shape[2]).scatter_add(-1, places.expand_as(weights), weights)


def heads_first(x: Any) -> Tensor:
    """Convert (B, N, H, D) to (B, H, N, D); leave (B, H, N) as it is."""
    return torch.tensor(x).transpose(1, 2).contiguous() if x.ndim == 4 else torch.tensor(x)


def largest(x: Tensor) -> float:
    """Return the largest size of the finite entries; 0 if there are none."""
    x = x.abs()
    return float(x[x.isfinite()].max()) if x.isfinite().any() else 0.0


def phrase(names: list[str], where: str = "") -> str:
    """Return the names with a verb: `dk is, to rounding,`, or `dq, dk and dv are, to rounding,`."""
    return f"{listed(names)}{where} {'is' if len(names) == 1 else 'are'}, to rounding,"


def listed(names: list[str]) -> str:
    """Return the names with commas and `and`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
