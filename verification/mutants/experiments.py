"""Experiments for ranks with seeded defects: plain Cases, and laws in proportion to their share of a run. Defects of a
training step get TrainingCases, defects of failure handling get injected faults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from verification.check.laws import LAWS
from verification.experiments import EXAMPLES, law_experiment
from verification.faults.fault_experiment import FAULTS
from verification.runner import PROFILES
from verification.search.experiment import Experiment
from verification.training.training_run import ON_OTHER_RANKS, TRAINING

# Small worlds come first, so that shrinking ends there; most have several ranks.
WORLDS = (1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 5, 8)
# Weight of plain examples, below their share: Hypothesis prefers the first entries, and draws them more often.
PLAIN = 0.48


@dataclass(frozen=True)
class Subject:
    """A drawn example, and its experiment."""

    experiment: Experiment
    example: Any

    def validate(self) -> None:
        """Raise ValueError for an example that the experiment cannot draw."""
        if self.experiment.validate is not None:
            self.experiment.validate(self.example)


# Each experiment as often as its share of a run's examples; the plain one first, since it is simplest.
_LAWS = [law for law in LAWS if law.on_cpus]
_WHOLE = round(1 / min(law.share for law in _LAWS))
_EXPERIMENTS = [EXAMPLES] * round(PLAIN * _WHOLE)
for _law in _LAWS:
    _EXPERIMENTS += [law_experiment(_law)] * round(_law.share * _WHOLE)


@lru_cache
def _possible(world: int) -> tuple[int, ...]:
    return tuple(number for number, experiment in enumerate(_EXPERIMENTS) if experiment.fewest_ranks <= world)


@lru_cache
def _strategy(number: int, world: int) -> SearchStrategy[Any]:
    return _EXPERIMENTS[number].draw(world)


@st.composite
def subjects(draw: st.DrawFn, worlds: tuple[int, ...]) -> Subject:
    """Draw a Case on one of these world sizes, or a law with its Case and change."""
    world = draw(st.sampled_from(worlds))
    number = draw(st.sampled_from(_possible(world)))
    return Subject(_EXPERIMENTS[number], draw(_strategy(number, world)))


class _Everything(Experiment):
    """Experiment whose subjects have experiments of their own."""

    def case_of(self, subject: Subject) -> Any:
        return subject.experiment.case_of(subject.example)

    def with_case(self, subject: Subject, case: Any) -> Subject:
        return replace(subject, example=subject.experiment.with_case(subject.example, case))

    def record_of(self, subject: Subject) -> dict[str, Any]:
        return subject.experiment.record_of(subject.example)


# Draws all world sizes up to the given one: a simulation runs Cases of any world size.
EVERYTHING = _Everything(
    "everything",
    lambda most: subjects(tuple(world for world in WORLDS if world <= most)),
    check=lambda backend, subject: subject.experiment.check(backend, subject.example),
    property_of=lambda subject, failure: subject.experiment.property_of(subject.example, failure),
    validate=lambda subject: subject.validate(),
)
ON_ONE_WORLD = replace(EVERYTHING, draw=lambda world: subjects((world,)))


@dataclass(frozen=True)
class DefectSearch:
    """A search on each world size in turn, on real processes or in the simulation. round: examples before the next
    world size; doubles each time. sane: examples that must hold without any defect. limit: default number of examples
    for a defect."""

    experiment: Experiment
    worlds: tuple[int, ...]
    round: int
    sane: int
    limit: int


SEARCHES = {
    "attention": DefectSearch(ON_ONE_WORLD, (2, 3, 4), 60, 60, PROFILES["ci"].examples),
    "training": DefectSearch(TRAINING, (2, 4), 20, 60, 300),
    "same weights": DefectSearch(ON_OTHER_RANKS, (2, 3), 10, 20, 100),
    "faults": DefectSearch(FAULTS, (3, 2), 30, 10, 300),  # each needs new ranks; of two, one alone can be missing
}
