"""Output of a command, as its reader takes it."""

from __future__ import annotations

import io

from rich.console import Console


def recording(terminal: bool = False) -> Console:
    """A console of the width that the commands have, whose output `printed` gives."""
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def unbroken(text: str) -> str:
    """On one line, so that text can be looked for wherever it was broken: paragraphs, JSON, command lines."""
    return " ".join(text.replace("\\\n", " ").split())
