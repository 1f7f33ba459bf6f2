"""`python -m verification serving`: check attention with a cache of keys that is sharded over ranks."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st
from rich.console import Console

from verification.cli import arguments as cli
from verification.cli import peers
from verification.failures import Refused
from verification.report.coverage import Coverage
from verification.run.backends import Unavailable
from verification.runner import Profile, RunPlan
from verification.search.experiment import Experiment
from verification.serving.known_servers import KNOWN_SERVERS, load_server
from verification.serving.serving_case import ServingCase
from verification.serving.serving_checks import SERVING_PROPERTIES
from verification.serving.serving_coverage import SERVING_GROUPS
from verification.serving.serving_experiment import claimed_serving, rehearse_server, serving_experiment

PROFILE = Profile("for each world size", 100, budget=20.0)
TITLES = tuple(item.title for item in SERVING_PROPERTIES)
HELP = "check attention with a cache that is sharded over ranks"
ABOUT = """\
Draws requests that are served call after call (chunked prefill, decode, slots
that new requests take over) with keys interleaved over ranks by blocks. Each
rank's result for its own keys, and the merged one, are compared with the fp64
oracle, within derived rounding bounds. NAME is `package.module:server`, in the
working directory or installed: verification/serving/README.md has an example.
Without a NAME, the servers of this project are run."""
STATUS = peers.STATUS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"package.module:server, or {', '.join(KNOWN_SERVERS)}"
    )
    cli.add_examples(parser, "number of examples per world size (default: %(default)s)", PROFILE.examples)
    cli.add_only(parser, "property")
    parser.add_argument(
        "--case", type=case_line, metavar="LINE", help='check this case alone, such as "world=2 block=4 calls=9,0/1,-5"'
    )
    cli.add_world(parser, "those that the server names")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), default="gloo", help="what joins the ranks (default: gloo)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of the tensors (default: cpu; on nccl cuda)")
    cli.add_seed(parser)
    cli.add_outputs(parser, "every counter-example in full, progress and coverage")


def case_line(text: str) -> ServingCase:
    """Parse a ServingCase written in a line. Raises ArgumentTypeError."""
    try:
        return ServingCase.read_line(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def experiments(name: str, world: int, plan: RunPlan, options: argparse.Namespace) -> list[tuple[Experiment, int]]:
    """Return the Experiment of a server; with --case, that case alone. Raises Refused if it is not claimed."""
    device = options.device or ("cuda" if plan.backend == "nccl" else "cpu")
    experiment = serving_experiment(name, device, plan.only)
    if options.case is None:
        return [(experiment, plan.examples_for(world))]
    case = replace(options.case, device=device)
    if claimed_serving(load_server(name), case, device) != case:
        raise Refused(f"argument --case: {case.line()} is not claimed; {name} supports {load_server(name).supported}")
    return [(replace(experiment, draw=lambda world: st.just(case)), 1)]


SERVERS = peers.Kind(
    "serving",
    KNOWN_SERVERS,
    load_server,
    rehearse_server,
    experiments,
    partial(Coverage, groups=SERVING_GROUPS),
    "Server",
    "server",
)


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return the exit status (see STATUS). Raises Unavailable for an unknown name, before any output."""
    if options.backend == "nccl" and options.device == "cpu":
        raise Unavailable("argument --device: nccl joins GPUs; got cpu")
    cli.must_exist(options.device)
    only = cli.only_of(options, TITLES)
    if options.case is not None:
        if only or options.world or options.examples != PROFILE.examples:
            raise Unavailable("argument --case: it is one example; leave out --only, --world and --examples")
        options.world = (options.case.world,)
    plan = cli.make_run_plan(options, (), {"": PROFILE}, only)
    return peers.run_peers(SERVERS, options.names, plan, console, options)
