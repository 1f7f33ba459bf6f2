"""Words for numbers in reports and errors, and text of others in them."""

from __future__ import annotations

import unicodedata


def counted(number: int, noun: str) -> str:
    """`1 example`, else `2 examples`. noun: in the singular; its plural ends in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def rate(done: int, seconds: float) -> str:
    """`12/s`, or `3.4 s each` below one per second."""
    per_second = done / max(1e-9, seconds)
    return f"{seconds / done:.1f} s each" if 0 < per_second < 1 else f"{per_second:.0f}/s"


def printable(text: str) -> str:
    """Return the text with Python's escapes for all but visible characters, spaces, tabs and ends of lines.

    A file or an exception may contain characters that move the cursor of a terminal, change the direction of writing,
    or have no encoding."""
    return "".join(x if x in "\t\n" or not _acts(x) else ascii(x)[1:-1] for x in text)


def _acts(character: str) -> bool:
    """True for controls, formats (also bidirectional ones), surrogates, and separators of lines."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
