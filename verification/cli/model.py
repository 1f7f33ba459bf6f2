"""`python -m verification model`: check a user's model and training step against one process."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from verification.cli import arguments as cli
from verification.failures import Refused
from verification.models.model_checks import MODEL_PROPERTIES
from verification.models.model_run import MODEL_WORLDS, PROFILE, STEP_BACKENDS, run_model
from verification.report.coverage import NOT_LOOKED_AT
from verification.report.provenance import processor_run, surroundings, typed_words
from verification.report.report import Report
from verification.run.backends import BACKENDS, MAX_RANKS, Unavailable
from verification.runner import RunPlan

HELP = "check your own model and training step"
ABOUT = """\
Trains your model for a few steps on real ranks, on drawn lengths, documents,
padding, labels, meshes (data x context), layouts and wrappers, and compares
logits, loss, gradients, their norm, parameters and buffers with one process.
A failure names the first module that differs. NAME is `module:attribute` in
the working directory or installed: a function build(context), or a
verification.models.Setup. verification/README.md has an example."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="module:attribute, such as my_module:build")
    cli.add_world(parser, ",".join(map(str, MODEL_WORLDS)))
    parser.add_argument(
        "--examples", type=cli.count, default=PROFILE.examples, metavar="N",
        help="number of examples per world size (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--only",
        action="append",
        metavar="PROPERTY",
        help=f"check one property, by a unique part of its title: {'; '.join(x.title for x in MODEL_PROPERTIES)}",
    )
    cli.add_seed(parser)
    cli.add_backend(parser, {name: BACKENDS[name] for name in STEP_BACKENDS})
    cli.add_outputs(parser, "a row per property and world size, the full coverage, each counter-example")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return 0 if all held, 1 for a counter-example. Raises Unavailable if the model cannot be run."""
    worlds = options.world or MODEL_WORLDS
    most = MAX_RANKS[options.backend]
    if max(worlds) > most:
        raise Unavailable(f"argument --world: on {options.backend} at most {most} ranks, got {max(worlds)}")
    titles = [item.title for item in MODEL_PROPERTIES]
    only = tuple(dict.fromkeys(cli.title_of(text, titles) for text in options.only or ()))
    plan = RunPlan(
        worlds, PROFILE, options.examples, cli.seed_of(options), options.backend, options.failures, only=only
    )
    command = f"python -m verification model {typed_words(sys.argv[2:])}"
    gpus = options.backend == "nccl"
    extras: dict[str, Any] = surroundings("cuda", max(worlds), command) if gpus else processor_run(command)
    extras |= {"not_looked_at": NOT_LOOKED_AT, "backend": options.backend, "model": options.name, "seed": plan.seed} | (
        {"only": list(only)} if only else {}
    )
    report = Report(console, extras, options.verbose)
    report.notable.append(f"not looked at: {', '.join(NOT_LOOKED_AT)}")
    report.say(f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    try:
        run_model(options.name, plan, report)
    except Refused as error:
        raise Unavailable(str(error)) from error
    cli.write_json(options.json, report.to_dict())
    return 1 if report.failures else 0
