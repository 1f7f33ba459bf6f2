"""`python -m verification serving`: check attention with a cache of keys that is sharded over ranks."""

from __future__ import annotations

import argparse
from functools import partial

from verification.cli import arguments as cli
from verification.cli import peers
from verification.console import Console
from verification.report.coverage import Coverage
from verification.runner import Profile, RunPlan
from verification.search.experiment import Experiment
from verification.serving.server import load_server, ready_server
from verification.serving.serving_checks import SERVING_PROPERTIES
from verification.serving.serving_experiment import serving_experiment

PROFILE = Profile("for each world size", 100, budget=20.0)
HELP = "check attention with a cache that is sharded over ranks"
ABOUT = """\
Draws requests that are served call after call, with keys interleaved over ranks
by blocks, and compares each rank's and the merged results with the fp64 oracle,
within derived rounding bounds: verification/serving/README.md has an example."""
STATUS = peers.STATUS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="package.module:server")
    cli.add_examples(parser, "number of examples per world size (default: %(default)s)", PROFILE.examples)
    cli.add_only(parser, "property")
    cli.add_world(parser, "those that the server names")
    peers.add_placement(parser)
    cli.add_seed(parser)
    cli.add_outputs(parser, "every counter-example in full, and progress")


def experiments(name: str, world: int, plan: RunPlan, options: argparse.Namespace) -> list[tuple[Experiment, int]]:
    device = options.device or ("cuda" if plan.backend == "nccl" else "cpu")
    return [(serving_experiment(name, device, plan.only), plan.examples_for(world))]


SERVERS = peers.Kind(
    "serving", {}, load_server, ready_server, experiments, partial(Coverage, groups={}), ("Server", "server")
)


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return the exit status (see STATUS). Raises Unavailable for an unknown name, before any output."""
    peers.check_placement(options)
    only = cli.only_of(options, [item.title for item in SERVING_PROPERTIES])
    plan = cli.make_run_plan(options, (), {"": PROFILE}, only)
    return peers.run_peers(SERVERS, options.names, plan, console, options)
