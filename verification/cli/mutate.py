"""`python -m verification.cli.mutate`: every small change of `ring/` and of the pattern, one after the other.

A change is killed by the first that finds it:

1. the ordinary properties and laws, on examples in the simulation (and on gloo, for what touches process groups; for
   `ring/nn`, training steps on gloo too), drawn once from a seed and the same for every change;
2. the unit tests of the module, as far as they run in one process and in seconds.

What survives both is equivalent, or shows where the checks are blind: `survivors.toml` says which, and why.

Each outcome is a line of a results file, by a digest of the changed text. So a run can be ended at any time; the next
one judges what is new or changed, and goes on with survivors if it may draw more examples. What was judged elsewhere is
in `outcomes.jsonl`, which every run reads first: put the lines of a results file there, and the next machine goes on.
`--sample` judges some changes in place of all, chosen by their digests: a greater sample of the same code has those of
a smaller one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import asdict, replace
from pathlib import Path

from verification.cli.arguments import add_json, count, typed
from verification.cli.outputs import check_file, check_folder
from verification.mutants import syntactic
from verification.mutants.defect import NotSane
from verification.mutants.syntactic.judging import judge_all
from verification.mutants.syntactic.mutations import Mutation, NoGenerator, mutations_of
from verification.mutants.syntactic.page import (
    SAME,
    SURVIVORS,
    Record,
    explained,
    markdown,
    rate,
    read_reasons,
)
from verification.mutants.syntactic.targets import files as all_files
from verification.mutants.syntactic.targets import files_on_gpus, functions_on_gpus, runs_on_gpus_only
from verification.report.provenance import commit
from verification.run.backends import Unavailable
from verification.run.processes.pool import PoolError

COMMAND = "python -m verification.cli.mutate"
RESULTS = Path(".verification/mutations.jsonl")
KEPT = Path(syntactic.__file__).with_name("outcomes.jsonl")
SEED = 3
LIMIT = 300  # examples in the simulation
ENOUGH = 0.95  # of what is not equivalent in ring/


def read_results(path: Path) -> dict[str, Record]:
    """By key; of several outcomes for one change the last. A line that was cut off by an interruption is left out."""
    found: dict[str, Record] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is no outcome: {error}") from error
        found[record.key] = record
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0: enough killed and every survivor explained; 1: not so; 2: the tool failed, of which stderr tells."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (NoGenerator, NotSane, Unavailable, PoolError, BrokenExecutor, ValueError, OSError) as error:
        print(f"{typed(COMMAND)}: error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    everything = all_files()
    files = options.files or everything
    unknown = [file for file in files if file not in everything]
    if unknown:
        raise ValueError(f"--files must be of {', '.join(everything)}; got {', '.join(unknown)}")
    reasons = read_reasons(SURVIVORS)
    check_folder("--results", options.results.parent)
    for argument in ("results", "summary", "json"):
        if getattr(options, argument) is not None:
            check_file(f"--{argument}", getattr(options, argument))
    known = read_results(KEPT) | read_results(options.results)
    every = {file: [x for x in mutations_of(file) if not runs_on_gpus_only(x)] for file in files}
    changes = every if options.sample is None else sample(every, options.sample)
    with options.results.open("a") as results:
        settled = {place for place, reason in reasons.items() if reason.verdict in SAME} if options.unsettled else ()
        for record in judge_all(changes, known, options.seed, options.limit, options.jobs, settled):
            results.write(json.dumps(asdict(record)) + "\n")
            results.flush()
            print(record, flush=True)
    records = [replace(known[change.key], **change.described()) for found in changes.values() for change in found]
    functions = [f"{file}: {name}" for file, names in functions_on_gpus().items() for name in names]
    absent = [*(file for file in everything if file not in files), *files_on_gpus(), *functions]
    of = sum(map(len, every.values()))
    text = markdown(records, reasons, options.seed, [file for file in files if changes[file]], absent, commit(), of)
    print(text.rstrip())
    if options.summary is not None:
        options.summary.write_text(text)
    judged = explained(records, reasons)
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(record) | {"verdict": v} for record, v, _ in judged], indent=1) + "\n"
        )
    if any(record.outcome == "not run" for record in records):
        print(f"{typed(COMMAND)}: error: some changes could not be judged", file=sys.stderr)
        return 2
    whole = rate(judged)
    return 0 if whole >= ENOUGH and all(verdict != "unexplained" for _, verdict, _ in judged) else 1


def sample(changes: dict[str, list[Mutation]], count: int) -> dict[str, list[Mutation]]:
    """So many of all changes, by file: those with the lowest keys, which are digests."""
    lowest = sorted(change.key for found in changes.values() for change in found)[:count]
    last = lowest[-1] if lowest else ""
    return {file: [change for change in found if change.key <= last] for file, found in changes.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed(COMMAND), description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 enough killed, all survivors explained; 1 not so; 2 it could not be carried out.",
    )  # fmt: skip
    parser.add_argument("--files", nargs="+", metavar="FILE", help="ring/strided_view.py ... (default: all)")
    parser.add_argument("--jobs", type=count, default=os.cpu_count() or 1, metavar="N", help="default: the cores")
    parser.add_argument("--limit", type=count, default=LIMIT, metavar="N", help="examples a change (%(default)s)")
    parser.add_argument("--sample", type=count, metavar="N", help="judge N of the changes (default: all)")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help="of the examples (%(default)s)")
    parser.add_argument(
        "--unsettled", action="store_true",
        help="leave out the unit tests of survivors that survivors.toml calls the same in the result: they had not "
        "noticed these when that was written",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="outcomes (%(default)s)")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write the summary as Markdown")
    add_json(parser, "the outcomes with their verdicts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
