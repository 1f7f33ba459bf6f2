"""The search for counter-examples: draw subjects, and shrink each failure.

Hypothesis draws and shrinks, without Phase.explain, which makes a hang that needs three ranks ten times as expensive to
shrink. The first failure of a subject is final: its exception is cached, and raised again when Hypothesis repeats the
subject. So an intermittent fault is neither retried nor called flaky.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, Verbosity, given, settings, target
from hypothesis import seed as seeded
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from verification.failures import RankHang, VerificationFailure
from verification.protocols import CaseLike
from verification.run.backends import Backend, SimBackend
from verification.search.diagnose import cause_in
from verification.search.experiment import Experiment, FoundFailure
from verification.search.history import EarlierCalls
from verification.search.shrinking import Shrinking, Signature, check_subject, failure_on, is_costly, signature
from verification.search.simplify import minimize

DATABASE = Path(".verification/examples")
CACHE = Path(".verification/hypothesis")  # constants that Hypothesis finds in our modules
TIMEOUT = 10.0  # seconds until the first hang is declared
# After a hang, shrinking meets many more: the timeout falls to this, or to 8 times the slowest good example if larger.
SHORT_TIMEOUT, SLOWER = 0.7, 8
# Examples of one run of Hypothesis. After ten it begins to mutate earlier examples: of 200 in one run a third are
# repeats, and rare Cases are missed more often. After IDLE_RUNS without a new example the search ends.
RUN, IDLE_RUNS = 10, 20
EXPECTED_RUNS = 3  # likewise where nothing held yet, and all failures are expected: each may cost new ranks
RUNS_ON_FEWER = 6  # on each smaller world size, to find the same failure
RECENT = 4000  # calls before a failure, out of which those that it needs are sought
CUT_SHORT = "shrinking was cut short when its time was up: a smaller example may fail in the same way"
WARM_UP = 5  # first examples, whose time does not count: they import modules and create groups


class Events(Protocol):
    """Listener of a search, such as `verification.report.report.Report`. held: an example held, with its worst error /
    bound by property. covered: it is a plain Case. met: an example failed in a new way, and is reported after
    shrinking. failed_again: it failed like an earlier one, and is skipped."""

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None: ...
    def covered(self, case: CaseLike) -> None: ...
    def met(self, failure: VerificationFailure) -> None: ...
    def failed_again(self) -> None: ...


class _Interesting(Exception):
    """The exception that Hypothesis sees for every failure. It has one type, is raised in one line, and never while
    another is handled: Hypothesis distinguishes bugs by these, and would shrink each separately."""


@dataclass
class Search:
    """A search for counter-examples of one experiment on one world size. `find` draws up to the next failure, and
    shrinks it; `explore` continues with the next ones. Failures shrunk on the `shrink_backend` (see `Shrinking`) are
    confirmed on the original backend.

    Each failure gets its own run of Hypothesis: a run continues drawing for ten seconds after a failure, too long if
    further ones hang. Known failures are skipped; so are all others while one is being shrunk.
    """

    experiment: Experiment
    backend: Backend
    events: Events
    world: int
    budget: float = 60.0  # seconds to shrink a failure, and to look for others after the first one
    remembers: bool = False
    shrink_backend: Backend | None = None  # None: failures are shrunk on `backend`
    shrinks_hangs: bool = True  # on real processes, where each costs a timeout
    others: float = math.inf  # at most so many seconds of the budget to look for others
    expected: Collection[str] = ()  # properties and laws whose failures are skipped, and counted in `expected_failures`
    expected_failures: Counter[str] = field(default_factory=Counter)
    examples: int = 0  # that held, without those of shrinking
    seconds: float = 0.0  # of these, and of the failures that were shrunk
    _failed: dict[str, FoundFailure] = field(default_factory=dict)  # by record: a failure is final
    _held: set[str] = field(default_factory=set)  # records that held: neither checked nor counted again
    _reported: list[Signature] = field(default_factory=list)
    _shrinking: Shrinking | None = None
    _cut_short: bool = False  # shrinking left out examples for lack of time
    _last: float = math.inf  # no example begins after this time, except those of shrinking
    _slowest: float = 0.0
    _goal: float = math.inf

    def explore(self, examples: int, seed: int) -> list[FoundFailure]:
        """Draw that many examples; return the distinct failures, each shrunk."""
        counterexamples: list[FoundFailure] = []
        timeout, last = self.backend.timeout, math.inf
        try:
            while self.examples < examples and time.perf_counter() < last:
                seeds = f"{seed}/{self.world}/{self.experiment.name}/{len(counterexamples)}"
                smallest = self.find(examples, seeds, last)
                if smallest is None or self._shrinking is None:
                    break
                last = min(last, time.perf_counter() + min(self.budget, self.others))
                first = self._shrinking.first
                smallest = self._on_fewer_ranks(smallest, self._shrinking.backend, seeds)
                counterexample = self._with_earlier_calls(self._confirmed(smallest, first, timeout))
                counterexamples.append(self._with_cause(counterexample, first))
                if self._cut_short:
                    counterexample.failure.add_note(CUT_SHORT)
                self._reported += [signature(self.experiment, counterexample) for counterexample in (first, smallest)]
                if isinstance(smallest.failure, RankHang):
                    break  # a further search would meet the hang again, each time at the cost of a timeout
                self._shrinking = None
        finally:
            self.backend.timeout = timeout
        return counterexamples

    def find(self, examples: int, seed: str, last: float = math.inf) -> FoundFailure | None:
        """Run Hypothesis until that many examples held in all, or one failed; return it shrunk. No example begins after
        `last` (`time.perf_counter`), except those of shrinking."""
        strategy, self._goal, self._last = self.experiment.draw(self.world), examples, last
        run = idle = 0
        while self.examples < examples and time.perf_counter() < last:
            if idle >= (EXPECTED_RUNS if self.expected_failures and not self.examples else IDLE_RUNS):
                break
            before = self.examples
            most = examples if self.experiment.targets_error else RUN
            try:
                counterexample = self._run_hypothesis(strategy, self.world, most, f"{seed}/{run}", run == 0)
            except Unsatisfiable:  # the filters of the strategy rejected all draws
                return None
            if counterexample is not None:
                return counterexample
            run, idle = run + 1, idle + 1 if self.examples == before else 0
        return None

    def _run_hypothesis(
        self, strategy: SearchStrategy[Any], world: int, examples: int, seed: str, first: bool
    ) -> FoundFailure | None:
        """Let Hypothesis draw until a subject fails, and shrink it. The first run replays stored examples, too. Raises
        Unsatisfiable if the strategy's filters reject all subjects."""

        def test(subject: Any) -> None:
            self.attempt(subject)

        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(CACHE))
        # Hypothesis stores the test's examples in the database by this name.
        test.__name__ = test.__qualname__ = re.sub(r"\W+", "_", f"{self.experiment.name}_on_{world}")
        phases = [Phase.generate, Phase.shrink]
        decorate = settings(
            max_examples=examples,
            database=DirectoryBasedExampleDatabase(DATABASE) if self.remembers else None,
            phases=[
                *phases,
                *([Phase.reuse] if first else []),
                *([Phase.target] if self.experiment.targets_error else []),
            ],
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,  # stop at the first; `_judge` prevents that another is shrunk instead
            suppress_health_check=list(HealthCheck),  # they time the draws, which are slow on a loaded machine
            verbosity=Verbosity.quiet,
            print_blob=False,
        )
        try:
            seeded(seed)(decorate(given(strategy)(test)))()
        except _Interesting as failure:
            return self._minimized(failure.args[0])
        return None

    def _minimized(self, original: FoundFailure) -> FoundFailure:
        """Return the same failure for the simplest subject that shows it."""
        if self.experiment.validate is None:
            return original
        validate, simplest = self.experiment.validate, original

        def fails(case: CaseLike) -> bool:
            nonlocal simplest
            subject = self.experiment.with_case(original.subject, case)
            try:
                validate(subject)
                self.attempt(subject)
            except ValueError:
                return False
            except _Interesting as failure:
                simplest = failure.args[0]
                return True
            return False

        minimize(self.experiment.case_of(original.subject), fails)
        return simplest

    def attempt(self, subject: Any) -> None:
        """Check one subject; a known failure is raised again. Skip it if it is known to hold, if time is up, or if
        enough examples held."""
        key = json.dumps(self.experiment.record_of(subject), sort_keys=True)
        if key in self._failed:
            return self._judge(self._failed[key])
        if key in self._held:
            return
        shrinking, started = self._shrinking, time.perf_counter()
        late = started > (self._last if shrinking is None else shrinking.deadline)
        self._cut_short |= late and shrinking is not None
        if late or (shrinking is None and self.examples >= self._goal):
            return
        backend = self.backend if shrinking is None else shrinking.backend
        earlier = tuple(backend.earlier[-RECENT:])
        ratios, failure = check_subject(self.experiment, backend, subject)
        if failure is not None:
            self._note_failure(key, FoundFailure(failure, subject, backend.name, earlier), backend, started)
            return self._judge(self._failed[key])
        self._held.add(key)
        if shrinking is None:  # examples of shrinking are not part of the sample
            self._note_held(subject, ratios, time.perf_counter() - started)

    def _note_failure(self, key: str, counterexample: FoundFailure, backend: Backend, started: float) -> None:
        hangs = isinstance(counterexample.failure, RankHang)
        title = self.experiment.property_of(counterexample.subject, counterexample.failure)
        if self._shrinking is None and title in self.expected:
            self.expected_failures[title] += 1
        elif self._shrinking is None and signature(self.experiment, counterexample) in self._reported:
            self.events.failed_again()
        elif self._shrinking is None:
            self.seconds += time.perf_counter() - started
            self.events.met(counterexample.failure)
            budget = self.budget if self.shrinks_hangs or not is_costly(counterexample.failure, backend) else 0.0
            self._cut_short = False
            self._shrinking = Shrinking.begin(self.experiment, counterexample, backend, self.shrink_backend, budget)
            counterexample = self._shrinking.shown
        self._failed[key] = counterexample
        if hangs and backend is self.backend:
            self.backend.timeout = min(self.backend.timeout, max(SHORT_TIMEOUT, SLOWER * self._slowest))

    def _note_held(self, subject: Any, ratios: dict[str, float], spent: float) -> None:
        self.examples += 1
        self.seconds += spent
        if self.examples > WARM_UP:
            self._slowest = max(self._slowest, spent)
        case = self.experiment.case_of(subject)
        self.events.held(case.dtype, ratios, spent)
        largest = max(ratios.values(), default=0.0)
        if self.experiment.targets_error and 0.0 < largest < math.inf:
            target(largest, label=f"error / bound, {case.dtype}")
        elif case is subject:
            self.events.covered(case)

    def _judge(self, counterexample: FoundFailure) -> None:
        """Raise it if it is the failure that is being shrunk; skip any other."""
        if self._shrinking is not None and signature(self.experiment, counterexample) == self._shrinking.expected:
            raise _Interesting(counterexample)

    def _on_fewer_ranks(self, counterexample: FoundFailure, backend: Backend, seed: str) -> FoundFailure:
        """Return the same failure on the fewest ranks on which a few examples show it: in a simulation, and on real
        processes if the experiment has `on_fewer`, with a new budget for each number of ranks."""
        world, simulated = self.experiment.case_of(counterexample.subject).world, backend.name == "sim"
        if not simulated and (not self.experiment.on_fewer or is_costly(counterexample.failure, backend)):
            return counterexample
        smaller = None
        for fewer in range(self.experiment.fewest_ranks, world):
            backend.start(fewer)
            if not simulated and self._shrinking is not None:
                self._shrinking = replace(self._shrinking, deadline=time.perf_counter() + self.budget)
            draw = self.experiment.draw(fewer)
            runs = (
                self._run_hypothesis(draw, fewer, RUN, f"{seed}/{fewer}/{run}", False) for run in range(RUNS_ON_FEWER)
            )
            smaller = next((shown for shown in runs if shown is not None), None)
            if smaller is not None:
                break
        if not simulated and world > 1:
            backend.start(world)
        return counterexample if smaller is None else smaller

    def _confirmed(self, shrunk: FoundFailure, first: FoundFailure, timeout: float) -> FoundFailure:
        """Repeat a failure on the original backend if it was shrunk elsewhere, or as a hang with a short timeout. If it
        does not show, return the failure of the simulation or, for a hang with a short timeout, the first one."""
        short_hang = isinstance(shrunk.failure, RankHang) and self.backend.timeout < timeout
        if shrunk.backend == self.backend.name and not short_hang:
            return shrunk
        self.backend.timeout, short = timeout, self.backend.timeout
        try:
            failure = failure_on(self.experiment, self.backend, shrunk.subject)
        finally:
            self.backend.timeout = short
            if self.experiment.case_of(shrunk.subject).world != self.world:
                self.backend.start(self.world)
        if failure is not None:
            return FoundFailure(failure, shrunk.subject, self.backend.name)
        return first if shrunk.backend == self.backend.name else shrunk

    def _with_earlier_calls(self, counterexample: FoundFailure) -> FoundFailure:
        """Add the calls that the failure needs before it, if alone on new ranks it does not show."""
        elsewhere = self.shrink_backend if counterexample.backend != self.backend.name else None
        backend = elsewhere or self.backend
        costly = is_costly(counterexample.failure, backend) and not self.shrinks_hangs
        if costly or not counterexample.earlier:  # without earlier calls, these ranks were new
            return counterexample
        deadline = time.perf_counter() + self.budget
        counterexample = EarlierCalls(self.experiment, backend, counterexample, deadline).added()
        self.backend.start(self.world)
        return counterexample

    def _with_cause(self, counterexample: FoundFailure, first: FoundFailure) -> FoundFailure:
        """Add the cause that the simulation or the experiment names, if any, as a note of the failure (PEP 678).
        The experiment explains no failure that needs earlier calls."""
        sim, subject, failure = self.shrink_backend, counterexample.subject, counterexample.failure
        if isinstance(sim, SimBackend) and (cause := cause_in(sim, self.experiment, subject, failure)):
            failure.add_note(cause)
        world = self.experiment.case_of(subject).world
        if counterexample.before != ():
            return counterexample
        if world != self.world:
            self.backend.start(world)
        self.experiment.add_cause(failure, self.backend, subject, first.subject)
        if world != self.world:
            self.backend.start(self.world)
        return counterexample
