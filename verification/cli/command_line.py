"""The command line: `python -m verification run`, `training`, `replay FILE`, `mutants`, `peers` and
`faults`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from verification.cli import faults, mutants, peers, replay, run, training
from verification.cli.arguments import MODULE, typed
from verification.cli.console import console
from verification.cli.outputs import check_file, check_folder
from verification.run.backends import Unavailable
from verification.search.experiment import ToolError

COMMANDS = {"run": run, "training": training, "replay": replay, "mutants": mutants, "peers": peers, "faults": faults}
DESCRIPTION = """\
Checks ring_attention by properties: Hypothesis draws Cases (pattern, layout,
world size, dtype, exchange, ...), real processes compute each of them, and each
result is compared with the fp64 oracle, within bounds derived from the
arithmetic. What fails is shrunk to a minimal Case, saved, and can be replayed."""
EPILOGUE = """\
exit status: 0 all held; 1 a counter-example was found; 2 the run itself could
not be carried out."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=MODULE,
        description=DESCRIPTION,
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS.values():
        module.add_parser(commands, EPILOGUE)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 or 2, as EPILOGUE has it."""
    options, unknown = parser().parse_known_args(arguments)
    if unknown:  # left to `parse_args`, the usage would be that of all commands
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        _check_outputs(options)
        return COMMANDS[options.command].carry_out(options, console())
    except (Unavailable, OSError) as error:
        print(f"{typed()}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{typed()}: interrupted", file=sys.stderr)
        return 2
    except ToolError as error:
        if error.__cause__ is not None:  # an exception that nobody foresaw: its traceback is wanted
            raise RuntimeError(f"the machinery failed on an example: {error}") from error
        print(f"{typed()}: error: {error}", file=sys.stderr)
        return 2


def _check_outputs(options: argparse.Namespace) -> None:
    """Raises OSError, naming the argument, for a file or folder that cannot be written."""
    if options.json is not None:
        check_file("--json", options.json)
    if getattr(options, "state", None) is not None:
        check_folder("--state", options.state.parent)  # a state is written beside the old one, then takes its place
        check_file("--state", options.state)
    if getattr(options, "failures", None) is not None and not getattr(options, "list", False):
        check_folder("--failures", options.failures)
