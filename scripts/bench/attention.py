"""Times ring_attention on the GPUs of one host, beside its kernels alone and beside other methods.

    torchrun --nproc-per-node=P scripts/bench attention [--section dense longnet packed window reach]
        [--tokens 1Ki 8Ki ...] [--peers] [--graph] [--exchange direct ring gather] [--json FILE] ...

Tokens are those of each GPU. A time is the median on the slowest rank, by CUDA events, after a warm-up. Efficiency is
(time of one GPU with the whole sequence) / ranks / time; it is left out where one GPU cannot hold the sequence. Times
of one run can be compared with each other, times of different runs cannot. `--device cpu` tries it out over gloo, with
tiny sizes.

Exit status: 0 measured; 2 the run could not be carried out, or not to its end (the file has what was measured before).
torchrun gives its own, 1, for any that is not 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace

from bench.command import BenchRecord, Parser, check_place, columns, measured_on_ranks, positive, stop, tokens
from bench.rank_group import RankGroup
from bench.sections import SECTIONS, Bench
from bench.timing import Repeats
from bench.workload import DTYPES, PATTERNS, RATES, SEGMENTS, AttentionShape, named
from reference.cost import EXCHANGES
from ring.compute.kernels import KERNELS

# Defaults by device: tokens of each rank, heads, the longest shards to try.
TOKENS = {"cuda": tuple(2**n for n in range(10, 18)), "cpu": (32, 64)}
SHAPES = {"cuda": AttentionShape(), "cpu": AttentionShape(8, 4, 16, 1, "float32")}
LONGEST_LIMIT = {"cuda": 4 * 2**20, "cpu": 128}
# The columns that a row may have. Times are wall-clock milliseconds; bytes are those of one rank.
COLUMNS = {
    "section": "dense, longnet, packed, window or reach",
    "tokens": "of each rank; of reach the longest shard that every rank finished, 0 for none",
    "world": "ranks, a GPU each",
    "kv_heads": "key/value heads",
    "mean_length": "of packed documents, in tokens",
    "multiple": "of which each of these lengths is one",
    "window": "positions before its own that a query sees",
    "method": "the method that is timed",
    "exchange": "of ring_attention: how keys and values travel",
    "pass": "forward, or forward+backward",
    "graph": "True: replayed from a CUDA graph",
    "ms": "median of a call on the slowest rank",
    "samples": "calls that the median is of",
    "warmup": "calls before them",
    "tflops": "floating-point operations that the pattern needs of a GPU in a second, on average, / 10^12",
    "efficiency": "(ms of one GPU with the whole sequence, from a graph if that is faster) / world / ms: 1 is a "
    "perfect division",
    "kernels_alone_ms": "a rank's kernel calls without exchange and merge: a lower bound",
    "beyond_kernels_ms": "ms - kernels_alone_ms: messages, packing, merges, and gaps between kernels",
    "exposed_ms": "ms - (ms of the same call without messages): the part of the exchange that computing does not hide",
    "sent_bytes": "bytes that the busiest rank sends, as reference/cost.py counts them",
    "closed_form_bytes": "accumulators and communication buffers of the fullest rank, by reference/cost.py",
    "peak_bytes": "peak of torch's allocator on the fullest rank: in a call without a graph beyond inputs and results, "
    "of reach in total",
    "note": "what to know when comparing",
    "left_out": "why it could not be timed here",
    "error": "the error with which it failed",
    "pattern": "of reach: dense or longnet",
    "total": "of reach: tokens of all ranks",
    "seconds": "of reach: one forward and backward at that size on the slowest rank",
    "stopped": "of reach: what ended the search",
}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, and by them `shape` and `longnet_shape` of the heads and `timing`, the Repeats. Raises SystemExit
    for those that do not fit together."""
    parser = Parser("attention", __doc__, columns(COLUMNS))
    parser.on_ranks()
    add = parser.add_argument
    add("--section", nargs="+", choices=SECTIONS, default=["dense", "longnet"], help="(default: dense longnet)")
    add("--tokens", nargs="+", type=tokens, metavar="N", help="of each GPU; for reach the first size to try "
        "(1Ki ... 128Ki)")  # fmt: skip
    add("--exchange", nargs="+", choices=EXCHANGES, default=list(EXCHANGES)[::-1], help="(default: all)")
    add("--kernel", choices=KERNELS, default="auto", help="of ring_attention (default: auto)")
    add("--bucket", type=tokens, metavar="N", help="of ring_attention (default: by its memory budget)")
    add("--graph", action="store_true", help="also time CUDA graphs of whatever can be captured")
    add("--peers", action="store_true", help="also time ring-flash-attn, context_parallel, Ulysses, LongNet as "
        "published")  # fmt: skip
    add("--heads", type=positive, metavar="N", help="query heads (default: 32)")
    add("--kv-heads", type=positive, metavar="N", help="key/value heads of dense attention (default: 8)")
    add("--longnet-kv-heads", type=positive, metavar="N", help="of LongNet's (default: the query heads)")
    add("--head-dim", type=positive, metavar="N", help="(default: 128)")
    add("--batch", type=positive, metavar="N", help="(default: 1)")
    add("--dtype", choices=DTYPES, help="(default: bfloat16)")
    add("--segments", nargs="+", type=tokens, metavar="N", help=f"LongNet's ({' '.join(map(named, SEGMENTS))})")
    add("--rates", nargs="+", type=positive, metavar="N", help=f"LongNet's ({' '.join(map(str, RATES))})")
    add("--mean-length", nargs="+", type=tokens, default=[512, 4096], metavar="N", help="of packed (512 4Ki)")
    add("--divisible", action="store_true", help="packed documents of lengths that twice the ranks divide, as two of "
        "the peers ask")  # fmt: skip
    add("--window", nargs="+", type=tokens, default=[1023, 4095], metavar="N", help="(default: 1023 4095)")
    add("--repeats", type=positive, default=7, metavar="N", help="timed calls; fewer where one takes 2 s (default: 7)")
    add("--warmup", type=positive, default=3, metavar="N", help="calls before, on GPUs for half a second (default: 3)")
    add("--whole-limit", type=tokens, default=256 * 2**10, metavar="N", help="longest dense sequence that is also "
        "timed on one GPU, for the efficiency (default: 256Ki)")  # fmt: skip
    add("--reach-limit", type=tokens, metavar="N", help="longest shard to try (default: 4Mi)")
    add("--reach-seconds", type=positive, default=120, metavar="S", help="for each pattern and exchange (default: 120)")
    given = parser.parsed(arguments)
    if (given.segments is None) != (given.rates is None) or (
        given.segments and len(given.segments) != len(given.rates)
    ):
        stop(f"--segments and --rates must be equally many, got {given.segments} and {given.rates}")
    if given.segments is None:
        given.segments, given.rates = PATTERNS[given.device]
    chosen = {"query": given.heads, "kv": given.kv_heads, "dim": given.head_dim, "batch": given.batch}
    chosen |= {"dtype": given.dtype}
    try:
        given.shape = replace(SHAPES[given.device], **{name: x for name, x in chosen.items() if x is not None})
        given.longnet_shape = replace(given.shape, kv=given.longnet_kv_heads or given.shape.query)
    except ValueError as error:
        stop(str(error))
    if given.device == "cpu" and given.graph:
        stop("--graph needs a GPU: there are no CUDA graphs with --device cpu")
    given.tokens = given.tokens or TOKENS[given.device]
    given.reach_limit = given.reach_limit or LONGEST_LIMIT[given.device]
    given.timing = Repeats(given.warmup, given.repeats)
    return given


def check_lengths(given: argparse.Namespace) -> None:
    """Raises SystemExit where packed documents cannot have the lengths asked for. Ranks know by themselves."""
    if not given.divisible:
        return
    twice = 2 * int(os.environ["WORLD_SIZE"])
    for name, sizes in (("--tokens", given.tokens), ("--mean-length", given.mean_length)):
        for one in sizes:
            if one % twice:
                stop(f"{name} is {one}; with --divisible it must be a multiple of twice the ranks, {twice}")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 measured; SystemExit of 2: not, or not to the end."""
    given = parsed(arguments)
    check_place(given.device)
    check_lengths(given)

    def measure(ranks: RankGroup) -> list[str]:
        bench = Bench(ranks, given, BenchRecord(ranks, given.json))
        # reach first, while no memory is in use
        for name in sorted(given.section, key=lambda name: name != "reach"):
            bench.run(name)
        return []

    return measured_on_ranks(given.device, measure)
