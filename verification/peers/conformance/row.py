"""A row of the conformance table: every column of one implementation, each cell judged on its own."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from verification.case import Case
from verification.case_line import write_case_line
from verification.check.attention_on_ranks import AttentionOnRanks, Implementation
from verification.failures import Refused, VerificationFailure
from verification.peers.conformance import memory
from verification.peers.conformance.columns import COLUMNS, Column
from verification.peers.known_peers import KNOWN, load
from verification.peers.peer import Peer
from verification.peers.peer_experiment import (
    REHEARSED,
    experiment,
    implementation,
    must_be_claimed,
    peer_law,
    rehearse,
)
from verification.peers.probe import probe
from verification.protocols import CaseLike
from verification.record_kinds import Record
from verification.report.counter_example import CounterExample
from verification.run.backends import Backend, GlooBackend
from verification.runner import RunPlan, save
from verification.search.experiment import Experiment, ToolError
from verification.search.search import Search

HELD, FAILED, NOT_CLAIMED, NOT_RUN = "held", "counter-example", "not claimed", "not run"
MEMORY = "memory O(n/p)"
NAMES = (*(column.name for column in COLUMNS), MEMORY)
RING = "verification.peers.adapters.own_ring:adapter"
ADAPTERS = {"ring": RING} | {name: name for name in ("verification.peers.example:adapter", *KNOWN)}
WORLDS = (2, 3)  # ranks of the searches


@dataclass
class Cell:
    """A cell. examples: that held. reason: why there is no verdict, or the numbers behind one. The rest is that of a
    counter-example: its smallest Case, what it breaks, in words, and the command that replays it."""

    column: str
    verdict: str = NOT_CLAIMED
    examples: int = 0
    reason: str = ""
    case: Mapping[str, Any] | None = None
    check: str | None = None
    message: str | None = None
    replay: str | None = None

    def fail(self, check: str, message: str, replay: str, case: Mapping[str, Any] | None) -> None:
        """Take a counter-example."""
        self.verdict, self.check, self.message, self.replay, self.case = FAILED, check, message, replay, case


@dataclass
class Row:
    """An implementation with its cells, by column. name: as users write it."""

    name: str
    adapter: str
    version: str | None = None
    supported: str = ""
    seconds: float = 0.0
    cells: dict[str, Cell] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON."""
        return vars(self) | {"seconds": round(self.seconds, 1), "cells": [vars(cell) for cell in self.cells.values()]}


class _Silent:
    """Listener of searches whose outcome is a cell alone."""

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None: ...
    def covered(self, case: CaseLike) -> None: ...
    def met(self, failure: VerificationFailure) -> None: ...
    def failed_again(self) -> None: ...


def run_row(name: str, plan: RunPlan, reason: str = "") -> Row:
    """Run the columns of `plan.only`, or all, on the implementation of that name. reason: why it cannot be run."""
    started, row = time.perf_counter(), Row(name, ADAPTERS.get(name, name))
    row.cells = {column: Cell(column) for column in NAMES if not plan.only or column in plan.only}
    try:
        if reason:
            raise Refused(reason)
        if row.adapter in KNOWN:  # its claim is known even if its package is not installed
            row.version, row.supported = load(row.adapter).version, load(row.adapter).supported
        probe(row.adapter, ready=rehearse)
        peer = load(row.adapter)
        row.version, row.supported = peer.version, peer.supported
        worlds = [world for world in plan.worlds or peer.worlds if world in peer.worlds]
        if not worlds:
            raise Refused(f"{peer.name} supports {', '.join(map(str, peer.worlds))} ranks, none of which --world names")
        _run(row, peer, worlds, plan)
    except (Refused, ToolError) as error:
        _leave_out(row.cells.values(), str(error))
    row.seconds = time.perf_counter() - started
    return row


def _leave_out(cells: Any, reason: str) -> None:
    for cell in cells:
        if cell.verdict != FAILED:
            cell.verdict, cell.reason = NOT_RUN, reason


def _run(row: Row, peer: Peer, worlds: Sequence[int], plan: RunPlan) -> None:
    """Run searches from the fewest ranks on, up to a cell's first counter-example, and measurements on the same."""
    attention = implementation(row.adapter)
    searched = worlds if plan.worlds else [world for world in worlds if world in WORLDS] or worlds[:1]
    subjects = list(_claimed(row, peer, attention, searched))
    measured: dict[bool, list[memory.Measured]] = {True: [], False: []}  # by: the same tokens on any ranks
    problems = _problems(row.cells[MEMORY], peer, attention, worlds) if MEMORY in row.cells else {}
    with closing(GlooBackend()) as backend:
        experiment(row.adapter).prepare(backend)
        for world in sorted({*searched, *problems}):
            searches = [x for x, on in subjects if world in on and row.cells[x.name].verdict != FAILED]
            if not searches and world not in problems:
                continue
            backend.start(world)
            for column in searches:
                _search(row.cells[column.name], _experiment(row.adapter, column, attention), backend, world, plan)
            try:
                for case in problems.get(world, ()):
                    measured[case is problems[world][-1]].append(memory.measure(backend, row.adapter, case))
            except VerificationFailure as failure:
                problems = {}
                row.cells[MEMORY].fail(failure.kind, str(failure), _again(row, plan), case.to_dict())
    if problems:
        _judge_memory(row.cells[MEMORY], measured, _again(row, plan))


