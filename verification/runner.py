"""The main job on one world size: examples, then laws; and one problem of real size."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from sys import modules

from verification.check import properties
from verification.check.checks import CHECKS
from verification.check.laws import LAWS
from verification.experiments import EXAMPLES, LARGER_ERRORS, check_case, law_experiment, on_gpus
from verification.failures import RankHang
from verification.problems import real_size
from verification.report.counter_example import CounterExample, save_record
from verification.report.report import Report
from verification.run.backends import Backend
from verification.search.experiment import Experiment, FoundFailure
from verification.search.search import Search

WORLDS = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Profile:
    """Size of a run: `about` in words, and the examples on two ranks. One rank sends nothing, and more ranks are slower
    but find hardly more: both get fewer."""

    about: str
    examples: int
    budget: float  # seconds to shrink a failure, and seconds to look for others after the first one
    remembers: bool = False  # store failing examples in `search.DATABASE`; the next run tries them first


PROFILES = {
    "quick": Profile("four minutes", 1120, 30),
    "ci": Profile("a quarter of an hour", 8000, 60),
    "thorough": Profile("two hours", 60_000, 200, remembers=True),
}


@dataclass(frozen=True)
class RunPlan:
    """Arguments of a run, also of training, peers and validate. examples: for each world size; None: the profile's.
    only: titles of properties and laws; empty: all of them."""

    worlds: tuple[int, ...]
    profile: Profile
    examples: int | None
    seed: int
    backend: str
    failures: Path
    real_size: int = real_size.TOKENS  # tokens of the last problem; 0: none
    jobs: int = 1  # world sizes at a time
    only: tuple[str, ...] = ()

    def examples_for(self, world: int) -> int:
        if self.examples is not None:
            return self.examples
        share = 0.75 if world == 1 else (2 / world) ** 2
        return max(10, round(self.profile.examples * share))


LARGER_ERRORS_SHARE = 0.1  # of the examples of a world size


def titles() -> dict[str, str]:
    """Return a sentence on each property and law, by title."""
    sentences = {p.title: " ".join(_sentence(CHECKS[name]) for name in p.checks) for p in properties.PROPERTIES}
    sentences[properties.EVERY_RANK_ANSWERS.title] = "No rank raises, hangs or dies."
    names = [law.check.__module__ for law in LAWS]
    own_module = {name: modules[name] for name in names if names.count(name) == 1}
    return sentences | {law.name: _sentence(own_module.get(law.check.__module__, law.check)) for law in LAWS}


def _sentence(documented: object) -> str:
    """Return the first sentence of the docstring."""
    return re.split(r"(?<!\.)\.(?: |$)", " ".join((documented.__doc__ or "").split()))[0] + "."


def plain_on(plan: RunPlan, world: int) -> list[tuple[Experiment, int]]:
    """Return the experiments with plain Cases on a world size, each with its number of examples."""
    count = plan.examples_for(world)
    if not plan.only:
        return [(EXAMPLES, count), (LARGER_ERRORS, max(1, round(count * LARGER_ERRORS_SHARE)))]
    selected = [item.title for item in properties.PROPERTIES if item.title in plan.only]
    check = partial(check_case, names=properties.select_checks(selected))
    return [(replace(EXAMPLES, check=check), count)] if selected else []


def laws_on(plan: RunPlan, world: int) -> list[tuple[Experiment, int]]:
    """Return the experiments of the laws, each with its number of examples: that of plain Cases for a law in `only`."""
    count = plan.examples_for(world)
    applicable = [law for law in LAWS if law.fewest_ranks <= world and law.concerns(plan.backend)]
    if plan.only:
        return [(law_experiment(law), count) for law in applicable if law.name in plan.only]
    return [(law_experiment(law), min(law.most, max(1, round(count * law.share)))) for law in applicable]


def run_world(plan: RunPlan, report: Report, backend: Backend, shrink_backend: Backend, world: int) -> None:
    plain, laws = plain_on(plan, world), laws_on(plan, world)
    if not plain and not laws:
        return report.say(f"world {world}: there is nothing to check of what --only names")
    backend.start(world)
    report.start_world(world, sum(examples for _, examples in (*plain, *laws)))
    for number, (on_cpus, examples) in enumerate((*plain, *laws)):
        experiment = on_gpus(on_cpus) if backend.name == "nccl" else on_cpus
        search = Search(experiment, backend, report, world, plan.profile.budget, plan.profile.remembers, shrink_backend)
        failures = explore(plan, report, search, examples)
        if hangs(failures):
            report.say(f"world {world}: ranks hang, so the rest is left out on this world size")
            break
        if number < len(plain) and failures:
            report.say(f"world {world}: plain examples fail, so the laws between them are left out")
            break
    report.end_world()


def run_worlds(
    plan: RunPlan, report: Report, backend: Backend, run: Callable[[int], bool], first_failure: bool = False
) -> Report:
    """Call `run` for each world size, on its ranks; failures go to the report. run: True if there were failures.
    first_failure: stop there, with the fewest ranks. Raises `backends.Unavailable` if no ranks can be started."""
    waiting = list(plan.worlds)
    try:
        while waiting:
            world = waiting.pop(0)
            backend.start(world)
            report.start_world(world, plan.examples_for(world))
            if run(world) and first_failure:
                break
    except BaseException as error:
        report.not_run(waiting, error)
        if isinstance(error, KeyboardInterrupt):
            report.interrupt()
            report.summary()
        raise
    finally:
        backend.close()
    return report


def explore(plan: RunPlan, report: Report, search: Search, examples: int) -> list[CounterExample]:
    """Draw that many examples; save each failure and report it once."""
    failures = [save(counterexample, search, plan.failures) for counterexample in search.explore(examples, plan.seed)]
    for failure in failures:
        if any(failure.file == known.file for known in report.failures):
            report.say(f"world {search.world}: {failure.broken} is broken by the same example as before")
        else:
            report.failed(failure)
    return failures


def run_real_size(plan: RunPlan, report: Report, backend: Backend) -> None:
    problem = real_size.RealSizeProblem(4 if 4 in plan.worlds else max(plan.worlds), plan.real_size)
    if hangs(report.failures):
        report.say(f"ranks hang, so {real_size.TITLE} is left out")
    else:
        backend.start(problem.world)
        real_size.run(backend, report, problem, plan.failures)


def hangs(failures: list[CounterExample]) -> bool:
    return any(failure.kind == RankHang.kind for failure in failures)


def save(counterexample: FoundFailure, search: Search, folder: Path) -> CounterExample:
    experiment = search.experiment
    world, record = experiment.case_of(counterexample.subject).world, experiment.record_of(counterexample.subject)
    broken = experiment.property_of(counterexample.subject, counterexample.failure)
    before = counterexample.before
    if before != ():
        record |= {"before": before and [earlier.record_of(subject) for earlier, subject in before]}
    return save_record(counterexample.failure, broken, world, record, folder, counterexample.backend)
