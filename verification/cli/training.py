"""`python -m verification training`: whole training steps against a dense one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from verification.cli import arguments as cli
from verification.cli import peers
from verification.cli.run import plan_of
from verification.peers.training.known_step_peers import KNOWN_STEP_PEERS
from verification.report.provenance import processor_run, surroundings, typed_words
from verification.report.report import Report
from verification.run.backends import BACKENDS, Unavailable
from verification.training.training_run import TRAINING_BACKENDS, TRAINING_PROFILES, TRAINING_WORLDS, run_training

HELP = "check whole training steps"
ABOUT = """\
Draws small models, meshes (data x context), layouts, wrappers, checkpointing,
accumulation, clipping and labels, trains each for a few steps on real ranks,
and compares loss, gradients, their norm and the parameters with those of one
process in fp64 with the whole batch, whose attention is the oracle. With --peer
the same for other people's attention and wrappers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_world(parser, f"{','.join(map(str, TRAINING_WORLDS))}; of a peer, those of its adapter among these")
    cli.add_profile(parser, TRAINING_PROFILES)
    parser.add_argument("--examples", type=cli.count, metavar="N", help="examples for each world size")
    known = ", ".join(dict.fromkeys(name.partition("/")[0] for name in KNOWN_STEP_PEERS))
    parser.add_argument(
        "--peer", nargs="*", action="extend", metavar="NAME",
        help=f"train with another attention or wrapper in the place of this project's: one of {known}, or "
        "package.module:adapter, as for `peers`; without a NAME all that are known",
    )  # fmt: skip
    cli.add_seed(parser)
    cli.add_backend(parser, {name: BACKENDS[name] for name in TRAINING_BACKENDS})
    cli.add_outputs(parser, "a row for each property and world size, all of the coverage, each counter-example")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """0 all held, 1 a counter-example, 2 a peer could not be run. Raises Unavailable where nothing can be run."""
    plan = plan_of(options, TRAINING_WORLDS, TRAINING_PROFILES)
    gpus = plan.backend == "nccl"
    if options.peer is not None:
        if gpus:
            raise Unavailable("argument --peer: peers run on gloo, got --backend nccl")
        return peers.run_peers(peers.STEPS, options.peer, plan, console, options)
    command = f"python -m verification training {typed_words(sys.argv[2:])}"
    made = surroundings("cuda", max(plan.worlds), command) if gpus else processor_run(command)
    extras: dict[str, Any] = made | {"seed": plan.seed, "profile": options.profile, "backend": plan.backend}
    report = run_training(plan, Report(console, extras, options.verbose))
    cli.write_json(options.json, report.to_dict())
    return 1 if report.failures else 0
