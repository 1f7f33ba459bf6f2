"""Checks of a user's own model and training step against one process: `python -m verification model my_module:build`.

setup          Setup: `build`, and what differs from plain next-token training with `ring.nn`
model_case     ModelCase; whole_batch: the tokens and labels that follow from it; strategies: its draws
precision      fp64 throughout a model
loading        finds and probes the user's Setup
steps          the steps of a rank, and those of the one process
module_trace   inputs, outputs and gradients of all modules; first_module: the first one that differs
model_checks, model_run, saved_model
"""

from verification.models.model_case import ModelCase
from verification.models.model_run import check_model
from verification.models.setup import Part, Run, Setup, WholeBatch

__all__ = ["ModelCase", "Part", "Run", "Setup", "WholeBatch", "check_model"]
