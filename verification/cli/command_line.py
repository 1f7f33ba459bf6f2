"""The command line: `python -m verification run`, `replay FILE`, `mutants` and `peers`."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import verification.peers.saved  # noqa: F401 - so that saved counter-examples of peers can be replayed
from verification import runner
from verification.cli import mutants, nightly, peers
from verification.cli.arguments import MODULE, add_failures, add_json, add_seed, count, typed
from verification.cli.outputs import check_file, check_folder
from verification.problems import real_size
from verification.replay import replay
from verification.report.report import Report
from verification.run.backends import BACKENDS, Unavailable, open_backend
from verification.search.experiment import ToolError

PROFILES = runner.PROFILES | {"nightly": nightly.PROFILE}
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
    most = max(runner.MOST_RANKS.values())
    if not sizes or min(sizes) < 1 or max(sizes) > most:
        raise argparse.ArgumentTypeError(
            f"world sizes must be integers from 1 to {most}, separated by commas, got {text!r}"
        )
    return sizes


def size(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number != 0 and not real_size.LEAST <= number <= real_size.MOST:
        allowed = f"0 or an integer from {real_size.LEAST} to {real_size.MOST}"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
    return number


def hours(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of hours > 0, got {text!r}")
    return number


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=MODULE,
        description=DESCRIPTION,
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="draw examples and check them", description=RUN, epilog=EPILOGUE, prog=typed(f"{MODULE} run"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    run.add_argument(
        "--world", type=worlds, metavar="N[,N...]",
        help="world sizes, one pool of ranks each, in this order (default: 1,2,3,4,8; nightly: those of its round)",
    )  # fmt: skip
    run.add_argument(
        "--profile", choices=tuple(PROFILES), default="quick",
        help="how much to draw: " + "; ".join(f"{name}: {p.about}" for name, p in PROFILES.items())
        + " (default: quick)",
    )  # fmt: skip
    run.add_argument(
        "--hours",
        type=hours,
        metavar="H",
        help=f"nightly: so long, and to the end of the world size then under way (default: {nightly.HOURS:g})",
    )
    run.add_argument(
        "--state", type=Path, metavar="FILE",
        help=f"nightly: the report so far, and where to go on from (default: {nightly.STATE})",
    )  # fmt: skip
    run.add_argument(
        "--examples",
        type=count,
        metavar="N",
        help="examples for each world size; a tenth more look for larger errors, and a fifth for laws",
    )
    add_seed(run)
    _add_backend(run)
    run.add_argument(
        "--real-size", type=size, metavar="N",
        help=f"tokens of the problem of real size that ends the run; 0 leaves it out (default: {real_size.TOKENS})",
    )  # fmt: skip
    add_failures(run)
    add_json(run)

    again = commands.add_parser(
        "replay", help="run one saved counter-example again", epilog=EPILOGUE,
        description="Runs a saved Case (or a law with its Case) again, on the ranks it names, and checks it.",
    )  # fmt: skip
    again.add_argument("case", type=Path, metavar="FILE", help="the JSON file that a run saved")
    _add_backend(again)
    add_json(again)
    mutants.add_parser(commands)
    peers.add_parser(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return top


def _add_backend(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--backend", choices=tuple(BACKENDS),
        help="where the ranks run: " + "; ".join(f"{name}: {about}" for name, about in BACKENDS.items())
        + " (default: gloo)",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options, unknown = parser().parse_known_args(arguments)
    if unknown:  # left to `parse_args`, the usage would be that of all commands
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # A log has no width of its own, and rich would take 80 columns: the table needs more.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        _check_outputs(options)
        if options.command == "mutants":
            return mutants.main(options, console)
        if options.command == "peers":
            return peers.main(options, console)
        report = _replay(options, console) if options.command == "replay" else _run(options, console)
        if options.json is not None:
            options.json.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")
    except (Unavailable, OSError) as error:
        print(f"{typed()}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{typed()}: interrupted", file=sys.stderr)
        return 2
    except ToolError as error:
        if error.__cause__ is not None:  # an exception that nobody foresaw: its traceback is wanted
            raise RuntimeError(f"the machinery failed on an example: {error}") from error
        print(f"{typed()}: error: {error}", file=sys.stderr)
        return 2
    return 1 if report.failures else 0


def _check_outputs(options: argparse.Namespace) -> None:
    """Raises OSError, naming the argument, for a file or folder that cannot be written."""
    if options.json is not None:
        check_file("--json", options.json)
    if getattr(options, "state", None) is not None:
        check_folder("--state", options.state.parent)  # a state is written beside the old one, then takes its place
        check_file("--state", options.state)
    if getattr(options, "failures", None) is not None and not getattr(options, "list", False):
        check_folder("--failures", options.failures)


def _run(options: argparse.Namespace, console: Console) -> Report:
    if options.profile == "nightly":
        return _run_nightly(options, console)
    for name in ("hours", "state"):
        if getattr(options, name) is not None:
            raise Unavailable(f"argument --{name}: goes with --profile nightly, got --profile {options.profile}")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    backend, world = options.backend or "gloo", options.world or runner.WORLDS
    most = runner.MOST_RANKS[backend]
    if max(world) > most:
        raise Unavailable(f"argument --world: on {backend} at most {most} ranks, got {max(world)}")
    plan = runner.Plan(
        worlds=world,
        profile=runner.PROFILES[options.profile],
        examples=options.examples,
        seed=seed,
        backend=backend,
        failures=options.failures,
        real_size=real_size.TOKENS if options.real_size is None else options.real_size,
    )
    extras: dict[str, Any] = {"seed": seed, "profile": options.profile, "backend": backend}
    return runner.run(plan, Report(console, extras=extras))


def _run_nightly(options: argparse.Namespace, console: Console) -> Report:
    for name in ("examples", "real_size"):
        if getattr(options, name) is not None:
            argument = name.replace("_", "-")
            raise Unavailable(
                f"argument --{argument}: rounds of --profile nightly have their own, got {options.__dict__[name]}"
            )
    chunks = [
        chunk for chunk in nightly.ROUND
        if options.backend in (None, chunk.backend) and (options.world is None or chunk.world in options.world)
    ]  # fmt: skip
    if not chunks:
        there = ", ".join(f"{chunk.backend} {chunk.world}" for chunk in nightly.ROUND)
        raise Unavailable(f"argument --world: a round of --profile nightly has {there}; none of these was asked for")
    night = nightly.Night(options.state or nightly.STATE, options.failures, chunks, options.seed)
    return nightly.run(night, Report(console, extras={"profile": "nightly"}), options.hours or nightly.HOURS)


def _replay(options: argparse.Namespace, console: Console) -> Report:
    return replay.replay(options.case, Report(console), open_backend(options.backend or "gloo"))