def _again(row: Row, plan: RunPlan) -> str:
    """Return the command that measures the memory again."""
    worlds = f" --world {','.join(map(str, plan.worlds))}" if plan.worlds else ""
    return f"python -m verification conformance {shlex.quote(row.name)} --only memory{worlds}"


def _claimed(
    row: Row, peer: Peer, attention: Implementation, worlds: Sequence[int]
) -> Iterator[tuple[Column, list[int]]]:
    """Yield the columns with Cases that the claim leaves, with their ranks."""
    for column in (column for column in COLUMNS if column.name in row.cells):
        cell = row.cells[column.name]
        try:
            if column.law is not None and not peer.same_bits:
                cell.reason = "it promises no bits"
                continue
            on = [world for world in worlds if column.law or _leaves_some(column, world, attention)]
        except ToolError as error:
            cell.verdict, cell.reason = NOT_RUN, str(error)
            continue
        cell.reason = "" if on else f"the claim leaves no Case with {column.about}"
        if on:
            yield column, on


def _leaves_some(column: Column, world: int, attention: Implementation) -> bool:
    """Return True if some Cases of the column are claimed on these ranks."""
    quickly = settings(
        max_examples=REHEARSED, phases=[Phase.generate], database=None, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    drawn: list[Case] = []

    def draw(case: Case) -> None:
        drawn.append(case)

    try:
        quickly(given(column.draw(world, attention.claims))(draw))()
    except Unsatisfiable:
        return False
    return bool(drawn)


def _experiment(name: str, column: Column, attention: Implementation) -> Experiment:
    """Return the search of a cell."""
    if column.law is not None:
        return peer_law(name, column.law)

    def check(backend: Backend, case: Case) -> dict[str, float]:
        ranks = AttentionOnRanks(backend, attention)
        observations, expectation = ranks.observe_and_expect(case, repeat="repeat" in column.checks)
        return column.judged(case, expectation, observations)

    def validate(case: Case) -> None:
        must_be_claimed(attention, case)
        column.validate(case)

    own = experiment(name)
    draw = partial(column.draw, claims=attention.claims)
    return replace(own, name=f"{own.name}, {column.name}", draw=draw, check=check, validate=validate)


def _search(cell: Cell, experiment: Experiment, backend: Backend, world: int, plan: RunPlan) -> None:
    """Draw the examples of a cell on these ranks; keep its first counter-example."""
    search = Search(experiment, backend, _Silent(), world, plan.profile.budget, others=0.0)
    try:
        found = search.explore(plan.examples_for(world), plan.seed)
    except ToolError as error:
        cell.verdict, cell.reason = NOT_RUN, str(error)
        return
    cell.examples += search.examples
    if found:
        failure = save(found[0], search, plan.failures)
        cell.fail(failure.broken, failure.message, _replay(failure), Record.from_dict(failure.record).case)
    elif search.examples:
        cell.verdict = HELD


def _replay(failure: CounterExample) -> str:
    """Return the command that replays a counter-example: of a Case alone by its line, which needs no file."""
    record = Record.from_dict(failure.record)
    line = write_case_line(Case.from_dict(record.case)) if record.kind == "peer" and record.before == () else None
    if line is not None:
        return shlex.join(("python", "-m", "verification", "peers", record.names["peer"], "--case", line))
    _, *words, file = failure.command
    return shlex.join(("python", *words, os.path.relpath(Path(file))))


def _problems(cell: Cell, peer: Peer, attention: Implementation, worlds: Sequence[int]) -> dict[int, list[Case]]:
    """Return the Cases whose memory is measured, by their ranks; none, and why, where there are no such."""
    try:
        if peer.arrays == "jax":
            raise Refused("JAX allocates its arrays itself, where neither torch nor tracemalloc see them")
        return memory.problems(attention, worlds)
    except (Refused, ToolError) as error:
        cell.verdict, cell.reason = NOT_RUN, str(error)
        return {}


def _judge_memory(cell: Cell, measured: Mapping[bool, Sequence[memory.Measured]], replay: str) -> None:
    grown, allowed = memory.growth(measured[False])
    (few, *_, many), (first, second) = measured[True], measured[False]
    cell.reason = (
        f"peak x{many.peak / few.peak:.2f} from {few.case.world} to {many.case.world} ranks with {few.case.tokens} "
        f"tokens; x{second.peak / first.peak:.2f} from {first.case.world} to {second.case.world} ranks with "
        f"{first.case.tokens // first.case.world} tokens each ({first.peak:,} to {second.peak:,} bytes; one head of "
        f"the further keys has {allowed:,})"
    )
    cell.verdict, cell.examples = HELD, sum(map(len, measured.values()))
    if grown >= allowed:
        cell.fail("memory", f"not O(n/p): {cell.reason}", replay, second.case.to_dict())
