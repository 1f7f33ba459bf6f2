"""Attention by heads: the ranks of a group divide the heads of their rows, and each computes some of all these rows.

A block of heads has the rows of the group: those of one rank of a joined layout. Its plan is that of
the ranks with the same heads, between which keys travel by another exchange. If all ranks divide the heads, this is one
rank without messages. Backward the owners send q, k, v, the output and lse again, so nothing is kept for it.
Gradients of keys are summed over the blocks that had their head; where some head was in several, they travel in the
accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

from ring.comm.exchange import outgoing, slot_of
from ring.comm.head_exchange import Compute as ComputeStage
from ring.comm.head_exchange import Given, HeadExchange, Rows
from ring.comm.transport import Outgoing, SomeRanks, Transport
from ring.compute import kernel_choice
from ring.default_bucket import default_bucket, default_local_bucket
from ring.layout import Layout
from ring.lowering import Program, Programs
from ring.plan.head_groups import HeadGroups
from ring.plan.head_rows import Places, block_layout, block_places
from ring.plan.head_shares import HeadBlock, head_shares, shares_keys
from ring.plan.plan import plan_of
from ring.precision import accumulator_dtype
from ring.validation import Call

# Computes a stage among the ranks with the same heads, given its number and q, k, v, sinks; backward q, k, v, out, lse,
# dout, and dlse if lse has a gradient.
Compute = Callable[..., Sequence[torch.Tensor]]
_IDLE = Program(())  # of a stage without heads


class HeadProgram(NamedTuple):
    """The programs of all stages in one direction."""

    programs: HeadPrograms
    stages: tuple[Program, ...]

    @property
    def batched(self) -> bool:
        """True if every call uses a fused GPU kernel."""
        return all(program.batched for program in self.stages)


@dataclass(frozen=True, eq=False)
class HeadPrograms:
    """The stages of a setting, and the programs of this rank's block in each; None in a stage without heads.

    dividing, alike: the ranks that divide the heads with this one, and that have the same. places, key_places: where
    the rows of each of `dividing` lie in a block. returns_lse: lse may have a gradient. sums_keys: a key/value head is
    in blocks of several ranks. setting: arguments of the programs except the rank, equal on all ranks.
    """

    by_head: ClassVar[Literal[True]] = True
    dividing: range
    alike: range
    stages: tuple[tuple[HeadBlock, ...], ...]
    blocks: tuple[Programs | None, ...]
    places: Places
    key_places: Places
    returns_lse: bool
    sums_keys: bool
    setting: Hashable

    @property
    def nbytes(self) -> int:
        """Approximate bytes."""
        return sum(programs.nbytes for programs in self.blocks if programs is not None)

    @property
    def forward(self) -> HeadProgram:
        """Programs of a forward."""
        return HeadProgram(self, tuple(_IDLE if block is None else block.forward for block in self.blocks))

    def backward(self, q: torch.Tensor, dlse: bool) -> HeadProgram:
        """Programs of a backward: see `Programs.backward`."""
        stages = tuple(_IDLE if block is None else block.backward(q, dlse) for block in self.blocks)
        return HeadProgram(self, stages)

    def block(self, transport: Transport, stage: int) -> tuple[Programs, SomeRanks]:
        """Return the programs of a stage that has heads, and the transport of the ranks with the same heads."""
        programs = self.blocks[stage]
        assert programs is not None
        return programs, SomeRanks(transport, self.alike, f" of stage {stage + 1}")

    def outgoing(self, transport: Transport, direction: str, k: torch.Tensor, v: torch.Tensor) -> list[Outgoing]:
        """List the messages to ranks with the same heads, in all stages."""
        messages = []
        for stage in (number for number, block in enumerate(self.blocks) if block is not None):
            programs, alike = self.block(transport, stage)
            messages += alike.of_whole(outgoing(programs.plan, direction, k, v))
        return messages


def head_programs(call: Call, groups: HeadGroups, rank: int) -> HeadPrograms:
    """Build the programs of a validated call."""
    heads, kv_heads, bucket = call.q.shape[2], call.k.shape[2], bucket_of(call)
    own, alike = groups.dividing(rank), groups.alike(rank)
    every = [groups.dividing(rank) for rank in groups.alike(0)]
    layout, keys = (block_layout(x, every) for x in (call.layout, call.key_layout))
    stages = head_shares(heads, kv_heads, groups.degree, max(1, bucket * kv_heads // max(1, *keys.counts)))
    blocks = tuple(
        programs_of(call, groups.between, alike.index(rank), bucket, layout, keys, block) if block.queries else None
        for block in (stage[own.index(rank)] for stage in stages)
    )
    places, key_places = (block_places(x, every, own) for x in (call.layout, call.key_layout))
    setting = call.pattern, call.layout.digest, call.key_layout.digest, heads, kv_heads, call.exchange, bucket
    return HeadPrograms(
        own, alike, stages, blocks, places, key_places, call.return_lse, shares_keys(stages), setting
    )  # fmt: skip


def bucket_of(call: Call) -> int:
    """Return the bucket of a call, of all its heads."""
    if call.bucket is not None:
        return call.bucket
    q, heads = call.q, (call.q.shape[2], call.k.shape[2])
    return default_bucket(call.layout, *heads, q.dtype, q.device.type, call.key_layout)


def programs_of(
    call: Call, exchange: str, rank: int, bucket: int, layout: Layout, keys: Layout, block: HeadBlock | None = None
) -> Programs:
    """Build the programs of a block of heads, or of all, on a rank of layouts of the rows with these heads."""
    heads, kv_heads, pattern = call.q.shape[2], call.k.shape[2], call.pattern
    if block is not None:
        heads, kv_heads, pattern = len(block.queries), len(block.keys), pattern.of_heads(block.queries)
    setting = kernel_choice.setting_of(call.kernel, call.q, call.k, call.v, call.scoring)
    setting = setting._replace(share=heads // max(1, kv_heads))
    own = None
    if call.bucket is None:
        widest = max(call.q.shape[3], call.v.shape[3])
        own = default_local_bucket(call.q.shape[0], heads, widest, bucket, call.q.device.type)
    plan = plan_of(
        pattern, layout, rank, heads, kv_heads, exchange, bucket, own, varlen=kernel_choice.max_varlen_tokens(setting),
        window=kernel_choice.max_window(setting), key_layout=keys,
    )  # fmt: skip
    return Programs(plan, call.q, setting)


def forward(
    programs: HeadPrograms, transport: Transport, compute: Compute,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (out, lse) of the own rows. transport: of the whole group."""
    batch, tokens, heads, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[3])
    lse = q.new_empty(batch, tokens, heads, 1, dtype=accumulator_dtype(q.dtype))
    place = programs.dividing.index(transport.rank)

    def stage(number: int, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        block = programs.stages[number][place].queries
        own_sinks = None if sinks is None else sinks[block.start : block.stop]
        results, own_lse = compute(number, *tensors, own_sinks)
        return results, _as_rows(own_lse)

    queries, keys = programs.places, programs.key_places
    given = [(Rows("queries", queries, False), q), (Rows("keys", keys, True), k), (Rows("values", keys, True), v)]
    wanted = [(Rows("output", queries, False), out), (Rows("lse", queries, False), lse)]
    _exchange(programs, transport, "forward", given, wanted, stage)
    return out, _as_lse(lse).contiguous()


def backward(
    programs: HeadPrograms, transport: Transport, compute: Compute, tensors: Sequence[torch.Tensor],
    dlse: torch.Tensor | None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of the own rows. transport: of the whole group. tensors: q, k, v, out, lse, dout."""
    q, k, v, out, lse, dout = tensors
    queries, keys = programs.places, programs.key_places
    given = [(Rows("queries", queries, False), q), (Rows("keys", keys, True), k), (Rows("values", keys, True), v)]
    given += [(Rows("output", queries, False), out), (Rows("lse", queries, False), _as_rows(lse))]
    given.append((Rows("gradients of output", queries, False), dout))
    if dlse is not None:
        given.append((Rows("gradients of lse", queries, False), _as_rows(dlse)))
    summed = programs.sums_keys
    work = accumulator_dtype(q.dtype) if summed else q.dtype
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=work), torch.zeros_like(v, dtype=work)

    def stage(number: int, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        q, k, v, out, lse, dout, *dlse = tensors
        return compute(number, q, k, v, out, _as_lse(lse), dout, *map(_as_lse, dlse))

    wanted = [
        (Rows("gradients of queries", queries, False), dq), (Rows("gradients of keys", keys, True, summed), dk),
        (Rows("gradients of values", keys, True, summed), dv),
    ]  # fmt: skip
    _exchange(programs, transport, "backward", given, wanted, stage)
    return [dq, dk.to(k.dtype), dv.to(v.dtype)]


def _exchange(
    programs: HeadPrograms, transport: Transport, direction: str, given: Given, wanted: Given, compute: ComputeStage
) -> None:
    """Run all stages of a call. given: queries, keys, values and more."""
    (_, q), (_, k), (_, v), *rest = given
    key = programs.setting, direction, len(rest), q.dtype, slot_of(k, v)
    exchange = HeadExchange(transport, programs.dividing, programs.stages)
    exchange.run(key, given, wanted, compute, lambda: programs.outgoing(transport, direction, k, v))


def _as_rows(lse: torch.Tensor) -> torch.Tensor:
    """View (B, H, N) as (B, N, H, 1)."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _as_lse(rows: torch.Tensor) -> torch.Tensor:
    """View (B, N, H, 1) as (B, H, N)."""
    return rows.squeeze(-1).transpose(1, 2)
