"""The command line: `python -m verification COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from verification.cli import doctor, faults, model, mutants, peers, replay, run, training
from verification.cli.arguments import MODULE, STATUS, check_outputs, console, prog_name
from verification.run.backends import Unavailable
from verification.search.experiment import ToolError

# Each module has HELP, ABOUT, add_arguments(parser) and carry_out(options, console), which returns the exit status. A
# module whose exit statuses differ from the default has its own STATUS.
COMMANDS = {
    "run": run, "training": training, "model": model, "replay": replay, "mutants": mutants, "peers": peers,
    "faults": faults, "doctor": doctor,
}  # fmt: skip
DESCRIPTION = """\
Property-based tests of ring_attention. Hypothesis draws Cases (pattern, layout,
world size, dtype, exchange, ...) and real processes compute them. Results are
compared with the fp64 oracle, within derived rounding bounds. A failing Case is
shrunk to a minimal one, saved, and can be replayed.
On ranks that torchrun starts:
    torchrun --nproc-per-node=2 -m verification.cli.validate --help"""


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog=MODULE, description=DESCRIPTION, epilog=STATUS, formatter_class=raw)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.HELP, description=module.ABOUT, epilog=getattr(module, "STATUS", STATUS),
            prog=prog_name(f"{MODULE} {name}"), formatter_class=raw,
        )  # fmt: skip
        module.add_arguments(command)
        command.set_defaults(parser=command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (see STATUS)."""
    options, unknown = parser().parse_known_args(arguments)
    if unknown:  # `parse_args` would print the usage of the top parser, not of the command
        hint = "; separate world sizes by commas, as --world 2,4" if "".join(unknown).isdigit() else ""
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        check_outputs(options)
        return COMMANDS[options.command].carry_out(options, console())
    except (Unavailable, OSError) as error:
        print(f"{prog_name()}: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{prog_name()}: interrupted", file=sys.stderr)
    except ToolError as error:
        if error.__cause__ is not None:  # an unexpected exception: show its traceback
            raise RuntimeError(f"the test harness failed on an example: {error}") from error
        print(f"{prog_name()}: error: {error}", file=sys.stderr)
    return 2
