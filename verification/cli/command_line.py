"""The command line: `python -m verification COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from verification.cli.arguments import MODULE, STATUS, check_outputs, prog_name
from verification.cli.interrupts import lost_interrupts_repeated
from verification.console import Console
from verification.run.backends import Unavailable
from verification.run.processes.worker import ending_children
from verification.search.experiment import ToolError
from verification.wording import printable

# Modules of this package. Each has HELP, ABOUT, add_arguments(parser) and carry_out(options, console), which returns
# the exit status. A module whose exit statuses differ from the default has its own STATUS.
COMMANDS = ("run", "training", "model", "replay", "mutants", "peers", "conformance", "serving", "faults", "doctor")
DESCRIPTION = """\
Property-based tests of ring_attention. Hypothesis draws Cases (pattern, layout,
world size, dtype, exchange, ...) and real processes compute them. Results are
compared with the fp64 oracle, within derived rounding bounds. A failing Case is
shrunk to a minimal one, saved, and can be replayed.
On ranks that torchrun starts:
    torchrun --nproc-per-node=2 -m verification.cli.validate --help"""


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser with the commands of these names: importing all takes a second."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog=MODULE, description=DESCRIPTION, epilog=STATUS, formatter_class=raw)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        module = command_module(name)
        command = commands.add_parser(
            name, help=module.HELP, description=module.ABOUT, epilog=getattr(module, "STATUS", STATUS),
            prog=prog_name(f"{MODULE} {name}"), formatter_class=raw,
        )  # fmt: skip
        module.add_arguments(command)
        command.set_defaults(parser=command)
    return top


def command_module(name: str) -> Any:
    return import_module(f"{__package__}.{name}")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line, with the modules of its command imported."""
    given = sys.argv[1:] if arguments is None else arguments
    options, unknown = parser(given[:1] if given[:1] and given[0] in COMMANDS else COMMANDS).parse_known_args(given)
    if unknown:  # `parse_args` would print the usage of the top parser, not of the command
        hint = "; separate world sizes by commas, as --world 2,4" if "".join(unknown).isdigit() else ""
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status (see STATUS)."""
    try:
        check_outputs(options)
        with ending_children(), lost_interrupts_repeated():
            return int(command_module(options.command).carry_out(options, Console()))
    except (Unavailable, OSError) as error:
        print(f"{prog_name()}: error: {printable(str(error))}", file=sys.stderr)
    except SystemExit as error:  # of a user's module; no command raises it
        print(f"{prog_name()}: error: a user's module raised SystemExit: {printable(str(error))}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{prog_name()}: interrupted", file=sys.stderr)
    except ToolError as error:
        if error.__cause__ is not None:  # an unexpected exception: show its traceback
            raise RuntimeError(f"the test harness failed on an example: {error}") from error
        print(f"{prog_name()}: error: {printable(str(error))}", file=sys.stderr)
    return 2
