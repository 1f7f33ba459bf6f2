"""Each usual mistake, made in a ring, is named as the cause, and no other one; other faults are given no cause."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from tests.verification.causes.simulated_ring import DenseRing, Grads, Ring, finite, observed
from verification.case import Case
from verification.causes import Cause, agree, explain
from verification.causes.find import find_cause
from verification.check.expectation import expect

Edit = Callable[[Any, list[list[Tensor]]], object]

CAUSAL = Pattern.dense(True)
WINDOWED = Pattern.dense(True, window=3)
DILATED = Pattern((Branch(8, 2), Branch(4)), True)
BLIND = Pattern((Branch(4, 2),), True)  # every other query sees nothing


def ring(base: type[Ring] = Ring, **methods: Any) -> type[Ring]:
    """Return a ring with other methods."""
    return type("WrongRing", (base,), methods)


def edited(edit: Edit) -> type[Ring]:
    """Return a ring whose results, (out, lse, dq, dk, dv) of each rank, are edited."""

    def results(self: Ring) -> list[list[Tensor]]:
        shards = Ring.results(self)
        edit(self, shards)
        return shards

    return ring(results=results)


def mask(masked: Callable[[Any, int, int], Tensor], where: str = "") -> type[Ring]:
    """Return a ring with other multiplicities of a rank's queries and one's keys: masked(ring, rank, owner)."""

    def count(self: Ring, rank: int, owner: int, backward: bool) -> Tensor:
        right = where == ("forward" if backward else "backward")
        return Ring.count(self, rank, owner, backward) if right else masked(self, rank, owner)

    return ring(count=count)


def pattern(where: str = "", **changes: Any) -> type[Ring]:
    return mask(lambda r, rank, owner: r.masked(r.at[rank], r.at[owner], **changes), where)


def positions(rows: Callable[[Any, int], Tensor], keys: Callable[[Any, int], Tensor]) -> type[Ring]:
    return mask(lambda r, rank, owner: r.masked(rows(r, rank), keys(r, owner)))


def diagonal(sees: Callable[[Tensor, bool], Tensor], where: str = "") -> type[Ring]:
    """Return a ring whose mask is a function of how far a key is before its query, and whether both are on a rank."""

    def masked(r: Ring, rank: int, owner: int) -> Tensor:
        before = r.at[rank][:, None] - r.at[owner]
        return r.masked(r.at[rank], r.at[owner], causal=False) * sees(before, rank == owner)

    return mask(masked, where)


def part(times: float, hit: Callable[[Any, int, int], bool], where: str = "") -> type[Ring]:
    """Return a ring in which the keys of some ranks count another number of times."""
    return mask(lambda r, rank, owner: Ring.count(r, rank, owner, False) * (times if hit(r, rank, owner) else 1), where)


def of_keys(times: float, hit: Callable[[Any, int, int], bool]) -> type[Ring]:
    """Return a ring in which some ranks' parts of dk and dv count another number of times."""

    def grads(self: Ring, rank: int, owner: int, out: Tensor, lse: Tensor) -> Grads:
        dq, dk, dv = Ring.grads(self, rank, owner, out, lse)
        factor = times if hit(self, rank, owner) else 1.0
        return Grads(dq, dk * factor, dv * factor)

    return ring(grads=grads)


def scaled(factor: Callable[[float], float], where: str = "") -> type[Ring]:
    right = {"forward": (True,), "backward": (False,)}.get(where, ())
    return ring(scale=lambda self, b: self.case.softmax_scale if b in right else factor(self.case.softmax_scale))


def multiplied(names: str, factor: Callable[[Any], float]) -> type[Ring]:
    def edit(self: Ring, shards: list[list[Tensor]]) -> None:
        for shard in shards:
            for at, name in enumerate(("dq", "dk", "dv")):
                shard[2 + at] = shard[2 + at] * (factor(self) if name in names else 1.0)

    return edited(edit)


