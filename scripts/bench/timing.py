"""Timing of a call by CUDA events or the CPU clock; CUDA graphs; peak memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.rank_group import RankGroup

Call = Callable[[], object]


@dataclass(frozen=True)
class Repeats:
    """`warmup` calls, then the median of `repeats`. A call of more than `slow` seconds when warm is timed only `few`
    times, after two warm-up calls: its times vary less.

    steady: seconds of warm-up on a GPU. An idle GPU runs faster for about 0.1 s, until it reaches its power limit.
    """

    warmup: int = 3
    repeats: int = 7
    slow: float = 2.0
    few: int = 3
    steady: float = 0.5

    def of(self, milliseconds: float, on_gpu: bool) -> tuple[int, int]:
        """Return (warm-up calls, timed calls) for calls of that duration."""
        if milliseconds > 1000 * self.slow:
            return 2, min(self.few, self.repeats)
        steady = math.ceil(1000 * self.steady / milliseconds) if on_gpu else 0
        return max(self.warmup, steady), self.repeats


@dataclass(frozen=True)
class Timing:
    """ms: the median on the slowest rank, of `samples` calls after `warmup` ones."""

    ms: float
    samples: int
    warmup: int


def clocked(call: Call, device: torch.device, count: int) -> list[float]:
    """Return the milliseconds of `count` consecutive calls. On a GPU the host does not wait between them."""
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


def measured(ranks: RankGroup, call: Call, repeats: Repeats) -> Timing:
    """Time a call that every rank makes; the ranks start the timed calls together. Raises Failed on all ranks if it
    fails on one."""
    _slowest(ranks, call, 1)  # the first call compiles, allocates and connects
    (second,) = _slowest(ranks, call, 1)
    warmup, samples = repeats.of(second, ranks.device.type == "cuda")
    if warmup > 2:
        _slowest(ranks, call, warmup - 2)
    return Timing(statistics.median(_slowest(ranks, call, samples)), samples, warmup)


def _slowest(ranks: RankGroup, call: Call, count: int) -> list[float]:
    """Return the times of the rank with the largest median."""
    everyone = ranks.attempt(lambda: clocked(call, ranks.device, count))
    return max(everyone, key=statistics.median)


@contextmanager
def captured(ranks: RankGroup, call: Call) -> Iterator[Call]:
    """Capture the call in a CUDA graph and yield its replay. Raises Failed on all ranks if one cannot."""
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up: first calls allocate and compile, which must not be captured
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


def peak_beyond(ranks: RankGroup, call: Callable[[], tuple[Tensor, ...]]) -> int:
    """Return the peak bytes of torch's allocator in a call, on the fullest rank, without earlier allocations and the
    results. Other memory, such as NCCL's, is not counted."""

    def own_peak() -> int:
        torch.cuda.synchronize(ranks.device)
        torch.cuda.reset_peak_memory_stats(ranks.device)
        before = torch.cuda.memory_allocated(ranks.device)
        results = call()
        torch.cuda.synchronize(ranks.device)
        return torch.cuda.max_memory_allocated(ranks.device) - before - sum(x.nbytes for x in results)

    return max(ranks.attempt(own_peak))
