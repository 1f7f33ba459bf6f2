"""The command line: `python -m verification run` and `python -m verification replay FILE`."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from verification import real_size, replay, runner
from verification.backends import BACKENDS, Unavailable
from verification.report import Report

DESCRIPTION = """\
Checks ring_attention by properties: Hypothesis draws Cases (pattern, layout, world size, dtype, exchange, ...), real
processes compute each of them, and every result is held against a dense fp64 oracle within bounds derived from the
arithmetic. What fails is shrunk to a minimal Case, saved, and can be replayed."""
EPILOGUE = """\
exit status: 0 all held; 1 a counter-example was found; 2 the run itself could not be carried out."""
RUN = """\
Draws examples for each world size, checks every property on every one of them, then the laws between Cases, then one
problem of real size. Prints progress, a table of the worst error as a fraction of its bound, and every counter-example
as a minimal Case with the line that replays it."""


def worlds(text: str) -> tuple[int, ...]:
    """`1,2,3` -> (1, 2, 3), without repeats; ArgumentTypeError for anything else."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > runner.MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"world sizes must be integers from 1 to {runner.MOST_RANKS}, separated by commas, got {text!r}"
        )
    return sizes


def count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return number


def size(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number != 0 and number < real_size.LEAST:
        raise argparse.ArgumentTypeError(f"must be 0 or an integer >= {real_size.LEAST}, got {text!r}")
    return number


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m verification",
        description=DESCRIPTION,
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="draw examples and check them", description=RUN, epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    run.add_argument(
        "--world", type=worlds, default=runner.WORLDS, metavar="N[,N...]",
        help="world sizes, one pool of ranks each, in this order (default: 1,2,3,4,8)",
    )  # fmt: skip
    run.add_argument(
        "--profile", choices=tuple(runner.PROFILES), default="quick",
        help="how much to draw: " + "; ".join(f"{name}: {p.about}" for name, p in runner.PROFILES.items())
        + " (default: quick)",
    )  # fmt: skip
    run.add_argument("--examples", type=count, metavar="N", help="examples for each world size; laws come on top")
    run.add_argument(
        "--seed", type=int, metavar="N",
        help="draw the same examples as an earlier run with this seed (default: a new one, printed)",
    )  # fmt: skip
    run.add_argument(
        "--backend", choices=tuple(BACKENDS), default="gloo",
        help="where the ranks run: " + "; ".join(f"{name}: {about}" for name, about in BACKENDS.items())
        + " (default: gloo)",
    )  # fmt: skip
    run.add_argument(
        "--real-size", type=size, default=real_size.TOKENS, metavar="N",
        help="tokens of the problem of real size that ends the run; 0 leaves it out (default: %(default)s)",
    )  # fmt: skip
    run.add_argument(
        "--failures", type=Path, default=Path(".verification/failures"), metavar="DIR",
        help="where minimal Cases are saved (default: %(default)s)",
    )  # fmt: skip
    run.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")

    again = commands.add_parser(
        "replay", help="run one saved counter-example again", epilog=EPILOGUE,
        description="Runs a saved Case (or a law with its Case) again, on the ranks it names, and checks it.",
    )  # fmt: skip
    again.add_argument("case", type=Path, metavar="FILE", help="the JSON file that a run saved")
    again.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # A log has no width of its own, and rich would take 80 columns: the table needs more.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        if options.json is not None:
            _writable("--json", options.json)
        if options.command == "run":
            options.failures.mkdir(parents=True, exist_ok=True)
        report = _replay(options, console) if options.command == "replay" else _run(options, console)
        if options.json is not None:
            options.json.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")
    except (Unavailable, OSError) as error:
        print(f"python -m verification: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m verification: interrupted", file=sys.stderr)
        return 2
    except runner.ToolError as error:
        raise RuntimeError(f"the machinery failed on an example: {error}") from error
    return 1 if report.failures else 0


def _writable(argument: str, file: Path) -> None:
    """Now rather than after hours: OSError, naming the argument, if the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise OSError(f"argument {argument}: {error}") from error


def _run(options: argparse.Namespace, console: Console) -> Report:
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    plan = runner.Plan(
        worlds=options.world,
        profile=runner.PROFILES[options.profile],
        examples=options.examples,
        seed=seed,
        backend=options.backend,
        failures=options.failures,
        real_size=options.real_size,
    )
    extras: dict[str, Any] = {"seed": seed, "profile": options.profile, "backend": options.backend}
    return runner.run(plan, Report(console, extras=extras))


def _replay(options: argparse.Namespace, console: Console) -> Report:
    return replay.replay(options.case, Report(console))
