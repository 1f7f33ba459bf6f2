"""Checks of a user's own model and training step against one process: `python -m verification model my_module:build`.

setup          Setup: `build`, and what differs from plain next-token training with `ring.nn`
loading        finds and probes the user's Setup
steps          the steps of a rank, and those of the one process
observation    inputs, outputs and gradients of all modules; first_module: the first one that differs
precision      fp64 throughout a model
whole_batch    tokens and labels of a rank and of the one process
definitions    what the one process computes in place of `ring`; formulas: attention and rotary positions
same_bits      the law of the same bits on any ranks
model_case, model_checks, model_run

`verification.training` checks the project's own models by the same parts:

step_case      StepCase: the fields of any training run; batches: its tokens and labels; strategies: its draws
results        Results of a run, expected ones; recording: how a run makes them; quantities: their comparison
tolerance      allowed deviations, by noise in lower precisions
"""

from verification.models.model_case import ModelCase
from verification.models.model_run import check_model
from verification.models.setup import Part, Run, Setup, WholeBatch

__all__ = ["ModelCase", "Part", "Run", "Setup", "WholeBatch", "check_model"]
