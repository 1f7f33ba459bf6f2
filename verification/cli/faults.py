"""`python -m verification faults`: inject faults and check that each error names the faulty rank."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from verification.cli.arguments import add_outputs, add_seed, add_world, count, seed_of, write_json
from verification.faults import fault_run
from verification.report.provenance import processor_run, typed_words
from verification.report.report import Report
from verification.run.backends import Unavailable
from verification.wording import counted

MAX_WORLD = 8  # more ranks than cores are slow and find nothing else
HELP = "inject faults and check that each error names the faulty rank"
ABOUT = """\
Injects faults into ranks over gloo, at a random post of a random rank: kill -9,
SIGSTOP, an exception, a message that is too short or too long; or a rank comes
after the others' timeout. The error must name the fault and its rank. Afterwards
all ranks must run again, the next example must be right, and no process may be
left over. No GPU is needed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_world(parser, ",".join(map(str, fault_run.FAULT_WORLDS)) + f"; from 2 to {MAX_WORLD}")
    parser.add_argument(
        "--count", type=count, metavar="N", default=fault_run.COUNT,
        help="total number of faults, shared equally by the world sizes (default: %(default)s)",
    )  # fmt: skip
    add_seed(parser)
    add_outputs(parser, "progress lines on a terminal too")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return 0 if every fault was named, else 1. Raises Unavailable for an unsupported world size."""
    worlds = options.world or fault_run.FAULT_WORLDS
    if min(worlds) < 2 or max(worlds) > MAX_WORLD:
        sizes = ",".join(map(str, worlds))
        raise Unavailable(f"argument --world: world sizes must be from 2 to {MAX_WORLD}, got {sizes}")
    seed = seed_of(options)
    run = processor_run(f"python -m verification faults {typed_words(sys.argv[2:])}".rstrip())
    report = Report(console, run | {"seed": seed, "backend": "gloo"}, options.verbose)
    report.say(f"seed {seed}; repeat this run with --seed {seed}")
    with report:
        try:
            fault_run.run_faults(report, worlds, options.count, seed, options.failures)
        except KeyboardInterrupt:
            report.interrupt()
            raise
    failed = counted(len(report.failures), "fault") + " mishandled"
    verdict = failed if report.failures else "all named, nothing left over"
    for line in fault_run.table(report):
        report.say(line)
    report.say(f"{counted(report.examples, 'fault')} in {report.seconds:.1f} s: {verdict}")
    write_json(options.json, report.to_dict())
    return 1 if report.failures else 0
