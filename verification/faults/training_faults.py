"""Kinds of faults of a training, and their drawing. A fault has a kind, and a seed that chooses the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference import validators
from verification.faults import checkpoint_faults, training_process

MAX_SEED = 2**32 - 1
EVERY = 128  # faults, of which one needs processes: they take seconds, the others milliseconds

Strike = Callable[[random.Random, Path], None]


@dataclass(frozen=True)
class TrainingFault:
    """A kind of fault. strike: injects it in an empty folder, and raises MishandledFault with a verdict."""

    title: str
    must: str
    strike: Strike


IN_FILES = {
    **{name: TrainingFault(title, "named with its file", checkpoint_faults.damaged_by(name))
       for name, title in checkpoint_faults.DAMAGE.items()},
    "foreign": TrainingFault("a checkpoint of others", "refused by a name", checkpoint_faults.foreign),
    "full": TrainingFault("a full disk", "named, nothing left", checkpoint_faults.full_disk),
    "held": TrainingFault("a folder that is held", "its holder named", checkpoint_faults.held),
    "taken": TrainingFault("a saving over another", "refused, that stays whole", checkpoint_faults.taken),
}  # fmt: skip
IN_PROCESSES = {
    name: TrainingFault(title, "nothing lost or left behind", training_process.striking(name))
    for name, title in training_process.STRIKES.items()
}
KINDS = IN_FILES | IN_PROCESSES


def drawn(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the faults of a run: every kind in turn, each with a seed of its own."""
    seeds = random.Random(seed)
    for number in range(count):
        turn, rest = divmod(number, EVERY)
        kinds, place = (IN_FILES, number) if rest else (IN_PROCESSES, turn)
        yield {"kind": list(kinds)[place % len(kinds)], "seed": seeds.getrandbits(32)}


def validate(how: object) -> dict[str, Any]:
    """Return a fault. Raises ValueError for a malformed one."""
    fault = validators.exactly("training_fault", how, ["kind", "seed"])
    validators.choice("kind", fault["kind"], KINDS)
    validators.integer("seed", fault["seed"], 0, MAX_SEED)
    return fault
