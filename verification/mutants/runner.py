"""The hunt for seeded defects: examples on ranks that run with one, until a property or a law breaks.

What is drawn and what is checked is that of `verification.runner`: plain Cases, and the laws between them in proportion
to their share. Of the first failure it is noted what broke and after how many examples; it is then shrunk for a moment.
Whatever goes wrong with the tool itself (a defect that cannot be planted, ranks that do not start) is raised, and
counts neither as killed nor as survived.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from verification.backends import Backend, GlooBackend, SimBackend
from verification.failures import RankHang, VerificationFailure
from verification.hunt import PATIENCE, Experiment, ToolError
from verification.laws import LAWS
from verification.mutants import DEFECTS, Defect, by_name
from verification.mutants.plant import plant_by_name
from verification.runner import EXAMPLES, PROFILES, law_experiment

HUNTERS = 2  # processes, each with ranks of its own
LIMIT = PROFILES["ci"].examples  # examples for a defect
SHRINK = 2.0  # seconds for a failure
SOON = 200  # examples within which a defect should be found
SANE = 60  # examples without any defect, which must hold
# Small worlds first, so that shrinking ends there; most are distributed.
WORLDS = (1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 5, 8)
GLOO_WORLDS = (2, 3, 4)
# Examples of one run of Hypothesis. After ten it begins to vary what it has drawn: of 200 in one run a third were
# repeats and most others near copies. So a chase is made of short runs.
RUN = 10
GLOO_ROUND = 60  # examples on one world size before the next; each round of them all doubles it

Draw = st.DrawFn


@dataclass(frozen=True)
class Outcome:
    """What became of one defect. case: the record that `verification replay` reads, of the smallest failure seen."""

    name: str
    provenance: str
    killed: bool
    check: str | None  # title of the property or law
    kind: str | None  # of failure
    examples: int  # until found, that one included; of a survivor, all
    seconds: float  # until found
    case: dict[str, Any] | None
    message: str | None = None  # first line of what was said

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 3)}


class NotSane(Exception):
    """Without any defect an example fails: nothing can be said of defects."""


def hunt_all(names: Sequence[str], seed: int, limit: int = LIMIT, hunters: int = HUNTERS) -> Iterator[Outcome]:
    """The outcomes in the order of `names`, each as soon as it and those before it are there.

    Raises NotSane, CannotPlant, Unavailable or ToolError; then no outcome is to be trusted.
    """
    # Two hunters share the cores with their ranks: one thread each, from the import of numpy on.
    os.environ.update({name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")})
    executor = ProcessPoolExecutor(max(1, min(hunters, len(names))), mp_context=multiprocessing.get_context("spawn"))
    try:
        sane = [executor.submit(check_sane, backend, seed) for backend in _backends_of(names)]
        for ready in sane:
            ready.result()
        futures = [executor.submit(hunt, name, seed, limit) for name in names]
        for future in futures:
            yield future.result()
    finally:
        executor.shutdown(cancel_futures=True)


def _backends_of(names: Sequence[str]) -> list[str]:
    return sorted({by_name(name).backend for name in names})


def check_sane(backend: str, seed: int) -> None:
    """A few dozen examples on ranks as they are. Raises NotSane."""
    found = _chase(backend, None, f"{seed}/sane", SANE)
    if found.first is not None:
        failure, subject = found.first
        raise NotSane(
            f"without any defect an example fails on {backend}: {subject.title(failure)}: {failure}; {subject.record()}"
        )


def hunt(name: str, seed: int, limit: int = LIMIT) -> Outcome:
    """One defect of the catalogue."""
    defect = by_name(name)
    return _outcome(defect, _chase(defect.backend, partial(plant_by_name, name), f"{seed}/{name}", limit))


def _outcome(defect: Defect, chase: Chase) -> Outcome:
    if chase.first is None or chase.smallest is None:
        return Outcome(defect.name, defect.provenance, False, None, None, chase.examples, chase.seconds, None)
    failure, subject = chase.first
    return Outcome(
        defect.name, defect.provenance, True, subject.title(failure), failure.kind, chase.examples, chase.seconds,
        chase.smallest[1].record(), str(chase.smallest[0]).partition("\n")[0],
    )  # fmt: skip


def _chase(backend: str, prepare: Callable[[], object] | None, seed: str, limit: int) -> Chase:
    ranks = SimBackend(PATIENCE, prepare) if backend == "sim" else GlooBackend(PATIENCE, prepare)
    chase = Chase(ranks)
    try:
        if backend == "sim":
            ranks.start(1)  # it takes Cases of any world size
            chase.draw(WORLDS, limit, seed)
            return chase
        size, before = GLOO_ROUND, -1
        while chase.first is None and before < chase.examples < limit:
            before = chase.examples
            for world in GLOO_WORLDS:
                if chase.first is None and chase.examples < limit:
                    ranks.start(world)
                    chase.draw((world,), min(size, limit - chase.examples), f"{seed}/{world}/{size}")
            size *= 2
        return chase
    finally:
        ranks.close()


# --- one chase --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What was drawn, and the experiment that it was drawn for."""

    experiment: Experiment
    drawn: Any

    def check(self, backend: Backend) -> dict[str, float]:
        return self.experiment.check(backend, self.drawn)

    def record(self) -> dict[str, Any]:
        return self.experiment.record_of(self.drawn)

    def title(self, failure: VerificationFailure) -> str:
        return self.experiment.property_of(failure)


