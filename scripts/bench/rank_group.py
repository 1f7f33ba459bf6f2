"""Exchange of results, failures and times between the ranks of a run.

It uses gloo, so that a call that hangs on a GPU does not block it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = 300.0  # seconds that a rank waits for the others
# torch's message when the CPU is out of memory; the error has no type of its own.
NO_CPU_MEMORY = "can't allocate memory"


class Failed(Exception):
    """A call of all ranks failed on at least one. Every rank raises the same error.

    everywhere: it failed on all ranks. memory: at least one rank ran out of memory.
    """

    def __init__(self, errors: list[str | None], memory: bool) -> None:
        self.everywhere = None not in errors
        self.memory = memory
        failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        others = "" if len(failed) == 1 else f" ({len(failed)} of {len(errors)} ranks failed)"
        super().__init__(f"rank {failed[0][0]}: {failed[0][1]}{others}")


class Lost(Exception):
    """The run cannot go on: a rank does not answer, or the communication is in an unknown state."""


@dataclass(frozen=True)
class RankGroup:
    """Group of all ranks, seen from one. control: a gloo group of all ranks; None for a run of one."""

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, device: str) -> RankGroup:
        """Join by torchrun's variables, over NCCL for device "cuda" and gloo for "cpu". A rank that waits longer than
        TIMEOUT exits."""
        timeout = timedelta(seconds=TIMEOUT)
        place = torch.device(device)
        if device == "cuda":
            place = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
        return cls(dist.get_rank(), dist.get_world_size(), place, control)

    def connect(self) -> None:
        """Connect the group of the tensors: NCCL connects in its first call, which all ranks must make."""
        if self.control is not None:
            self.attempt(lambda: dist.all_reduce(torch.zeros(1, device=self.device)))

    def gathered(self, value: T) -> list[T]:
        """Gather every rank's value, in rank order. Raises Lost if a rank does not answer."""
        if self.control is None:
            return [value]
        values: list[T | None] = [None] * self.world
        try:
            dist.all_gather_object(values, value, group=self.control)
        except RuntimeError as error:
            raise Lost(f"rank {self.rank} waited in vain for another: {first_line(error)}") from error
        return cast(list[T], values)

    def attempt(self, call: Callable[[], T]) -> list[T]:
        """Make a call on all ranks and gather the results. Raises Failed on every rank if one raised."""
        try:
            answer: tuple[object, str | None, bool] = call(), None, False
        except Lost:
            raise
        except Exception as error:  # kernels, libraries and allocators may raise anything
            answer = None, described(error), is_memory(error)
        values, errors, memory = zip(*self.gathered(answer), strict=True)
        if any(error is not None for error in errors):
            raise Failed(list(errors), any(memory))
        return list(cast(tuple[T, ...], values))


def is_memory(error: BaseException) -> bool:
    """Return True if an error means that memory ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or NO_CPU_MEMORY in str(error)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def described(error: BaseException) -> str:
    """Format type, message and place of an error in one line."""
    last = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    where = "" if last is None else f" [{last.name}, line {last.lineno}]"
    return f"{type(error).__name__}: {first_line(error)}{where}"
