"""`python -m verification run`: the main job, once or for hours."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from rich.console import Console

from verification import runner, whole_run
from verification.cli import arguments as cli
from verification.problems import real_size
from verification.report.report import Report
from verification.run.backends import BACKENDS, Unavailable

HELP = "draw examples and check them"
ABOUT = """\
Draws examples for each world size, checks every property on every one of them,
then the laws between Cases, then one problem of real size. Prints progress, a
table of the worst error as a fraction of its bound, and of what failed the
smallest counter-example as a minimal Case, with the line that replays it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_world(parser, ",".join(map(str, runner.WORLDS)))
    cli.add_profile(parser, runner.PROFILES)
    parser.add_argument(
        "--examples", type=cli.count, metavar="N",
        help="plain examples for each world size; up to about 1.5 times as many more for laws and larger errors",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", metavar="NAME",
        help="check this property or law alone, on as many examples: its title, or a part that no other title has; "
        "may be given several times",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the titles of all properties and laws, and end")
    parser.add_argument(
        "--hours", type=cli.number(float, lambda x: 0 < x < math.inf, "a number of hours > 0"), metavar="H", default=0,
        help="run again, each time with the next seed, until H hours have passed or something fails",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=cli.count, metavar="N",
        help="world sizes at a time; what is drawn does not depend on it (default: as many as cores; on nccl 1)",
    )  # fmt: skip
    cli.add_seed(parser)
    cli.add_backend(parser, BACKENDS)
    least, most = real_size.LEAST, real_size.MOST
    parser.add_argument(
        "--real-size", metavar="N",
        type=cli.number(int, lambda x: x == 0 or least <= x <= most, f"0 or an integer from {least} to {most}"),
        help="tokens of the problem of real size that ends the run; 0 leaves it out "
        f"(default: {real_size.TOKENS}, with --only 0)",
    )  # fmt: skip
    cli.add_outputs(parser, "a row for each property and world size, all of the coverage, each counter-example")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """0 all held, 1 a counter-example was found. Raises Unavailable where it cannot be carried out."""
    if options.list:
        for title, about in runner.titles().items():
            cli.say(console, title)
            cli.say(console, f"    {about}")
        return 0
    backend, only = options.backend, tuple(dict.fromkeys(map(title_of, options.only or ())))
    jobs = options.jobs or (1 if backend == "nccl" else len(os.sched_getaffinity(0)))
    if backend == "nccl" and jobs > 1:
        raise Unavailable(f"argument --jobs: on nccl one world size at a time, since ranks share the GPUs; got {jobs}")
    if options.real_size is None:
        options.real_size = 0 if only else real_size.TOKENS
    plan = replace(plan_of(options, runner.WORLDS, runner.PROFILES), real_size=options.real_size, jobs=jobs, only=only)
    if not any((*runner.plain_on(plan, world), *runner.laws_on(plan, world)) for world in plan.worlds):
        where = f"{backend}, --world {','.join(map(str, plan.worlds))}"
        raise Unavailable(f"argument --only: there is nothing to check of {', '.join(map(repr, only))} on {where}")
    extras: dict[str, Any] = {"seed": plan.seed, "profile": options.profile, "backend": backend}
    extras |= {"only": list(only)} if only else {}
    report = whole_run.run(plan, Report(console, extras, options.verbose), hours=options.hours)
    cli.write_json(options.json, report.to_dict())
    return 1 if report.failures else 0


def title_of(name: str) -> str:
    """The property or law that is meant by a title or a part of it. Raises Unavailable for none, or several."""
    titles = list(runner.titles())
    fitting = [title for title in titles if name.lower() in title.lower()]
    if name in titles or len(fitting) == 1:
        return name if name in titles else fitting[0]
    if fitting:
        raise Unavailable(f"argument --only: {name!r} may be {' or '.join(map(repr, fitting))}")
    close = get_close_matches(name.lower(), [title.lower() for title in titles], n=3, cutoff=0.5)
    near = [title for title in titles if title.lower() in close]
    hint = f", close to it: {' or '.join(map(repr, near))}" if near else ""
    raise Unavailable(f"argument --only: {name!r} is no property or law; it must be one of --list{hint}")


def plan_of(
    options: argparse.Namespace, worlds: tuple[int, ...], profiles: dict[str, runner.Profile]
) -> runner.RunPlan:
    """What was asked for. worlds: the usual ones. Raises Unavailable for more ranks than the backend takes, and for a
    name that is none of the profiles."""
    worlds, most = options.world or worlds, runner.MOST_RANKS[options.backend]
    if max(worlds) > most:
        raise Unavailable(f"argument --world: on {options.backend} at most {most} ranks, got {max(worlds)}")
    if options.profile not in profiles:
        hint = "; for a night write --hours 8" if options.profile == "nightly" else ""
        listed = ", ".join(profiles)
        raise Unavailable(f"argument --profile: must be one of {listed}, got {options.profile!r}{hint}")
    profile, seed = profiles[options.profile], cli.seed_of(options)
    return runner.RunPlan(worlds, profile, options.examples, seed, options.backend, options.failures)