def _experiments() -> tuple[Experiment, ...]:
    """Each as often as its share of a run's examples has it; the plain ones first, which are simplest."""
    whole = round(1 / min(law.share for law in LAWS))
    return (EXAMPLES,) * whole + tuple(
        experiment for law in LAWS for experiment in (law_experiment(law),) * round(law.share * whole)
    )


_EXPERIMENTS = _experiments()


@lru_cache
def _drawn(number: int, world: int) -> SearchStrategy[Any]:
    return _EXPERIMENTS[number].draw(world)


@st.composite
def anything(draw: Draw, worlds: tuple[int, ...]) -> Subject:
    """A Case on one of these world sizes, or what a law does to one."""
    world = draw(st.sampled_from(worlds))
    number = draw(st.sampled_from(range(len(_EXPERIMENTS))))
    return Subject(_EXPERIMENTS[number], draw(_drawn(number, world)))


class _Interesting(Exception):
    """What Hypothesis is shown of a failure: one type, raised from one line, so that it takes all for one bug."""


class _Enough(BaseException):
    """Ends a run of Hypothesis at once; no `Exception`, so that it is let through."""


class Chase:
    """Draw until something fails, then shrink that until `SHRINK` seconds are over.

    first: the first failure and its subject; smallest: the last, and so the smallest, of the same kind and title.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.examples = 0
        self.seconds = 0.0
        self.first: tuple[VerificationFailure, Subject] | None = None
        self.smallest: tuple[VerificationFailure, Subject] | None = None
        self._seen: dict[str, bool] = {}  # by record: whether it is the failure that is being shrunk
        self._limit = 0
        self._deadline = 0.0

    def draw(self, worlds: tuple[int, ...], examples: int, seed: str) -> None:
        """So many new examples, or up to the first failure and its shrinking."""
        self._limit = self.examples + examples
        before = -1
        while self.first is None and before < self.examples < self._limit:
            before = self.examples
            self._run(worlds, f"{seed}/{before}")

    def _run(self, worlds: tuple[int, ...], seed: str) -> None:
        def test(subject: Subject) -> None:
            self._attempt(subject)

        chosen = settings(
            max_examples=RUN, database=None, phases=(Phase.generate, Phase.shrink), deadline=None, derandomize=False,
            report_multiple_bugs=False, verbosity=Verbosity.quiet, print_blob=False,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        try:
            seeded(seed)(chosen(given(anything(worlds))(test)))()
        except (_Interesting, _Enough):
            pass

    def _attempt(self, subject: Subject) -> None:
        """Look at a subject. What was seen before is not run again: it is as it was."""
        key = json.dumps(subject.record(), sort_keys=True)
        if key not in self._seen:
            started = time.perf_counter()
            if (self.examples >= self._limit) if self.first is None else (started > self._deadline):
                raise _Enough
            self._seen[key] = self._is_wanted(subject, key, started)
        if self._seen[key]:
            raise _Interesting

    def _is_wanted(self, subject: Subject, key: str, started: float) -> bool:
        """Whether it fails, and as what is being shrunk does."""
        try:
            subject.check(self.backend)
        except VerificationFailure as failure:
            return self._note(failure, subject, started)
        except Exception as error:  # the machinery's own fault: no verdict
            raise ToolError(f"{subject.experiment.name}, {key}: {error!r}") from error
        if self.first is None:
            self.examples += 1
            self.seconds += time.perf_counter() - started
        return False

    def _note(self, failure: VerificationFailure, subject: Subject, started: float) -> bool:
        now = time.perf_counter()
        if self.first is None:
            self.first = self.smallest = failure, subject
            self.examples += 1
            self.seconds += now - started
            # A hang on real processes costs all the patience there is: it is not shrunk here.
            self._deadline = now + (0.0 if isinstance(failure, RankHang) and self.backend.name != "sim" else SHRINK)
            return True
        first, shown = self.first
        wanted = (failure.kind, subject.title(failure)) == (first.kind, shown.title(first))
        if wanted:
            self.smallest = failure, subject
        return wanted


def totals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many there are, were killed, and were killed within `SOON` examples."""
    killed = [outcome for outcome in outcomes if outcome.killed]
    return {
        "defects": len(outcomes),
        "killed": len(killed),
        "survived": len(outcomes) - len(killed),
        "within_200": sum(outcome.examples <= SOON for outcome in killed),
    }


ALL = tuple(defect.name for defect in DEFECTS)
