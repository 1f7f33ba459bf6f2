"""Search for the longest shards whose forward and backward succeed, by doubling until memory or time runs out.

Every rank searches in its own child process. If one rank runs out of memory, others may wait on their GPU for ever, and
only killing the process ends the wait. The processes try each size together; when one fails, all are killed.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from bench import ours
from bench.rank_group import RankGroup, described, is_memory
from bench.workload import Workload

STEP = 0.2  # seconds between two polls of the processes
START = 120.0  # seconds allowed for their start, besides the search
OUT_OF_MEMORY = "failed: out of memory"
GROWTH = 4.5  # a dense pass takes 4 times as long at twice the length; plus a margin


@dataclass(frozen=True)
class Search:
    """Options of a search. make: (tokens per rank, ranks) -> workload. first, limit: tokens of a shard. seconds: for
    the whole search."""

    make: Callable[[int, int], Workload]
    device: str
    exchange: str
    kernel: str
    bucket: int | None
    first: int
    limit: int
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Progress of a rank's process: the largest size done, its seconds and peak memory, why it ended."""

    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    ended: str | None = None

    @property
    def failed(self) -> bool:
        return self.ended is not None and self.ended.startswith("failed")


def longest(ranks: RankGroup, search: Search) -> dict[str, Any]:
    """Search on all ranks. Return the largest tokens per rank that all finished, the slowest rank's seconds for it, and
    why the search ended."""
    with socket.create_server(("", 0)) as server:
        port = ranks.gathered(server.getsockname()[1])[0]
    # Copy torchrun's variables, with another port and without torchrun's store.
    own = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    own |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world)}
    settings = {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": str(ranks.rank)} | os.environ | own
    return supervise(ranks, run_child, (search, settings), START + 2 * search.seconds)


def supervise(
    ranks: RankGroup, target: Callable[..., None], arguments: tuple[Any, ...], deadline: float
) -> dict[str, Any]:
    """Run `target(connection, *arguments)` in a child process of every rank, receive Progress until all have ended or
    one has failed, and kill all."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(sender, *arguments))
    child.start()
    sender.close()
    own, started = Progress(), time.monotonic()
    try:
        while True:
            own = _newest(own, receiver, child)
            if own.ended is None and time.monotonic() - started > deadline:
                own = replace(own, ended=f"failed: no answer within {deadline:.0f} s")
            everyone = ranks.gathered(own)
            if any(x.failed for x in everyone) or all(x.ended is not None for x in everyone):
                return _summary(everyone)
            time.sleep(STEP)
    finally:
        child.kill()
        child.join()


def _newest(progress: Progress, connection: Connection[Any, Progress], child: SpawnProcess) -> Progress:
    try:
        while progress.ended is None and connection.poll():
            progress = connection.recv()
    except EOFError:
        child.join()
        return replace(progress, ended=f"failed: ended with exit status {child.exitcode}")
    return progress


def _summary(everyone: list[Progress]) -> dict[str, Any]:
    """Summarise the largest size that all ranks finished."""
    least = min(x.tokens for x in everyone)
    same = [x for x in everyone if x.tokens == least]
    ended = [(rank, x.ended) for rank, x in enumerate(everyone) if x.ended is not None]
    failed = [(rank, why) for rank, why in ended if why.startswith("failed")]
    first = [(rank, why) for rank, why in failed if why.startswith(OUT_OF_MEMORY)]  # the cause of the other failures
    rank, why = (first or failed or ended)[0]
    return {
        "tokens": least,
        "total": least * len(everyone),
        "seconds": max(x.seconds for x in same),
        "peak_bytes": max((x.peak_bytes for x in same if x.peak_bytes is not None), default=None),
        "stopped": f"rank {rank} {why}",
    }


# --- one rank's process -----------------------------------------------------------------------------------------------


def run_child(connection: Connection[Progress, Any], search: Search, settings: dict[str, str]) -> None:
    """Join the other children, and send Progress for every size that all finished, and at the end."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(settings)
    done = [Progress()]

    def report(progress: Progress) -> None:
        connection.send(progress)
        done.append(progress)

    try:
        if search.device == "cuda":
            torch.cuda.set_device(int(settings["LOCAL_RANK"]))
        ended = double(RankGroup.join(search.device), search, report)
    except Exception as error:
        # Send it first: other ranks may be waiting for this one, and only their parents can end that.
        ended = f"{OUT_OF_MEMORY if is_memory(error) else 'failed'}: {described(error)}"
    report(replace(done[-1], ended=ended))
    os._exit(0)  # a call that hangs on a GPU would delay a normal exit


def double(ranks: RankGroup, search: Search, report: Callable[[Progress], None]) -> str:
    """Double the shards until the limit, or until the next size would take too long. Return the reason."""
    one_pass(search.make(search.first, ranks.world), ranks, search)  # compiles kernels, which is no size's time
    tokens, search_started, last = search.first, time.monotonic(), 0.0
    while tokens <= search.limit:
        left = search.seconds - (time.monotonic() - search_started)
        if not all(ranks.gathered(GROWTH * last <= left)):
            return f"stopped before {tokens} tokens: they would take longer than the {search.seconds:.0f} s allowed"
        started = time.monotonic()
        peak = one_pass(search.make(tokens, ranks.world), ranks, search)
        last = max(ranks.gathered(time.monotonic() - started))  # all ranks have finished this size
        report(Progress(tokens, last, peak))
        tokens *= 2
    return f"stopped at the limit of {search.limit} tokens"


def one_pass(workload: Workload, ranks: RankGroup, search: Search) -> int | None:
    """Run forward and backward, and return the peak of GPU bytes. Raises ValueError for a non-finite result."""
    gpu = ranks.device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    inputs = workload.draw(ranks.device, 1 + ranks.rank)
    contender = ours.ring(workload, inputs, search.exchange, search.kernel, search.bucket, check=True)
    results = contender.training()
    sampled = [x[:, :: max(1, x.shape[1] // 64)] for x in results]
    if not all(bool(x.isfinite().all()) for x in sampled):  # waits for the GPU
        raise ValueError(f"{workload.tokens} tokens a rank: a result is not finite")
    return torch.cuda.max_memory_allocated() if gpu else None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
