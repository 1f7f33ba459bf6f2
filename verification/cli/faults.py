"""`python -m verification faults`: inject faults, and check that each is named and nothing is lost or left over."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from rich.console import Console

from verification.cli.arguments import add_outputs, add_seed, add_world, count, finish, seed_of
from verification.faults import fault_run, inject, training_faults
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
all ranks must run again, and the next example must be right.
training: damaged and foreign checkpoints, full disks and folders of others; and
kills, stops and second trainings of scripts/train.py, one fault in 32."""


def attention(report: Report, options: argparse.Namespace, seed: int) -> None:
    worlds = options.world or fault_run.FAULT_WORLDS
    fault_run.run_faults(report, worlds, options.count, seed, options.failures)


def training(report: Report, options: argparse.Namespace, seed: int) -> None:
    training_faults.run_faults(report, options.count, seed, options.failures)


# Kinds of subjects to inject faults into: the run, what its faults must be, and this of each kind of them.
KINDS = {
    "attention": (attention, "named, with its rank, as", {kind.title: kind.named_as for kind in inject.KINDS}),
    "training": (training, "must be", {kind.title: kind.must for kind in training_faults.KINDS.values()}),
}
MUTATED_FILES = "tests/verification/replay/test_mutated_records.py"


def table(report: Report, about: str, kinds: Mapping[str, str]) -> list[str]:
    """Return a line for each kind of fault, by title: their number, what they must be, seconds."""
    lines = [f"{'fault':<24}{'faults':>8}  {about:<38}{'seconds':>8}"]
    for title, must in kinds.items():
        row = report.rows.total(title)
        lines.append(f"{title:<24}{row.examples:>8}  {must:<38}{row.seconds:>8.1f}")
    return lines


def kind(text: str) -> str:
    if text == "files":
        raise argparse.ArgumentTypeError(f"'files' is now a test: run python -m pytest {MUTATED_FILES}")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind", nargs="+", type=kind, choices=tuple(KINDS), default=["attention"], metavar="KIND",
        help=f"what to inject faults into: {', '.join(KINDS)} (default: attention)",
    )  # fmt: skip
    default = ",".join(map(str, fault_run.FAULT_WORLDS))
    add_world(parser, f"{default}; from 2 to {MAX_WORLD}; of attention alone")
    parser.add_argument(
        "--count", type=count, metavar="N", default=fault_run.COUNT,
        help="number of faults of each kind, shared equally by the world sizes (default: %(default)s)",
    )  # fmt: skip
    add_seed(parser)
    add_outputs(parser, "progress lines on a terminal too")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return 0 if every fault was handled, else 1. Raises Unavailable for an unsupported world size."""
    kinds = tuple(dict.fromkeys(options.kind))
    worlds = options.world or fault_run.FAULT_WORLDS
    if options.world and "attention" not in kinds:
        raise Unavailable(f"argument --world: it is of --kind attention, got --kind {' '.join(kinds)}: leave it out")
    if min(worlds) < 2 or max(worlds) > MAX_WORLD:
        sizes = ",".join(map(str, worlds))
        raise Unavailable(f"argument --world: world sizes must be from 2 to {MAX_WORLD}, got {sizes}")
    seed = seed_of(options)
    report = Report(console, command_run("faults") | {"seed": seed, "backend": "gloo"}, options.verbose)
    report.say(f"seed {seed}; repeat this run with --seed {seed}")
    with report:
        try:
            for kind in kinds:
                KINDS[kind][0](report, options, seed)
        except KeyboardInterrupt:
            report.interrupt()
            raise
    failed = counted(len(report.failures), "fault") + " mishandled"
    verdict = failed if report.failures else "all named, nothing left over"
    for kind in kinds:
        for line in table(report, *KINDS[kind][1:]):
            report.say(line)
    report.say(f"{counted(report.examples, 'fault')} in {report.seconds:.1f} s: {verdict}")
    return finish(options, report)
