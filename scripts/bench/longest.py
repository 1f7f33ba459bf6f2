"""Search for the longest shards whose forward and backward succeed, by doubling until memory or time runs out.

The ranks of a search are processes of a torchrun of its own. If one rank runs out of memory, others may wait on their
GPU for ever, and only killing the process ends the wait: torchrun kills all if one ends.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import ours
from bench.rank_group import RankGroup, described, is_memory
from bench.workload import Workload

STEP = 0.2  # seconds between two looks at the processes
START = 120.0  # seconds allowed for their start, besides the search
GROWTH = 4.5  # a dense pass takes 4 times as long at twice the length; plus a margin
OUT_OF_MEMORY = "failed: out of memory"  # the cause of the failures of other ranks


@dataclass(frozen=True)
class Search:
    """Options of a search. make: (tokens per rank, ranks) -> workload. first, limit: tokens of a shard. seconds: for
    the whole search."""

    make: Callable[[int, int], Workload]
    device: str
    exchange: str
    bucket: int | None
    first: int
    limit: int
    seconds: float


def longest(ranks: RankGroup, search: Search) -> dict[str, Any]:
    """Search on as many ranks as these. Return the largest tokens per rank that all finished, the slowest rank's
    seconds for it, and why the search ended."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks.world}"]
    program = ["-m", "bench.longest", str(os.getpid()), pickle.dumps(search).hex()]
    return supervise(ranks, [*torchrun, *program], START + 2 * search.seconds)


def supervise(ranks: RankGroup, command: Sequence[str], deadline: float) -> dict[str, Any]:
    """Run a command on rank 0 until it ends, or kill it after `deadline` seconds. Return its last progress."""
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile("w+") as said:
        child = None if ranks.rank else subprocess.Popen(command, env=settings, stdout=said)
        started = time.monotonic()
        try:
            while not any(ranks.gathered(child is not None and child.poll() is not None)):
                if any(ranks.gathered(time.monotonic() - started > deadline)):
                    break
                time.sleep(STEP)
        finally:
            if child is not None:
                late = child.poll() is None
                child.terminate()  # torchrun ends its processes
                child.wait()
        said.seek(0)
        lines = [json.loads(line) for line in said if line.startswith("{")]
    if child is None:
        return {}  # rank 0 alone records
    reasons = [line["stopped"] for line in lines if "stopped" in line]
    reasons = [x for x in reasons if OUT_OF_MEMORY in x] or [x for x in reasons if "failed" in x] or reasons
    last = f"rank 0 failed: no answer within {deadline:.0f} s" if late else f"ended with exit status {child.returncode}"
    done = [line for line in lines if "tokens" in line] or [
        {"tokens": 0, "total": 0, "seconds": 0.0, "peak_bytes": None}
    ]
    return done[-1] | {"stopped": (reasons or [last])[0]}


# --- one rank's process -----------------------------------------------------------------------------------------------


def say(**line: Any) -> None:
    os.write(1, f"{json.dumps(line)}\n".encode())  # at once, not in parts


def main(parent: str, search_text: str) -> None:
    """Join the other processes of the search, and print every size that all finished and why it ended."""
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    search: Search = pickle.loads(bytes.fromhex(search_text))
    status = 0
    try:
        if search.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        ranks = RankGroup.join(search.device)
        ended = double(ranks, search)
        if ranks.rank == 0:
            say(stopped=ended)
    except Exception as error:  # kernels, libraries and allocators may raise anything
        what, status = OUT_OF_MEMORY if is_memory(error) else "failed", 1
        say(stopped=f"rank {os.environ['RANK']} {what}: {described(error)}")
    os._exit(status)  # a call that hangs on a GPU would delay a normal exit


def double(ranks: RankGroup, search: Search) -> str:
    """Double the shards until the limit, or until the next size would take too long. Return the reason."""
    one_pass(search.make(search.first, ranks.world), ranks, search)  # compiles kernels, which is no size's time
    tokens, search_started, last = search.first, time.monotonic(), 0.0
    while tokens <= search.limit:
        left = search.seconds - (time.monotonic() - search_started)
        if not all(ranks.gathered(GROWTH * last <= left)):
            return (
                f"rank 0 stopped before {tokens} tokens: they would take longer than the {search.seconds:.0f} s allowed"
            )
        started = time.monotonic()
        peak = one_pass(search.make(tokens, ranks.world), ranks, search)
        last = max(ranks.gathered(time.monotonic() - started))  # all ranks have finished this size
        everyone = ranks.gathered(peak)
        if ranks.rank == 0:
            say(
                tokens=tokens,
                total=tokens * ranks.world,
                seconds=last,
                peak_bytes=max(x or 0 for x in everyone) or None,
            )
        tokens *= 2
    return f"rank 0 stopped at the limit of {search.limit} tokens"


def one_pass(workload: Workload, ranks: RankGroup, search: Search) -> int | None:
    """Run forward and backward, and return the peak of GPU bytes. Raises ValueError for a non-finite result."""
    gpu = ranks.device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    inputs = workload.draw(ranks.device, 1 + ranks.rank)
    contender = ours.ring(workload, [inputs], search.exchange, search.bucket, check=True)
    results = contender.training()
    sampled = [x[:, :: max(1, x.shape[1] // 64)] for x in results]
    if not all(bool(x.isfinite().all()) for x in sampled):  # waits for the GPU
        raise ValueError(f"{workload.tokens} tokens a rank: a result is not finite")
    return torch.cuda.max_memory_allocated() if gpu else None


def _end_with(parent: int) -> None:
    """End this process with that of the benchmark."""
    while True:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
