"""One pool of four ranks for all tests of `ring.nn`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verification.run.processes.pool import Pool

TASKS = ("nn_module_tasks", "nn_batch_tasks", "nn_loss_tasks", "nn_gradient_tasks", "nn_refusals", "nn_step_tasks")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    # Wrappers and DTensors import these on their first use, each rank for itself.
    slow = ("torch.distributed.tensor", "torch._dynamo")
    preload = ("torch", *slow, *(f"tests.support.{name}" for name in TASKS))
    with Pool(4, preload=preload, timeout=60.0) as ranks:
        yield ranks
