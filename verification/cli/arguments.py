"""Shared argparse helpers. Other modules are imported inside functions only: `verification.__main__` can then name the
command in an error even if a package is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from verification.console import Console
    from verification.report.report import Report
    from verification.runner import Profile, RunPlan


def command(module: str, script: str) -> str:
    """Return the console script if it is what the user started, else `python -m` and the module."""
    return script if Path(sys.argv[0]).name == script else f"python -m {module}"


MODULE = command("verification", "ring-verify")
TYPED = "VERIFICATION_TYPED"  # environment variable: the script that the user typed, if any
MAX_WORLD = 1024  # a backend may allow fewer
FEW = 3  # titles in one line of an error
Number = TypeVar("Number", int, float)
STATUS = """\
exit status: 0 all held; 1 a counter-example was found; 2 the run could not
start or finish."""


def prog_name(otherwise: str = MODULE) -> str:
    """Name of this program in usage and errors: the script that the user typed, else `otherwise`."""
    return os.environ.get(TYPED) or otherwise


def number(kind: Callable[[str], Number], allowed: Callable[[Number], bool], what: str) -> Callable[[str], Number]:
    """Return a parser of numbers for argparse. what: the allowed numbers in words, for the error."""

    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not allowed(value):
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return value

    return read


count = number(int, lambda x: x >= 1, "an integer >= 1")


def worlds(text: str) -> tuple[int, ...]:
    """Parse `1,2,3` as (1, 2, 3), without repeats. Raises ArgumentTypeError."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > MAX_WORLD:
        raise argparse.ArgumentTypeError(
            f"world sizes must be integers from 1 to {MAX_WORLD}, separated by commas, got {text!r}"
        )
    return sizes


def add_world(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--world", type=worlds, metavar="N[,N...]", help=f"world sizes, one after the other (default: {default})"
    )


def add_examples(parser: argparse.ArgumentParser, about: str, default: int | None = None) -> None:
    """Add --examples. about: its help."""
    parser.add_argument("--examples", type=count, default=default, metavar="N", help=about)


