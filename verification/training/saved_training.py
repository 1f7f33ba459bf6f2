"""Saved counter-examples of training runs: {"training": TrainingCase}."""

from __future__ import annotations

from typing import Any

from reference import validators
from verification.replay.registry import Saved, SavedExample
from verification.run.backends import Backend, Unavailable
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING, TRAINING_BACKENDS, TRAINING_PRELOAD


class SavedTrainingExample(SavedExample):
    """A counter-example that is replayed on real processes: wrappers and collectives need torch.distributed."""

    def prepare(self, backend: Backend) -> None:
        if backend.name not in TRAINING_BACKENDS:
            allowed = " or ".join(TRAINING_BACKENDS)
            raise Unavailable(f"argument --backend: a training step runs on {allowed}, got {backend.name}")
        backend.preload = TRAINING_PRELOAD


def read_training_example(record: dict[str, Any]) -> Saved:
    """Read a saved record. Raises ValueError for a malformed one."""
    validators.exactly("a counter-example of a training step", record, ["training"])
    return SavedTrainingExample(TRAINING, TrainingCase.from_dict(record["training"]), record)
