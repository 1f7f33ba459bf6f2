"""Saved counter-examples of users' models: {"model": "module:attribute", "case": ModelCase}."""

from __future__ import annotations

from typing import Any

from reference import validators
from verification.failures import Refused
from verification.models.loading import load
from verification.models.model_case import ModelCase
from verification.models.model_run import TIMEOUT, ModelExperiment, SavedStepExample, preload_of
from verification.replay.registry import Saved
from verification.run.backends import Backend


class SavedModelExample(SavedStepExample):
    """A counter-example that runs the ModelCase as saved, without applying the claims of the Setup."""

    def prepare(self, backend: Backend) -> None:
        super().prepare(backend)
        backend.timeout, backend.preload = TIMEOUT, preload_of(self.record["model"])


def read_model_example(record: dict[str, Any]) -> Saved:
    """Read a saved record. Raises ValueError if it is malformed or its Setup cannot be loaded."""
    validators.exactly("a counter-example of a model", record, ["model", "case"])
    name = record["model"]
    if not isinstance(name, str):
        raise ValueError(f"model is {name!r}; it must be package.module:attribute")
    try:
        load(name)
    except Refused as error:
        raise ValueError(str(error)) from error
    return SavedModelExample(ModelExperiment(name).experiment(), ModelCase.from_dict(record["case"]), record)
