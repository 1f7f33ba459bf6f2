#!/usr/bin/env python3
"""Times ring_attention on the GPUs of one host, beside what the kernels allow and what else a user could pick.

    torchrun --nproc-per-node=P scripts/bench_ring.py [--section dense longnet reach] [--tokens 1Ki 8Ki ...] [--peers]
        [--graph] [--exchange direct ring gather] [--json FILE] ...

Tokens are those of each GPU. A time is the median of the slowest rank, by CUDA events, after a warm-up; efficiency is
(one GPU with the whole sequence) / ranks / time, and needs that one GPU hold the sequence. Compare within a run, not
between runs. `--device cpu`, with tiny sizes and gloo, tries it out.

Exit status: 0 measured; 2 the run could not be carried out, or not to its end (the file has what was measured before).
torchrun gives its own, 1, for any that is not 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from reference.cost import EXCHANGES
from ring.compute.kernels import KERNELS
from verification.benchmarks.ranks import Lost, Ranks, described
from verification.benchmarks.results import Record, columns, described_run, fail
from verification.benchmarks.sections import Bench, Options
from verification.benchmarks.settings import (
    DTYPES,
    RATES,
    SEGMENTS,
    SMALL_RATES,
    SMALL_SEGMENTS,
    Heads,
    named,
    size,
)
from verification.benchmarks.timing import Repeats
from verification.cli.outputs import check_file
from verification.wording import counted

SECTIONS = ("dense", "longnet", "reach")
# What is not said otherwise, by device: tokens of each rank, heads, the longest shards to try.
TOKENS = {"cuda": tuple(2**n for n in range(10, 18)), "cpu": (32, 64)}
HEADS = {"cuda": Heads(), "cpu": Heads(8, 4, 16, 1, "float32")}
REACH_LIMIT = {"cuda": 4 * 2**20, "cpu": 128}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        stop(message)


def stop(message: str) -> NoReturn:
    """Says on one rank what is wrong on all."""
    if os.environ.get("RANK", "0") == "0":
        fail(message)
    raise SystemExit(2)


def tokens(text: str) -> int:
    try:
        return size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}; it must be a number of at least 1")
    return int(text)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        usage=f"torchrun --nproc-per-node=P {sys.argv[0]} [OPTION ...]", description=__doc__, epilog=columns(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--section", nargs="+", choices=SECTIONS, default=["dense", "longnet"], help="(default: dense longnet)")
    add("--tokens", nargs="+", type=tokens, metavar="N", help="of each GPU; for reach the first to try (1Ki ... 128Ki)")
    add("--exchange", nargs="+", choices=EXCHANGES, default=list(EXCHANGES)[::-1], help="(default: all)")
    add("--kernel", choices=KERNELS, default="auto", help="of ring_attention (default: auto)")
    add("--bucket", type=tokens, metavar="N", help="of ring_attention (default: by its memory budget)")
    add("--graph", action="store_true", help="also replay from a CUDA graph whatever can be captured")
    add("--peers", action="store_true", help="also ring-flash-attn, context_parallel, Ulysses, LongNet as published")
    add("--heads", type=positive, metavar="N", help="query heads (default: 32)")
    add("--kv-heads", type=positive, metavar="N", help="key/value heads of dense attention (default: 8)")
    add("--longnet-kv-heads", type=positive, metavar="N", help="of LongNet's (default: the query heads)")
    add("--head-dim", type=positive, metavar="N", help="(default: 128)")
    add("--batch", type=positive, metavar="N", help="(default: 1)")
    add("--dtype", choices=DTYPES, help="(default: bfloat16)")
    add("--segments", nargs="+", type=tokens, metavar="N", help=f"LongNet's ({' '.join(map(named, SEGMENTS))})")
    add("--rates", nargs="+", type=positive, metavar="N", help=f"LongNet's ({' '.join(map(str, RATES))})")
    add("--repeats", type=positive, default=7, metavar="N", help="timed calls; fewer where one takes 2 s (default: 7)")
    add("--warmup", type=positive, default=3, metavar="N", help="calls before, on GPUs for half a second (default: 3)")
    add("--whole-limit", type=tokens, default=256 * 2**10, metavar="N", help="longest dense sequence that one GPU is "
        "given whole, for the efficiency (default: 256Ki)")  # fmt: skip
    add("--reach-limit", type=tokens, metavar="N", help="longest shard to try (default: 4Mi)")
    add("--reach-seconds", type=positive, default=120, metavar="S", help="for each pattern and exchange (default: 120)")
    add("--json", type=Path, metavar="FILE", help="write the record there")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it out, over gloo, with tiny sizes")
    return parser.parse_args(arguments)


def checked(given: argparse.Namespace) -> Options:
    """Raises SystemExit for what cannot be."""
    small = given.device == "cpu"
    chosen = {"query": given.heads, "kv": given.kv_heads, "dim": given.head_dim, "batch": given.batch}
    chosen |= {"dtype": given.dtype}
    segments, rates = given.segments, given.rates
    if (segments is None) != (rates is None) or (segments and len(segments) != len(rates)):
        stop(f"--segments and --rates must be equally many, got {segments} and {rates}")
    try:
        heads = replace(HEADS[given.device], **{name: value for name, value in chosen.items() if value is not None})
        longnet = replace(heads, kv=given.longnet_kv_heads or heads.query)
    except ValueError as error:
        stop(str(error))
    if small and given.graph:
        stop("--graph needs a GPU: there are no CUDA graphs with --device cpu")
    if given.json is not None:
        try:
            check_file("--json", given.json)
        except OSError as error:
            stop(str(error))
    return Options(
        tokens=tuple(given.tokens or TOKENS[given.device]), exchanges=tuple(given.exchange), kernel=given.kernel,
        bucket=given.bucket, graph=given.graph, peers=given.peers, heads=heads, longnet_heads=longnet,
        segments=tuple(segments or (SMALL_SEGMENTS if small else SEGMENTS)),
        rates=tuple(rates or (SMALL_RATES if small else RATES)), repeats=Repeats(given.warmup, given.repeats),
        whole_limit=given.whole_limit, reach_limit=given.reach_limit or REACH_LIMIT[given.device],
        reach_seconds=float(given.reach_seconds),
    )  # fmt: skip


def check_place(device: str) -> None:
    """Raises SystemExit where the ranks or their GPUs are not there."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        stop(f"{', '.join(missing)} not set: start it with torchrun --nproc-per-node=P scripts/bench_ring.py")
    if device == "cpu":
        torch.set_num_threads(1)
        return
    here, needed = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if here < needed:
        stop(f"there must be {counted(needed, 'GPU')}, one a rank, and there are {here}; --device cpu tries it without")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def main() -> int:
    given = parsed(sys.argv[1:])
    options = checked(given)
    check_place(given.device)
    try:
        ranks = Ranks.join(given.device)
    except Exception as error:  # torch.distributed raises whatever its backends do
        stop(f"the ranks could not be joined: {described(error)}")
    record = Record(described_run(ranks.device, ranks.world), given.json, speaks=ranks.rank == 0)
    bench = Bench(ranks, options, record)
    try:
        for section in sorted(given.section, key=lambda name: name != "reach"):  # reach first: no memory is taken yet
            {"dense": bench.dense, "longnet": bench.longnet, "reach": bench.reach}[section]()
    except Lost as reason:
        fail(str(reason))
        sys.stderr.flush()
        os._exit(2)  # what is stuck on a GPU would hold up an orderly end
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
