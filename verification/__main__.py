"""`python -m verification`: see `verification.cli.command_line`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from verification.hidden_packages import hidden


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 all held, 1 a counter-example was found, 2 the run could not be carried out."""
    try:
        with ended_by_interrupt():
            if (line := hidden()) is not None:
                print(f"python -m verification: error: {line}", file=sys.stderr)
                return 2
            # Imported here, so that an ImportError exits with 2, not with Python's 1.
            from verification.cli import command_line

            options = command_line.parsed(arguments)
        return command_line.run(options)
    except OSError as error:  # of an import: torch needs a folder for temporary files
        print(f"python -m verification: error: cannot start: {error}", file=sys.stderr)
        return 2
    except Exception:
        import traceback

        from verification.cli.arguments import prog_name
        from verification.wording import printable

        print(printable(traceback.format_exc()), end="", file=sys.stderr)
        print(f"{prog_name()}: error: the test harness itself failed, see above", file=sys.stderr)
        return 2


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Have Ctrl-C end the process with a line and status 2 during imports: the modules of others may swallow a
    KeyboardInterrupt, or turn it into another exception."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, as in the background of a shell
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_: object) -> None:
    os.write(sys.stderr.fileno(), b"python -m verification: interrupted\n")
    os._exit(2)


if __name__ == "__main__":
    sys.exit(main())
