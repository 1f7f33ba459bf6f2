"""Console: lines, in bold and colours on a terminal, and a line of progress that the next line replaces."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import TextIO

BOLD, RED, GREEN, _END = "\x1b[1m", "\x1b[1;31m", "\x1b[1;32m", "\x1b[0m"
_STYLES = re.compile(r"\x1b\[[\d;]*m")
_ERASE = "\x1b[2K"  # of the whole line in which the cursor is


def styled(text: str, style: str) -> str:
    """Return the text in a style. A console without colours prints the text alone."""
    return f"{style}{text}{_END}"


def unstyled(text: str) -> str:
    """Return the text without styles."""
    return _STYLES.sub("", text)


class Console:
    """A stream of lines.

    Args:
        file: None for sys.stdout, as it is at each line.
        terminal: None for what the file is, which on a dumb terminal, without a cursor, counts as a file.
        colours: None for those of a terminal, unless the environment has NO_COLOR.
    """

    def __init__(self, file: TextIO | None = None, terminal: bool | None = None, colours: bool | None = None) -> None:
        self._file = file
        can_be_replaced = (file or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"
        self.is_terminal = can_be_replaced if terminal is None else terminal
        self._colours = self.is_terminal and not os.environ.get("NO_COLOR") if colours is None else colours
        self._progress = ""

    @property
    def file(self) -> TextIO:
        return sys.stdout if self._file is None else self._file

    def print(self, line: str = "") -> None:
        """Print a line, which takes the place of the line of progress."""
        self._write(f"{line if self._colours else unstyled(line)}\n")
        self._progress = ""

    def progress(self, line: str) -> None:
        """Show a line until the next one or the next `print`: on a terminal only. The cursor stays at its beginning, so
        that what others print there replaces it."""
        if self.is_terminal and line != self._progress:
            self._write(f"{line[: shutil.get_terminal_size().columns - 1]}\r")
            self._progress = line

    def _write(self, text: str) -> None:
        self.file.write(f"{_ERASE if self._progress else ''}{text}")
        self.file.flush()
