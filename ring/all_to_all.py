"""Attention by heads: the ranks of a group divide the heads of their rows, and each computes some of all these rows.

A block of heads has the rows of the group, shard after shard: those of one rank of a joined layout. Its plan is that of
the ranks with the same heads, between which keys travel by another exchange. If all ranks divide the heads, this is one
rank without messages. Backward the owners send q, k, v, the output and lse again, so nothing is kept for it.
Gradients of keys are summed over the blocks that had their head; where some head was in several, they travel in the
accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ring.comm.head_exchange import HeadExchange, Rows
from ring.comm.transport import Transport
from ring.compute import kernel_choice
from ring.default_bucket import default_bucket, default_local_bucket
from ring.layout import Layout
from ring.lowering import Programs
from ring.plan.head_groups import HeadGroups
from ring.plan.head_shares import HeadBlock, head_shares, shares_keys
from ring.plan.plan import plan_of
from ring.precision import accumulator_dtype
from ring.validation import Call

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class HeadPrograms:
    """The stages of a setting, and the programs of this rank's block in each; None in a stage without heads.

    groups: which ranks divide the heads. counts, key_counts: rows of each of these ranks. returns_lse: lse may have a
    gradient. sums_keys: a key/value head is in blocks of several ranks.
    """

    by_head: ClassVar[Literal[True]] = True
    groups: HeadGroups
    stages: tuple[tuple[HeadBlock, ...], ...]
    programs: tuple[Programs | None, ...]
    counts: tuple[int, ...]
    key_counts: tuple[int, ...]
    returns_lse: bool
    sums_keys: bool

    @property
    def nbytes(self) -> int:
        """Approximate bytes."""
        return sum(programs.nbytes for programs in self.programs if programs is not None)


def head_programs(call: Call, groups: HeadGroups, rank: int) -> HeadPrograms:
    """Build the programs of a validated call."""
    heads, kv_heads, bucket = call.q.shape[2], call.k.shape[2], call.bucket
    if bucket is None:
        bucket = default_bucket(call.layout, heads, kv_heads, call.q.dtype, call.q.device.type, call.key_layout)
    layout = joined = _joined(call.layout, groups)
    if call.key_layout is not call.layout:
        joined = _joined(call.key_layout, groups)
    stages = head_shares(heads, kv_heads, groups.degree, max(1, bucket * kv_heads // max(1, *joined.counts)))
    own, place = groups.dividing(rank), groups.alike(rank).index(rank)
    blocks = [stage[own.index(rank)] for stage in stages]
    programs = [
        _programs_of_block(call, block, bucket, groups.between, place, layout, joined) if block.queries else None
        for block in blocks
    ]
    counts, key_counts = (tuple(x.counts[member] for member in own) for x in (call.layout, call.key_layout))
    return HeadPrograms(groups, stages, tuple(programs), counts, key_counts, call.return_lse, shares_keys(stages))


def _joined(layout: Layout, groups: HeadGroups) -> Layout:
    """Join the shards of the ranks that divide the heads: a layout for the ranks that have the same heads."""
    return layout.joined([groups.dividing(rank) for rank in groups.alike(0)])


def _programs_of_block(
    call: Call, block: HeadBlock, bucket: int, exchange: str, rank: int, layout: Layout, keys: Layout
) -> Programs:
    """Build the programs of some heads on a rank of joined layouts."""
    heads, kv_heads, own = len(block.queries), len(block.keys), None
    setting = kernel_choice.setting_of(call.kernel, call.q, call.k, call.v, call.scoring)
    setting = setting._replace(share=heads // kv_heads)
    if call.bucket is None:
        own = default_local_bucket(call.q, heads, call.v.shape[3], bucket)
    plan = plan_of(
        call.pattern.of_heads(block.queries), layout, rank, heads, kv_heads, exchange, bucket, own,
        kernel_choice.max_varlen_tokens(setting), key_layout=keys,
    )  # fmt: skip
    return Programs(plan, call.q, setting)


def forward(
    setting: HeadPrograms, transport: Transport, compute: Forward,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (out, lse) of the own rows. transport: of the ranks that divide the heads. compute: the forward among the
    ranks with the same heads, of (programs, q, k, v, sinks).
    """
    batch, tokens, heads, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[3])
    lse = q.new_empty(batch, tokens, heads, 1, dtype=accumulator_dtype(q.dtype))

    def stage(number: int, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        block = setting.stages[number][transport.rank].queries
        own_sinks = None if sinks is None else sinks[block.start : block.stop]
        results, own_lse = compute(setting.programs[number], *tensors, own_sinks)
        return results, _as_rows(own_lse)

    queries, keys = setting.counts, setting.key_counts
    given = [(Rows("queries", queries, False), q), (Rows("keys", keys, True), k), (Rows("values", keys, True), v)]
    wanted = [(Rows("output", queries, False), out), (Rows("lse", queries, False), lse)]
    HeadExchange(transport, setting.stages).run(given, wanted, stage)
    return out, _as_lse(lse).contiguous()


def backward(
    setting: HeadPrograms, transport: Transport, compute: Backward, tensors: tuple[torch.Tensor, ...],
    dlse: torch.Tensor | None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of the own rows. tensors: q, k, v, out, lse, dout. compute: the backward among the ranks with
    the same heads, of (programs, *tensors, dlse), the last if lse may have a gradient.
    """
    q, k, v, out, lse, dout = tensors
    queries, keys = setting.counts, setting.key_counts
    rows = [(Rows("queries", queries, False), q), (Rows("keys", keys, True), k), (Rows("values", keys, True), v)]
    rows += [(Rows("output", queries, False), out), (Rows("lse", queries, False), _as_rows(lse))]
    rows.append((Rows("gradients of output", queries, False), dout))
    if setting.returns_lse:  # ranks whose loss does not use it send zeros
        given = torch.zeros_like(lse) if dlse is None else dlse
        rows.append((Rows("gradients of lse", queries, False), _as_rows(given)))
    work = accumulator_dtype(q.dtype) if setting.sums_keys else q.dtype
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=work), torch.zeros_like(v, dtype=work)

    def stage(number: int, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        q, k, v, out, lse, dout, *dlse = tensors
        return compute(setting.programs[number], q, k, v, out, _as_lse(lse), dout, *map(_as_lse, dlse))

    wanted = [
        (Rows("gradients of queries", queries, False), dq), (Rows("gradients of keys", keys, True), dk),
        (Rows("gradients of values", keys, True), dv),
    ]  # fmt: skip
    HeadExchange(transport, setting.stages).run(rows, wanted, stage)
    return [dq, dk.to(k.dtype), dv.to(v.dtype)]


def _as_rows(lse: torch.Tensor) -> torch.Tensor:
    """View (B, H, N) as (B, N, H, 1)."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _as_lse(rows: torch.Tensor) -> torch.Tensor:
    """View (B, N, H, 1) as (B, H, N)."""
    return rows.squeeze(-1).transpose(1, 2)
