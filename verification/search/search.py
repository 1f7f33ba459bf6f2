"""The search for one counter-example after the other: draw, and shrink what fails.

Hypothesis draws and shrinks, without Phase.explain, with which a hang that needs three ranks takes ten times as many
runs to shrink. A failure is one the first time it is seen: its exception is kept with its example and raised again when
Hypothesis comes back to it, so that a fault that shows only now and then is neither retried nor called flaky.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, Verbosity, given, settings, target
from hypothesis import seed as seeded
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from verification.failures import RankHang, VerificationFailure
from verification.protocols import Example
from verification.run.backends import Backend, SimBackend
from verification.search.diagnose import cause_in
from verification.search.experiment import Counterexample, Experiment
from verification.search.shrinking import Shrinking, Signature, failure_on, is_costly, look, signature
from verification.search.simplify import least

DATABASE = Path(".verification/examples")
TIMEOUT = 10.0  # seconds before the first hang is called one
# Once a hang was seen, shrinking meets many: none waits longer than this, or than 8 times the slowest good example.
SHORT_TIMEOUT, SLOWER = 0.7, 8
# Examples of one run of Hypothesis. After ten it begins to vary what it has drawn: of 200 in one run a third are
# repeats, and what is rare is missed more often. IDLE_RUNS without a new example: there are no more.
RUN, IDLE_RUNS = 10, 20
RUNS_ON_FEWER = 6  # on each smaller world size in search of the same failure
WARM_UP = 5  # examples that do not count as slow: modules are imported, groups are made


class Events(Protocol):
    """What a search tells as it goes; a `verification.report.report.Report` listens. held: an example held, with its
    worst error / bound by property; covered: it is a plain Case. met: an example failed as none did before, and will be
    told in full once it is shrunk; failed_again: it failed as an earlier one did, and is passed over."""

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None: ...
    def covered(self, case: Example) -> None: ...
    def met(self, failure: VerificationFailure) -> None: ...
    def failed_again(self) -> None: ...


class _Interesting(Exception):
    """What Hypothesis is shown of a failure. One type, raised from one line and not while another exception is
    handled: by these it tells bugs apart, and would shrink each by itself."""


@dataclass
class Search:
    """One experiment on one world size: `find` draws up to the next failure, and shrinks it; `explore` goes on to the
    others. What is shrunk on the `shrink_backend` (see `Shrinking`) is run once more where the failure was found.

    Each failure gets a run of Hypothesis of its own: one goes on drawing for ten seconds after a failure, long where
    each further one is a hang. What was found before is passed over, and while one is being shrunk all others are.
    """

    experiment: Experiment
    backend: Backend
    events: Events
    world: int
    budget: float = 60.0  # seconds to shrink a failure; and, after the first one, to look for others
    remembers: bool = False
    shrink_backend: Backend | None = None  # None: failures are shrunk where they are found
    shrinks_hangs: bool = True  # on real processes, where each costs a timeout
    examples: int = 0  # that held, shrinking left out
    seconds: float = 0.0  # that they took, and the failures that were shrunk
    _failed: dict[str, Counterexample] = field(default_factory=dict)  # by record: what failed once fails always
    _held: set[str] = field(default_factory=set)  # likewise, what held: it is not looked at, or counted, again
    _reported: list[Signature] = field(default_factory=list)
    _shrinking: Shrinking | None = None
    _last: float = math.inf  # no example begins after it, but those that shrink
    _slowest: float = 0.0
    _goal: float = math.inf

    def explore(self, examples: int, seed: int) -> list[Counterexample]:
        """Draw that many; the distinct failures, each shrunk, with the subject that shows it."""
        found: list[Counterexample] = []
        timeout, last = self.backend.timeout, math.inf
        try:
            while self.examples < examples and time.perf_counter() < last:
                seeds = f"{seed}/{self.world}/{self.experiment.name}/{len(found)}"
                smallest = self.find(examples, seeds, last)
                if smallest is None or self._shrinking is None:
                    break
                last = min(last, time.perf_counter() + self.budget)
                first = self._shrinking.first
                smallest = self._on_fewer_ranks(smallest, self._shrinking.place, seeds)
                found.append(self._looked_at_twice(self._confirmed(smallest, first, timeout)))
                self._reported += [signature(self.experiment, one) for one in (first, smallest)]
                if isinstance(smallest.failure, RankHang):
                    break  # whatever else there is, the hang would be met again on the way to it, at its price
                self._shrinking = None
        finally:
            self.backend.timeout = timeout
        return found

    def find(self, examples: int, seed: str, last: float = math.inf) -> Counterexample | None:
        """Runs of Hypothesis until that many examples held in all, or one failed, which is shrunk within its run. No
        example begins after `last`, by `time.perf_counter`, but those that shrink."""
        strategy, self._goal, self._last = self.experiment.draw(self.world), examples, last
        run = idle = 0
        while self.examples < examples and idle < IDLE_RUNS and time.perf_counter() < last:
            before = self.examples
            most = examples if self.experiment.targets_error else RUN
            try:
                found = self._go(strategy, self.world, most, f"{seed}/{run}", run == 0)
            except Unsatisfiable:  # of all that was drawn the strategy let nothing through
                return None
            if found is not None:
                return found
            run, idle = run + 1, idle + 1 if self.examples == before else 0
        return None

    def _go(
        self, strategy: SearchStrategy[Any], world: int, examples: int, seed: str, first: bool
    ) -> Counterexample | None:
        """Let Hypothesis draw until something fails, and shrink that. The first run takes what is remembered, too.
        Raises Unsatisfiable where the strategy's filters let no subject through."""

        def test(subject: Any) -> None:
            self.attempt(subject)

        # By its name Hypothesis finds the test's examples in the database.
        test.__name__ = test.__qualname__ = re.sub(r"\W+", "_", f"{self.experiment.name}_on_{world}")
        phases = [Phase.generate, Phase.shrink]
        chosen = settings(
            max_examples=examples,
            database=DirectoryBasedExampleDatabase(DATABASE) if self.remembers else None,
            phases=[
                *phases,
                *([Phase.reuse] if first else []),
                *([Phase.target] if self.experiment.targets_error else []),
            ],
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,  # stop drawing at the first; `_judge` lets no other be shrunk instead
            suppress_health_check=list(HealthCheck),  # they time the drawing, which a loaded machine may slow down
            verbosity=Verbosity.quiet,
            print_blob=False,
        )
        try:
            seeded(seed)(chosen(given(strategy)(test)))()
        except _Interesting as shown:
            return self._with_less(shown.args[0])
        return None

    def _with_less(self, found: Counterexample) -> Counterexample:
        """The same failure of the least subject that shows it."""
        if self.experiment.premise is None:
            return found
        premise, shown = self.experiment.premise, found

        def fails(case: Example) -> bool:
            nonlocal shown
            subject = self.experiment.with_case(found.subject, case)
            try:
                premise(subject)
                self.attempt(subject)
            except ValueError:
                return False
            except _Interesting as failure:
                shown = failure.args[0]
                return True
            return False

        least(self.experiment.case_of(found.subject), fails)
        return shown

    def attempt(self, subject: Any) -> None:
        """Check one subject. One that is known to fail, does; one that comes when time is over, or there are enough,
        is passed over."""
        key = json.dumps(self.experiment.record_of(subject), sort_keys=True)
        if key in self._failed:
            return self._judge(self._failed[key])
        if key in self._held:
            return
        shrinking, started = self._shrinking, time.perf_counter()
        late = started > (self._last if shrinking is None else shrinking.deadline)
        if late or (shrinking is None and self.examples >= self._goal):
            return
        place = self.backend if shrinking is None else shrinking.place
        ratios, failure = look(self.experiment, place, subject)
        if failure is not None:
            self._note_failure(key, Counterexample(failure, subject, place.name), place, started)
            return self._judge(self._failed[key])
        self._held.add(key)
        if shrinking is None:  # else these examples are not part of the sample
            self._note_held(subject, ratios, time.perf_counter() - started)

    def _note_failure(self, key: str, found: Counterexample, place: Backend, started: float) -> None:
        hangs = isinstance(found.failure, RankHang)
        if self._shrinking is None and signature(self.experiment, found) in self._reported:
            self.events.failed_again()
        elif self._shrinking is None:
            self.seconds += time.perf_counter() - started
            self.events.met(found.failure)
            budget = self.budget if self.shrinks_hangs or not is_costly(found.failure, place) else 0.0
            self._shrinking = Shrinking.begin(self.experiment, found, place, self.shrink_backend, budget)
            found = self._shrinking.shown
        self._failed[key] = found
        if hangs and place is self.backend:
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

    def _judge(self, found: Counterexample) -> None:
        """Raise it if it is the failure that is being shrunk; any other is passed over."""
        if self._shrinking is not None and signature(self.experiment, found) == self._shrinking.wanted:
            raise _Interesting(found)

    def _on_fewer_ranks(self, found: Counterexample, place: Backend, seed: str) -> Counterexample:
        """The same failure on the fewest ranks on which a few examples show it: in a simulation, and on real processes
        where the experiment is for that, with the budget once more for each number of ranks."""
        world, simulated = self.experiment.case_of(found.subject).world, place.name == "sim"
        if not simulated and (not self.experiment.on_fewer or is_costly(found.failure, place)):
            return found
        smaller = None
        for fewer in range(self.experiment.fewest_ranks, world):
            place.start(fewer)
            if not simulated and self._shrinking is not None:
                self._shrinking = replace(self._shrinking, deadline=time.perf_counter() + self.budget)
            draw = self.experiment.draw(fewer)
            runs = (self._go(draw, fewer, RUN, f"{seed}/{fewer}/{run}", False) for run in range(RUNS_ON_FEWER))
            smaller = next((shown for shown in runs if shown is not None), None)
            if smaller is not None:
                break
        if not simulated and world > 1:
            place.start(world)
        return found if smaller is None else smaller

    def _confirmed(self, found: Counterexample, first: Counterexample, timeout: float) -> Counterexample:
        """What was shrunk elsewhere, or as a hang with a short timeout, is shown once more where the failure was
        found. If it does not show there, what is reported is what the simulation says or, of a hang, the first one."""
        hurried = isinstance(found.failure, RankHang) and self.backend.timeout < timeout
        if found.backend == self.backend.name and not hurried:
            return found
        self.backend.timeout, short = timeout, self.backend.timeout
        try:
            failure = failure_on(self.experiment, self.backend, found.subject)
        finally:
            self.backend.timeout = short
            if self.experiment.case_of(found.subject).world != self.world:
                self.backend.start(self.world)
        if failure is not None:
            return Counterexample(failure, found.subject, self.backend.name)
        return first if found.backend == self.backend.name else found

    def _looked_at_twice(self, found: Counterexample) -> Counterexample:
        """With what the simulation knows of the cause, if there is one, as a note of the failure (PEP 678)."""
        here = self.shrink_backend
        if isinstance(here, SimBackend) and (cause := cause_in(here, self.experiment, found.subject, found.failure)):
            found.failure.add_note(cause)
        return found
