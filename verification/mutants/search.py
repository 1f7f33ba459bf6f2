"""The search for seeded defects: run examples on ranks with a defect until a property or a law breaks.

Examples are drawn and checked as by `verification.runner` (plain Cases, and laws in proportion to their share), for
defects of the training step as by `verification.training`, for defects of failure handling as by `verification.faults`.
Faults of the tool itself (a defect that cannot be planted, ranks that do not start) are raised, and count neither as
killed nor as survived.
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
from verification.mutants.experiments import EVERYTHING, SEARCHES, WORLDS
from verification.mutants.plant import plant, preparation
from verification.protocols import CaseLike
from verification.report.run_record import finite
from verification.run.backends import Backend, GlooBackend, SimBackend, Unavailable
from verification.run.processes.worker import exit_with_parent
from verification.search.experiment import FoundFailure, ToolError
from verification.search.search import TIMEOUT, Search

PROCESSES = 2  # defects at a time, each with its own ranks
LIMITS = {subject: search_plan.limit for subject, search_plan in SEARCHES.items()}  # examples for a defect
SHRINK = 1.5  # seconds to shrink a failure: there are hundreds, and the whole search should take under ten minutes
SOON = 200  # examples within which a defect should be found

_TOOL_FAULTS = (CannotPlant, Unavailable)  # no verdict on a defect
_UNBOUND = re.compile(r"\b(NameError|UnboundLocalError): ")


@dataclass(frozen=True)
class DefectOutcome:
    """The result of the search for one defect.

    check       title of the property or law that broke; None if the defect survived
    kind        of the failure
    examples    examples up to the first failure, that one included; all of them if it survived
    seconds     time of these examples
    case        the record of the smallest failure, for `verification replay`
    ratio       error / bound of that failure, if a number was wrong
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


def try_all(
    names: Sequence[str], seed: int, limit: int | None = None, processes: int = PROCESSES
) -> Iterator[DefectOutcome]:
    """Yield the outcomes in the order of `names`, each as soon as it and those before it are known.

    limit: examples for each defect; None: by its subject. Raises BaselineFails or Unavailable; then do not trust any
    outcome. Raises ToolError at the end, for the defects that could not be tried.
    """
    # Limit each process to one thread before it imports numpy: the processes share the cores with their ranks.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    context, settings = multiprocessing.get_context("spawn"), sorted({by_name(name).setting for name in names})
    executor = ProcessPoolExecutor(max(1, min(processes, len(names))), context, initializer=_end_with_parent)
    try:
        for baseline in [executor.submit(check_baseline, setting, seed) for setting in settings]:
            baseline.result()
        if any(by_name(name).in_oracle for name in names):
            executor.submit(_in_new_judge, None, check_baseline.__name__, ("attention", "sim"), seed).result()
        futures = [executor.submit(try_defect, name, seed, limit) for name in names]
        unrun = []
        for future in futures:
            try:
                yield future.result()
            except (CannotPlant, ToolError) as error:  # the other defects still get outcomes
                unrun.append(str(error))
        if unrun:
            raise ToolError("; ".join(unrun))
    finally:
        executor.shutdown(cancel_futures=True)


# --- in one process ---------------------------------------------------------------------------------------------------


def _end_with_parent() -> None:
    """End this process when the search ends: else it would finish its defect first."""
    threading.Thread(target=exit_with_parent, daemon=True).start()


class Silent:
    """The listener of a search that reports nothing: it ends at the first failure, and coverage is that of `run`."""

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None: ...
    def covered(self, case: CaseLike) -> None: ...
    def met(self, failure: VerificationFailure) -> None: ...
    def failed_again(self) -> None: ...


def check_baseline(setting: tuple[str, str], seed: int) -> None:
    """Run a few dozen examples on ranks without a defect. setting: (subject, backend). Raises BaselineFails."""
    subject, backend = setting
    counterexample, _, _ = _find(setting, None, f"{seed}/sane", SEARCHES[subject].sane)
    if counterexample is not None:
        experiment = SEARCHES[subject].experiment
        drawn, failure = counterexample.subject, counterexample.failure
        title, record = experiment.property_of(drawn, failure), experiment.record_of(drawn)
        raise BaselineFails(f"without any defect an example fails on {backend}: {title}: {failure}; {record}")


def try_defect(name: str, seed: int, limit: int | None = None) -> DefectOutcome:
    """Search for one defect of the catalogue. Raises ToolError if the edited code cannot run.

    A defect of the oracle affects the judging process, too, so that is a new process then.
    """
    if not by_name(name).in_oracle:
        return _search_for(name, seed, limit)
    outcome: DefectOutcome = _in_new_judge(name, _search_with_oracle_defect.__name__, name, seed, limit)
    return outcome


