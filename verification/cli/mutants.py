"""`python -m verification mutants`: which seeded defects the properties find."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from verification.cli.arguments import add_json, add_seed, count, typed
from verification.mutants.catalogue import DEFECTS, by_name
from verification.mutants.defect import CannotPlant, Defect
from verification.mutants.trials import LIMIT, SOON, NotSane, Outcome, totals, try_all
from verification.report.provenance import processor_run
from verification.run.backends import Unavailable
from verification.search.experiment import ToolError
from verification.wording import counted

DESCRIPTION = """\
Plants one defect after the other into the ranks' code and draws examples until a property or a law breaks. No check
knows of a defect: what survives shows where the properties are blind."""
EPILOGUE = """\
exit status: 0 all killed; 1 some survived; 2 the search itself could not be carried out."""


def add_parser(commands: Any) -> None:
    """`commands`: what `ArgumentParser.add_subparsers` returned."""
    mutants = commands.add_parser(
        "mutants", help="plant defects, and see which check finds each", description=DESCRIPTION, epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    mutants.add_argument("names", nargs="*", metavar="NAME", help="the defects to plant (default: all)")
    mutants.add_argument("--list", action="store_true", help="print these of the catalogue and end")
    mutants.add_argument(
        "--limit", type=count, default=LIMIT, metavar="N", help="examples a defect (default: %(default)s)"
    )
    add_seed(mutants)
    add_json(mutants, "the outcomes")


def main(options: argparse.Namespace, console: Console) -> int:
    """0: all killed; 1: some survived; 2: the tool failed, of which stderr tells."""
    try:
        defects = [by_name(name) for name in options.names] or list(DEFECTS)
    except ValueError as error:
        print(f"{typed()}: error: argument NAME: {error}", file=sys.stderr)
        return 2
    if options.list:
        _list(defects, console)
        return 0
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    console.print(f"seed {seed}; repeat this search with --seed {seed}", highlight=False)
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    try:
        for outcome in try_all([defect.name for defect in defects], seed, options.limit, say=partial(_print, console)):
            outcomes.append(outcome)
            _say(outcome, console)
        spent = time.perf_counter() - started
        _summary(outcomes, spent, console)
        if options.json is not None:
            options.json.write_text(json.dumps(to_dict(outcomes, spent, seed, options.limit), indent=2) + "\n")
    except (ValueError, CannotPlant, NotSane, Unavailable, ToolError, BrokenExecutor, OSError) as error:
        print(f"{typed()}: error: {error}", file=sys.stderr)
        return 2
    return 0 if all(outcome.killed for outcome in outcomes) else 1


def to_dict(outcomes: list[Outcome], seconds: float, seed: int, limit: int) -> dict[str, Any]:
    """The record of a search: where, with what, by which command; what became of each defect; the totals."""
    return {
        **processor_run(f"python -m verification mutants {shlex.join(sys.argv[2:])}".rstrip()),
        "mutants": [outcome.to_dict() for outcome in outcomes],
        **totals(outcomes),
        "seconds": round(seconds, 1),
        "seed": seed,
        "limit": limit,
    }


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _list(defects: Sequence[Defect], console: Console) -> None:
    table = Table(title=counted(len(defects), "seeded defect"))
    for head in ("name", "provenance", "what is wrong"):
        table.add_column(head, no_wrap=head == "name")
    for defect in defects:
        table.add_row(defect.name, defect.provenance, defect.about)
    console.print(table, highlight=False)


def _say(outcome: Outcome, console: Console) -> None:
    what = f"killed by {outcome.check!r} ({outcome.kind})" if outcome.killed else "[bold red]survived[/]"
    _print(console, f"{outcome.name}: {what}, {counted(outcome.examples, 'example')}, {outcome.seconds:.1f} s")


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
            _print(console, f"survived: {outcome.name}: {by_name(outcome.name).about}")
    said = totals(outcomes)
    killed = f"{said['killed']} of {counted(said['defects'], 'defect')} killed"
    _print(console, f"{killed}, {said['within_200']} of them within {SOON} examples, in {seconds:.1f} s")
