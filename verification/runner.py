"""The main job on one world size: examples, then laws; and one problem of real size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from sys import modules

from verification.case import Case
from verification.check import properties
from verification.check.checks import CHECKS, costs
from verification.check.expectation import expect
from verification.check.laws import LAWS, Law
from verification.check.supported import check_supported
from verification.failures import RankHang
from verification.problems import real_size
from verification.report.counter_example import CounterExample, save_record
from verification.report.report import Report
from verification.run.backends import Backend
from verification.run.rank import observe
from verification.search.experiment import Counterexample, Experiment, case_record
from verification.search.search import Search
from verification.strategies.cases import cases

WORLDS = (1, 2, 3, 4, 8)
MOST_RANKS = {"gloo": 64, "sim": 1024, "nccl": 64}  # by backend


@dataclass(frozen=True)
class Profile:
    """How much to draw: in words, and as examples on two ranks. One rank sends nothing, more ranks are slower and find
    hardly more: both get fewer."""

    about: str
    examples: int
    budget: float  # seconds to shrink a failure, and seconds to look for others after the first one
    remembers: bool = False  # failing examples are kept in `search.DATABASE` and tried first by the next run


PROFILES = {
    "quick": Profile("four minutes", 1120, 30),
    "ci": Profile("a quarter of an hour", 8000, 60),
    "thorough": Profile("two hours", 60_000, 200, remembers=True),
}


@dataclass(frozen=True)
class RunPlan:
    """What `python -m verification run` was asked for. examples: for each world size; None: as the profile has it.
    only: titles of properties and laws; none: all of them."""

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


def check_case(backend: Backend, case: Case, names: Sequence[str] = tuple(CHECKS)) -> dict[str, float]:
    """The properties of one Case that these checks make up. The expectation is computed while the ranks are at work."""
    backend.submit(observe, case)
    expectation = properties.prepare(case)
    return properties.check(case, expectation, backend.collect(), names)


def check_errors(backend: Backend, case: Case) -> dict[str, float]:
    """The same but for the property that the oracle and its twin agree: its ratio is no error of the ranks."""
    backend.submit(observe, case)
    expectation = expect(case)
    costs(case)
    return properties.check(case, expectation, backend.collect(), properties.OF_THE_RANKS)


EXAMPLES = Experiment("examples", cases, check_case, premise=check_supported)

# An experiment of its own, since its Cases are much alike: with half of the EXAMPLES drawn around one Case, the others
# would miss what is rare.
PUSHED = replace(EXAMPLES, name="examples with larger errors", check=check_errors, targets_error=True)
PUSHED_SHARE = 0.1  # of the examples that a world size is given


def law_experiment(law: Law) -> Experiment:
    """Its subjects are pairs (Case, how), and each failure breaks the law itself."""
    return Experiment(
        law.name,
        law.draw,
        check=lambda backend, subject: {law.name: law.check(backend, *subject)},
        case_of=lambda subject: subject[0],
        with_case=lambda subject, case: (case, subject[1]),
        record_of=lambda subject: {"law": law.name, "case": case_record(subject[0]), "how": subject[1]},
        property_of=lambda subject, failure: law.name,
        fewest_ranks=law.fewest_ranks,
        premise=lambda subject: law.validate(*subject),
    )


def on_gpus(experiment: Experiment) -> Experiment:
    """The same on GPUs."""
    change = partial(experiment.placed, backend="nccl")
    return replace(experiment, draw=lambda world: experiment.draw(world).map(change))


def titles() -> dict[str, str]:
    """Every property and law by its title, with a sentence on it."""
    found = {one.title: " ".join(_sentence(CHECKS[name]) for name in one.checks) for one in properties.PROPERTIES}
    found[properties.EVERY_RANK_ANSWERS.title] = "No rank raises, hangs or dies."
    places = [law.check.__module__ for law in LAWS]
    alone = {place: modules[place] for place in places if places.count(place) == 1}
    return found | {law.name: _sentence(alone.get(law.check.__module__, law.check)) for law in LAWS}


def _sentence(documented: object) -> str:
    """The first sentence of the docstring."""
    return re.split(r"(?<!\.)\.(?: |$)", " ".join((documented.__doc__ or "").split()))[0] + "."


def plain_on(plan: RunPlan, world: int) -> list[tuple[Experiment, int]]:
    """Plain Cases on a world size: what is drawn, and how many examples of it."""
    count = plan.examples_for(world)
    if not plan.only:
        return [(EXAMPLES, count), (PUSHED, max(1, round(count * PUSHED_SHARE)))]
    chosen = [one.title for one in properties.PROPERTIES if one.title in plan.only]
    judge = partial(check_case, names=properties.checks_of(chosen))
    return [(replace(EXAMPLES, check=judge), count)] if chosen else []


def laws_on(plan: RunPlan, world: int) -> list[tuple[Experiment, int]]:
    """The same of laws between Cases. A law that was asked for by name gets as many examples as plain Cases would."""
    count = plan.examples_for(world)
    about = [law for law in LAWS if law.fewest_ranks <= world and law.concerns(plan.backend)]
    if plan.only:
        return [(law_experiment(law), count) for law in about if law.name in plan.only]
    return [(law_experiment(law), min(law.most, max(1, round(count * law.share)))) for law in about]


def run_world(plan: RunPlan, report: Report, backend: Backend, shrink_backend: Backend, world: int) -> None:
    plain, laws = plain_on(plan, world), laws_on(plan, world)
    if not plain and not laws:
        return report.say(f"world {world}: there is nothing to check of what --only names")
    backend.start(world)
    report.start_world(world, sum(examples for _, examples in (*plain, *laws)))
    for number, (drawn, examples) in enumerate((*plain, *laws)):
        experiment = on_gpus(drawn) if backend.name == "nccl" else drawn
        search = Search(experiment, backend, report, world, plan.profile.budget, plan.profile.remembers, shrink_backend)
        failures = explore(plan, report, search, examples)
        if hangs(failures):
            report.say(f"world {world}: ranks hang, so the rest is left out on this world size")
            break
        if number < len(plain) and failures:
            report.say(f"world {world}: plain examples fail, so the laws between them are left out")
            break
    report.end_world()


def explore(plan: RunPlan, report: Report, search: Search, examples: int) -> list[CounterExample]:
    """Draw that many; what fails is saved, and told once."""
    failures = [save(found, search, plan.failures) for found in search.explore(examples, plan.seed)]
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


def save(found: Counterexample, search: Search, folder: Path) -> CounterExample:
    experiment = search.experiment
    world, record = experiment.case_of(found.subject).world, experiment.record_of(found.subject)
    broken = experiment.property_of(found.subject, found.failure)
    return save_record(found.failure, broken, world, record, folder, found.backend)
