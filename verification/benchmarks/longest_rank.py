"""One rank's process in the search for the longest shards: forward and backward of ever longer shards.

`longest` starts it with a `LongestTask` as its argument. It prints a JSON line for every size that all ranks finished,
{"tokens": ..., "seconds": ..., "peak_bytes": ...}, and one at the end, {"ended": why}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass

import torch

from verification.benchmarks import ours
from verification.benchmarks.options import Options
from verification.benchmarks.rank_group import RankGroup, described, is_memory
from verification.benchmarks.workload import AttentionShape, Workload

OUT_OF_MEMORY = "failed: out of memory"
GROWTH = 4.5  # a dense pass takes 4 times as long when the sequence doubles; some margin


@dataclass(frozen=True)
class LongestTask:
    """pattern: "dense" or "longnet". first, limit: tokens of a rank's shard. seconds: for the whole search."""

    pattern: str
    device: str
    exchange: str
    kernel: str
    bucket: int | None
    shape: AttentionShape
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    first: int
    limit: int
    seconds: float

    @classmethod
    def of(cls, options: Options, pattern: str, exchange: str, device: str) -> LongestTask:
        return cls(
            pattern, device, exchange, options.kernel, options.bucket, options.workload(pattern, 1, 1).shape,
            options.segments, options.rates, options.tokens[0], options.longest_limit, options.longest_seconds,
        )  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LongestTask:
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("segments", "rates")}
        return cls(**fields | lists | {"shape": AttentionShape(**fields["shape"])})

    def workload(self, tokens: int, world: int) -> Workload:
        if self.pattern == "dense":
            return Workload.dense(tokens, world, self.shape)
        return Workload.longnet(tokens, world, self.shape, self.segments, self.rates)


def main() -> None:
    task = LongestTask.from_json(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if task.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        ranks = RankGroup.join(task.device)
        report(ended=double(ranks, task))
    except Exception as error:
        # Printed before anything else: other ranks may be waiting for this one, and only the parents can end that.
        what = OUT_OF_MEMORY if is_memory(error) else "failed"
        report(ended=f"{what}: {described(error)}")
    sys.stdout.flush()
    os._exit(0)  # a call that hangs on a GPU would delay a normal exit


def double(ranks: RankGroup, task: LongestTask) -> str:
    """Doubles the shards until the limit, or until the next size would take too long. Returns which of the two."""
    tokens, began = task.first, time.monotonic()
    last = 0.0
    while tokens <= task.limit:
        left = task.seconds - (time.monotonic() - began)
        if not all(ranks.gathered(GROWTH * last <= left)):
            return f"stopped before {tokens} tokens: they would take longer than the {task.seconds:.0f} s allowed"
        started = time.monotonic()
        peak = one_pass(task.workload(tokens, ranks.world), ranks, task)
        last = max(ranks.gathered(time.monotonic() - started))  # by now all ranks have finished this size
        report(tokens=tokens, seconds=last, peak_bytes=peak)
        tokens *= 2
    return f"stopped at the limit of {task.limit} tokens"


def one_pass(workload: Workload, ranks: RankGroup, task: LongestTask) -> int | None:
    """Forward and backward. Returns the peak of allocated GPU memory in bytes. Raises ValueError if a result is not
    finite."""
    gpu = ranks.device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    inputs = workload.draw(ranks.device, 1 + ranks.rank)
    contender = ours.ring(workload, inputs, task.exchange, task.kernel, task.bucket, check=True)
    results = contender.training()
    sampled = [x[:, :: max(1, x.shape[1] // 64)] for x in results]
    if not all(bool(x.isfinite().all()) for x in sampled):  # waits for the GPU
        raise ValueError(f"{workload.tokens} tokens a rank: a result is not finite")
    return torch.cuda.max_memory_allocated() if gpu else None


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _end_with_parent() -> None:
    """The parent holds the other end of this process's stdin, which closes when the parent ends for any reason."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