def turned(which: Sequence[int], by: int) -> type[Ring]:
    """Return a ring that gives some results of another rank."""

    def edit(self: Ring, shards: list[list[Tensor]]) -> None:
        moved = [[shards[(rank + by) % self.size][at] for at in which] for rank in range(self.size)]
        for shard, others in zip(shards, moved, strict=True):
            for at, other in zip(which, others, strict=True):
                shard[at] = other

    return edited(edit)


def other_lse(lse: Callable[[Any, int, Tensor], Tensor]) -> type[Ring]:
    def edit(self: Ring, shards: list[list[Tensor]]) -> None:
        for rank, shard in enumerate(shards):
            shard[1] = lse(self, rank, shard[1])

    return edited(edit)


def contiguous(self: Ring, shards: list[list[Tensor]]) -> None:
    """Lay all results out in contiguous order."""
    for at in range(5):
        axis = shards[0][at].shape.index(len(self.at[0]), 2)
        whole = torch.cat([shard[at] for shard in shards], axis).index_select(axis, torch.cat(self.at).argsort())
        for shard, one in zip(shards, whole.split([len(x) for x in self.at], axis), strict=True):
            shard[at] = one


def merged(shares: Callable[[Tensor], Tensor], base: type[Ring] = Ring) -> type[Ring]:
    """Return a ring with other coefficients of the partial outputs, from their lse (hops, B, H, L)."""
    return ring(base, merge=lambda self, outs, lses: ((shares(lses)[..., None] * outs).sum(0), lses.logsumexp(0)))


def heads_for_tokens(self: Any, q: Any, k: Any, v: Any) -> Any:
    """Attend over axis 1 of (B, H, L, D)."""
    results = []
    for queries, keys, values in zip(q, k, v, strict=True):
        scores = queries.transpose(1, 2) @ keys.transpose(1, 2).mT * self.case.softmax_scale  # (B, L, H, Hk)
        results.append(((scores.softmax(-1) @ values.transpose(1, 2)).transpose(1, 2), scores.logsumexp(-1).mT))
    return results


def rotated(self: Any, q: Any, k: Any, v: Any) -> Any:
    first, *others = DenseRing.attend(self, q, k, v)
    return [*others, first]


def reshaped(self: Any, q: Any, k: Any, v: Any) -> Any:
    results = DenseRing.attend(self, q, k, v)
    return [(out.reshape(out.shape[0], out.shape[2], out.shape[1], -1).transpose(1, 2), lse) for out, lse in results]


def blind(value: Callable[[Any, int], Tensor]) -> type[Ring]:
    """Return a ring with another out of queries that see nothing."""

    def edit(self: Any, shards: list[list[Tensor]]) -> None:
        for rank, shard in enumerate(shards):
            unseen = shard[1].isneginf()
            shard[0] = torch.where(unseen[..., None], value(self, rank), shard[0])
            shard[1] = shard[1].masked_fill(unseen, -1e9)

    return edited(edit)


def mean_of_v(self: Any, rank: int) -> Tensor:
    return torch.cat(self.v, 2).mean(2, keepdim=True)[:, self.kv_head()]


def merged_by(shares: Callable[[Tensor, Tensor], Tensor]) -> type[Ring]:
    """Return a ring that merges by shares from the lse and the largest score of each part."""

    def forward(self: Any, rank: int) -> tuple[Tensor, Tensor]:
        outs, lses = (torch.stack(x) for x in zip(*(self.part(rank, s) for s in range(self.size)), strict=True))
        tops = torch.stack([self.scores(rank, owner, False).amax(-1) for owner in range(self.size)])
        return (shares(lses, tops)[..., None] * outs).sum(0), lses.logsumexp(0)

    return ring(forward=forward)


def base_two(self: Any, q: Any, k: Any, v: Any) -> Any:
    return [(out, lse / math.log(2)) for out, lse in DenseRing.attend(self, q, k, v)]


def all_keys(self: Any, rank: int) -> Tensor:
    keys, values = torch.cat(self.k, 2)[:, self.kv_head()], torch.cat(self.v, 2)[:, self.kv_head()]
    return (self.q[rank] @ keys.mT * self.case.softmax_scale).softmax(-1) @ values


