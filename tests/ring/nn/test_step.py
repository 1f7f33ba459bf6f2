"""A whole training step, from tokens to parameters, against one process with the whole batch."""

from __future__ import annotations

import pytest
import torch

from tests.support.nn_step_tasks import steps_error
from verification.run.processes.pool import Pool

EXACT = 1e-12  # fp64, two steps; losses, norms and logits of the order of 10


@pytest.mark.ranks
@pytest.mark.parametrize("data", [1, 2, 4])
def test_steps(pool: Pool, data: int) -> None:
    for worst in pool.run(steps_error, data, 4, "cpu"):
        assert max(worst.values()) < EXACT, worst


@pytest.mark.ranks
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("data", [1, 2])
def test_steps_on_gpus(data: int) -> None:
    preload = ("torch", "tests.support.nn_step_tasks")
    with Pool(2, preload=preload, timeout=120.0, joined_by="nccl") as gpus:
        for worst in gpus.run(steps_error, data, 2, "cuda"):
            assert max(worst.values()) < EXACT, worst
