"""What the commands share. Imports nothing else before a function is called, so that `verification.__main__` can name
the command whatever else cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console


def command(module: str, script: str) -> str:
    """The console script `script` if that is what runs, else `python -m` and the module."""
    return script if Path(sys.argv[0]).name == script else f"python -m {module}"


MODULE = command("verification", "ring-verify")
TYPED = "VERIFICATION_TYPED"  # in the environment: the script that the user typed, if it was one
MOST_WORLD = 1024  # a backend may allow fewer
Number = TypeVar("Number", int, float)
STATUS = """\
exit status: 0 all held; 1 a counter-example was found; 2 the run itself could
not be carried out."""


def typed(otherwise: str = MODULE) -> str:
    """What usage and errors call this program: the script that was typed, or else the command given to Python."""
    return os.environ.get(TYPED) or otherwise


def number(kind: Callable[[str], Number], allowed: Callable[[Number], bool], what: str) -> Callable[[str], Number]:
    """Reads a number of that kind that is allowed. what: such a number, in words, for the error."""

    def read(text: str) -> Number:
        try:
            found = kind(text)
        except ValueError:
            found = None
        if found is None or not allowed(found):
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return found

    return read


count = number(int, lambda x: x >= 1, "an integer >= 1")


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


def add_world(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--world", type=worlds, metavar="N[,N...]", help=f"world sizes, one after the other (default: {default})"
    )


def add_profile(parser: argparse.ArgumentParser, profiles: Mapping[str, Any]) -> None:
    """profiles: by name; `about` of each says how much it draws."""
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
        "--failures", type=Path, default=Path(".verification/failures"), metavar="DIR",
        help="where minimal Cases are saved (default: %(default)s)",
    )  # fmt: skip
    add_json(parser)
    parser.add_argument("--verbose", "-v", action="store_true", help=f"print {verbose}")


def add_json(parser: argparse.ArgumentParser, what: str = "the report") -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write {what} as JSON too, into a folder that exists"
    )


def check_outputs(options: argparse.Namespace) -> None:
    """See before a run starts, not after hours, that its files can be written. Raises OSError naming the argument."""
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
    """See that the file can be written, and leave it as it is. Raises OSError naming the argument, also where there is
    no such folder: the name is likely to be mistyped.
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
