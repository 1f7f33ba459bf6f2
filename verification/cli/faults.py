"""`python -m verification faults`: inject faults, and check that each is named and nothing is lost or left over."""

from __future__ import annotations

import argparse

from verification.cli.arguments import add_outputs, add_seed, add_world, count, finish, seed_of
from verification.console import Console
from verification.faults import fault_run, inject
from verification.report.provenance import command_run
from verification.report.report import Report
from verification.run.backends import Unavailable
from verification.wording import counted

MAX_WORLD = 8  # more ranks than cores are slow and find nothing else
HELP = "inject faults and check that each is named"
ABOUT = """\
Injects faults, and checks that the error names each, that nothing is lost, and
that nothing is left over. No GPU is needed.
attention: kill -9, SIGSTOP, an exception, a message that is too short or too
long, at a random post of a random rank over gloo; Ctrl-C or a lack of memory at
any place of a call; or a rank that comes after the others' timeout. Afterwards
all ranks must run again, and the next example must be right."""
TESTS = {  # that kinds of former versions have become
    "files": "tests/verification/replay/test_mutated_records.py",
    "training": "tests/scripts/test_checkpoint_damage.py tests/test_train.py",
}


def table(report: Report) -> list[str]:
    """Return a line for each kind of fault: their number, the failure that names them, seconds."""
    lines = [f"{'fault':<24}{'faults':>8}  {'named, with its rank, as':<38}{'seconds':>8}"]
    for kind in inject.KINDS:
        row = report.rows.total(kind.title)
        lines.append(f"{kind.title:<24}{row.examples:>8}  {kind.named_as:<38}{row.seconds:>8.1f}")
    return lines


def kind(text: str) -> str:
    if text in TESTS:
        raise argparse.ArgumentTypeError(f"{text!r} is now a test: in a clone run python -m pytest {TESTS[text]}")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind", nargs="+", type=kind, choices=("attention",), metavar="KIND",
        help="what to inject faults into: attention, the default, is the only kind",
    )  # fmt: skip
    default = ",".join(map(str, fault_run.FAULT_WORLDS))
    add_world(parser, f"{default}; from 2 to {MAX_WORLD}")
    parser.add_argument(
        "--count", type=count, metavar="N", default=fault_run.COUNT,
        help="number of faults, shared equally by the world sizes (default: %(default)s)",
    )  # fmt: skip
    add_seed(parser)
    add_outputs(parser, "progress lines on a terminal too")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return 0 if every fault was handled, else 1. Raises Unavailable for an unsupported world size."""
    worlds = options.world or fault_run.FAULT_WORLDS
    if min(worlds) < 2 or max(worlds) > MAX_WORLD:
        sizes = ",".join(map(str, worlds))
        raise Unavailable(f"argument --world: world sizes must be from 2 to {MAX_WORLD}, got {sizes}")
    seed = seed_of(options)
    report = Report(console, command_run("faults") | {"seed": seed, "backend": "gloo"}, options.verbose)
    report.say(f"seed {seed}; repeat this run with --seed {seed}")
    try:
        fault_run.run_faults(report, worlds, options.count, seed, options.failures)
    except KeyboardInterrupt:
        report.interrupt()
        raise
    failed = counted(len(report.failures), "fault") + " mishandled"
    verdict = failed if report.failures else "all named, nothing left over"
    for line in table(report):
        report.say(line)
    report.say(f"{counted(report.examples, 'fault')} in {report.seconds:.1f} s: {verdict}")
    return finish(options, report)
