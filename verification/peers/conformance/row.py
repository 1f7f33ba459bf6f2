"""A row of the conformance table: every column of one implementation, each cell judged on its own."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
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
from verification.peers.conformance.columns import COLUMNS, Column
from verification.peers.conformance.memory import peak_on_rank, problems
from verification.peers.known_peers import KNOWN, load
from verification.peers.peer import Peer
from verification.peers.peer_experiment import REHEARSED, experiment, implementation, peer_law, rehearse
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
    attention, peaks = implementation(adapter), list[tuple[Case, int]]()
    searched = worlds if plan.worlds else [world for world in worlds if world in WORLDS] or worlds[:1]
    subjects = {
        column: on for column in COLUMNS if column.name in row.cells
        if (on := _claimed(row.cells[column.name], column, peer, attention, searched))
    }  # fmt: skip
    memory = row.cells.get(MEMORY)
    measured = _measured(memory, peer, attention, worlds) if memory else {}
    with closing(GlooBackend()) as backend:
        experiment(adapter).prepare(backend)
        for world in sorted({*searched, *measured}):
            searches = [x for x, on in subjects.items() if world in on and row.cells[x.name].verdict != FAILED]
            if searches or world in measured:
                backend.start(world)
            for column in searches:
                _search(row.cells[column.name], _experiment(adapter, column, attention), backend, world, plan)
            for case in measured.get(world, ()):
                try:
                    backend.submit(peak_on_rank, case, adapter)
                    peaks.append((case, max(backend.collect())))
                except VerificationFailure as failure:
                    row.cells[MEMORY].leave_out(f"the call that is measured fails: {failure}")
                    measured = {}
                    break
    if memory and measured:
        worlds_again = f" --world {','.join(map(str, plan.worlds))}" if plan.worlds else ""
        again = f"python -m verification conformance {shlex.quote(row.name)} --only memory{worlds_again}"
        _judge_memory(memory, peaks, again)


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
    """Return the Cases whose memory is measured, by their ranks; if there are none, the cell says why."""
    try:
        if peer.arrays == "jax":
            raise Refused("JAX allocates its arrays itself, where neither torch nor tracemalloc see them")
        return problems(attention, worlds)
    except (Refused, ToolError) as error:
        cell.leave_out(str(error))
        return {}


def _judge_memory(cell: Cell, peaks: Sequence[tuple[Case, int]], replay: str) -> None:
    """Compare the peaks of as many tokens on any ranks, and judge those of as many for each rank."""
    most = max(case.tokens for case, _ in peaks)
    (few, first), *_, (many, last) = [x for x in peaks if x[0].tokens == most]
    (before, low), (case, high) = (x for x in peaks if x[0].tokens < most)
    further = case.batch * (case.tokens - before.tokens) * case.head_dim * case.torch_dtype.itemsize
    cell.reason = (
        f"peak x{last / first:.2f} from {few.world} to {many.world} ranks with {most} tokens; x{high / low:.2f} from "
        f"{before.world} to {case.world} ranks with {case.tokens // case.world} tokens each ({low:,} to {high:,} "
        f"bytes; one head of the further keys has {further:,})"
    )
    cell.verdict, cell.examples = HELD, len(peaks)
    if high - low >= further:
        cell.verdict, cell.check, cell.message = FAILED, "memory", f"not O(n/p): {cell.reason}"
        cell.case, cell.replay = case.to_dict(), replay
