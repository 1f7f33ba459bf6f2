"""The handle that modules take: over which ranks a batch's sequence is sharded, how, and by which exchange.

It is made once for a layout and never changes, and it is given to a module's forward like the batch itself. So a
forward that activation checkpointing computes again meets the layout that the first one had.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from reference.pattern import Pattern
from ring.attention import ring_attention
from ring.comm.group import transport_over
from ring.comm.transport import Transport
from ring.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """A sequence sharded over the ranks of a context-parallel group.

    layout    which positions each rank holds
    group     a process group, a `DeviceMesh` of one dimension, a `Transport`, or None: the default group, or no group
              for a layout of one rank
    exchange, bucket, kernel, check: as for `ring.ring_attention`

    Raises ValueError for a layout of another number of ranks than the group has, for a mesh of more dimensions, and on
    a process that is not in the group.
    """

    layout: Layout
    group: dist.ProcessGroup | DeviceMesh | Transport | None = None
    exchange: str = "direct"
    bucket: int | None = None
    kernel: str = "auto"
    check: bool = True
    transport: Transport = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise ValueError(f"layout must be a Layout, got {self.layout!r}")
        transport = transport_over(self.group, self.layout.world_size)
        if self.layout.world_size != transport.world_size:
            raise ValueError(
                f"layout must be for the {transport.world_size} ranks of the group, got one for "
                f"{self.layout.world_size}"
            )
        object.__setattr__(self, "transport", transport)

    @property
    def rank(self) -> int:
        """In the group."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    @property
    def tokens(self) -> int:
        """That this rank holds."""
        return self.layout.counts[self.rank]

    @property
    def positions(self) -> Tensor:
        """The global positions of this rank's tokens: (tokens,) int64, on the CPU."""
        return self.layout.positions(self.rank)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor of the whole sequence. ValueError for another length along `dim`."""
        return self.layout.shard(x, self.rank, dim)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, scale: float | None = None, name: str | None = None
    ) -> Tensor:
        """`ring_attention` on this rank's shards: q (B, N, H, D), k and v (B, N, Hk, D) -> like q."""
        out = ring_attention(
            q, k, v, pattern, self.layout, group=self.group, exchange=self.exchange, bucket=self.bucket,
            kernel=self.kernel, scale=scale, check=self.check, name=name,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out
