"""`python -m verification faults`: faults struck into ranks, and whether each is named with its rank."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from verification.cli.arguments import MODULE, add_failures, add_json, add_seed, add_verbose, count, seed_of, typed
from verification.cli.outputs import write_json
from verification.cli.run import worlds
from verification.faults import fault_run
from verification.report.provenance import processor_run, typed_words
from verification.report.report import Report
from verification.run.backends import Unavailable
from verification.wording import counted

MOST_WORLD = 8  # more ranks than cores find nothing else, slowly
ABOUT = """\
Strikes faults into ranks over gloo, at a random post of a random rank in drawn
examples: kill -9, SIGSTOP, an exception, a message too short or too long. Each
must be named with its rank; then the ranks must be whole, the next example
right, and no process left over. Needs no GPU."""


def add_parser(commands: Any, epilog: str) -> None:
    """`commands`: what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "faults", help="strike faults into ranks: is each named?", description=ABOUT, epilog=epilog,
        prog=typed(f"{MODULE} faults"), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    listed = ",".join(map(str, fault_run.FAULT_WORLDS))
    parser.add_argument(
        "--world", type=worlds, metavar="N[,N...]", default=fault_run.FAULT_WORLDS,
        help=f"world sizes, one after the other, from 2 to {MOST_WORLD} (default: {listed})",
    )  # fmt: skip
    parser.add_argument(
        "--count", type=count, metavar="N", default=fault_run.COUNT,
        help="faults in all, as many on each world size (default: %(default)s)",
    )  # fmt: skip
    add_seed(parser)
    add_failures(parser)
    add_json(parser)
    add_verbose(parser, "how far it has come, on a terminal too")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """0 every fault was named, 1 one was not. Raises Unavailable where it cannot be carried out."""
    if min(options.world) < 2 or max(options.world) > MOST_WORLD:
        given = ",".join(map(str, options.world))
        raise Unavailable(f"argument --world: world sizes must be from 2 to {MOST_WORLD}, got {given}")
    seed = seed_of(options)
    made = processor_run(f"python -m verification faults {typed_words(sys.argv[2:])}".rstrip())
    report = Report(console, made | {"seed": seed, "backend": "gloo"}, options.verbose)
    report.say(f"seed {seed}; repeat this run with --seed {seed}")
    with report:
        try:
            fault_run.run_faults(report, options.world, options.count, seed, options.failures)
        except KeyboardInterrupt:
            report.interrupt()
            raise
    for line in [*fault_run.table(report), verdict(report)]:
        report.say(line)
    write_json(options.json, report.to_dict())
    return 1 if report.failures else 0


def verdict(report: Report) -> str:
    found = (
        counted(len(report.failures), "fault") + " mishandled" if report.failures else "all named, nothing left over"
    )
    return f"{counted(report.examples, 'fault')} in {report.seconds:.1f} s: {found}"
