"""What becomes of syntactic changes: examples, then unit tests, until one of them shows that something is wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from ring import agreement, attention, walk
from ring.comm import group, host_memory, process_group, transport
from verification.check.laws.mistakes import WRONG_CALLS_REFUSED
from verification.failures import RankFailure, VerificationFailure
from verification.mutants.defect import NotSane
from verification.mutants.plant import substitute
from verification.mutants.subjects import Subject, anything
from verification.mutants.syntactic.mutations import ROOT, Mutation
from verification.mutants.syntactic.page import Place, Record
from verification.mutants.syntactic.targets import tests_of
from verification.mutants.syntactic.unit_tests import Verdict, limit_processor, run_tests, run_tests_with_ranks
from verification.run.backends import PRELOAD, Backend, GlooBackend, SimBackend
from verification.run.processes.pool import Pool
from verification.run.processes.worker import exit_with_parent
from verification.runner import law_experiment
from verification.search.search import RUN
from verification.training.training_run import TRAINING, TRAINING_PRELOAD

# Modules with code that only real processes run, and that which wrong calls are about.
ON_PROCESSES = tuple(one.__name__ for one in (transport, process_group, host_memory, group, attention, walk))
ON_MISTAKES = (agreement.__name__,)
# Modules and losses around the attention: plain Cases do not run them, training steps do.
IN_TRAINING = "ring.nn."
GLOO_LIMIT = 40  # examples on two ranks, and again on three
TRAINING_LIMIT = 40  # training steps on two ranks
MOST_WORK = 160  # ranks times tokens of an example: the few beyond take half of the time
WORLDS = (1, 2, 3, 4, 2, 3, 4, 5)
TIMEOUT = 3  # seconds of the processor for an example, fifty times what one takes
TEST_TIMEOUT = 180  # the same for the unit tests of a module
RANKS_TIMEOUT = 400.0  # seconds for those that start ranks, five times what they take
GLOO_TIMEOUT = 20.0  # seconds for an example: processes that wait for each other take no time of the processor
LONG = 600.0  # seconds after which something else than the change must be wrong
TEST_PRELOAD = (*PRELOAD, "pytest", "hypothesis")


# --- one change -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is to be done with a change: show it the examples from `begin` to `limit`, or the unit tests."""

    mutation: Mutation
    seed: int
    begin: int
    limit: int
    tests: bool = False


class CountedSimulation(SimBackend):
    """An example may take so many seconds of the processor: what hangs is ended, however busy the machine is."""

    def __init__(self, seconds: int, prepare: Callable[[], object]) -> None:
        super().__init__(LONG, prepare)
        self._seconds = seconds

    def submit(self, task: Any, case: Any, *arguments: Any) -> None:
        super().submit(task, case, *arguments)
        assert self._pool is not None
        for pid in self._pool.pids:
            limit_processor(self._seconds, pid)


def judge(task: Task) -> Record:
    """The outcome for one change. Whatever goes wrong with the tool itself makes it "not run", with the reason."""
    started = time.perf_counter()
    mutation = task.mutation
    found: dict[str, Any] = {"outcome": "survived", "by": None, "kind": None, "message": None}
    examples = task.begin
    try:
        if task.tests:
            found |= _unit_tests(mutation) or _tests_with_ranks(mutation)
        else:
            for backend, world, subjects in _searches(task):
                killed, seen = _search(backend, world, subjects)
                examples += seen if backend.name == "sim" else 0
                found |= killed
                if killed:
                    break
    except Exception as error:  # the reason is shown; the next change may fare better
        found |= {"outcome": "not run", "kind": type(error).__name__, "message": _first_line(error)}
    seconds = round(time.perf_counter() - started, 2)
    return Record(
        **mutation.described(), **found, examples=examples, tested=task.tests, seed=task.seed, seconds=seconds
    )


def _searches(task: Task) -> Iterator[tuple[Backend, int, Sequence[Subject]]]:
    """(backend, world to start it on, examples), one after the other."""
    module, seed = task.mutation.module, task.seed
    prepare = partial(substitute, {task.mutation.module: task.mutation.source})
    yield CountedSimulation(TIMEOUT, prepare), 1, subjects_for(module, seed, task.limit)[task.begin :]
    if task.begin:
        return
    if module.startswith(IN_TRAINING):
        gloo = GlooBackend(GLOO_TIMEOUT, prepare)
        gloo.preload = TRAINING_PRELOAD
        yield gloo, 2, drawn("training", (2,), seed, TRAINING_LIMIT)
    if module in ON_PROCESSES:
        for world in (2, 3):
            yield GlooBackend(GLOO_TIMEOUT, prepare), world, drawn("mistakes", (world,), seed, GLOO_LIMIT)


def _search(backend: Backend, world: int, subjects: Sequence[Subject]) -> tuple[dict[str, Any], int]:
    """What broke first, {} if nothing; and how many examples were looked at."""
    try:
        backend.start(world)
        for number, subject in enumerate(subjects, start=1):
            try:
                subject.check(backend)
            except VerificationFailure as failure:
                found = {"by": subject.title(failure), "kind": failure.kind, "message": _first_line(failure)}
                return {"outcome": "properties", **found}, number
        return {}, len(subjects)
    finally:
        backend.close()


def _unit_tests(mutation: Mutation) -> dict[str, Any]:
    with Pool(1, timeout=LONG, preload=TEST_PRELOAD) as pool:
        pool.run(substitute, {mutation.module: mutation.source})
        try:
            (verdict,) = pool.run(run_tests, tests_of(mutation.file), TEST_TIMEOUT)
        except RankFailure as failure:  # its process died, or was ended; an exception is pytest's, and no verdict
            if failure.ranks("raised"):
                raise
            return {"outcome": "tests", "by": "the process of the tests", "kind": failure.kind}
    return _failed(verdict)


