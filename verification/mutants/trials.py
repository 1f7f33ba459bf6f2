"""The search for seeded defects: examples on ranks that run with one, until a property or a law breaks.

What is drawn and what is checked is that of `verification.runner`: plain Cases, and the laws between them in proportion
to their share; for a defect of the training step, that of `verification.training`; for one of what ranks do when one of
them fails, that of `verification.faults`.
Of the first failure it is noted what broke and after how many examples; it is then shrunk for a moment.
Whatever goes wrong with the tool itself (a defect that cannot be planted, ranks that do not start) is raised, and
counts neither as killed nor as survived.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from verification.example import Example
from verification.failures import VerificationFailure, WrongResult
from verification.mutants.catalogue import by_name
from verification.mutants.defect import CannotPlant, Defect, NotSane
from verification.mutants.plant import plant, preparation
from verification.mutants.subjects import EVERYTHING, ON_GLOO, WORLDS, Subject
from verification.report.run_record import finite
from verification.run.backends import Backend, GlooBackend, SimBackend, Unavailable
from verification.run.processes.worker import exit_with_parent
from verification.search.experiment import Experiment, Found, ToolError
from verification.search.search import TIMEOUT, Search
from verification.wording import counted

PROCESSES = 2  # processes, each with ranks of its own
LIMITS = {subject: drawn.limit for subject, drawn in ON_GLOO.items()}  # examples for a defect
SHRINK = 1.5  # seconds for a failure: there are hundreds, and all of them are to take less than ten minutes
LINE_EVERY = 5.0  # seconds between reports of progress
SOON = 200  # examples within which a defect should be found

T = TypeVar("T")
_OF_THE_TOOL = (CannotPlant, Unavailable)  # no verdict on a defect
_UNBOUND = re.compile(r"\b(NameError|UnboundLocalError): ")
_TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/[\w.-]+")  # has another name each time


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
    ratio: float | None = None  # of what was wrong, its error as a fraction of what is allowed, where there is one
    experiment: str | None = None  # that found it: the plain examples, or a law
    spent: dict[str, tuple[int, float]] = field(default_factory=dict)  # examples and seconds until then, by experiment

    def to_dict(self) -> dict[str, Any]:
        spent = {name: (examples, round(seconds, 3)) for name, (examples, seconds) in self.spent.items()}
        return asdict(self) | {"seconds": round(self.seconds, 3), "spent": spent}


def _nothing(line: str) -> None:
    """For callers who do not want to be told."""


def try_all(
    names: Sequence[str],
    seed: int,
    limit: int | None = None,
    processes: int = PROCESSES,
    say: Callable[[str], None] = _nothing,
) -> Iterator[Outcome]:
    """The outcomes in the order of `names`, each as soon as it and those before it are there. `say` is told every few
    seconds how far the one that is waited for has come. limit: examples for each; None: by its subject.

    Raises NotSane or Unavailable; then no outcome is to be trusted. Raises ToolError at the end for those that could
    not be tried, when all others have been.
    """
    # Two processes share the cores with their ranks: one thread each, from the import of numpy on.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    context, places = multiprocessing.get_context("spawn"), sorted({by_name(name).place for name in names})
    held = context.RawArray("q", len(places) + len(names))  # examples so far, by task
    executor = ProcessPoolExecutor(max(1, min(processes, len(names))), context, initializer=_begin, initargs=(held,))
    try:
        anew = {by_name(name).place for name in names if by_name(name).in_oracle}
        sane = [
            executor.submit(_tallied, i, _check_sane_anew if place in anew else check_sane, place, seed)
            for i, place in enumerate(places)
        ]
        for i, ready in enumerate(sane):
            subject, backend = places[i]
            where = f"on {backend}" if subject == "attention" else f"{subject} on {backend}"
            _wait(ready, say, partial(_progress, f"without any defect, {where}", held, i, ON_GLOO[subject].sane))
        futures = [
            executor.submit(_tallied, i, try_defect, name, seed, limit)
            for i, name in enumerate(names, start=len(places))
        ]
        unrun = []
        for i, (name, future) in enumerate(zip(names, futures, strict=True), start=len(places)):
            try:
                yield _wait(future, say, partial(_progress, name, held, i, _limit(by_name(name), limit)))
            except (CannotPlant, ToolError) as error:  # the others have outcomes all the same
                unrun.append(str(error))
        if unrun:
            raise ToolError("; ".join(unrun))
    finally:
        executor.shutdown(cancel_futures=True)


def _wait(future: Future[T], say: Callable[[str], None], progress: Callable[[], str]) -> T:
    """The result; until it is there, `say` is told of the progress."""
    while not wait([future], timeout=LINE_EVERY).done:
        say(progress())
    return future.result()


def _progress(what: str, held: Sequence[int], task: int, limit: int) -> str:
    return f"{what}: {held[task]} of {counted(limit, 'example')} held so far"


def _limit(defect: Defect, limit: int | None) -> int:
    return LIMITS[defect.subject] if limit is None else limit


# --- in one process ---------------------------------------------------------------------------------------------------

_held: Any = None  # by task, how many examples held: seen by the process that waits. None: nobody waits
_task = 0


def _begin(held: Any) -> None:
    """What a process does first. Of a search that was killed it would go on to the end of its defect."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    _share(held)


