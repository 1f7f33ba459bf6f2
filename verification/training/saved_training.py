"""Saved counter-examples of training runs: {"training": TrainingCase}."""

from __future__ import annotations

from typing import Any

from reference import validators
from verification.models.model_run import SavedStepExample
from verification.replay.registry import Saved
from verification.run.backends import Backend
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING, TRAINING_PRELOAD


class SavedTrainingExample(SavedStepExample):
    def prepare(self, backend: Backend) -> None:
        super().prepare(backend)
        backend.preload = TRAINING_PRELOAD


def read_training_example(record: dict[str, Any]) -> Saved:
    """Read a saved record. Raises ValueError for a malformed one."""
    validators.exactly("a counter-example of a training step", record, ["training"])
    return SavedTrainingExample(TRAINING, TrainingCase.from_dict(record["training"]), record)
