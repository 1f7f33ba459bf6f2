"""A row of the conformance table: every column of one implementation, each cell judged on its own."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from verification.case import Case
from verification.case_line import write_case_line
from verification.check.attention_on_ranks import AttentionOnRanks, Implementation
from verification.failures import Refused, VerificationFailure
from verification.peers.conformance import memory, traffic
from verification.peers.conformance.columns import COLUMNS, Column
from verification.peers.known_peers import KNOWN, load
from verification.peers.peer import Peer
from verification.peers.peer_experiment import REHEARSED, experiment, implementation, peer_law, rehearse
from verification.peers.probe import probe
from verification.protocols import CaseLike
from verification.record_kinds import Record
from verification.report.counter_example import CounterExample
from verification.run.backends import Backend, GlooBackend, Task
from verification.runner import RunPlan, save
from verification.search.experiment import Experiment, ToolError
from verification.search.search import Search

HELD, FAILED, NOT_CLAIMED, NOT_RUN = "held", "counter-example", "not claimed", "not run"
MEMORY, BYTES = "memory O(n/p)", "bytes sent"
# What chooses the Cases, measures on each rank, and judges the answers of all.
MEASURES: dict[str, tuple[Callable[..., dict[int, list[Case]]], Task, Callable[..., memory.Judged]]] = {
    MEMORY: (memory.problems, memory.peak_on_rank, memory.judged),
    BYTES: (traffic.problems, traffic.sent_on_rank, traffic.judged),
}
NAMES = (*(column.name for column in COLUMNS), *MEASURES)
RING = "verification.peers.adapters.own_ring:adapter"
ADAPTERS = {"ring": RING} | {name: name for name in ("verification.peers.example:adapter", *KNOWN)}
WORLDS = (2, 3)  # ranks of the searches


@dataclass
class Cell:
    """A cell. examples: that held. reason: why there is no verdict, or the numbers behind one; shown: these, in short.
    Of a counter-example: its smallest Case, what it breaks, in words, and the command that replays it."""

    column: str
    verdict: str = NOT_CLAIMED
    examples: int = 0
    reason: str = ""
    case: Mapping[str, Any] | None = None
    check: str | None = None
    message: str | None = None
    replay: str | None = None
    shown: str = ""

    def leave_out(self, reason: str) -> None:
        """Say why it is not run; a counter-example stays."""
        if self.verdict != FAILED:
            self.verdict, self.reason = NOT_RUN, reason


@dataclass
class Row:
    """An implementation with its cells, by column. name: as users write it."""

    name: str
    version: str | None = None
    supported: str = ""
    seconds: float = 0.0
    cells: dict[str, Cell] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON."""
        return vars(self) | {"seconds": round(self.seconds, 1), "cells": [vars(cell) for cell in self.cells.values()]}


class _Silent:
    """Listener of a search whose outcome is a cell."""

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None: ...
    def covered(self, case: CaseLike) -> None: ...
    def met(self, failure: VerificationFailure) -> None: ...
    def failed_again(self) -> None: ...


def run_row(name: str, plan: RunPlan, reason: str = "") -> Row:
    """Run the columns of `plan.only`, or all, on the implementation of that name. reason: why it cannot be run."""
    started, row, adapter = time.perf_counter(), Row(name), ADAPTERS.get(name, name)
    row.cells = {column: Cell(column) for column in NAMES if not plan.only or column in plan.only}
    try:
        if reason:
            raise Refused(reason)
        if adapter in KNOWN:  # its claim is known even if its package is not installed
            row.version, row.supported = load(adapter).version, load(adapter).supported
        probe(adapter, ready=rehearse)
        peer = load(adapter)
        row.version, row.supported = peer.version, peer.supported
        worlds = [world for world in plan.worlds or peer.worlds if world in peer.worlds]
        if not worlds:
            raise Refused(f"{peer.name} supports {', '.join(map(str, peer.worlds))} ranks, none of which --world names")
        _run(row, adapter, peer, worlds, plan)
    except (Refused, ToolError) as error:
        for cell in row.cells.values():
            cell.leave_out(str(error))
    row.seconds = time.perf_counter() - started
    return row


