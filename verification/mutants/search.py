"""The search for seeded defects: examples on ranks that run with one, until a property or a law breaks.

Examples are drawn and checked as by `verification.runner` (plain Cases, and laws in proportion to their share); for a
defect of the training step as by `verification.training`, for one of what ranks do when one fails as by
`verification.faults`. Whatever goes wrong with the tool itself (a defect that cannot be planted, ranks that do not
start) is raised, and counts neither as killed nor as survived.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from verification.failures import VerificationFailure, WrongResult
from verification.mutants.catalogue import by_name
from verification.mutants.defect import BaselineFails, CannotPlant, Defect
from verification.mutants.experiments import EVERYTHING, ON_GLOO, WORLDS
from verification.mutants.plant import plant, preparation
from verification.protocols import Example
from verification.report.run_result import finite
from verification.run.backends import Backend, GlooBackend, SimBackend, Unavailable
from verification.run.processes.worker import exit_with_parent
from verification.search.experiment import Counterexample, ToolError
from verification.search.search import TIMEOUT, Search

PROCESSES = 2  # defects at a time, each with ranks of its own
LIMITS = {subject: drawn.limit for subject, drawn in ON_GLOO.items()}  # examples for a defect
SHRINK = 1.5  # seconds for a failure: there are hundreds, and all of them are to take less than ten minutes
SOON = 200  # examples within which a defect should be found

_OF_THE_TOOL = (CannotPlant, Unavailable)  # no verdict on a defect
_UNBOUND = re.compile(r"\b(NameError|UnboundLocalError): ")


@dataclass(frozen=True)
class Outcome:
    """The result of the search for one defect.

    check       title of the property or law that broke; None if the defect survived
    kind        of the failure
    examples    until the defect was found, that one included; all of them if it survived
    seconds     likewise
    case        the record of the smallest failure seen, for `verification replay`
    ratio       of that failure: its error as a fraction of its bound, where a number was wrong
    """

    name: str
    provenance: str
    killed: bool
    check: str | None
    kind: str | None
    examples: int
    seconds: float
    case: dict[str, Any] | None
    ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 3)}


def try_all(names: Sequence[str], seed: int, limit: int | None = None, processes: int = PROCESSES) -> Iterator[Outcome]:
    """Yield the outcomes in the order of `names`, as soon as each and those before it are known.

    limit: examples for each defect; None: by its subject. Raises NotSane or Unavailable; then no outcome is to be
    trusted. Raises ToolError at the end for the defects that could not be tried, when all others have been.
    """
    # One thread for each process, from the import of numpy on: the processes share the cores with their ranks.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    context, places = multiprocessing.get_context("spawn"), sorted({by_name(name).place for name in names})
    executor = ProcessPoolExecutor(max(1, min(processes, len(names))), context, initializer=_end_with_parent)
    try:
        for sane in [executor.submit(check_sane, place, seed) for place in places]:
            sane.result()
        if any(by_name(name).in_oracle for name in names):
            executor.submit(_judged_anew, None, check_sane.__name__, ("attention", "sim"), seed).result()
        futures = [executor.submit(try_defect, name, seed, limit) for name in names]
        unrun = []
        for future in futures:
            try:
                yield future.result()
            except (CannotPlant, ToolError) as error:  # the others have outcomes all the same
                unrun.append(str(error))
        if unrun:
            raise ToolError("; ".join(unrun))
    finally:
        executor.shutdown(cancel_futures=True)


# --- in one process ---------------------------------------------------------------------------------------------------


def _end_with_parent() -> None:
    """End this process with the search: it would go on to the end of its defect."""
    threading.Thread(target=exit_with_parent, daemon=True).start()


class Silent:
    """The listener of a search that reports nothing: it ends at the first failure, and coverage is that of `run`."""

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None: ...
    def covered(self, case: Example) -> None: ...
    def met(self, failure: VerificationFailure) -> None: ...
    def failed_again(self) -> None: ...


def check_sane(place: tuple[str, str], seed: int) -> None:
    """Run a few dozen examples on ranks without a defect. place: (subject, backend). Raises NotSane."""
    subject, backend = place
    found, _, _ = _find(place, None, f"{seed}/sane", ON_GLOO[subject].sane)
    if found is not None:
        experiment = ON_GLOO[subject].experiment
        title, record = experiment.property_of(found.subject, found.failure), experiment.record_of(found.subject)
        raise BaselineFails(f"without any defect an example fails on {backend}: {title}: {found.failure}; {record}")


def try_defect(name: str, seed: int, limit: int | None = None) -> Outcome:
    """Search for one defect of the catalogue. Raises ToolError for one whose own code cannot run.

    A defect of the oracle is one of the process that judges, too: that is a new process then.
    """
    if not by_name(name).in_oracle:
        return _tried(name, seed, limit)
    outcome: Outcome = _judged_anew(name, _tried_with_it.__name__, name, seed, limit)
    return outcome


def _tried(name: str, seed: int, limit: int | None) -> Outcome:
    defect = by_name(name)
    limit = LIMITS[defect.subject] if limit is None else limit
    return outcome_of(defect, *_find(defect.place, preparation(defect), f"{seed}/{name}", limit))


def _judged_anew(name: str | None, function: str, *arguments: Any) -> Any:
    """Call a function of this module in a process of its own with that defect in it; None: with none."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_end_with_parent) as judge:
        return judge.submit(_plant_and_call, name, function, *arguments).result()