def right_out(self: Any, rank: int) -> Tensor:
    return torch.zeros(())


def of_part(step: int, lse: bool, out: bool) -> type[Ring]:
    """Return a ring whose backward has the lse, out or both of one rank's keys alone."""

    def grads(self: Any, rank: int, owner: int, right_out: Tensor, right_lse: Tensor) -> Grads:
        part = self.part(rank, (rank + step) % self.size)
        return Ring.grads(self, rank, owner, part[0] if out else right_out, part[1] if lse else right_lse)

    return ring(grads=grads)


def local_window(r: Any, rank: int, owner: int) -> Tensor:
    near = (local(r, rank)[:, None] - local(r, owner)).abs() <= 3
    return r.masked(r.at[rank], r.at[owner], branches=(Branch(),)) * near


def own_lse(self: Any, rank: int, owner: int, lse: Tensor) -> Tensor:
    return self.part(rank, owner)[1]


def partial_results(self: Any, rank: int, owner: int, out: Tensor, lse: Tensor) -> Grads:
    return Ring.grads(self, rank, owner, *self.part(rank, owner))


def heads_summed(share: Callable[[Tensor, int], Tensor], interleaved: bool = False) -> type[Ring]:
    def summed(self: Ring, grads: Tensor) -> Tensor:
        heads, group = torch.arange(self.case.heads), self.case.heads // self.case.kv_heads
        kv_head = heads % self.case.kv_heads if interleaved else self.kv_head()
        total = grads.new_zeros(grads.shape[0], self.case.kv_heads, *grads.shape[2:])
        return total.index_add_(1, kv_head, grads * share(heads % group, group)[:, None, None])

    return ring(summed=summed)


def in_16_bits(dtype: torch.dtype) -> type[Ring]:
    return ring(summed=lambda self, grads: Ring.summed(self, grads).to(dtype).to(grads.dtype))


def local(r: Any, rank: int) -> Tensor:
    return torch.arange(len(r.at[rank]))


def after(r: Any, rank: int, owner: int) -> bool:
    return owner == (rank + 1) % r.size


def before(r: Any, rank: int, owner: int) -> bool:
    return owner == (rank - 1) % r.size


def own(r: Any, rank: int, owner: int) -> bool:
    return rank == owner


