"""`python -m verification model`: check a user's model and training step against one process."""

from __future__ import annotations

import argparse
from typing import Any

from verification.cli import arguments as cli
from verification.console import Console
from verification.failures import Refused
from verification.models.model_checks import MODEL_PROPERTIES
from verification.models.model_run import MODEL_WORLDS, PROFILE, STEP_BACKENDS, run_model, tile_of
from verification.models.same_bits import SAME_WEIGHTS
from verification.report.coverage import NOT_LOOKED_AT
from verification.report.provenance import command_run
from verification.report.report import Report
from verification.run.backends import BACKENDS, Unavailable, need_gpus

TITLES = [item.title for item in (*MODEL_PROPERTIES, SAME_WEIGHTS)]
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
    cli.add_examples(parser, "number of examples per world size (default: %(default)s)", PROFILE.examples)
    cli.add_only(parser, f"property ({'; '.join(TITLES)})")
    parser.add_argument(
        "--same-bits", type=cli.count, nargs="?", const=0, metavar="C",
        help="hold each step to the same bits on 1 to N ranks, data x context, with chunks of C tokens (default: 16; "
        "on GPUs 128)",
    )  # fmt: skip
    cli.add_seed(parser)
    cli.add_backend(parser, {name: BACKENDS[name] for name in STEP_BACKENDS})
    cli.add_outputs(parser, "a row per property and world size, the full coverage, each counter-example")


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return 0 if all held, 1 for a counter-example. Raises Unavailable if the model cannot be run."""
    if options.same_bits == 0:  # without a number
        options.same_bits = tile_of(options.backend)
    worlds = MODEL_WORLDS if options.same_bits is None else MODEL_WORLDS[1:]
    plan = cli.make_run_plan(options, worlds, {"": PROFILE}, cli.only_of(options, TITLES))
    if plan.backend == "nccl":
        need_gpus(max(plan.worlds))
    extras: dict[str, Any] = command_run("model", plan.backend, max(plan.worlds))
    extras |= {"not_looked_at": NOT_LOOKED_AT, "backend": plan.backend, "model": options.name, "seed": plan.seed}
    extras |= {"only": list(plan.only)} if plan.only else {}
    extras |= {} if options.same_bits is None else {"same_bits": options.same_bits}
    report = Report(console, extras, options.verbose)
    report.notable.append(f"not looked at: {', '.join(NOT_LOOKED_AT)}")
    report.say(f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    try:
        run_model(options.name, plan, report, options.same_bits)
    except Refused as error:
        raise Unavailable(str(error)) from error
    return cli.finish(options, report)
