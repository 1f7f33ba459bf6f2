"""One rank of `reach`: forward and backward of ever longer shards.

Prints a JSON line for every size that all ranks did, {"tokens": ..., "seconds": ..., "peak_bytes": ...}, and at the end
{"ended": why}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch

from verification.benchmarks import ours
from verification.benchmarks.longest import OUT_OF_MEMORY
from verification.benchmarks.ranks import Ranks, described, is_memory
from verification.benchmarks.settings import Heads, Problem

GROWTH = 4.5  # of a dense pass's time when the sequence doubles, with a little in hand


def main() -> None:
    task: dict[str, Any] = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if task["device"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        ranks = Ranks.join(task["device"])
        say(ended=double(ranks, task))
    except Exception as error:
        # Said before anything else: the others may be waiting for this rank, and only the parents can end that.
        what = OUT_OF_MEMORY if is_memory(error) else "failed"
        say(ended=f"{what}: {described(error)}")
    sys.stdout.flush()
    os._exit(0)  # what is stuck on a GPU would hold up an orderly end


def double(ranks: Ranks, task: dict[str, Any]) -> str:
    """Why it ended, if not by an error."""
    tokens, began = task["first"], time.monotonic()
    last = 0.0
    while tokens <= task["limit"]:
        left = task["seconds"] - (time.monotonic() - began)
        if not all(ranks.gathered(GROWTH * last <= left)):
            return f"stopped before {tokens} tokens: they would take longer than the {task['seconds']:.0f} s allowed"
        started = time.monotonic()
        peak = once(problem_of(task, tokens, ranks.world), ranks, task)
        last = max(ranks.gathered(time.monotonic() - started))  # by now all have done it
        say(tokens=tokens, seconds=last, peak_bytes=peak)
        tokens *= 2
    return f"stopped at the limit of {task['limit']} tokens"


def problem_of(task: dict[str, Any], tokens: int, world: int) -> Problem:
    heads = Heads(**task["heads"])
    if task["pattern"] == "dense":
        return Problem.dense(tokens, world, heads)
    return Problem.longnet(tokens, world, heads, tuple(task["segments"]), tuple(task["rates"]))


def once(problem: Problem, ranks: Ranks, task: dict[str, Any]) -> int | None:
    """One pass. Returns the peak of allocated GPU memory in bytes. Raises ValueError if a result is not finite."""
    gpu = ranks.device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    inputs = problem.draw(ranks.device, 1 + ranks.rank)
    contender = ours.ring(problem, inputs, task["exchange"], task["kernel"], task["bucket"], check=True)
    results = contender.training()
    sampled = [x[:, :: max(1, x.shape[1] // 64)] for x in results]
    if not all(bool(x.isfinite().all()) for x in sampled):  # waits for the GPU
        raise ValueError(f"{problem.tokens} tokens a rank: a result is not finite")
    return torch.cuda.max_memory_allocated() if gpu else None


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _end_with_parent() -> None:
    """The parent holds the other end of this process's input: it ends when the parent does, however that ended."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
