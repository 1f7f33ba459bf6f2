"""Runs `python -m verification training`: random TrainingCases for each world size."""

from __future__ import annotations

from verification.experiments import on_gpus
from verification.models.model_run import STEP_PRELOAD, on_device
from verification.models.tolerance import FACTOR, THRESHOLD
from verification.report.coverage import Coverage
from verification.report.report import Report
from verification.run.backends import Backend, open_backend
from verification.runner import Profile, RunPlan, explore, run_worlds
from verification.search.experiment import Experiment
from verification.search.search import Search
from verification.training.error_histogram import Deviations
from verification.training.step_checks import check_step
from verification.training.step_expectation import expect_training
from verification.training.strategies import training_cases
from verification.training.training_case import TrainingCase
from verification.training.training_coverage import TRAINING_GROUPS

TRAINING_WORLDS = (2, 4)
TRAINING_PRELOAD = (*STEP_PRELOAD, "verification.training.rank.rank_step")

TRAINING_PROFILES = {
    "quick": Profile("some minutes", 220, 30),
    "ci": Profile("half an hour", 1500, 60),
    "thorough": Profile("two hours", 6000, 200, remembers=True),
}


def check_training(backend: Backend, case: TrainingCase) -> dict[str, float]:
    """Check all properties of one TrainingCase. The expectation is computed while the ranks train."""
    from verification.training.rank.rank_step import train_on_rank  # lazy: importing FSDP slows every command

    backend.submit(train_on_rank, case)
    expectation = expect_training(case)
    return check_step(case, expectation, backend.collect())


def validate_case(case: TrainingCase) -> None:
    """Raise ValueError for a TrainingCase whose results depend on rounding alone; none is drawn."""
    if case.model.has_steps and case.dtype != "float64":
        raise ValueError(f"dtype is {case.dtype!r}; it must be 'float64' for a model whose norms may be steps")


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


def run_training(plan: RunPlan, report: Report, backend: Backend | None = None) -> Report:
    """Run all world sizes; failures go to the report. Raises `backends.Unavailable` if no ranks can be started."""
    backend = open_backend(plan.backend) if backend is None else backend
    TRAINING.prepare(backend)
    report.coverage = Coverage(groups=TRAINING_GROUPS)
    report.say(f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    deviations = Deviations(report)
    experiment = on_gpus(TRAINING) if backend.name == "nccl" else TRAINING

    def run(world: int) -> bool:
        deviations.world = world
        search = Search(experiment, backend, deviations, world, plan.profile.budget, plan.profile.remembers)
        failures = explore(plan, report, search, plan.examples_for(world))
        report.end_world("training steps")
        return bool(failures)

    run_worlds(plan, report, backend, run)
    report.extras |= {
        "tolerance": {"float64": THRESHOLD, "factor of lower precisions": FACTOR},
        "deviations": deviations.to_list(),
    }
    report.summary()
    return report
