"""Output of a command, as its reader takes it."""

from __future__ import annotations

import io

from verification.console import Console


def recording(terminal: bool = False) -> Console:
    """A console whose output `printed` gives."""
    return Console(io.StringIO(), terminal, colours=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def unbroken(text: str) -> str:
    """On one line, so that text can be looked for wherever it was broken: paragraphs, JSON, command lines."""
    return " ".join(text.replace("\\\n", " ").split())
