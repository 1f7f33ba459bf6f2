"""Features of StepCases that `verification.report.coverage` counts."""

from __future__ import annotations

from operator import attrgetter

from verification.models.step_case import OPTIMISERS, WRAPPERS
from verification.report.coverage import Has

Groups = dict[str, dict[str, Has]]


def choices(field: str, values: tuple[str, ...]) -> dict[str, Has]:
    """Return a feature for each value of a field."""
    name = field.removeprefix("model.")
    return {f"{name} {value}": _has(field, value) for value in values}


def _has(field: str, value: str) -> Has:
    return lambda case: attrgetter(field)(case) == value


MESH: dict[str, Has] = {
    "data alone": lambda case: case.context == 1 < case.world,
    "context alone": lambda case: case.data == 1 < case.world,
    "data x context": lambda case: case.data > 1 and case.context > 1,
    "context groups apart": lambda case: case.arrangement == "strided" and 1 < case.context < case.world,
    "empty shard": lambda case: 0 in case.shards().counts,
    "uneven shards": lambda case: max(case.shards().counts) - min(case.shards().counts) > 1,
}
DOCUMENTS: dict[str, Has] = {
    "several documents": lambda case: sum(length > 0 for length in case.documents) > 1,
    "empty document": lambda case: 0 in case.documents,
}
STEP: dict[str, Has] = {
    "several micro-batches": lambda case: case.accumulation > 1,
    "several steps": lambda case: case.steps > 1,
    "clipping that bites": lambda case: case.clipping is not None and case.clipping < 1,
}
CHOICES: Groups = {"wrapper": choices("wrapper", WRAPPERS), "optimiser": choices("optimiser", OPTIMISERS)}
