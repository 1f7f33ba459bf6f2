#!/usr/bin/env python3
"""Times a training step of a Llama-shaped and a LongNet-shaped model whose sequence is sharded over one host's GPUs.

    torchrun --nproc-per-node=P scripts/bench_model.py [--tokens 512 8Ki ...] [--ways ours zigzag ...]
        [--only eager] [--json FILE] ...

A step is forward and backward in bf16, of 8 layers with 16 heads of 128 on GPUs, in eager mode and with torch.compile;
tokens are those of each GPU. Only the attention differs between the ways: ours, other people's, and one GPU with the
whole sequence, whose time divided by the number of GPUs is the ceiling. Gradients are not reduced. Before it is timed,
each way is compared with an fp32 model that has the oracle's attention. Then the ways are measured by turns. Times of
one section (model, mode, tokens) can be compared with each other, times of different runs cannot. `--device cpu` tries
the script out over gloo, with tiny sizes.

With --recompute: the same Llama under FSDP2 instead, with ours only, with layers computed again or not. A step then has
the reduction of gradients, too, and tokens are those of the whole sequence.

Exit status: 0 measured; 1 a way computed something else; 2 the run could not be carried out, or not to its end (the
file has what was measured before). torchrun gives its own, 1, for any that is not 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from verification.benchmarks import step_recompute
from verification.benchmarks.rank_group import Failed, Lost, RankGroup, described
from verification.benchmarks.results import BenchRecord, columns, described_run, fail
from verification.benchmarks.step_models import KINDS, SHAPES
from verification.benchmarks.step_results import STEP_COLUMNS, TITLE, table_line
from verification.benchmarks.step_sections import MODES, StepBench, StepOptions
from verification.benchmarks.step_timing import Turns
from verification.benchmarks.step_ways import MEANING
from verification.cli.arguments import check_file
from verification.cli.bench import Parser, check_place, positive, stop, tokens

TOKENS = {"cuda": (512, 2 * 2**10, 8 * 2**10, 32 * 2**10), "cpu": (32, 64)}
RECOMPUTED_TOKENS = {"cuda": (16 * 2**10, 64 * 2**10), "cpu": (256,)}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        usage="torchrun --nproc-per-node=P scripts/bench_model.py [OPTION ...]", description=__doc__,
        epilog=columns(STEP_COLUMNS), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--models", choices=KINDS, nargs="+", default=list(KINDS), help="(default: both)")
    add("--ways", choices=MEANING, nargs="+", default=list(MEANING), metavar="WAY", help=f"of {', '.join(MEANING)} "
        "(default: all)")  # fmt: skip
    add("--only", choices=MODES, help="(default: eager, then compiled)")
    add("--tokens", type=tokens, nargs="+", metavar="N", help="(default: 512 2Ki 8Ki 32Ki; with --recompute 16Ki 64Ki)")
    add("--warmup", type=positive, default=8, metavar="N", help="steps; 3 from 32Ki tokens (default: 8)")
    add("--rounds", type=positive, default=3, metavar="N", help="in each, every way has its turn (default: 3)")
    add("--steps", type=positive, default=5, metavar="N", help="of a turn; 3 from 32Ki tokens (default: 5)")
    add("--minutes", type=float, default=9.0, metavar="M", help="after which no section begins (default: 9)")
    add("--recompute", choices=step_recompute.WAYS, nargs="+", help="under FSDP2: which layers are computed again")
    add("--compare", action="store_true", help="with --recompute: compare the loss with that of one GPU")
    add("--json", type=Path, metavar="FILE", help="write the record there")
    add("--device", choices=tuple(SHAPES), default="cuda", help="cpu: try it out over gloo, with tiny sizes")
    given = parser.parse_args(arguments)
    if given.json is not None:
        try:
            check_file("--json", given.json)
        except OSError as error:
            stop(str(error))
    return given


def measure(given: argparse.Namespace, ranks: RankGroup) -> list[str]:
    """What computed something else."""
    content = described_run(ranks.device, ranks.world, Path(__file__).name)
    content |= {"shape": asdict(SHAPES[given.device])}
    speaks = ranks.rank == 0
    if given.recompute:
        record = BenchRecord(content, given.json, speaks)
        sizes = tuple(given.tokens or RECOMPUTED_TOKENS[given.device])
        step_recompute.measure(ranks, record, sizes, tuple(given.recompute), given.steps, given.compare)
        return []
    record = BenchRecord(content, given.json, speaks, table_line)
    options = StepOptions(
        kinds=tuple(given.models), modes=(given.only,) if given.only else MODES,
        tokens=tuple(given.tokens or TOKENS[given.device]), ways=tuple(given.ways),
        turns=Turns(given.warmup, given.rounds, given.steps), minutes=given.minutes,
    )  # fmt: skip
    if speaks:
        print(TITLE, flush=True)
    bench = StepBench(ranks, options, record)
    bench.run()
    return [f"{name} of {kind}, {mode}: {reason}" for (kind, mode, name), reason in bench.wrong.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 measured, 1 a way computed something else, 2 not measured, or not to the end."""
    given = parsed(arguments)
    check_place(given.device)
    try:
        ranks = RankGroup.join(given.device)
    except Exception as error:  # torch.distributed raises whatever its backends do
        stop(f"the ranks could not be joined: {described(error)}")
    try:
        wrong = measure(given, ranks)
    except (Lost, Failed) as reason:
        fail(str(reason))
        sys.stderr.flush()
        os._exit(2)  # a call that hangs on a GPU would delay a normal exit
    if ranks.rank == 0:
        for one in wrong:
            fail(one)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
