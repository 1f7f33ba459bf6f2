"""What the commands have in common on their command lines: how they were typed, numbers, seeds, where outputs go.

Imports nothing of the project, so that `verification.__main__` can name the command whatever else cannot be imported.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from collections.abc import Callable, Mapping
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
    return whole(lambda number: number >= 1, "an integer >= 1")(text)


def whole(allowed: Callable[[int], bool], what: str) -> Callable[[str], int]:
    """Reads an integer that is allowed. what: such an integer, in words, for the error."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not allowed(number):
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return number

    return read


def span(most: float, what: str) -> Callable[[str], float]:
    """Reads a time that is more than 0 and less than `most`. what: such a time, in words, for the error."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number < most:
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return number

    return read


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed", type=int, metavar="N",
        help="draw the same as an earlier run with this seed (default: a new one, printed)",
    )  # fmt: skip


def seed_of(options: argparse.Namespace) -> int:
    """The one that was asked for, or a new one."""
    return random.SystemRandom().getrandbits(32) if options.seed is None else int(options.seed)


def add_failures(parser: argparse.ArgumentParser) -> None:
    """`outputs.check_folder` checks whether it can be written."""
    parser.add_argument(
        "--failures", type=Path, default=FAILURES, metavar="DIR",
        help="where minimal Cases are saved (default: %(default)s)",
    )  # fmt: skip


def add_json(parser: argparse.ArgumentParser, what: str = "the report") -> None:
    """`outputs.check_file` checks whether it can be written."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write {what} as JSON too, into a folder that exists"
    )


def add_verbose(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--verbose", "-v", action="store_true", help=f"print {what}")


def add_backend(parser: argparse.ArgumentParser, backends: Mapping[str, str]) -> None:
    """backends: what each is, by name."""
    parser.add_argument(
        "--backend", choices=tuple(backends),
        help="where the ranks run: " + "; ".join(f"{name}: {about}" for name, about in backends.items())
        + " (default: gloo)",
    )  # fmt: skip
