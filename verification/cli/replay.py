"""`python -m verification replay FILE`: run one saved counter-example again."""

from __future__ import annotations

import argparse
from pathlib import Path

from verification.cli.arguments import add_backend, add_json, finish, must_exist
from verification.console import Console
from verification.failures import Refused
from verification.models import loading as models
from verification.peers.probe import probe
from verification.peers.training.known_step_peers import ready_step_peer
from verification.replay import replay
from verification.report.report import Report
from verification.run.backends import BACKENDS, Unavailable, open_backend
from verification.serving.server import ready_server

HELP = "run one saved counter-example again"
ABOUT = """\
Runs a saved counter-example again, on as many ranks as it names, and checks it.
The file may hold a Case, a law with its Case, the problem of real size, a peer
with its Case, calls of a server, a training run (also of a peer or of your own
model), a fault with its Case, or a fault of a training or of a file. Examples
in `before` run first. Where it is null, and the example holds, the status is 2:
it failed after calls that are not known."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", type=Path, metavar="FILE", help="the JSON file that a run saved")
    own = parser.add_mutually_exclusive_group()
    own.add_argument(
        "--attention",
        metavar="ID",
        help="run it with this peer, or package.module:adapter: needed for a counter-example of your own module",
    )
    own.add_argument("--model", metavar="ID", help="likewise for a model: module:attribute")
    own.add_argument("--server", metavar="ID", help="likewise for a server: module:attribute")
    add_backend(parser, BACKENDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of the tensors (default: cpu; on nccl cuda)")
    add_json(parser)


def carry_out(options: argparse.Namespace, console: Console) -> int:
    """Return 0 if the example holds, 1 if it fails again. Raises Unavailable if it cannot run."""
    must_exist(options.device)
    named = (options.attention, ready_step_peer), (options.model, models.load), (options.server, ready_server)
    for name, ready in named:
        if name is not None:  # imported in a process of its own first: an import may hang, exit or abort
            try:
                probe(name, ready=ready)
            except Refused as error:
                raise Unavailable(str(error)) from error
    backend = open_backend(options.backend)
    backend.device = options.device or backend.device
    attention = options.attention or options.model or options.server
    return finish(options, replay.replay(options.case, Report(console), backend, attention=attention))
