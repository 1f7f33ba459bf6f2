"""The search for seeded defects: examples on ranks that run with one, until a property or a law breaks.

What is drawn and what is checked is that of `verification.runner`: plain Cases, and the laws between them in proportion
to their share. Of the first failure it is noted what broke and after how many examples; it is then shrunk for a moment.
Whatever goes wrong with the tool itself (a defect that cannot be planted, ranks that do not start) is raised, and
counts neither as killed nor as survived.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from rich.console import Console

from verification.case import Case
from verification.check.laws import LAWS
from verification.failures import VerificationFailure
from verification.mutants.catalogue import by_name
from verification.mutants.defect import Defect
from verification.mutants.plant import preparation
from verification.report.report import Report
from verification.run.backends import Backend, GlooBackend, SimBackend
from verification.runner import EXAMPLES, PROFILES, law_experiment
from verification.search.experiment import Experiment, Found, ToolError
from verification.search.search import TIMEOUT, Search
from verification.wording import counted

PROCESSES = 2  # processes, each with ranks of its own
LIMIT = PROFILES["ci"].examples  # examples for a defect
SHRINK = 1.5  # seconds for a failure: there are hundreds, and all of them are to take less than ten minutes
LINE_EVERY = 5.0  # seconds between reports of progress
SOON = 200  # examples within which a defect should be found
SANE = 60  # examples without any defect, which must hold
# Small worlds first, so that shrinking ends there; most are distributed.
WORLDS = (1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 5, 8)
GLOO_WORLDS = (2, 3, 4)
GLOO_ROUND = 60  # examples on one world size before the next; each round of them all doubles it

Draw = st.DrawFn
T = TypeVar("T")
_UNBOUND = re.compile(r"\b(NameError|UnboundLocalError): ")


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


def _nothing(line: str) -> None:
    """Who does not want to be told."""


def search_all(
    names: Sequence[str],
    seed: int,
    limit: int = LIMIT,
    processes: int = PROCESSES,
    say: Callable[[str], None] = _nothing,
) -> Iterator[Outcome]:
    """The outcomes in the order of `names`, each as soon as it and those before it are there. `say` is told every few
    seconds how far the one that is waited for has come.

    Raises NotSane, CannotPlant, Unavailable or ToolError; then no outcome is to be trusted.
    """
    # Two processes share the cores with their ranks: one thread each, from the import of numpy on.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    context, backends = multiprocessing.get_context("spawn"), _backends_of(names)
    held = context.RawArray("q", len(backends) + len(names))  # examples so far, by task
    executor = ProcessPoolExecutor(max(1, min(processes, len(names))), context, initializer=_share, initargs=(held,))
    try:
        sane = [executor.submit(_tallied, i, check_sane, backend, seed) for i, backend in enumerate(backends)]
        for i, ready in enumerate(sane):
            _wait(ready, say, partial(_progress, f"without any defect, on {backends[i]}", held, i, SANE))
        futures = [
            executor.submit(_tallied, i, search, name, seed, limit) for i, name in enumerate(names, start=len(backends))
        ]
        for i, future in enumerate(futures, start=len(backends)):
            yield _wait(future, say, partial(_progress, names[i - len(backends)], held, i, limit))
    finally:
        executor.shutdown(cancel_futures=True)


def _wait(future: Future[T], say: Callable[[str], None], progress: Callable[[], str]) -> T:
    """The result; until it is there, `say` is told of the progress."""
    while not wait([future], timeout=LINE_EVERY).done:
        say(progress())
    return future.result()


def _progress(what: str, held: Sequence[int], task: int, limit: int) -> str:
    return f"{what}: {held[task]} of {counted(limit, 'example')} held so far"


def _backends_of(names: Sequence[str]) -> list[str]:
    return sorted({by_name(name).backend for name in names})


# --- in one process ---------------------------------------------------------------------------------------------

_held: Any = None  # by task, how many examples held: seen by the process that waits. None: nobody waits
_task = 0


def _share(held: Any) -> None:
    global _held  # noqa: PLW0603 - one process, one counter
    _held = held


def _tallied(task: int, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)`, whose examples are counted as those of that task."""
    global _task  # noqa: PLW0603 - likewise
    _task = task
    return function(*arguments)


class Tally(Report):
    """A silent report, by which another process sees how many examples held."""

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None:
        super().held(dtype, ratios, seconds)
        if _held is not None:
            _held[_task] += 1


