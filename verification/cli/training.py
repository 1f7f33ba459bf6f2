"""`python -m verification training`: compare whole training steps with dense ones in fp64."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from verification.cli import arguments as cli
from verification.cli import peers
from verification.console import Console
from verification.models.model_run import STEP_BACKENDS
from verification.peers.training.known_step_peers import KNOWN_STEP_PEERS, load_step_peer, ready_step_peer
from verification.peers.training.step_peer_experiment import step_experiment
from verification.report.coverage import Coverage
from verification.report.provenance import command_run
from verification.report.report import Report
from verification.run.backends import BACKENDS, Unavailable, need_gpus
from verification.runner import RunPlan
from verification.search.experiment import Experiment
from verification.training.training_coverage import TRAINING_GROUPS
from verification.training.training_run import (
    TRAINING_PROFILES,
    TRAINING_WORLDS,
    run_training,
    titles,
)

HELP = "check whole training steps"
ABOUT = """\
Draws small models, meshes (data x context), layouts, wrappers, checkpointing,
accumulation, clipping and labels. Each model trains for a few steps on real
ranks. Loss, gradients, their norm and parameters are compared with one fp64
process that has the whole batch and the oracle's attention. Steps with
SameWeights run again on other ranks, with the same bits. --peer checks the
attention and wrappers of other projects in the same way."""


def step_experiments(name: str, world: int, plan: RunPlan, options: argparse.Namespace) -> list[tuple[Experiment, int]]:
    return [(step_experiment(name), plan.examples_for(world))]


STEPS = peers.Kind(
    "training", KNOWN_STEP_PEERS, load_step_peer, ready_step_peer, step_experiments,
    partial(Coverage, groups=TRAINING_GROUPS),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_world(parser, f"{','.join(map(str, TRAINING_WORLDS))}; for a peer, those that its adapter supports")
    cli.add_profile(parser, TRAINING_PROFILES)
    cli.add_examples(parser, "examples per world size")
    known = ", ".join(dict.fromkeys(name.partition("/")[0] for name in KNOWN_STEP_PEERS))
    parser.add_argument(
        "--peer", nargs="*", action="extend", metavar="NAME",
        help=f"train with the attention or wrapper of another project: {known}, or package.module:adapter as for "
        "`peers`; without a NAME all of these",
    )  # fmt: skip
    cli.add_only(parser, "property")
    cli.add_seed(parser)
    cli.add_backend(parser, {name: BACKENDS[name] for name in STEP_BACKENDS})
    cli.add_outputs(parser, "a row per property and world size, the full coverage, each counter-example")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return 0 if all held, 1 for a counter-example, 2 if a peer could not run. Raises Unavailable if none can."""
    plan = cli.make_run_plan(options, TRAINING_WORLDS, TRAINING_PROFILES, cli.only_of(options, titles()))
    if options.peer is not None and plan.only:
        raise Unavailable("argument --only: a peer is checked by all properties that apply to it, got --peer as well")
    if options.peer is not None:
        if plan.backend == "nccl":
            raise Unavailable("argument --peer: peers run on gloo, got --backend nccl")
        return peers.run_peers(STEPS, options.peer, plan, console, options)
    if plan.backend == "nccl":
        need_gpus(max(plan.worlds))
    run = command_run("training", plan.backend, max(plan.worlds))
    extras: dict[str, Any] = run | {"seed": plan.seed, "profile": options.profile, "backend": plan.backend}
    return cli.finish(options, run_training(plan, Report(console, extras, options.verbose)))
