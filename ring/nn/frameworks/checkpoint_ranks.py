"""A step of a saving or loading on all ranks of the default group: an error of one is raised by all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ring.comm.rank_error import described, error_of

Result = TypeVar("Result")


def rank() -> int:
    """Return this process's rank; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def everywhere(step: Callable[[], Result]) -> list[Result]:
    """Return what the step returns on each rank, in rank order. Collective.

    Raises:
        Exception: the first rank's error, of its kind, on every rank.
    """
    if world_size() == 1:
        return [step()]
    answer: Any
    try:
        answer = step(), None
    except Exception as wrong:  # of any type: the other ranks must raise it too
        answer = None, described(wrong)
    answers = [answer] * world_size()
    dist.all_gather_object(answers, answer)
    for number, (_, error) in enumerate(answers):
        if error is not None:
            raise error_of(number, *error)
    return [value for value, _ in answers]


@contextmanager
def first_error() -> Iterator[None]:
    """Turn torch's error of several ranks, which all raise, into the first one's."""
    try:
        yield
    except CheckpointException as failed:
        number, (wrong, _) = min(failed.failures.items())
        raise error_of(number, *described(wrong)) from failed
