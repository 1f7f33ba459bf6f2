"""Text of at most 80 columns. JSON and command lines are broken where a copy of them still works.

A word that is longer than a line stays whole: a path that is broken is of no use.
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

WIDTH = 80
_TOGETHER = re.compile(r'"(?:[^"\\]|\\.)*"(?:: )?')  # of JSON: a string, with the colon that makes it a name


def paragraph(text: str, indent: str = "", hanging: str | None = None) -> list[str]:
    """Each line of the text as lines of at most WIDTH; all but the first begin with `hanging`, by default `indent`."""
    hanging = indent if hanging is None else hanging
    found: list[str] = []
    for line in text.splitlines():
        found += textwrap.wrap(
            line, WIDTH, initial_indent=hanging if found else indent, subsequent_indent=hanging,
            break_long_words=False, break_on_hyphens=False,
        ) or [""]  # fmt: skip
    return found


def json_lines(head: str, record: Mapping[str, Any]) -> list[str]:
    """The record as JSON after `head`, broken between its values only: together the lines are JSON again."""
    whole = _TOGETHER.sub(lambda string: string[0].replace(" ", "\0"), json.dumps(dict(record)))
    return [line.replace("\0", " ") for line in paragraph(head + whole, hanging="  ")]


def command_lines(head: str, words: Sequence[str]) -> list[str]:
    """A command line after `head`, continued by backslashes as a shell reads it. Files beneath the working directory
    are named as seen from there."""
    lines, here = [head], Path.cwd()
    shortened = (
        os.path.relpath(x, here) if Path(x).is_absolute() and Path(x).is_relative_to(here) else x for x in words
    )
    for number, word in enumerate(map(shlex.quote, shortened)):
        last = number == len(words) - 1
        if len(lines[-1]) + len(word) + (0 if last else 2) > WIDTH and lines[-1].strip() != head.strip():
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += word if last else f"{word} "
    return lines


def listing(head: str, items: Iterable[str], most: int) -> list[str]:
    """The items after `head`, separated by commas, in at most that many lines; then how many more there are."""
    listed = list(items)
    for shown in range(len(listed), -1, -1):
        left = len(listed) - shown
        rest = [f"and {left} more"] if left else []
        lines = paragraph(head + ", ".join(listed[:shown] + rest), hanging="    ")
        if len(lines) <= most:
            return lines
    return lines[:most]
