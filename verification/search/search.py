"""The search for one counter-example after the other: draw, and shrink what fails.

Hypothesis draws and shrinks. What it is told: a random profile, not a derandomised one, with the seed
printed; no deadline; no Phase.explain (with it, a hang that needs three ranks takes ten times as many runs to
shrink). What it is not told: a failure is a failure the first time it is seen. Its exception is kept with its
example and raised again, not run again, when Hypothesis comes back to it, so that a fault that shows only now
and then is neither retried nor called flaky.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings, target
from hypothesis import seed as seeded
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from verification.case import Case
from verification.failures import RankHang, VerificationFailure
from verification.report.report import Report
from verification.run.backends import Backend

DATABASE = Path(".verification/examples")
TIMEOUT = 10.0  # seconds before the first hang is called one
# Once a hang was seen, shrinking meets many: none waits longer than this, or than 8 times the slowest good
# example.
SHORT_TIMEOUT, SLOWER = 0.7, 8
# Examples of one run of Hypothesis. After ten it begins to vary what it has drawn: of 200 in one run a third are
# repeats, and what is rare is missed more often. IDLE_RUNS without a new example: there are no more.
RUN, IDLE_RUNS = 10, 20
RUNS_ON_FEWER = 6  # on each smaller world size in search of the same failure
Signature = tuple[str, str]  # kind and property: failures that agree in both are one
WARM_UP = 5  # examples that do not count as slow: modules are imported, groups are made


@dataclass(frozen=True)
class Experiment:
    """Something that Hypothesis draws subjects for: plain Cases, or Cases with what a law does to them."""

    name: str
    draw: Callable[[int], SearchStrategy[Any]]
    check: Callable[[Backend, Any], dict[str, float]]  # by property: worst error / bound; raises VerificationFailure
    case_of: Callable[[Any], Case]
    record_of: Callable[[Any], dict[str, Any]]  # what is saved, and replayed
    property_of: Callable[[Any, VerificationFailure], str]  # of a subject: the title of what is broken
    pushes: bool = False  # whether Hypothesis is to look for larger errors: it then draws around what had the largest


def placed(experiment: Experiment, subject: Any, backend: str) -> Any:
    """The subject as it runs on that backend: on GPUs for "nccl", else on the CPU; with kernel "auto" in place of a
    fused one that is not there, or does not take all that was drawn.
    """
    case, device = experiment.case_of(subject), "cuda" if backend == "nccl" else "cpu"
    if case.device == device:
        return subject
    there = case.kernel != "cudnn" and (case.kernel != "flash" or fused_on_gpus(case) or device == "cpu")
    other = replace(case, device=device, kernel=case.kernel if there else "auto")
    return other if subject is case else (other, *subject[1:])


def fused_on_gpus(case: Case) -> bool:
    """Whether fused kernels on GPUs take tensors of its type and head dim."""
    return case.dtype in ("bfloat16", "float16") and case.head_dim % 8 == 0 and case.head_dim <= 128


class ToolError(BaseException):
    """The machinery itself failed on an example. No `Exception`, so that Hypothesis lets it through at once."""


@dataclass(frozen=True)
class Found:
    """A failure, the subject that shows it, and the name of the backend on which it does."""

    failure: VerificationFailure
    subject: Any
    backend: str


class _Interesting(Exception):
    """What Hypothesis is shown of a failure. One type, raised from one line and not while another exception is
    handled: by these it tells bugs apart, and would shrink each by itself.
    """


@dataclass
class Search:
    """One experiment on one world size: draw until something fails, shrink that, draw on for something else.

    `find` draws up to the next failure, and shrinks it; `explore` goes on to the others.

    A failure is shrunk on the `shrink_backend`, a simulation, if it shows there: a hang is found there without waiting,
    on any number of ranks. What comes out is run once more where the failure was found.

    Hypothesis, left alone, draws for ten seconds more after a first failure, which is a long time where each
    further one is a hang. So each failure gets a run of its own. What was reported is passed over when it
    comes up again, and while one failure is being shrunk all others are.
    """

    experiment: Experiment
    backend: Backend
    report: Report
    world: int
    budget: float = 60.0  # seconds to shrink a failure; and, after the first one, to look for others
    remembers: bool = False
    shrink_backend: Backend | None = None  # None: failures are shrunk where they are found
    shrinks_hangs: bool = True  # on real processes, where each costs a timeout
    examples: int = 0  # that held, shrinking left out
    seconds: float = 0.0  # that they took, and the failures that were shrunk
    _failed: dict[str, Found] = field(default_factory=dict)  # by record: what failed once fails always
    _held: set[str] = field(default_factory=set)  # likewise, what held: it is not looked at, or counted, again
    _reported: list[Signature] = field(default_factory=list)
    _first: Found | None = None  # the failure that is being shrunk, as it was found
    _wanted: Signature | None = None  # what it looks like where it is being shrunk
    _place: Backend | None = None  # where that is
    _deadline: float = math.inf
    _slowest: float = 0.0
    _goal: float = math.inf

    def explore(self, examples: int, seed: int) -> list[Found]:
        """Draw that many; the distinct failures, each shrunk, with the subject that shows it."""
        found: list[Found] = []
        timeout, last = self.backend.timeout, math.inf
        try:
            while self.examples < examples and time.perf_counter() < last:
                seeds = f"{seed}/{self.world}/{self.experiment.name}/{len(found)}"
                smallest = self.find(examples, seeds, last)
                if smallest is None or self._first is None:
                    break
                last = min(last, time.perf_counter() + self.budget)
                smallest = self._on_fewer_ranks(smallest, seeds)
                found.append(self._confirmed(smallest, self._first, timeout))
                self._reported += [self._signature(self._first), self._signature(smallest)]
                if isinstance(smallest.failure, RankHang):
                    break  # whatever else there is, the hang would be met again on the way to it, at its price
                self._first = self._wanted = self._place = None
        finally:
            self.backend.timeout = timeout
        return found

    def find(self, examples: int, seed: str, last: float = math.inf) -> Found | None:
        """Runs of Hypothesis until that many examples held in all, or one failed, which is shrunk within its run. No
        example begins after `last`, by `time.perf_counter`, but those that shrink.
        """
        strategy, self._goal, self._deadline = self.experiment.draw(self.world), examples, last
        run = idle = 0
        while self.examples < examples and idle < IDLE_RUNS and time.perf_counter() < self._deadline:
            before = self.examples
            most = examples if self.experiment.pushes else RUN
            try:
                found = self._go(strategy, self.world, most, f"{seed}/{run}", run == 0)
            except Unsatisfiable:  # of all that was drawn the strategy let nothing through
                return None
            if found is not None:
                return found
            run, idle = run + 1, idle + 1 if self.examples == before else 0
        return None

    def _go(self, strategy: SearchStrategy[Any], world: int, examples: int, seed: str, first: bool) -> Found | None:
        """Let Hypothesis draw until something fails, and shrink that. The first run takes what is remembered, too.

        Raises Unsatisfiable where the strategy's filters let no subject through.
        """

        def test(subject: Any) -> None:
            self.attempt(subject)

        # By its name Hypothesis finds the test's examples in the database.
        test.__name__ = test.__qualname__ = re.sub(r"\W+", "_", f"{self.experiment.name}_on_{world}")
        phases = [Phase.generate, Phase.shrink]
        chosen = settings(
            max_examples=examples,
            database=DirectoryBasedExampleDatabase(DATABASE) if self.remembers else None,
            phases=[*phases, *([Phase.reuse] if first else []), *([Phase.target] if self.experiment.pushes else [])],
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
            found: Found = shown.args[0]
            return found
        return None

    def attempt(self, subject: Any) -> None:
        """Check one subject. One that is known to fail, does; one that comes when time is over, or there are enough,
        is passed over.
        """
        key = json.dumps(self.experiment.record_of(subject), sort_keys=True)
        if key in self._failed:
            return self._judge(self._failed[key])
        if key in self._held:
            return
        started = time.perf_counter()
        if started > self._deadline or (self._first is None and self.examples >= self._goal):
            return
        place = self._place or self.backend
        ratios, failure = self._look(place, subject)
        if failure is not None:
            found = Found(failure, subject, place.name)
            if self._first is None and self._signature(found) in self._reported:
                self.report.failed_again()
            elif self._first is None:
                self.seconds += time.perf_counter() - started
                found = self._begin_to_shrink(found)
            self._failed[key] = found
            if isinstance(failure, RankHang) and place is self.backend:
                self.backend.timeout = min(self.backend.timeout, max(SHORT_TIMEOUT, SLOWER * self._slowest))
            return self._judge(found)
        self._held.add(key)
        if self._first is not None:
            return  # shrinking: these examples are not part of the sample
        spent = time.perf_counter() - started
        self.examples += 1
        self.seconds += spent
        if self.examples > WARM_UP:
            self._slowest = max(self._slowest, spent)
        case = self.experiment.case_of(subject)
        self.report.held(case.dtype, ratios, spent)
        largest = max(ratios.values(), default=0.0)
        if self.experiment.pushes and 0.0 < largest < math.inf:
            target(largest, label=f"error / bound, {case.dtype}")
        elif isinstance(subject, Case):
            self.report.coverage.add(case)

    def _begin_to_shrink(self, found: Found) -> Found:
        """From now on only this failure counts; on the shrink backend, if it shows there. What it looks like there."""
        self._first, self._place = found, self.backend
        costly = isinstance(found.failure, RankHang) and self.backend.name != "sim"
        self._deadline = time.perf_counter() + (0.0 if costly and not self.shrinks_hangs else self.budget)
        if self.shrink_backend is not None:
            failure = self._failure_on(self.shrink_backend, found.subject)
            if failure is not None:
                self._place = self.shrink_backend
                found = Found(failure, found.subject, self.shrink_backend.name)
        self._wanted = self._signature(found)
        return found

    def _failure_on(self, place: Backend, subject: Any) -> VerificationFailure | None:
        """What is wrong with the subject on that backend, with as many ranks as the subject has."""
        place.start(self.experiment.case_of(subject).world)
        return self._look(place, subject)[1]

    def _look(self, place: Backend, subject: Any) -> tuple[dict[str, float], VerificationFailure | None]:
        """The ratios of a subject that holds, or what is wrong with it."""
        try:
            return self.experiment.check(place, placed(self.experiment, subject, place.name)), None
        except VerificationFailure as failure:
            return {}, failure
        except Exception as error:  # not the ranks' fault: no example is to be shrunk for it
            raise ToolError(f"{self.experiment.name}, {self.experiment.record_of(subject)}: {error!r}") from error

    def _judge(self, found: Found) -> None:
        """Raise it if it is the failure that is being shrunk; any other is passed over."""
        if self._first is not None and self._signature(found) == self._wanted:
            raise _Interesting(found)

    def _signature(self, found: Found) -> Signature:
        return found.failure.kind, self.experiment.property_of(found.subject, found.failure)

    def _on_fewer_ranks(self, found: Found, seed: str) -> Found:
        """The same failure on the fewest ranks on which a few examples show it, if the place is a simulation."""
        if self._place is None or self._place.name != "sim":
            return found
        for world in range(1, self.experiment.case_of(found.subject).world):
            strategy = self.experiment.draw(world)
            for run in range(RUNS_ON_FEWER):
                smaller = self._go(strategy, world, RUN, f"{seed}/{world}/{run}", first=False)
                if smaller is not None:
                    return smaller
        return found

    def _confirmed(self, found: Found, first: Found, timeout: float) -> Found:
        """What was shrunk elsewhere, or as a hang with a short timeout, is shown once more where the failure was
        found. If it does not show there, what is reported is what the simulation says or, of a hang, the first one.
        """
        hurried = isinstance(found.failure, RankHang) and self.backend.timeout < timeout
        if found.backend == self.backend.name and not hurried:
            return found
        self.backend.timeout, short = timeout, self.backend.timeout
        try:
            failure = self._failure_on(self.backend, found.subject)
        finally:
            self.backend.timeout = short
            if self.experiment.case_of(found.subject).world != self.world:
                self.backend.start(self.world)
        if failure is not None:
            return Found(failure, found.subject, self.backend.name)
        return first if found.backend == self.backend.name else found