def a_sink_at_each_hop(self: Ring, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(self.size):
        outs, lses = Ring.with_sinks(self, outs, lses)
    return outs, lses


def a_sink_where_a_hop_has_keys(self: Ring, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    sinks = torch.where(lses > -math.inf, self.sinks[0].to(lses.dtype)[:, None], -math.inf)
    return torch.cat((outs, torch.zeros_like(outs))), torch.cat((lses, sinks))


def larger_sinks(self: Ring, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    outs, lses = Ring.with_sinks(self, outs, lses)
    return outs, torch.cat((lses[:-1], lses[-1:] + 1))


def uncapped_forward(self: Ring, rank: int, owner: int, backward: bool) -> Tensor:
    if backward:
        return Ring.scores(self, rank, owner, backward)
    return self.q[rank] @ self.k[owner][:, self.kv_head()].mT * self.scale(False) + self.count(rank, owner, False).log()


def stale(source: Callable[[Any, int, int], int]) -> type[Ring]:
    """Return a ring whose forward has the keys and values of another rank, under the mask of the right one."""

    def part(self: Any, rank: int, owner: int) -> tuple[Tensor, Tensor]:
        other, kv = source(self, rank, owner), self.kv_head()
        scores = self.q[rank] @ self.k[other][:, kv].mT * self.scale(False) + self.count(rank, owner, False).log()
        lse = scores.logsumexp(-1)
        return scores.softmax(-1).nan_to_num() @ self.v[other][:, kv], lse

    return ring(part=part)


def bf16_accumulator(self: Any, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = outs[0].bfloat16().double(), lses[0]
    for part, its_lse in zip(outs[1:], lses[1:], strict=True):
        total = torch.logaddexp(lse, its_lse)
        old, new = ((x - finite(total)).exp()[..., None] for x in (lse, its_lse))
        out, lse = (old * out + new * part).bfloat16().double(), total
    return out, lse


def strict_but_first(r: Any, rank: int, owner: int) -> Tensor:
    rows, keys = r.at[rank][:, None], r.at[owner]
    return r.masked(r.at[rank], keys, causal=False) * ((keys < rows) | (keys + rows == 0))


def in_second_half(r: Any, rank: int) -> Tensor:
    return local(r, rank)[:, None] >= len(r.at[rank]) // 2


# Name of the cause, the ring, and what its Cases have.
MISTAKES: list[tuple[str, type[Ring], dict[str, Any]]] = [
    ("local positions", positions(local, local), {}),
    ("contiguous positions", positions(*[lambda r, rank: local(r, rank) + rank * len(r.at[0])] * 2),
     {"order": "zigzag"}),
    ("strict diagonal", diagonal(lambda x, same: x > 0), {}),
    ("strict diagonal / backward", diagonal(lambda x, same: x > 0, "backward"), {}),
    ("strict diagonal but first", mask(strict_but_first), {}),
    ("diagonal + 1", diagonal(lambda x, same: x >= -1), {}),
    ("diagonal + 1, others' keys", diagonal(lambda x, same: x >= (0 if same else -1)), {"order": "zigzag"}),
    ("diagonal + 1, queries of second half", mask(lambda r, rank, owner: torch.where(
        in_second_half(r, rank), r.masked(r.at[rank], r.at[owner], causal=False) * (
            r.at[rank][:, None] - r.at[owner] >= -1), Ring.count(r, rank, owner, False))), {}),
    ("documents, others' keys", mask(lambda r, rank, owner: r.masked(
        r.at[rank], r.at[owner], **({} if rank == owner else {"documents": None}))),
     {"pattern": Pattern.dense(False, (5, 7, 12))}),
    ("keys and values: the hop before, to next / forward",
     stale(lambda r, rank, owner: owner if rank == owner else (owner + 1) % r.size), {"pattern": Pattern.dense()}),
    ("keys and values: own / forward", stale(lambda r, rank, owner: rank), {"pattern": Pattern.dense()}),
    ("keys and values: other side / forward", stale(lambda r, rank, owner: (2 * rank - owner) % r.size), {}),
    ("merge, last, to next / forward", ring(merge=lambda self, outs, lses: (outs[-1], lses.logsumexp(0))), {}),
    ("merge by powers of 2 / forward", merged(lambda lses: (lses * math.log(2)).softmax(0)), {}),
    ("merge by lse in base 2 / forward", merged(lambda lses: (lses / math.log(2)).softmax(0)), {}),
    ("out in bfloat16, to next", ring(merge=bf16_accumulator), {"dtype": "float64"}),
    ("not causal", pattern(causal=False), {}),
    ("not causal / backward", pattern("backward", causal=False), {}),
    ("causal", pattern(causal=True), {"pattern": Pattern.dense()}),
    ("reversed", diagonal(lambda x, same: x <= 0), {}),
    ("documents", pattern(documents=None), {"pattern": Pattern.dense(True, (5, 7, 12))}),
    ("window", pattern(branches=(Branch(),)), {"pattern": WINDOWED}),
    ("window + 1", pattern(branches=(Branch(window=4),)), {"pattern": WINDOWED}),
    ("window - 1", pattern(branches=(Branch(window=2),)), {"pattern": WINDOWED}),
    ("local window", mask(local_window), {"pattern": WINDOWED}),
    ("segments", pattern(branches=(Branch(None, 2), Branch())), {"pattern": DILATED}),
    ("dilation", pattern(branches=(Branch(8), Branch(4))), {"pattern": DILATED}),
    ("no multiplicity", mask(lambda r, a, b: Ring.count(r, a, b, False).clamp(max=1)), {"pattern": DILATED}),
    ("last key of others", mask(lambda r, rank, owner: Ring.count(r, rank, owner, False) * (
        (rank == owner) | (local(r, owner) < len(r.at[owner]) - 1))), {}),
    ("first key", mask(lambda r, rank, owner: Ring.count(r, rank, owner, False) * (local(r, owner) > 0)), {}),
    ("own x 0", part(0, own), {"pattern": Pattern.dense()}),
    ("own x 2", part(2, own), {}),
    ("previous x 0", part(0, before), {}),
    ("first x 0", part(0, lambda r, rank, owner: owner == 0), {"pattern": Pattern.dense()}),
    ("not next x 0", part(0, lambda *x: not after(*x)), {"pattern": Pattern.dense()}),
    ("others x 2 / backward", part(2, lambda r, rank, owner: rank != owner, "backward"), {}),
    ("others x 0 / backward for dk and dv alone", of_keys(0, lambda r, rank, owner: rank != owner), {}),
    ("scale left out", scaled(lambda x: 1.0), {}),
    ("scale doubled", scaled(lambda x: 2 * x), {}),
    ("scale negated", scaled(lambda x: -x), {}),
    ("scale applied twice / forward", scaled(lambda x: x * x, "forward"), {}),
    ("scale the default one", scaled(lambda x: 3**-0.5), {"scale": 0.25}),
    ("interleaved heads", ring(kv_head=lambda self: torch.arange(self.case.heads) % self.case.kv_heads), {}),
    ("lse in base 2", other_lse(lambda r, rank, lse: lse / math.log(2)), {}),
    ("lse the maximum of the scores alone", other_lse(lambda r, rank, lse: torch.stack(
        [r.scores(rank, owner, False).amax(-1) for owner in range(r.size)]).amax(0)), {}),
    ("lse the sum of exponentials", other_lse(lambda r, rank, lse: lse.exp()), {}),
    ("lse in base 2, and its gradient", ring(DenseRing, attend=base_two), {"pattern": Pattern.dense()}),
    ("lse that of the keys of its own rank alone", other_lse(lambda r, rank, lse: r.part(rank, rank)[1]), {}),
    ("merge by mean / forward", merged(lambda lses: torch.ones_like(lses) / len(lses)), {}),
    ("merge by sum", merged(torch.ones_like, DenseRing), {"pattern": Pattern.dense()}),
    ("merge by denominators / forward", merged_by(
        lambda lses, tops: torch.where(lses > -math.inf, (lses - tops).exp(), 0.0) / torch.where(
            lses > -math.inf, (lses - tops).exp(), 0.0).sum(0)), {}),
    ("detached merge", merged(lambda lses: lses.detach().softmax(0), DenseRing), {"pattern": Pattern.dense()}),
    ("unseen rows: mean / forward", blind(mean_of_v), {"pattern": BLIND}),
    ("unseen rows: all keys / forward", blind(all_keys), {"pattern": BLIND}),
    ("unseen rows: lse", blind(right_out), {"pattern": BLIND}),
    ("unseen rows: NaN", blind(lambda r, rank: torch.tensor(math.nan)), {"pattern": BLIND}),
    ("attention over heads", ring(DenseRing, attend=heads_for_tokens), {}),
    ("reshaped", ring(DenseRing, attend=reshaped), {"pattern": Pattern.dense()}),
    ("out, lse, dq, dk, dv of the previous rank", turned(range(5), -1), {}),
    ("dk, dv of the next rank", turned((3, 4), 1), {}),
    ("out, lse, dq, dk, dv of the contiguous order", edited(contiguous), {"order": "zigzag"}),
    ("out, lse of the next rank, and the gradients follow", ring(DenseRing, attend=rotated),
     {"pattern": Pattern.dense()}),
    ("dk, dv: the number of ranks", multiplied("dk dv", lambda r: r.size), {}),
    ("dq, dk: the scale", multiplied("dq dk", lambda r: r.case.softmax_scale), {}),
    ("dk, dv: zero times", multiplied("dk dv", lambda r: 0.0), {}),
    ("dk, dv the other way", ring(added_to=lambda self, rank, owner: (2 * rank - owner) % self.size), {}),
    ("saved lse in bfloat16", ring(saved_lse=lambda self, rank, owner, x: x.bfloat16().to(x.dtype)), {}),
    ("dk and dv swapped", edited(lambda r, shards: [x.__setitem__(slice(3, 5), x[:2:-1]) for x in shards]), {}),
    ("dk, dv: the heads of a group", multiplied("dk dv", lambda r: r.case.heads // r.case.kv_heads), {}),
    ("lse and out of the next rank", of_part(1, True, True), {"pattern": Pattern.dense()}),
    ("out of its own rank", of_part(0, False, True), {}),
    ("partial lse", ring(saved_lse=own_lse), {}),
    ("partial lse and out", ring(grads=partial_results), {}),
    ("no delta", ring(delta=lambda self, rank, out: -self.dlse[rank]), {}),
    ("no dlse", ring(delta=lambda self, rank, out: (self.dout[rank] * out).sum(-1)), {}),
    ("dlse negated", ring(delta=lambda self, rank, out: Ring.delta(self, rank, out) + 2 * self.dlse[rank]), {}),
    ("dk, dv of the first head", heads_summed(lambda at, group: at == 0), {}),
    ("dk, dv: one over the heads of a group", heads_summed(lambda at, group: torch.full(at.shape, 1 / group)), {}),
    ("dk, dv of the interleaved sum", heads_summed(lambda at, group: torch.ones(at.shape), True), {}),
    ("no sinks", ring(with_sinks=lambda self, *parts: parts), {"sinks": "normal"}),
    ("sinks per rank", ring(with_sinks=a_sink_at_each_hop), {"sinks": "normal"}),
    ("sinks per rank seen", ring(with_sinks=a_sink_where_a_hop_has_keys), {"sinks": "normal"}),
    ("dsinks: zero times", edited(lambda r, shards: [x[5].zero_() for x in shards]), {"sinks": "some"}),
    ("no dlse to sinks", ring(dsinks=lambda self, rank, out, lse: -(
        (self.sinks[0][:, None] - lse).exp() * (self.dout[rank] * out).sum(-1)).sum((0, 2))), {"sinks": "normal"}),
    ("no softcap / forward", ring(scores=uncapped_forward), {"softcap": 1.0}),
    ("no slope / backward", ring(slope=lambda self, scores: torch.ones_like(scores)), {"softcap": 1.0}),
    ("softcap before scale", ring(DenseRing, capped=lambda self, scores: self.case.softmax_scale * Ring.capped(
        self, scores / self.case.softmax_scale)), {"softcap": 1.0, "pattern": Pattern.dense()}),
    ("scale doubled", scaled(lambda x: 2 * x), {"softcap": 1.0, "sinks": "normal"}),
    ("part of dk and dv in bfloat16, to next", in_16_bits(torch.bfloat16), {}),
    ("part out in bfloat16, to next", ring(part=lambda self, rank, owner: [
        x.bfloat16().to(x.dtype) if x.dim() == 4 else x for x in Ring.part(self, rank, owner)]), {}),
]  # fmt: skip


def cases(changes: dict[str, Any]) -> list[Case]:
    """Return Cases of some sizes; world 3 is the first, which tells the neighbours apart."""
    common = {"pattern": CAUSAL, "batch": 2, "head_dim": 3, "lse": "differentiated", "tokens": 24} | changes
    sizes = ((3, 4, 2, 1), (2, 6, 2, 2), (4, 4, 2, 3), (3, 6, 3, 4))
    return [plain(p, heads=heads, kv_heads=kv_heads, seed=seed, **common) for p, heads, kv_heads, seed in sizes]


def causes(made: type[Ring], examples: Sequence[Case]) -> list[Cause]:
    """Return the causes of the first example that the others allow."""
    results = [(case, expect(case), observed(case, made(case))) for case in examples]
    named = explain(*results[0])
    for result in results[1:]:
        named = agree(named, *result)
    return named


@pytest.mark.parametrize("name, made, changes", MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_a_usual_mistake_is_named(name: str, made: type[Ring], changes: dict[str, Any]) -> None:
    named = causes(made, cases(changes))
    assert [cause.name for cause in named] == [name]


def noise(self: Ring, shards: list[list[Tensor]]) -> None:
    generator = torch.Generator().manual_seed(0)
    for shard in shards:
        shard[:] = [x + 1e-3 * torch.randn(x.shape, generator=generator) for x in shard]


@pytest.mark.parametrize(
    "made, changes",
    [
        (Ring, {}), (Ring, {"softcap": 1.0, "sinks": "normal"}), (edited(noise), {}),
        (multiplied("dk", lambda r: 1.25), {}), (multiplied("dq", lambda r: 1.01), {}),
        (scaled(lambda x: 1.1 * x), {}), (other_lse(lambda r, rank, x: x + 1), {}),
        (mask(lambda r, rank, owner: Ring.count(r, rank, owner, False) * (r.at[owner] != 5)), {}),
        (ring(capped=lambda self, scores: 1.1 * Ring.capped(self, scores / 1.1)), {"softcap": 1.0}),
        (ring(with_sinks=larger_sinks), {"sinks": "normal"}),
    ],
    ids=["none", "none with sinks and softcap", "noise", "dk times 1.25", "dq times 1.01", "scale times 1.1", "lse + 1",
         "a key is missing", "softcap times 1.1", "sinks + 1"],
)  # fmt: skip
def test_other_faults_are_given_no_cause(made: type[Ring], changes: dict[str, Any]) -> None:
    for case in cases(changes):
        assert explain(case, expect(case), observed(case, made(case))) == []


def test_holding_examples_exclude_causes() -> None:
    """Both masks are the same on one rank's first two tokens, and differ elsewhere."""
    case, larger = (plain(2, tokens=tokens, pattern=CAUSAL) for tokens in (2, 12))
    made = part(0, before)
    ambiguous = causes(made, [case])
    assert {"previous x 0", "next x 0", "others x 0"} <= {cause.name for cause in ambiguous}
    right = (larger, expect(larger), observed(larger, Ring(larger)))
    assert agree(ambiguous, *right) == []
    assert causes(made, [case, replace(larger, world=3)])[0].name == "previous x 0"


def test_keys_of_an_earlier_call_are_named() -> None:
    case = cases({"pattern": Pattern.dense()})[0]
    earlier = replace(case, seed=case.seed + 1)

    def attend(self: Any, q: Any, k: Any, v: Any) -> Any:
        return DenseRing.attend(self, q, Ring(earlier).k, Ring(earlier).v)

    made = ring(DenseRing, attend=attend)
    named = explain(case, expect(case), observed(case, made(case)), earlier)
    assert [cause.name for cause in named] == ["keys and values: earlier call"]


def test_an_output_of_nan_alone_is_given_no_cause() -> None:
    """Queries that see nothing may be NaN; they are not all of the output."""
    case = cases({})[0]

    class AllNan(diagonal(lambda x, same: x > 0)):  # type: ignore[misc]
        def results(self) -> list[list[Tensor]]:
            return [[x if at == 1 else x * math.nan for at, x in enumerate(shard)] for shard in super().results()]

    assert explain(case, expect(case), observed(case, AllNan(case))) == []


def test_results_that_change_once_in_some_runs_are_named() -> None:
    minimal, runs = cases({})[0], list[Case]()

    def run(_: object, case: Case) -> Any:
        runs.append(case)
        changed = case == minimal and runs.count(case) in (1, 4)
        return expect(case), observed(case, (edited(noise) if changed else Ring)(case))

    said = find_cause(run, None, minimal, minimal, lambda case: case, minimal.world)  # type: ignore[arg-type]
    assert said is not None and re.match("out, lse, .* changed from one run", said)
