"""`python -m verification.mutants.syntactic.command`: every small change of `ring/` and of the pattern, one after the
other.

A change is killed by the first that finds it:

1. the ordinary properties and laws, on examples in the simulation (and on gloo, for what touches process groups), drawn
   once from a seed and the same for every change;
2. the unit tests of the module, as far as they run in one process and in seconds.

What survives both is equivalent, or shows where the checks are blind: `survivors.toml` says which, and why.

Each outcome is a line of a results file, by a digest of the changed text. So a run can be ended at any time; the next
one judges what is new or changed, and goes on with survivors if it may draw more examples.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from verification.check.laws.mistakes import WRONG_CALLS_REFUSED
from verification.cli.arguments import add_json, count, typed
from verification.cli.outputs import check_file, check_folder
from verification.failures import RankFailure, VerificationFailure
from verification.mutants.plant import substitute
from verification.mutants.syntactic.mutations import ROOT, Mutation, NoGenerator, mutations_of
from verification.mutants.syntactic.summary import (
    SAME,
    SURVIVORS,
    Place,
    Record,
    explained,
    markdown,
    rate,
    read_reasons,
)
from verification.mutants.syntactic.unit_tests import limit_processor, run_tests
from verification.mutants.trials import Subject, anything
from verification.run.backends import PRELOAD, Backend, GlooBackend, SimBackend, Unavailable
from verification.run.processes.pool import Pool, PoolError
from verification.run.processes.worker import exit_with_parent
from verification.runner import law_experiment
from verification.search.search import RUN

COMMAND = "python -m verification.mutants.syntactic.command"
# By importance: a run that ends early has judged the first.
FILES = (
    "ring/plan/range_pairs.py", "ring/plan/ranges.py", "ring/plan/plan.py", "ring/plan/diagonal.py",
    "ring/plan/schedule.py", "ring/comm/exchange.py", "ring/attention.py", "ring/compute/kernels.py",
    "ring/compute/math_kernel.py", "ring/compute/fused_kernels.py",
    "ring/compute/accumulator.py", "ring/plan/rows.py", "ring/strided_view.py", "ring/plan/blocks.py",
    "ring/comm/transport.py", "ring/agreement.py", "ring/budget.py", "ring/layout.py", "ring/compute/parts.py",
    "ring/compute/entries.py", "reference/pattern.py",
)  # fmt: skip
# The unit tests of each, the fastest first: those that need no processes of their own.
TESTS = {
    "ring/compute/accumulator.py": ("ring/compute/test_accumulator", "ring/compute/test_kernels"),
    "ring/agreement.py": ("ring/test_agreement", "ring/test_attention_single"),
    "ring/attention.py": ("ring/test_attention_single", "ring/test_attention_autograd"),
    "ring/plan/blocks.py": ("ring/plan/test_rows_and_views", "ring/plan/test_ranges", "ring/plan/test_plan"),
    "ring/budget.py": ("reference/test_shards", "ring/plan/test_plan", "ring/test_attention_single"),
    "ring/plan/diagonal.py": ("ring/plan/test_diagonal", "ring/plan/test_plan"),
    "ring/comm/exchange.py": ("ring/comm/test_exchange", "ring/test_attention_single"),
    "ring/compute/kernels.py": (
        "ring/compute/test_portions",
        "ring/compute/test_kernels",
        "ring/test_attention_single",
    ),
    "ring/compute/math_kernel.py": ("ring/compute/test_kernel_operations", "ring/compute/test_kernels"),
    "ring/compute/fused_kernels.py": ("ring/compute/test_kernel_operations", "ring/compute/test_kernels"),
    "ring/layout.py": ("ring/test_layout", "ring/plan/test_ranges"),
    "ring/plan/range_pairs.py": ("ring/plan/test_ranges", "ring/plan/test_plan"),
    "ring/compute/entries.py": ("ring/compute/test_entries",),
    "ring/compute/parts.py": ("ring/compute/test_parts",),
    "ring/plan/ranges.py": ("ring/plan/test_ranges", "ring/plan/test_plan"),
    "ring/plan/plan.py": ("ring/plan/test_plan",),
    "ring/plan/rows.py": ("ring/plan/test_rows_and_views", "ring/plan/test_plan"),
    "ring/plan/schedule.py": ("ring/plan/test_plan",),
    "ring/strided_view.py": ("ring/plan/test_rows_and_views",),
    "ring/comm/transport.py": ("ring/comm/test_transport", "ring/test_attention_single"),
    "reference/pattern.py": ("reference/test_oracle_on_paper", "reference/test_pattern"),
}
# What only GPUs run, and nothing here could tell a change of: whole files, and functions of the files above.
ON_GPUS = (
    "ring/compute/combine.py", "ring/compute/merge_kernel.py", "ring/comm/packing.py", "ring/comm/signals.py",
    "ring/comm/symmetric_memory.py",
)  # fmt: skip
FUNCTIONS_ON_GPUS = {
    "ring/attention.py": ("_on_its_device", "_between_gpus"),
    "ring/compute/fused_kernels.py": ("_alike", "_no_dropout", "_gpu_forward", "_gpu_backward"),
}
PROCESS_GROUPS = ("ring/comm/transport.py", "ring/attention.py")  # have code that only real processes run
RESULTS = Path(".verification/mutations.jsonl")
SEED = 3
LIMIT = 300  # examples in the simulation
GLOO_LIMIT = 40  # examples on two ranks, and again on three
MOST_WORK = 160  # ranks times tokens of an example: the few beyond take half of the time
WORLDS = (1, 2, 3, 4, 2, 3, 4, 5)
TIMEOUT = 3  # seconds of the processor for an example, fifty times what one takes
TEST_TIMEOUT = 60  # the same for the unit tests of a module
GLOO_TIMEOUT = 20.0  # seconds for an example: processes that wait for each other take no time of the processor
LONG = 600.0  # seconds after which something else than the change must be wrong
TEST_PRELOAD = (*PRELOAD, "pytest", "hypothesis")
ENOUGH = 0.95  # of what is not equivalent in ring/


class NotSane(Exception):
    """Without any change an example or a test fails: nothing can be said of changes."""


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
            found |= _unit_tests(mutation)
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
    file, seed = task.mutation.file, task.seed
    prepare = partial(substitute, {task.mutation.module: task.mutation.source})
    yield CountedSimulation(TIMEOUT, prepare), 1, subjects_for(file, seed, task.limit)[task.begin :]
    if file in PROCESS_GROUPS and not task.begin:
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
    files = [f"tests/{name}.py" for name in TESTS[mutation.file]]
    with Pool(1, timeout=LONG, preload=TEST_PRELOAD) as pool:
        pool.run(substitute, {mutation.module: mutation.source})
        try:
            (verdict,) = pool.run(run_tests, files, TEST_TIMEOUT)
        except RankFailure as failure:  # its process died, or was ended; an exception is pytest's, and no verdict
            if failure.ranks("raised"):
                raise
            return {"outcome": "tests", "by": "the process of the tests", "kind": failure.kind}
    if verdict.failed is None:
        return {}
    return {"outcome": "tests", "by": verdict.failed, "kind": "failed test", "message": verdict.message}


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


# --- the examples -----------------------------------------------------------------------------------------------------


def subjects_for(file: str, seed: int, count: int) -> list[Subject]:
    """What a change of this file is shown: of wrong calls more where they are what the file is about."""
    return drawn("mistakes" if file == "ring/agreement.py" else "anything", WORLDS, seed, count)


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
    strategy = mistakes_or_anything(worlds) if what == "mistakes" else anything(worlds)
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
    drawn = WRONG_CALLS_REFUSED.draw(draw(st.sampled_from(worlds)))
    return Subject(law_experiment(WRONG_CALLS_REFUSED), draw(drawn))


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
            for file, found in changes.items():
                wanted = [change for change in found if not tests or _place(change) not in settled]
                tasks = [task for change in wanted if (task := _task(change, known, seed, limit, tests)) is not None]
                if not tasks:
                    continue
                unchanged = Mutation(file, 0, "", "none", "", "", (ROOT / file).read_text())
                sane = executor.submit(judge, Task(unchanged, seed, 0, limit, tests)).result()
                if sane.outcome != "survived":
                    raise NotSane(f"{file}: without any change {sane.by or 'the tool'}: {sane.kind}: {sane.message}")
                for future in as_completed([executor.submit(judge, task) for task in tasks]):
                    record = future.result()
                    known[record.key] = record
                    yield record
    finally:
        executor.shutdown(cancel_futures=True)


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


def read_results(path: Path) -> dict[str, Record]:
    """By key; of several outcomes for one change the last. A line that was cut off by an interruption is left out."""
    found: dict[str, Record] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is no outcome: {error}") from error
        found[record.key] = record
    return found


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """0: enough killed and every survivor explained; 1: not so; 2: the tool failed, of which stderr tells."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (NoGenerator, NotSane, Unavailable, PoolError, BrokenExecutor, ValueError, OSError) as error:
        print(f"{typed(COMMAND)}: error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    files = options.files or list(FILES)
    unknown = [file for file in files if file not in TESTS]
    if unknown:
        raise ValueError(f"--files must be of {', '.join(FILES)}; got {', '.join(unknown)}")
    reasons = read_reasons(SURVIVORS)
    check_folder("--results", options.results.parent)
    for argument in ("results", "summary", "json"):
        if getattr(options, argument) is not None:
            check_file(f"--{argument}", getattr(options, argument))
    known = read_results(options.results)
    changes = {file: [x for x in mutations_of(file) if not _on_gpus(x)] for file in files}
    with options.results.open("a") as results:
        settled = {place for place, reason in reasons.items() if reason.verdict in SAME} if options.unsettled else ()
        for record in judge_all(changes, known, options.seed, options.limit, options.jobs, settled):
            results.write(json.dumps(asdict(record)) + "\n")
            results.flush()
            print(record, flush=True)
    records = [replace(known[change.key], **change.described()) for found in changes.values() for change in found]
    functions = [f"{file}: {name}" for file, names in FUNCTIONS_ON_GPUS.items() for name in names]
    absent = [*(file for file in FILES if file not in files), *ON_GPUS, *functions]
    text = markdown(records, reasons, options.seed, files, absent)
    print(text.partition("\n## Survivors")[0])
    if options.summary is not None:
        options.summary.write_text(text)
    judged = explained(records, reasons)
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(record) | {"verdict": v} for record, v, _ in judged], indent=1) + "\n"
        )
    if any(record.outcome == "not run" for record in records):
        print(f"{typed(COMMAND)}: error: some changes could not be judged", file=sys.stderr)
        return 2
    whole = rate(judged)
    return 0 if whole >= ENOUGH and all(verdict != "unexplained" for _, verdict, _ in judged) else 1


def _on_gpus(change: Mutation) -> bool:
    return change.function.partition(".")[0] in FUNCTIONS_ON_GPUS.get(change.file, ())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed(COMMAND), description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 enough killed, all survivors explained; 1 not so; 2 it could not be carried out.",
    )  # fmt: skip
    parser.add_argument("--files", nargs="+", metavar="FILE", help="ring/strided_view.py ... (default: all)")
    parser.add_argument("--jobs", type=count, default=os.cpu_count() or 1, metavar="N", help="default: the cores")
    parser.add_argument("--limit", type=count, default=LIMIT, metavar="N", help="examples a change (%(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help="of the examples (%(default)s)")
    parser.add_argument(
        "--unsettled", action="store_true",
        help="leave out the unit tests of survivors that survivors.toml calls the same in the result: they had not "
        "noticed these when that was written",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="outcomes (%(default)s)")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write the summary as Markdown")
    add_json(parser, "the outcomes with their verdicts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