def _tests_with_ranks(mutation: Mutation) -> dict[str, Any]:
    return _failed(run_tests_with_ranks(tests_of(mutation.file), mutation.file, mutation.source, RANKS_TIMEOUT))


def _failed(verdict: Verdict) -> dict[str, Any]:
    if verdict.failed is None:
        return {}
    return {"outcome": "tests", "by": verdict.failed, "kind": "failed test", "message": verdict.message}


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


# --- the examples -----------------------------------------------------------------------------------------------------


def subjects_for(module: str, seed: int, count: int) -> list[Subject]:
    """What a change of this module is shown: more wrong calls where the module is about them."""
    return drawn("mistakes" if module in ON_MISTAKES else "anything", WORLDS, seed, count)


@lru_cache
def drawn(what: str, worlds: tuple[int, ...], seed: int, count: int) -> list[Subject]:
    """Different examples without those that take longest. A greater count begins with those of a smaller one."""
    found: dict[str, Subject] = {}

    def keep(subject: Subject) -> None:
        case = subject.experiment.case_of(subject.drawn)
        if len(case.ranks) * case.tokens <= MOST_WORK:
            found.setdefault(json.dumps(subject.record(), sort_keys=True), subject)

    chosen = settings(
        max_examples=RUN, database=None, phases=(Phase.generate,), deadline=None, derandomize=False,
        verbosity=Verbosity.quiet, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    strategy = STRATEGIES[what](worlds)
    number = 0
    while len(found) < count:
        seeded(f"{seed}/{what}/{worlds}/{number}")(chosen(given(strategy)(keep)))()
        number += 1
    return list(found.values())[:count]


@st.composite
def mistakes_or_anything(draw: st.DrawFn, worlds: tuple[int, ...]) -> Subject:
    """Two wrong calls for every other example."""
    if draw(st.integers(0, 2)) == 0:
        return draw(anything(worlds))
    strategy = WRONG_CALLS_REFUSED.draw(draw(st.sampled_from(worlds)))
    return Subject(law_experiment(WRONG_CALLS_REFUSED), draw(strategy))


@st.composite
def training_steps(draw: st.DrawFn, worlds: tuple[int, ...]) -> Subject:
    return Subject(TRAINING, draw(TRAINING.draw(draw(st.sampled_from(worlds)))))


STRATEGIES = {"anything": anything, "mistakes": mistakes_or_anything, "training": training_steps}


# --- all of them ------------------------------------------------------------------------------------------------------


def judge_all(
    changes: dict[str, list[Mutation]], known: dict[str, Record], seed: int, limit: int, jobs: int,
    settled: Container[Place] = (),
) -> Iterator[Record]:  # fmt: skip
    """New outcomes, which are put into `known` too: of all changes the examples, then of survivors the tests.

    changes: by file, in the order in which they are wanted. settled: survivors that the tests need not see. Raises
    NotSane, BrokenExecutor.
    """
    # Every process computes on one core: from the import of numpy on.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    executor = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_end_with_the_run)
    try:
        for tests in (False, True):
            tasks = [
                task
                for found in changes.values()
                for change in found
                if not tests or _place(change) not in settled
                if (task := _task(change, known, seed, limit, tests)) is not None
            ]
            shown = {_shown(task): _unchanged(task, limit) for task in tasks}
            sound = {executor.submit(judge, task): key for key, task in shown.items()}
            judged = {executor.submit(judge, task): _shown(task) for task in tasks}
            for record in _believed(sound, judged):
                known[record.key] = record
                yield record
    finally:
        executor.shutdown(cancel_futures=True)


def _believed(sound: dict[Future[Record], Any], judged: dict[Future[Record], Any]) -> Iterator[Record]:
    """Outcomes of changes, each as soon as the code without any change has survived what the change was shown.

    By future, what is shown: `_shown`. Raises NotSane.
    """
    held: dict[Any, list[Record]] = {shown: [] for shown in sound.values()}  # until then
    for future in as_completed((*sound, *judged)):
        record = future.result()
        if future in sound:
            _must_survive(record)
            yield from held.pop(sound[future])
        elif judged[future] in held:
            held[judged[future]].append(record)
        else:
            yield record


def _shown(task: Task) -> tuple[Any, ...]:
    """What the code is shown: the same for changes of many files, and without any change shown once."""
    if task.tests:
        return tuple(tests_of(task.mutation.file))
    module = task.mutation.module
    return module in ON_MISTAKES, module in ON_PROCESSES, module.startswith(IN_TRAINING)


def _unchanged(task: Task, limit: int) -> Task:
    file = task.mutation.file
    return replace(
        task, mutation=Mutation(file, 0, "", "none", "", "", (ROOT / file).read_text()), begin=0, limit=limit
    )


def _must_survive(record: Record) -> None:
    if record.outcome != "survived":
        raise NotSane(f"{record.file}: without any change {record.by or 'the tool'}: {record.kind}: {record.message}")


def _end_with_the_run() -> None:
    """A worker of a run that was killed would wait for tasks for ever."""
    threading.Thread(target=exit_with_parent, daemon=True).start()


def _place(change: Mutation) -> Place:
    return change.file, change.function, change.before, change.after


def _task(change: Mutation, known: dict[str, Record], seed: int, limit: int, tests: bool) -> Task | None:
    """What is left to do with a change, None if nothing."""
    record = known.get(change.key)
    if record is None or record.outcome == "not run":
        return None if tests else Task(change, seed, 0, limit)
    if not record.survived:
        return None
    if tests:
        return None if record.tested else Task(change, seed, record.examples, limit, tests=True)
    begin = record.examples if record.seed == seed else 0
    return Task(change, seed, begin, limit) if begin < limit else None
