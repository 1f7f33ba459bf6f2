"""`python -m verification training`: whole training steps against a dense one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from verification import runner
from verification.cli import training_peers
from verification.cli.arguments import (
    MODULE,
    add_backend,
    add_failures,
    add_json,
    add_seed,
    add_verbose,
    count,
    seed_of,
    typed,
)
from verification.cli.outputs import write_json
from verification.cli.run import worlds
from verification.peers.training.known_step_peers import KNOWN_STEP_PEERS
from verification.report.provenance import processor_run, surroundings, typed_words
from verification.report.report import Report
from verification.run.backends import BACKENDS, Unavailable
from verification.training.training_run import TRAINING_BACKENDS, TRAINING_PROFILES, TRAINING_WORLDS, run_training

ABOUT = """\
Draws small models, meshes (data x context), layouts, wrappers, checkpointing,
accumulation, clipping and labels, trains each for a few steps on real ranks,
and compares loss, gradients, their norm and the parameters with those of one
process in fp64 with the whole batch, whose attention is the oracle. With --peer
the same for other people's attention and wrappers."""


def add_parser(commands: Any, epilog: str) -> None:
    """`commands`: what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "training", help="check whole training steps", description=ABOUT, epilog=epilog,
        prog=typed(f"{MODULE} training"), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    listed = ",".join(map(str, TRAINING_WORLDS))
    parser.add_argument(
        "--world", type=worlds, metavar="N[,N...]",
        help=f"world sizes, one after the other (default: {listed}; of a peer, those of its adapter among these)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", choices=tuple(TRAINING_PROFILES), default="quick",
        help="how much to draw: " + "; ".join(f"{name}: {p.about}" for name, p in TRAINING_PROFILES.items())
        + " (default: quick)",
    )  # fmt: skip
    parser.add_argument("--examples", type=count, metavar="N", help="examples for each world size")
    parser.add_argument(
        "--peer", nargs="*", action="extend", metavar="NAME",
        help="train with another attention or wrapper in the place of this project's: one of " + ", ".join(
            dict.fromkeys(name.partition("/")[0] for name in KNOWN_STEP_PEERS)
        ) + ", or package.module:adapter, as for `peers`; without a NAME all that are known",
    )  # fmt: skip
    add_seed(parser)
    add_backend(parser, {name: BACKENDS[name] for name in TRAINING_BACKENDS})
    add_failures(parser)
    add_json(parser)
    add_verbose(parser, "a row for each property and world size, all of the coverage, each counter-example")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """0 all held, 1 a counter-example, 2 a peer could not be run. Raises Unavailable where nothing can be run."""
    backend, asked = options.backend or "gloo", options.world or TRAINING_WORLDS
    most = runner.MOST_RANKS[backend]
    if max(asked) > most:
        raise Unavailable(f"argument --world: on {backend} at most {most} ranks, got {max(asked)}")
    plan = runner.RunPlan(
        worlds=asked,
        profile=TRAINING_PROFILES[options.profile],
        examples=options.examples,
        seed=seed_of(options),
        backend=backend,
        failures=options.failures,
    )
    if options.peer is not None:
        return training_peers.run_peers(options, plan, console)
    command = f"python -m verification training {typed_words(sys.argv[2:])}"
    made = surroundings("cuda", max(asked), command) if backend == "nccl" else processor_run(command)
    extras: dict[str, Any] = made | {"seed": plan.seed, "profile": options.profile, "backend": backend}
    report = run_training(plan, Report(console, extras, options.verbose))
    write_json(options.json, report.to_dict())
    return 1 if report.failures else 0
