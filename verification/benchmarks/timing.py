"""How long a call takes: CUDA events, or the processor's clock where there is no GPU; graphs; peak memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from verification.benchmarks.ranks import Ranks

Call = Callable[[], object]


@dataclass(frozen=True)
class Repeats:
    """warmup calls, then the median of `repeats`. A call that takes longer than `slow` seconds, once it is warm, is
    repeated `few` times after two warm-ups: there is less to average, and a run has to end.

    steady: seconds of warm-up on a GPU. One that was idle runs faster for the first tenth of a second, until its power
    is at the limit: what is timed sooner is not to be compared with what is timed later.
    """

    warmup: int = 3
    repeats: int = 7
    slow: float = 2.0
    few: int = 3
    steady: float = 0.5

    def of(self, milliseconds: float, on_gpu: bool) -> tuple[int, int]:
        """(warm-up calls, timed calls) for calls of that length."""
        if milliseconds > 1000 * self.slow:
            return 2, min(self.few, self.repeats)
        steady = math.ceil(1000 * self.steady / milliseconds) if on_gpu else 0
        return max(self.warmup, steady), self.repeats


@dataclass(frozen=True)
class Timing:
    """ms: the median of the slowest rank; of so many samples after so many warm-up calls."""

    ms: float
    samples: int
    warmup: int


def clocked(call: Call, device: torch.device, count: int) -> list[float]:
    """Milliseconds of `count` calls in a row, without a wait between them on a GPU."""
    if device.type != "cuda":
        times = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - started))
        return times
    torch.cuda.synchronize(device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for before, after in pairs:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in pairs]


def measured(ranks: Ranks, call: Call, repeats: Repeats) -> Timing:
    """Every rank makes the call; the ranks begin the timed calls together. Raises Failed on all ranks where it failed
    on one."""
    _slowest(ranks, call, 1)  # with all that happens once: compilation, allocation, connections
    (second,) = _slowest(ranks, call, 1)
    warmup, samples = repeats.of(second, ranks.device.type == "cuda")
    if warmup > 2:
        _slowest(ranks, call, warmup - 2)
    return Timing(statistics.median(_slowest(ranks, call, samples)), samples, warmup)


def _slowest(ranks: Ranks, call: Call, count: int) -> list[float]:
    """The times on the rank with the greatest median."""
    everyone = ranks.attempt(lambda: clocked(call, ranks.device, count))
    return max(everyone, key=statistics.median)


@contextmanager
def captured(ranks: Ranks, call: Call) -> Iterator[Call]:
    """The replay of a call that was captured into a CUDA graph. Raises Failed on all ranks where one cannot."""
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is made on first use must not be made during a capture
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize(ranks.device)
        with torch.cuda.graph(graph):
            call()

    ranks.attempt(capture)
    try:
        yield graph.replay
    finally:
        torch.cuda.synchronize(ranks.device)
        graph.reset()


def peak_beyond(ranks: Ranks, call: Callable[[], tuple[Tensor, ...]]) -> int:
    """Bytes of GPU memory that torch's allocator holds at most during a call, beyond what it held before and the call's
    results; the fullest rank's. Memory that is not the allocator's, such as NCCL's own, is not in it."""

    def one() -> int:
        torch.cuda.synchronize(ranks.device)
        torch.cuda.reset_peak_memory_stats(ranks.device)
        before = torch.cuda.memory_allocated(ranks.device)
        results = call()
        torch.cuda.synchronize(ranks.device)
        return torch.cuda.max_memory_allocated(ranks.device) - before - sum(x.nbytes for x in results)

    return max(ranks.attempt(one))
