"""Of which state of the code a record speaks."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the working tree


def commit() -> str | None:
    """Of the working tree, with "+" where it differs from it; None where there is no git."""
    try:
        run = [
            subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True, text=True, check=True, timeout=30)
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return run[0].stdout.strip() + ("+" if run[1].stdout.strip() else "")
