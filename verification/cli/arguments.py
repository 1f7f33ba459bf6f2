"""What the commands have in common on their command lines: how they were typed, counts, seeds, where outputs go."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def command(module: str, script: str) -> str:
    """The console script `script` if that is what runs, else `python -m` and the module."""
    return script if Path(sys.argv[0]).name == script else f"python -m {module}"


MODULE = command("verification", "ring-verify")
TYPED = "VERIFICATION_TYPED"  # in the environment: the script that the user typed, if it was one
FAILURES = Path(".verification/failures")


def typed(otherwise: str = MODULE) -> str:
    """What usage and errors call this program: the script that the user typed, or else the command that Python was
    given.
    """
    return os.environ.get(TYPED) or otherwise


def count(text: str) -> int:
    """An integer of at least 1; ArgumentTypeError for anything else."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return number


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed", type=int, metavar="N",
        help="draw the same as an earlier run with this seed (default: a new one, printed)",
    )  # fmt: skip


def add_failures(parser: argparse.ArgumentParser) -> None:
    """Whether it can be written is for `outputs.check_folder` to see."""
    parser.add_argument(
        "--failures", type=Path, default=FAILURES, metavar="DIR",
        help="where minimal Cases are saved (default: %(default)s)",
    )  # fmt: skip


def add_json(parser: argparse.ArgumentParser, what: str = "the report") -> None:
    """Whether it can be written is for `outputs.check_file` to see."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write {what} as JSON too; its folder must be there")
