"""Text wrapped at 80 columns. Wrapped JSON and command lines still work when copied.

A word longer than a line, such as a path, is not broken.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verification.wording import printable

WIDTH = 80
_TOGETHER = re.compile(r'"(?:[^"\\]|\\.)*"(?:: )?')  # a JSON string, with the colon if it is a key


def paragraph(text: str, indent: str = "", hanging: str | None = None) -> list[str]:
    """Wrap each line of the text at WIDTH, as `printable` has it. All but the first begin with `hanging`, by default
    `indent`."""
    return _wrapped(printable(text), indent, indent if hanging is None else hanging)


def _wrapped(text: str, indent: str, hanging: str) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(
            line, WIDTH, initial_indent=hanging if lines else indent, subsequent_indent=hanging,
            break_long_words=False, break_on_hyphens=False,
        ) or [""]  # fmt: skip
    return lines


def json_lines(head: str, record: Mapping[str, Any]) -> list[str]:
    """Format the record as JSON after `head`, wrapped between values only: the joined lines are JSON again."""
    whole = _TOGETHER.sub(lambda string: string[0].replace(" ", "\0"), json.dumps(dict(record)))
    return [line.replace("\0", " ") for line in _wrapped(head + whole, "", "  ")]


def command_lines(head: str, words: Sequence[str]) -> list[str]:
    """Format a command line after `head`, continued by backslashes. Files beneath the working directory get relative
    paths."""
    lines, folder = [head], Path.cwd()
    shortened = (
        os.path.relpath(x, folder) if Path(x).is_absolute() and Path(x).is_relative_to(folder) else x for x in words
    )
    for number, word in enumerate(printable(shlex.quote(word)) for word in shortened):
        last = number == len(words) - 1
        if len(lines[-1]) + len(word) + (0 if last else 2) > WIDTH and lines[-1].strip() != head.strip():
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += word if last else f"{word} "
    return lines


def listing(head: str, items: Iterable[str], most: int) -> list[str]:
    """List the items after `head` in at most `most` lines; the last one counts the items left out."""
    listed = list(items)
    for shown in range(len(listed), -1, -1):
        left = len(listed) - shown
        rest = [f"and {left} more"] if left else []
        lines = paragraph(head + ", ".join(listed[:shown] + rest), hanging="    ")
        if len(lines) <= most:
            return lines
    return lines[:most]
