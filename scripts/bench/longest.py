"""The longest shards for which forward and backward succeed: they are doubled until memory or time runs out.

Every rank searches in a process of its own: where one rank runs out of memory, others may wait on their GPU for a
message that never comes, and only the end of the process ends that wait. The processes go from size to size together;
when one fails, all are ended.
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

STEP = 0.2  # seconds between two looks at the processes
START = 120.0  # seconds that they may take to start, on top of the time they are given
OUT_OF_MEMORY = "failed: out of memory"
GROWTH = 4.5  # a dense pass takes 4 times as long when the sequence doubles; some margin


@dataclass(frozen=True)
class Search:
    """make: the workload of so many tokens of each rank, on so many ranks. first, limit: tokens of a rank's shard.
    seconds: for the whole search."""

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
    """Report of a rank's process so far: the largest size done, its seconds and peak memory, why it ended."""

    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    ended: str | None = None

    @property
    def failed(self) -> bool:
        return self.ended is not None and self.ended.startswith("failed")


def longest(ranks: RankGroup, search: Search) -> dict[str, Any]:
    """The most tokens of each rank that the whole group finished, the slowest rank's seconds for that pass, and what
    ended the search."""
    with socket.create_server(("", 0)) as server:
        port = ranks.gathered(server.getsockname()[1])[0]
    # torchrun's variables for this rank, with another port and without torchrun's own store.
    own = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    own |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world)}
    settings = {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": str(ranks.rank)} | os.environ | own
    return followed(ranks, double_alone, (search, settings), START + 2 * search.seconds)


def followed(
    ranks: RankGroup, target: Callable[..., None], arguments: tuple[Any, ...], deadline: float
) -> dict[str, Any]:
    """Runs `target(connection, *arguments)` in a process of every rank, takes the Progress that each sends until all
    have ended or one has failed, then ends all."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(there, *arguments))
    child.start()
    there.close()
    mine, began = Progress(), time.monotonic()
    try:
        while True:
            mine = _newest(mine, here, child)
            if mine.ended is None and time.monotonic() - began > deadline:
                mine = replace(mine, ended=f"failed: no answer within {deadline:.0f} s")
            everyone = ranks.gathered(mine)
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
    """A size counts if all ranks finished it."""
    least = min(x.tokens for x in everyone)
    same = [x for x in everyone if x.tokens == least]
    ended = [(rank, x.ended) for rank, x in enumerate(everyone) if x.ended is not None]
    failed = [(rank, why) for rank, why in ended if why.startswith("failed")]
    first = [(rank, why) for rank, why in failed if why.startswith(OUT_OF_MEMORY)]  # other ranks then fail of that
    rank, why = (first or failed or ended)[0]
    return {
        "tokens": least,
        "total": least * len(everyone),
        "seconds": max(x.seconds for x in same),
        "peak_bytes": max((x.peak_bytes for x in same if x.peak_bytes is not None), default=None),
        "stopped": f"rank {rank} {why}",
    }


# --- one rank's process -----------------------------------------------------------------------------------------------


def double_alone(connection: Connection[Progress, Any], search: Search, settings: dict[str, str]) -> None:
    """Joins the other ranks' processes, and sends Progress for every size that all finished, and one at the end."""
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
        # Sent before anything else: other ranks may be waiting for this one, and only the parents can end that.
        ended = f"{OUT_OF_MEMORY if is_memory(error) else 'failed'}: {described(error)}"
    report(replace(done[-1], ended=ended))
    os._exit(0)  # a call that hangs on a GPU would delay a normal exit


def double(ranks: RankGroup, search: Search, report: Callable[[Progress], None]) -> str:
    """Doubles the shards until the limit, or until the next size would take too long. Returns which of the two."""
    tokens, began, last = search.first, time.monotonic(), 0.0
    while tokens <= search.limit:
        left = search.seconds - (time.monotonic() - began)
        if not all(ranks.gathered(GROWTH * last <= left)):
            return f"stopped before {tokens} tokens: they would take longer than the {search.seconds:.0f} s allowed"
        started = time.monotonic()
        peak = one_pass(search.make(tokens, ranks.world), ranks, search)
        last = max(ranks.gathered(time.monotonic() - started))  # by now all ranks have finished this size
        report(Progress(tokens, last, peak))
        tokens *= 2
    return f"stopped at the limit of {search.limit} tokens"


def one_pass(workload: Workload, ranks: RankGroup, search: Search) -> int | None:
    """Forward and backward. Returns the peak of allocated GPU memory in bytes. Raises ValueError if a result is not
    finite."""
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
