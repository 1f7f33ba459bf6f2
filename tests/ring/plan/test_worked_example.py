"""The example of `ring.plan` that goes through the docstrings of its modules: every table in them, computed.

A table is a block of indented lines with equally many cells, which stand two or more spaces apart, and with numbers in
it. A table that is not computed here, or that the code no longer makes, fails.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ring.plan
from reference.pattern import Pattern
from ring import layout
from ring.layout import Layout
from ring.plan import blocks, chunks, diagonal, needs, pieces, plan, range_pairs, ranges, rows, schedule, tile, tiling
from ring.plan.range_pairs import pair_up
from ring.plan.ranges import Ranges, Subranges
from ring.plan.rows import Rows

PATTERN = Pattern.longnet(segment_lengths=(8,), dilation_rates=(2,), heads=2, causal=True)
LAYOUT = Layout.zigzag(16, 2)
TABLE = ranges.ranges_of(PATTERN, LAYOUT, 2, 2)

Line = tuple[str, ...]


def tables(text: str | None) -> list[list[Line]]:
    """Header and rows of every table."""
    found = []
    for block in re.split(r"\n\s*\n", cleandoc(text or "")):
        lines = [tuple(re.split(r"\s{2,}", line.strip())) for line in block.splitlines()]
        numbers = any(re.fullmatch(r"-?\d+( -?\d+)*", cell) for line in lines for cell in line)
        if len(lines) > 1 and all(line.startswith("    ") for line in block.splitlines()) and numbers:
            widths = {len(line) for line in lines}
            assert len(widths) == 1, f"rows of unequal length: {block}"
            found.append(lines)
    return found


def cell(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(map(str, np.ravel(value).tolist()))


def lines(values: Iterable[Iterable[Any]]) -> list[Line]:
    return [tuple(map(cell, line)) for line in values]


def step(rank: int, heads: int = 2) -> tuple[plan.Plan, plan.Step]:
    pattern = Pattern.longnet((8,), (2,), heads=heads, causal=True)
    found = plan.plan_of(pattern, LAYOUT, rank, heads=heads, kv_heads=heads, exchange="direct", bucket=8)
    (only,) = found.steps
    return found, only


def elements(subranges: Subranges, i: int) -> np.ndarray:
    return subranges.first[i] + np.arange(subranges.count[i])


def positions(of: Ranges, subranges: Subranges, i: int) -> np.ndarray:
    return of.position(np.full(subranges.count[i], subranges.range[i]), elements(subranges, i))


# --- each module's tables ---


def shards() -> Iterator[Any]:
    yield lines((rank, LAYOUT.positions(rank).numpy()) for rank in range(2))


def runs() -> Iterator[Any]:
    yield lines(
        (rank, *run, run.start + run.step * np.arange(run.length))
        for rank in range(2)
        for run in LAYOUT.shard_runs(rank)
    )


def of_blocks() -> Iterator[Any]:
    found = []
    for number, block in enumerate(blocks.blocks_of(PATTERN, 16, 2, 2)):
        (group,) = block.head_groups
        grid = block.segment_length, block.dilation_rate, block.offset
        found.append((number, *grid, group.query.listed(), group.key.listed()))
    yield lines(found)


def of_ranges() -> Iterator[Any]:
    columns = [getattr(TABLE, name) for name in ranges.COLUMNS]
    yield lines((number, *line) for number, line in enumerate(zip(*columns, strict=True)))


def of_range_pairs() -> Iterator[Any]:
    everything = Subranges.whole(TABLE, np.flatnonzero(TABLE.block == 0))
    (found,) = pair_up(TABLE, everything, everything, causal=True)
    q, k = found.query, found.key
    yield lines((q.range[i], positions(TABLE, q, i), k.range[i], positions(TABLE, k, i)) for i in range(len(found)))
    other = Subranges.whole(TABLE, np.flatnonzero(TABLE.block == 1))
    (same,) = pair_up(TABLE, other, other, causal=True)
    assert (same.query.range == q.range + 4).all() and (same.key.range == k.range + 4).all()


def of_needs() -> Iterator[Any]:
    found = needs.needs_of(TABLE, True)
    yield lines(zip(found.rank, found.range, found.first, found.count, strict=True))


def of_chunks() -> Iterator[Any]:
    asked = schedule._requests(TABLE, LAYOUT, True, 2)
    whole, cut = asked.whole, asked.cut
    assert len(whole.entries.message) == len(cut.entries.message) == 4
    yield lines(
        (
            whole.entries.message[i] // 2,
            whole.entries.subranges.range[i],
            elements(whole.entries.subranges, i),
            whole.slot[i],
            cut.chunk[i],
            cut.slot[i],
        )
        for i in range(4)
    )


def of_schedule() -> Iterator[Any]:
    (stage,) = schedule.direct(TABLE, LAYOUT, True, rank=0, most=16).stages
    assert stage.return_sends == stage.receives and stage.return_receives == stage.sends
    yield lines(
        (name, found.subranges.range[i], elements(found.subranges, i), found.slot[i])
        for name, found in (("sent", stage.gathers), ("received", stage.received))
        for i in range(len(found.slot))
    )


def of_rows() -> Iterator[Any]:
    own = TABLE.take(np.flatnonzero((TABLE.rank == 0) & (TABLE.block == 0)))
    (fold,) = rows.folds((own.count, own.row_step), own.segment, own.row, own.row, np.full(2, 2))
    assert fold.members.tolist() == [0, 1]
    found = Rows(int(own.row[0]), int(own.row_step[0]), int(own.count[0]), fold.left_step, folds=2)
    of_fold = found.listed()
    yield lines([(found.start, found.step, found.length, found.fold_step, found.folds, of_fold[0], of_fold[1])])


def of_tile() -> Iterator[Any]:
    whole, only = step(0, heads=1)
    for (one,) in (whole.local, only.tiles):
        heads = one.mask.name, one.query_heads.listed(), one.key_heads.listed()
        yield lines([(*heads, *one.query_rows.listed(), *one.key_rows.listed())])


def of_diagonal() -> Iterator[Any]:
    whole, only = step(0)
    found = []
    for name, (one,) in (("own", whole.local), ("received", only.tiles)):
        found.append((name, one.query_heads.listed(), *of_heads(one.query_rows), *of_heads(one.key_rows)))
        assert one.key_heads.listed() == (((0,), (1,)) if name == "own" else ((0,), (0,)))
    yield lines(found)


def of_heads(x: Rows) -> tuple[np.ndarray, np.ndarray]:
    return x.listed(), x.listed() + x.head_step


def of_tiling() -> Iterator[Any]:
    route = schedule.direct(TABLE, LAYOUT, True, rank=0, most=16)
    own = Subranges.whole(TABLE, np.flatnonzero(TABLE.rank == 0))
    found = []
    for keys in (tiling._own_keys(TABLE, 0), tiling._received_keys(TABLE, LAYOUT, route, 0, 2)):
        (pairs,) = pair_up(TABLE, own, keys.subranges, causal=True)
        for mask, part in tiling.masked(TABLE, pairs):
            at = tiling._Addresses.of(TABLE, keys, part)
            for i in range(len(part)):
                query = at.query[i] + at.query_step[i] * np.arange(part.query.count[i])
                key = at.key[i] + at.key_step[i] * np.arange(part.key.count[i])
                numbers = part.query.range[i], part.key.range[i]
                found.append((keys.stage[part.item[i]], mask.name, *numbers, query, key))
    yield lines(found)
    assert sum(len(whole.local) + len(only.tiles) for whole, only in [step(0)]) == 2, "kernel calls"


def of_pieces() -> Iterator[Any]:
    runs = ranges._runs_of(LAYOUT)[:2]
    alone = pieces.Pieces.of(runs, pieces.DocumentTable.of(None, LAYOUT.n))
    assert (alone.row == runs[:, 1]).all() and (alone.start == runs[:, 2]).all() and not alone.origin.any()
    cut = pieces.Pieces.of(runs, pieces.DocumentTable.of((3, 1, 0, 12), LAYOUT.n))
    held = [range(start, start + length) for _, _, start, _, length in runs.tolist()]
    yield lines(
        (next(run for run in held if at[0] in run), cut.document[i], cut.origin[i], cut.start[i], cut.length[i], at)
        for i, at in enumerate(
            cut.origin[i] + cut.start[i] + cut.step[i] * np.arange(cut.length[i]) for i in range(len(cut.rank))
        )
    )


def of_plan() -> Iterator[Any]:
    whole, only = step(0)
    tiles = [("own", one) for one in whole.local] + [("received", one) for one in only.tiles]
    yield lines((name, one.mask.name, one.query_heads.listed(), *of_heads(one.query_rows)) for name, one in tiles)
    gathered, scattered = (
        lines((one.rows.listed(), one.heads.listed(), one.slots.listed()) for one in found)
        for found in (only.gathers, only.scatters)
    )
    assert gathered == scattered
    yield gathered


EXAMPLES = (
    (ring.plan, shards), (layout, runs), (blocks, of_blocks), (pieces, of_pieces), (ranges, of_ranges),
    (range_pairs, of_range_pairs), (needs, of_needs), (chunks, of_chunks), (schedule, of_schedule), (rows, of_rows),
    (tile, of_tile), (diagonal, of_diagonal), (tiling, of_tiling), (plan, of_plan),
)  # fmt: skip


@pytest.mark.parametrize(("module", "computed"), EXAMPLES, ids=lambda x: getattr(x, "__name__", None))
def test_tables_of_the_example_are_what_the_code_makes(module: ModuleType, computed: Any) -> None:
    found = tables(module.__doc__)
    assert [table[1:] for table in found] == list(computed())


def test_every_module_of_the_plan_shows_the_example() -> None:
    names = {f"ring.plan.{one.name}" for one in pkgutil.iter_modules(ring.plan.__path__)}
    assert names == {module.__name__ for module, _ in EXAMPLES} - {"ring.plan", "ring.layout"}


def test_runs_on_a_grid() -> None:
    """The table that explains the congruence: step * e = target (mod rate), for a grid that begins at position 0."""
    (table,) = tables(ranges._on_grid.__doc__)
    assert table[0] == ("start", "step", "rate", "target", "cycle", "phase", "on the grid")
    for start, step_, rate, *shown in table[1:]:
        target = np.array([-int(start)])
        cycle, phase, some = ranges._on_grid(np.array([int(step_)]), target, int(rate))
        on_grid = int(start) + int(step_) * (phase + cycle * np.arange(3))
        assert not some or (on_grid % int(rate) == 0).all()
        computed = (target, cycle, phase, on_grid) if some else (target, "-", "-", "-")
        assert [*shown] == [*map(cell, computed)]
