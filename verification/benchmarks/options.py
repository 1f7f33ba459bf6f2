"""What the command line of scripts/bench_ring.py chose."""

from __future__ import annotations

from dataclasses import dataclass

from verification.benchmarks.timing import Repeats
from verification.benchmarks.workload import RATES, SEGMENTS, AttentionShape, Workload


@dataclass(frozen=True)
class Options:
    """tokens: of each rank. whole_limit: the longest dense sequence, in tokens, that is also timed on one GPU, where
    time grows with its square. longnet_shape: by default with as many key/value heads as query heads. longest_limit,
    longest_seconds: the longest shard that the search for the longest one tries, and the time that it may take.
    mean_lengths: of packed documents. divisible: each length is a multiple of twice the ranks. windows: as `Branch`
    has them."""

    tokens: tuple[int, ...]
    exchanges: tuple[str, ...] = ("direct", "ring", "gather")
    kernel: str = "auto"
    bucket: int | None = None
    graph: bool = False
    peers: bool = False
    shape: AttentionShape = AttentionShape()
    longnet_shape: AttentionShape = AttentionShape(kv=32)
    mean_lengths: tuple[int, ...] = (512, 4096)
    divisible: bool = False
    windows: tuple[int, ...] = (1023, 4095)
    segments: tuple[int, ...] = SEGMENTS
    rates: tuple[int, ...] = RATES
    repeats: Repeats = Repeats()
    whole_limit: int = 256 * 2**10
    longest_limit: int = 4 * 2**20
    longest_seconds: float = 120.0

    def workload(self, name: str, tokens: int, world: int) -> Workload:
        """name: "dense" or "longnet"."""
        if name == "dense":
            return Workload.dense(tokens, world, self.shape)
        return Workload.longnet(tokens, world, self.longnet_shape, self.segments, self.rates)
