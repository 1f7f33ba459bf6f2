"""What one rank saw of one example: made in the ranks by `verification.run.rank`, checked by
`verification.check.checks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reference.shards import Ints
from verification.run.memory_meter import Workspace

Message = tuple[int, int, Any]  # peer (index in the group), bytes, label
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Division:
    """What a rank's `Layout` says, of itself and of all.

    positions  that it gives for this rank, (L,); counts: of every rank
    sharded    what `shard` makes of the numbers 0 .. n - 1 on this rank, (L,)
    place      what `unshard` makes of the same numbers, cut by the counts: of each position its place, (n,)
    bucket     tokens of the default bucket where the largest shard had LONGER tokens, another one none: most drawn
               Cases are too short for more than the least one
    """

    positions: Ints
    counts: tuple[int, ...]
    sharded: Ints
    place: Ints
    bucket: int


LONGER = 65536


@dataclass(frozen=True, eq=False)
class Observation:
    """What one rank saw. Arrays as `carry` makes them: its shard of out, dq (B, L, H, D), dk, dv (B, L, Hk, D), lse
    (B, H, L), None exactly if the Case has it unused.

    dtypes: names of the results' types, in the order of QUANTITIES. Messages are in the order in which they were
    posted. Buffers: peak bytes of communication buffers. inputs_unchanged: bit for bit. repeat_equal: a second run gave
    the same bits and sent the same. Workspaces are there exactly if the Case is measured.
    """

    layout: Division
    out: Floats
    lse: Floats | None
    dq: Floats
    dk: Floats
    dv: Floats
    dtypes: tuple[str, ...]
    sent_forward: tuple[Message, ...]
    received_forward: tuple[Message, ...]
    sent_backward: tuple[Message, ...]
    received_backward: tuple[Message, ...]
    buffer_forward: int
    buffer_backward: int
    inputs_unchanged: bool
    repeat_equal: bool
    workspace_forward: Workspace | None
    workspace_backward: Workspace | None


Observations = Sequence[Observation]


def carry(x: torch.Tensor) -> Floats:
    """The same numbers as a NumPy array that travels between processes: 16-bit types as float32, others as they are."""
    x = x.detach()
    return np.asarray((x.float() if x.dtype.itemsize == 2 else x).cpu().numpy())
