"""`python -m verification mutants`: find out which seeded defects the properties and laws kill."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from statistics import median
from typing import Any

from verification.cli.arguments import add_json, add_seed, count, say, seed_of, write_json
from verification.console import Console
from verification.mutants.catalogue import DEFECTS, by_name
from verification.mutants.defect import BaselineFails, CannotPlant
from verification.mutants.search import LIMITS, PROCESSES, SOON, DefectOutcome, totals, try_all
from verification.record_kinds import Record
from verification.report.progress import PlainLines
from verification.report.provenance import command_run
from verification.run.backends import Unavailable
from verification.search.experiment import ToolError
from verification.whole_file import write
from verification.wording import counted

HELP = "plant seeded defects and report which check kills each"
ABOUT = """\
Mutation testing: plants one defect at a time into the code that the ranks run,
and draws examples until a property or a law fails. The checks do not know which
defect is planted."""
STATUS = """\
exit status: 0 all killed; 1 some survived; 2 the search itself could not run."""
FEW = 20  # up to so many defects have a row each; more are grouped by the check that killed them, unless --verbose


def add_arguments(mutants: argparse.ArgumentParser) -> None:
    mutants.add_argument("names", nargs="*", metavar="NAME", help="defects to plant (default: all)")
    mutants.add_argument("--list", action="store_true", help="list the defects with a description of each, and exit")
    mutants.add_argument(
        "--limit",
        type=count,
        metavar="N",
        help=f"examples per defect (default: {LIMITS['attention']}; in training steps {LIMITS['training']}, in fault "
        f"handling {LIMITS['faults']})",
    )
    mutants.add_argument(
        "--jobs", type=count, default=PROCESSES, metavar="N",
        help=f"defects in parallel, each on up to 4 ranks of its own (default: {PROCESSES})",
    )  # fmt: skip
    mutants.add_argument(
        "--jsonl", type=Path, metavar="FILE", help="append one JSON line per defect: name, check, examples, ..."
    )
    add_seed(mutants)
    add_json(mutants, "the outcomes")
    about = "print each outcome as it arrives and one row per defect"
    mutants.add_argument("--verbose", "-v", action="store_true", help=about)


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return the exit status (see STATUS). Raises Unavailable if the search cannot run."""
    try:
        defects = [by_name(name) for name in options.names] or list(DEFECTS)
    except ValueError as error:
        raise Unavailable(f"argument NAME: {error}") from error
    if options.list:
        for defect in defects:
            say(console, f"{defect.name} ({defect.provenance}): {defect.about}")
        say(console, counted(len(defects), "seeded defect"))
        return 0
    seed, started, outcomes, lines = seed_of(options), time.perf_counter(), [], PlainLines()
    say(console, f"seed {seed}; repeat this search with --seed {seed}")
    failure: ToolError | None = None
    try:
        for outcome in try_all([defect.name for defect in defects], seed, options.limit, options.jobs):
            outcomes.append(outcome)
            if options.verbose or not outcome.killed:
                what = f"killed by {outcome.check!r} ({outcome.kind})" if outcome.killed else "survived"
                examples = f"{counted(outcome.examples, 'example')}, {outcome.seconds:.1f} s"
                say(console, f"{outcome.name}: {what}, {examples}")
            elif lines.due():
                killed = sum(outcome.killed for outcome in outcomes)
                say(console, f"{killed} of {len(outcomes)} killed, of {counted(len(defects), 'defect')}")
    except (ValueError, CannotPlant, BaselineFails, BrokenExecutor) as error:
        raise Unavailable(str(error)) from error
    except ToolError as error:  # one defect does not run: report the outcomes of the others first
        failure = error
    record = {
        **command_run("mutants"),
        "mutants": [outcome.to_dict() for outcome in outcomes], **totals(outcomes),
        "seconds": round(time.perf_counter() - started, 1), "seed": seed, "limit": options.limit or LIMITS,
    }  # fmt: skip
    write_json(options.json, record)
    if options.jsonl is not None:
        append_lines(options.jsonl, record)
    if failure is not None:
        raise Unavailable(str(failure)) from failure
    for line in summary(outcomes, record["seconds"], options.verbose):
        say(console, line)
    return 0 if all(outcome.killed for outcome in outcomes) else 1


def append_lines(file: Path, record: dict[str, Any]) -> None:
    """Append one JSON line per defect: name; check, null for a survivor; examples drawn; ratio, error / bound of the
    smallest failure; dtype of that failure; seed; commit."""
    lines = [file.read_text()] if file.is_file() else []
    for outcome in record["mutants"]:
        line = {key: outcome[key] for key in ("name", "check", "examples", "ratio")}
        line["dtype"] = outcome["case"] and Record.from_dict(outcome["case"]).case["dtype"]
        lines.append(json.dumps(line | {key: record[key] for key in ("seed", "commit")}) + "\n")
    write(file, "".join(lines))


def summary(outcomes: Sequence[DefectOutcome], seconds: float, verbose: bool) -> list[str]:
    """Return lines of 80 columns: a table, the survivors, the verdict."""
    killed = [outcome for outcome in outcomes if outcome.killed]
    if verbose or len(outcomes) <= FEW:  # two lines per defect: both names do not fit in one
        lines = [f"{'defect':<64}{'examples':>8}{'seconds':>8}"]
        for o in outcomes:
            lines.append(f"{o.name:<64}{o.examples:>8}{o.seconds:>8.1f}")
            lines.append(f"    {o.check} ({o.kind})" if o.killed else "    survived")
    else:
        lines = _by_check(killed)
    lines += [f"survived: {o.name}: {by_name(o.name).about}" for o in outcomes if not o.killed]
    soon = totals(outcomes)["within_200"]
    verdict = f"{len(killed)} of {counted(len(outcomes), 'defect')} killed, {soon} of them within {SOON} examples"
    return [*lines, f"{verdict}, in {seconds:.1f} s"]


def _by_check(killed: Sequence[DefectOutcome]) -> list[str]:
    """Return a row per property or law, most defects first, with the numbers of defects and examples."""
    examples: dict[str, list[int]] = {}
    for outcome in killed:
        examples.setdefault(str(outcome.check), []).append(outcome.examples)
    lines = [f"{'killed by':<44}{'defects':>8}{'examples: median':>18}{'most':>8}"]
    for check, counts in sorted(examples.items(), key=lambda item: -len(item[1])):
        lines.append(f"{check:<44}{len(counts):>8}{median(counts):>18.0f}{max(counts):>8}")
    return lines
