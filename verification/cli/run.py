"""`python -m verification run`: check all properties and laws, once or for hours."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from typing import Any

from verification import runner, whole_run
from verification.cli import arguments as cli
from verification.console import Console
from verification.problems import real_size
from verification.report.report import Report
from verification.run.backends import BACKENDS, Unavailable

HELP = "draw examples and check them"
ABOUT = """\
Draws examples for each world size and checks every property on each of them.
Then it checks the laws between Cases and one problem of real size. It prints
progress, the worst errors as fractions of their bounds, and the smallest
counter-example, as a minimal Case, with the command that replays it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_world(parser, ",".join(map(str, runner.WORLDS)))
    cli.add_profile(parser, runner.PROFILES)
    cli.add_examples(
        parser, "plain examples per world size; laws and the search for larger errors add up to as many again"
    )
    cli.add_only(parser)
    parser.add_argument("--list", action="store_true", help="list all properties and laws, and exit")
    parser.add_argument(
        "--hours", type=cli.number(float, lambda x: 0 < x < math.inf, "a number of hours > 0"), metavar="H", default=0,
        help="repeat with the next seed until H hours have passed or a run fails",
    )  # fmt: skip
    parser.add_argument(
        "--jobs",
        type=cli.count,
        metavar="N",
        help="world sizes in parallel; does not change the examples (default: number of cores; on nccl 1)",
    )
    cli.add_seed(parser)
    cli.add_backend(parser, BACKENDS)
    least, most = real_size.MIN_TOKENS, real_size.MAX_TOKENS
    parser.add_argument(
        "--real-size",
        metavar="N",
        type=cli.number(int, lambda x: x == 0 or least <= x <= most, f"0 or an integer from {least} to {most}"),
        help=f"tokens of the final problem of real size; 0 skips it (default: {real_size.TOKENS}, with --only 0)",
    )
    cli.add_outputs(parser, "a row per property and world size, the full coverage, each counter-example")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return 0 if all held, 1 for a counter-example. Raises Unavailable if the run cannot start."""
    if options.list:
        for title, about in runner.titles().items():
            cli.say(console, title)
            cli.say(console, f"    {about}")
        return 0
    backend = options.backend
    only = cli.only_of(options, runner.titles())
    jobs = options.jobs or (1 if backend == "nccl" else len(os.sched_getaffinity(0)))
    if backend == "nccl" and jobs > 1:
        raise Unavailable(f"argument --jobs: on nccl one world size at a time, since ranks share the GPUs; got {jobs}")
    if options.real_size is None:
        options.real_size = 0 if only else real_size.TOKENS
    plan = cli.make_run_plan(options, runner.WORLDS, runner.PROFILES, only)
    plan = replace(plan, real_size=options.real_size, jobs=jobs)
    if not any((*runner.plain_on(plan, world), *runner.laws_on(plan, world)) for world in plan.worlds):
        where = f"{backend}, --world {','.join(map(str, plan.worlds))}"
        raise Unavailable(f"argument --only: there is nothing to check of {', '.join(map(repr, only))} on {where}")
    extras: dict[str, Any] = {"seed": plan.seed, "profile": options.profile, "backend": backend}
    extras |= {"only": list(only)} if only else {}
    report = whole_run.run(plan, Report(console, extras, options.verbose), hours=options.hours)
    return cli.finish(options, report)
