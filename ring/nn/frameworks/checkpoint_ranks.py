"""A step of a saving or loading on all ranks of the default group: an error of one is raised by all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

Result = TypeVar("Result")
_KINDS = {kind.__name__: kind for kind in (ValueError, TypeError, OSError)}


def rank() -> int:
    """Return this process's rank; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def everywhere(step: Callable[[], Result]) -> list[Result]:
    """Return what the step returns on each rank, in rank order. Collective.

    Raises:
        ValueError, TypeError, OSError, RuntimeError: the first rank's error, the same on every rank.
    """
    if world_size() == 1:
        return [step()]
    answer: tuple[str | None, Any]
    try:
        answer = None, step()
    except Exception as error:  # of any type: the other ranks must raise it too
        answer = _kind(error), str(error)
    answers: list[tuple[str | None, Any]] = [answer] * world_size()
    dist.all_gather_object(answers, answer)
    for number, (kind, value) in enumerate(answers):
        if kind is not None:
            raise _error(number, kind, value)
    return [value for _, value in answers]


@contextmanager
def first_error() -> Iterator[None]:
    """Turn torch's error of several ranks, which all raise, into the first one's."""
    try:
        yield
    except CheckpointException as failed:
        number, (error, _) = min(failed.failures.items())
        raise _error(number, _kind(error), str(error)) from failed


def _kind(error: BaseException) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), type(error).__name__)


def _error(number: int, kind: str, text: str) -> Exception:
    told = text if kind in _KINDS else f"{kind}: {text}"
    return _KINDS.get(kind, RuntimeError)(f"rank {number}: {told}")
