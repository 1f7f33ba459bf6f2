"""What ranks with changed code are shown: plain Cases, and laws between them in proportion to their share of a run; or,
where a defect is of the composition of a training step, TrainingCases, and where it is of what ranks do when one of
them fails, faults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from verification.check.laws import LAWS
from verification.faults.fault_experiment import FAULTS
from verification.faults.inject import observe_with_fault
from verification.run.backends import PRELOAD
from verification.runner import EXAMPLES, PROFILES, law_experiment
from verification.search.experiment import Experiment
from verification.training.training_run import TRAINING, TRAINING_PRELOAD

# Small worlds first, so that shrinking ends there; most are distributed.
WORLDS = (1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 5, 8)
# Of their share: Hypothesis begins with what is simplest, and so draws the plain examples more often than all others.
PLAIN = 0.48


@dataclass(frozen=True)
class Subject:
    """What was drawn, and the experiment that it was drawn for."""

    experiment: Experiment
    drawn: Any

    def premise(self) -> None:
        """Raises ValueError for what could not be drawn."""
        if self.experiment.premise is not None:
            self.experiment.premise(self.drawn)


# Each as often as its share of a run's examples has it; the plain ones first, which are simplest.
_LAWS = [law for law in LAWS if law.on_cpus]
_WHOLE = round(1 / min(law.share for law in _LAWS))
_EXPERIMENTS = [EXAMPLES] * round(PLAIN * _WHOLE)
for _law in _LAWS:
    _EXPERIMENTS += [law_experiment(_law)] * round(_law.share * _WHOLE)


@lru_cache
def _numbers(world: int) -> tuple[int, ...]:
    return tuple(number for number, experiment in enumerate(_EXPERIMENTS) if experiment.fewest_ranks <= world)


@lru_cache
def _drawn(number: int, world: int) -> SearchStrategy[Any]:
    return _EXPERIMENTS[number].draw(world)


@st.composite
def anything(draw: st.DrawFn, worlds: tuple[int, ...]) -> Subject:
    """A Case on one of these world sizes, or what a law does to one."""
    world = draw(st.sampled_from(worlds))
    number = draw(st.sampled_from(_numbers(world)))
    return Subject(_EXPERIMENTS[number], draw(_drawn(number, world)))


# On the world sizes up to the one that is asked for: a simulation has them all at once.
EVERYTHING = Experiment(
    "everything",
    lambda most: anything(tuple(world for world in WORLDS if world <= most)),
    check=lambda backend, subject: subject.experiment.check(backend, subject.drawn),
    case_of=lambda subject: subject.experiment.case_of(subject.drawn),
    with_case=lambda subject, case: replace(subject, drawn=subject.experiment.with_case(subject.drawn, case)),
    record_of=lambda subject: subject.experiment.record_of(subject.drawn),
    property_of=lambda subject, failure: subject.experiment.property_of(subject.drawn, failure),
    premise=lambda subject: subject.premise(),
)
ON_ONE_WORLD = replace(EVERYTHING, draw=lambda world: anything((world,)))


@dataclass(frozen=True)
class OnGloo:
    """What is drawn on real processes, on each world size in turn: `round` examples before the next, and twice as many
    each time. preload: modules with which the processes come. sane: examples that must hold without any defect. limit:
    examples for a defect, unless it is said how many."""

    experiment: Experiment
    worlds: tuple[int, ...]
    round: int
    preload: tuple[str, ...]
    sane: int
    limit: int


ON_GLOO = {
    "attention": OnGloo(ON_ONE_WORLD, (2, 3, 4), 60, PRELOAD, 60, PROFILES["ci"].examples),
    "training": OnGloo(TRAINING, (2, 4), 20, TRAINING_PRELOAD, 60, 300),
    "faults": OnGloo(FAULTS, (2, 3), 30, (*PRELOAD, observe_with_fault.__module__), 10, 100),  # each takes new ranks
}
