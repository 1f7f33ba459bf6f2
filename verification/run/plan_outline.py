"""One rank's plan as plain integers, for laws about plans: nothing is computed or sent, so sizes cost nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reference.shards import Ints
from ring import Layout
from ring.comm.transport import Transport
from ring.plan.plan import Plan, plan_of
from ring.plan.rows import Rows
from ring.plan.tile import Tile
from verification.case import Case
from verification.run.layouts import layout_of

Heads = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Strip:
    """Rows of a shard, or slots: those of fold f and of the head group g are start + f * fold_step + g * head_step + i
    * step for i below length, or index[f, i] + g * head_step where they are listed, (folds, length) int64.
    """

    start: int
    step: int
    length: int
    fold_step: int
    folds: int
    head_step: int
    index: Ints | None

    @property
    def tokens(self) -> int:
        """Of all folds."""
        return self.folds * self.length

    def listed(self, groups: int) -> Ints:
        """(folds, groups, length) int64."""
        of_fold = self.start + self.fold_step * np.arange(self.folds)[:, None] + self.step * np.arange(self.length)
        first: Ints = of_fold if self.index is None else self.index
        return first[:, None] + self.head_step * np.arange(groups)[:, None]


@dataclass(frozen=True, eq=False)
class CallOutline:
    """A kernel call. stage: 0 for those of own keys. mask: "FULL", "CAUSAL" or "POSITION". Heads are (groups,
    per_group). Positions, (folds, rows) int64, are there where the mask asks for them.
    """

    stage: int
    mask: str
    queries: Strip
    keys: Strip
    query_heads: Heads
    key_heads: Heads
    query_positions: NDArray[np.int64] | None
    key_positions: NDArray[np.int64] | None

    @property
    def pairs(self) -> int:
        """(query head, query, key) that the mask lets through."""
        heads = len(self.query_heads) * len(self.query_heads[0])
        if self.mask == "CAUSAL":
            return heads * self.queries.folds * self.queries.length * (self.queries.length + 1) // 2
        if self.query_positions is None or self.key_positions is None:
            return heads * self.queries.folds * self.queries.length * self.keys.length
        return heads * int((self.key_positions[:, None, :] <= self.query_positions[:, :, None]).sum())


@dataclass(frozen=True, eq=False)
class PlanOutline:
    """counts: tokens of all ranks. sent, returned: (stage, peer, slots) of every message, of keys and of gradients.
    sizes: slots of a receive buffer, of the send buffer, and of the buffer of returned gradients.
    """

    counts: tuple[int, ...]
    sent: tuple[tuple[int, int, int], ...]
    returned: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, int, int]
    calls: tuple[CallOutline, ...]


def outline(transport: Transport, case: Case, *others: tuple[Case, int | None]) -> list[PlanOutline]:
    """Task: the plan of each Case, which has a bucket, on this rank. With each, the key/value tokens of a call that
    takes several segments of own keys; None: the bucket. The first Case only says which ranks take part.
    """
    return [_outline(plan_on(one, transport.rank, own)) for one, own in others]


def plan_on(case: Case, rank: int, own: int | None) -> tuple[Layout, Plan]:
    layout = layout_of(case)
    assert case.bucket is not None
    return layout, plan_of(case.pattern, layout, rank, case.heads, case.kv_heads, case.exchange, case.bucket, own)


def refusals(transport: Transport, case: Case, lengths: tuple[int, ...]) -> list[str]:
    """Task: what is said to layouts of so many tokens, each made in every way that lists none; "" where it is made."""
    said = []
    for n in lengths:
        for make in (Layout.contiguous, Layout.zigzag, Layout.striped):
            said.append(_said(lambda make=make, n=n: make(n, transport.world_size)))
        said.append(_said(lambda n=n: Layout.from_cuts(range(n), (0,) * transport.world_size + (n,))))
    return said


def _said(make: Any) -> str:
    try:
        make()
    except Exception as error:  # of any type: its name is part of what is said
        return f"{type(error).__name__}: {error}"
    return ""


def _outline(made: tuple[Layout, Plan]) -> PlanOutline:
    layout, plan = made
    stages = (plan.local, *(step.tiles for step in plan.steps))
    return PlanOutline(
        counts=layout.counts,
        sent=tuple((i, t.peer, t.stop - t.start) for i, step in enumerate(plan.steps) for t in step.sends),
        returned=tuple((i, t.peer, t.stop - t.start) for i, step in enumerate(plan.steps) for t in step.return_sends),
        sizes=(plan.sizes.receive, plan.sizes.send, plan.sizes.returned),
        calls=tuple(_call(stage, tile) for stage, tiles in enumerate(stages) for tile in tiles),
    )


def _call(stage: int, tile: Tile) -> CallOutline:
    return CallOutline(
        stage, tile.mask.name, _strip(tile.query_rows), _strip(tile.key_rows), tile.query_heads.listed(),
        tile.key_heads.listed(), _array(tile.query_positions), _array(tile.key_positions),
    )  # fmt: skip


def _strip(rows: Rows) -> Strip:
    return Strip(rows.start, rows.step, rows.length, rows.fold_step, rows.folds, rows.head_step, _array(rows.index))


def _array(x: torch.Tensor | None) -> NDArray[np.int64] | None:
    return None if x is None else x.numpy()
