"""The Observation of one rank: made in the ranks by `verification.run.rank`, checked by `verification.check.checks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reference.fast_oracle import QUANTITIES
from reference.shards import Ints
from verification.run.memory_meter import Workspace

RecordedMessage = tuple[int, int, Any]  # peer (index in the group), bytes, label
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class LayoutAnswers:
    """The answers of a rank's `Layout`.

    positions  of this rank, (L,); counts: tokens of every rank
    sharded    `shard` of the numbers 0 .. n - 1 on this rank, (L,)
    place      `unshard` of the same numbers, cut by the counts: the index of each position, (n,)
    bucket     tokens of the default bucket for shards of 0 and LONGER tokens, since most drawn Cases are too short for
               more than the smallest bucket
    """

    positions: Ints
    counts: tuple[int, ...]
    sharded: Ints
    place: Ints
    bucket: int


LONGER = 65536
RESULTS = (*QUANTITIES, "dsinks")


@dataclass(frozen=True, eq=False)
class Observation:
    """Results, messages and memory of one rank.

    out, dq, dk, dv    its shards, (B, L, H, D) and (B, L, Hk, D); gradients are None if the Case has no backward
    lse                (B, H, L), None if the Case has it unused
    dsinks             (H,), summed over the rank's rows; None without sinks or backward
    dtypes             names of the results' types, in the order of RESULTS
    sent_, received_   messages, in the order in which they were posted
    buffer_            peak bytes of communication buffers
    repeat_equal       a second run gave the same bits and sent the same messages; inputs_unchanged: bit for bit
    workspace_         None unless the Case is measured
    one_sided          ranks write into each other's memory, as GPUs of one host do
    """

    layout: LayoutAnswers
    out: Floats
    lse: Floats | None
    dq: Floats | None
    dk: Floats | None
    dv: Floats | None
    dtypes: tuple[str, ...]
    sent_forward: tuple[RecordedMessage, ...]
    received_forward: tuple[RecordedMessage, ...]
    sent_backward: tuple[RecordedMessage, ...]
    received_backward: tuple[RecordedMessage, ...]
    buffer_forward: int
    buffer_backward: int
    inputs_unchanged: bool
    repeat_equal: bool
    workspace_forward: Workspace | None
    workspace_backward: Workspace | None
    dsinks: Floats | None = None
    one_sided: bool = False


Observations = Sequence[Observation]


def to_numpy(x: torch.Tensor) -> Floats:
    """Convert to a NumPy array that travels between processes: 16-bit types become float32."""
    x = x.detach()
    return np.asarray((x.float() if x.dtype.itemsize == 2 else x).cpu().numpy())