def _run(row: Row, adapter: str, peer: Peer, worlds: Sequence[int], plan: RunPlan) -> None:
    """Run searches from the fewest ranks on, up to a cell's first counter-example, and measurements on the same."""
    attention = implementation(adapter)
    searched = worlds if plan.worlds else [world for world in worlds if world in WORLDS] or worlds[:1]
    subjects = {
        column: on for column in COLUMNS if column.name in row.cells
        if (on := _claimed(row.cells[column.name], column, peer, attention, searched))
    }  # fmt: skip
    measured = {name: _measured(row.cells[name], peer, attention, worlds) for name in MEASURES if name in row.cells}
    answers: dict[str, list[tuple[Case, list[Any]]]] = {name: [] for name, on in measured.items() if on}
    with closing(GlooBackend()) as backend:
        experiment(adapter).prepare(backend)
        for world in sorted({*searched, *(world for on in measured.values() for world in on)}):
            searches = [x for x, on in subjects.items() if world in on and row.cells[x.name].verdict != FAILED]
            cases = [(name, case) for name in answers for case in measured[name].get(world, ())]
            if searches or cases:
                backend.start(world)
            for column in searches:
                _search(row.cells[column.name], _experiment(adapter, column, attention), backend, world, plan)
            for name, case in cases:
                try:
                    if name in answers:
                        backend.submit(MEASURES[name][1], case, adapter)
                        answers[name].append((case, backend.collect()))
                except VerificationFailure as failure:
                    row.cells[name].leave_out(f"the call that is measured fails: {failure}")
                    del answers[name]
    worlds_again = f" --world {','.join(map(str, plan.worlds))}" if plan.worlds else ""
    for name, of_cases in answers.items():
        again = f"python -m verification conformance {shlex.quote(row.name)} --only {name.split()[0]}{worlds_again}"
        _judge(row.cells[name], of_cases, again)


def _claimed(cell: Cell, column: Column, peer: Peer, attention: Implementation, worlds: Iterable[int]) -> list[int]:
    """Return the ranks on which some of a few Cases of the column are claimed; if there are none, the cell says why."""
    if column.law is not None and not peer.same_bits:
        cell.reason = "it promises no bits"
        return []
    quickly = settings(
        max_examples=REHEARSED, phases=[Phase.generate], database=None, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    claimed = set[int]()

    def note(case: Case) -> None:
        claimed.add(case.world)

    for world in worlds:
        try:
            quickly(given(column.draw(world, attention.claims))(note))()
        except Unsatisfiable:
            continue
        except ToolError as error:
            cell.leave_out(str(error))
            return []
    cell.reason = "" if claimed else f"the claim leaves no Case with {column.about}"
    return sorted(claimed)


def _experiment(adapter: str, column: Column, attention: Implementation) -> Experiment:
    """Return the search of a cell."""
    if column.law is not None:
        return peer_law(adapter, column.law)

    def check(backend: Backend, case: Case) -> dict[str, float]:
        ranks = AttentionOnRanks(backend, attention)
        observations, expectation = ranks.observe_and_expect(case, repeat="repeat" in column.checks)
        return column.judge(case, expectation, observations)

    def validate(case: Case) -> None:
        own.validate(case)
        column.validate(case)

    own: Any = experiment(adapter)
    draw = partial(column.draw, claims=attention.claims)
    return replace(own, name=f"{own.name}, {column.name}", draw=draw, check=check, validate=validate)


def _search(cell: Cell, experiment: Experiment, backend: Backend, world: int, plan: RunPlan) -> None:
    """Draw the examples of a cell on these ranks; keep its first counter-example."""
    search = Search(experiment, backend, _Silent(), world, plan.profile.budget, others=0.0)
    try:
        found = search.explore(plan.examples_for(world), plan.seed)
    except ToolError as error:
        return cell.leave_out(str(error))
    cell.examples += search.examples
    if found:
        failure = save(found[0], search, plan.failures)
        cell.case, cell.check, cell.message = Record.from_dict(failure.record).case, failure.broken, failure.message
        cell.verdict, cell.replay = FAILED, _replay(failure)
    elif search.examples and cell.verdict == NOT_CLAIMED:
        cell.verdict = HELD


def _replay(failure: CounterExample) -> str:
    """Return the command that replays a counter-example: of a Case alone by its line, which needs no file."""
    record = Record.from_dict(failure.record)
    line = write_case_line(Case.from_dict(record.case)) if record.kind == "peer" and record.before == () else None
    if line is not None:
        return shlex.join(("python", "-m", "verification", "peers", record.names["peer"], "--case", line))
    return shlex.join(("python", *failure.command[1:-1], os.path.relpath(failure.file)))


def _measured(cell: Cell, peer: Peer, attention: Implementation, worlds: Sequence[int]) -> dict[int, list[Case]]:
    """Return the Cases of a cell that is measured, by their ranks; if there are none, it says why."""
    try:
        if peer.arrays == "jax" and cell.column == MEMORY:
            raise Refused("JAX allocates its arrays itself, where neither torch nor tracemalloc see them")
        return MEASURES[cell.column][0](attention, worlds)
    except (Refused, ToolError) as error:
        cell.leave_out(str(error))
        return {}


def _judge(cell: Cell, measured: Sequence[tuple[Case, list[Any]]], replay: str) -> None:
    """Judge the answers of all ranks to each Case."""
    try:
        case, cell.reason, broken, cell.shown = MEASURES[cell.column][2](measured)
    except Refused as error:
        return cell.leave_out(str(error))
    cell.verdict, cell.examples = HELD, len(measured)
    if broken:
        cell.verdict, cell.check, cell.message = FAILED, cell.column.split()[0], f"{broken}: {cell.reason}"
        cell.case, cell.replay = case.to_dict(), replay