def add_only(parser: argparse.ArgumentParser, about: str = "property or law") -> None:
    """Add --only. about: what its titles are of."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="TITLE",
        help=f"check only this {about}, on as many examples: its title or a unique part of it; may be repeated",
    )


def add_profile(parser: argparse.ArgumentParser, profiles: Mapping[str, Any]) -> None:
    """Add --profile. profiles: by name; the help shows the `about` of each."""
    listed = "; ".join(f"{name}: {profile.about}" for name, profile in profiles.items())
    parser.add_argument(
        "--profile", default="quick", metavar="NAME", help=f"number of examples: {listed} (default: quick)"
    )


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="repeat the examples of the run that printed this seed (default: a new seed)",
    )


def seed_of(options: argparse.Namespace) -> int:
    """Return the seed of the command line, else a random one."""
    return random.SystemRandom().getrandbits(32) if options.seed is None else int(options.seed)


def make_run_plan(
    options: argparse.Namespace, worlds: tuple[int, ...], profiles: Mapping[str, Profile], only: tuple[str, ...] = ()
) -> RunPlan:
    """Return the plan of the command line. worlds: the default. profiles: by name; the only one without --profile.
    Raises Unavailable for too many ranks or an unknown profile."""
    from verification.run.backends import MAX_RANKS, Unavailable
    from verification.runner import RunPlan

    worlds, most = options.world or worlds, MAX_RANKS[options.backend]
    if max(worlds, default=0) > most:
        raise Unavailable(f"argument --world: on {options.backend} at most {most} ranks, got {max(worlds)}")
    name = getattr(options, "profile", next(iter(profiles)))
    if name not in profiles:
        hint = "; for a night use --hours 8" if name == "nightly" else ""
        raise Unavailable(f"argument --profile: must be one of {', '.join(profiles)}, got {name!r}{hint}")
    return RunPlan(
        worlds, profiles[name], options.examples, seed_of(options), options.backend, options.failures, only=only
    )


def add_backend(parser: argparse.ArgumentParser, backends: Mapping[str, str]) -> None:
    """Add --backend. backends: the description of each, by name."""
    listed = "; ".join(f"{name}: {about}" for name, about in backends.items())
    parser.add_argument(
        "--backend", choices=tuple(backends), default="gloo", help=f"where the ranks run: {listed} (default: gloo)"
    )


def only_of(options: argparse.Namespace, among: Collection[str]) -> tuple[str, ...]:
    """Return the titles of --only, each once. Raises Unavailable."""
    return tuple(dict.fromkeys(find_title(name, among) for name in options.only or ()))


def find_title(name: str, among: Collection[str]) -> str:
    """Return the only one of the titles with this text in it. Raises Unavailable for none or several."""
    from verification.run.backends import Unavailable

    titles = list(among)
    matches = [title for title in titles if name.lower() in title.lower()]
    if name in titles or len(matches) == 1:
        return name if name in titles else matches[0]
    if 0 < len(matches) <= FEW:
        raise Unavailable(f"argument --only: {name!r} may be {' or '.join(map(repr, matches))}")
    close = get_close_matches(name.lower(), [title.lower() for title in titles], n=FEW, cutoff=0.5)
    near = " or ".join(repr(title) for title in titles if title.lower() in close)
    reason = f"is a part of {len(matches)} titles" if matches else "is no property or law"
    listed = "".join(f"\n    {title}" for title in titles)
    hint = f", close to it: {near}" if near else ""
    raise Unavailable(
        f"argument --only: {name!r} {reason}{hint}; it must be one of these, or a unique part of one:{listed}"
    )


def must_exist(device: str | None) -> None:
    """Raise Unavailable for --device cuda where torch sees no GPU."""
    import torch

    from verification.run.backends import Unavailable

    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("argument --device: cuda needs a GPU, and torch sees none; leave it out for CPUs")


def add_outputs(parser: argparse.ArgumentParser, verbose: str) -> None:
    """Add --failures, --json and --verbose. verbose: the extra output, in words."""
    parser.add_argument(
        "--failures", type=Path, default=Path(".verification/failures"), metavar="DIR",
        help="folder for the JSON files of counter-examples (default: %(default)s)",
    )  # fmt: skip
    add_json(parser)
    parser.add_argument("--verbose", "-v", action="store_true", help=f"print {verbose}")


def add_json(parser: argparse.ArgumentParser, what: str = "the report") -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"also write {what} as JSON; the folder must exist")


def check_outputs(options: argparse.Namespace) -> None:
    """Check that the output files can be written, each of its own, before a run of hours. Raises OSError naming the
    argument."""
    taken: dict[Path, str] = {}
    for name in ("json", "jsonl", "page"):
        file = getattr(options, name, None)
        if file is None:
            continue
        check_file(f"--{name}", file)
        other = taken.setdefault(file.resolve(), f"--{name}")
        if other != f"--{name}" and file != Path(os.devnull):
            raise OSError(f"argument --{name}: must be another file than {other}, got {file}")
    runs = not any(getattr(options, name, False) for name in ("list", "example"))
    if getattr(options, "failures", None) is not None and runs:
        check_folder("--failures", options.failures)


def check_folder(argument: str, folder: Path) -> None:
    """Make the folder and check that it is writable. Raises OSError naming the argument."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"argument {argument}: cannot write to {folder}: {error}") from error


def check_file(argument: str, file: Path) -> None:
    """Check that the file can be replaced, without changing it. Raises OSError naming the argument.

    A missing folder is an error too: it is probably a typo.
    """
    folder = file.resolve().parent  # of a link's target
    try:
        if file.exists():
            file.open("a").close()
        elif not folder.exists():
            raise FileNotFoundError(f"there is no folder {folder}")
        if file.is_file() or not file.exists():  # a device is written to as it is
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise OSError(f"argument {argument}: cannot write {file}: {error}") from error


def write_json(file: Path | None, record: Mapping[str, Any]) -> None:
    """Write the record whole or not at all, if there is a file to write it to."""
    from verification.whole_file import write

    if file is not None:
        write(file, json.dumps(record, indent=2, allow_nan=False) + "\n")


def finish(options: argparse.Namespace, report: Report) -> int:
    """Write the JSON of a report, and return the exit status."""
    write_json(options.json, report.to_dict())
    return 1 if report.failures else 0


def say(console: Console, line: str) -> None:
    """Print a line, wrapped at 80 columns with an indent."""
    from verification.report.text import paragraph

    for part in paragraph(line, hanging="    "):
        console.print(part)
