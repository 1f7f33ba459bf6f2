"""`python -m verification mutants`: which seeded defects the properties find."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import sys
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from verification.backends import Unavailable
from verification.benchmarks.records import commit
from verification.hunt import ToolError
from verification.mutants import DEFECTS, CannotPlant, by_name
from verification.mutants.runner import ALL, LIMIT, SOON, NotSane, Outcome, hunt_all, totals

DESCRIPTION = """\
Plants one defect after the other into the ranks' code and draws examples until a property or a law breaks. No check
knows of a defect: what survives shows where the properties are blind."""
EPILOGUE = """\
exit status: 0 all killed; 1 some survived; 2 the hunt itself could not be carried out."""


def add_parser(commands: Any) -> None:
    """`commands`: what `ArgumentParser.add_subparsers` returned."""
    mutants = commands.add_parser(
        "mutants", help="hunt seeded defects", description=DESCRIPTION, epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    mutants.add_argument("names", nargs="*", metavar="NAME", help="the defects to hunt (default: all)")
    mutants.add_argument("--list", action="store_true", help="print the catalogue and end")
    mutants.add_argument(
        "--limit", type=_count, default=LIMIT, metavar="N", help="examples a defect (default: %(default)s)"
    )
    mutants.add_argument("--seed", type=int, metavar="N", help="draw the same examples as an earlier hunt")
    mutants.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes as JSON too")


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return number


def main(options: argparse.Namespace, console: Console) -> int:
    """0: all killed; 1: some survived; 2: the tool failed, of which stderr tells."""
    if options.list:
        _list(console)
        return 0
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    console.print(f"seed {seed}; repeat this hunt with --seed {seed}", highlight=False)
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    try:
        names = [by_name(name).name for name in options.names] or list(ALL)
        for outcome in hunt_all(names, seed, options.limit):
            outcomes.append(outcome)
            _say(outcome, console)
        spent = time.perf_counter() - started
        _summary(outcomes, spent, console)
        if options.json is not None:
            options.json.write_text(json.dumps(to_dict(outcomes, spent, seed, options.limit), indent=2) + "\n")
    except (ValueError, CannotPlant, NotSane, Unavailable, ToolError, BrokenExecutor, OSError) as error:
        print(f"python -m verification: error: {error}", file=sys.stderr)
        return 2
    return 0 if all(outcome.killed for outcome in outcomes) else 1


def to_dict(outcomes: list[Outcome], seconds: float, seed: int, limit: int) -> dict[str, Any]:
    """The record of a hunt: where, with what, by which command; what became of each defect; the totals."""
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "command": f"python -m verification mutants {shlex.join(sys.argv[2:])}".rstrip(),
        "mutants": [outcome.to_dict() for outcome in outcomes],
        **totals(outcomes),
        "seconds": round(seconds, 1),
        "seed": seed,
        "limit": limit,
    }


def _list(console: Console) -> None:
    table = Table(title=f"{len(DEFECTS)} seeded defects")
    for head in ("name", "provenance", "what is wrong"):
        table.add_column(head, no_wrap=head == "name")
    for defect in DEFECTS:
        table.add_row(defect.name, defect.provenance, defect.about)
    console.print(table, highlight=False)


def _say(outcome: Outcome, console: Console) -> None:
    what = f"killed by {outcome.check!r} ({outcome.kind})" if outcome.killed else "[bold red]survived[/]"
    console.print(
        f"{outcome.name}: {what}, {outcome.examples} examples, {outcome.seconds:.1f} s", highlight=False, soft_wrap=True
    )


def _summary(outcomes: list[Outcome], seconds: float, console: Console) -> None:
    table = Table(title="seeded defects")
    for head in ("name", "killed by", "kind", "examples", "seconds"):
        table.add_column(head, justify="right" if head in ("examples", "seconds") else "left", no_wrap=head == "name")
    for outcome in outcomes:
        found = (outcome.check or "-", outcome.kind or "survived")
        table.add_row(outcome.name, *found, str(outcome.examples), f"{outcome.seconds:.1f}")
    console.print(table, highlight=False)
    for outcome in outcomes:
        if not outcome.killed:
            console.print(f"survived: {outcome.name}: {by_name(outcome.name).about}", highlight=False, soft_wrap=True)
    said = totals(outcomes)
    console.print(
        f"{said['killed']} of {said['defects']} defects killed, {said['within_200']} of them within {SOON} examples, "
        f"in {seconds:.1f} s",
        highlight=False,
    )
