"""`python -m verification`: see `verification.cli.command_line`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from verification.cli.arguments import prog_name


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 all held, 1 a counter-example was found, 2 the run could not be carried out."""
    try:
        # Imported here, so that an ImportError exits with 2, not with Python's 1.
        from verification.cli import command_line

        return command_line.main(arguments)
    except Exception:
        traceback.print_exc()
        print(f"{prog_name()}: error: the test harness itself failed, see above", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
