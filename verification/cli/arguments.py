"""What the commands share: how they were typed, numbers, seeds, the files that they write, where they print.

Imports nothing else before a function is called, so that `verification.__main__` can name the command whatever else
cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def command(module: str, script: str) -> str:
    """The console script `script` if that is what runs, else `python -m` and the module."""
    return script if Path(sys.argv[0]).name == script else f"python -m {module}"


MODULE = command("verification", "ring-verify")
TYPED = "VERIFICATION_TYPED"  # in the environment: the script that the user typed, if it was one
FAILURES = Path(".verification/failures")
STATUS = """\
exit status: 0 all held; 1 a counter-example was found; 2 the run itself could
not be carried out."""


def typed(otherwise: str = MODULE) -> str:
    """What usage and errors call this program: the script that the user typed, or else the command that Python was
    given.
    """
    return os.environ.get(TYPED) or otherwise


# --- values -----------------------------------------------------------------------------------------------------------


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


count = whole(lambda number: number >= 1, "an integer >= 1")


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


def worlds(text: str) -> tuple[int, ...]:
    """`1,2,3` -> (1, 2, 3), without repeats; ArgumentTypeError for anything else."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > MOST_WORLD:
        raise argparse.ArgumentTypeError(
            f"world sizes must be integers from 1 to {MOST_WORLD}, separated by commas, got {text!r}"
        )
    return sizes


MOST_WORLD = 1024  # a backend may allow fewer


# --- arguments of several commands ------------------------------------------------------------------------------------


def add_world(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--world", type=worlds, metavar="N[,N...]", help=f"world sizes, one after the other (default: {default})"
    )


def add_profile(parser: argparse.ArgumentParser, profiles: Mapping[str, Any]) -> None:
    """profiles: by name, of which `about` says how much each draws."""
    listed = "; ".join(f"{name}: {profile.about}" for name, profile in profiles.items())
    parser.add_argument(
        "--profile", default="quick", metavar="NAME", help=f"how much to draw: {listed} (default: quick)"
    )


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed", type=int, metavar="N",
        help="draw the same as an earlier run with this seed (default: a new one, printed)",
    )  # fmt: skip


def seed_of(options: argparse.Namespace) -> int:
    """The one that was asked for, or a new one."""
    return random.SystemRandom().getrandbits(32) if options.seed is None else int(options.seed)


def add_backend(parser: argparse.ArgumentParser, backends: Mapping[str, str]) -> None:
    """backends: what each is, by name."""
    listed = "; ".join(f"{name}: {about}" for name, about in backends.items())
    parser.add_argument(
        "--backend", choices=tuple(backends), default="gloo", help=f"where the ranks run: {listed} (default: gloo)"
    )


def add_outputs(parser: argparse.ArgumentParser, verbose: str) -> None:
    """--failures, --json and --verbose. verbose: what it prints, in words."""
    parser.add_argument(
        "--failures", type=Path, default=FAILURES, metavar="DIR",
        help="where minimal Cases are saved (default: %(default)s)",
    )  # fmt: skip
    add_json(parser)
    add_verbose(parser, verbose)


def add_json(parser: argparse.ArgumentParser, what: str = "the report") -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write {what} as JSON too, into a folder that exists"
    )


def add_verbose(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--verbose", "-v", action="store_true", help=f"print {what}")


# --- files that a run leaves behind: whether they can be written is checked before it starts, not after hours ---------


def check_outputs(options: argparse.Namespace) -> None:
    """Raises OSError, naming the argument, for a file or folder that cannot be written."""
    if options.json is not None:
        check_file("--json", options.json)
    if getattr(options, "failures", None) is not None and not getattr(options, "list", False):
        check_folder("--failures", options.failures)


def check_folder(argument: str, folder: Path) -> None:
    """Make the folder, and see that files can be made in it. Raises OSError naming the argument."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"argument {argument}: cannot write to {folder}: {error}") from error


def check_file(argument: str, file: Path) -> None:
    """See that the file can be written, and leave it as it is. Its folder is not made: where there is none, the name is
    likely to be mistyped.

    Raises OSError naming the argument.
    """
    try:
        if file.exists():
            file.open("a").close()
        else:
            if not file.parent.exists():
                raise FileNotFoundError(f"there is no folder {file.parent.absolute()}")
            with tempfile.TemporaryFile(dir=file.parent):
                pass
    except OSError as error:
        raise OSError(f"argument {argument}: cannot write {file}: {error}") from error


def write_json(file: Path | None, record: Mapping[str, Any]) -> None:
    """Nothing where no file was asked for."""
    if file is not None:
        file.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")


# --- where commands print ---------------------------------------------------------------------------------------------


def console() -> Console:
    """At most 80 columns, on a terminal and in a log; narrower only where the terminal is."""
    from rich.console import Console

    from verification.report.text import WIDTH

    return Console(width=min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH)


def say(console: Console, line: str) -> None:
    """Print a line, whatever is in it; the lines into which it is broken are indented."""
    from verification.report.text import paragraph

    for part in paragraph(line, hanging="    "):
        console.print(part, markup=False, highlight=False, soft_wrap=True)
