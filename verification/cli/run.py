"""`python -m verification run`: the main job, once or for a night."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from verification import runner, whole_run
from verification.cli import nightly
from verification.cli.arguments import (
    MODULE,
    add_backend,
    add_failures,
    add_json,
    add_seed,
    add_verbose,
    count,
    seed_of,
    span,
    typed,
    whole,
)
from verification.cli.outputs import write_json
from verification.problems import real_size
from verification.report.report import Report
from verification.run.backends import BACKENDS, Unavailable

PROFILES = runner.PROFILES | {"nightly": nightly.PROFILE}
MOST_RANKS = max(runner.MOST_RANKS.values())
ABOUT = """\
Draws examples for each world size, checks every property on every one of them,
then the laws between Cases, then one problem of real size. Prints progress, a
table of the worst error as a fraction of its bound, and of what failed the
smallest counter-example as a minimal Case, with the line that replays it."""


def worlds(text: str) -> tuple[int, ...]:
    """`1,2,3` -> (1, 2, 3), without repeats; ArgumentTypeError for anything else."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"world sizes must be integers from 1 to {MOST_RANKS}, separated by commas, got {text!r}"
        )
    return sizes


def add_parser(commands: Any, epilog: str) -> None:
    """`commands`: what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "run", help="draw examples and check them", description=ABOUT, epilog=epilog, prog=typed(f"{MODULE} run"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--world", type=worlds, metavar="N[,N...]",
        help="world sizes, one after the other (default: 1,2,3,4,8; nightly: those of its round)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", choices=tuple(PROFILES), default="quick",
        help="how much to draw: " + "; ".join(f"{name}: {p.about}" for name, p in PROFILES.items())
        + " (default: quick)",
    )  # fmt: skip
    parser.add_argument(
        "--hours", type=span(math.inf, "a number of hours > 0"), metavar="H",
        help=f"nightly: how long, until the end of the world size then under way (default: {nightly.HOURS:g})",
    )  # fmt: skip
    parser.add_argument(
        "--state", type=Path, metavar="FILE",
        help=f"nightly: the report so far, from which the next run goes on (default: {nightly.STATE})",
    )  # fmt: skip
    parser.add_argument(
        "--examples", type=count, metavar="N",
        help="plain examples for each world size; up to about 1.5 times as many more for laws and larger errors",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=count, metavar="N",
        help="world sizes at a time; what is drawn does not depend on it (default: as many as cores; on nccl 1)",
    )  # fmt: skip
    add_seed(parser)
    add_backend(parser, BACKENDS)
    least, most = real_size.LEAST, real_size.MOST
    parser.add_argument(
        "--real-size", metavar="N",
        type=whole(lambda size: size == 0 or least <= size <= most, f"0 or an integer from {least} to {most}"),
        help=f"tokens of the problem of real size that ends the run; 0 leaves it out (default: {real_size.TOKENS})",
    )  # fmt: skip
    add_failures(parser)
    add_json(parser)
    add_verbose(parser, "a row for each property and world size, all of the coverage, each counter-example")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """0 all held, 1 a counter-example was found. Raises Unavailable where it cannot be carried out."""
    report = _nightly(options, console) if options.profile == "nightly" else _once(options, console)
    write_json(options.json, report.to_dict())
    return 1 if report.failures else 0


def _once(options: argparse.Namespace, console: Console) -> Report:
    for name in ("hours", "state"):
        if getattr(options, name) is not None:
            raise Unavailable(f"argument --{name}: goes with --profile nightly, got --profile {options.profile}")
    backend, world = options.backend or "gloo", options.world or runner.WORLDS
    most = runner.MOST_RANKS[backend]
    if max(world) > most:
        raise Unavailable(f"argument --world: on {backend} at most {most} ranks, got {max(world)}")
    jobs = options.jobs or (1 if backend == "nccl" else len(os.sched_getaffinity(0)))
    if backend == "nccl" and jobs > 1:
        raise Unavailable(f"argument --jobs: on nccl one world size at a time, since ranks share the GPUs; got {jobs}")
    plan = runner.RunPlan(
        worlds=world,
        profile=runner.PROFILES[options.profile],
        examples=options.examples,
        seed=seed_of(options),
        backend=backend,
        failures=options.failures,
        real_size=real_size.TOKENS if options.real_size is None else options.real_size,
        jobs=jobs,
    )
    extras: dict[str, Any] = {"seed": plan.seed, "profile": options.profile, "backend": backend}
    return whole_run.run(plan, Report(console, extras, options.verbose))


def _nightly(options: argparse.Namespace, console: Console) -> Report:
    for name in ("examples", "real_size", "jobs"):
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
    report = Report(console, {"profile": "nightly"}, options.verbose)
    return nightly.run(night, report, options.hours or nightly.HOURS)
