"""What the ranks of a run tell each other: results, failures, the slowest time.

Over gloo, whatever the tensors go over: a GPU on which something is stuck does not keep the ranks from talking."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
PATIENCE = 300.0  # seconds that a rank waits for the others
# What torch says where the CPU's memory is at an end; it has no type of its own.
NO_CPU_MEMORY = "can't allocate memory"


class Failed(Exception):
    """The same attempt on all ranks failed on some, or on all. The same on every rank.

    everywhere: on all of them. memory: on one of them at least for want of memory.
    """

    def __init__(self, errors: list[str | None], memory: bool) -> None:
        self.everywhere = None not in errors
        self.memory = memory
        found = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        others = "" if len(found) == 1 else f" ({len(found)} of {len(errors)} ranks failed)"
        super().__init__(f"rank {found[0][0]}: {found[0][1]}{others}")


class Lost(Exception):
    """The run cannot go on: some rank does not answer, or the communication is in an unknown state."""


@dataclass(frozen=True)
class _Answer:
    value: object
    error: str | None = None
    memory: bool = False


@dataclass(frozen=True)
class Ranks:
    """One rank's view of all. control: a gloo group of all ranks; None for a run of one."""

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, device: str) -> Ranks:
        """Joined as torchrun's environment says: NCCL or gloo, `device` being "cuda" or "cpu". A rank that waits for
        another longer than PATIENCE ends."""
        patience = timedelta(seconds=PATIENCE)
        place = torch.device(device)
        if device == "cuda":
            place = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=patience)
        control = dist.new_group(backend="gloo", timeout=patience)
        return cls(dist.get_rank(), dist.get_world_size(), place, control)

    def connect(self) -> None:
        """Have the tensors' own group connected: NCCL connects at the first call, which all ranks must take part in."""
        if self.control is not None:
            self.attempt(lambda: dist.all_reduce(torch.zeros(1, device=self.device)))

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in rank order; waits for all. Raises Lost where one does not come."""
        if self.control is None:
            return [value]
        found: list[T | None] = [None] * self.world
        try:
            dist.all_gather_object(found, value, group=self.control)
        except RuntimeError as error:
            raise Lost(f"rank {self.rank} waited in vain for another: {first_line(error)}") from error
        return cast(list[T], found)

    def attempt(self, call: Callable[[], T]) -> list[T]:
        """Every rank's result of a call that all ranks make. Raises Failed, on every rank, where it raised on one."""
        try:
            answer = _Answer(call())
        except Lost:
            raise
        except Exception as error:  # whatever a kernel, a library or an allocator raises: reported, never dropped
            answer = _Answer(None, described(error), is_memory(error))
        answers = self.gathered(answer)
        if any(x.error is not None for x in answers):
            raise Failed([x.error for x in answers], any(x.memory for x in answers))
        return [cast(T, x.value) for x in answers]


def is_memory(error: BaseException) -> bool:
    """Whether an error says that memory is at an end."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or NO_CPU_MEMORY in str(error)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def described(error: BaseException) -> str:
    """Type, message and place of an error in one line."""
    last = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    where = "" if last is None else f" [{last.name}, line {last.lineno}]"
    return f"{type(error).__name__}: {first_line(error)}{where}"
