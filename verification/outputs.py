"""Whether what a run is to leave behind can be written: found out before it starts, not after hours."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_folder(argument: str, folder: Path) -> None:
    """Make the folder, and see that files can be made in it. Raises OSError naming the argument."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"argument {argument}: cannot write to {folder}: {error}") from error


def check_file(argument: str, file: Path) -> None:
    """See that the file can be written, and leave it as it is; its folder is made.

    Raises OSError naming the argument.
    """
    try:
        if file.exists():
            file.open("a").close()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=file.parent):
                pass
    except OSError as error:
        raise OSError(f"argument {argument}: cannot write {file}: {error}") from error