def check_sane(backend: str, seed: int) -> None:
    """A few dozen examples on ranks as they are. Raises NotSane."""
    found = _chase(backend, None, f"{seed}/sane", SANE).found
    if found is not None:
        title = EVERYTHING.property_of(found.subject, found.failure)
        raise NotSane(
            f"without any defect an example fails on {backend}: {title}: {found.failure}; {found.subject.record()}"
        )


def search(name: str, seed: int, limit: int = LIMIT) -> Outcome:
    """One defect of the catalogue. Raises ToolError for one whose own code cannot run."""
    defect = by_name(name)
    return outcome_of(defect, _chase(defect.backend, preparation(defect), f"{seed}/{name}", limit))


def outcome_of(defect: Defect, chase: Chase) -> Outcome:
    found = chase.found
    if found is None:
        return Outcome(defect.name, defect.provenance, False, None, None, chase.examples, chase.seconds, None)
    said = str(found.failure).partition("\n")[0]
    if _UNBOUND.search(said):  # `plant` has looked up global names; this one is of a local variable
        raise ToolError(f"{defect.name}: the edited code does not run: {said}")
    return Outcome(
        defect.name, defect.provenance, True, found.subject.title(found.failure), found.failure.kind, chase.examples,
        chase.seconds, found.subject.record(), said,
    )  # fmt: skip


@dataclass(frozen=True)
class Chase:
    """What came of looking for one failure. examples: until it was found, that one included; or all."""

    found: Found | None
    examples: int
    seconds: float


def _chase(backend: str, prepare: Callable[[], object] | None, seed: str, limit: int) -> Chase:
    ranks = SimBackend(TIMEOUT, prepare) if backend == "sim" else GlooBackend(TIMEOUT, prepare)
    try:
        if backend == "sim":
            ranks.start(1)  # it takes Cases of any world size
            searches = [_search_on(ranks, max(WORLDS), EVERYTHING)]
            found = searches[0].find(limit, seed)
        else:
            searches = [_search_on(ranks, world, ON_ONE_WORLD) for world in GLOO_WORLDS]
            found = _in_turn(searches, ranks, seed, limit)
    finally:
        ranks.close()
    examples = sum(search.examples for search in searches) + (found is not None)
    return Chase(found, examples, sum(search.seconds for search in searches))


def _search_on(ranks: Backend, world: int, experiment: Experiment) -> Search:
    # A hang on real processes costs a whole timeout: it is not shrunk here.
    return Search(experiment, ranks, Tally(Console(quiet=True)), world, SHRINK, shrinks_hangs=False)


def _in_turn(searches: Sequence[Search], ranks: Backend, seed: str, limit: int) -> Found | None:
    """Each on its own world size, round after round, until so many examples held on all of them together."""
    size, before = GLOO_ROUND, -1
    while before < (held := sum(search.examples for search in searches)) < limit:
        before = held
        for search in searches:
            ranks.start(search.world)
            left = limit - sum(other.examples for other in searches)
            found = search.find(search.examples + min(size, left), f"{seed}/{search.world}/{size}")
            if found is not None:
                return found
        size *= 2
    return None


# --- what is drawn ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What was drawn, and the experiment that it was drawn for."""

    experiment: Experiment
    drawn: Any

    @property
    def case(self) -> Case:
        return self.experiment.case_of(self.drawn)

    def with_case(self, case: Case) -> Subject:
        return replace(self, drawn=self.experiment.with_case(self.drawn, case))

    def check(self, backend: Backend) -> dict[str, float]:
        return self.experiment.check(backend, self.drawn)

    def record(self) -> dict[str, Any]:
        return self.experiment.record_of(self.drawn)

    def title(self, failure: VerificationFailure) -> str:
        return self.experiment.property_of(self.drawn, failure)


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


# On the world sizes up to the one that is asked for: a simulation has them all at once.
EVERYTHING = Experiment(
    "everything",
    lambda most: anything(tuple(world for world in WORLDS if world <= most)),
    check=lambda backend, subject: subject.check(backend),
    case_of=lambda subject: subject.case,
    with_case=lambda subject, case: subject.with_case(case),
    record_of=lambda subject: subject.record(),
    property_of=lambda subject, failure: subject.title(failure),
)
ON_ONE_WORLD = replace(EVERYTHING, draw=lambda world: anything((world,)))


def totals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many there are, were killed, and were killed within `SOON` examples."""
    killed = [outcome for outcome in outcomes if outcome.killed]
    return {
        "defects": len(outcomes),
        "killed": len(killed),
        "survived": len(outcomes) - len(killed),
        "within_200": sum(outcome.examples <= SOON for outcome in killed),
    }
