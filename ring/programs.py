"""The programs of a call: its heads in blocks, and for each block a plan and what it is lowered to.

    heads -> blocks -> Plan -> Program

A rank that shares its rows with nobody computes all heads in one block. By an exchange by heads the ranks of a group
divide the heads of their rows, and each computes some of all these rows: a block has the rows of the group, those of
one rank of a joined layout, and its plan is that of the ranks with the same heads, between which keys travel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ring.comm.exchange import outgoing
from ring.comm.transport import Outgoing, SomeRanks, Transport
from ring.compute import kernel_choice
from ring.default_bucket import default_bucket, default_local_bucket
from ring.layout import Layout
from ring.lowering import BlockPrograms, Program
from ring.plan.exchange import ExchangeSpec
from ring.plan.head_rows import Places, block_layout, block_places
from ring.plan.head_shares import HeadBlock, head_shares, shares_keys
from ring.plan.plan import plan_of
from ring.validation import Call

_IDLE = Program(())  # of a stage without heads


@dataclass(frozen=True, eq=False)
class CallProgram:
    """The programs of all blocks in one direction."""

    programs: Programs
    blocks: tuple[Program, ...]

    @cached_property
    def batched(self) -> bool:
        """True if every call uses a fused GPU kernel."""
        return all(program.batched for program in self.blocks)


@dataclass(frozen=True, eq=False)
class Programs:
    """The programs of a setting on one rank, block by block.

    Args:
        exchange: of the call.
        dividing, same_heads: the ranks that divide the heads with this one, and those that have the same.
        stages: the block of each of `dividing`, stage by stage.
        blocks: the programs of this rank's block in each stage; None in a stage without heads.
        places, key_places: where the rows of each of `dividing` lie in a block.
        returns_lse: lse may have a gradient.
        sums_keys: a key/value head is in blocks of several ranks.
        setting: arguments of the programs except the rank, equal on all ranks.
    """

    exchange: ExchangeSpec
    dividing: range
    same_heads: range
    stages: tuple[tuple[HeadBlock, ...], ...]
    blocks: tuple[BlockPrograms | None, ...]
    places: Places
    key_places: Places
    returns_lse: bool
    sums_keys: bool
    setting: Hashable
    _backward: dict[tuple[bool, bool], CallProgram] = field(default_factory=dict)

    @cached_property
    def divides_heads(self) -> bool:
        """True if rows of heads are exchanged."""
        return self.exchange.degree > 1

    @property
    def nbytes(self) -> int:
        """Approximate bytes."""
        return sum(block.nbytes for block in self.blocks if block is not None)

    @cached_property
    def forward(self) -> CallProgram:
        """Programs of a forward."""
        return CallProgram(self, tuple(_IDLE if block is None else block.forward for block in self.blocks))

    def backward(self, q: torch.Tensor, dlse: bool) -> CallProgram:
        """Return the programs of a backward, made once. dlse: see `ring.compute.kernel_choice.choose`."""
        key = dlse, q.is_cuda and torch.are_deterministic_algorithms_enabled()  # on CPUs every kernel is repeatable
        if key not in self._backward:
            blocks = tuple(_IDLE if block is None else block.backward(q, *key) for block in self.blocks)
            self._backward[key] = CallProgram(self, blocks)
        return self._backward[key]

    def block(self, transport: Transport, stage: int) -> tuple[BlockPrograms, Transport]:
        """Return the programs of a stage that has heads, and the transport of the ranks with the same heads."""
        block = self.blocks[stage]
        assert block is not None
        if not self.divides_heads:
            return block, transport
        return block, SomeRanks(transport, self.same_heads, f" of stage {stage + 1}")

    def outgoing(self, transport: Transport, direction: str, k: torch.Tensor, v: torch.Tensor) -> list[Outgoing]:
        """List the messages to ranks with the same heads, in all stages of an exchange by heads."""
        messages = []
        for stage in (number for number, block in enumerate(self.blocks) if block is not None):
            block, ranks = self.block(transport, stage)
            assert isinstance(ranks, SomeRanks)
            messages += ranks.to_whole(outgoing(block.plan, direction, k, v))
        return messages


def make_programs(call: Call, exchange: ExchangeSpec, rank: int) -> Programs:
    """Make the programs of a validated call on a rank."""
    heads, kv_heads = call.q.shape[2], call.k.shape[2]
    bucket = call.settings.bucket
    if bucket is None:
        bucket = default_bucket(call.layout, heads, kv_heads, call.q.dtype, call.q.device.type, call.key_layout)
        bucket = max(bucket, call.settings.same_bits or 0)
    dividing, same_heads = exchange.dividing(rank), exchange.same_heads(rank)
    layouts = call.layout, call.key_layout
    stages: tuple[tuple[HeadBlock, ...], ...] = ((HeadBlock(range(heads), range(kv_heads)),),)
    places: tuple[Places, Places] = (), ()
    if exchange.degree > 1:
        groups = [exchange.dividing(other) for other in exchange.same_heads(0)]
        places = block_places(layouts[0], groups, dividing), block_places(layouts[1], groups, dividing)
        layouts = block_layout(layouts[0], groups), block_layout(layouts[1], groups)
        stages = head_shares(heads, kv_heads, exchange.degree, max(1, bucket * kv_heads // max(1, *layouts[1].counts)))
    own = (stage[dividing.index(rank)] for stage in stages)
    return Programs(
        exchange, dividing, same_heads, stages,
        tuple(
            _block_programs(call, exchange, same_heads.index(rank), bucket, layouts, block) if block.queries else None
            for block in own
        ),
        *places, call.settings.return_lse, shares_keys(stages),
        (
            call.pattern, call.layout.digest, call.key_layout.digest, heads, kv_heads, exchange.name, bucket,
            call.settings.same_bits,
        ),
    )  # fmt: skip


def _block_programs(
    call: Call, exchange: ExchangeSpec, rank: int, bucket: int, layouts: tuple[Layout, Layout], block: HeadBlock
) -> BlockPrograms:
    """Make the programs of a block of heads on a rank of the layouts of its queries and keys."""
    heads, kv_heads, pattern = len(block.queries), len(block.keys), call.pattern
    if heads < call.q.shape[2]:
        pattern = pattern.of_heads(block.queries)
    setting = kernel_choice.make_kernel_setting(call.settings.kernel, call.q, call.k, call.v, call.scoring)
    setting = setting._replace(share=heads // max(1, kv_heads))
    own = None
    if call.settings.bucket is None:
        widest = max(call.q.shape[3], call.v.shape[3])
        own = default_local_bucket(call.q.shape[0], heads, widest, bucket, call.q.device.type)
    plan = plan_of(
        pattern, layouts[0], rank, heads, kv_heads, exchange.keys, bucket, own,
        varlen=kernel_choice.max_varlen_tokens(setting), window=kernel_choice.max_window(setting),
        key_layout=layouts[1], chunk=call.settings.same_bits,
    )  # fmt: skip
    return BlockPrograms(plan, call.q, setting)
