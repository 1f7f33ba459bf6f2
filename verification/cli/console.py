"""Where commands print: at most 80 columns, on a terminal and in a log."""

from __future__ import annotations

import sys

from rich.console import Console

from verification.report.text import WIDTH, paragraph


def console() -> Console:
    """Narrower only where the terminal is."""
    return Console(width=min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH)


def say(console: Console, line: str) -> None:
    """Print a line, whatever is in it; the lines into which it is broken are indented."""
    for part in paragraph(line, hanging="    "):
        console.print(part, markup=False, highlight=False, soft_wrap=True)
