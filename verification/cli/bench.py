"""Times ring_attention on the GPUs of one host, beside its kernels alone and beside other methods.

    torchrun --nproc-per-node=P scripts/bench_ring.py [--section dense longnet packed window reach]
        [--tokens 1Ki 8Ki ...] [--peers]
        [--graph] [--exchange direct ring gather] [--json FILE] ...

Tokens are those of each GPU. A time is the median on the slowest rank, by CUDA events, after a warm-up. Efficiency is
(time of one GPU with the whole sequence) / ranks / time; it is left out where one GPU cannot hold the sequence. Times
of one run can be compared with each other, times of different runs cannot. `--device cpu` tries the script out over
gloo, with tiny sizes.

Exit status: 0 measured; 2 the run could not be carried out, or not to its end (the file has what was measured before).
torchrun gives its own, 1, for any that is not 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from reference.cost import EXCHANGES
from ring.compute.kernels import KERNELS
from verification.benchmarks.options import Options
from verification.benchmarks.rank_group import Lost, RankGroup, described
from verification.benchmarks.results import BenchRecord, columns, described_run, fail
from verification.benchmarks.sections import Bench
from verification.benchmarks.timing import Repeats
from verification.benchmarks.workload import (
    DTYPES,
    RATES,
    SEGMENTS,
    SMALL_RATES,
    SMALL_SEGMENTS,
    AttentionShape,
    named,
    size,
)
from verification.cli.arguments import check_file
from verification.wording import counted

SECTIONS = ("dense", "longnet", "packed", "window", "reach")
# Defaults by device: tokens of each rank, heads, the longest shards to try.
TOKENS = {"cuda": tuple(2**n for n in range(10, 18)), "cpu": (32, 64)}
SHAPES = {"cuda": AttentionShape(), "cpu": AttentionShape(8, 4, 16, 1, "float32")}
LONGEST_LIMIT = {"cuda": 4 * 2**20, "cpu": 128}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        stop(message)


def stop(message: str) -> NoReturn:
    """Prints, on rank 0 alone, an error that all ranks found."""
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


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    started = Path(sys.argv[0])
    program = "-m verification.cli.bench" if started.resolve() == Path(__file__).resolve() else str(started)
    parser = Parser(
        usage=f"torchrun --nproc-per-node=P {program} [OPTION ...]", description=__doc__, epilog=columns(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--section", nargs="+", choices=SECTIONS, default=["dense", "longnet"], help="(default: dense longnet)")
    add(
        "--tokens",
        nargs="+",
        type=tokens,
        metavar="N",
        help="of each GPU; for reach the first size to try (1Ki ... 128Ki)",
    )
    add("--exchange", nargs="+", choices=EXCHANGES, default=list(EXCHANGES)[::-1], help="(default: all)")
    add("--kernel", choices=KERNELS, default="auto", help="of ring_attention (default: auto)")
    add("--bucket", type=tokens, metavar="N", help="of ring_attention (default: by its memory budget)")
    add("--graph", action="store_true", help="also time CUDA graphs of whatever can be captured")
    add(
        "--peers",
        action="store_true",
        help="also time ring-flash-attn, context_parallel, Ulysses, LongNet as published",
    )
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
    add("--json", type=Path, metavar="FILE", help="write the record there")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try it out over gloo, with tiny sizes")
    return parser.parse_args(arguments)


def checked(given: argparse.Namespace) -> Options:
    """Raises SystemExit for arguments that do not fit together."""
    small = given.device == "cpu"
    chosen = {"query": given.heads, "kv": given.kv_heads, "dim": given.head_dim, "batch": given.batch}
    chosen |= {"dtype": given.dtype}
    segments, rates = given.segments, given.rates
    if (segments is None) != (rates is None) or (segments and len(segments) != len(rates)):
        stop(f"--segments and --rates must be equally many, got {segments} and {rates}")
    try:
        shape = replace(SHAPES[given.device], **{name: value for name, value in chosen.items() if value is not None})
        longnet = replace(shape, kv=given.longnet_kv_heads or shape.query)
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
        bucket=given.bucket, graph=given.graph, peers=given.peers, shape=shape, longnet_shape=longnet,
        segments=tuple(segments or (SMALL_SEGMENTS if small else SEGMENTS)),
        rates=tuple(rates or (SMALL_RATES if small else RATES)), repeats=Repeats(given.warmup, given.repeats),
        whole_limit=given.whole_limit, longest_limit=given.reach_limit or LONGEST_LIMIT[given.device],
        longest_seconds=float(given.reach_seconds), mean_lengths=tuple(given.mean_length),
        windows=tuple(given.window), divisible=given.divisible,
    )  # fmt: skip


def check_place(device: str) -> None:
    """Raises SystemExit if torchrun did not start this process, or if there are too few GPUs."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        stop(f"{', '.join(missing)} not set: start it with torchrun --nproc-per-node=P {sys.argv[0]}")
    if device == "cpu":
        torch.set_num_threads(1)
        return
    here, needed = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if here < needed:
        stop(f"there must be {counted(needed, 'GPU')}, one a rank, and there are {here}; --device cpu tries it without")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def check_lengths(options: Options) -> None:
    """Raises SystemExit where packed documents cannot have the lengths asked for. Ranks know by themselves."""
    if not options.divisible:
        return
    twice = 2 * int(os.environ["WORLD_SIZE"])
    for name, sizes in (("--tokens", options.tokens), ("--mean-length", options.mean_lengths)):
        for one in sizes:
            if one % twice:
                stop(f"{name} is {one}; with --divisible it must be a multiple of twice the ranks, {twice}")


def _run_of(bench: Bench) -> dict[str, Callable[[], None]]:
    """By section."""
    return {
        "dense": bench.dense, "longnet": bench.longnet, "packed": bench.packed, "window": bench.window,
        "reach": bench.reach,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """0 measured, 2 not, or not to the end."""
    given = parsed(arguments)
    options = checked(given)
    check_place(given.device)
    check_lengths(options)
    try:
        ranks = RankGroup.join(given.device)
    except Exception as error:  # torch.distributed raises whatever its backends do
        stop(f"the ranks could not be joined: {described(error)}")
    record = BenchRecord(described_run(ranks.device, ranks.world), given.json, speaks=ranks.rank == 0)
    bench = Bench(ranks, options, record)
    try:
        # reach first, while no memory is in use
        for section in sorted(given.section, key=lambda name: name != "reach"):
            _run_of(bench)[section]()
    except Lost as reason:
        fail(str(reason))
        sys.stderr.flush()
        os._exit(2)  # a call that hangs on a GPU would delay a normal exit
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