def _plant_and_call(name: str | None, function: str, *arguments: Any) -> Any:
    plant(name or "no defect", {} if name is None else by_name(name).sources(), memory=None)
    # The modules that are imported from now on, this one among them, are new ones.
    return getattr(importlib.import_module(__name__), function)(*arguments)


def _tried_with_it(name: str, seed: int, limit: int | None) -> Outcome:
    """Count an oracle that raises as found, as it would end `run`."""
    started, defect = time.perf_counter(), by_name(name)
    try:
        return _tried(name, seed, limit)
    except (Exception, ToolError) as error:
        if isinstance(error, _OF_THE_TOOL) or isinstance(error.__cause__, _OF_THE_TOOL):
            raise
        if _UNBOUND.search(f"{type(error).__name__}: {error}".replace("(", ": ")):  # as a call and as repr
            raise ToolError(f"{name}: the edited code does not run: {error}") from error
        spent = time.perf_counter() - started
        return Outcome(name, defect.provenance, True, "the oracle runs", "tool error", 1, spent, None)


def outcome_of(defect: Defect, found: Counterexample | None, examples: int, seconds: float) -> Outcome:
    """Raises ToolError where the edited code uses a name that is bound nowhere."""
    if found is None:
        return Outcome(defect.name, defect.provenance, False, None, None, examples, seconds, None)
    if _UNBOUND.search(str(found.failure).partition("\n")[0]):
        raise ToolError(f"{defect.name}: the edited code does not run: {found.failure}")
    experiment = ON_GLOO[defect.subject].experiment
    ratio = found.failure.ratio if isinstance(found.failure, WrongResult) else None
    return Outcome(
        defect.name, defect.provenance, True, experiment.property_of(found.subject, found.failure), found.failure.kind,
        examples, seconds, experiment.record_of(found.subject), finite(ratio),
    )  # fmt: skip


def _find(
    place: tuple[str, str], prepare: Callable[[], object] | None, seed: str, limit: int
) -> tuple[Counterexample | None, int, float]:
    """The first failure on ranks of that place, (subject, backend), with the examples and seconds until then."""
    drawn, on_gloo = ON_GLOO[place[0]], place[1] == "gloo"
    ranks = GlooBackend(TIMEOUT, prepare, drawn.preload) if on_gloo else SimBackend(TIMEOUT, prepare)
    try:
        experiment, worlds = (drawn.experiment, drawn.worlds) if on_gloo else (EVERYTHING, (max(WORLDS),))
        # A hang on real processes costs a whole timeout: it is not shrunk here.
        searches = [Search(experiment, ranks, Silent(), world, SHRINK, shrinks_hangs=False) for world in worlds]
        if on_gloo:
            found = _in_turn(searches, ranks, seed, limit, drawn.round)
        else:
            ranks.start(1)  # it takes Cases of any world size
            found = searches[0].find(limit, seed)
    finally:
        ranks.close()
    examples = sum(search.examples for search in searches) + (found is not None)
    return found, examples, sum(search.seconds for search in searches)


def _in_turn(searches: Sequence[Search], ranks: Backend, seed: str, limit: int, size: int) -> Counterexample | None:
    """Search on each world size in turn until `limit` examples held on all of them together.

    size: examples of the first round; each round is twice as long as the one before.
    """
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
    """Numbers of defects: all, killed, survived, killed within `SOON` examples."""
    killed = [outcome for outcome in outcomes if outcome.killed]
    return {
        "defects": len(outcomes),
        "killed": len(killed),
        "survived": len(outcomes) - len(killed),
        "within_200": sum(outcome.examples <= SOON for outcome in killed),
    }
