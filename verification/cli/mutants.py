"""`python -m verification mutants`: which seeded defects the properties find."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from verification.cli.arguments import add_json, add_seed, add_verbose, count, say, seed_of, write_json
from verification.mutants.catalogue import DEFECTS, by_name
from verification.mutants.defect import CannotPlant, Defect, NotSane
from verification.mutants.trials import LIMITS, PROCESSES, SOON, Outcome, totals, try_all
from verification.report.progress import PlainLines, bars
from verification.report.provenance import processor_run, typed_words
from verification.run.backends import Unavailable
from verification.search.experiment import ToolError
from verification.wording import counted

HELP = "plant defects, and see which check finds each"
ABOUT = """\
Plants one defect after the other into the ranks' code, and draws examples until
a property or a law breaks. No check knows of a defect: what survives shows what
the properties do not see."""
STATUS = """\
exit status: 0 all killed; 1 some survived; 2 the search itself could not be
carried out."""
FEW = 20  # defects that have a row each; of more, those that the same check found share one, unless --verbose is given


def add_arguments(mutants: argparse.ArgumentParser) -> None:
    mutants.add_argument("names", nargs="*", metavar="NAME", help="the defects to plant (default: all)")
    mutants.add_argument("--list", action="store_true", help="print these defects and what is wrong with each, and end")
    mutants.add_argument(
        "--limit", type=count, metavar="N",
        help=f"examples for each defect (default: {LIMITS['attention']}; of a training step {LIMITS['training']}, of "
        f"faults {LIMITS['faults']})",
    )  # fmt: skip
    mutants.add_argument(
        "--jobs", type=count, default=PROCESSES, metavar="N",
        help=f"defects at a time, each on up to 4 ranks of its own (default: {PROCESSES})",
    )  # fmt: skip
    add_seed(mutants)
    add_json(mutants, "the outcomes")
    add_verbose(mutants, "each outcome when it is there, and a row for each defect at the end")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """0 all killed, 1 some survived. Raises Unavailable where it cannot be carried out."""
    try:
        defects = [by_name(name) for name in options.names] or list(DEFECTS)
    except ValueError as error:
        raise Unavailable(f"argument NAME: {error}") from error
    if options.list:
        _list(defects, console)
        return 0
    seed, started = seed_of(options), time.perf_counter()
    say(console, f"seed {seed}; repeat this search with --seed {seed}")
    shown = Shown(console, len(defects), options.verbose)
    try:
        with shown.bar():
            names = [defect.name for defect in defects]
            for outcome in try_all(names, seed, options.limit, options.jobs, say=shown.progress):
                shown.add(outcome)
    except ToolError as error:  # of a defect that does not run; what became of the others is worth keeping
        write_json(options.json, to_dict(shown.outcomes, time.perf_counter() - started, seed, options.limit))
        raise Unavailable(str(error)) from error
    except (ValueError, CannotPlant, NotSane, BrokenExecutor) as error:
        raise Unavailable(str(error)) from error
    spent = time.perf_counter() - started
    for line in summary(shown.outcomes, spent, options.verbose):
        say(console, line)
    write_json(options.json, to_dict(shown.outcomes, spent, seed, options.limit))
    return 0 if all(outcome.killed for outcome in shown.outcomes) else 1


def to_dict(outcomes: list[Outcome], seconds: float, seed: int, limit: int | None) -> dict[str, Any]:
    """The record of a search: where, with what, by which command; what became of each defect; the totals."""
    return {
        **processor_run(f"python -m verification mutants {typed_words(sys.argv[2:])}".rstrip()),
        "mutants": [outcome.to_dict() for outcome in outcomes],
        **totals(outcomes),
        "seconds": round(seconds, 1),
        "seed": seed,
        "limit": LIMITS if limit is None else limit,
    }


class Shown:
    """The outcomes so far, and what is shown of them: on a terminal a bar, elsewhere a line now and then."""

    def __init__(self, console: Console, defects: int, verbose: bool) -> None:
        self.outcomes: list[Outcome] = []
        self._console, self._defects, self._verbose = console, defects, verbose
        self._lines = PlainLines()
        self._bar: Progress | None = None

    @contextmanager
    def bar(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with bars(self._console) as self._bar:
            self._bar.add_task("defects", total=self._defects)
            yield
        self._bar = None

    def progress(self, line: str) -> None:
        """How far the defect has come for whose outcome the others wait."""
        if self._bar is not None:
            self._bar.refresh()
        elif self._lines.due():
            killed = sum(outcome.killed for outcome in self.outcomes)
            say(self._console, f"{killed} of {self._defects} killed; {line}" if self.outcomes else line)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, refresh=True)
        if self._verbose or not outcome.killed:
            what = f"killed by {outcome.check!r} ({outcome.kind})" if outcome.killed else "survived"
            found = f"{counted(outcome.examples, 'example')}, {outcome.seconds:.1f} s"
            say(self._console, f"{outcome.name}: {what}, {found}")


def summary(outcomes: Sequence[Outcome], seconds: float, verbose: bool) -> list[str]:
    """Lines of 80 columns: a table, then what survived, then the verdict."""
    killed = [outcome for outcome in outcomes if outcome.killed]
    lines = _by_defect(outcomes) if verbose or len(outcomes) <= FEW else [*_by_check(killed), "", *by_worth(outcomes)]
    lines += [f"survived: {o.name}: {by_name(o.name).about}" for o in outcomes if not o.killed]
    soon = totals(outcomes)["within_200"]
    verdict = f"{len(killed)} of {counted(len(outcomes), 'defect')} killed, {soon} of them within {SOON} examples"
    return [*lines, f"{verdict}, in {seconds:.1f} s"]


def _by_defect(outcomes: Sequence[Outcome]) -> list[str]:
    """The names of defects and of what finds them take up to two lines of 80 columns."""
    lines = [f"{'defect':<64}{'examples':>8}{'seconds':>8}"]
    for o in outcomes:
        lines.append(f"{o.name:<64}{o.examples:>8}{o.seconds:>8.1f}")
        lines.append(f"    {o.check} ({o.kind})" if o.killed else "    survived")
    return lines


def _by_check(killed: Sequence[Outcome]) -> list[str]:
    """One row for each property or law, those that found most first: how many defects, after how many examples."""
    found: dict[str, list[int]] = {}
    for outcome in killed:
        found.setdefault(str(outcome.check), []).append(outcome.examples)
    lines = [f"{'killed by':<44}{'defects':>8}{'examples: median':>18}{'most':>8}"]
    for check, examples in sorted(found.items(), key=lambda item: -len(item[1])):
        lines.append(f"{check:<44}{len(examples):>8}{median(examples):>18.0f}{max(examples):>8}")
    return lines


def by_worth(outcomes: Sequence[Outcome]) -> list[str]:
    """One row for each experiment: what was drawn for it over all defects, the defects that it found first, and how
    many of these a minute. Those that found most a minute first.
    """
    found = Counter(outcome.experiment for outcome in outcomes if outcome.killed)
    spent: dict[str, tuple[int, float]] = {}
    for name, (examples, seconds) in (item for outcome in outcomes for item in outcome.spent.items()):
        before = spent.get(name, (0, 0.0))
        spent[name] = (before[0] + examples, before[1] + seconds)
    rate = {name: 60 * found[name] / seconds if seconds else 0.0 for name, (_, seconds) in spent.items()}
    lines = [f"{'examples of':<44}{'examples':>9}{'seconds':>9}{'kills':>7}{'a minute':>10}"]
    for name in sorted(spent, key=lambda name: -rate[name]):
        examples, seconds = spent[name]
        lines.append(f"{name:<44}{examples:>9}{seconds:>9.1f}{found[name]:>7}{rate[name]:>10.1f}")
    return lines


def _list(defects: Sequence[Defect], console: Console) -> None:
    for defect in defects:
        say(console, f"{defect.name} ({defect.provenance}): {defect.about}")
    say(console, counted(len(defects), "seeded defect"))
