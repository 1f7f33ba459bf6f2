"""`python -m verification faults`: faults struck into ranks, and whether each is named with its rank."""

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

MOST_WORLD = 8  # more ranks than cores find nothing else, slowly
HELP = "strike faults into ranks: is each named?"
ABOUT = """\
Strikes faults into ranks over gloo, at a random post of a random rank in drawn
examples: kill -9, SIGSTOP, an exception, a message too short or too long. Each
must be named with its rank; then the ranks must be whole, the next example
right, and no process left over. Needs no GPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_world(parser, ",".join(map(str, fault_run.FAULT_WORLDS)) + f"; from 2 to {MOST_WORLD}")
    parser.add_argument(
        "--count", type=count, metavar="N", default=fault_run.COUNT,
        help="faults in all, as many on each world size (default: %(default)s)",
    )  # fmt: skip
    add_seed(parser)
    add_outputs(parser, "how far it has come, on a terminal too")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """0 every fault was named, 1 one was not. Raises Unavailable where it cannot be carried out."""
    worlds = options.world or fault_run.FAULT_WORLDS
    if min(worlds) < 2 or max(worlds) > MOST_WORLD:
        given = ",".join(map(str, worlds))
        raise Unavailable(f"argument --world: world sizes must be from 2 to {MOST_WORLD}, got {given}")
    seed = seed_of(options)
    made = processor_run(f"python -m verification faults {typed_words(sys.argv[2:])}".rstrip())
    report = Report(console, made | {"seed": seed, "backend": "gloo"}, options.verbose)
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
