"""Runs `python -m verification training`: random TrainingCases for each world size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import lcm

from verification.case import TILE
from verification.experiments import on_gpus
from verification.models.model_run import STEP_PRELOAD
from verification.models.same_bits import SAME_WEIGHTS
from verification.models.tolerance import FACTOR, THRESHOLD
from verification.report.coverage import Coverage
from verification.report.report import Report
from verification.run.backends import Backend, open_backend
from verification.runner import Profile, RunPlan, explore, run_worlds
from verification.search.experiment import Experiment
from verification.search.search import Search
from verification.training.error_histogram import Deviations
from verification.training.same_weights import check_same_weights
from verification.training.step_checks import STEP_CHECKS, STEP_PROPERTIES, check_step
from verification.training.step_expectation import expect_training
from verification.training.strategies import same_weights_cases, takes_chunks, training_cases
from verification.training.training_case import TrainingCase
from verification.training.training_coverage import TRAINING_GROUPS

TRAINING_WORLDS = (2, 4)
SAME_WEIGHTS_SHARE = 0.1  # of the examples of a world size
TRAINING_PRELOAD = (*STEP_PRELOAD, "verification.training.rank.rank_step")

TRAINING_PROFILES = {
    "quick": Profile("some minutes", 220, 30),
    "ci": Profile("half an hour", 1500, 60),
    "thorough": Profile("two hours", 6000, 200, remembers=True),
}


def check_training(
    backend: Backend, case: TrainingCase, checks: Sequence[str] = tuple(STEP_CHECKS)
) -> dict[str, float]:
    """Check the properties of one TrainingCase that these checks make up, and the bits of its other ranks, if any. The
    expectation is computed while the ranks train."""
    from verification.training.rank.rank_step import train_on_rank  # lazy: importing FSDP slows every command

    backend.submit(train_on_rank, case)
    expectation = expect_training(case)
    observations = backend.collect()
    ratios = check_step(case, expectation, observations, checks)
    return ratios | check_same_weights(backend, case, observations)


def validate_case(case: TrainingCase) -> None:
    """Raise ValueError for a TrainingCase whose results depend on rounding alone; none is drawn."""
    if case.model.has_steps and case.dtype != "float64":
        raise ValueError(f"dtype is {case.dtype!r}; it must be 'float64' for a model whose norms may be steps")


def validate_same_weights(case: TrainingCase) -> None:
    """Raise ValueError for a TrainingCase that is no subject of the law of the same weights."""
    validate_case(case)
    if case.other_ranks is None or case.elsewhere.world > case.world or not takes_chunks(case):
        raise ValueError(f"{case} must have other ranks, no more than its own, and an exchange that divides no heads")


def on_device(case: TrainingCase, device: str) -> TrainingCase:
    """Return the Case on that device, with sequences so much longer that the device takes their chunks."""
    chunk = case.same_bits or TILE[device]
    return case.stretched(lcm(chunk, TILE[device]) // chunk, device)


TRAINING = Experiment(
    "training steps",
    training_cases,
    check_training,
    moved=on_device,
    kind="training",
    preload=TRAINING_PRELOAD,
    on_fewer=True,
    validate=validate_case,
)


# Its failures are saved and replayed as those of TRAINING, whose check is the same.
ON_OTHER_RANKS = replace(TRAINING, name=SAME_WEIGHTS.title, draw=same_weights_cases, validate=validate_same_weights)


def titles() -> list[str]:
    """Return the titles of all properties."""
    return [item.title for item in (*STEP_PROPERTIES, SAME_WEIGHTS)]


def experiments_on(plan: RunPlan, world: int) -> list[tuple[Experiment, int]]:
    """Return the experiments on a world size, each with its number of examples: that of TRAINING for the same weights
    in `only`, whose examples must have the other properties, too."""
    count = plan.examples_for(world)
    names = {name for item in STEP_PROPERTIES if item.title in plan.only for name in item.checks}
    check = partial(check_training, checks=[name for name in STEP_CHECKS if name in names])
    steps = TRAINING if not plan.only else replace(TRAINING, check=check)
    found = [] if set(plan.only) == {SAME_WEIGHTS.title} else [(steps, count)]
    if SAME_WEIGHTS.title in (plan.only or titles()):
        found.append((ON_OTHER_RANKS, count if plan.only else max(1, round(count * SAME_WEIGHTS_SHARE))))
    return found


def run_training(plan: RunPlan, report: Report, backend: Backend | None = None) -> Report:
    """Run all world sizes; failures go to the report. Raises `backends.Unavailable` if no ranks can be started."""
    backend = open_backend(plan.backend) if backend is None else backend
    TRAINING.prepare(backend)
    report.coverage = Coverage(groups=TRAINING_GROUPS)
    report.say(f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    deviations = Deviations(report)

    def run(world: int) -> bool:
        deviations.world, failures = world, []
        for on_cpus, examples in experiments_on(plan, world):
            experiment = on_gpus(on_cpus) if backend.name == "nccl" else on_cpus
            search = Search(experiment, backend, deviations, world, plan.profile.budget, plan.profile.remembers)
            failures += explore(plan, report, search, examples)
            if failures:
                break
        report.end_world("training steps")
        return bool(failures)

    run_worlds(plan, report, backend, run)
    report.extras |= {
        "tolerance": {"float64": THRESHOLD, "factor of lower precisions": FACTOR},
        "deviations": deviations.to_list(),
    }
    report.summary()
    return report
