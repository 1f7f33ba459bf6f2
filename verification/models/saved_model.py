"""Saved counter-examples of users' models: {"model": "module:attribute", "case": ModelCase}."""

from __future__ import annotations

from typing import Any

from reference import validators
from verification.models.loading import load
from verification.models.model_case import ModelCase
from verification.models.model_run import TIMEOUT, ModelExperiment, SavedStepExample, preload_of
from verification.replay.registry import Saved, experiment_with
from verification.run.backends import Backend
from verification.search.experiment import Experiment


class SavedModelExample(SavedStepExample):
    """A counter-example that runs the ModelCase as saved, without applying the claims of the Setup."""

    def prepare(self, backend: Backend) -> None:
        super().prepare(backend)
        backend.timeout, backend.preload = TIMEOUT, preload_of(self.record["model"])


def read_model_example(record: dict[str, Any]) -> Saved:
    """Read a saved record. Raises ValueError if it is malformed or its Setup cannot be loaded."""
    validators.exactly("a counter-example of a model", record, ["model", "case"])
    experiment = experiment_with(record, "model", "package.module:attribute", experiment_of)
    return SavedModelExample(experiment, ModelCase.from_dict(record["case"]), record)


def experiment_of(name: str) -> Experiment:
    """Return the Experiment with the Setup of that name. Raises Refused if it cannot be loaded."""
    load(name)
    return ModelExperiment(name).experiment()
