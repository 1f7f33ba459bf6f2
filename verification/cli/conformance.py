"""`python -m verification conformance`: a dated table of implementations and what of each holds, as a page and JSON."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verification.cli import arguments as cli
from verification.cli.arguments import STATUS, say
from verification.cli.peers import peer_names
from verification.peers.conformance.page import cell_text, page
from verification.peers.conformance.row import ADAPTERS, FAILED, NAMES, NOT_RUN, WORLDS, Row, run_row
from verification.report.provenance import command_run
from verification.runner import Profile, RunPlan
from verification.whole_file import write

if TYPE_CHECKING:
    from verification.console import Console

PROFILE = Profile("for each cell and world size", 20, budget=10.0)
HELP = "a table of implementations and what of each holds"
ABOUT = f"""\
Judges each implementation by feature: {", ".join(NAMES[:3])} and others.
A cell has the examples that held, the smallest failing Case, "not claimed" or
why it was not run. NAME is `ring`, this project's attention, a peer or package
as in `python -m verification peers`, or an adapter of your own,
`package.module:adapter`. Without a NAME, all are run."""
STATUS = f"{STATUS}\nIf a cell cannot be run, the status is 2; the others are still run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="ring, a peer, its package, or package.module:adapter")
    cli.add_examples(parser, "number of examples per cell and world size (default: %(default)s)", PROFILE.examples)
    cli.add_only(parser, "column")
    cli.add_world(parser, f"{', '.join(map(str, WORLDS))} for examples, all of the adapter for memory and bytes")
    cli.add_seed(parser)
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="rows at a time (default: %(default)s)")
    cli.add_outputs(parser, "every counter-example in full")
    parser.set_defaults(backend="gloo")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return the exit status (see STATUS). Raises Unavailable for unknown names alone, before any output."""
    names = peer_names(options.names, ADAPTERS)
    # Ranks that are profiled write of each start, and of memory that they had before, to stderr.
    os.environ.update({"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ)
    plan = cli.make_run_plan(options, (), {"": PROFILE}, cli.only_of(options, NAMES))
    record: dict[str, Any] = command_run("conformance") | {
        "date": datetime.now(UTC).date().isoformat(), "seed": plan.seed, "examples": plan.examples,
        "worlds": list(plan.worlds or WORLDS), "rows": [],
        "columns": [name for name in NAMES if not plan.only or name in plan.only],
    }  # fmt: skip
    say(console, f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    verdicts = set()
    for row in _rows(names, plan, options.jobs):
        say(console, f"{row.name} {row.version or ''} ({row.seconds:.0f} s)")
        for cell in row.cells.values():
            message = (cell.message or cell.reason).splitlines()[: None if options.verbose else 1]
            say(console, "\n".join((f"  {cell.column}: {cell_text(vars(cell))}", *(f"    {line}" for line in message))))
            if cell.replay:
                say(console, f"    replay: {cell.replay}")
            verdicts.add(cell.verdict)
        record["rows"].append(row.to_dict())
        cli.write_json(options.json, record)  # after each row: a run of all takes an hour
        if options.page is not None:
            at = options.json and os.path.relpath(options.json, options.page.parent)
            write(options.page, page(record, at))
    return 2 if NOT_RUN in verdicts else 1 if FAILED in verdicts else 0


def _rows(names: Mapping[str, str], plan: RunPlan, jobs: int) -> Iterator[Row]:
    """Yield the rows of these names, in order. jobs: rows at a time, with several each in a process of its own."""
    arguments = names, repeat(plan), names.values()
    if jobs == 1:
        yield from map(run_row, *arguments)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as processes:
        yield from processes.map(run_row, *arguments)
