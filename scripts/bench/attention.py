"""Times ring_attention on the GPUs of one host, with its kernels alone and other methods for comparison.

    torchrun --nproc-per-node=P scripts/bench attention [--section dense longnet packed window reach]
        [--tokens 1Ki 8Ki ...] [--peers] [--graph] [--exchange direct ring gather] [--json FILE] ...

Tokens are per GPU. A time is the median on the slowest rank, by CUDA events, after a warm-up. Efficiency is (time of
one GPU with the whole sequence) / ranks / time, omitted if one GPU cannot hold the sequence. Compare only times of the
same run. `--device cpu` is a trial over gloo, with tiny sizes.

Exit status: 0 measured; 2 the run could not start or finish (the file has the rows so far). torchrun turns any status
but 0 into 1.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace

from bench import fused
from bench.command import BenchRecord, Parser, check_place, columns, measured_on_ranks, stop, tokens
from bench.rank_group import RankGroup
from bench.sections import SECTIONS, Bench
from bench.timing import Repeats
from bench.workload import AttentionShape
from ring.plan.exchange import parse
from ring.plan.exchanges import KEY_EXCHANGES
from verification.cli.arguments import count

# Defaults by device: tokens per rank, heads, longest shards.
TOKENS = {"cuda": tuple(2**n for n in range(10, 18)), "cpu": (32, 64)}
SHAPES = {"cuda": AttentionShape(), "cpu": AttentionShape(8, 4, 16, 1, "float32")}
LONGEST_LIMIT = {"cuda": 4 * 2**20, "cpu": 128}
# Columns of rows. Times are wall-clock milliseconds; bytes are of one rank.
COLUMNS = {
    "section": "dense, longnet, packed, window or reach",
    "tokens": "of each rank; of reach the longest shard that every rank finished, or 0",
    "world": "ranks, one GPU each",
    "kv_heads": "key/value heads",
    "dims": "head dims of keys and of values",
    "mean_length": "mean length of packed documents, in tokens",
    "multiple": "divisor of all lengths of documents",
    "window": "positions before its own that a query sees",
    "method": "the method that is timed",
    "kernel": "of the other methods: torch (cuDNN, or FlashAttention-2 for several lengths) or fa4",
    "exchange": "of ring_attention: transport of keys and values",
    "bucket": "of ring_attention, if --bucket is given",
    "heads_a_call": "key/value heads of each call of ring_attention by heads",
    "pass": "forward, or forward+backward",
    "graph": "True: replayed from a CUDA graph",
    "ms": "median of a call on the slowest rank",
    "samples": "timed calls",
    "warmup": "calls before them",
    "tflops": "10^12 floating-point operations per second and GPU, counting only those of the pattern",
    "efficiency": "(ms of one GPU with the whole sequence, from a graph if that is faster) / world / ms: 1 is a "
    "perfect division",
    "kernels_alone_ms": "a rank's kernel calls without exchange and merge: a lower bound",
    "beyond_kernels_ms": "ms - kernels_alone_ms: messages, packing, merges, and gaps between kernels",
    "exposed_ms": "ms - (ms of the same call without messages): exchange time that computation does not hide",
    "sent_bytes": "bytes that the busiest rank sends, by reference/cost.py",
    "closed_form_bytes": "accumulators and communication buffers of the fullest rank, by reference/cost.py",
    "peak_bytes": "peak of torch's allocator on the fullest rank: of a call without a graph, excluding inputs and "
    "results; of reach, in total",
    "note": "caveat for comparisons",
    "left_out": "why it was not timed",
    "error": "the error with which it failed",
    "pattern": "of reach: dense or longnet",
    "total": "of reach: tokens of all ranks",
    "seconds": "of reach: one forward and backward at that size on the slowest rank",
    "stopped": "of reach: what ended the search",
}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, and add `shape`, `longnet_shape` and `timing`. Raises SystemExit for inconsistent ones."""
    parser = Parser("attention", __doc__, columns(COLUMNS))
    parser.on_ranks()
    add = parser.add_argument
    add("--section", nargs="+", choices=SECTIONS, default=["dense", "longnet"], help="(default: dense longnet)")
    add("--tokens", nargs="+", type=tokens, metavar="N", help="per GPU; for reach the first size "
        "(1Ki ... 128Ki)")  # fmt: skip
    add("--exchange", nargs="+", default=[*KEY_EXCHANGES][::-1], metavar="NAME", help="of ring_attention, as direct, "
        f"all-to-all or all-to-all:2+direct (default: {' '.join([*KEY_EXCHANGES][::-1])})")  # fmt: skip
    add("--baseline-kernels", nargs="+", choices=fused.KERNELS, default=["torch"], help="of the other methods, each "
        "timed with all of these (default: torch)")  # fmt: skip
    add("--bucket", nargs="+", type=tokens, default=[None], metavar="N", help="of ring_attention, timed with each "
        "(default: its own choice)")  # fmt: skip
    add("--heads-a-call", nargs="+", type=count, default=[], metavar="N", help="also time ring_attention called "
        "on so many key/value heads at a time")  # fmt: skip
    add("--graph", action="store_true", help="also time CUDA graphs of methods that can be captured")
    add("--peers", action="store_true", help="also time ring-flash-attn, context_parallel, Ulysses, LongNet as "
        "published")  # fmt: skip
    add("--heads", type=count, metavar="N", help="query heads (default: 32)")
    add(
        "--kv-heads",
        type=count,
        metavar="N",
        help="key/value heads, but of LongNet, which has as many as query heads (default: 8)",
    )
    add("--head-dim", type=count, metavar="N", help="(default: 128)")
    add("--value-dim", type=count, metavar="N", help="head dim of the values (default: as --head-dim)")
    add("--mean-length", nargs="+", type=tokens, default=[512, 4096], metavar="N", help="of packed (512 4Ki)")
    add("--divisible", action="store_true", help="make lengths of packed documents multiples of twice the ranks, for "
        "two of the peers")  # fmt: skip
    add("--window", nargs="+", type=tokens, default=[1023, 4095], metavar="N", help="(default: 1023 4095)")
    add("--repeats", type=count, default=7, metavar="N", help="timed calls; fewer if one takes over 2 s (default: 7)")
    add("--warmup", type=count, default=3, metavar="N", help="calls before, on GPUs for at least 0.5 s (default: 3)")
    add("--whole-limit", type=tokens, default=256 * 2**10, metavar="N", help="longest dense sequence that is also "
        "timed on one GPU, for the efficiency (default: 256Ki)")  # fmt: skip
    add("--reach-limit", type=tokens, metavar="N", help="longest shard (default: 4Mi)")
    add("--reach-seconds", type=count, default=120, metavar="S", help="time per pattern and exchange (default: 120)")
    options = parser.parsed(arguments)
    shape = {"query": options.heads, "kv": options.kv_heads, "dim": options.head_dim, "value_dim": options.value_dim}
    try:
        options.shape = replace(SHAPES[options.device], **{name: x for name, x in shape.items() if x is not None})
        options.longnet_shape = replace(options.shape, kv=options.shape.query)
    except ValueError as error:
        stop(str(error))
    for heads in options.heads_a_call:
        if options.shape.kv % heads or "longnet" in options.section:
            stop(f"--heads-a-call is {heads}; it must divide the {options.shape.kv} key/value heads, without longnet")
    if options.device == "cpu" and options.graph:
        stop("--graph needs a GPU: there are no CUDA graphs with --device cpu")
    options.tokens = options.tokens or TOKENS[options.device]
    options.reach_limit = options.reach_limit or LONGEST_LIMIT[options.device]
    options.timing = Repeats(options.warmup, options.repeats)
    return options


def check_sizes(options: argparse.Namespace, ranks: int) -> None:
    """Raise SystemExit if exchanges do not fit the ranks, or --divisible the lengths of packed documents."""
    for exchange in options.exchange:
        try:
            parse(exchange, ranks)
        except ValueError as error:
            stop(str(error))
    if not options.divisible:
        return
    twice = 2 * ranks
    for name, sizes in (("--tokens", options.tokens), ("--mean-length", options.mean_length)):
        for size in sizes:
            if size % twice:
                stop(f"{name} is {size}; with --divisible it must be a multiple of twice the ranks, {twice}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0. Raises SystemExit of 2 if it cannot start or finish."""
    options = parsed(arguments)
    check_place(options.device)
    check_sizes(options, int(os.environ["WORLD_SIZE"]))

    def measure(ranks: RankGroup) -> list[str]:
        bench = Bench(ranks, options, BenchRecord(ranks, options.json))
        # reach first, while the GPUs are empty
        for name in sorted(options.section, key=lambda name: name != "reach"):
            bench.run(name)
        return []

    return measured_on_ranks(options.device, measure)