def _share(held: Any) -> None:
    global _held  # noqa: PLW0603 - one process, one counter
    _held = held


def _tallied(task: int, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)`, whose examples are counted as those of that task."""
    global _task  # noqa: PLW0603 - likewise
    _task = task
    return function(*arguments)


class Tally:
    """What a search tells of: another process sees how many examples held."""

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None:
        if _held is not None:
            _held[_task] += 1

    def covered(self, case: Example) -> None:
        """Coverage is that of `run`."""

    def met(self, failure: VerificationFailure) -> None:
        """It is told once it is shrunk."""

    def failed_again(self) -> None:
        """A search ends at the first failure."""


def check_sane(place: tuple[str, str], seed: int) -> None:
    """A few dozen examples on ranks as they are. place: (subject, backend). Raises NotSane."""
    subject, backend = place
    found = _find(place, None, f"{seed}/sane", ON_GLOO[subject].sane).found
    drawn = ON_GLOO[subject].experiment
    if found is not None:
        title = drawn.property_of(found.subject, found.failure)
        record = drawn.record_of(found.subject)
        raise NotSane(f"without any defect an example fails on {backend}: {title}: {found.failure}; {record}")


def _check_sane_anew(place: tuple[str, str], seed: int) -> None:
    """The same where the process that judges has imported the project once more. Raises NotSane."""
    _judged_anew(None, check_sane.__name__, place, seed)


def try_defect(name: str, seed: int, limit: int | None = None) -> Outcome:
    """One defect of the catalogue. Raises ToolError for one whose own code cannot run.

    What is wrong in the oracle is wrong for the process that judges, too: that is a new one.
    """
    if not by_name(name).in_oracle:
        return _tried(name, seed, limit)
    outcome: Outcome = _judged_anew(name, "_tried_with_it", name, seed, limit)
    return outcome


def _tried(name: str, seed: int, limit: int | None) -> Outcome:
    defect = by_name(name)
    return outcome_of(defect, _find(defect.place, preparation(defect), f"{seed}/{name}", _limit(defect, limit)))


def _judged_anew(name: str | None, function: str, *arguments: Any) -> Any:
    """What a function of this module returns in a process of its own, with that defect in it; None: with none."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_begin, initargs=(_held,)) as judge:
        return judge.submit(_plant_and_call, name, _task, function, *arguments).result()


def _plant_and_call(name: str | None, task: int, function: str, *arguments: Any) -> Any:
    """The modules imported from now on, this one among them, are new ones."""
    plant(name or "no defect", {} if name is None else by_name(name).sources(), memory=None)
    anew = importlib.import_module(__name__)
    anew._share(_held)
    return anew._tallied(task, getattr(anew, function), *arguments)


def _tried_with_it(name: str, seed: int, limit: int | None) -> Outcome:
    """An oracle that raises ends a search, with the error: that shows the defect, too."""
    started, defect = time.perf_counter(), by_name(name)
    try:
        return _tried(name, seed, limit)
    except (Exception, ToolError) as error:
        if isinstance(error, _OF_THE_TOOL) or isinstance(error.__cause__, _OF_THE_TOOL):
            raise
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        if _UNBOUND.search(said.replace("(", ": ")):  # as a call and as repr
            raise ToolError(f"{name}: the edited code does not run: {said}") from error
        examples = 1 if _held is None else _held[_task] + 1
        spent = time.perf_counter() - started
        return Outcome(name, defect.provenance, True, "the oracle runs", "tool error", examples, spent, None, said)


def outcome_of(defect: Defect, result: Result) -> Outcome:
    found = result.found
    if found is None:
        return Outcome(
            defect.name, defect.provenance, False, None, None, result.examples, result.seconds, None,
            spent=result.spent,
        )  # fmt: skip
    said = _TEMPORARY.sub("a temporary folder", str(found.failure).partition("\n")[0])
    if _UNBOUND.search(said):  # a test looks up global names; this one is of a local variable
        raise ToolError(f"{defect.name}: the edited code does not run: {said}")
    drawn = ON_GLOO[defect.subject].experiment
    ratio = found.failure.ratio if isinstance(found.failure, WrongResult) else None
    return Outcome(
        defect.name, defect.provenance, True, drawn.property_of(found.subject, found.failure), found.failure.kind,
        result.examples, result.seconds, drawn.record_of(found.subject), said, finite(ratio),
        _name_of(drawn, found.subject), result.spent,
    )  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What came of looking for one failure. examples: until it was found, that one included; or all. spent: examples
    and seconds until then, by experiment."""

    found: Found | None
    examples: int
    seconds: float
    spent: dict[str, tuple[int, float]]


@dataclass
class _Clock:
    """Around an experiment's check: what each of the experiments that it draws from takes, until one fails."""

    experiment: Experiment
    spent: dict[str, tuple[int, float]] = field(default_factory=dict)
    failed: bool = False

    def check(self, backend: Backend, subject: Any) -> dict[str, float]:
        started = time.perf_counter()
        try:
            found = self.experiment.check(backend, subject)
        except BaseException:
            self._note(subject, started)
            self.failed = True  # what comes now is to shrink it
            raise
        self._note(subject, started)
        return found

    def _note(self, subject: Any, started: float) -> None:
        if not self.failed:
            name = _name_of(self.experiment, subject)
            examples, seconds = self.spent.get(name, (0, 0.0))
            self.spent[name] = (examples + 1, seconds + time.perf_counter() - started)


def _name_of(experiment: Experiment, subject: Any) -> str:
    """Of the experiment that a subject was drawn for."""
    return subject.experiment.name if isinstance(subject, Subject) else experiment.name


def _find(place: tuple[str, str], prepare: Callable[[], object] | None, seed: str, limit: int) -> Result:
    """place: (subject, backend)."""
    drawn, on_gloo = ON_GLOO[place[0]], place[1] == "gloo"
    ranks = GlooBackend(TIMEOUT, prepare, drawn.preload) if on_gloo else SimBackend(TIMEOUT, prepare)
    clock = _Clock(drawn.experiment if on_gloo else EVERYTHING)
    timed = replace(clock.experiment, check=clock.check)
    try:
        if on_gloo:
            searches = [_search_on(ranks, world, timed) for world in drawn.worlds]
            found = _in_turn(searches, ranks, seed, limit, drawn.round)
        else:
            ranks.start(1)  # it takes Cases of any world size
            searches = [_search_on(ranks, max(WORLDS), timed)]
            found = searches[0].find(limit, seed)
    finally:
        ranks.close()
    examples = sum(search.examples for search in searches) + (found is not None)
    return Result(found, examples, sum(search.seconds for search in searches), clock.spent)


def _search_on(ranks: Backend, world: int, experiment: Experiment) -> Search:
    # A hang on real processes costs a whole timeout: it is not shrunk here.
    return Search(experiment, ranks, Tally(), world, SHRINK, shrinks_hangs=False)


def _in_turn(searches: Sequence[Search], ranks: Backend, seed: str, limit: int, size: int) -> Found | None:
    """Each on its own world size, round after round, until so many examples held on all of them together. size: of the
    first round; each is twice as long as the one before."""
    before = -1
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


def totals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many there are, were killed, and were killed within `SOON` examples."""
    killed = [outcome for outcome in outcomes if outcome.killed]
    return {
        "defects": len(outcomes),
        "killed": len(killed),
        "survived": len(outcomes) - len(killed),
        "within_200": sum(outcome.examples <= SOON for outcome in killed),
    }
