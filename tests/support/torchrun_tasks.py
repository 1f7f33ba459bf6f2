"""Defects that the tests of `scripts/validate_nccl.py` plant in every rank before its first task."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ring.comm import process_group
from tests.support.planted import plant, plant_wrong_result

wrong_result = plant_wrong_result


def on_rank_1(kwargs: Any) -> bool:
    return getattr(kwargs["group"], "rank", None) == 1


def wrong_when_long() -> None:
    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        return (result[0] * 1.01, result[1]) if args[4].n >= 64 and isinstance(result, tuple) else result

    plant(spoil)


def stall() -> None:
    """On real ranks only: in the simulation, nothing is wrong."""

    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        if dist.get_world_size() > 1 and dist.get_rank() == 1 and args[4].n >= 4:
            time.sleep(3600)
        return real(*args, **kwargs)

    plant(spoil)


def exception() -> None:
    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        if on_rank_1(kwargs):
            raise RuntimeError("CUDA out of memory, or so")
        return real(*args, **kwargs)

    plant(spoil)


def killed() -> None:
    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        if on_rank_1(kwargs):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    plant(spoil)


def stopped(rank: int) -> None:
    """In the first example with messages."""

    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        if getattr(kwargs["group"], "rank", None) == rank and dist.get_world_size() > 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **kwargs)

    plant(spoil)


def to_process_of(culprit: int, word: signal.Signals) -> None:
    """Not to the rank, but to the process that torchrun started for it, whose number is left in the file `process`."""

    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        if dist.get_world_size() > 1 and dist.get_rank() == culprit:
            # The rank's parent is the forkserver, and that one's parent is the process.
            stat = Path(f"/proc/{os.getppid()}/stat").read_text()
            process = int(stat.rpartition(")")[2].split()[1])
            Path("process").write_text(str(process))
            os.kill(process, word)
            if word == signal.SIGSTOP:
                time.sleep(3600)  # so that no answer is on its way
        return real(*args, **kwargs)

    plant(spoil)


rank_0_stopped, rank_1_stopped = partial(stopped, 0), partial(stopped, 1)
first_process_killed, process_killed = (partial(to_process_of, rank, signal.SIGKILL) for rank in (0, 1))
first_process_stopped, process_stopped = (partial(to_process_of, rank, signal.SIGSTOP) for rank in (0, 1))


def a_byte_lost() -> None:
    """Large messages arrive with their last byte as it was before."""
    real = process_group.ProcessGroupTransport.post

    def post(self: Any, sends: Any, receives: Any) -> Any:
        large = [m for m in receives if m.bytes >= 4095]
        before = [m.tensor.view(-1)[-1:].clone() for m in large]
        pending = real(self, sends, receives)
        wait = pending.wait

        def waited() -> None:
            wait()
            for message, byte in zip(large, before, strict=True):
                message.tensor.view(-1)[-1:] = byte

        pending.wait = waited  # type: ignore[method-assign]
        return pending

    process_group.ProcessGroupTransport.post = post  # type: ignore[method-assign]