def _search_for(name: str, seed: int, limit: int | None) -> DefectOutcome:
    defect = by_name(name)
    limit = LIMITS[defect.subject] if limit is None else limit
    return make_outcome(defect, *_find(defect.setting, preparation(defect), f"{seed}/{name}", limit))


def _in_new_judge(name: str | None, function: str, *arguments: Any) -> Any:
    """Call a function of this module in a new process with that defect planted; None: without a defect."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_end_with_parent) as judge:
        return judge.submit(_plant_and_call, name, function, *arguments).result()


def _plant_and_call(name: str | None, function: str, *arguments: Any) -> Any:
    plant(name or "no defect", {} if name is None else by_name(name).sources(), memory=None)
    # Modules imported from now on, including this one, are the edited ones.
    return getattr(importlib.import_module(__name__), function)(*arguments)


def _search_with_oracle_defect(name: str, seed: int, limit: int | None) -> DefectOutcome:
    """Search in the edited process. An oracle that raises counts as found, since it would end `run`."""
    started, defect = time.perf_counter(), by_name(name)
    try:
        return _search_for(name, seed, limit)
    except (Exception, ToolError) as error:
        if isinstance(error, _TOOL_FAULTS) or isinstance(error.__cause__, _TOOL_FAULTS):
            raise
        if _UNBOUND.search(f"{type(error).__name__}: {error}".replace("(", ": ")):  # as a call and as repr
            raise ToolError(f"{name}: the edited code does not run: {error}") from error
        seconds = time.perf_counter() - started
        return DefectOutcome(name, defect.provenance, True, "the oracle runs", "tool error", 1, seconds, None)


def make_outcome(defect: Defect, counterexample: FoundFailure | None, examples: int, seconds: float) -> DefectOutcome:
    """Return the outcome of a search. Raises ToolError if the edited code uses an unbound name."""
    if counterexample is None:
        return DefectOutcome(defect.name, defect.provenance, False, None, None, examples, seconds, None)
    if _UNBOUND.search(str(counterexample.failure).partition("\n")[0]):
        raise ToolError(f"{defect.name}: the edited code does not run: {counterexample.failure}")
    experiment = SEARCHES[defect.subject].experiment
    subject, failure = counterexample.subject, counterexample.failure
    ratio = failure.ratio if isinstance(failure, WrongResult) else None
    return DefectOutcome(
        defect.name, defect.provenance, True, experiment.property_of(subject, failure), failure.kind, examples, seconds,
        experiment.record_of(subject), finite(ratio),
    )  # fmt: skip


def _find(
    setting: tuple[str, str], prepare: Callable[[], object] | None, seed: str, limit: int
) -> tuple[FoundFailure | None, int, float]:
    """Return the first failure on (subject, backend), if any, and the number and seconds of the examples up to it."""
    search_plan, on_gloo = SEARCHES[setting[0]], setting[1] == "gloo"
    ranks = GlooBackend(TIMEOUT, prepare) if on_gloo else SimBackend(TIMEOUT, prepare)
    search_plan.experiment.prepare(ranks)
    try:
        experiment, worlds = (search_plan.experiment, search_plan.worlds) if on_gloo else (EVERYTHING, (max(WORLDS),))
        # A hang on real processes costs a whole timeout: do not shrink it.
        searches = [Search(experiment, ranks, Silent(), world, SHRINK, shrinks_hangs=False) for world in worlds]
        if on_gloo:
            counterexample = _in_turn(searches, ranks, seed, limit, search_plan.round)
        else:
            ranks.start(1)  # a simulation takes Cases of any world size
            counterexample = searches[0].find(limit, seed)
    finally:
        ranks.close()
    examples = sum(search.examples for search in searches) + (counterexample is not None)
    return counterexample, examples, sum(search.seconds for search in searches)


def _in_turn(searches: Sequence[Search], ranks: Backend, seed: str, limit: int, size: int) -> FoundFailure | None:
    """Search on each world size in turn until `limit` examples held on all of them together.

    size: examples of the first round; each round is twice as long as the one before.
    """
    before = -1
    while before < (passed := sum(search.examples for search in searches)) < limit:
        before = passed
        for search in searches:
            ranks.start(search.world)
            remaining = limit - sum(other.examples for other in searches)
            counterexample = search.find(search.examples + min(size, remaining), f"{seed}/{search.world}/{size}")
            if counterexample is not None:
                return counterexample
        size *= 2
    return None


def totals(outcomes: Sequence[DefectOutcome]) -> dict[str, int]:
    """Count the defects: all, killed, survived, killed within `SOON` examples."""
    killed = [outcome for outcome in outcomes if outcome.killed]
    return {
        "defects": len(outcomes),
        "killed": len(killed),
        "survived": len(outcomes) - len(killed),
        "within_200": sum(outcome.examples <= SOON for outcome in killed),
    }
